"""A step of a pipeline on arrays that are only planned: what each of its tasks finds in memory, and takes.

All parts are compiled, and a step is issued as ``compile`` issues it, on arrays of which there is the type
and the place: what the step holds is what it would hold, and XLA tells what a task takes beside. A value that
is sent ahead lies with its reader from when it is issued.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jax
from jax.sharding import Sharding

from onward.core.cost import size
from onward.core.words import Kind, Pass
from onward.distribute.pipeline.cut import Pipeline
from onward.distribute.pipeline.schedule import StageTask, StageWork
from onward.execute.memory.held import MemoryShare
from onward.execute.pipeline_run import PipelineRun
from onward.execute.stage_executables import StageExecutables
from onward.execute.stage_rows import StagePlace, StageRows, sharding_of

_KEPT = {Kind.PARAMETER: MemoryShare.PARAMETERS}


@dataclass(frozen=True, eq=False)
class StageMoment:
    """The memory that a device of a stage has in use while it runs one task.

    Attributes:
        task: ``F3`` is the forward pass of micro-batch 3, as in the schedule; or what is done once a step.
        made_by: its pass.
        shares: the bytes by what they are taken for. Gradients are the sums over micro-batches so far; to
            parameters belongs what is made of them once a step, and copies of those of other stages.
    """

    task: str
    made_by: Pass
    shares: Mapping[MemoryShare, int]

    @property
    def bytes(self) -> int:
        """All of them."""
        return sum(self.shares.values())


@dataclass(eq=False)
class PlannedBuffer:
    """Memory on one device; none once an executable took it over."""

    bytes: int


class PlannedArray:
    """An array of which there is only the type and the place; without a place it lies on no device.

    Args:
        shape: of all of it.
        dtype: of its numbers.
        sharding: where it lies.
        known: buffers of others, of the size that its parts have, that it shares where there are some.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: Any,
        sharding: Sharding | None = None,
        known: Mapping[Any, PlannedBuffer] = MappingProxyType({}),
    ) -> None:
        self.shape, self.dtype, self.sharding = tuple(shape), dtype, sharding
        self.buffers: dict[Any, PlannedBuffer] = {}
        if sharding is not None:
            part = size(jax.ShapeDtypeStruct(sharding.shard_shape(self.shape), dtype))
            alike = {device: buffer for device, buffer in known.items() if buffer.bytes == part}
            self.buffers = {d: alike.get(d) or PlannedBuffer(part) for d in sharding.device_set}


class PlannedRows(StageRows):
    """Devices of stages where no value is computed.

    Attributes:
        run: the step that is issued.
        moments: for each stage what its tasks took so far.
    """

    run: PlannedRun

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline)
        self.moments: list[list[StageMoment]] = [[] for _ in self.whole[:-1]]
        self._devices = [next(iter(sharding_of(x).device_set)) for x in self.whole[:-1]]

    def put(self, value: Any, place: StagePlace) -> Any:
        """A value, or several, at a place."""
        sharding = sharding_of(place)

        def placed(x: PlannedArray) -> PlannedArray:
            is_there = x.sharding == sharding
            return x if is_there else PlannedArray(x.shape, x.dtype, sharding, x.buffers)

        return jax.tree.map(placed, value)

    def joined(self, pieces: Sequence[Any], shape: tuple[int, ...], place: Sharding) -> Any:
        """A stack over all stages of the piece that each has."""
        known = {device: buffer for piece in pieces for device, buffer in piece.buffers.items()}
        return PlannedArray(shape, pieces[0].dtype, place, known)

    def piece(self, stack: Any, shape: tuple[int, ...], place: StagePlace) -> Any:
        """The piece that a stage has of a stack."""
        return PlannedArray(shape, stack.dtype, sharding_of(place), stack.buffers)

    def compiled(self, jitted: Any, stage: int, types: Sequence[Any], laid: Any, options: Any) -> Any:
        """A function in place of a compiled one, which makes nothing; and how its results lie."""
        compiled, lie = super().compiled(jitted, stage, types, laid, options)
        used = compiled.memory_analysis()
        given = used.output_size_in_bytes - used.alias_size_in_bytes

        def call(*args: Any) -> Any:
            self._note(stage, args, used.temp_size_in_bytes + max(given, 0))
            for buffer in (b for taken in jax.tree.leaves(args[:1]) for b in taken.buffers.values()):
                buffer.bytes = 0
            return jax.tree.map(lambda x: PlannedArray(x.shape, x.dtype, x.sharding), compiled.out_info)

        return call, lie

    def _note(self, stage: int, args: Any, beside: int) -> None:
        """Note what lies on the devices of a stage, or of all, while they compute something."""
        count = len(self.moments)
        for at in range(count) if stage == count else [stage]:
            found, seen = dict.fromkeys(MemoryShare, 0), set()
            for share, x in self.run.there(at, args):
                buffer = x.buffers.get(self._devices[at])
                if buffer is not None and buffer not in seen:
                    seen.add(buffer)
                    found[share] += buffer.bytes
            found[MemoryShare.TEMPORARIES] += beside
            self.moments[at].append(StageMoment(self.run.task, self.run.made_by, found))


class PlannedRun(PipelineRun):
    """A step as it is issued where no value is computed.

    Attributes:
        task: what it does.
        made_by: the pass of that.
    """

    def __init__(
        self, rows: PlannedRows, stages: StageExecutables, own: dict[str, Any], fed: Mapping[str, Any]
    ) -> None:
        rows.run = self
        self.task, self.made_by = "begin", Pass.FORWARD
        state = {v.name: v for v in stages.program.state}
        self._kept = {name: _KEPT.get(v.kind, MemoryShare.STATE) for name, v in state.items()}
        self._made = {new: self._kept[v.name] for v, new in stages.program.next_state.items()}
        super().__init__(stages, own, fed)

    def work(self, stage: int, work: StageWork, i: int) -> None:
        """Issue one task."""
        self.task = str(StageTask(work, i))
        self.made_by = Pass.FORWARD if work is StageWork.FORWARD else Pass.BACKWARD
        super().work(stage, work, i)

    def update(self) -> None:
        """Issue the update."""
        self.task, self.made_by = "update", Pass.UPDATE
        super().update()

    def there(self, stage: int, args: Any) -> Iterator[tuple[MemoryShare, PlannedArray]]:
        """All that a stage has of the step, and is given for a task beside, with what it is for."""
        of = MemoryShare
        given = {v for group in self.given for v in group}
        here = [pair for (at, _), values in self.at.items() if at == stage for pair in values.items()]
        groups: list[tuple[MemoryShare, Any]] = [
            *((self._kept[v.name], self.own[v.name]) for v in self.stages.program.state),
            *((self._made.get(v, of.RESULTS), x) for v, x in self.made.items()),
            (of.PARAMETERS, [*self.borrowed.values(), *self.once.get(stage, {}).values()]),
            (of.FEEDS, [[*group.values()] for group in self.given]),
            (of.FEEDS, [*self.fed.values(), self.scales]),
            *((of.FEEDS if v in given else of.SAVED, x) for v, x in here),
            (of.GRADIENTS, [*self.totals.values()]),
            *((of.RESULTS if isinstance(x, list) else of.GRADIENTS, x) for x in self.raw.values()),
            (of.RESULTS, self.pieces),
            (of.TEMPORARIES, args),
        ]
        yield from ((share, x) for share, group in groups for x in jax.tree.leaves(group))


def planned_moments(pipeline: Pipeline) -> tuple[tuple[StageMoment, ...], ...]:
    """For each stage what its tasks take, of a step that is issued on arrays that are only planned."""
    program, rows = pipeline.accumulated, PlannedRows(pipeline)
    stages = StageExecutables(pipeline, {v.name for v in program.next_state}, {}, rows=rows)
    places = {v: sharding_of(stages.home[v.name]) for v in program.state}
    own = {v.name: PlannedArray(v.shape, v.dtype, place) for v, place in places.items()}
    run = PlannedRun(rows, stages, own, {v.name: PlannedArray(v.shape, v.dtype) for v in program.inputs})
    run.micro_batches()
    run.update()
    return tuple(map(tuple, rows.moments))
