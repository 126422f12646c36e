"""The arithmetic of float8: a tensor's scale, its rounding, and a product that has its own gradient.

A tensor is divided by a scale, so that its largest finite number becomes the largest of the dtype, clipped
and rounded. What is not finite stays so: float8_e4m3fn has no infinity, and gives NaN in its place. XLA takes
the product of two float8 arrays as such where the device can (cuBLASLt on Hopper and newer GPUs); elsewhere
it converts them up, which is exact, and multiplies.

Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022, sections 3 and 4.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

FORWARD = np.dtype(jnp.float8_e4m3fn)
BACKWARD = np.dtype(jnp.float8_e5m2)
_MOST = {FORWARD: np.float32(448), BACKWARD: np.float32(57344)}
_LEAST = np.float32(2.0**-126)  # a smaller scale would be read as 0

Axes = tuple[int, ...]
Dimensions = tuple[tuple[Axes, Axes], tuple[Axes, Axes]]
"""The axes of both operands that a product sums over, and those that it runs along."""


@jax.jit
def largest(x: Any) -> Any:
    """The largest absolute value that is finite, in float32; no gradient passes."""
    x = lax.stop_gradient(x)
    return jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), initial=0).astype(jnp.float32)


@jax.jit
def forward_scale(amax: Any) -> Any:
    """The scale of an operand whose largest absolute value this is."""
    return _scale(amax, FORWARD)


@jax.jit
def scale_of_history(history: Any) -> Any:
    """The scale of an operand by the largest of the values that earlier steps had; 1 before the first."""
    return _scale(jnp.max(history), FORWARD)


@jax.jit
def remembered(amax: Any, history: Any) -> Any:
    """The history with the newest value in front, the oldest forgotten."""
    return jnp.concatenate([amax[None], history[:-1]])


def rounded(x: Any, scale: Any, dtype: np.dtype[Any]) -> Any:
    """A tensor over its scale, clipped to what float8 holds and rounded to it."""
    most = _MOST[dtype]
    y = x.astype(jnp.float32) / scale
    return jnp.where(jnp.isfinite(x), jnp.clip(y, -most, most), y).astype(dtype)


def _scale(amax: Any, dtype: np.dtype[Any]) -> Any:
    most = _MOST[dtype]
    return jnp.where(amax > 0, jnp.maximum(amax / most, _LEAST), np.float32(1))


@lru_cache(maxsize=1024)
def product(dimensions: Dimensions, precision: Any, dtype: np.dtype[Any]) -> Callable[..., Any]:
    """The product of two operands by their scales, its result of a dtype; their gradients are products too.

    Gradients that arrive are rounded to float8_e5m2 by their own largest value, and multiply the operands as
    they were rounded to float8_e4m3fn, which is all that is saved. Sums are float32, in the backward pass
    never in the faster mode of a GPU that sums in fewer bits.
    """

    def forward(a: Any, b: Any, of_a: Any, of_b: Any) -> tuple[Any, Any]:
        low_a, low_b = rounded(a, of_a, FORWARD), rounded(b, of_b, FORWARD)
        result = lax.dot_general(low_a, low_b, dimensions, precision, preferred_element_type=np.float32)
        return (result * of_a * of_b).astype(dtype), (low_a, low_b, of_a, of_b)

    def backward(saved: Any, g: Any) -> Any:
        low_a, low_b, of_a, of_b = saved
        of_g = _scale(largest(g), BACKWARD)
        low_g = rounded(g, of_g, BACKWARD)
        grad_a = _transposed(low_g, low_a.ndim, low_b, dimensions, is_left=True)
        swapped = tuple(pair[::-1] for pair in dimensions)
        grad_b = _transposed(low_g, low_b.ndim, low_a, swapped, is_left=False)
        found = (grad_a * of_g * of_b).astype(dtype), (grad_b * of_g * of_a).astype(dtype)
        return *found, jnp.zeros_like(of_a), jnp.zeros_like(of_b)

    scaled = jax.custom_vjp(lambda *operands: forward(*operands)[0])
    scaled.defvjp(forward, backward)
    return scaled


def _transposed(g: Any, ndim: int, other: Any, dimensions: Any, is_left: bool) -> Any:
    """The gradient of an operand with ``ndim`` axes: that of the result times the other operand.

    Args:
        g: the gradient of the result, whose axes are those that the product runs along, then those of the
            left operand alone, then those of the right one.
        ndim: the number of axes of the operand.
        other: the other operand.
        dimensions: those of the product, the operand's axes first.
        is_left: whether it is the left operand.
    """
    (contract, theirs), (batch, batch_of_other) = dimensions
    own = [i for i in range(ndim) if i not in (*contract, *batch)]
    others = [i for i in range(other.ndim) if i not in (*theirs, *batch_of_other)]
    begin = len(batch) + (len(own) if is_left else 0)
    summed = tuple(range(begin, begin + len(others)))
    numbers = ((summed, tuple(others)), (tuple(range(len(batch))), tuple(batch_of_other)))
    found = lax.dot_general(g, other, numbers, lax.Precision.HIGHEST, preferred_element_type=np.float32)
    by_theirs = [contract[i] for i in np.argsort(theirs)]
    return jnp.transpose(found, [*map(int, np.argsort([*batch, *own, *by_theirs]))])
