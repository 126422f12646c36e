"""How a batch is cut into micro-batches, and how much each of them counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from onward.core.meshes import abstract_mesh, does_fit
from onward.core.program import Partition, Program, Variable
from onward.core.words import Placement
from onward.develop.accumulation.statistics import StandIn
from onward.develop.over_batch.known import Follows

Values = Mapping[Variable, Any]


@dataclass(frozen=True)
class Accumulation:
    """How the batch of a Program is cut into micro-batches.

    Attributes:
        steps: how many.
        split: the names of the data that is cut.
        weight: the data that says how much each example counts, which is 0 where the batch is filled up.
        by_share: micro-batches count as much as the weights of their examples; else as the graph tells.
        is_sum: whether the loss is a sum over examples, not a mean; None until the graph has told.
        behind: the forward ops that run once, after the loop, by their first results.
        told: how the results, and what these ops read, follow from those of the micro-batches, by name.
        stand_ins: the values that the forward pass reads in place of those of its micro-batch.
        misled: what filling up the batch may change, and why, in words.
        merged: the state whose next value is put together as results are, by name.
    """

    steps: int
    split: tuple[str, ...]
    weight: str | None = None
    by_share: bool = False
    is_sum: bool | None = None
    behind: frozenset[str] = frozenset()
    told: tuple[tuple[str, Follows], ...] = ()
    stand_ins: tuple[StandIn, ...] = ()
    misled: tuple[tuple[str, str], ...] = ()
    merged: frozenset[str] = frozenset()

    def is_filled(self, program: Program) -> bool:
        """Whether micro-batches of a Program have to be filled up with examples of weight 0."""
        count = 1 if program.replicas is None else program.replicas.count
        return self.whole_rows(program) % (self.steps * count) != 0

    def rows(self, program: Program) -> int:
        """How long the batch of a Program is; on many devices, that of each."""
        return next(v.shape[0] for v in program.inputs if v.name in self.split)

    def whole_rows(self, program: Program) -> int:
        """How long it is on all devices together."""
        return self.rows(program) * (1 if program.replicas is None else program.replicas.count)

    def on_devices(self, program: Program) -> Accumulation:
        """The same where each device has a part of the batch."""
        assert program.replicas is not None
        laid = (v.name for v in program.inputs if v.placement is Placement.SHARDED)
        split = tuple(name for name in laid if name in self.split)
        return replace(self, split=split, weight=program.replicas.weight or self.weight)


@dataclass(frozen=True)
class CutBatch:
    """The batch of a Program as micro-batches.

    Attributes:
        program: the Program of the whole batch.
        how: how it is cut.
        given: what each micro-batch has of its own: the data that is cut, and its number if it is asked for.
        numbers: those of them that are its number.
        mesh: how data is split, and over which devices; None if the Program is not partitioned.
    """

    program: Program
    how: Accumulation
    given: tuple[Variable, ...]
    numbers: tuple[Variable, ...]
    mesh: Partition | None = None

    def pieces(self, env: Values) -> list[Any]:
        """All that a micro-batch has of its own, as ``[steps, ...]``: its rows of the data, its number."""
        steps = self.how.steps
        return [
            jnp.arange(steps, dtype=v.dtype) if v in self.numbers else self._rows(env[v], v)
            for v in self.given
        ]

    def _rows(self, x: Any, v: Variable) -> Any:
        """An array over the batch as ``[steps, rows, ...]``, padded with examples of weight 0."""
        steps, rows = self.how.steps, v.shape[0]
        if steps * rows != (count := x.shape[0]):
            place = np.arange(steps * rows)
            x = x[np.minimum(place, count - 1)]
            if v.name == self.how.weight:
                counts = (place < count).reshape(-1, *[1] * (x.ndim - 1))
                x = jnp.where(counts, x, jnp.zeros((), x.dtype))
        x = x.reshape(steps, rows, *x.shape[1:])
        spec = None if self.mesh is None else self.mesh.specs.get(v.name)
        if self.mesh is None or spec is None or not does_fit(v, spec, self.mesh.mesh):
            return x  # the partitioner left alone would split the micro-batches, and compute each everywhere
        sharding = NamedSharding(abstract_mesh(self.mesh.mesh), PartitionSpec(None, *spec))
        return lax.with_sharding_constraint(x, sharding)

    def scales(self, pieces: Sequence[Any]) -> Any:
        """The share of each micro-batch in the weights of all, of all devices; None without weights."""
        pairs = zip(self.given, pieces, strict=True)
        weights = next((x for v, x in pairs if v.name == self.how.weight), None)
        if weights is None or not self.how.by_share:
            return None
        loss, replicas = self.program.loss, self.program.replicas
        dtype = jnp.promote_types(weights.dtype, np.float32 if loss is None else loss.dtype)
        flat = weights.reshape(self.how.steps, -1)
        each = jnp.sum(flat, 1, dtype=jnp.promote_types(dtype, np.float32))
        each = each if replicas is None else lax.psum(each, replicas.name)
        total = jnp.sum(each)
        return jnp.where(total == 0, 1 / self.how.steps, each / jnp.where(total == 0, 1, total))
