"""Statistics of a whole array from those of its parts, which several servers have.

>>> import numpy as np
>>> from onward.develop.watch.statistics import std
>>> x = np.array([3.0, 0.0, -4.0, 1.0])
>>> parts, sizes = (x[:1], x[1:]), np.array([1, 3])
>>> found = WHOLE[std].of_parts(sizes, [part.mean() for part in parts], [part.std() for part in parts])
>>> bool(np.isclose(found, x.std()))
True
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from onward.develop.watch.reading import NOT_NOW, Cell
from onward.develop.watch.statistics import SCALARS, Statistic, norm

Seen = tuple[tuple[int, np.ndarray], ...]
"""For each op that looks, the number of the step (``NOT_NOW`` in others) and the statistics."""


def is_now(seen: Seen) -> bool:
    """Whether any op looked."""
    return any(step != NOT_NOW for step, _ in seen)


@dataclass(frozen=True)
class Whole:
    """A statistic that follows from statistics of parts.

    Attributes:
        of: the statistics to compute of each part.
        of_parts: from the sizes of the parts and the values of each such statistic to that of the whole.
    """

    of: tuple[Statistic, ...]
    of_parts: Callable[..., Any]


def _root(norms: Any) -> Any:
    """The norm of several; ``hypot`` alone takes infinity and NaN for infinite."""
    return np.nan if np.isnan(norms).any() else np.hypot.reduce(norms)


def _norm(sizes: np.ndarray, norms: Any) -> Any:
    return _root(norms)


def _rms(sizes: np.ndarray, norms: Any) -> Any:
    return _root(norms) / np.sqrt(sizes.sum())


def _mean(sizes: np.ndarray, means: Any) -> Any:
    return np.sum(sizes / sizes.sum() * means)


def _std(sizes: np.ndarray, means: Any, stds: Any) -> Any:
    """Source: Chan, Golub, LeVeque, Updating Formulae and a Pairwise Algorithm for Sample Variances, 1979."""
    far = np.subtract(means, _mean(sizes, means))
    return _root(np.sqrt(sizes / sizes.sum()) * [*map(_root, zip(far, stds, strict=True))])


def _ratio(sizes: np.ndarray, norms: Any, bases: Any) -> Any:
    return _root(norms) / _root(bases)


_NORM, _MEAN = SCALARS["norm"], SCALARS["mean"]
_BASE = Statistic("norm of the parameter", lambda x, over, base: norm(base, over), relative=True)

WHOLE: Mapping[Callable[..., Any], Whole] = {
    norm: Whole((_NORM,), _norm),
    SCALARS["rms"].function: Whole((_NORM,), _rms),
    _MEAN.function: Whole((_MEAN,), _mean),
    SCALARS["std"].function: Whole((_MEAN, SCALARS["std"]), _std),
    SCALARS["min"].function: Whole((SCALARS["min"],), lambda sizes, least: np.min(least)),
    SCALARS["max"].function: Whole((SCALARS["max"],), lambda sizes, most: np.max(most)),
    SCALARS["zeros"].function: Whole((SCALARS["zeros"],), _mean),
    SCALARS["nonfinite"].function: Whole((SCALARS["nonfinite"],), _mean),
    SCALARS["ratio"].function: Whole((_NORM, _BASE), _ratio),
}
"""Functions of statistics that follow from those of parts; others need all numbers in one place."""


def follows(statistic: Statistic) -> bool:
    """Whether a statistic of the whole follows from statistics of its parts."""
    return statistic.function in WHOLE


def of_each_part(statistics: Iterable[Statistic]) -> tuple[Statistic, ...]:
    """The statistics to compute of each part, so that those asked for follow."""
    return tuple(dict.fromkeys(x for s in statistics for x in (WHOLE[s.function].of if follows(s) else (s,))))


@dataclass(frozen=True)
class Part:
    """The place of a statistic of one part: the server, the op of it that looks, the cell, and the size."""

    server: int
    op: int
    cell: Cell
    size: int

    def read(self, seen: Sequence[Seen]) -> np.ndarray:
        """Its numbers, of what each server saw."""
        begin, shape = self.cell.begin, self.cell.shape
        found: np.ndarray = seen[self.server][self.op][1][begin : begin + int(np.prod(shape))].reshape(shape)
        return found


@dataclass(frozen=True)
class Joined:
    """The statistics of one watch as one device has them, made of what servers saw of their parts.

    Attributes:
        cells: where in the array of all statistics each of them is.
        parts: for each cell, for each statistic that it follows from, the parts.
    """

    cells: tuple[Cell, ...]
    parts: tuple[tuple[tuple[Part, ...], ...], ...]

    def __call__(self, seen: Sequence[Seen]) -> tuple[int, np.ndarray]:
        """The number of the step and the statistics; ``NOT_NOW`` unless all servers looked at one step."""
        places = {(p.server, p.op) for columns in self.parts for column in columns for p in column}
        steps = {seen[i][op][0] if seen[i] else NOT_NOW for i, op in places}
        step = steps.pop() if len(steps) == 1 else NOT_NOW
        if step == NOT_NOW:
            return step, np.zeros(0)
        with np.errstate(all="ignore"):
            found = [self._whole(c, p, seen) for c, p in zip(self.cells, self.parts, strict=True)]
        return step, np.concatenate([np.ravel(x) for x in found])

    def _whole(self, cell: Cell, parts: Sequence[Sequence[Part]], seen: Sequence[Seen]) -> Any:
        columns = [[np.float64(p.read(seen)) for p in column] for column in parts]
        if not follows(cell.statistic):
            return columns[0][0]
        sizes = np.array([p.size for p in parts[0]], np.float64)
        return WHOLE[cell.statistic.function].of_parts(sizes, *columns)
