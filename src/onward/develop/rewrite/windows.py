"""The largest number in each window, and its gradient, as comparisons of whole arrays.

XLA's CPU compiler makes of ``select_and_scatter``, the gradient of max pooling, a loop over single numbers.
Where windows touch and do not overlap, the first, second, ... numbers of all windows are arrays of the
result's shape: two of them are compared at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.patterns import Windows, windows_of

_LARGEST_WINDOW = 16  # numbers in a window, above which so many comparisons cost more than a loop


def touching_windows(body: Body) -> Body | None:
    """The same result as ``reduce_window`` or as its gradient; None where this is something else.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from onward.core.jaxprs.body import body_of
        >>> def pool(x):
        ...     return [jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2,), (2,), "VALID")]
        >>> touching_windows(body_of(pool, jnp.ones(5)))(jnp.arange(5.0))
        [Array([1., 3.], dtype=float32)]
    """
    windows = windows_of(body)
    if windows is None or not 1 < prod(windows.sizes) <= _LARGEST_WINDOW or not body.out_avals[0].size:
        return None
    rewritten = _gradient(windows) if windows.backward else _largest(windows)
    return body_of(rewritten, *body.in_types)


def _largest(windows: Windows) -> Any:
    def largest(x: Any) -> list[Any]:
        found, *others = _numbers(_by_window(x, windows.sizes), windows.sizes)
        for other in others:
            found = jnp.maximum(found, other)
        return [found]

    return largest


def _gradient(windows: Windows) -> Any:
    """Each gradient goes to the first of its window's largest numbers, as with ``select_and_scatter``."""

    def gradient(*given: Any) -> list[Any]:
        g, x = given[windows.gradient], given[1 - windows.gradient]
        cut = _by_window(x, windows.sizes)
        chosen = _spaced(_first_largest(_numbers(cut, windows.sizes)))
        place = _spaced(np.arange(prod(windows.sizes)).reshape(windows.sizes), before=True)
        parts = jnp.where(chosen == place, _spaced(g), jnp.zeros((), g.dtype))
        whole = parts.reshape([n * size for n, size in zip(g.shape, windows.sizes, strict=True)])
        rest = [(0, n - m, 0) for n, m in zip(x.shape, whole.shape, strict=True)]
        return [lax.pad(whole, jnp.zeros((), g.dtype), rest)]

    return gradient


def _by_window(x: Any, sizes: Sequence[int]) -> Any:
    """[n, ...] as [windows, size, ...], an axis more for each; what no window covers is left out."""
    counts = [n // size for n, size in zip(x.shape, sizes, strict=True)]
    covered = lax.slice(x, [0] * x.ndim, [n * size for n, size in zip(counts, sizes, strict=True)])
    return covered.reshape([n for pair in zip(counts, sizes, strict=True) for n in pair])


def _numbers(cut: Any, sizes: Sequence[int]) -> list[Any]:
    """The first numbers of all windows, then the second ones, and so on."""
    places = product(*map(range, sizes))
    return [cut[tuple(i for at in place for i in (slice(None), at))] for place in places]


def _first_largest(numbers: Sequence[Any]) -> Any:
    """Which of the numbers is the largest, the first of equal ones; after NaN whatever comes next."""
    largest, chosen = numbers[0], jnp.zeros(numbers[0].shape, np.int32)
    for i, number in enumerate(numbers[1:], 1):
        stays = largest >= number
        chosen, largest = jnp.where(stays, chosen, i), jnp.where(stays, largest, number)
    return chosen


def _spaced(x: Any, before: bool = False) -> Any:
    """An axis of length 1 behind each axis of an array, or before it."""
    return x.reshape([n for size in x.shape for n in ((1, size) if before else (size, 1))])
