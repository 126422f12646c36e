"""The share of a batch for each process and each device, filled up where it does not divide."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.errors import ArgumentError
from onward.core.placement import expect_divisible
from onward.core.program import Program, Variable
from onward.core.source import user_level
from onward.core.words import Placement
from onward.develop.batch import filled_up, rows_of_each


@dataclass(frozen=True)
class Filling:
    """Which rows of a batch stand where when it is filled up, and which of them count.

    Attributes:
        rows: for every place, the row that stands there.
        counts: for every place, whether the row is there for itself, not to fill up.
    """

    rows: np.ndarray
    counts: np.ndarray

    @classmethod
    def of(cls, rows: int, devices: int, each: int) -> Filling:
        """Every device gets ``each`` rows, and as many real ones as the others, or one more."""
        real = rows // devices + (np.arange(devices) < rows % devices)
        start = np.cumsum(real) - real
        place = np.arange(each)
        counts = place < real[:, None]
        taken = np.minimum(start[:, None] + np.minimum(place, np.maximum(real[:, None] - 1, 0)), rows - 1)
        return cls(taken.ravel(), counts.ravel())

    def filled(self, value: Any) -> Any:
        """An array with the rows at their places."""
        return _taken(value, self.rows) if isinstance(value, jax.Array) else value[self.rows]

    def weighed(self, weights: Any) -> Any:
        """Weights at their places, 0 for what fills up."""
        counts = self.counts.reshape(-1, *[1] * (weights.ndim - 1))
        if isinstance(weights, jax.Array):
            return _taken(weights, self.rows, counts)
        return np.where(counts, weights[self.rows], np.zeros((), weights.dtype))

    def batch(
        self, values: Sequence[Any], inputs: Sequence[Variable], split: Sequence[int], weight: str | None
    ) -> list[Any]:
        """All data with the rows at their places, of that which is split."""
        filled = list(values)
        for i in split:
            filled[i] = (self.weighed if inputs[i].name == weight else self.filled)(values[i])
        return filled

    def emptied(self, values: Sequence[Any]) -> list[Any]:
        """The rows of arrays over all places, without those that fill up, in their original order."""
        if not values:
            return []
        places = np.flatnonzero(self.counts).astype(np.int32)
        kept: list[Any] = _kept(list(values), places, len(self.rows))
        return kept


# A computation each: indexing by itself compiles half a dozen kernels for each new number of rows.
@jax.jit
def _taken(value: Any, rows: Any, counts: Any = None) -> Any:
    taken = value.at[rows].get(mode="promise_in_bounds")
    return taken if counts is None else jnp.where(counts, taken, jnp.zeros((), value.dtype))


@partial(jax.jit, static_argnums=2)
def _kept(values: list[Any], kept: Any, places: int) -> list[Any]:
    def of(value: Any) -> Any:
        length, *shape = value.shape
        if length % places:
            return value
        each = length // places
        rows = value.reshape(places, each, *shape).at[kept].get(mode="promise_in_bounds")
        return rows.reshape(len(kept) * each, *shape)

    return [of(value) for value in values]


class Portions:
    """The data of a replicated Program, as one process feeds it."""

    def __init__(self, program: Program) -> None:
        assert program.replicas is not None
        self.misled, self._told = program.replicas.misled, set[int]()
        self.name, self.weight = program.name, program.replicas.weight
        self.inputs = program.inputs
        self.split = [i for i, v in enumerate(program.inputs) if v.placement is Placement.SHARDED]
        self.processes = jax.process_count()
        self.devices: int = program.replicas.count // self.processes
        self.each: int = program.inputs[self.split[0]].shape[0] if self.split else 0

    def filling(self, values: Sequence[Any]) -> Filling | None:
        """How the batch is filled up; None if it divides.

        Raises:
            ArgumentError: it does not divide, and there is no weight; or the arrays are not equally long.

        Warns:
            UserWarning: the loss or a result is another one where the batch is filled up.
        """
        if not self.split or any(not np.shape(values[i]) for i in self.split):
            return None  # what is not an array over examples the checks of a step refuse
        first = values[self.split[0]]
        if not isinstance(first, jax.core.Tracer) and not getattr(first, "is_fully_addressable", True):
            return None  # the batch of all processes already
        rows = values[self.split[0]].shape[0]
        self._expect_one_batch(values, rows)
        if self.weight is None:
            where = "" if self.processes == 1 else " of this process"
            expect_divisible(self.name, rows, self.inputs[self.split[0]].name, self.devices, where)
            return None
        each = self._rows_of_each(rows)
        if not rows or each * self.devices == rows:
            return None
        if self.misled and rows not in self._told:
            self._told.add(rows)
            told = filled_up(self.name, rows, f"{self.devices} devices", self.misled)
            warnings.warn(told, stacklevel=user_level())
        return Filling.of(rows, self.devices, each)

    def _rows_of_each(self, rows: int) -> int:
        """How many rows each device gets: two at least, where examples of weight 0 change nothing."""
        if self.processes > 1:  # all processes must feed equally much
            return max(-(-rows // self.devices), self.each)
        return rows_of_each(rows, self.devices, self.weight)

    def filled(self, values: Sequence[Any], filling: Filling | None) -> list[Any]:
        """The data with the rows at their places."""
        return (
            list(values) if filling is None else filling.batch(values, self.inputs, self.split, self.weight)
        )

    def _expect_one_batch(self, values: Sequence[Any], rows: int) -> None:
        for i in self.split:
            if values[i].shape[0] != rows:
                first = self.inputs[self.split[0]].name
                raise ArgumentError(
                    f"{self.name}: {self.inputs[i].name!r} has {values[i].shape[0]} rows, {first!r} {rows}; "
                    "both are split over the devices, so they must be equally long."
                )
