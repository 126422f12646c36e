"""Statistics that summarize many numbers in a few, each one small pure function.

A statistic is given an array of float32 or float64 and an ``Over``, which sums, counts and compares over all
its numbers: on one device, or on all that have a part of them. So the same formula serves both.

>>> import jax.numpy as jnp
>>> x = jnp.array([3.0, 0.0, -4.0])
>>> [float(SCALARS[name](x)) for name in ("norm", "max", "mean")]
[5.0, 3.0, -0.3333333432674408]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from onward.core.errors import ArgumentError


@dataclass(frozen=True)
class Over:
    """All numbers of an array: here, or with an ``axis`` those of the arrays of all ``devices``."""

    axis: str | None = None
    devices: int = 1

    def size(self, x: Any) -> int:
        """How many numbers there are."""
        return int(x.size) * self.devices

    def sum(self, x: Any) -> Any:
        """Their sum."""
        return self.added(jnp.sum(x))

    def count(self, mask: Any) -> Any:
        """How many are true, as a float32; counted in integers, which no float32 can above 2**24."""
        return self.added(jnp.sum(mask, dtype=np.int32).astype(np.float32))

    def max(self, x: Any) -> Any:
        """The largest; minus infinity of none."""
        return self._across(jnp.max(x, initial=-jnp.inf), lax.pmax)

    def min(self, x: Any) -> Any:
        """The smallest; infinity of none."""
        return self._across(jnp.min(x, initial=jnp.inf), lax.pmin)

    def added(self, x: Any) -> Any:
        """Add up sums or counts over all devices, number by number."""
        return self._across(x, lax.psum)

    def _across(self, here: Any, merge: Callable[[Any, str], Any]) -> Any:
        return here if self.axis is None else merge(here, self.axis)


HERE = Over()


@dataclass(frozen=True, eq=False)
class Histogram:
    """How many finite numbers lie in each of some bins of equal width, from the smallest to the largest.

    >>> found = Histogram.of(np.array([0.0, 4.0, 5.0, 1.0]))
    >>> found.edges.tolist(), found.counts.tolist()
    ([0.0, 2.0, 4.0], [5.0, 1.0])
    """

    low: float
    high: float
    counts: np.ndarray

    @classmethod
    def of(cls, numbers: np.ndarray) -> Histogram:
        """From what ``histogram`` computes."""
        return cls(float(numbers[0]), float(numbers[1]), np.asarray(numbers[2:], np.float64))

    @property
    def edges(self) -> np.ndarray:
        """The ends of the bins, one more than there are bins."""
        return np.linspace(self.low, self.high, len(self.counts) + 1)


def as_shown(numbers: np.ndarray) -> Any:
    """A number as a float, several as an array."""
    return float(numbers) if np.ndim(numbers) == 0 else np.asarray(numbers)


@dataclass(frozen=True)
class Statistic:
    """Some numbers that tell about many.

    Attributes:
        name: what it is called, for people.
        function: from an array, all that it is computed over, and if it is ``relative`` the array that it is
            measured against (of an update the parameter), to an array: a number, or as many as you like.
        relative: whether it takes the array that it is measured against.
        shown: what people see of the numbers once they are computed.

    Example:
        >>> import jax.numpy as jnp
        >>> small = Statistic("small", lambda x, over: over.count(abs(x) < 1e-3) / over.size(x))
        >>> float(small(jnp.array([1.0, 1e-6])))
        0.5
    """

    name: str
    function: Callable[..., Any]
    relative: bool = False
    shown: Callable[[np.ndarray], Any] = as_shown

    def __call__(self, x: Any, over: Over = HERE, base: Any = None) -> Any:
        """The statistic of an array of any real, complex, integer or bool dtype."""
        others = (as_real(base),) if self.relative else ()
        return self.function(as_real(x), over, *others)


def as_real(x: Any) -> Any:
    """The numbers as float32, or float64 where they are that; of complex numbers the magnitude."""
    x = jnp.asarray(x)
    x = jnp.abs(x) if jnp.iscomplexobj(x) else x
    return x if x.dtype == np.float64 else x.astype(np.float32)


def norm(x: Any, over: Over) -> Any:
    """The square root of the sum of squares, which neither overflow nor vanish.

    Source: Blue, A Portable Fortran Program to Find the Euclidean Norm of a Vector, 1978.
    """
    return _root_of_squares(x, jnp.maximum(over.max(x), -over.min(x)), over)


def _root_of_squares(x: Any, largest: Any, over: Over) -> Any:
    """The root of the sum of squares of numbers none of which is larger in magnitude than the largest."""
    scale = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    return scale * jnp.sqrt(over.sum((x / scale) ** 2))


def rms(x: Any, over: Over) -> Any:
    """The root of the mean square: the norm by the root of how many there are."""
    return norm(x, over) / np.sqrt(over.size(x)) if over.size(x) else _nothing(x)


def mean(x: Any, over: Over) -> Any:
    """The mean."""
    return over.sum(x) / over.size(x) if over.size(x) else _nothing(x)


def std(x: Any, over: Over) -> Any:
    """The standard deviation, of all numbers (not of a sample)."""
    if not over.size(x):
        return _nothing(x)
    middle = mean(x, over)
    far = jnp.maximum(over.max(x) - middle, middle - over.min(x))
    return _root_of_squares(x - middle, far, over) / np.sqrt(over.size(x))


def smallest(x: Any, over: Over) -> Any:
    """The smallest number."""
    return over.min(x) if over.size(x) else _nothing(x)


def largest(x: Any, over: Over) -> Any:
    """The largest number."""
    return over.max(x) if over.size(x) else _nothing(x)


def zeros(x: Any, over: Over) -> Any:
    """The share of zeros."""
    return _share(x == 0, over)


def nonfinite(x: Any, over: Over) -> Any:
    """The share of NaN and infinity."""
    return _share(~jnp.isfinite(x), over)


def ratio(x: Any, over: Over, base: Any) -> Any:
    """The norm of an update by the norm of its parameter."""
    return norm(x, over) / norm(base, over)


def histogram(bins: int, x: Any, over: Over) -> Any:
    """The ends of equal bins from the smallest to the largest finite number, then how many lie in each.

    Numbers are compared with each edge in turn: a pass over the array costs less than one scattered sum.
    """
    finite = jnp.isfinite(x)
    low = over.min(jnp.where(finite, x, jnp.inf))
    high = over.max(jnp.where(finite, x, -jnp.inf))
    some = low <= high
    low, high = jnp.where(some, low, 0), jnp.where(some, high, 0)
    inner = np.arange(1, bins) / bins
    edges = lax.cummax(jnp.clip((low * (1 - inner) + high * inner).astype(x.dtype), low, high))  # if rounded
    below = over.added(lax.map(lambda edge: HERE.count(finite & (x < edge)), edges))
    counts = jnp.diff(below, prepend=0, append=over.count(finite))
    return jnp.concatenate([jnp.stack([low, high]), counts.astype(x.dtype)])


def _share(mask: Any, over: Over) -> Any:
    size = over.size(mask)
    return over.count(mask) / size if size else jnp.float32(np.nan)


def _nothing(x: Any) -> Any:
    """The statistic of an empty array: NaN, in its dtype."""
    return jnp.full((), np.nan, x.dtype)


_RELATIVE = ("ratio",)
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "norm": norm,
    "rms": rms,
    "mean": mean,
    "std": std,
    "min": smallest,
    "max": largest,
    "zeros": zeros,
    "nonfinite": nonfinite,
    "ratio": ratio,
}
SCALARS: Mapping[str, Statistic] = {
    name: Statistic(name, function, name in _RELATIVE) for name, function in _FUNCTIONS.items()
}
"""The statistics that are one number, by name."""

HISTOGRAM = "histogram"


def statistic_of(choice: Any, bins: int) -> Statistic:
    """The statistic that a name, or a Statistic, stands for.

    Raises:
        ArgumentError: something else.
    """
    if isinstance(choice, Statistic):
        return choice
    if isinstance(choice, str) and choice == HISTOGRAM:
        return Statistic(HISTOGRAM, partial(histogram, bins), shown=Histogram.of)
    if isinstance(choice, str) and choice in SCALARS:
        return SCALARS[choice]
    known = ", ".join(map(repr, (*SCALARS, HISTOGRAM)))
    raise ArgumentError(
        f"watch: {choice!r} is not a statistic; expected {known}, or one of your own: "
        'Statistic("small", lambda x, over: over.count(abs(x) < 1e-3) / over.size(x)).'
    )
