"""The executables of a pipeline: one for each stage and work, each compiled for the device of its stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from onward.core.lower import lower
from onward.core.program import Op, Program, Variable
from onward.distribute.pipeline.cut import Pipeline
from onward.distribute.pipeline.once import Place
from onward.execute.options import Value
from onward.execute.stage_places import StagePlaces
from onward.execute.stage_rows import StageRows
from onward.execute.stage_update import StageUpdate


class StagePart(NamedTuple):
    """An executable of a stage, and what it takes and gives.

    Attributes:
        stage: its number.
        program: what it computes.
        call: from the arrays that it takes over, state, data and a scale to the sums, pieces and outputs.
        sums: the places of the sums that it adds to, among those of the loop.
        pieces: the places of what it gives a piece of, among what is joined.
        sends: its outputs that others read.
    """

    stage: int
    program: Program
    call: Any
    sums: tuple[int, ...]
    pieces: tuple[int, ...]
    sends: tuple[Variable, ...]


class CompiledPart(NamedTuple):
    """An executable of a pipeline.

    Attributes:
        name: in words.
        times: how often it runs in a step.
        program: what it computes, or what makes the sums that it adds up.
        call: the executable.
        sums: of what micro-batches make, those that it takes sums of.
    """

    name: str
    times: int
    program: Program
    call: Any
    sums: tuple[Variable, ...] = ()


class StageExecutables(StagePlaces):
    """Everything that is compiled of a Pipeline, and where its values lie.

    Args:
        pipeline: the Programs and their order.
        donate: the names of the state whose buffers a step may reuse.
        options: for the compiler.
        scopes: for the ops of a part those that its instructions have; their own unless given.
        rows: the devices of the stages, if not those that JAX shows.

    Attributes:
        parts: of each stage and work.
        statistics: what micro-batches read of the whole batch, if anything.
        once: for some stages, what they make of their state once a step.
        zeros: the first sums of a part.
        pieces: by the name of a piece of state that is stacked along layers, the stack and the piece.
        last: the work in which a stage reads a value of a micro-batch for the last time.
        order: stage, work and micro-batch, as they are issued.
        merges: from the sums of each lane of a part to those of all, where there are several.
        begin: cuts a batch, and makes what micro-batches hand on.
        updates: the phases of the update, in order.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        donate: Collection[str],
        options: Mapping[str, Value],
        scopes: Callable[[Program], Mapping[Op, str]] | None = None,
        rows: StageRows | None = None,
    ) -> None:
        super().__init__(pipeline, options, scopes, rows)
        self.pieces = {v.name: (stack, v) for stack, group in pipeline.loops.pieces.items() for v in group}
        self._readers = {v: [*dict.fromkeys(of for of, _ in works)] for v, works in pipeline.readers.items()}
        self.last = {
            (v, stage): [work for of, work in places if of == stage][-1]
            for v, places in pipeline.readers.items()
            for stage in {of for of, _ in places}
        }
        self.order = [
            (moment.stage, *moment.task)
            for moment in pipeline.schedule.moments
            if (moment.stage, moment.task.work) in pipeline.parts
        ]
        self.statistics: Any = None
        if pipeline.statistics.outputs:
            self.statistics = self._once(0, pipeline.statistics)
        self.once = {stage: self._once(stage, program) for stage, program in pipeline.once.items()}
        self.parts = {place: self._part(place, program) for place, program in pipeline.parts.items()}
        self.zeros = {place: self._zeros_of(part) for place, part in self.parts.items() if part.sums}
        self.merges = {place: self._merging(self.parts[place]) for place in self.zeros if pipeline.lanes.axes}
        self.begin = self._beginning()
        self.updates = [StageUpdate(self, *key, donate) for key in sorted(pipeline.updates)]

    def readers(self, v: Variable) -> Sequence[int]:
        """The stages that are given a value, each once."""
        return self._readers[v]

    def _part(self, place: Place, program: Program) -> StagePart:
        loop, (stage, _) = self.pipeline.loop, place
        wanted = set(program.outputs)
        sums = tuple(i for i, r in enumerate(loop.sums) if r.part in wanted)
        pieces = tuple(i for i, r in enumerate(loop.joined) if r.part in wanted)
        sends = tuple(v for v in program.outputs if v in self.pipeline.readers)
        free = {v for v in sends if self._is_free(v, stage)}
        run = self.lowered(program)

        def lane(totals: Any, state: Any, inputs: Any, scale: Any) -> Any:
            state = self._gathered(program.state, state, stage)
            inputs = self._gathered(program.inputs, inputs, stage)
            found = dict(zip(program.outputs, run(state, inputs), strict=True))
            added = [loop.share(loop.sums[i], found[loop.sums[i].part], scale) for i in sums]
            grown = [total + x.astype(total.dtype) for total, x in zip(totals, added, strict=True)]
            given = [loop.share(loop.joined[i], found[loop.joined[i].part], scale) for i in pieces]
            return grown, given, [self._laid_out(v, found[v], stage, v in free) for v in sends]

        call = self._in_lanes(lane, program.inputs, stage)
        types = [[self.typed(v, stage) for v in group] for group in (program.state, program.inputs)]
        call.__name__ = program.name if program.name.isidentifier() else "stage"
        totals = [self.total_type(loop.sums[i], stage) for i in sums]
        joined = [loop.joined[i].part for i in pieces]
        lain = [self.lies(v, stage) for v in joined]
        outs = [x.sharding for x in totals], lain, [None if v in free else self.lies(v, stage) for v in sends]
        made, (*_, lie) = self.lying(call, stage, (totals, *types, self.scale_in(stage)), outs)
        self._kept |= {v: x for v, x in zip(sends, lie, strict=True) if v in free}
        return StagePart(stage, program, made, sums, pieces, sends)

    def _in_lanes(self, run: Any, inputs: Sequence[Variable], stage: int) -> Any:
        """The function of one lane, from sums, state, inputs and a scale, for all of a stage at once."""
        lanes = self.pipeline.lanes
        if not lanes.axes:
            return run
        mesh = self.whole[stage].mesh
        own, whole = PartitionSpec(lanes.axes), PartitionSpec()
        read = [own if v in self.pipeline.in_lanes else whole for v in inputs]

        def call(totals: Any, state: Any, inputs: Any, scale: Any) -> Any:
            totals, scale = jax.tree.map(lambda x: x[0], (totals, scale))
            inputs = [x[0] if spec is own else x for x, spec in zip(inputs, read, strict=True)]
            return jax.tree.map(lambda x: x[None], run(totals, state, inputs, scale))

        axes = set(mesh.axis_names) - (set() if lanes.within is None else set(lanes.within.mesh))
        specs = {"in_specs": (own, whole, read, own), "out_specs": own}
        return jax.shard_map(call, mesh=mesh, axis_names=axes, check_vma=False, **specs)

    def _gathered(self, variables: Sequence[Variable], values: Sequence[Any], stage: int) -> list[Any]:
        """Values as a micro-batch reads them: parameters whole, so that the examples stay shared out."""
        read, whole = self.pipeline.gathered, self.whole[stage]
        return [
            jax.lax.with_sharding_constraint(x, NamedSharding(whole.mesh, read[v])) if v in read else x
            for v, x in zip(variables, values, strict=True)
        ]

    def _is_free(self, v: Variable, stage: int) -> bool:
        """Whether a value stays in a stage whose devices may share out more of it than its examples."""
        return self.pipeline.lanes.within is not None and self.readers(v) == [stage] and v.ndim > 0

    def _laid_out(self, v: Variable, value: Any, stage: int, is_free: bool) -> Any:
        """A value as others read it; if it is free, dimensions are split as the partitioner finds best."""
        if self.pipeline.lanes.within is None:
            return value
        spec = self.pipeline.specs.get(v, PartitionSpec())
        if is_free:
            free = PartitionSpec.UNCONSTRAINED
            spec = PartitionSpec(*(axes or free for axes in (*spec, *[None] * v.ndim)[: v.ndim]))
        return jax.lax.with_sharding_constraint(value, NamedSharding(self.whole[stage].mesh, spec))

    def _merging(self, part: StagePart) -> Any:
        """From the sums of each lane to those of all."""
        results = [self.pipeline.loop.sums[i] for i in part.sums]
        kinds = [self.sum_type(result, part.stage) for result in results]
        given = [self.total_type(result, part.stage) for result in results]

        def merge(_: Any, totals: Any) -> Any:
            return [jnp.sum(total, 0, dtype=total.dtype) for total in totals]

        return self.compiled(merge, part.stage, (), given, outs=[kind.sharding for kind in kinds])

    def _once(self, stage: int, program: Program) -> Any:
        run = self.lowered(program)

        def call(_: Any, state: Any, inputs: Any) -> Any:
            return run(state, inputs)

        call.__name__ = program.name
        types = [[self.typed(v, stage) for v in group] for group in (program.state, program.inputs)]
        outs = [self.lies(v, stage) for v in program.outputs]
        return self.compiled(call, stage, (), *types, outs=outs)

    def _zeros_of(self, part: StagePart) -> Any:
        kinds = [self.total_type(self.pipeline.loop.sums[i], part.stage) for i in part.sums]
        outs = [kind.sharding for kind in kinds]
        return self.compiled(
            lambda: [jnp.zeros(kind.shape, kind.dtype) for kind in kinds], part.stage, outs=outs
        )

    def compiled_parts(self) -> Iterator[CompiledPart]:
        """All parts of all stages."""
        times = self.pipeline.schedule.micro_batches
        for stage, program in self.pipeline.once.items():
            yield CompiledPart(f"once in stage {stage}", 1, program, self.once[stage])
        for (stage, work), part in self.parts.items():
            name, sums = f"{work.value} of stage {stage}", self._summed(part)
            yield CompiledPart(name, times, part.program, part.call, sums)
            if (merge := self.merges.get((stage, work))) is not None:
                yield CompiledPart(f"sums of {name}", 1, part.program, merge, sums)
        for update in self.updates:
            is_one = update.stage < self.pipeline.schedule.stages
            name = f"update of stage {update.stage}" if is_one else "update of all stages"
            yield CompiledPart(name, 1, update.program, update.call)

    def _summed(self, part: StagePart) -> tuple[Variable, ...]:
        return tuple(self.pipeline.loop.sums[i].part for i in part.sums)

    def _beginning(self) -> Any:
        """From the batch and what is handed on to the micro-batches, what is handed on, and their shares."""
        pipeline, loop = self.pipeline, self.pipeline.loop
        ahead, count = pipeline.ahead, pipeline.schedule.micro_batches
        following = [ahead.next_state[v] for v in ahead.state]
        run = lower(ahead, (*following, *ahead.outputs))

        def call(_: Any, state: Any, batch: Any) -> Any:
            pieces = self.cut_up(batch)
            handed = []
            for _i in range(loop.how.steps):
                found = run(state, ())
                state = found[: len(following)]
                handed.append(found[len(following) :])
            joined = [jnp.stack(values) for values in zip(*handed, strict=True)]
            turns = [pipeline.lanes.turn(i) for i in range(count)]
            scales = loop.batch.scales(pieces)
            shares = [None if scales is None else scales[turn] for turn in turns]
            given, told = [[[x[turn] for x in group] for turn in turns] for group in (pieces, joined)]
            return given, told, state, shares

        outs = (
            [[self.lies(v, 0) for v in loop.batch.given]] * count,
            [[self.lies(v, 0) for v in ahead.outputs]] * count,
            self.whole[0],
            self.share_lies(0),
        )
        return self.compiled(call, 0, (), [v.aval for v in ahead.state], self.batch, outs=outs)
