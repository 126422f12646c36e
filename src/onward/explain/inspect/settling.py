"""Where dependence and place contradict each other: the next values that they agree on, or a question."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from onward.core.errors import ArgumentError
from onward.core.program import Variable
from onward.explain.inspect.flow import Provenance
from onward.explain.inspect.matching import Pair
from onward.explain.inspect.parts import TreePart
from onward.explain.inspect.places import Places

_CROSSED = (
    "{title} computes {new}, in the place of its argument {seat!r}, from its argument {name!r}, which is built "
    "alike. Nothing shows which of the two it is the next value of. {say}"
)
_SAY = (
    "Say carried={known} if each of {group} is replaced by the result in its place; otherwise return the "
    "results in the order of the arguments that they replace, in the places of these."
)
_REORDER = (
    "Return the results in the order of the arguments that they replace: {group}, in the places of these."
)
_KEPT_BACK = (
    "{title} returns {new}, in the place of its argument {name!r}, which is built alike, and does not "
    "compute it from that. Nothing shows whether it is the next value, as parameters or gradients of the step "
    "before are, or a result. Say what is carried on from step to step: carried={all} if it is the next "
    "value, carried={known} if it is a result."
)


@dataclass(frozen=True, eq=False)
class Settling:
    """The search for pairs that dependence and place agree on, and that a person says.

    Attributes:
        places: what stands where.
        flow: how results are computed of arguments.
        told: what a person says is carried on; None if nobody says.
        asks: whether a person is asked.
        title: what the step is called in messages.
        matched: pairs by dependence, beside those that are settled.
        may_replace: whether a result may be the next value of an argument by what it is computed from.
    """

    places: Places
    flow: Provenance
    told: frozenset[Variable] | None
    asks: bool
    title: str
    matched: Callable[[Sequence[Pair]], list[Pair]]
    may_replace: Callable[[TreePart, TreePart], bool]

    def pairs(self) -> list[Pair]:
        """All pairs; raises ``ArgumentError`` where place and dependence contradict each other."""
        settled: list[Pair] = []
        while True:
            pairs = self.matched(settled)
            more = self._by_place(pairs) if self.told is None else self._as_told(pairs, self.told)
            more = [(new, old) for new, old in more if not any(old is known for _, known in settled)]
            if not more:
                return pairs
            settled += more

    def _as_told(self, pairs: Sequence[Pair], told: frozenset[Variable]) -> list[Pair]:
        """What a person says, of arguments that dependence does not tell, or tells against their places."""
        crossed = self.places.crossed(pairs)
        meant = [old for old in self.places.wholes if told.issuperset(old.variables)]
        wanted = [old for old in meant if _is_lacking(old, pairs) or any(old is o for _, o in crossed)]
        seated = [(self.places.beside[old.place], old) for old in wanted if old.place in self.places.beside]
        if seated:
            return seated
        if crossed:
            raise ArgumentError(self._crossed(crossed))
        return self.places.row(meant) if wanted else []

    def _by_place(self, pairs: Sequence[Pair]) -> list[Pair]:
        """What place and dependence agree on, and state that is not made of the state before."""
        if crossed := self.places.crossed(pairs):
            straight = self.places.straight(crossed)
            if straight and all(self.may_replace(new, old) for new, old in straight):
                return straight
            if self.asks:
                raise ArgumentError(self._crossed(crossed, pairs))
        left = self._kept_back(pairs)
        own = [(new, old) for new, old in left if self._is_own(old)]
        for new, old in left if self.asks and not own else ():
            known = self._names(o.place for _, o in pairs)
            all_of_them = self._names((*(o.place for _, o in pairs), old.place))
            name = self.places.names[old.place]
            raise ArgumentError(
                _KEPT_BACK.format(title=self.title, new=_result(new), name=name, all=all_of_them, known=known)
            )
        return own

    def _kept_back(self, pairs: Sequence[Pair]) -> list[Pair]:
        """The pairs by place of what dependence does not pair, and of which the next step may need the result."""
        seats = [
            (self.places.beside[old.place], old)
            for old in self.places.wholes
            if old.place in self.places.beside
        ]
        free = [
            (new, old)
            for new, old in seats
            if not new.is_numbers and not any(new.overlaps(n) or old.overlaps(o) for n, o in pairs)
        ]
        return [pair for pair in free if self.flow.may_be_kept_back(*pair)] if pairs else []

    def _is_own(self, old: TreePart) -> bool:
        return old.bears_own and self.flow.looked_at.isdisjoint(old.variables)

    def _crossed(self, crossed: Sequence[Pair], pairs: Sequence[Pair] | None = None) -> str:
        """The question, or, where no answer of a person's can tell, the advice."""
        new, old = crossed[0]
        seats = [place for place, seat in self.places.beside.items() if seat is new]
        places = {o.place for _, o in crossed}
        group = self._names((*places, *seats))
        say = _REORDER.format(group=group)
        if pairs is not None and all(place in self.places.beside for place in (*places, *seats)):
            known = self._names((*(o.place for _, o in pairs), *places, *seats))
            say = _SAY.format(known=known, group=group)
        other = next((p for p in (*seats, *places) if p != old.place), old.place)
        names = self.places.names
        return _CROSSED.format(
            title=self.title, new=_result(new), seat=names[other], name=names[old.place], say=say
        )

    def _names(self, places: Iterable[int]) -> list[str]:
        return [self.places.names[place] for place in sorted(set(places))]


def _is_lacking(old: TreePart, pairs: Sequence[Pair]) -> bool:
    """Whether some of an argument is replaced by nothing."""
    return not {v for _, o in pairs for v in o.variables}.issuperset(old.variables)


def _result(new: TreePart) -> str:
    first, *rest = new.variables
    types = f"{first.type} and {len(rest)} more" if rest else str(first.type)
    return (
        f"{types}, a part of its result number {new.place + 1}"
        if len(new.path or ()) > 1
        else f"{types}, its result number {new.place + 1}"
    )
