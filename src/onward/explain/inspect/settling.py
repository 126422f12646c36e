"""Where dependence and place contradict each other: the next values that they agree on, or a question."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import starmap

from onward.core.errors import ArgumentError
from onward.core.program import Variable
from onward.core.source import user_level
from onward.explain.inspect.flow import Provenance
from onward.explain.inspect.matching import Pair
from onward.explain.inspect.parts import TreePart
from onward.explain.inspect.seats import Seats

_CROSSED = (
    "{title} computes {new}, in the place of its argument {seat!r}, from its argument {name!r}, which is "
    "built alike. Nothing shows which of the two it is the next value of. Say carried={known} if each of "
    "{group} is replaced by the result in its place; otherwise return every result in the place of the "
    "argument that it replaces."
)
_TURNED = (
    "{title} returns the next values of its arguments {first!r} and {second!r}, which are built alike, the "
    "other way around than it takes them, if these are what each is computed from: {new} for {first!r}, "
    "{other} for {second!r}. Return every result in the place of the argument that it replaces, to be sure."
)
_KEPT_BACK = (
    "{title} returns {new}, in the place of its argument {name!r}, which is built alike, and does not "
    "compute it from that. Nothing shows whether it is the next value, as parameters or gradients of the "
    "step before are, or a result. Say what is carried on from step to step: {say}"
)


@dataclass(frozen=True, eq=False)
class Settling:
    """The search for pairs that dependence and place agree on, and that a person says.

    Attributes:
        seats: what stands where.
        flow: how results are computed of arguments.
        told: what a person says is carried on; None if nobody says.
        asks: whether a person is asked.
        title: what the step is called in messages.
        matched: pairs by dependence, beside those that are settled.
        may_replace: whether a result may be the next value of an argument by what it is computed from.
    """

    seats: Seats
    flow: Provenance
    told: frozenset[Variable] | None
    asks: bool
    title: str
    matched: Callable[[Sequence[Pair]], list[Pair]]
    may_replace: Callable[[TreePart, TreePart], bool]
    settled: tuple[Pair, ...] = ()

    def pairs(self) -> list[Pair]:
        """All pairs; raises ``ArgumentError`` where place and dependence contradict."""
        settled: tuple[Pair, ...] = ()
        while True:
            pairs = self.matched(settled)
            seats = replace(self.seats, carried=self._carried(pairs))
            here = replace(self, seats=seats, settled=settled)
            more = here._unsettled(here._in_order(pairs)) or here._unsettled(here._contradicting(pairs))
            if not more:
                return pairs
            settled += (*more,)

    def _unsettled(self, pairs: Iterable[Pair]) -> list[Pair]:
        return [(new, old) for new, old in pairs if not any(old is known for _, known in self.settled)]

    def _contradicting(self, pairs: Sequence[Pair]) -> list[Pair]:
        return self._by_place(pairs) if self.told is None else self._as_told(pairs, self.told)

    def _in_order(self, pairs: Sequence[Pair]) -> list[Pair]:
        """The row of results that are made of all that is carried on, in its order; its own places first.

        What supersedes a result there, as parameters do an update that stands before them, is meant instead.
        """
        carried = [old for old in self.seats.wholes if old.place in self.seats.carried]
        if any(old is known for _, known in self.settled for old in carried) or self._is_beside(pairs):
            return []
        rows = self.seats.rows(carried) if carried else []
        found = [row for row in rows if all(starmap(self.may_replace, row))]
        at_place = [row for row in found if all(n.path and n.path[-1] == old.place for n, old in row)]
        if not at_place:
            return found[0] if len(found) == 1 else []
        known = {old.place: new for new, old in pairs if old.around is None}
        others = [(known.get(old.place, new), new, old) for new, old in at_place[0]]
        is_superseded = all(n is new or self.flow.supersedes(n, new, old) for n, new, old in others)
        return [(n if is_superseded else new, old) for n, new, old in others]

    def _is_beside(self, pairs: Sequence[Pair]) -> bool:
        """Whether a pair's result stands in the place of an argument that nothing is known to replace."""
        left = {new for place, new in self.seats.beside.items() if place not in self.seats.carried}
        return self.told is None and any(new in left for new, _ in self.seats.crossed(pairs))

    def _crossed_pairs(self, pairs: Sequence[Pair]) -> list[Pair]:
        """The pairs that nobody settled whose result stands in the place of another argument."""
        return self._unsettled(self.seats.crossed(pairs))

    def _carried(self, pairs: Sequence[Pair]) -> frozenset[int]:
        """The places of the arguments that are carried on, as a person says, or by dependence."""
        if self.told is None:
            return frozenset(old.place for _, old in pairs if old.around is None)
        return frozenset(old.place for old in self.seats.wholes if self.told.issuperset(old.variables))

    def _as_told(self, pairs: Sequence[Pair], told: frozenset[Variable]) -> list[Pair]:
        """The pairs that a person says, where dependence tells none, or tells against the places."""
        crossed = [old for _, old in self._crossed_pairs(pairs)]
        meant = [old for old in self.seats.wholes if told.issuperset(old.variables)]
        wanted = [old for old in meant if _is_lacking(old, pairs) or old in crossed]
        beside = self.seats.beside
        if seated := [(beside[old.place], old) for old in wanted if old.place in beside]:
            return seated
        if turned := self.seats.turned(pairs):
            raise ArgumentError(self._turned(turned))
        return self.seats.row(meant) if wanted else []

    def _by_place(self, pairs: Sequence[Pair]) -> list[Pair]:
        """The pairs that place and dependence agree on, and those of state not made of the state before."""
        if crossed := self._crossed_pairs(pairs):
            straight = self.seats.straight(crossed)
            if all(self.may_replace(new, old) for new, old in straight):
                return straight
            if self.asks:
                raise ArgumentError(self._crossed(crossed[0], straight, pairs))
        left = self._kept_back(pairs)
        sure = [pair for pair in left if self._is_own(pair[1])]
        if not self.asks or sure:
            return sure or left
        if left:
            raise ArgumentError(self._unpaired(left, pairs))
        if turned := self.seats.turned(pairs):
            warnings.warn(self._turned(turned), stacklevel=user_level())
        return []

    def _kept_back(self, pairs: Sequence[Pair]) -> list[Pair]:
        """The pairs by place that dependence does not tell, and whose results the next step may need."""
        beside = self.seats.beside
        seats = [(beside[old.place], old) for old in self.seats.wholes if old.place in beside]

        def is_free(new: TreePart, old: TreePart) -> bool:
            return not new.is_numbers and not any(new.overlaps(n) or old.overlaps(o) for n, o in pairs)

        free = [pair for pair in seats if is_free(*pair)] if pairs else []
        return [pair for pair in free if self.flow.may_be_kept_back(*pair)]

    def _is_own(self, old: TreePart) -> bool:
        """Whether its containers show that it is state: somebody's own, at which the loss does not look."""
        return old.bears_own and self.flow.looked_at.isdisjoint(old.variables)

    def _crossed(self, pair: Pair, straight: Sequence[Pair], pairs: Sequence[Pair]) -> str:
        new, old = pair
        (seat,) = (other.place for result, other in straight if result is new)
        return _CROSSED.format(
            title=self.title,
            new=_result(new),
            seat=self.seats.names[seat],
            name=self.seats.names[old.place],
            known=self._names([*pairs, *straight]),
            group=self._names(straight),
        )

    def _turned(self, pairs: Sequence[Pair]) -> str:
        (new, old), (other, beside) = pairs
        names = {"first": self.seats.names[old.place], "second": self.seats.names[beside.place]}
        return _TURNED.format(title=self.title, new=_result(new), other=_result(other), **names)

    def _unpaired(self, left: Sequence[Pair], pairs: Sequence[Pair]) -> str:
        (new, old), *others = left
        known, whole, group = self._names(pairs), self._names([*pairs, *left]), self._names(left)
        say = f"carried={whole} if it is the next value, carried={known} if it is a result."
        if others:
            say = f"carried={known} with those of {group} that are next values: carried={whole} if all are."
        name = self.seats.names[old.place]
        return _KEPT_BACK.format(title=self.title, new=_result(new), name=name, say=say)

    def _names(self, pairs: Iterable[Pair]) -> list[str]:
        """The names of the arguments in which these lie."""
        return [self.seats.names[place] for place in sorted({old.place for _, old in pairs})]


def _is_lacking(old: TreePart, pairs: Sequence[Pair]) -> bool:
    """Whether some of an argument is replaced by nothing."""
    return not {v for _, o in pairs for v in o.variables}.issuperset(old.variables)


def _result(new: TreePart) -> str:
    first, *rest = new.variables
    types = f"{first.type} and {len(rest)} more" if rest else str(first.type)
    return f"{types} in its result number {new.place + 1}"
