"""A training Program that is cut into stages: the Programs of each, and what lies where; see ``pipeline``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

from jax.sharding import PartitionSpec

from onward.core.check import check
from onward.core.cost import size
from onward.core.errors import ArgumentError, GraphError
from onward.core.marks import ACCUMULATE
from onward.core.meshes import axes_of, expect_fit, part_size
from onward.core.names import Names
from onward.core.program import Op, Partition, Program, Variable
from onward.core.words import Pass
from onward.develop.accumulation.loop import LoopPlan, LoopResult
from onward.distribute.pipeline.handed_on import expect_handed_on
from onward.distribute.pipeline.lanes import Lanes
from onward.distribute.pipeline.loops import StageLoops, loop_of, shared_out
from onward.distribute.pipeline.once import ONCE, Place, Work, with_once
from onward.distribute.pipeline.parts import apart, parts_of
from onward.distribute.pipeline.schedule import PipelineSchedule, StageWork
from onward.distribute.pipeline.shared import summed_in_stages
from onward.distribute.pipeline.stage_specs import (
    STAGES,
    Specs,
    batch_axes,
    data_specs,
    result_specs,
    stack_specs,
    stacked,
    state_specs,
    without_axes,
)
from onward.distribute.pipeline.stages import Stages, stages_by_name, stages_of
from onward.distribute.pipeline.text import text_of
from onward.distribute.pipeline.updates import UpdatePlacing

F, B, W = StageWork
Homes = Mapping[str, int]  # the stage of each forward activation, by its name


@dataclass(frozen=True, eq=False, repr=False)
class Pipeline:
    """The Programs of each stage, the order in which they run, and the stage where each value lies.

    Attributes:
        program: the training Program that was cut.
        accumulated: the same over micro-batches, on one device, whose numbers a step of the pipeline gives.
        loops: how it puts together what micro-batches make, and the loops over layers of the stages.
        schedule: which stage does what when.
        statistics: what micro-batches read of the whole batch, made of its data before it is cut.
        ahead: what a micro-batch hands on to the next one without its data, such as random keys: it runs for
            all of them before the first.
        once: for some stages the Program of what is the same for all micro-batches and kept for the backward
            pass or read by other stages, such as parameters in a low precision: it runs once a step.
        parts: for each stage and each of its works the Program; none where there is nothing to compute.
        updates: for each phase of the update and each stage the Program.
        homes: the stage where each Variable of state lies, and each result; that of stacks, of which each
            stage has a part, is the number of stages.
        lanes: the devices of each stage, and which of them have micro-batches of their own.
    """

    program: Program
    accumulated: Program
    loops: StageLoops
    schedule: PipelineSchedule
    statistics: Program
    ahead: Program
    once: Mapping[int, Program]
    parts: Mapping[Place, Program]
    updates: Mapping[tuple[int, int], Program]
    homes: Mapping[Variable, int]
    lanes: Lanes

    @property
    def advice(self) -> str:
        """The advice for a call that expects a Program and is given a Pipeline."""
        return (
            "A Pipeline is many already. Transform the Program first; compile, plan, memory, collectives and "
            "save_picture take it."
        )

    @property
    def loop(self) -> LoopPlan:
        """How it puts together what micro-batches make."""
        return self.loops.loop

    @property
    def results(self) -> tuple[LoopResult, ...]:
        """The values that the update is given of micro-batches: sums, stacks of them, and what is joined."""
        return (*self._plan.sums, *self._plan.joined)

    @cached_property
    def _plan(self) -> LoopPlan:
        """The loop over micro-batches as it is on one device."""
        return loop_of(self.accumulated)

    @property
    def partition(self) -> Partition | None:
        """The mesh of devices that each stage has, and what they share; None: one device."""
        return self.lanes.mesh

    @cached_property
    def in_lanes(self) -> frozenset[Variable]:
        """The values that each lane has of its own: all that is given and made of its micro-batch."""
        if not self.lanes.axes:
            return frozenset()
        made = {v for part in self.parts.values() for op in part.ops for v in op.outputs}
        results = (r.part for r in (*self.results, *self.loop.sums))
        return frozenset({*self.loop.batch.given, *self.ahead.outputs, *made, *results})

    @cached_property
    def readers(self) -> Mapping[Variable, tuple[Work, ...]]:
        """For each value of a micro-batch the works that are given it, in order."""
        found: dict[Variable, tuple[Work, ...]] = {}
        for work, part in self.works.items():
            for v in part.inputs:
                found[v] = (*found.get(v, ()), work)
        return found

    @cached_property
    def state_specs(self) -> Specs:
        """How state and what belongs to it is split over the devices of its stage."""
        how = self.lanes.within
        if how is None:
            return {}
        found = state_specs(how, self.accumulated, self._plan, self.once.values())
        return self.loops.with_pieces(found)

    @cached_property
    def specs(self) -> Specs:
        """How each value is split over the devices of a stage; what is whole on all is not among them."""
        if self.partition is None:
            return {}
        stacks = stack_specs(self.state_specs, self.once.values())
        within = self.lanes.within
        data = {} if within is None else data_specs(within, self.accumulated, self._plan)
        results = result_specs(self.partition, self._plan)
        return self.loops.with_pieces({**self.state_specs, **stacks, **data, **results})

    @cached_property
    def gathered(self) -> Specs:
        """How a micro-batch reads what the axes of its examples split: whole along these, for a moment.

        Of a stack one layer is read at a time.
        """
        how = self.lanes.within
        if how is None:
            return {}
        axes = batch_axes(how, self.loop.how.split)
        specs = {v: spec for v, spec in self.state_specs.items() if v not in self.loops.alike}
        read = {v: without_axes(spec, axes) for v, spec in specs.items()}
        return {v: spec for v, spec in read.items() if axes_of(spec) != axes_of(self.state_specs[v])}

    @cached_property
    def borrowed(self) -> Mapping[str, tuple[int, ...]]:
        """The other stages that read state of a stage, such as a table that two of them share, by name."""
        found: dict[str, set[int]] = {}
        for (stage, _), part in self.works.items():
            for v in part.state:
                if self.home(v.name) != stage:
                    found.setdefault(v.name, set()).add(stage)
        return {name: tuple(sorted(stages)) for name, stages in found.items()}

    def home(self, name: str) -> int:
        """The stage where a Variable of state lies, or the piece of a stack."""
        of_piece = self.loops.stage.get(name)
        return self.homes[self.accumulated[name]] if of_piece is None else of_piece

    def over_stages(self, v: Variable) -> PartitionSpec:
        """How what the update makes of stacks is split over the devices of all stages, layer by layer."""
        spec = self.specs.get(v, PartitionSpec())
        return stacked(spec) if v.shape[:1] == (self.loops.layers,) else spec

    @property
    def works(self) -> Mapping[Work, Program]:
        """All that is computed before the update: what is done once a step, then the parts."""
        found: dict[Work, Program] = {(stage, ONCE): part for stage, part in self.once.items()}
        return found | {(stage, work): part for (stage, work), part in self.parts.items()}

    def kept(self, stage: int) -> int:
        """The bytes that a device of a stage keeps of a micro-batch from its forward to its backward pass."""
        made = {v for (_, work), part in self.parts.items() if work is F for v in part.outputs}
        later = [v for work in (B, W) for v in getattr(self.parts.get((stage, work)), "inputs", ())]
        return sum(self.bytes_of(v) for v in dict.fromkeys(later) if v in made)

    def sent(self, stage: int) -> int:
        """The bytes that each device of a stage sends to others for each micro-batch."""
        made = [v for (of, _), part in self.parts.items() if of == stage for v in part.outputs]
        return sum(self.bytes_of(v) * len({s for s, _ in self.readers.get(v, ())} - {stage}) for v in made)

    def bytes_of(self, v: Variable) -> int:
        """The bytes of a value on each device of a stage that has it."""
        mesh = {} if self.partition is None else self.partition.mesh
        spec = self.specs.get(v)
        if self.homes.get(v) == self.schedule.stages:
            spec, mesh = self.over_stages(v), {STAGES: self.schedule.stages, **mesh}
        return size(v) * part_size(v, spec, mesh) // max(v.size, 1)

    def state_of(self, stage: int) -> list[Variable]:
        """The state that a stage has, or has a part of."""
        return [v for v in self.accumulated.state if self.homes[v] in (stage, self.schedule.stages)]

    def __repr__(self) -> str:
        return f"Pipeline({self.program.name!r}, {self.schedule.stages} stages, {self.schedule.name})"

    def __str__(self) -> str:
        return text_of(self)


def loops_of(program: Program, accumulated: Program, stages: int, at: Sequence[str]) -> StageLoops:
    """The loops of a Program that accumulates: one over layers for each stage, unless ``at`` says how.

    Raises:
        GraphError: micro-batches hand on what depends on their data.
        ArgumentError: the stages cannot share the turns of a loop over layers evenly.
    """
    whole = StageLoops(loop_of(accumulated))
    expect_handed_on(program, whole.loop)
    return whole if at else shared_out(whole, stages)


def homes_of(loops: StageLoops, stages: int, at: Sequence[str]) -> Homes:
    """The stage of each forward activation of a Program that accumulates, by its name."""
    found = stages_of(loops.loop.turn, frozenset(loops.ahead), stages, at, loops.begins[1:])
    return {v.name: at for op, at in found.items() if op.made_by is Pass.FORWARD for v in op.outputs}


def cut(
    program: Program,
    accumulated: Program,
    loops: StageLoops,
    schedule: PipelineSchedule,
    homes: Homes,
    lanes: Lanes,
) -> Pipeline:
    """Cut a Program that accumulates into stages, whose forward activations have these homes.

    Raises:
        GraphError: ops stand before the forward pass.
    """
    accumulated, loops, inside = _with_sums(accumulated, loops, homes, schedule.stages)
    op = next(op for op in accumulated.ops if op.type is ACCUMULATE)
    loop = loops.loop
    _expect_divided(loops, lanes.within)
    turn = loop.turn
    _expect_nothing_before(program, loop)
    ahead = loops.ahead
    handed_on = {*(old for old, *_ in loop.threaded), *(v for o in ahead for v in o.outputs)}
    constants = dict(turn.constants)
    groups = with_once(turn, _groups(turn, inside, schedule, constants), handed_on)
    makers = {v: place for place, ops in groups.items() for o in ops for v in o.outputs}
    makers = {v: makers.get(v, (0, F)) for v in turn.outputs}
    works = parts_of(replace(turn, constants=constants), groups, makers, [old for old, *_ in loop.threaded])
    once = {stage: part for (stage, work), part in works.items() if work == ONCE}
    parts = {(of, StageWork(work)): part for (of, work), part in works.items() if work != ONCE}
    given = {r.whole: makers[r.part][0] for r in (*loop.sums, *loop.joined)}
    given |= {new: 0 for *_, new in loop.threaded}
    given |= dict.fromkeys(loops.pieces, schedule.stages)
    first = loop.whole.before
    rest = [o for o in accumulated.ops if o is not op and o not in first]
    given |= {v: 0 for o in first for v in o.outputs}
    placing = UpdatePlacing(accumulated, rest, given, _first_readers(works))
    updates = parts_of(placing.source, placing.groups, _ends(accumulated, placing))
    before = _before(program, loop, ahead, works)
    statistics = _statistics(accumulated, loop, rest)
    inner = loops, schedule, statistics, before, once, parts, updates
    return Pipeline(program, accumulated, *inner, placing.homes, lanes)


def _with_sums(
    accumulated: Program, loops: StageLoops, homes: Homes, stages: int
) -> tuple[Program, StageLoops, Stages]:
    """A Program that accumulates, with a sum in each stage of what several have a part of.

    With it its loops, and the stage of each op of a turn.
    """
    inside = stages_by_name(loops.loop.turn, frozenset(loops.ahead), stages, homes)
    found = summed_in_stages(accumulated, inside)
    if found is accumulated:
        return accumulated, loops, inside
    whole = StageLoops(loop_of(found))
    loops = shared_out(whole, stages) if loops.begins else whole
    return found, loops, stages_by_name(loops.loop.turn, frozenset(loops.ahead), stages, homes)


def _statistics(program: Program, loop: LoopPlan, rest: Iterable[Op]) -> Program:
    """The Program of the statistics of data that the loop, the update or the results read."""
    read = {loop.before[v] for v in loop.turn.inputs if v in loop.before}
    read |= {*(v for op in rest for v in op.inputs), *program.outputs, *program.next_state.values()}
    first = loop.whole.before
    wanted = {v: ("statistics",) for op in first for v in op.outputs if v in read}
    return parts_of(program, {("statistics",): first}, wanted)[("statistics",)]


def _before(program: Program, loop: LoopPlan, ahead: Sequence[Op], parts: Mapping[Work, Program]) -> Program:
    """The Program of what micro-batches hand on: its outputs are what the stages read of that."""
    read = {v for part in parts.values() for v in part.inputs}
    olds = tuple(old for old, *_ in loop.threaded)
    return check(
        Program(
            f"{program.name}_ahead",
            state=olds,
            constants=loop.turn.constants,
            ops=tuple(ahead),
            outputs=tuple(v for v in (*olds, *(v for o in ahead for v in o.outputs)) if v in read),
            next_state={old: new for old, new, _ in loop.threaded},
        )
    )


def _first_readers(parts: Mapping[Work, Program]) -> dict[str, int]:
    """For what the stages read of the state, by name, the first that does."""
    found: dict[str, int] = {}
    for (stage, _), part in parts.items():
        found.update((v.name, min(stage, found.get(v.name, stage))) for v in part.state)
    return found


def _groups(
    turn: Program, inside: Stages, schedule: PipelineSchedule, constants: dict[Variable, Any]
) -> dict[Place, list[Op]]:
    """The ops of each stage and work; ``constants`` get those of what is taken apart."""
    groups: dict[Place, list[Op]] = {}
    names = Names(turn.variables)
    for stage in range(schedule.stages):
        own = [op for op in turn.ops if inside.get(op) == stage]
        groups[stage, F] = [op for op in own if op.made_by is Pass.FORWARD]
        late = [op for op in own if op.made_by is not Pass.FORWARD]
        if schedule.splits_backward:
            elsewhere = {v for op in turn.ops if inside.get(op, stage) != stage for v in op.inputs}
            groups[stage, B], groups[stage, W] = apart(late, elsewhere, turn.outputs, names, constants)
        else:
            groups[stage, B] = late
    return {place: ops for place, ops in groups.items() if ops or place[1] is F}


def _ends(program: Program, placing: UpdatePlacing) -> dict[Variable, tuple[int, int]]:
    """The part of the update that hands out each result and each next value of state."""
    made = {v: place for place, ops in placing.groups.items() for op in ops for v in op.outputs}
    loop = loop_of(program)
    looped = {r.whole for r in (*loop.sums, *loop.joined)}
    ends = dict.fromkeys((*program.next_state.values(), *program.outputs))
    return {v: made.get(v, (0, placing.homes.get(v, 0))) for v in ends if v in made or v in looped}


def _expect_divided(loops: StageLoops, how: Partition | None) -> None:
    """Raise ``ArgumentError`` where the devices of a stage cannot share a micro-batch or a stack."""
    if how is None:
        return
    loop, axes = loops.loop, batch_axes(how, loops.loop.how.split)
    count = prod(how.mesh[axis] for axis in axes)
    if loop.short % count:
        raise ArgumentError(
            f"pipeline: a micro-batch has {loop.short} rows, which {' x '.join(axes)}={count} does not "
            f"divide. Feed {count * loop.how.steps} rows or a multiple, or take fewer micro-batches or "
            "devices."
        )
    for v, told in {**{v: v for v in loop.turn.inputs}, **loops.alike}.items():
        if told.name in how.specs:
            expect_fit(v, how.specs[told.name], how.mesh)


def _expect_nothing_before(program: Program, loop: LoopPlan) -> None:
    if others := [op for op in loop.part.before if op.made_by is not Pass.FORWARD]:
        op: Any = others[0]
        raise GraphError(
            f"pipeline: {op!r} of {program.name!r} belongs to the update and stands before the forward pass, "
            "which reads it, so that no stage can begin without the update of others. Take an optimizer that "
            "changes parameters after the backward pass."
        )
