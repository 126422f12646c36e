"""The frozen weight in fewer bits: rounded to bfloat16, or to whole numbers of 8 bits with a scale."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp

from onward.core.jaxprs.body import body_of
from onward.core.marks import DEQUANTIZE
from onward.core.program import Op, Variable
from onward.core.words import Kind

BASES = ("bfloat16", "int8")
_LARGEST = 127  # so that minus it is held as well


def held(weight: Variable, base: str, inputs: Sequence[int], name: Any) -> tuple[Op, Op]:
    """The initializer that makes what is kept of a weight, and the op that makes the weight of that.

    Args:
        weight: the weight, as it is given.
        base: ``"bfloat16"`` or ``"int8"``.
        inputs: its axes that share a scale.
        name: gives a name that is free.
    """
    body = body_of(partial(_KEPT[base], inputs=tuple(inputs)), weight.aval)
    words = (base, "scale")[: len(body.out_avals)]
    kept = tuple(
        Variable(name(f"{weight.name}/{word}"), tuple(t.shape), t.dtype, Kind.FROZEN)
        for word, t in zip(words, body.out_avals, strict=True)
    )
    back = body_of(partial(_weight, dtype=weight.dtype), *(v.aval for v in kept))
    return Op("quantize", (weight,), kept, body), Op(DEQUANTIZE, kept, (weight,), back, again=True)


def _rounded(weight: Any, inputs: tuple[int, ...]) -> list[Any]:
    return [weight.astype(jnp.bfloat16)]


def _quantized(weight: Any, inputs: tuple[int, ...]) -> list[Any]:
    """Whole numbers and the scale of each output: the largest number over 127; 1 where all are 0."""
    wide = weight.astype(jnp.promote_types(weight.dtype, jnp.float32))
    largest = jnp.max(jnp.abs(wide), axis=inputs, keepdims=True)
    scale = jnp.where(largest > 0, largest / _LARGEST, 1)
    return [jnp.round(wide / scale).astype(jnp.int8), scale]


def _weight(kept: Any, scale: Any = None, *, dtype: Any) -> list[Any]:
    """The numbers that stand for the weight wherever it is read."""
    return [(kept if scale is None else kept.astype(scale.dtype) * scale).astype(dtype)]


_KEPT = {"bfloat16": _rounded, "int8": _quantized}
