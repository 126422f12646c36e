"""The search for the fastest step within a budget, over chunks, recomputation and host memory together.

Bytes are estimated from the ops first; what looks best is compiled, and what its compiler says corrects the
estimates of all that is alike, until nothing that could be faster is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import inf

from onward.core.program import Program, Variable
from onward.core.show import nbytes
from onward.develop.offload import offload, offloadable, offloaded
from onward.distribute.layout.accelerators import Accelerator
from onward.execute.memory.use import MemoryUse
from onward.explain.budget.bases import Base, Chunking, Chunkings
from onward.explain.compiling.once import compiled_once

_MOST_COMPILED = 16
_WORTH = 1.01  # less gain is not worth a compilation
_OFF = 1.15  # an estimate may be too high by so much
_PARTS = 4  # of the optimizer's state, that lie in host memory together


@dataclass(frozen=True)
class BudgetChoice:
    """A base, what it keeps for its backward pass, and the state that lies in host memory."""

    base: Base
    rung: int
    slots: tuple[Variable, ...]

    @property
    def program(self) -> Program:
        """The Program with all of this."""
        program = self.base.at(self.rung)
        return offload(program, [v.name for v in self.slots]) if self.slots else program

    @property
    def seconds(self) -> float:
        """The seconds of a step, as far as the ops tell."""
        moved = 2 * sum(map(nbytes, self.slots))
        return self.base.seconds(self.rung) + moved / self.base.device.host

    @property
    def resident(self) -> int:
        """The bytes that lie on the device whatever is computed: state, data and results."""
        there = self.base.program
        return sum(map(nbytes, (*there.state, *there.inputs, *there.outputs))) - sum(map(nbytes, self.slots))


class BudgetSearch:
    """The choices for one Program, of which those that were compiled are known to the byte."""

    def __init__(self, program: Program, device: Accelerator) -> None:
        self.program, self.device = program, device
        self._chunkings = Chunkings(program, MemoryUse(program).peak)
        self._bases = {Chunking(): Base(program, Chunking(), device)}
        self._slots = _prefixes(program)
        self._bytes: dict[BudgetChoice, int] = {}
        self._ratio: dict[Base, float] = {}

    @property
    def plain(self) -> BudgetChoice:
        """The Program as it is."""
        return BudgetChoice(self._bases[Chunking()], 0, ())

    def best(self, limit: int) -> BudgetChoice | None:
        """The fastest choice that takes no more bytes; None where none was found."""
        if self.bytes(self.plain) <= limit:
            return self.plain
        best = None
        while len(self._bytes) < _MOST_COMPILED:
            choice = self._next(limit, inf if best is None else best.seconds / _WORTH)
            if choice is None and best is None and (least := self._smallest()) not in self._bytes:
                choice = least
            if choice is None:
                break
            if self.bytes(choice) <= limit:
                best = choice
        return best

    def _next(self, limit: int, below: float) -> BudgetChoice | None:
        """Of the choices that would fit, and take fewer seconds than ``below``, the fastest not yet compiled.

        More chunks take no less time, nor does more in host memory: what follows a choice that is too slow is
        neither derived nor estimated.
        """
        best = None
        waiting = [(self._bound(c), i, c) for i, c in enumerate(self._chunkings)]
        heapify(waiting)
        while waiting:
            bound, i, chunking = heappop(waiting)
            if bound >= below:
                break
            if chunking not in self._bases:
                base = Base(self._chunkings.made(chunking), chunking, self.device)
                self._bases[chunking] = base
                heappush(waiting, (max(base.seconds(), bound), i, chunking))
                continue
            for choice in self._within(self._bases[chunking], limit, below):
                if choice.seconds < below:
                    best, below = choice, choice.seconds
        return best

    def _bound(self, chunking: Chunking) -> float:
        """The seconds that a base takes at least."""
        before = [self._bound(c) for c in chunking.before]
        known = self._bases.get(chunking)
        return max([*before, 0.0 if known is None else known.seconds()])

    def _within(self, base: Base, limit: int, below: float) -> Iterator[BudgetChoice]:
        """For each part of the state the first rung that would fit, of what is not compiled yet."""
        for slots in self._slots:
            whole = BudgetChoice(base, 0, slots)
            if whole.seconds >= below:
                break
            rung = self._rung(whole, limit)
            if rung is not None:
                yield replace(whole, rung=rung)

    def _rung(self, whole: BudgetChoice, limit: int) -> int | None:
        """The rung to compile next, of those that may be the first that fits; None where there is none."""
        last = whole.base.last
        alike = {c.rung: n for c, n in self._bytes.items() if replace(c, rung=0) == whole}
        fits = min((rung for rung, n in alike.items() if n <= limit), default=last + 1)
        fails = max((rung for rung, n in alike.items() if n > limit and rung < fits), default=-1)
        if fits <= last:
            return (fits + fails) // 2 if fits - fails > 1 else None
        room = int((limit - whole.resident) / self._correction(whole.base))
        rung = whole.base.first_within(room)
        if rung is None and whole.base.estimate(last) < _OFF * room:
            rung = last
        return None if rung is None or fails == last else max(rung, fails + 1)

    def _smallest(self) -> BudgetChoice:
        """The choice of the fewest bytes, as far as the ops tell."""
        base = min(self._bases.values(), key=lambda b: b.estimate(b.last) * self._correction(b))
        return BudgetChoice(base, base.last, self._slots[-1])

    def bytes(self, choice: BudgetChoice) -> int:
        """The bytes of the compiled step, which correct the estimates of others."""
        if choice not in self._bytes:
            taken = self._bytes[choice] = bytes_taken(choice.program)
            estimate = max(choice.base.estimate(choice.rung), 1)
            self._ratio[choice.base] = max((taken - choice.resident) / estimate, 0.01)
        return self._bytes[choice]

    def _correction(self, base: Base) -> float:
        """By how much the compiled step takes more than was estimated: of this base, or of the one before."""
        return self._ratio.get(base) or next(reversed(self._ratio.values()))

    @property
    def least(self) -> BudgetChoice:
        """Of those that were compiled the one of the fewest bytes."""
        return min(self._bytes, key=self._bytes.__getitem__)


def bytes_taken(program: Program) -> int:
    """The bytes of a device that the compiled step takes: arguments, results and temporaries."""
    plan = compiled_once(program).memory
    beside = plan.output_size_in_bytes - plan.alias_size_in_bytes
    whole = plan.argument_size_in_bytes + max(beside, 0) + plan.temp_size_in_bytes
    told_apart = plan.host_argument_size_in_bytes > 0  # a CPU counts host memory as its own
    return int(whole) - (0 if told_apart else sum(map(nbytes, offloaded(program))))


def _prefixes(program: Program) -> tuple[tuple[Variable, ...], ...]:
    """None, a quarter, a half and so on of the state that can lie in host memory, the largest first."""
    can_move = () if offloaded(program) else offloadable(program)
    found = sorted(filter(nbytes, can_move), key=nbytes, reverse=True)  # an array of no rows frees nothing
    whole, done = sum(map(nbytes, found)), 0
    prefixes: list[tuple[Variable, ...]] = [()]
    for i, v in enumerate(found):
        before, done = done, done + nbytes(v)
        if done * _PARTS // whole > before * _PARTS // whole:
            prefixes.append(tuple(found[: i + 1]))
    return tuple(prefixes)
