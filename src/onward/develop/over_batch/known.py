"""Records of how a value for the whole batch follows from the values for its parts."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from fractions import Fraction
from math import lcm
from typing import Any

from onward.core.jaxprs.body import Body
from onward.core.program import Op, Program, Variable
from onward.core.walk import ancestors


class How(StrEnum):
    """How the whole's value comes from those of the parts."""

    SAME = "same"  # every part has it
    MEAN = "mean"  # over the parts
    MOST = "most"  # the largest of the parts
    LEAST = "least"  # the smallest of the parts
    ROWS = "rows"  # laid end to end, example by example
    OWN = "own"  # nothing is known of it


@dataclass(frozen=True)
class ExampleLayout:
    """Where the examples of an array are: ``blocks`` times all of them, ``each`` numbers in a row of one.

    Of groups of three, which each part has whole, ``each`` is a third.
    """

    axis: int
    blocks: int = 1
    each: Fraction = Fraction(1)

    def fits(self, rows: int) -> bool:
        """Whether so many examples have whole groups, or whole numbers in a row of each."""
        return 1 in (self.each.numerator, self.each.denominator) and (rows * self.each).denominator == 1


@dataclass(frozen=True)
class Follows:
    """The whole's value is ``parts ** power`` times what ``kind`` says.

    ``layout`` is known of some ROWS; ``counts`` says that they number the examples of a part from 0, and of
    what is the SAME that it is the number of the example at which a loop over all is.
    """

    kind: How
    power: int = 0
    layout: ExampleLayout | None = None
    counts: bool = False


SAME, OWN = Follows(How.SAME), Follows(How.OWN)
COUNTED = "reads a number of examples"
ODD = "pairs examples that do not belong together"


@dataclass(frozen=True)
class Need:
    """A replacement that an op has to read: the parts' values merged this way, times ``parts ** power``."""

    merged: How
    power: int = 0


CanHave = Callable[[Variable, Need, bool], bool]
"""Whether a need can be met for a value, told whether it comes back to the examples."""


@dataclass
class Following:
    """The facts known about a function's values, and the changes needed to compute what the whole computes.

    Attributes:
        found: how the whole's values come from the part's.
        needs: for ops that are not linear in a statistic, what they have to read in place of it.
        numbers: ops with numbers in them that count examples, with the whole's.
        constants: constants that count examples in a way of their own, with the whole's.
        mixing: ops in which examples see each other, and how.
        normalizing: ops that give the examples a statistic that the parts cannot have.
        bent: ops that are not linear in a statistic that the parts cannot have.
        drawn: what is made of a random key for each example, by ops that read the key.
        hidden_draws: ops that draw for each example by a key that they make within.
        counted: ops that read a number of examples, in them or as a constant.
        within: for ops that run one Program, once or for each example, it and how its values follow.
        rules: ops in whose derivative rules examples see each other, and how.
        groups: ops that take examples of groups, or take them together, with how many a group has.
    """

    found: dict[Variable, Follows]
    needs: dict[Op, dict[Variable, Need]] = field(default_factory=dict)
    numbers: dict[Op, Body] = field(default_factory=dict)
    constants: dict[Variable, Any] = field(default_factory=dict)
    mixing: list[tuple[Op, str]] = field(default_factory=list)
    normalizing: list[Op] = field(default_factory=list)
    bent: list[Op] = field(default_factory=list)
    drawn: set[Variable] = field(default_factory=set)
    hidden_draws: list[Op] = field(default_factory=list)
    counted: set[Op] = field(default_factory=set)
    within: dict[Op, tuple[Program, Following]] = field(default_factory=dict)
    rules: list[tuple[Op, str]] = field(default_factory=list)
    groups: dict[Op, int] = field(default_factory=dict)

    def is_told(self, program: Program, v: Variable) -> bool:
        """Whether a value is the mean of those of the parts, or their sum, and all they need is known."""
        found = self.found[v]
        is_mean = found.kind is How.MEAN and found.power in (0, 1)
        return (is_mean or found == SAME) and self.is_known(program, v)

    def is_known(self, program: Program, v: Variable) -> bool:
        """Whether nothing that a value depends on needs the examples of other parts, or their number."""
        near = self.reaching(program, [v])
        return not (near.mixing or near.normalizing or near.bent or near.counting(program))

    @property
    def group(self) -> int:
        """The number of examples of which a part has to have a multiple, so that no group is cut."""
        return lcm(*self.groups.values())

    def cut_groups(self) -> None:
        """Note that parts have fewer examples than a group has."""
        self.mixing.extend((op, "takes some of the examples") for op in self.groups)

    def rules_of_loss(self, program: Program) -> list[tuple[Op, str]]:
        """The ops in whose derivative rules examples see each other, of those that gradients go through."""
        return [] if program.loss is None else self.reaching(program, [program.loss]).rules

    def out_of_order(self, variables: Iterable[Variable]) -> list[Variable]:
        """Those that are not the parts' laid end to end: they count examples, or hold all several times."""
        found = ((v, self.found[v], self.found[v].layout) for v in variables)
        return [v for v, f, layout in found if f.counts or (layout is not None and layout.blocks > 1)]

    def reaching(self, program: Program, targets: Iterable[Variable]) -> Following:
        """The same without what these Variables do not depend on."""
        needed = ancestors(program, list(targets))
        constants = {v: value for v, value in self.constants.items() if v in needed}
        return replace(self._only(lambda op: not needed.isdisjoint(op.outputs)), constants=constants)

    def without(self, ops: Container[Op]) -> Following:
        """The same where these ops are computed of the whole."""
        return self._only(lambda op: op not in ops)

    def _only(self, kept: Callable[[Op], bool]) -> Following:
        return replace(
            self,
            needs={op: need for op, need in self.needs.items() if kept(op)},
            numbers={op: body for op, body in self.numbers.items() if kept(op)},
            mixing=[(op, why) for op, why in self.mixing if kept(op)],
            normalizing=list(filter(kept, self.normalizing)),
            rules=[(op, why) for op, why in self.rules if kept(op)],
            bent=list(filter(kept, self.bent)),
            hidden_draws=list(filter(kept, self.hidden_draws)),
        )

    def without_numbers(self, ops: Container[Op], constants: Container[Variable]) -> Following:
        """The same where these ops, and who reads these constants, know how many examples the whole has."""
        return replace(
            self,
            numbers={op: body for op, body in self.numbers.items() if op not in ops},
            constants={v: value for v, value in self.constants.items() if v not in constants},
        )

    def counting(self, program: Program) -> list[Op]:
        """The ops that read numbers of the part in place of the whole's."""
        return [
            op for op in program.ops if op in self.numbers or not self.constants.keys().isdisjoint(op.inputs)
        ]


class BatchWalk:
    """The knowledge of a walk over the ops of a part, each beside that of the whole, as it goes on.

    Attributes:
        result: how the values follow, and what is needed for that.
        like: for each Variable of the part that of the whole.
        parts: how many parts the whole has.
        can_have: whether the parts can have what is needed in place of a value, told whether it comes back
            to the examples.
        in_turn: whether the parts are micro-batches, which have the statistic of the whole itself, not the
            mean of theirs.
        has_own_axis: whether the parts are devices that the function speaks of itself.
        asks_rules: whether derivative rules are looked at.
        rows: how many examples a part has.
        zeros: the Variables that are 0 throughout.
        from_end: the places in an array that are chosen where an index counts from its end.
        reaching: the ops whose results come back to the examples.
    """

    def __init__(
        self,
        result: Following,
        like: dict[Variable, Variable],
        parts: int,
        can_have: CanHave,
        has_own_axis: bool,
        in_turn: bool,
        asks_rules: bool,
        rows: int,
    ) -> None:
        self.result, self.like, self.parts, self.can_have = result, like, parts, can_have
        self.has_own_axis, self.in_turn, self.asks_rules = has_own_axis, in_turn, asks_rules
        self.rows = rows
        self.zeros: set[Variable] = set()
        self.from_end: set[Variable] = set()
        self.reaching: set[Op] = set()

    def inner(
        self, whole: Program, part: Program, given: Sequence[Follows], asks_rules: bool = True
    ) -> Following | None:
        """How the values of what an op runs follow, from what it is given; None if it is not known."""
        raise NotImplementedError

    def axes(self, v: Variable) -> list[int] | None:
        """The axes along which the examples lie; None if lengths follow the batch in another way."""
        other = self.like[v]
        pairs = list(zip(v.shape, other.shape, strict=True))
        if any(mine not in (theirs, theirs / self.parts) for mine, theirs in pairs):
            return None
        return [i for i, (mine, theirs) in enumerate(pairs) if mine != theirs]

    def by_shape(self, v: Variable, otherwise: Follows) -> Follows:
        """How a value follows by its shape alone: as rows if one axis differs, else ``otherwise``."""
        axes = self.axes(v)
        if not axes or len(axes) > 1:
            return otherwise
        return Follows(How.ROWS, 0, ExampleLayout(axes[0]) if v.shape[axes[0]] == self.rows else None)

    def note(self, op: Op, why: str) -> None:
        """Remember an op in which examples see each other, unless the function speaks of devices itself."""
        if not self.has_own_axis:
            self.result.mixing.append((op, why))

    def takes_groups(self, op: Op, size: int) -> None:
        """Remember an op to which so many examples are a group."""
        if size > 1:
            self.result.groups[op] = lcm(size, self.result.groups.get(op, 1))

    def normalizes(self, op: Op) -> None:
        """Remember an op that gives examples a statistic of their part, with the same exception."""
        if not self.has_own_axis:
            self.result.normalizing.append(op)
