"""The computation of the op that looks: statistics of several entries, one after the other in one array."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from onward.core.jaxprs.body import body_of
from onward.core.program import Variable
from onward.develop.watch.choice import Role, WatchEntry
from onward.develop.watch.reading import NOT_NOW, Cell
from onward.develop.watch.statistics import HERE, Over, Statistic, norm

Env = Mapping[Variable, Any]


@dataclass(frozen=True)
class Look:
    """An entry, for each of its names the Variables that are read, the devices that have parts of them."""

    entry: WatchEntry
    read: Sequence[tuple[Variable, ...]]
    over: Over

    def numbers(self, statistics: Sequence[Statistic], env: Env) -> Iterator[Any]:
        """The statistics, each an array."""
        arrays = [self._array(*(env[v] for v in pair)) for pair in self.read]
        base = env[self.read[0][0]]
        over = HERE if self.entry.role is Role.GRADIENT else self.over
        for statistic in cells_of(self.entry, statistics):
            if self.entry.is_whole:
                yield norm(jnp.stack([statistic(x, over) for x in arrays]), HERE)
            else:
                yield jnp.asarray(statistic(arrays[0], over, base))

    def _array(self, x: Any, following: Any = None) -> Any:
        """The value, the gradient as all devices share it, or the difference that an update makes."""
        if self.entry.role is Role.GRADIENT and self.over.axis is not None:
            return lax.pmean(x, self.over.axis)
        if following is None:
            return x
        wide = jnp.promote_types(x.dtype, np.float32)
        return following.astype(wide) - x.astype(wide)


def cells_of(entry: WatchEntry, statistics: Sequence[Statistic]) -> list[Statistic]:
    """Those of the statistics that there are of an entry: of all parameters together the norm."""
    fitting = [s for s in statistics if entry.role is Role.UPDATE or not s.relative]
    return [s for s in fitting if s.function is norm] if entry.is_whole else fitting


def looking(
    looks: Sequence[Look], statistics: Sequence[Statistic], every: int, step: Variable | None
) -> tuple[Callable[..., list[Any]], tuple[Cell, ...], tuple[Variable, ...]]:
    """The function that computes the step number and all statistics, the place of each, and its inputs.

    In steps that are not looked at the number is ``NOT_NOW`` and the statistics are zeros.
    """
    read = tuple(dict.fromkeys(v for look in looks for pair in look.read for v in pair))
    inputs = tuple(dict.fromkeys((*([] if step is None else [step]), *read)))

    def found(*values: Any) -> list[Any]:
        env = dict(zip(inputs, values, strict=True))
        return [x for look in looks for x in look.numbers(statistics, env)]

    pieces = body_of(found, *(v.aval for v in inputs)).out_types
    dtype = jnp.result_type(np.float32, *(piece.dtype for piece in pieces))
    sizes = [prod(piece.shape) for piece in pieces]
    begins = accumulate(sizes, initial=0)
    named = [(look.entry, s) for look in looks for s in cells_of(look.entry, statistics)]
    cells = tuple(
        Cell(entry.label, entry.role, entry.name, s, begin, piece.shape)
        for (entry, s), begin, piece in zip(named, begins, pieces, strict=False)
    )

    def packed(*values: Any) -> Any:
        return jnp.concatenate([x.ravel().astype(dtype) for x in found(*values)])

    def run(*values: Any) -> list[Any]:
        if step is None:
            return [jnp.int32(0), packed(*values)]
        count = values[inputs.index(step)]
        now = count % every == 0
        numbers = lax.cond(now, packed, lambda *_: jnp.zeros(sum(sizes), dtype), *values)
        return [jnp.where(now, count + 1, NOT_NOW), numbers]

    return run, cells, inputs
