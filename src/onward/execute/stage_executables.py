"""The executables of a pipeline: one for each stage and work, each compiled for the device of its stage."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from onward.core.lower import lower
from onward.core.program import Op, Program, Variable
from onward.develop.accumulation.micro_batches import LoopPlan, LoopResult
from onward.distribute.pipeline.cut import Pipeline
from onward.distribute.pipeline.once import Place
from onward.execute.options import Value, all_options
from onward.execute.stage_rows import StagePlace, StageRows, sharding_of


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


class StageExecutables:
    """Everything that is compiled of a Pipeline, and where its values lie.

    Args:
        pipeline: the Programs and their order.
        donate: the names of the state whose buffers a step may reuse.
        options: for the compiler.
        scopes: for the ops of a part those that its instructions have; their own unless given.

    Attributes:
        rows: the devices of the stages.
        whole: for each stage how a value lies that all of its devices have, and last that of all stages.
        home: how each state Variable lies, by name.
        split: the data that is cut into micro-batches.
        parts: of each stage and work.
        statistics: what micro-batches read of the whole batch, if anything.
        once: for some stages, what they make of their state once a step.
        zeros: the first sums of a part.
        pieces: by the name of a piece of state that is stacked along layers, the stack and the piece.
        last: the work in which a stage reads a value of a micro-batch for the last time.
        order: stage, work and micro-batch, as they are issued.
        results: what the update is given of all micro-batches.
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
    ) -> None:
        self.pipeline, self.program, self.donate = pipeline, pipeline.accumulated, donate
        self._scopes = scopes
        self._options = dict(all_options(options))
        self.rows = StageRows(pipeline)
        self.whole = self.rows.whole
        self._places: dict[tuple[Variable, int], StagePlace] = {}
        self._kept: dict[Variable, Any] = {}  # how values lie that a compiled part left as it found best
        self.pieces = {v.name: (stack, v) for stack, group in pipeline.loops.pieces.items() for v in group}
        self.home = {v.name: self.lies(v, pipeline.homes[v]) for v in self.program.state}
        loop = pipeline.loop
        self.split = [v for v in loop.turn.inputs if v.name in loop.how.split]
        self.results = {r.whole: r for r in pipeline.results}
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
        self.merges = {place: self._merging(self.parts[place]) for place in self.zeros if pipeline.lanes}
        self.begin = self._beginning()
        self.updates = [StageUpdate(self, phase, stage) for phase, stage in sorted(pipeline.updates)]

    def lies(self, v: Variable, stage: int) -> StagePlace:
        """How a value lies in a stage, whose devices may share it out, or over all stages."""
        if v in self._kept:
            return self._kept[v]
        if (v, stage) not in self._places:
            found, pipeline = self.lies_alike(v, stage), self.pipeline
            if v in pipeline.in_lanes:
                spec = PartitionSpec(pipeline.lanes, *found.spec)
                found = NamedSharding(found.mesh, spec)
            self._places[v, stage] = found
        return self._places[v, stage]

    def lies_alike(self, v: Variable, stage: int) -> StagePlace:
        """How a value lies in a stage where all lanes have the same."""
        found, pipeline = self.whole[stage], self.pipeline
        is_over_all = stage == pipeline.schedule.stages
        spec = pipeline.over_stages(v) if is_over_all else pipeline.specs.get(v)
        return found if spec is None else NamedSharding(found.mesh, spec)

    def readers(self, v: Variable) -> Sequence[int]:
        """The stages that are given a value, each once."""
        return self._readers[v]

    def typed(self, v: Variable, stage: int) -> jax.ShapeDtypeStruct:
        """The type of a value as it lies in a stage."""
        return self._type(v, stage, v.shape, v.dtype)

    def _type(self, v: Variable, stage: int, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """The type of what lies as a value does; of several lanes that of all, one after the other."""
        if v in self.pipeline.in_lanes:
            shape = (self.pipeline.lane_count, *shape)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding_of(self.lies(v, stage)))

    def lowered(self, program: Program) -> Callable[..., list[Any]]:
        """The function of a part, from state and inputs."""
        scopes = None if self._scopes is None else self._scopes(program)
        return lower(program, program.outputs, at_once=True, scopes=scopes)

    def compiled(self, run: Any, stage: int, *types: Any, outs: Any = None) -> Any:
        """A function compiled for the devices of a stage, which takes over its first argument.

        All devices have all of what no ``outs`` or type lays out.
        """
        return self._lying(run, stage, types, outs)[0]

    def _lying(self, run: Any, stage: int, types: Sequence[Any], outs: Any) -> tuple[Any, Any]:
        """A compiled function, and how its results lie, which it decides where ``outs`` is None."""
        whole = sharding_of(self.whole[stage])
        laid = jax.tree.map(sharding_of, outs or whole)
        jitted = jax.jit(run, donate_argnums=(0,) if types else (), out_shardings=laid)

        def placed(kind: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=kind.sharding or whole)

        found: tuple[Any, Any] = self.rows.compiled(
            jitted, stage, jax.tree.map(placed, types), laid, self._options
        )
        return found

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
            added = [scaled(loop, loop.sums[i], found[loop.sums[i].part], scale) for i in sums]
            grown = [total + x.astype(total.dtype) for total, x in zip(totals, added, strict=True)]
            given = [scaled(loop, loop.joined[i], found[loop.joined[i].part], scale) for i in pieces]
            return grown, given, [self._sent(v, found[v], stage, v in free) for v in sends]

        call = self._in_lanes(lane, program.inputs, stage)
        types = [[self.typed(v, stage) for v in group] for group in (program.state, program.inputs)]
        call.__name__ = program.name if program.name.isidentifier() else "stage"
        totals = [self._total_type(loop.sums[i], stage) for i in sums]
        joined = [loop.joined[i].part for i in pieces]
        lain = [self.lies(v, stage) for v in joined]
        outs = [x.sharding for x in totals], lain, [None if v in free else self.lies(v, stage) for v in sends]
        made, (*_, lie) = self._lying(call, stage, (totals, *types, self._scale_in(stage)), outs)
        self._kept |= {v: x for v, x in zip(sends, lie, strict=True) if v in free}
        return StagePart(stage, program, made, sums, pieces, sends)

    def _in_lanes(self, run: Any, inputs: Sequence[Variable], stage: int) -> Any:
        """What one lane computes, from sums, state, inputs and a scale, for all lanes of a stage at once."""
        pipeline = self.pipeline
        if not pipeline.lanes:
            return run
        mesh = self.whole[stage].mesh
        own, whole = PartitionSpec(pipeline.lanes), PartitionSpec()
        read = [own if v in pipeline.in_lanes else whole for v in inputs]

        def call(totals: Any, state: Any, inputs: Any, scale: Any) -> Any:
            totals, scale = jax.tree.map(lambda x: x[0], (totals, scale))
            inputs = [x[0] if spec is own else x for x, spec in zip(inputs, read, strict=True)]
            return jax.tree.map(lambda x: x[None], run(totals, state, inputs, scale))

        axes = set(mesh.axis_names) - (set() if pipeline.lane is None else set(pipeline.lane.mesh))
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
        return self.pipeline.lane is not None and self.readers(v) == [stage] and v.ndim > 0

    def _sent(self, v: Variable, value: Any, stage: int, is_free: bool) -> Any:
        """A value as others read it; if it is free, dimensions are split as the partitioner finds best."""
        if self.pipeline.lane is None:
            return value
        spec = self.pipeline.specs.get(v, PartitionSpec())
        if is_free:
            free = PartitionSpec.UNCONSTRAINED
            spec = PartitionSpec(*(axes or free for axes in (*spec, *[None] * v.ndim)[: v.ndim]))
        return jax.lax.with_sharding_constraint(value, NamedSharding(self.whole[stage].mesh, spec))

    def sum_type(self, result: LoopResult, stage: int) -> jax.ShapeDtypeStruct:
        """The type of a sum over all micro-batches as it lies in a stage."""
        kind, place = result.sum_type, sharding_of(self.lies_alike(result.part, stage))
        return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=place)

    def _total_type(self, result: LoopResult, stage: int) -> jax.ShapeDtypeStruct:
        """The type of a sum over the micro-batches of each lane."""
        return self._type(result.part, stage, result.part.shape, result.sum_type.dtype)

    def _merging(self, part: StagePart) -> Any:
        """From the sums of each lane to those of all."""
        results = [self.pipeline.loop.sums[i] for i in part.sums]
        kinds = [self.sum_type(result, part.stage) for result in results]
        given = [self._total_type(result, part.stage) for result in results]

        def merge(_: Any, totals: Any) -> Any:
            return [jnp.sum(total, 0, dtype=total.dtype) for total in totals]

        return self.compiled(merge, part.stage, (), given, outs=[kind.sharding for kind in kinds])

    def piece_type(self, result: LoopResult, stage: int) -> jax.ShapeDtypeStruct:
        """The type of what a micro-batch makes of a value that is joined, as it lies in a stage."""
        loop, scale = self.pipeline.loop, self.scale
        kind = jax.eval_shape(lambda x, scale: scaled(loop, result, x, scale), result.part.aval, scale)
        return self._type(result.part, stage, kind.shape, kind.dtype)

    def _once(self, stage: int, program: Program) -> Any:
        run = self.lowered(program)

        def call(_: Any, state: Any, inputs: Any) -> Any:
            return run(state, inputs)

        call.__name__ = program.name
        types = [[self.typed(v, stage) for v in group] for group in (program.state, program.inputs)]
        outs = [self.lies(v, stage) for v in program.outputs]
        return self.compiled(call, stage, (), *types, outs=outs)

    def _zeros_of(self, part: StagePart) -> Any:
        kinds = [self._total_type(self.pipeline.loop.sums[i], part.stage) for i in part.sums]
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

    @cached_property
    def scale(self) -> Any:
        """The type of the share of a micro-batch; None where all count alike."""
        loop = self.pipeline.loop
        found = jax.eval_shape(lambda batch: loop.scales(self._pieces(batch)), self._batch)
        return None if found is None else jax.ShapeDtypeStruct((), found.dtype)

    def _scale_in(self, stage: int) -> Any:
        """The same as it lies in a stage, for each lane."""
        if self.scale is None or not self.pipeline.lanes:
            return self.scale
        shape, place = (self.pipeline.lane_count,), self.share_lies(stage)
        return jax.ShapeDtypeStruct(shape, self.scale.dtype, sharding=place)

    def share_lies(self, stage: int) -> StagePlace:
        """How the share of a micro-batch lies in a stage."""
        lanes, whole = self.pipeline.lanes, self.whole[stage]
        return NamedSharding(whole.mesh, PartitionSpec(lanes)) if lanes else whole

    @property
    def _batch(self) -> list[Any]:
        """The types of the data that is cut."""
        return [self.program[v.name].aval for v in self.split]

    def _pieces(self, batch: Sequence[Any]) -> list[Any]:
        return self.pipeline.loop.pieces(dict(zip(self.split, batch, strict=True)))

    def _beginning(self) -> Any:
        """From the batch and what is handed on to the micro-batches, what is handed on, and their shares."""
        pipeline, loop = self.pipeline, self.pipeline.loop
        ahead, count, lanes = pipeline.ahead, pipeline.schedule.micro_batches, pipeline.lane_count
        following = [ahead.next_state[v] for v in ahead.state]
        run = lower(ahead, (*following, *ahead.outputs))

        def call(_: Any, state: Any, batch: Any) -> Any:
            pieces = self._pieces(batch)
            handed = []
            for _i in range(loop.how.steps):
                found = run(state, ())
                state = found[: len(following)]
                handed.append(found[len(following) :])
            scales = loop.scales(pieces)
            if not pipeline.lanes:
                shares = [None if scales is None else scales[i] for i in range(count)]
                return [[x[i] for x in pieces] for i in range(count)], handed, state, shares
            turns = [slice(i * lanes, (i + 1) * lanes) for i in range(count)]
            shares = [None if scales is None else scales[turn] for turn in turns]
            handed = [list(map(jnp.stack, zip(*handed[turn], strict=True))) for turn in turns]
            return [[x[turn] for x in pieces] for turn in turns], handed, state, shares

        outs = (
            [[self.lies(v, 0) for v in loop.given]] * count,
            [[self.lies(v, 0) for v in ahead.outputs]] * count,
            self.whole[0],
            self.share_lies(0),
        )
        return self.compiled(call, 0, (), [v.aval for v in ahead.state], self._batch, outs=outs)


class StageUpdate:
    """One phase of the update in one stage, compiled."""

    def __init__(self, stages: StageExecutables, phase: int, stage: int) -> None:
        pipeline = stages.pipeline
        self.stages, self.stage, self.program = stages, stage, pipeline.updates[phase, stage]
        later = [part for key, part in pipeline.updates.items() if key > (phase, stage)]
        ends = {*stages.program.outputs, *stages.program.next_state.values()}
        self.taken = [v for v in self.program.state if self._may_take(stages, v, later, ends)]
        given = (*self.program.state, *self.program.inputs)
        self.lent = [v for v in given if v not in set(self.taken)]
        run = stages.lowered(self.program)
        state = len(self.program.state)

        def call(taken: Any, lent: Any) -> Any:
            found = dict(zip((*self.taken, *self.lent), (*taken, *lent), strict=True))
            values = [self._whole(v, found[v]) for v in given]
            return run(values[:state], values[state:])

        call.__name__ = "update"
        types = [[self._type(v) for v in group] for group in (self.taken, self.lent)]
        outs = [stages.lies(v, stage) for v in self.program.outputs]
        self.call = stages.compiled(call, stage, *types, outs=outs)

    def _may_take(
        self, stages: StageExecutables, v: Variable, later: Collection[Program], ends: Collection[Variable]
    ) -> bool:
        """Whether the buffer of a state Variable may become that of its next value."""
        own = v.name in stages.donate and stages.pipeline.homes[v] == self.stage and v not in ends
        made = {o for op in self.program.ops for o in op.outputs}
        return own and stages.program.next_state[v] in made and not any(v in part.state for part in later)

    def _type(self, v: Variable) -> Any:
        """The type of what it is given for a Variable: a sum, or all pieces, of what micro-batches made."""
        stages, result = self.stages, self.stages.results.get(v)
        if result is None:
            return stages.typed(v, self.stage)
        if result.is_sum:
            return stages.sum_type(result, self.stage)
        return [stages.piece_type(result, self.stage)] * stages.pipeline.schedule.micro_batches

    def _whole(self, v: Variable, value: Any) -> Any:
        """A result of all micro-batches, put together."""
        result = self.stages.results.get(v)
        if result is None:
            return value
        if result.is_sum:
            return value.astype(v.dtype)
        if not self.stages.pipeline.lanes:
            return result.joined(jnp.stack(value))
        whole = sharding_of(self.stages.whole[self.stage])
        return result.joined(jax.lax.with_sharding_constraint(jnp.concatenate(value), whole))


def scaled(loop: LoopPlan, result: LoopResult, x: Any, scale: Any) -> Any:
    """The share of a micro-batch in a sum, or its piece of what is joined."""
    return loop.scaled(x, scale) if result.is_weighed else x
