"""The first rung of a ladder of plans whose compiled step fits a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from onward.core.program import Program, Variable
from onward.develop.recompute.ladder import KeepPlan, ladder
from onward.develop.recompute.measure import compiled, estimated


@dataclass
class _SearchMemory:
    """Facts known about a Program: its plans, and the bytes of the rungs that were compiled or estimated."""

    plans: Sequence[KeepPlan] = ()
    compiled: dict[int, int] = field(default_factory=dict)
    estimated: dict[int, int] = field(default_factory=dict)


_memories: WeakKeyDictionary[Program, dict[tuple[Variable, ...], _SearchMemory]] = WeakKeyDictionary()


class Rungs:
    """The Programs of a ladder by their numbers, each built and compiled when asked for; 0: as it is.

    What was found out about a Program is remembered as long as it lives: a second budget compiles less.
    """

    def __init__(self, program: Program, kept: tuple[Variable, ...]) -> None:
        self._kept = kept
        self._programs = {0: program}
        self._known = _memories.setdefault(program, {}).setdefault(kept, _SearchMemory())

    @property
    def plans(self) -> Sequence[KeepPlan]:
        """The plan of each rung, which says what is kept there."""
        if not self._known.plans:
            self._known.plans = ladder(self._programs[0], self._kept)
        return self._known.plans

    def program(self, rung: int) -> Program:
        """The Program at a rung."""
        if rung not in self._programs:
            self._programs[rung] = self.plans[rung].applied(self._programs[0])
        return self._programs[rung]

    def temporary(self, rung: int) -> int:
        """The bytes of temporary memory of the compiled step."""
        if rung not in self._known.compiled:
            self._known.compiled[rung] = compiled(self.program(rung))
        return self._known.compiled[rung]

    def least(self) -> int:
        """Of the rungs that were compiled the one that takes the least."""
        return min(self._known.compiled, key=lambda rung: self._known.compiled[rung])

    def first_within(self, limit: int) -> int | None:
        """The first rung that fits, or None: a guess by the estimate, corrected by what is compiled.

        Memory falls from rung to rung but for details, so between a rung that does not fit and one that does
        the search halves what is left.
        """
        if self.temporary(0) <= limit:
            return 0
        failing, fitting = 0, len(self.plans)
        stride, rung = 1, self.guess(limit)
        while fitting - failing > 1:
            if self.temporary(rung) <= limit:
                fitting, rung = rung, rung - stride
            else:
                failing, rung = rung, rung + stride
            if failing > 0 and fitting < len(self.plans):
                rung = (failing + fitting) // 2
            rung = min(max(rung, failing + 1), fitting - 1)
            stride *= 2
        return fitting if fitting < len(self.plans) else None

    def guess(self, limit: int) -> int:
        """The first rung but 0 whose estimate fits; the last one if none does."""
        low, high = 0, len(self.plans) - 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.estimate(middle) <= limit else (middle, high)
        return max(high, 1)

    def estimate(self, rung: int) -> int:
        """The bytes of temporary memory as far as the ops tell."""
        if rung not in self._known.estimated:
            self._known.estimated[rung] = estimated(self.program(rung)).bytes
        return self._known.estimated[rung]
