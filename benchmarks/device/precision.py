"""How far a device may be from float64: so many roundings of the largest number, by dtype and by product.

A product of matrices or a convolution of float32 is rounded as the device's default precision says: a CPU
computes it in float32, a GPU in TensorFloat-32 (10 bits), a TPU in bfloat16 (7 bits), unless
``jax_default_matmul_precision`` says otherwise. All else is rounded as its dtype is.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

ROUNDOFF = {"float32": 2.0**-24, "tensorfloat32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_DEFAULT = {"cpu": "float32", "gpu": "tensorfloat32", "tpu": "bfloat16"}
_SAID = {
    "highest": "float32",
    "float32": "float32",
    "high": "tensorfloat32",
    "bfloat16": "bfloat16",
    "tensorfloat32": "tensorfloat32",
    "default": None,
}
FEW, MANY = 64, 256
"""Roundings that a function of few steps, and a network trained for three steps, may be off by."""


def product_precision() -> str:
    """The format in which this device multiplies matrices of float32."""
    said = _SAID.get(str(jax.config.jax_default_matmul_precision))
    return said or _DEFAULT.get(jax.default_backend(), "bfloat16")


def bound(roundings: int, multiplies: bool, computes_in: str = "float32") -> float:
    """The largest error that is allowed, over the largest number."""
    own = ROUNDOFF[computes_in]
    return roundings * max(own, ROUNDOFF[product_precision()] if multiplies else own)


def error(found: Any, expected: Any, slack: float = 0.0) -> float:
    """By how much more than ``slack`` two arrays differ, over the largest number expected.

    Infinite where one is not finite and the other not the same.
    """
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    if found.shape != expected.shape:
        return float("inf")
    apart = np.abs(found - expected).max(initial=0.0)
    largest = np.abs(expected).max(initial=0.0)
    if not (np.isfinite(apart) and np.isfinite(largest)):
        return 0.0 if np.array_equal(found, expected, equal_nan=True) else float("inf")
    beyond = max(0.0, float(apart) - slack)
    return beyond / float(largest) if largest else beyond
