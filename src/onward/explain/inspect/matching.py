"""Which results replace which arguments, of those that are built alike and computed from one another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from onward.explain.inspect.flow import Provenance
from onward.explain.inspect.parts import TreePart

Pair = tuple[TreePart, TreePart]
Choice = tuple[TreePart, list[TreePart]]


def beside(numbers: Iterable[Choice], pairs: Sequence[Pair]) -> list[Choice]:
    """The choices that remain for numbers that lie beside one of these pairs, or in no container."""
    news, olds = [new for new, _ in pairs], [old for _, old in pairs]
    left = [
        (new, [o for o in fitting if o.is_accompanied(olds) and not any(o.overlaps(old) for old in olds)])
        for new, fitting in numbers
        if new.is_accompanied(news)
    ]
    return [choice for choice in left if choice[1]]


def decided(choices: list[Choice], flow: Provenance) -> list[Pair]:
    """One argument for each result, each argument once.

    What has the fewest candidates is decided first; among several candidates the one that most of the update
    reads, then the one that stands in the same place, or, among as many candidates as results, in the same
    order. Of several results that are left the same candidates, such as an update and what comes of adding
    it, the last to be made of another and of the argument is meant.
    """
    order = _in_order(choices)

    def fits(new: TreePart, old: TreePart) -> tuple[int, bool]:
        return flow.share(new, old), order.get(new, new.place) == order.get(old, old.place)

    def best(new: TreePart, fitting: Sequence[TreePart]) -> TreePart:
        return max(fitting, key=lambda old: fits(new, old))

    pairs: list[Pair] = []
    while choices:
        new, fitting = min(choices, key=lambda choice: len(choice[1]))
        old = best(new, fitting)
        for rival, olds in choices:
            if len(olds) == len(fitting) and best(rival, olds) is old and flow.supersedes(rival, new, old):
                new = rival
        pairs.append((new, old))
        rest = ((n, [o for o in olds if not o.overlaps(old)]) for n, olds in choices if n is not new)
        choices = [(n, olds) for n, olds in rest if olds]
    return pairs


def _in_order(choices: Sequence[Choice]) -> dict[TreePart, int]:
    """The rank of each result and each argument, of those built alike, where both are equally many."""
    alike: dict[Any, list[Choice]] = {}
    for new, olds in choices:
        if new.path and isinstance(new.path[-1], int):
            alike.setdefault((new.treedef, new.form, new.path[:-1]), []).append((new, olds))
    ranks: dict[TreePart, int] = {}
    for group in alike.values():
        results = {new.start: new for new, _ in group}
        arguments = {old.start: old for _, fitting in group for old in fitting}
        if len(results) == len(arguments) and all(old.around is None for old in arguments.values()):
            for parts in (results, arguments):
                ranks.update((parts[start], i) for i, start in enumerate(sorted(parts)))
    return ranks
