"""The search for the fastest step within a budget, over chunks, recomputation and host memory together.

Bytes are estimated from the ops first; what looks best is compiled, and what its compiler says corrects the
estimates of all that is alike, until nothing that could be faster is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import product
from math import inf
from weakref import WeakKeyDictionary

from onward.core.program import Program, Variable
from onward.core.show import nbytes
from onward.develop.offload import offload, offloadable, offloaded
from onward.develop.recompute.measure import estimated
from onward.develop.recompute.replay import without_steps
from onward.develop.stored import stored, stored_values
from onward.distribute.layout.accelerators import Accelerator
from onward.execute.memory.use import MemoryUse
from onward.explain.budget.bases import Base, Chunking, Chunkings, HostBase
from onward.explain.compiling.once import compiled_once

_MOST_COMPILED = 12
_TRIED = 4  # rungs of one base
_WORTH = 1.01  # less gain is not worth a compilation
_OFF = 1.15  # an estimate may be too high by so much
_LESS = 0.97  # of an estimate, which is not told apart from it
_FAR = 1.1  # where the smallest takes so much more than the budget, no other is tried
_PARTS = 4  # of the optimizer's state, that lie in host memory together


# For each Program the bytes of what was compiled: by its chunks, its rung, and how much state was moved.
_remembered: WeakKeyDictionary[Program, dict[tuple[Chunking, int, int], int]] = WeakKeyDictionary()


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
    """The choices for one Program, of which those that were compiled are known to the byte.

    What was compiled is remembered as long as the Program lives: a second budget compiles less.
    """

    def __init__(self, program: Program, device: Accelerator) -> None:
        self.program, self.device = program, device
        self._chunkings = Chunkings(program, MemoryUse(program).peak)
        self._bases = {Chunking(): Base(program, Chunking(), device)}
        self._slots = _prefixes(program)
        self._remembered = _remembered.setdefault(program, {})
        self._bytes: dict[BudgetChoice, int] = {}
        self._temporary: dict[Base, dict[int, int]] = {}  # by rung, of what was compiled

    @property
    def plain(self) -> BudgetChoice:
        """The Program as it is."""
        return BudgetChoice(self._bases[Chunking()], 0, ())

    def best(self, limit: int) -> BudgetChoice | None:
        """The fastest choice that takes no more bytes; None where none was found."""
        if self.bytes(self.plain) <= limit:
            return self.plain
        if self._is_hopeless(limit):
            return None
        best = None
        while len(self._bytes) < _MOST_COMPILED:
            choice = self._next(limit, best)
            if choice is None or choice in self._bytes:
                break
            if self.bytes(choice) <= limit:
                best = choice
        return best or next((c for c in (self._smallest(), self.least) if self.bytes(c) <= limit), None)

    def _is_hopeless(self, limit: int) -> bool:
        """Whether what takes the fewest bytes, as far as the ops tell, takes far more than that."""
        smallest = self._smallest()
        if self._foretold(smallest) <= limit or self.least_remembered <= limit:
            return False
        return self.bytes(smallest) > limit * _FAR

    def _next(self, limit: int, best: BudgetChoice | None) -> BudgetChoice | None:
        """Of the choices that would fit, and take fewer seconds than the best, the fastest not yet compiled.

        More chunks take no less time, nor does more in host memory: what follows a choice that is too slow is
        neither derived nor estimated. Numbers of chunks in between are tried around the best alone.
        """
        found, below = None, inf if best is None else best.seconds / _WORTH
        near = () if best is None else best.base.chunking.near
        waiting = [(self._bound(c), i, c) for i, c in enumerate(dict.fromkeys((*self._chunkings, *near)))]
        heapify(waiting)
        while waiting:
            bound, i, chunking = heappop(waiting)
            if bound >= below:
                break
            if self._is_out(chunking, limit) or self._is_useless(chunking):
                continue
            known = self._bound(chunking)
            if known == bound and chunking not in self._bases:
                known = max(known, self._base(chunking).seconds())
                heappush(waiting, (known, i, chunking))
                continue
            if known > bound:
                heappush(waiting, (known, i, chunking))
                continue
            for choice in self._within(self._bases[chunking], limit, below):
                if choice.seconds < below:
                    found, below = choice, choice.seconds
        return None if found is None else self._leaner(found)

    def _base(self, chunking: Chunking) -> Base:
        if chunking not in self._bases and chunking.host:
            self._bases[chunking] = HostBase(self._base(replace(chunking, host=0)), chunking)
        elif chunking not in self._bases:
            made = self._chunkings.made(chunking)
            self._bases[chunking] = Base(made, chunking, self.device)
        return self._bases[chunking]

    def _bound(self, chunking: Chunking) -> float:
        """The seconds that a base takes at least: those of each with no more chunks."""
        return max(base.seconds() for known, base in self._bases.items() if known <= chunking)

    def _is_out(self, chunking: Chunking, limit: int) -> bool:
        """Whether a base, or one of more chunks, takes too much whatever is kept and moved."""
        finer = (base for known, base in self._bases.items() if chunking <= known)
        return any(self._foretold(self._leanest_of(base)) > limit * self._doubt(base) for base in finer)

    def _is_useless(self, chunking: Chunking) -> bool:
        """Whether more chunks than there are with fewer take no less memory, as a pair of bases tells."""
        pairs = product(self._bases.items(), repeat=2)
        return any(a.leads(chunking, b) and _is_as_large(more, less) for (a, less), (b, more) in pairs)

    def _doubt(self, base: Base) -> float:
        """By how much the least of a base may be foretold too high: not at all once one like it is known."""
        return 1.0 if any(alike.leanest in rungs for alike, rungs in self._alike(base)) else _OFF

    def _alike(self, base: Base) -> Iterator[tuple[Base, dict[int, int]]]:
        """The bases with the same of the two in chunks, and their compiled rungs, the latest last."""
        kind = base.chunking.kind
        return ((b, rungs) for b, rungs in self._temporary.items() if b.chunking.kind == kind)

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
        """The rung to compile next, of those that may be the first that fits; None where there is none.

        Memory falls from rung to rung but for details, and what is moved to host memory only adds to that.
        """
        leanest, known = whole.base.leanest, self._temporary.get(whole.base, {})
        room = limit - whole.resident
        fits = min((rung for rung, n in known.items() if n <= room), default=leanest + 1)
        fails = max((rung for rung, n in known.items() if n > room and rung < fits), default=-1)
        low, high = fails, fits
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(whole, middle, limit) else (middle, high)
        if high < fits and len(known) <= _TRIED:
            return high
        if fits <= leanest:
            return None if replace(whole, rung=fits) in self._bytes else fits
        last = replace(whole, rung=leanest)
        is_near = leanest not in known and self._foretold(last) <= limit * self._doubt(whole.base)
        return leanest if is_near else None

    def _fits(self, whole: BudgetChoice, rung: int, limit: int) -> bool:
        return self._foretold(replace(whole, rung=rung)) <= limit

    def _leaner(self, choice: BudgetChoice) -> BudgetChoice:
        """The same with less kept, as long as that costs next to no time: it fits more surely."""
        base, most = choice.base, choice.seconds * _WORTH
        known = self._temporary.get(base, {})
        while 0 < choice.rung < base.leanest and choice.rung + 1 not in known:
            further = replace(choice, rung=choice.rung + 1)
            if further.seconds > most or base.estimate(further.rung) > base.estimate(choice.rung):
                break
            choice = further
        return choice

    def _smallest(self) -> BudgetChoice:
        """The choice of the fewest bytes, as far as the ops tell."""
        self._base(self._chunkings.finest)
        return min(map(self._leanest_of, self._bases.values()), key=self._foretold)

    def _leanest_of(self, base: Base) -> BudgetChoice:
        """Of a base the choice of the fewest bytes."""
        rungs = {base.leanest, *self._temporary.get(base, {})}
        return min((BudgetChoice(base, rung, self._slots[-1]) for rung in rungs), key=self._foretold)

    def bytes(self, choice: BudgetChoice) -> int:
        """The bytes of the compiled step, which correct the estimates of others."""
        if choice not in self._bytes:
            key = (choice.base.chunking, choice.rung, len(choice.slots))
            if key not in self._remembered:
                self._remembered[key] = bytes_taken(choice.program)
            taken = self._bytes[choice] = self._remembered[key]
            self._temporary.setdefault(choice.base, {})[choice.rung] = taken - choice.resident
        return self._bytes[choice]

    def _foretold(self, choice: BudgetChoice) -> int:
        """The bytes of a step, compiled or not."""
        known = self._temporary.get(choice.base, {})
        if choice.rung in known:
            return choice.resident + known[choice.rung]
        return choice.resident + int(choice.base.estimate(choice.rung) * self._correction(choice))

    def _correction(self, choice: BudgetChoice) -> float:
        """By how much the compiled step takes more than was estimated: at the next rung that is known.

        The Program as it is, and one that computes something again, are compiled differently: one tells
        little of the other.
        """
        is_plain = choice.rung == 0
        known = [r for r in self._temporary.get(choice.base, ()) if (r == 0) == is_plain]
        if known:
            return self._off(choice.base, min(known, key=lambda rung: abs(rung - choice.rung)))
        others = (*self._temporary.items(), *self._alike(choice.base))
        alike = [(b, r) for b, rungs in others for r in rungs if (r == 0) == is_plain]
        return self._off(*alike[-1]) if alike else min(self._off(self.plain.base, 0), _OFF)

    def _off(self, base: Base, rung: int) -> float:
        return max(self._temporary[base][rung] / max(base.estimate(rung), 1), 0.01)

    @property
    def compiled(self) -> int:
        """How many choices were compiled."""
        return len(self._bytes)

    @property
    def least(self) -> BudgetChoice:
        """Of those that were compiled the one of the fewest bytes."""
        chunking, rung, count = min(self._remembered, key=self._remembered.__getitem__)
        slots = next(slots for slots in self._slots if len(slots) == count)
        return BudgetChoice(self._base(chunking), rung, slots)

    @property
    def least_remembered(self) -> int:
        """The fewest bytes of those that were compiled."""
        return min(self._remembered.values())


def _is_as_large(more: Base, fewer: Base) -> bool:
    """Whether a base of more chunks takes about as much as one of fewer, with all or with the least kept."""
    pairs = ((0, 0), (more.leanest, fewer.leanest))
    return all(more.estimate(a) > _LESS * fewer.estimate(b) for a, b in pairs)


def bytes_taken(program: Program) -> int:
    """The bytes of a device that the compiled step takes: arguments, results and temporaries."""
    plan = compiled_once(program).memory
    beside = plan.output_size_in_bytes - plan.alias_size_in_bytes
    lasting, passing = plan.argument_size_in_bytes + max(beside, 0), plan.temp_size_in_bytes
    if not plan.host_argument_size_in_bytes:  # a CPU counts host memory as its own
        lasting -= sum(map(nbytes, offloaded(program)))
    if stored_values(program) and not plan.host_temp_size_in_bytes:
        passing *= _on_device(program)
    return int(lasting + passing)


def _on_device(program: Program) -> float:
    """The part of its temporary memory that a Program needs on a device, as far as the ops tell.

    The compiler of a device with one memory does not report it apart.
    """
    there = estimated(without_steps(program, stored)).bytes
    return min(estimated(program).bytes / max(there, 1), 1.0)


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
