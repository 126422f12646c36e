"""Compute in 16 or 8 bits, keep in 32: the dtype of each op of the forward pass by its role.

    mixed_precision(optimizer.minimize(loss, ...), "bfloat16")

Parameters, slots and what the function returns keep their dtypes; where an op computes in another one, a
``cast`` stands before it. The backward pass is derived of that, so it computes in the same dtypes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any
from warnings import warn

import jax.numpy as jnp
import numpy as np

from onward.core.check import expect_program
from onward.core.errors import ArgumentError, GraphError, HyperparameterError
from onward.core.program import Applied, Phase, Program, Recipe
from onward.core.recipe import build, recipe_of, whole_types
from onward.core.source import user_level
from onward.core.structure import expect_count, is_number, is_word
from onward.core.transform import transform
from onward.core.walk import Where, listed
from onward.core.words import Pass
from onward.derive.backward import append_backward
from onward.derive.update.foreign import append_foreign_update
from onward.derive.update.groups import Routing
from onward.derive.update.precision import dtype_word
from onward.derive.update.update import append_update, optimizer_of
from onward.develop.guard import guard
from onward.develop.mixed.loss_scale import adjust_scale, scale_loss
from onward.develop.mixed.products import Float8, is_test
from onward.develop.mixed.roles import Lowering, kept_variables
from onward.develop.mixed.within import has_gain
from onward.develop.over_batch.bending import expect_proportional

_DTYPES = ("bfloat16", "float16", "float8")
_SCALINGS = ("current", "delayed")
_UPDATES = (append_update, append_foreign_update)

_NOTHING = (
    "mixed_precision: nothing of {name!r} is computed in {dtype}: {why}, or leave mixed_precision away."
)
_OTHER = "only float32 is lowered, and {what} computes in {dtype}. Trace it with float32 parameters and data"
_WITHIN = (
    "its products stand in what {op}{at} runs, which stays in float32. Write them outside of while loops, "
    "branches and functions with a gradient rule of their own"
)


def mixed_precision(
    program: Program,
    dtype: str = "bfloat16",
    *,
    keep: Where | Iterable[Where] = (),
    scale: float | None = None,
    growth_every: int = 2000,
    factor: float = 2.0,
    where: Where | Iterable[Where] | None = None,
    scaling: str | None = None,
    history: int | None = None,
) -> Program:
    """Compute most of the forward and backward pass in 16 or 8 bits; parameters and slots stay float32.

    Matrix products and convolutions take and give 16 bits (hardware adds up in float32). Elementwise ops,
    ops of shape and maxima follow what they read, parameters and numbers beside it included; next to a
    float32 activation they compute in float32. All else, such as exponentials, sums, norms' statistics,
    softmax, losses, branches, while loops and functions with a gradient rule of their own (but for relu),
    computes in float32, and so does what only such ops read. What ``jax.checkpoint`` and ``scan`` run is
    looked into: a loop carries a value in 16 bits where each turn is given it so and makes it so, and adds up
    the gradient of a weight that all turns read in float32. A Variable is cast once, however often it is
    read, in a loop once a turn. The Program is traced and derived again; ``for_test`` of it computes in the
    same dtypes.

    In float16 small gradients would be 0, so the backward pass begins with ``loss_scale`` in place of 1:
    gradients are divided by it before anything reads them, a step in which they overflow is left out and
    counted in ``skipped``, as ``guard`` does, and the scale shrinks; it grows after many good steps in a row.

    With ``"float8"`` all is as in bfloat16, but that chosen products read operands in float8_e4m3fn, and
    their gradients' products these and gradients in float8_e5m2. Each tensor is divided by a scale, its
    largest finite number over the dtype's, and clipped; what is not finite shows as NaN or infinity.
    Sums are float32.
    Convolutions stay in bfloat16. On devices, and in micro-batches, a scale is that of the part at hand.
    ``for_test`` scales by the tensor at hand.

    Args:
        program: a Program that was traced, at any stage, replicated or not. For float16 it is minimized.
        dtype: ``"bfloat16"``, ``"float16"`` or ``"float8"``.
        keep: what stays in float32: names, patterns (``"head/*"``), Variables or predicates of activations,
            for the ops that compute them, or of parameters and data, for the ops that read them.
        scale: the first ``loss_scale``; 2**15 unless given. Given for bfloat16, it is scaled as well.
        growth_every: after how many good steps in a row the scale grows.
        factor: by how much it grows and shrinks, above 1.
        where: for float8, which products: names, patterns, Variables or predicates of their results or of the
            parameters that they read; ``"*"`` is all. Unless given, those that read a parameter and that
            another product follows: the last one, which gives logits, stays in bfloat16, and so do products
            of activations.
        scaling: for float8, ``"current"``, by the tensor at hand, which is the default; or ``"delayed"``, by
            the largest values of the steps before, kept as state, which need not be known before the product.
            Gradients are scaled by the tensor at hand in both.
        history: of how many steps delayed scaling knows; 16 unless given.

    Raises:
        ArgumentError: another dtype or scaling, or what is for float8 only given for another dtype.
        HyperparameterError: a scale, factor or history out of range.
        GraphError: it is in mixed precision already, or in float16 and not minimized, or guarded; or it has
            no product to take in float8.
        RecipeError: the Program was not traced, or its ops were changed by hand.
        UnknownNameError: ``keep`` or ``where`` names nothing.

    Warns:
        UserWarning: nothing is lowered, for the Program computes in float64.

    Source: Micikevicius et al., Mixed Precision Training, 2018, sections 3.1 to 3.3; of float8,
    Micikevicius et al., FP8 Formats for Deep Learning, 2022, with delayed scaling as in NVIDIA's Transformer
    Engine.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> def loss(w, x):
        ...     return jnp.mean(jnp.tanh(x @ w["a"]) @ w["b"])
        >>> w = {"a": jnp.ones((3, 4)), "b": jnp.ones(4)}
        >>> program = mixed_precision(ow.Adam(1e-3).minimize(loss, w, jnp.ones((8, 3))), "bfloat16")
        >>> program["bfloat16(a)"].type, program["tanh"].type, program["grad(a)"].type, program.loss.type
        ('bfloat16[3,4]', 'bfloat16[8,4]', 'float32[3,4]', 'float32[]')
    """
    expect_program(program, "mixed_precision")
    dtype = dtype_word(dtype)
    if not is_word(dtype, _DTYPES):
        raise ArgumentError(
            f"mixed_precision: dtype is {dtype!r}; expected 'bfloat16', 'float16' or 'float8'."
        )
    float8 = _float8(dtype, where, scaling, history)
    recipe = recipe_of(program, f"in {dtype}", "Compute in that dtype yourself")
    if recipe.of(lowered):
        raise GraphError(
            f"Program {program.name!r} is in mixed precision already; it is asked for only once."
        )
    loss_scaling = _loss_scaling(dtype, scale, growth_every, factor)
    if loss_scaling is not None:
        _expect_updates(program, recipe)
        larger = f"the loss is scaled, by {loss_scaling.scale:g} at first, and they with it"
        expect_proportional(program, larger, "Take 'bfloat16', which needs no scale.")
    scaled = replace(
        recipe, steps=tuple(step for old in recipe.steps for step in (old, *_after(old, loss_scaling)))
    )
    lowering = Applied(lowered, (dtype, tuple(listed(keep)), float8), {}, Phase.PRECISION)
    result = build(scaled.including(lowering), whole_types(program))
    if not listed(keep) and (why := _why_nothing(result, np.dtype(jnp.dtype(held_in(dtype))))):
        warn(_NOTHING.format(name=program.name, dtype=dtype, why=why), UserWarning, user_level())
    return result


def _why_nothing(program: Program, dtype: np.dtype[Any]) -> str:
    """Why nothing is computed in a dtype; empty where something is, or where there is no product."""
    passes = [op for op in program.ops if op.made_by is not Pass.UPDATE]  # an optimizer may count in float64
    products = [op for op in passes if op.made_by is Pass.FORWARD and has_gain(op)]
    dtypes = {v.dtype for op in passes for v in (*op.inputs, *op.outputs)}
    dtypes |= {v.dtype for op in passes for call in op.body.calls_within for v in call.results}
    if dtype in dtypes:
        return ""
    if np.dtype(np.float64) in dtypes:
        return _OTHER.format(what="it", dtype="float64")
    if not products:
        return ""
    op = products[0]
    if op.subprograms:
        return _WITHIN.format(op=op.type, at=op.at)
    read = (v.dtype for v in op.inputs if v.is_float and v.dtype != np.float32)
    return _OTHER.format(what=f"{op.type}{op.at}", dtype=next(read, op.outputs[0].dtype))


def held_in(dtype: str) -> str:
    """The dtype of the activations of a precision: products in float8 round what they read themselves."""
    return "bfloat16" if dtype == "float8" else dtype


@transform(phase=Phase.PRECISION)
def lowered(program: Program, dtype: str, keep: tuple[Where, ...], float8: Float8 | None = None) -> Program:
    """The forward pass, each op in the dtype of its role; see ``mixed_precision``."""
    if program.code is not None:
        raise GraphError(
            f"mixed_precision: {program.name!r} was loaded from {program.code.file}, in which every op has "
            "its dtype. Lower the precision of the Program before save."
        )
    kept = kept_variables(program, keep, strict=not is_test(program))
    return Lowering(program, np.dtype(jnp.dtype(held_in(dtype))), kept, float8).program()


@dataclass(frozen=True)
class _Scaling:
    """The options of loss scaling."""

    scale: float
    growth_every: int
    factor: float

    def __post_init__(self) -> None:
        for name, value, least in (("scale", self.scale, 0), ("factor", self.factor, 1)):
            if not is_number(value) or not math.isfinite(value) or value <= least:
                raise HyperparameterError(
                    f"mixed_precision: {name} is {value!r}; expected a number above {least}."
                )
        what = "mixed_precision: growth_every"
        expect_count(self.growth_every, what, 1, "a number of steps", HyperparameterError)


def _float8(dtype: str, where: Any, scaling: str | None, history: int | None) -> Float8 | None:
    """The wishes for float8; None for another dtype."""
    given = {"where": where, "scaling": scaling, "history": history}
    if dtype != "float8":
        if words := ", ".join(key for key, value in given.items() if value is not None):
            raise ArgumentError(f'mixed_precision: {words} is for "float8", and dtype is {dtype!r}.')
        return None
    scaling = "current" if scaling is None else scaling
    if not is_word(scaling, _SCALINGS):
        raise ArgumentError(f"mixed_precision: scaling is {scaling!r}; expected 'current' or 'delayed'.")
    if history is not None and scaling != "delayed":
        raise ArgumentError(f'mixed_precision: history is for scaling="delayed", and it is {scaling!r}.')
    count = 16 if history is None else history
    expect_count(count, "mixed_precision: history", 1, "a number of steps", HyperparameterError)
    return Float8(None if where is None else tuple(listed(where)), scaling, count)


def _loss_scaling(dtype: str, scale: float | None, growth_every: int, factor: float) -> _Scaling | None:
    """How the loss is scaled; None where it is not."""
    found = _Scaling(2.0**15 if scale is None else scale, growth_every, factor)
    return found if dtype == "float16" or scale is not None else None


def _after(step: Applied, scaling: _Scaling | None) -> tuple[Applied, ...]:
    """The transforms that loss scaling adds after a transform of the recipe."""
    if scaling is not None and step.function is append_backward:
        return (Applied(scale_loss, (scaling.scale,), {}, step.phase),)
    if scaling is not None and step.function in _UPDATES:
        return (Applied(adjust_scale, (scaling.growth_every, scaling.factor), {}, step.phase),)
    return ()


def _expect_updates(program: Program, recipe: Recipe) -> None:
    """Raise ``GraphError`` unless the loss of a Program can be scaled: to train it has to be minimized."""
    made = [step.function for step in recipe.steps]
    if recipe.origin.training and not (append_backward in made and any(f in _UPDATES for f in made)):
        raise GraphError(
            f"Program {program.name!r} is not minimized, and in float16 its gradients would be 0 where they "
            'are small. Minimize first: mixed_precision(optimizer.minimize(loss, ...), "float16"); or take '
            '"bfloat16", or a Program for tests: for_test(program).'
        )
    for step in recipe.of(append_update):
        Routing.of(optimizer_of(step), program.parameters).expect_gradients_only(
            "again, and its gradients, which nothing scales, would be 0 in float16 where they are small. "
            'Take "bfloat16".'
        )
    if guard in made:
        raise GraphError(
            f"Program {program.name!r} is guarded, and mixed precision in float16 leaves out steps that "
            "overflow by itself. Leave guard away."
        )
