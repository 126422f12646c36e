"""A batch that one computation takes as a whole, filled up at its end with examples of weight 0.

``portions`` does the same where each device has a part of its own, and is filled up by itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import lcm, prod
from typing import Any

import jax
import numpy as np

from onward.core.errors import ArgumentError
from onward.core.meshes import axes_of
from onward.core.program import Program, Variable
from onward.core.recipe import rebuilt
from onward.core.source import user_level
from onward.develop.accumulation.accumulate import weighed_batch
from onward.develop.batch import data_types, filled_up
from onward.develop.over_batch.filled import misled_as_one
from onward.develop.over_batch.walk import follow
from onward.execute.portions import Filling, Portions

_OTHER_GRAPH = ("the loss", "is computed by another graph for another number of examples")


@dataclass(frozen=True)
class FilledEnd:
    """A batch that others fill up behind it, and the axes along which examples lie, by name."""

    filling: Filling
    axes: Mapping[str, tuple[int, ...]]

    def emptied(self, variables: Sequence[Variable], values: Sequence[Any]) -> list[Any]:
        """The results without what only filled up the batch."""
        length, rows = len(self.filling.rows), int(self.filling.counts.sum())

        def kept(value: Any, axes: Sequence[int]) -> Any:
            cut = {i: value.shape[i] // length * rows for i in axes}
            return _first(value, tuple(cut.get(i, n) for i, n in enumerate(value.shape))) if axes else value

        return [kept(x, self.axes.get(v.name, ())) for v, x in zip(variables, values, strict=True)]


class BatchFiller:
    """Fills up the batch of a Program, whose weights say which examples count.

    Args:
        program: takes the batch of all devices as one.
        split: the names of the data that is as long as the batch.
        weight: the name of the data that says how much each example counts.
        length: of a batch of so many examples when it is filled up.
        parts: what it is filled up for, in words.
    """

    def __init__(
        self, program: Program, split: Sequence[str], weight: str, length: Callable[[int], int], parts: str
    ) -> None:
        self.program, self.weight, self._length, self._parts = program, weight, length, parts
        self._names = [v.name for v in program.inputs if v.name in split]
        self._at = [i for i, v in enumerate(program.inputs) if v.name in split]
        self._told = set[int]()

    def filling(self, values: Sequence[Any]) -> FilledEnd | None:
        """How the batch is filled up; None if it need not be, or is none, which the checks of a step refuse.

        Raises:
            ArgumentError: the arrays are not equally long.

        Warns:
            UserWarning: the loss or a result is another one where the batch is filled up.
        """
        shapes = [np.shape(values[i]) for i in self._at]
        if not all(shapes):
            return None
        rows = shapes[0][0]
        for name, shape in zip(self._names, shapes, strict=True):
            if shape[0] != rows:
                raise ArgumentError(
                    f"{self.program.name}: {name!r} has {shape[0]} rows, {self._names[0]!r} {rows}; both are "
                    "the batch, so they must be equally long."
                )
        if not rows or (length := self._length(rows)) == rows:
            return None
        if rows not in self._told:
            self._told.add(rows)
            if self._misled:
                told = filled_up(self.program.name, rows, self._parts, self._misled)
                warnings.warn(told, stacklevel=user_level())
        return FilledEnd(Filling.of(rows, 1, length), self._axes)

    def filled(self, values: Sequence[Any], filling: FilledEnd | None) -> list[Any]:
        """The data with the last example again, of weight 0, behind it."""
        if filling is None:
            return list(values)
        return filling.filling.batch(values, self.program.inputs, self._at, self.weight)

    @cached_property
    def _misled(self) -> tuple[tuple[str, str], ...]:
        """The results that filling up the batch may change, and why, in words."""
        recipe = self.program.recipe
        assert recipe is not None
        whole, part = (recipe.origin.trace(self._types(times)) for times in (2, 1))
        following = follow(whole, part, 2, self._names)
        return (_OTHER_GRAPH,) if following is None else misled_as_one(part, following, self.weight)

    @cached_property
    def _axes(self) -> Mapping[str, tuple[int, ...]]:
        """The axes along which values are longer where the batch is."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what there is to say was said of the Program itself
            longer = rebuilt(self.program, self._types(2)).variables
        pairs = [(v, longer[v.name]) for v in self.program.variables.values() if v.name in longer]
        return {v.name: _differing(v.shape, w.shape) for v, w in pairs if v.ndim == w.ndim}

    def _types(self, times: int) -> tuple[Any, ...]:
        return data_types(self.program, self._names, times * self.program[self._names[0]].shape[0])


def filler_of(program: Program) -> Portions | BatchFiller | None:
    """The filler for the batch of a Program over several devices; None if none can be filled up."""
    if program.replicas is not None:
        return Portions(program)
    how = program.partition
    if how is None or program.recipe is None or jax.process_count() > 1:
        return None
    names, weight = weighed_batch(program)
    if weight is None:
        return None
    splits = {axes_of(how.specs[name])[:1] for name in names if name in how.specs}
    dividing = {axes[0] for axes in splits if axes}
    unit = lcm(*(prod(how.mesh[axis] for axis in axes) for axes in dividing))
    parts = f"{unit} parts along {' x '.join(sorted({axis for axes in dividing for axis in axes}))}"
    return BatchFiller(program, names, weight, lambda rows: -(-rows // unit) * unit, parts)


def filled(program: Program, values: Sequence[Any]) -> list[Any]:
    """The data of a Program, filled up where its devices do not divide it."""
    filler: Any = filler_of(program)
    return list(values) if filler is None else filler.filled(values, filler.filling(values))


# A computation: indexing by itself compiles several kernels for each new number of rows.
@partial(jax.jit, static_argnums=1)
def _first(value: Any, shape: tuple[int, ...]) -> Any:
    return jax.lax.slice(value, (0,) * value.ndim, shape)


def _differing(one: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    return tuple(i for i, (n, m) in enumerate(zip(one, other, strict=True)) if n != m)
