"""From keeping everything to keeping the least: one choice after the other, each cheap for what it frees."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from onward.core.primitives.traits import Runs
from onward.core.program import Op, Program, Variable
from onward.develop.recompute.activations import Activations
from onward.develop.recompute.again import keeping
from onward.develop.recompute.loops import Kept, keeping_in_loops, loops, turn_of
from onward.develop.recompute.min_cut import Choice, choices
from onward.develop.recompute.replay import is_replayable, with_step
from onward.develop.recompute.segments import crossing, segments

_RUNGS = 24


@dataclass(frozen=True)
class KeepPlan:
    """A plan of the values to keep, by name: of the forward pass, and of each turn of its loops.

    Attributes:
        kept: of the forward pass.
        begins: what the first op of each segment computes.
        loops: for each loop whose turns compute something again, its first result and what they keep.
        is_outside: whether anything outside of loops is computed again.
        effort: how much work is done again, in multiply-adds of a matrix product.
    """

    kept: tuple[str, ...]
    begins: tuple[str, ...]
    loops: Kept = ()
    is_outside: bool = True
    effort: int = 0

    def applied(self, program: Program) -> Program:
        """The Program that keeps this and computes the rest again."""
        if self.loops:
            program = with_step(program, keeping_in_loops, self.loops)
        if not self.is_outside:
            return program
        return keeping(
            program, (*self.kept, *(v.name for op in _scans(program) for v in op.outputs)), self.begins
        )


@dataclass(frozen=True)
class LadderPart:
    """A segment of the forward pass, or the turns of a loop: its values, and the best ways to keep some."""

    values: tuple[Variable, ...]
    curve: tuple[Choice, ...]
    loop: Op | None = None

    @property
    def turns(self) -> int:
        """How often it is run."""
        return 1 if self.loop is None else int(self.loop.attributes["length"])

    def kept(self, at: int) -> tuple[str, ...]:
        """The names of what the choice of this number keeps."""
        return tuple(self.values[v].name for v in sorted(self.curve[at].kept))


def ladder(program: Program, keep: Iterable[Variable] = ()) -> tuple[KeepPlan, ...]:
    """Plans that keep less and less, each one part of what the one before keeps.

    In every segment the best choices lie on a convex curve of bytes and effort. The next step is always taken
    where a byte costs the least effort, of equal segments in the earliest, whose activations are held the
    longest. For the bytes that are kept this is at most one step of one segment from the best.

    Source: Dantzig, Discrete-variable extremum problems, 1957 (the knapsack by value for weight).
    """
    saved = {v for op in _scans(program) for v in op.outputs}
    keep = (*keep, *saved)
    begins, always = _boundaries(program, keep)
    found = Activations(program, (*keep, *always))
    parts = [*_segments(found, begins), *loop_parts(program)]
    moves = sorted(
        (price(*pair), s, k) for s, part in enumerate(parts) for k, pair in enumerate(pairwise(part.curve))
    )
    freed = [parts[s].turns * (parts[s].curve[k].bytes - parts[s].curve[k + 1].bytes) for _, s, k in moves]
    names = tuple(found.forward[i].outputs[0].name for i in begins if found.forward[i].outputs)
    fixed = tuple(v.name for v in found.position if v in always or (v in keep and v not in saved))
    at = [0] * len(parts)
    plans, done, total = [_plan(parts, at, fixed, names)], 0, sum(freed)
    for size, (_, s, k) in zip(freed, moves, strict=True):
        at[s] = k + 1
        before, done = done, done + size
        if done * _RUNGS // total > before * _RUNGS // total:
            plans.append(_plan(parts, at, fixed, names))
    return tuple(plans)


def _plan(
    parts: Sequence[LadderPart], at: Sequence[int], fixed: tuple[str, ...], begins: tuple[str, ...]
) -> KeepPlan:
    """The plan that keeps what each part keeps at its given position on its curve."""
    pairs = list(zip(parts, at, strict=True))
    outside = [(part, k) for part, k in pairs if part.loop is None]
    inside = tuple(
        (part.loop.outputs[0].name, part.kept(k)) for part, k in pairs if part.loop is not None and k
    )
    kept = (name for part, k in outside for name in part.kept(k))
    effort = sum(part.turns * (part.curve[k].effort - part.curve[0].effort) for part, k in pairs)
    return KeepPlan((*fixed, *kept), begins, inside, any(k for _, k in outside), effort)


def _boundaries(program: Program, keep: Iterable[Variable]) -> tuple[tuple[int, ...], set[Variable]]:
    """The ops at which segments begin, and what crosses these boundaries."""
    found = Activations(program, keep)
    begins = segments(found)
    return begins, crossing(found, begins)


def _segments(found: Activations, begins: tuple[int, ...]) -> list[LadderPart]:
    tasks = [found.task(a, b) for a, b in pairwise((*begins, len(found.forward)))]
    parts = [LadderPart(values, choices(task)) for task, values in tasks]
    if len(parts) > 1:  # the backward pass begins with the last segment: there is no time between
        parts[-1] = LadderPart(parts[-1].values, parts[-1].curve[:1])
    return parts


def loop_parts(program: Program, where: Callable[[Op], bool] = lambda op: True) -> list[LadderPart]:
    """The turns of the loops whose body can be exchanged, of those that are asked for."""
    parts = []
    for op in filter(where, loops(program) if is_replayable(program) else ()):
        found = Activations(turn_of(op))
        task, values = found.task(0, len(found.forward))
        parts.append(LadderPart(values, choices(task), op))
    return parts


def _scans(program: Program) -> list[Op]:
    """The loops of the forward pass, which never run again as a whole to meet a budget."""
    return [op for op in Activations(program).forward if op.primitive.runs is Runs.SCAN]


def price(high: Choice, low: Choice) -> Fraction:
    """The effort that a freed byte costs."""
    return Fraction(low.effort - high.effort, high.bytes - low.bytes)
