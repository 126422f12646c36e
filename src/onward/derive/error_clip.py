"""Gradients of activations that are kept in range on their way back, one activation at a time.

``clip_error`` stands in a network; ``error_clip`` puts it behind activations of a Program by their names.
What changes gradients of parameters after the backward pass are gradient rules, such as ``ClipByValue``.

>>> import jax, jax.numpy as jnp
>>> jax.grad(lambda x: jnp.sum(clip_error(x, 0.5) * jnp.array([3.0, 0.1])))(jnp.ones(2)).tolist()
[0.5, 0.10000000149011612]
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.errors import GraphError, HyperparameterError
from onward.core.jaxprs import Type, body_of
from onward.core.names import Names
from onward.core.placement import expect_one_device
from onward.core.program import Op, Program, Variable
from onward.core.transform import transform
from onward.core.walk import Where, listed, select
from onward.core.words import Pass
from onward.define.layer.base import layer


@layer
def clip_error(x: Any, max_value: float, *, name: str | None = None) -> Any:
    """The array as it is; on the way back its gradient is moved into ``[-max_value, max_value]``.

    A complex gradient is shortened. The gradient of a mean over a batch is the smaller the longer the batch:
    so is what one device of several, or one of several micro-batches, finds larger.

    Source: Graves, Generating Sequences With Recurrent Neural Networks, 2013, section 2.1.

    Args:
        x: an array of floats of any shape.
        max_value: a number, at least 0.
        name: as for every layer.

    Returns:
        An array of the shape and dtype of x.

    Raises:
        HyperparameterError: ``max_value`` is negative or not finite.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> step = ow.compile(ow.SGD(1.0).minimize(lambda w: 3 * clip_error(w, 0.5), jnp.float32(1)))
        >>> state, out = step(step.init(jnp.float32(1)))
        >>> float(out.loss), float(state.parameters)
        (3.0, 0.5)
    """
    return _clipped(jnp.asarray(x), _checked(max_value))


@transform
def error_clip(program: Program, where: Where | Iterable[Where], max_value: float) -> Program:
    """Move the gradients of some activations into ``[-max_value, max_value]`` on their way back.

    Adds an op ``error_clip`` behind each of them, which later ops read in place of it; the activation keeps
    its name, and its gradient is the one in range. It comes before the backward pass. A Program that trains
    nothing stays as it is.

    Source: Graves, Generating Sequences With Recurrent Neural Networks, 2013, section 2.1; early Paddle has
    it as ``ErrorClipByValue`` of a variable.

    Args:
        program: a forward Program.
        where: the activations, by name, pattern or predicate.
        max_value: a number, at least 0.

    Raises:
        UnknownNameError: a choice that picks no activation of floats.
        HyperparameterError: ``max_value`` is negative or not finite.
        GraphError: there is a backward pass already, or the loss is picked.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.trace(lambda w, x: jnp.sum(jnp.tanh(w * x) * 3), jnp.ones(2), jnp.ones(2))
        >>> program = error_clip(program, "tanh", 0.5)
        >>> [op.type for op in program.ops]
        ['mul', 'tanh', 'error_clip', 'mul', 'reduce_sum']
        >>> step = ow.compile(ow.SGD(0.1).minimize(program), fetch=["grad(tanh)"])
        >>> step(step.init(jnp.ones(2)), jnp.ones(2))[1]["grad(tanh)"].tolist()
        [0.5, 0.5]
    """
    limit = _checked(max_value)
    expect_one_device(program, "an error clip")
    if any(op.made_by is not Pass.FORWARD for op in program.ops):
        raise GraphError(
            f"Program {program.name!r} has a backward pass already. Clip errors before it: "
            "optimizer.minimize(error_clip(trace(loss, params, *data), where, max_value))."
        )
    if program.recipe is not None and not program.recipe.origin.training:
        return program
    made = [v for op in program.ops for v in op.outputs if jnp.issubdtype(v.dtype, np.inexact)]
    picked = select(made, listed(where), "error_clip")
    if program.loss is not None and program.loss in picked:
        raise GraphError(
            f"error_clip picks {program.loss.name!r}, the loss, whose gradient is 1. Leave it out."
        )
    return replace(program, ops=_behind(program, set(picked), limit))


def _behind(program: Program, picked: set[Variable], limit: float) -> tuple[Op, ...]:
    """The ops of a Program, with one behind each activation that is picked."""
    names = Names(program.variables)
    instead: dict[Variable, Variable] = {}
    ops: list[Op] = []
    for op in program.ops:
        ops.append(replace(op, inputs=tuple(instead.get(v, v) for v in op.inputs)))
        for v in (v for v in op.outputs if v in picked):
            instead[v] = replace(v, name=names.new(f"error_clip({v.name})"))
            body = body_of(lambda x: [_clipped(x, limit)], Type(v.shape, v.dtype))
            ops.append(Op("error_clip", (v,), (instead[v],), body, scope=op.scope, source=op.source))
    return tuple(ops)


def _checked(max_value: Any) -> float:
    """The bound as a number that is known while tracing."""
    is_number = isinstance(max_value, int | float | np.number) and not isinstance(max_value, bool)
    if not is_number or not math.isfinite(max_value) or max_value < 0:
        raise HyperparameterError(
            f"error_clip: max_value is {max_value!r}; expected a finite number of at least 0."
        )
    return float(max_value)


def _same(x: Any, max_value: float) -> Any:
    return x


def _forward(x: Any, max_value: float) -> tuple[Any, None]:
    return x, None


def _backward(max_value: float, _: None, gradient: Any) -> tuple[Any]:
    if jnp.iscomplexobj(gradient):
        size = jnp.abs(gradient)
        return (gradient * jnp.minimum(1, max_value / jnp.maximum(size, np.finfo(size.dtype).tiny)),)
    return (jnp.clip(gradient, -max_value, max_value),)


_same.__name__ = "error_clip"  # the type of its op in a traced network
_clipped = jax.custom_vjp(_same, nondiff_argnums=(1,))
_clipped.defvjp(_forward, _backward)
