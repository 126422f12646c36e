"""Whether two executables of one Program compute the same, but for rounding.

How far rounding carries depends on the Program: Adam makes a whole step of a gradient that is nearly zero. So
the measure is the executable beside itself: the distance of its results when its floats change in their last
bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.program import Program
from onward.core.variable import holds_keys, limits_of

_TIMES, _LEAST = 32.0, 16.0  # the distance that rounding makes, and the least in units of the last place


def rounding_of(program: Program) -> float:
    """The largest last place, relative to 1, of the floats that a Program computes with; 0 without any."""
    dtypes = {v.dtype for v in program.variables.values() if v.is_float}
    return max((float(limits_of(d).eps) for d in dtypes), default=0.0)


def agree(
    found: Sequence[Any], expected: Sequence[Any], rounded: Sequence[Sequence[Any]], rounding: float
) -> bool:
    """Whether results are the expected ones, as far apart as rounding explains.

    Args:
        found: the arrays of one executable.
        expected: those of another.
        rounded: those of the other after its inputs were changed in the last bit, some times.
        rounding: the last place of the floats in between.

    Example:
        >>> ones, moved = [np.ones(3)], [np.ones(3) + 1e-6]
        >>> agree([np.ones(3) + 3e-6], ones, [moved], 1e-7), agree([np.ones(3) + 1e-3], ones, [moved], 1e-7)
        (True, False)
    """
    if len(found) != len(expected):
        return False
    rows = zip(found, expected, *rounded, strict=True)
    return all(_is_near(a, b, others, rounding) for a, b, *others in rows)


def _is_near(found: Any, expected: Any, rounded: Sequence[Any], rounding: float) -> bool:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    is_exact = holds_keys(found.dtype) or not jnp.issubdtype(found.dtype, jnp.inexact)
    a, b, *others = (_numbers(x) for x in (found, expected, *rounded))
    finite = np.isfinite(b)
    if not np.array_equal(finite, np.isfinite(a)) or not np.array_equal(
        a[~finite], b[~finite], equal_nan=True
    ):
        return False
    spread = max((_distance(x, b, finite & np.isfinite(x)) for x in others), default=0.0)
    least = 0.0 if is_exact else _LEAST * rounding * float(np.linalg.norm(b[finite]))
    return _distance(a, b, finite) <= _TIMES * spread + least


def _distance(a: np.ndarray, b: np.ndarray, where: np.ndarray) -> float:
    return float(np.linalg.norm(a[where] - b[where]))


def _numbers(x: Any) -> np.ndarray:
    """As float64, or complex128, in one row; of random keys the numbers inside."""
    if holds_keys(x.dtype):
        return np.asarray(jax.random.key_data(x)).astype(np.float64).ravel()
    return np.asarray(x).astype(np.complex128 if np.iscomplexobj(x) else np.float64).ravel()
