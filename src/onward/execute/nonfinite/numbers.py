"""The numbers in an array in one line: their range, and what among them is not finite.

>>> import numpy as np
>>> print(Numbers.of("x", np.array([[1.0, np.nan], [3.0, 2.0]], "float32")))
x  float32[2,2]  1 of 4 is NaN, the first at [0, 1]; the others from 1 to 3, mean 2
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from onward.core.variable import holds_keys


@dataclass(frozen=True)
class Numbers:
    """A summary of the numbers in an array.

    Attributes:
        name, type: of its Variable.
        size: how many numbers there are.
        nan, infinite: how many of them are NaN, and how many infinite.
        first: the index of the first that is not finite; None if all are.
        low, high, mean: of those that are finite; None if none is, or where there are no numbers (keys).
    """

    name: str
    type: str
    size: int
    nan: int = 0
    infinite: int = 0
    first: tuple[int, ...] | None = None
    low: float | None = None
    high: float | None = None
    mean: float | None = None

    @classmethod
    def of(cls, name: str, value: Any) -> Self:
        """Summarize this array."""
        kind = f"{value.dtype}[{','.join(map(str, value.shape))}]"
        if holds_keys(value.dtype):
            return cls(name, kind, value.size)
        array = np.asarray(value)
        whole = np.abs(array) if array.dtype.kind == "c" else array.astype(np.float64)
        finite = np.isfinite(whole)
        if finite.all():
            return cls(name, kind, array.size, 0, 0, None, *_range(whole))
        first = tuple(map(int, np.argwhere(~finite)[0]))
        nan = int(np.isnan(whole).sum())
        infinite = int((~finite).sum()) - nan
        return cls(name, kind, array.size, nan, infinite, first, *_range(whole[finite]))

    @property
    def is_finite(self) -> bool:
        """Whether all numbers are finite."""
        return self.nan == self.infinite == 0

    @property
    def bad(self) -> str:
        """The non-finite values in words: ``3 of 8 are NaN and 1 is infinite, the first at [0, 2]``."""
        counts = [(self.nan, "NaN"), (self.infinite, "infinite")]
        if self.size == 1:
            return next((word for count, word in counts if count), "finite")
        found = [f"{n} {'is' if n == 1 else 'are'} {word}" for n, word in counts if n]
        if not found:
            return "all are finite"
        head, *rest = found
        count, _, words = head.partition(" ")
        text = " and ".join([f"{count} of {self.size} {words}", *rest])
        return f"{text}, the first at {list(self.first or ())}"

    @property
    def range(self) -> str:
        """The range of the finite values, in words: ``from 0 to 3, mean 1.5``."""
        if self.low is None or self.high is None or self.mean is None:
            return ""
        if self.low == self.high:
            return f"{self.low:.4g}" if self.size == 1 else f"all {self.low:.4g}"
        return f"from {self.low:.4g} to {self.high:.4g}, mean {self.mean:.4g}"

    @property
    def words(self) -> str:
        """The values that are not finite, if any, and the range of the others."""
        if self.is_finite:
            return self.range
        return f"{self.bad}; the others {self.range}" if self.range else self.bad

    def __str__(self) -> str:
        return "  ".join(filter(None, (self.name, self.type, self.words)))


def _range(finite: Any) -> tuple[float | None, float | None, float | None]:
    """The lowest, the highest, the mean."""
    if not finite.size:
        return None, None, None
    return float(finite.min()), float(finite.max()), float(finite.mean())
