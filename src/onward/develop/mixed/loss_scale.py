"""Dynamic loss scaling: small gradients stay above zero in float16, large ones are noticed.

The backward pass begins with the state Variable ``loss_scale`` in place of 1, and so all gradients come out
that much larger; they are divided by it in float32 before anything else reads them. A step in which one of
them overflows is left out, and the scale shrinks; after many good steps in a row it grows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np

from onward.core.builder import Builder
from onward.core.errors import GraphError
from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.equations import Type
from onward.core.marks import ONES, SCALE_LOSS, UNSCALE
from onward.core.names import Names
from onward.core.program import Op, Phase, Program, Variable
from onward.core.transform import transform
from onward.core.walk import ancestors, substitute
from onward.core.words import Pass, UpdateType
from onward.develop.guard import skipping

_LEAST = 1.0


@transform(phase=Phase.BACKWARD)
def scale_loss(program: Program, scale: float) -> Program:
    """Begin the backward pass with ``loss_scale`` in place of 1, and divide the gradients by it.

    The loss itself stays as it is. What was the gradient of ``w`` is named ``scaled(grad(w))``.

    Source: Micikevicius et al., Mixed Precision Training, 2018, section 3.2.
    """
    names = Names(program.variables)
    gradients = dict.fromkeys(g for _, g in program.gradients)
    scaled = {g: replace(g, name=names.new(f"scaled({g.name})")) for g in gradients}
    base, seed = substitute(program, scaled), _seed(program)
    builder = Builder(base, made_by=Pass.UPDATE)
    loss_scale = builder.carry("loss_scale", lambda: jnp.float32(scale))
    for op in base.ops:
        builder.append(_begun_with(loss_scale, op) if op.outputs == seed.outputs else op)
    for g, s in scaled.items():
        builder.add(UNSCALE, [s, loss_scale], [g], _quotient(g.shape, g.dtype), UpdateType.ELEMENTWISE)
    return builder.program(gradients=program.gradients)


@transform(phase=Phase.UPDATE)
def adjust_scale(program: Program, growth_every: int, factor: float) -> Program:
    """Leave out steps that overflow; shrink the loss scale after each, let it grow after many good ones.

    Source: Micikevicius et al., Mixed Precision Training, 2018, section 3.2; the factor of 2 and the 2000
    good steps are those of its authors' libraries.
    """
    scale = next(op.inputs[0] for op in program.ops if op.type is SCALE_LOSS)
    guarded, finite = skipping(program)
    return _adjusted(guarded, scale, finite, growth_every, factor)


def with_adjusted_scale(
    program: Program, scale: Variable, finite: Variable, first: float, growth_every: int, factor: float
) -> Program:
    """A Program without a backward pass that keeps a loss scale, and adjusts it by whether all was finite."""
    kept = replace(
        program,
        state=(*program.state, scale),
        initializers=(*program.initializers, _initially(scale, first)),
    )
    return _adjusted(kept, scale, finite, growth_every, factor)


def _adjusted(
    program: Program, scale: Variable, finite: Variable, growth_every: int, factor: float
) -> Program:
    """The Program with the op that adjusts the scale, and the count of good steps in a row."""
    builder = Builder(program, program.ops, made_by=Pass.UPDATE)
    good = builder.carry("good_steps", lambda: jnp.int32(0))
    adjusted = _adjusting(growth_every, factor)
    reads, replaced = (scale, good, finite), (scale, good)
    builder.add("adjust_scale", reads, [], adjusted, UpdateType.BOOKKEEPING, replaces=replaced)
    return builder.program()


def _adjusting(growth_every: int, factor: float) -> Callable[..., list[Any]]:
    """The next scale and the number of good steps in a row, from these and whether all is finite."""

    def adjusted(scale: Any, good: Any, finite: Any) -> list[Any]:
        good = jnp.where(finite, good + 1, 0)
        grows = good >= growth_every
        larger = jnp.where(jnp.isfinite(scale * factor), scale * factor, scale)
        smaller = jnp.maximum(scale / factor, jnp.minimum(scale, _LEAST))
        return [jnp.where(finite, jnp.where(grows, larger, scale), smaller), jnp.where(grows, 0, good)]

    return adjusted


def _seed(program: Program) -> Op:
    """The op that the backward pass of the loss begins with: the ones that reach the gradients, made last."""
    reaching = ancestors(program, [g for _, g in program.gradients])
    seeds = [op for op in program.ops if op.type is ONES and op.made_by is Pass.BACKWARD]
    found = [op for op in seeds if not reaching.isdisjoint(op.outputs)]
    if not found:
        raise GraphError(f"Program {program.name!r} has no backward pass whose loss could be scaled.")
    return found[-1]


def _begun_with(loss_scale: Variable, seed: Op) -> Op:
    (v,) = seed.outputs
    body = body_of(lambda scale: [scale.astype(v.dtype)], loss_scale.aval)
    return replace(seed, type=SCALE_LOSS, inputs=(loss_scale,), body=body)


def _initially(v: Variable, value: float) -> Op:
    return Op("constant", (), (v,), body_of(lambda: [jnp.asarray(value, v.dtype)]), Pass.UPDATE)


@lru_cache(maxsize=1024)
def _quotient(shape: tuple[int, ...], dtype: Any) -> Body:
    return body_of(lambda g, scale: [(g / scale).astype(dtype)], Type(shape, dtype), Type((), np.float32))
