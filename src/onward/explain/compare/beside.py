"""The values of one Program beside those of another: which stands for which, and what of it must agree.

What each op of the one reads and gives is thus known of both, so that its ops can be run on what those of the
other read; ``search.py`` does so.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any

from onward.core.program import Op, Program, Variable
from onward.core.walk import producers
from onward.explain.compare.rounding import epsilon_of
from onward.explain.compare.twins import (
    MustAgree,
    anchors,
    by_value,
    far,
    is_key,
    is_near,
    laid_out,
    matched,
)
from onward.explain.compare.values import Values
from onward.explain.diff.compare import same_array

_EPSILONS = 64
_ADRIFT = 1e-2  # of the largest number: what rounding hardly explains


@dataclass
class SideBySide:
    """One step of two Programs, value beside value.

    Attributes:
        a: the Program whose ops are run.
        b: the other.
        of_a: all values of the one.
        of_b: all values of the other.
        epsilon: the least that is taken for the rounding of a dtype.
        beside: for Variables of a the value that b has there, laid out alike.
        of_twin: the Variable of b that it is of.
    """

    a: Program
    b: Program
    of_a: Values
    of_b: Values
    epsilon: float = 0.0
    beside: dict[Variable, Any] = field(default_factory=dict)
    of_twin: dict[Variable, Variable] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.matching = matched(self.a, self.b, self.of_a, self.of_b)
        twins = dict(self.matching.variables)
        self.makers, self.their_makers = producers(self.a), producers(self.b)
        self.anchors = anchors(self.a, self.b, twins)
        for anchor in self.anchors:
            twins.setdefault(anchor.theirs, anchor.mine)
        twins |= by_value(self.a, self.b, self.of_a, self.of_b, twins)
        for theirs, mine in twins.items():
            if mine not in self.a.constants and mine not in self.beside:
                self.lay(mine, theirs, laid_out(self.a, self.b, self.of_a[mine], self.of_b[theirs]))
        for anchor in (x for x in self.anchors if x.mine in self.makers):
            self.lay(anchor.mine, anchor.theirs, self.of_anchor(anchor))

    def lay(self, mine: Variable, theirs: Variable, value: Any | None) -> None:
        """Let the value of one Variable of b stand beside one of a, if it can."""
        if value is not None:
            self.beside[mine], self.of_twin[mine] = value, theirs

    def of_anchor(self, anchor: MustAgree) -> Any | None:
        """The value of b that must agree, laid out as that of a; None where it cannot be."""
        is_told = not anchor.what.startswith("gradient of ")  # the gradients of parts may be merged later
        return laid_out(self.a, self.b, self.of_a[anchor.mine], self.of_b[anchor.theirs], must=is_told)

    def doubtful(self) -> list[Variable]:
        """Computed values that are not the same but for the last bit, nor computed alike from twins."""
        return [v for v in self.makers if v in self.beside and not self.is_same(v) and not self._is_alike(v)]

    def is_same(self, v: Variable) -> bool:
        """Whether both have the same numbers but for the last bit, which rounding always explains."""
        x, y = self.of_a[v], self.beside[v]
        if x.dtype != y.dtype:
            return False
        epsilon = 0.0 if is_key(x) else max(epsilon_of(x.dtype), self.epsilon)
        return same_array(x, y) or bool(epsilon and is_near(x, y, 2 * epsilon))

    def _is_alike(self, v: Variable) -> bool:
        """Whether twins compute it by the same code from twins."""
        mine, theirs = self.makers[v], self.their_makers.get(self.of_twin[v])
        if theirs is None or len(mine.inputs) != len(theirs.inputs):
            return False
        if mine.body is not theirs.body and mine.body.signature is not theirs.body.signature:
            return False
        if mine.outputs.index(v) != theirs.outputs.index(self.of_twin[v]):
            return False
        return all(map(self._are_twins, mine.inputs, theirs.inputs))

    def _are_twins(self, x: Variable, y: Variable) -> bool:
        if x in self.a.constants and y in self.b.constants:
            return same_array(self.a.constants[x], self.b.constants[y])
        return self.of_twin.get(x) is y

    def reached(self, sources: set[Variable], stops: Iterable[Variable] = ()) -> set[Variable]:
        """All that depends on these, themselves included; not through what stops it."""
        reached, stops = set(sources), set(stops)
        for op in self.a.ops:
            if any(v in reached and (v not in stops or v in sources) for v in op.inputs):
                reached.update(op.outputs)
        return reached

    def needed(self, wanted: set[Variable], known: Container[Variable]) -> list[Op]:
        """The ops of a that give what is wanted, of what is known."""
        return _needed(self.a, wanted, known)

    def is_adrift(self) -> bool:
        """Whether what must agree differs by what rounding hardly explains, though each op is the same."""
        most = max(_ADRIFT, _EPSILONS * self.epsilon)
        return any(
            far(self.of_a[anchor.mine], self.beside[anchor.mine]) > most
            for anchor in self.anchors
            if anchor.mine in self.beside
        )

    def largest_difference(self) -> tuple[float, str]:
        """That of what must agree, as a part of its largest number; and of what."""
        found = [
            (far(self.of_a[x.mine], self.beside[x.mine]), x.what)
            for x in self.anchors
            if x.mine in self.beside
        ]
        return max(found, default=(0.0, ""))

    def compared(self) -> tuple[int, int]:
        """How many ops of the one and of the other have a twin."""
        mine = [op for op in self.a.ops if any(v in self.of_twin for v in op.outputs)]
        theirs = set(self.of_twin.values())
        return len(mine), sum(not theirs.isdisjoint(op.outputs) for op in self.b.ops)

    def region(self, mine: Variable, theirs: Variable | None) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
        """The ops of both between the values that agree and these two, which do not."""
        known = {v for v in self.beside if v is not mine}
        their_known = {v for v in self.of_twin.values() if v is not theirs}
        return (
            tuple(_needed(self.a, {mine} & self.makers.keys(), known)),
            tuple(_needed(self.b, set() if theirs is None else {theirs}, their_known)),
        )


def _needed(program: Program, wanted: set[Variable], known: Container[Variable]) -> list[Op]:
    """The ops of a Program that give what is wanted, of what is known."""
    needed, ops = set(wanted), list[Op]()
    for op in reversed(program.ops):
        if not needed.isdisjoint(op.outputs):
            ops.append(op)
            needed.update(v for v in op.inputs if v not in known)
    return ops[::-1]
