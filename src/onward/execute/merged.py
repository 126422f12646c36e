"""Plain weights of a State whose weights are adapted: the factors multiplied out and added."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from onward.core.check import expect_program
from onward.core.errors import ArgumentError
from onward.core.program import Op, Program
from onward.core.structure import describe
from onward.derive.low_rank.low_rank import adapters_in, weights_made_of_fewer_bits
from onward.derive.low_rank.readers import Axes
from onward.execute.lying import together
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
        RecipeError: its ops were changed by hand, or it was loaded from a file.
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
    merged = multiplied_out(program, state, {})
    if merged is None:
        raise ArgumentError(
            f"merge_low_rank: {program.name!r} has no factors; expected a Program that ow.low_rank made. The "
            "parameters of others are state.parameters."
        )
    return merged


def multiplied_out(program: Program, state: State, others: Mapping[str, Any]) -> Any | None:
    """The parameters of a Program with factors in their containers; None for one without factors.

    Args:
        program: the Program.
        state: a State of its step.
        others: values to take in place of those of the State, by name.
    """
    found = None if program.recipe is None else adapters_in(program)
    if found is None or program.signature is None:
        return None
    state.expect_whole()

    def value(name: str) -> Any:
        return others[name] if name in others else state[name]

    given, adapters = found
    made: Mapping[str, Op] | None = None
    merged = {}
    for adapter in adapters:
        name = adapter.weight.name
        if name in state.layout.position:
            plain = value(name)
        else:
            made = made or weights_made_of_fewer_bits(program)
            (plain,) = made[name].body(*(state[v.name] for v in made[name].inputs))
        arrays = together([plain, value(adapter.a.name), value(adapter.b.name)])
        merged[name] = _merged(*arrays, adapter.axes, given.scale)
    wanted = program.signature.parameters
    names = (v.name for v in wanted.variables)
    values = [merged[name] if name in merged else jnp.copy(value(name)) for name in names]
    return wanted.unflatten(together(values))


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
