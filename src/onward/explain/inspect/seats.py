"""The seats of results: what stands where an argument stands, by position or by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from onward.explain.inspect.matching import Pair
from onward.explain.inspect.parts import TreePart

Path = tuple[int | str, ...]


@dataclass(frozen=True, eq=False)
class Seats:
    """The arguments of a step, and the results that stand in their places and are built alike.

    A result stands in the place of an argument if its key or field is the argument's name, or if it is as
    many-th among the results, or in a tuple that is one of these; not if all that are carried on stand by the
    same number of places further on, as behind a loss. A state in containers of somebody's own stands where
    the only result is that is built so.

    Attributes:
        arguments: every part of the arguments.
        results: every part of the results.
        names: those of the arguments.
        carried: the places of the arguments that are known to be carried on.
    """

    arguments: Sequence[TreePart]
    results: Sequence[TreePart]
    names: Sequence[str]
    carried: frozenset[int] = frozenset()

    @cached_property
    def wholes(self) -> list[TreePart]:
        """The arguments that hold arrays, in their order."""
        first = {part.place: part for part in reversed(self.arguments) if part.around is None}
        return sorted(first.values(), key=lambda part: part.place)

    @cached_property
    def beside(self) -> dict[int, TreePart]:
        """The result in the place of each argument that has one."""
        found = {old.place: next(self._standing(old), None) for old in self.wholes}
        return {place: new for place, new in found.items() if new is not None}

    def _standing(self, old: TreePart) -> Iterator[TreePart]:
        """The results that stand in the place of an argument, the first of which counts."""
        alike = [new for new in self.results if new.path is not None and new.is_alike(old)]
        for length in (1, 2):
            for new in alike:
                path = new.path or ()
                if len(path) == length and self._is_there(path, old, alike):
                    yield new
        if len(alike) == 1 and (alike[0].path == () or old.bears_own) and len(self._like(old)) == 1:
            yield alike[0]

    def _is_there(self, path: Path, old: TreePart, alike: Sequence[TreePart]) -> bool:
        if path[-1] == self.names[old.place]:
            return True
        return path[-1] == old.place and not self._is_moved(path, old, alike)

    def _is_moved(self, path: Path, old: TreePart, alike: Sequence[TreePart]) -> bool:
        """Whether what is carried on stands in the row of its arguments, by some places further on."""
        row = [new.path[-1] for new in alike if new.path and new.path[:-1] == path[:-1]]
        carried = [other.place for other in self._like(old) if other.place in self.carried]
        if len(row) != len(carried):
            return False
        steps = {at - place for at, place in zip(row, carried, strict=True) if isinstance(at, int)}
        return len(steps) == 1 and steps != {0}

    def _like(self, old: TreePart) -> list[TreePart]:
        """The arguments that are built as one is, with it."""
        return [other for other in self.wholes if other.is_alike(old)]

    def crossed(self, pairs: Iterable[Pair]) -> list[Pair]:
        """The pairs whose result stands in the place of another argument, while another stands in its own."""
        seats = [*self.beside.values()]

        def is_elsewhere(new: TreePart, old: TreePart) -> bool:
            own = self.beside.get(old.place)
            return own is not None and own is not new and any(new is seat for seat in seats)

        return [(new, old) for new, old in pairs if old.around is None and is_elsewhere(new, old)]

    def turned(self, pairs: Iterable[Pair]) -> list[Pair]:
        """Two pairs, built alike, whose results stand the other way around than their arguments do."""
        whole = sorted((p for p in pairs if p[1].around is None), key=lambda pair: pair[1].place)
        for (new, old), (other, beside) in combinations(whole, 2):
            if new.start > other.start and _in_a_row(new, other) and old.is_alike(beside):
                return [(new, old), (other, beside)]
        return []

    def straight(self, crossed: Iterable[Pair]) -> list[Pair]:
        """The pairs that the places tell of the arguments and results of some that cross."""
        news, olds = zip(*crossed, strict=True)
        places = {old.place for old in olds} | {p for p, new in self.beside.items() if new in news}
        return [(self.beside[old.place], old) for old in self.wholes if old.place in places]

    def row(self, olds: Sequence[TreePart]) -> list[Pair]:
        """The only row of results, one after the other, that are built as these arguments are."""
        found = self.rows(olds)
        return found[0] if len(found) == 1 else []

    def rows(self, olds: Sequence[TreePart]) -> list[list[Pair]]:
        """The rows of results that are built as these arguments are, others left out between them."""
        rows: dict[Path, list[TreePart]] = {}
        for new in sorted(self.results, key=lambda new: new.start):
            if new.path and isinstance(new.path[-1], int) and any(map(new.is_alike, olds)):
                rows.setdefault(new.path[:-1], []).append(new)
        starts = ((row, first) for row in rows.values() for first in range(len(row) - len(olds) + 1))
        found = ([*zip(row[first:], olds, strict=False)] for row, first in starts)
        return [pairs for pairs in found if all(new.is_alike(old) for new, old in pairs)]


def _in_a_row(new: TreePart, other: TreePart) -> bool:
    """Whether both stand in one container whose parts have an order."""
    if not new.path or not other.path or new.path[:-1] != other.path[:-1]:
        return False
    return isinstance(new.path[-1], int) and isinstance(other.path[-1], int)
