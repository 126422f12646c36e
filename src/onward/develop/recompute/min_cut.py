"""The cheapest way to have the values that a backward pass needs, at every price of memory.

A value is either kept, which costs its bytes, or computed again, which costs the effort of its op, and then
whatever that op reads has to be there as well. For one price of a byte the least sum of both is a minimum
cut; the cuts for all prices lie on a convex curve of bytes and effort, found from its two ends inwards.

>>> task = Task(efforts=(1, 100), reads=((), (0,)), values=((0, 40), (1, 40)), needed=(0, 1))
>>> [(choice.bytes, choice.effort) for choice in choices(task)]  # keep all, the dear one, nothing
[(80, 0), (40, 1), (0, 101)]
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True)
class Task:
    """The ops whose values can each be kept or computed again, and the values that are needed.

    Attributes:
        efforts: of each op, in the order they run.
        reads: for each op, the values it reads that are not there anyway.
        values: for each value, the op that makes it and its bytes.
        needed: the values that the backward pass reads.
    """

    efforts: tuple[int, ...]
    reads: tuple[tuple[int, ...], ...]
    values: tuple[tuple[int, int], ...]
    needed: tuple[int, ...]


@dataclass(frozen=True)
class Choice:
    """Which values are kept and which ops run again, with the bytes and the effort of these."""

    kept: frozenset[int]
    again: frozenset[int]
    bytes: int
    effort: int


@lru_cache(maxsize=1024)
def choices(task: Task) -> tuple[Choice, ...]:
    """The choices that are best at some price, from the most bytes to the fewest.

    Source: Eisner and Severance, Mathematical techniques for efficient record segmentation, 1976 (all
    breakpoints of a cut with a parameter); the task: Jain et al., Checkmate, 2020, section 4, here with each
    value computed again at most once, so that a cut solves it.
    """
    first, last = _choice(task, 0, 1), _choice(task, 1, 0)
    return (first, *_between(task, first, last)) if first.bytes > last.bytes else (first,)


def _between(task: Task, high: Choice, low: Choice) -> tuple[Choice, ...]:
    """The choices below ``high`` in bytes, down to ``low``."""
    price, unit = low.effort - high.effort, high.bytes - low.bytes
    middle = _choice(task, price, unit)
    if price * middle.bytes + unit * middle.effort >= price * high.bytes + unit * high.effort:
        return (low,)
    return (*_between(task, high, middle), *_between(task, middle, low))


def _choice(task: Task, price: int, unit: int) -> Choice:
    """The best choice where a byte costs ``price`` and a piece of effort ``unit``."""
    again, there = _least_cut(task, price, unit)
    kept = frozenset(v for v in there if task.values[v][0] not in again)
    total = sum(task.values[v][1] for v in kept)
    return Choice(kept, again, total, sum(task.efforts[i] for i in again))


def _least_cut(task: Task, price: int, unit: int) -> tuple[frozenset[int], frozenset[int]]:
    """The ops that run again and the values that must be there: the side of the target in a minimum cut."""
    ops, values = len(task.efforts), len(task.values)
    source, target = ops + values, ops + values + 1
    # Of equal sums the one with less effort, then the one with fewer bytes: one more of either decides.
    scale = 1 + sum(task.efforts) + sum(size for _, size in task.values)
    flow = _MaximumFlow(ops + values + 2)
    for i, effort in enumerate(task.efforts):
        flow.connect(source, i, effort * (unit * scale + (unit == 0)))
        for v in task.reads[i]:
            flow.connect(ops + v, i, None)
    for v, (maker, size) in enumerate(task.values):
        flow.connect(maker, ops + v, size * (price * scale + (price == 0)))
    for v in task.needed:
        flow.connect(ops + v, target, None)
    reached = flow.reached(source, target)
    again = frozenset(i for i in range(ops) if i not in reached)
    return again, frozenset(v for v in range(values) if ops + v not in reached)


class _MaximumFlow:
    """A maximum flow by shortest paths in levels; a capacity of None has no end.

    Source: Dinic, Algorithm for solution of a problem of maximum flow in networks, 1970.
    """

    def __init__(self, nodes: int) -> None:
        self.ends: list[int] = []
        self.left: list[float] = []  # whole numbers, or infinity
        self.edges: list[list[int]] = [[] for _ in range(nodes)]

    def connect(self, begin: int, end: int, capacity: int | None) -> None:
        for node, other, amount in ((begin, end, capacity), (end, begin, 0)):
            self.edges[node].append(len(self.ends))
            self.ends.append(other)
            self.left.append(float("inf") if amount is None else amount)

    def reached(self, source: int, target: int) -> set[int]:
        """The nodes on the source's side of the smallest minimum cut."""
        while True:
            level = self._levels(source)
            if target not in level:
                return set(level)
            position = [0] * len(self.edges)
            while self._push(source, target, level, position):
                pass

    def _levels(self, source: int) -> dict[int, int]:
        level, queue = {source: 0}, deque([source])
        while queue:
            node = queue.popleft()
            for e in self.edges[node]:
                if self.left[e] > 0 and self.ends[e] not in level:
                    level[self.ends[e]] = level[node] + 1
                    queue.append(self.ends[e])
        return level

    def _push(self, source: int, target: int, level: dict[int, int], position: list[int]) -> bool:
        """Send what one path along the levels takes; False if there is none."""
        path: list[int] = []
        node = source
        while node != target:
            edges = self.edges[node]
            while position[node] < len(edges):
                e = edges[position[node]]
                if self.left[e] > 0 and level.get(self.ends[e]) == level[node] + 1:
                    break
                position[node] += 1
            else:
                if not path:
                    return False
                e = path.pop()
                node = self.ends[e ^ 1]
                position[node] += 1
                continue
            path.append(e)
            node = self.ends[e]
        amount = min(self.left[e] for e in path)
        for e in path:
            self.left[e] -= amount
            self.left[e ^ 1] += amount
        return True
