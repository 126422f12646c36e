"""Plain weights of a State whose weights are adapted: the factors multiplied out and added."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from onward.core.check import expect_program
from onward.core.errors import ArgumentError
from onward.core.program import Op, Program
from onward.core.structure import describe
from onward.derive.low_rank.low_rank import adapters_in
from onward.derive.low_rank.readers import Axes
from onward.execute.state import State


def merge_low_rank(program: Program, state: State) -> Any:
    """The parameters with all factors multiplied out and added, in the containers they came in.

    They are plain weights for the function as it was before ``low_rank``, in the dtypes in which they were
    traced. A weight that is kept in int8 or bfloat16 is taken as it is computed with.

    Args:
        program: the Program that ``low_rank`` made, or what was made of it: minimized, ``for_test``,
            replicated.
        state: a State of its step.

    Raises:
        ArgumentError: a Program that is not adapted, or something else than a State.
        RecipeError: the Program was not traced, or its ops were changed by hand.
        StateError: a State that was given to a step before.
        UnknownNameError: a State of another Program.

    Source: Hu et al., LoRA: Low-Rank Adaptation of Large Language Models, 2021, section 4.1.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> def loss(params, x):
        ...     return jnp.mean((x @ params["w"]) ** 2)
        >>> params, x = {"w": jnp.ones((6, 4))}, jnp.ones((8, 6))
        >>> program = ow.SGD(0.01).minimize(ow.low_rank(loss, params, x, rank=2))
        >>> step = ow.compile(program)
        >>> state, _ = step(step.init(params), x)
        >>> plain = ow.merge_low_rank(program, state)
        >>> plain["w"].shape, f"{loss(params, x):.1f}", bool(loss(plain, x) < 36)
        ((6, 4), '36.0', True)
    """
    expect_program(program, "merge_low_rank")
    if not isinstance(state, State):
        raise ArgumentError(
            f"merge_low_rank: the second argument is a State of the Program's step, not {describe(state)}: "
            "ow.merge_low_rank(program, state)."
        )
    found = adapters_in(program)
    if found is None or program.signature is None:
        raise ArgumentError(
            f"merge_low_rank: {program.name!r} has no factors; expected a Program that ow.low_rank made. The "
            "parameters of others are state.parameters."
        )
    state.expect_whole()
    given, adapters = found
    merged = {}
    for adapter in adapters:
        v = adapter.weight
        plain = _held(program, v.name, state) if v.name in state.layout.held else state[v.name]
        merged[v.name] = _merged(
            plain, state[adapter.a.name], state[adapter.b.name], adapter.axes, given.scale
        )
    wanted = program.signature.parameters
    return wanted.unflatten(
        merged[v.name] if v.name in merged else jnp.copy(state[v]) for v in wanted.variables
    )


def _held(program: Program, name: str, state: State) -> Any:
    """A weight that is kept in another form, as it is computed with."""
    op: Op = next(op for op in program.ops if any(v.name == name for v in op.outputs))
    (value,) = op.body(*(state[v.name] for v in op.inputs))
    return value


@partial(jax.jit, static_argnames=("axes", "scale"))
def _merged(weight: Any, a: Any, b: Any, axes: Axes, scale: float) -> Any:
    """The weight and the product of its factors, computed in their dtype."""
    many, inputs, outputs = (
        [weight.shape[i] for i in chosen] for chosen in (axes.batch, axes.inputs, axes.outputs)
    )
    rank = a.shape[-1]
    left = jnp.reshape(a, (*many, prod(inputs), rank))
    right = jnp.reshape(b, (*many, rank, prod(outputs)))
    product = jnp.matmul(left, right, precision="highest")
    order = [*axes.batch, *axes.inputs, *axes.outputs]
    laid = jnp.transpose(
        jnp.reshape(product, (*many, *inputs, *outputs)), [order.index(i) for i in range(len(order))]
    )
    return (weight.astype(a.dtype) + scale * laid).astype(weight.dtype)
