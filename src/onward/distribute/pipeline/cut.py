"""A training Program that is cut into stages: the Programs of each, and what lies where; see ``pipeline``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from onward.core.check import check
from onward.core.columns import columns
from onward.core.cost import cost, size
from onward.core.errors import ArgumentError, GraphError
from onward.core.marks import ACCUMULATE
from onward.core.meshes import longest_axis
from onward.core.program import Op, Program, Variable
from onward.core.show import human_bytes
from onward.core.walk import ancestors, needed_ops
from onward.core.words import Kind, Pass
from onward.develop.accumulation.micro_batches import LoopPlan, LoopResult
from onward.distribute.pipeline.in_shape import in_shape_of
from onward.distribute.pipeline.once import ONCE, Place, Work, with_once
from onward.distribute.pipeline.parts import apart, parts_of
from onward.distribute.pipeline.schedule import PipelineSchedule, StageWork
from onward.distribute.pipeline.stages import Stages, stages_by_name, stages_of
from onward.distribute.pipeline.updates import UpdatePlacing

F, B, W = StageWork
Homes = Mapping[str, int]  # the stage of each forward activation, by its name


@dataclass(frozen=True, eq=False)
class Pipeline:
    """The Programs of each stage, the order in which they run, and the stage where each value lies.

    Attributes:
        program: the training Program that was cut.
        accumulated: the same over micro-batches, on one device, whose numbers a step of the pipeline gives.
        loop: how it puts together what micro-batches make.
        schedule: which stage does what when.
        statistics: what micro-batches read of the whole batch, made of its data before it is cut.
        ahead: what a micro-batch hands on to the next one without its data, such as random keys: it runs for
            all of them before the first.
        once: for some stages the Program of what is the same for all micro-batches and kept for the backward
            pass or read by other stages, such as parameters in a low precision: it runs once a step.
        parts: for each stage and each of its works the Program; none where there is nothing to compute.
        updates: for each phase of the update and each stage the Program.
        homes: the stage where each Variable of state lies, and each result.
        data: how many devices each stage has, which share the examples of a micro-batch.
    """

    program: Program
    accumulated: Program
    loop: LoopPlan
    schedule: PipelineSchedule
    statistics: Program
    ahead: Program
    once: Mapping[int, Program]
    parts: Mapping[Place, Program]
    updates: Mapping[tuple[int, int], Program]
    homes: Mapping[Variable, int]
    data: int = 1
    sharded: bool = False

    @property
    def advice(self) -> str:
        """The advice for a call that expects a Program and is given a Pipeline."""
        return (
            "A Pipeline is many already. Transform the Program first; compile, plan and save_picture take it."
        )

    @property
    def results(self) -> tuple[LoopResult, ...]:
        """The values of micro-batches that are added up or joined."""
        return (*self.loop.sums, *self.loop.joined)

    @cached_property
    def readers(self) -> Mapping[Variable, tuple[Work, ...]]:
        """For each value of a micro-batch the works that are given it, in order."""
        found: dict[Variable, tuple[Work, ...]] = {}
        for work, part in self.works.items():
            for v in part.inputs:
                found[v] = (*found.get(v, ()), work)
        return found

    @cached_property
    def split_axes(self) -> Mapping[Variable, int]:
        """The axis of examples of each value that is shared out along it to the devices of a stage."""
        loop = self.loop
        found = {v: 0 for v in loop.turn.inputs if v.name in loop.how.split}
        ops = zip(loop.whole.loop, loop.part.loop, strict=False)
        pairs = [(v, p) for op, part in ops for v, p in zip(op.outputs, part.outputs, strict=False)]
        for v, p in pairs:
            grown = [i for i, (n, m) in enumerate(zip(v.shape, p.shape, strict=False)) if n != m]
            found |= {p: grown[0]} if grown else {}
        found |= {r.whole: r.axis for r in loop.joined if r.axis is not None}
        return {v: axis for v, axis in found.items() if v.shape[axis] % self.data == 0}

    @cached_property
    def shared_axes(self) -> Mapping[Variable, int]:
        """The axis of each parameter, of its gradient and its slots that the devices of a stage share out."""
        if not self.sharded:
            return {}
        of = in_shape_of(self.accumulated, self.loop, self.once.values())
        axes = {p: longest_axis(p, self.data) for p in self.accumulated.parameters}
        return {v: axis for v, p in of.items() if (axis := axes[p]) is not None}

    @cached_property
    def borrowed(self) -> Mapping[str, tuple[int, ...]]:
        """The other stages that read state of a stage, such as a table that two of them share, by name."""
        homes = {v.name: self.homes[v] for v in self.accumulated.state}
        found: dict[str, set[int]] = {}
        for (stage, _), part in self.works.items():
            for v in part.state:
                if homes[v.name] != stage:
                    found.setdefault(v.name, set()).add(stage)
        return {name: tuple(sorted(stages)) for name, stages in found.items()}

    @property
    def works(self) -> Mapping[Work, Program]:
        """All that is computed before the update: what is done once a step, then the parts."""
        found: dict[Work, Program] = {(stage, ONCE): part for stage, part in self.once.items()}
        return found | {(stage, work): part for (stage, work), part in self.parts.items()}

    def kept(self, stage: int) -> int:
        """The bytes that a stage keeps of a micro-batch from its forward pass on to its backward pass."""
        made = {v for (_, work), part in self.parts.items() if work is F for v in part.outputs}
        later = [v for work in (B, W) for v in getattr(self.parts.get((stage, work)), "inputs", ())]
        return sum(size(v) for v in dict.fromkeys(later) if v in made)

    def sent(self, stage: int) -> int:
        """The bytes that a stage sends to others for each micro-batch."""
        made = [v for (of, _), part in self.parts.items() if of == stage for v in part.outputs]
        return sum(size(v) * len({s for s, _ in self.readers.get(v, ())} - {stage}) for v in made)

    def _first(self, stage: int) -> Op:
        """The first op of a stage that reads what came before: the batch, or what stages before it send."""
        part = self.parts[stage, F]
        before = (self.ahead, *self.once.values())
        keys = {v for program in before for v in program.outputs} | self.loop.before.keys()
        return next(
            (op for op in part.ops if not {*part.inputs}.isdisjoint({*op.inputs} - keys)), part.ops[0]
        )

    def __str__(self) -> str:
        head = ("stage", "parameters", "other state", "work", "holds", "of", "sends", "begins with")
        table = columns([head, *map(self._row, range(self.schedule.stages))], right=[1, 2, 3, 4, 5, 6])
        return "\n".join([f"Pipeline of {self.program.name}", table, *self._notes, "", str(self.schedule)])

    def _row(self, stage: int) -> tuple[str, ...]:
        own = [v for v in self.accumulated.state if self.homes[v] == stage]
        parameters = sum(size(v) for v in own if v.kind is Kind.PARAMETER)
        work = sum(cost(part).flops for (of, _), part in self.parts.items() if of == stage)
        first = self._first(stage)
        return (
            str(stage),
            human_bytes(parameters),
            human_bytes(sum(map(size, own)) - parameters),
            f"{100 * work / max(sum(cost(part).flops for part in self.parts.values()), 1):.0f} %",
            str(self.schedule.held[stage]),
            human_bytes(self.kept(stage)),
            human_bytes(self.sent(stage)),
            f"{first.outputs[0].name}{first.at}",
        )

    @property
    def _notes(self) -> list[str]:
        notes = ["what is held and sent is that of one micro-batch; work is counted in operations"]
        if self.data > 1:
            keeps = "a share of its" if self.sharded else "its"
            notes.append(
                f"each stage has {self.data} devices: each keeps {keeps} parameters, gradients and other "
                "state, and a share of what is held and sent"
            )
        whole = [p for p in self.accumulated.parameters if p not in self.shared_axes]
        if self.sharded and whole:
            notes.append(
                f"{human_bytes(sum(map(size, whole)))} of parameters are whole on each of them: "
                f"{self.data} divides no dimension of these"
            )
        if self.once:
            made = [f"{human_bytes(sum(map(size, p.outputs)))} in stage {s}" for s, p in self.once.items()]
            notes.append(f"made of parameters and constants once a step, and kept: {', '.join(made)}")
        for name, stages in self.borrowed.items():
            home, others = self.homes[self.accumulated[name]], " and ".join(map(str, stages))
            notes.append(f"{name} lies in stage {home}, which sends it to {others} at each step")
        whole = [str(s) for s, works in enumerate(self._late) if works == {B}]
        if self.schedule.splits_backward and whole:
            notes.append(
                f"W of stage {' and '.join(whole)} is done in B: other stages wait for these gradients, or "
                "one loop computes both"
            )
        return notes

    @property
    def _late(self) -> list[set[StageWork]]:
        """For each stage the works that have ops after the forward pass."""
        return [{w for w in (B, W) if (s, w) in self.parts} for s in range(self.schedule.stages)]


def homes_of(program: Program, accumulated: Program, stages: int, at: Sequence[str]) -> Homes:
    """The stage of each forward activation of a Program that accumulates, by its name.

    Raises:
        GraphError: micro-batches hand on what depends on their data.
    """
    turn, ahead = _loop_of(accumulated).turn, _ahead(program, _loop_of(accumulated))
    found = stages_of(turn, frozenset(ahead), stages, at)
    return {v.name: at for op, at in found.items() if op.made_by is Pass.FORWARD for v in op.outputs}


def _loop_of(accumulated: Program) -> LoopPlan:
    op: Any = next(op for op in accumulated.ops if op.type is ACCUMULATE)
    plan: LoopPlan = op.body.plan
    return plan


def cut(
    program: Program,
    accumulated: Program,
    schedule: PipelineSchedule,
    homes: Homes,
    data: int,
    sharded: bool = False,
) -> Pipeline:
    """Cut a Program that accumulates into stages, whose forward activations have these homes.

    Raises:
        GraphError: ops stand before the forward pass.
    """
    op = next(op for op in accumulated.ops if op.type is ACCUMULATE)
    loop = _loop_of(accumulated)
    _expect_divided(loop, data)
    turn = loop.turn
    _expect_nothing_before(program, loop)
    ahead = _ahead(program, loop)
    inside = stages_by_name(turn, frozenset(ahead), schedule.stages, homes)
    handed_on = {*(old for old, *_ in loop.threaded), *(v for o in ahead for v in o.outputs)}
    groups = with_once(turn, _groups(turn, inside, schedule), handed_on)
    makers = {v: place for place, ops in groups.items() for o in ops for v in o.outputs}
    makers = {v: makers.get(v, (0, F)) for v in turn.outputs}
    works = parts_of(turn, groups, makers, [old for old, *_ in loop.threaded])
    once = {stage: part for (stage, work), part in works.items() if work == ONCE}
    parts = {(of, StageWork(work)): part for (of, work), part in works.items() if work != ONCE}
    given = {r.whole: makers[r.part][0] for r in (*loop.sums, *loop.joined)}
    given |= {new: 0 for *_, new in loop.threaded}
    first = loop.whole.before
    rest = [o for o in accumulated.ops if o is not op and o not in first]
    given |= {v: 0 for o in first for v in o.outputs}
    placing = UpdatePlacing(accumulated, rest, given, _first_readers(works))
    updates = parts_of(placing.source, placing.groups, _ends(accumulated, placing, loop))
    before = _before(program, loop, ahead, works)
    statistics = _statistics(accumulated, loop, rest)
    inner = loop, schedule, statistics, before, once, parts, updates
    return Pipeline(program, accumulated, *inner, placing.homes, data, sharded)


def _statistics(program: Program, loop: LoopPlan, rest: Iterable[Op]) -> Program:
    """The Program of the statistics of data that the loop, the update or the results read."""
    read = {loop.before[v] for v in loop.turn.inputs if v in loop.before}
    read |= {*(v for op in rest for v in op.inputs), *program.outputs, *program.next_state.values()}
    first = loop.whole.before
    wanted = {v: ("statistics",) for op in first for v in op.outputs if v in read}
    return parts_of(program, {("statistics",): first}, wanted)[("statistics",)]


def _before(program: Program, loop: LoopPlan, ahead: list[Op], parts: Mapping[Work, Program]) -> Program:
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


def _groups(turn: Program, inside: Stages, schedule: PipelineSchedule) -> dict[Place, list[Op]]:
    """The ops of each stage and work."""
    groups: dict[Place, list[Op]] = {}
    for stage in range(schedule.stages):
        own = [op for op in turn.ops if inside.get(op) == stage]
        groups[stage, F] = [op for op in own if op.made_by is Pass.FORWARD]
        late = [op for op in own if op.made_by is not Pass.FORWARD]
        if schedule.splits_backward:
            elsewhere = {v for op in turn.ops if inside.get(op, stage) != stage for v in op.inputs}
            groups[stage, B], groups[stage, W] = apart(late, elsewhere, turn.outputs)
        else:
            groups[stage, B] = late
    return {place: ops for place, ops in groups.items() if ops or place[1] is F}


def _ends(program: Program, placing: UpdatePlacing, loop: LoopPlan) -> dict[Variable, tuple[int, int]]:
    """The part of the update that hands out each result and each next value of state."""
    made = {v: place for place, ops in placing.groups.items() for op in ops for v in op.outputs}
    looped = {r.whole for r in (*loop.sums, *loop.joined)}
    ends = dict.fromkeys((*program.next_state.values(), *program.outputs))
    return {v: made.get(v, (0, placing.homes.get(v, 0))) for v in ends if v in made or v in looped}


def _ahead(program: Program, loop: LoopPlan) -> list[Op]:
    """The ops that make what a micro-batch hands on to the next one, which need not wait for its data."""
    following = [new for _, new, _ in loop.threaded]
    turn = loop.turn
    if not following:
        return []
    waits: Collection[Variable] = {*turn.inputs, *turn.parameters}
    for old, new, _ in loop.threaded:
        if not ancestors(turn, [new]).isdisjoint(waits):
            raise GraphError(
                f"pipeline: {program.name!r} hands {old.name!r} on from one micro-batch to the next, and "
                "makes it of their data, as batch norm does with its statistics. The stages of a pipeline "
                "work on several at once. Take what normalizes each example by itself (layer_norm, "
                "group_norm), or accumulate(program, micro_batches) on one device."
            )
    return needed_ops(turn, following)


def _expect_divided(loop: LoopPlan, data: int) -> None:
    if loop.short % data:
        raise ArgumentError(
            f"pipeline: a micro-batch has {loop.short} rows, which data={data} does not divide. Feed "
            f"{data * loop.how.steps} rows or a multiple, or take fewer micro-batches or devices."
        )


def _expect_nothing_before(program: Program, loop: LoopPlan) -> None:
    if others := [op for op in loop.part.before if op.made_by is not Pass.FORWARD]:
        op: Any = others[0]
        raise GraphError(
            f"pipeline: {op!r} of {program.name!r} belongs to the update and stands before the forward pass, "
            "which reads it, so that no stage can begin without the update of others. Take an optimizer that "
            "changes parameters after the backward pass."
        )
