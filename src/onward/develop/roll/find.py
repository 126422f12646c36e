"""Where a line of ops repeats: candidates from the distances between equal ops, then a proof by their wiring.

Short stretches of the line get a number each, equal ones the same; the distances between neighbours of a kind
are the only periods worth a look. Where ``line[i]`` equals ``line[i + period]`` for long enough, layers may
lie. Then every input of every op is followed to its source.

Source: Karp, Miller and Rosenberg, Rapid Identification of Repeated Patterns in Strings, Trees and Arrays,
1972 (numbers of stretches by doubling).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from itertools import count
from typing import Any

import numpy as np

from onward.core.program import Op, Variable
from onward.develop.roll.line import Numbers, OpLine
from onward.develop.roll.run import Break, LayerRun, run_of

_DOUBLINGS = 6  # stretches of up to 32 ops
_PERIODS = 64
_PHASES = 3
_SELDOM = (2, 3, 6, 12, 24, 48)
_NEARLY_ALL = 0.9
_LEAST_SAVED = 8
_LEAST_SAVED_SIDE_BY_SIDE = 32
_FIRST = 8  # layers that are followed first
_FOLLOWED, _FOLLOWED_EACH = 200_000, 100  # ops that are followed before a search is given up: and for each op

GIVEN_UP = "search given up: too much nearly repeats"

Accepts = Callable[[LayerRun], bool]


@dataclass(frozen=True)
class FoundRuns:
    """The runs of a line in its order, and what ended candidates: after how many layers, and why.

    Where it ``is_given_up``, the search took too long, and there may be more.
    """

    runs: tuple[LayerRun, ...] = ()
    ends: tuple[tuple[int, Break], ...] = ()
    is_given_up: bool = False

    @property
    def saved(self) -> int:
        """How many equations fewer there are with loops."""
        return sum(run.saved for run in self.runs)


def find_runs(line: OpLine, accepts: Accepts = lambda run: True) -> FoundRuns:
    """The runs of a line that do not overlap, taken in the order of how many equations each saves.

    The line is compared several times, more and more of the ops left out that seldom occur: these may stand
    among layers without being part of one.
    """
    best: FoundRuns | None = None
    before, is_given_up = -1, False
    numbers = line.numbers.tolist()
    counts = Counter(numbers)
    for least in _SELDOM:
        kept = [
            i for i, n in enumerate(numbers) if counts[n] >= least or (n < 0 and line.ops[i].body.has_effects)
        ]
        if best is not None and (len(kept) == before or best.saved > _NEARLY_ALL * line.sizes[kept].sum()):
            continue
        before = len(kept)
        found = _RunSearch(line, np.array(kept, np.int64), accepts).found()
        is_given_up |= found.is_given_up
        best = found if best is None or found.saved > best.saved else best
    return replace(best or FoundRuns(), is_given_up=is_given_up)


@dataclass(order=True)
class _Candidate:
    """Layers that may lie from ``begin`` to ``end``, or do, where there is a ``run``; better ones first."""

    rank: int
    ticket: int
    begin: int = field(compare=False)
    end: int = field(compare=False)
    period: int = field(compare=False)
    run: LayerRun | None = field(compare=False, default=None)


class _RunSearch:
    """The search for runs among the kept ops of a line; places count among these."""

    def __init__(self, line: OpLine, kept: Numbers, accepts: Accepts) -> None:
        self.line, self.kept, self.accepts = line, kept, accepts
        self.numbers = line.numbers[kept]
        self.size_before = np.concatenate([[0], np.cumsum(line.sizes[kept])])
        self.used = np.zeros(len(kept), bool)
        self.heap: list[_Candidate] = []
        self.tickets = count()
        self.ends: list[tuple[int, Break]] = []
        self.crossing = crossings([line.ops[i] for i in kept])
        self.left = _FOLLOWED + _FOLLOWED_EACH * len(kept)

    def found(self) -> FoundRuns:
        """The runs, in order of the ops."""
        for period in periods(self.numbers):
            for begin, end in stretches(self.numbers, period):
                self.push(begin, end, period)
        taken: list[tuple[int, LayerRun]] = []
        while self.heap and self.left > 0:
            candidate = heappop(self.heap)
            if self.used[candidate.begin : candidate.end].any():
                self.push_free(candidate)
            elif candidate.run is None:
                self.prove(candidate)
            else:
                self.used[candidate.begin : candidate.end] = True
                taken.append((candidate.begin, candidate.run))
        taken += self.proven()
        runs = tuple(run for _, run in sorted(taken, key=lambda t: t[0]))
        return FoundRuns(runs, tuple(self.ends), self.left <= 0)

    def proven(self) -> Iterator[tuple[int, LayerRun]]:
        """The runs that wait, best first, as far as they are free: those of a search that was given up."""
        for candidate in sorted(c for c in self.heap if c.run is not None):
            if candidate.run is not None and not self.used[candidate.begin : candidate.end].any():
                self.used[candidate.begin : candidate.end] = True
                yield candidate.begin, candidate.run

    def push(self, begin: int, end: int, period: int, run: LayerRun | None = None) -> None:
        """Note that layers may lie here, or that they do."""
        layer = int(self.size_before[begin + period] - self.size_before[begin])
        saved = ((end - begin) // period - 1) * layer
        if saved >= _LEAST_SAVED:
            heappush(self.heap, _Candidate(-saved, next(self.tickets), begin, end, period, run))

    def push_free(self, candidate: _Candidate) -> None:
        """Note the parts of a candidate that no run has taken."""
        for begin, end in _true_stretches(~self.used[candidate.begin : candidate.end]):
            self.push(candidate.begin + begin, candidate.begin + end, candidate.period)

    def prove(self, candidate: _Candidate) -> None:
        """Follow the wiring of a candidate; note the run that is there, and what is left around it."""
        begin, run, end = self.best(candidate)
        period = candidate.period
        if end is not None:
            self.ends.append((run.times, end))
            self.push(begin + max(1, run.times - 1) * period, candidate.end, period)
        good = run.is_chain or run.saved >= _LEAST_SAVED_SIDE_BY_SIDE
        if run.times > 1 and good and self.accepts(run):
            self.push(begin, begin + run.times * period, period, run)

    def best(self, candidate: _Candidate) -> tuple[int, LayerRun, Break | None]:
        """Of the places where the first layer may begin, one from which most layers fit."""
        period = candidate.period
        best: tuple[int, LayerRun, Break | None] | None = None
        for phase in self.phases(candidate):
            begin = candidate.begin + phase
            times = (candidate.end - begin) // period
            run, end = self.follow(begin, times, period)
            if best is None or run.times > best[1].times:
                best = begin, run, end
            if end is None:
                break
        assert best is not None
        return best

    def follow(self, begin: int, times: int, period: int) -> tuple[LayerRun, Break | None]:
        """The run that begins here, of so many layers at most.

        The first few are followed alone, then four times as many: where most end soon, to follow each to the
        end of the line would take the square of its length.
        """
        tried = min(times, _FIRST)
        while True:
            stop = begin + tried * period
            ops = [self.line.ops[i] for i in self.kept[begin:stop]]
            layers = [ops[t : t + period] for t in range(0, len(ops), period)]
            between = self.line.ops[self.kept[begin] : self.kept[stop - 1] + 1]
            self.left -= len(between)
            run, end = run_of(layers, between)
            if end is not None or tried == times:
                return run, end
            tried = min(times, 4 * tried)

    def phases(self, candidate: _Candidate) -> list[int]:
        """Where in the candidate the first layer may begin: first where layers hand on fewest Variables.

        Where that is equal, the latest place comes first that costs no layer: what precedes it is the end of
        something else.
        """
        length = candidate.end - candidate.begin
        middle = candidate.begin + length // candidate.period // 2 * candidate.period
        handed = self.crossing[middle : middle + candidate.period]
        order = sorted(range(length % candidate.period + 1), key=lambda phase: (handed[phase], -phase))
        return order[:_PHASES]


def crossings(ops: Sequence[Op]) -> Numbers:
    """For each place between two ops, how many Variables made before it are read after it."""
    made: dict[Variable, int] = {}
    last: dict[Variable, int] = {}
    for i, op in enumerate(ops):
        last.update((v, i) for v in op.inputs if v in made)
        made.update((v, i) for v in op.outputs)
    change = np.zeros(len(ops) + 2, np.int64)
    for v, i in last.items():
        change[made[v] + 1] += 1
        change[i + 1] -= 1
    return np.cumsum(change)


def periods(numbers: Numbers) -> list[int]:
    """The distances at which equal stretches follow each other, the most frequent first.

    >>> periods(np.array([1, 2, 2, 1, 2, 2, 1, 2, 2]))[0]
    3
    """
    counted: Counter[int] = Counter()
    _, ids = np.unique(numbers, return_inverse=True)
    length = 1
    for _ in range(_DOUBLINGS):
        order = np.argsort(ids, kind="stable")
        follows = ids[order[1:]] == ids[order[:-1]]
        distances, times = np.unique(np.diff(order)[follows], return_counts=True)
        for distance, n in zip(distances.tolist(), times.tolist(), strict=True):
            counted[distance] = max(counted[distance], n * distance)
        if len(ids) <= length:
            break
        pairs = ids[:-length] * len(numbers) + ids[length:]
        _, ids = np.unique(pairs, return_inverse=True)
        length *= 2
    return [distance for distance, _ in counted.most_common(_PERIODS)]


def stretches(numbers: Numbers, period: int) -> Iterator[tuple[int, int]]:
    """Where the line repeats with this period for two layers or more.

    >>> list(stretches(np.array([7, 1, 2, 1, 2, 1, 8]), 2))
    [(1, 6)]
    """
    for begin, end in _true_stretches(numbers[:-period] == numbers[period:]):
        if end - begin >= period:
            yield begin, end + period


def _true_stretches(flags: np.ndarray[Any, Any]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))
