"""The order in which each stage of a pipeline takes up its work, and all that follows from it alone.

``forward`` takes a micro-batch through a stage, ``backward`` its gradients. Where the schedule says so,
``backward`` computes only what the stage before waits for, and ``weights`` the gradients of the parameters,
which nobody waits for. Times are counted in units of one forward pass, of which a whole backward pass takes
two.

>>> print(schedule_of("1f1b", stages=2, micro_batches=3))
1f1b: 2 stages, 3 micro-batches, idle 25 %
         1  2  3  4  5  6  7  8  9  10 11 12  holds  idle
stage 0  F0 F1       B0 .  F2 B1 .     B2 .       2   25 %
stage 1     F0 B0 .  F1 B1 .  F2 B2 .             1   25 %
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from onward.core.errors import ArgumentError, GraphError, nearest
from onward.core.structure import expect_count


class StageWork(StrEnum):
    """A part of the work of a stage on one micro-batch; the letter stands in the table."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHTS = "W"


F, B, W = StageWork


class StageTask(NamedTuple):
    """Some work on one micro-batch."""

    work: StageWork
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.work}{self.micro_batch}"


class Moment(NamedTuple):
    """When a stage does a task, in units of one forward pass."""

    begin: int
    end: int
    stage: int
    task: StageTask


@dataclass(frozen=True, repr=False)
class PipelineSchedule:
    """For each stage the order of its tasks.

    Attributes:
        name: as it is asked for.
        micro_batches: how many.
        orders: for each stage its tasks.

    Example:
        >>> schedule = schedule_of("gpipe", stages=4, micro_batches=8)
        >>> schedule.idle == 3 / 11, schedule.held
        (True, (8, 8, 8, 8))
        >>> schedule_of("1f1b", stages=4, micro_batches=8).held
        (4, 3, 2, 1)
    """

    name: str
    micro_batches: int
    orders: tuple[tuple[StageTask, ...], ...]

    @property
    def stages(self) -> int:
        """How many stages there are."""
        return len(self.orders)

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of parameters are computed apart from those that the stage before waits for."""
        return any(task.work is W for task in self.orders[0])

    @cached_property
    def moments(self) -> tuple[Moment, ...]:
        """Every task with its time, in the order in which they begin.

        Raises:
            GraphError: stages wait for each other, or a task is missing or there twice.
        """
        return _timed(self)

    @property
    def span(self) -> int:
        """How long all of it takes."""
        return max(moment.end for moment in self.moments)

    @cached_property
    def idle_stages(self) -> tuple[float, ...]:
        """For each stage the part of the time in which it waits."""
        busy = [0] * self.stages
        for moment in self.moments:
            busy[moment.stage] += moment.end - moment.begin
        return tuple(1 - time / self.span for time in busy)

    @property
    def idle(self) -> float:
        """The part of the time of all stages in which they wait: the bubble."""
        return 1 - 3 * self.micro_batches / self.span

    @cached_property
    def held(self) -> tuple[int, ...]:
        """For each stage the most micro-batches whose activations it holds at once."""
        return tuple(map(self._held, range(self.stages)))

    def _held(self, stage: int) -> int:
        last = W if self.splits_backward else B
        most = now = 0
        for work, _ in self.orders[stage]:
            now += (work is F) - (work is last)
            most = max(most, now)
        return most

    def __str__(self) -> str:
        head = f"{self.name}: {self.stages} stages, {self.micro_batches} micro-batches, idle {self.idle:.0%}"
        wide = len(str(max(self.span, self.micro_batches * 10))) + 1
        label = len(f"stage {self.stages - 1}") + 2
        times = "".join(f"{time:<{wide}}" for time in range(1, self.span + 1))
        lines = [f"{'':<{label}}{times} holds  idle"]
        for stage, (held, idle) in enumerate(zip(self.held, self.idle_stages, strict=True)):
            lines.append(f"stage {stage}".ljust(label) + f"{self._row(stage, wide)} {held:>5}  {idle:>4.0%}")
        return "\n".join([head.replace("%", " %"), *(line.replace("%", " %") for line in lines)])

    __repr__ = __str__

    def _row(self, stage: int, wide: int) -> str:
        cells = [" " * wide] * self.span
        for begin, end, of, task in self.moments:
            if of == stage:
                cells[begin] = f"{task!s:<{wide}}"
                cells[begin + 1 : end] = [f"{'.':<{wide}}"] * (end - begin - 1)
        return "".join(cells)


def schedule_of(name: str, stages: int, micro_batches: int) -> PipelineSchedule:
    """The schedule of this name.

    ``gpipe`` takes all micro-batches forward, then all backward, and is idle ``(p - 1) / (m + p - 1)`` of the
    time, for p stages and m micro-batches. ``1f1b`` takes one backward as soon as it can, then one forward:
    it is idle as long, and holds at most p micro-batches where ``gpipe`` holds all. ``zero_bubble`` (ZB-H1)
    holds at most p as well, but computes the gradients of parameters where a stage would wait, and is idle
    ``(p - 1) / (3 m + p - 1)`` of the time, if there are at least p micro-batches.

    Raises:
        ArgumentError: no schedule has this name, or a number that is not a count.

    Source: Huang et al., GPipe, 2019, section 2.3; Narayanan et al., Efficient Large-Scale Language Model
    Training on GPU Clusters Using Megatron-LM, 2021, section 2.2 (the order of PipeDream-Flush); Qi et al.,
    Zero Bubble Pipeline Parallelism, 2023, section 2.3.

    Example:
        >>> [round(schedule_of(name, 4, 8).idle, 3) for name in ("gpipe", "1f1b", "zero_bubble")]
        [0.273, 0.273, 0.111]
    """
    expect_count(stages, "pipeline: stages", of="how many")
    expect_count(micro_batches, "pipeline: micro_batches", of="how many")
    if name not in SCHEDULES:
        raise ArgumentError(
            f"pipeline: there is no schedule {name!r}. {nearest(str(name), SCHEDULES)} Expected one of "
            f"{', '.join(map(repr, SCHEDULES))}."
        )
    return PipelineSchedule(name, micro_batches, SCHEDULES[name](stages, micro_batches))


Orders = tuple[tuple[StageTask, ...], ...]


def _gpipe(stages: int, count: int) -> Orders:
    order = tuple(StageTask(work, i) for work in (F, B) for i in range(count))
    return (order,) * stages


def _one_forward_one_backward(stages: int, count: int) -> Orders:
    return tuple(_alternating(stages - 1 - stage, count) for stage in range(stages))


def _zero_bubble(stages: int, count: int) -> Orders:
    """As 1F1B, and stage ``s`` computes weight gradients ``s`` micro-batches late.

    So every stage holds as many micro-batches as the first one does, and the last ones, which began late,
    still have weight gradients to compute while the first ones come to their end.
    """
    return tuple(_alternating(stages - 1 - stage, count, late=stage) for stage in range(stages))


def _alternating(ahead: int, count: int, late: int | None = None) -> tuple[StageTask, ...]:
    """Some forward passes, then in turn one forward and one backward pass, and weight gradients so late."""
    order = [StageTask(F, i) for i in range(min(ahead, count))]
    for i in range(count):
        order += [StageTask(F, ahead + i)] if ahead + i < count else []
        order.append(StageTask(B, i))
        order += [StageTask(W, i - late)] if late is not None and i >= late else []
    left = range(max(0, count - late), count) if late is not None else ()
    return (*order, *(StageTask(W, i) for i in left))


SCHEDULES: Mapping[str, Callable[[int, int], Orders]] = {
    "gpipe": _gpipe,
    "1f1b": _one_forward_one_backward,
    "zero_bubble": _zero_bubble,
}


def _timed(schedule: PipelineSchedule) -> tuple[Moment, ...]:
    """When each task runs if every stage begins its next one as soon as what it needs is there."""
    takes = {F: 1, B: 1 if schedule.splits_backward else 2, W: 1}
    ends: dict[tuple[int, StageTask], int] = {}
    free, left = [0] * schedule.stages, [list(order[::-1]) for order in schedule.orders]
    found: list[Moment] = []

    def ready(stage: int) -> bool:
        return bool(left[stage]) and _needs(schedule, stage, left[stage][-1]) <= ends.keys()

    while stages := list(filter(ready, range(schedule.stages))):
        for stage in stages:
            task = left[stage].pop()
            begin = max(free[stage], *(ends[need] for need in _needs(schedule, stage, task)), 0)
            free[stage] = ends[stage, task] = begin + takes[task.work]
            found.append(Moment(begin, free[stage], stage, task))
    _expect_complete(schedule, left, len(found) - len(ends))
    return tuple(sorted(found))


def _needs(schedule: PipelineSchedule, stage: int, task: StageTask) -> set[tuple[int, StageTask]]:
    """The tasks that have to be done before this one can begin."""
    if task.work is F:
        return {(stage - 1, task)} if stage else set()
    own = {(stage, task._replace(work=F if task.work is B else B))}
    waits = task.work is B and stage < schedule.stages - 1
    return own | ({(stage + 1, task)} if waits else set())


def _expect_complete(schedule: PipelineSchedule, left: list[list[StageTask]], double: int) -> None:
    """Raise ``GraphError`` unless every stage has done each of its tasks, once."""
    works = len({task.work for task in schedule.orders[0]})
    for stage, order in enumerate(schedule.orders):
        if left[stage]:
            raise GraphError(
                f"The schedule {schedule.name!r} never ends: stage {stage} waits with {left[stage][-1]} for "
                "what no stage has done before."
            )
        if double or len(order) != works * schedule.micro_batches:
            raise GraphError(
                f"The schedule {schedule.name!r} has {len(order)} tasks in stage {stage}; expected {works} "
                f"for each of {schedule.micro_batches} micro-batches, once each."
            )
