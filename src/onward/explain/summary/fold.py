"""Layers that take the same, shown once: scopes whose rows repeat, one after the other or in turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from onward.explain.summary.rows import SummaryRow

_LONGEST = 64
Scope = Sequence[SummaryRow]


def folded(rows: Sequence[SummaryRow]) -> Iterator[SummaryRow]:
    """The rows of a summary with those of repeated layers in one.

    >>> row = SummaryRow("", None, 1, 0, "f32[]", 9, 8, 4, 0, 4, 0)
    >>> [r.scope for r in folded([replace(row, scope=s) for s in ("a/x", "b/x", "c/x", "d")])]
    ['a/x ... d']
    """
    scopes = [list(group) for _, group in groupby(rows, lambda row: row.scope)]
    kinds = [tuple(replace(row, scope="", live=0) for row in scope) for scope in scopes]
    at = 0
    while at < len(scopes):
        period, times = _repeats(kinds, at)
        for i in range(at, at + period):
            yield from _together(scopes[i : i + period * times : period])
        at += period * times


def _repeats(kinds: Sequence[Sequence[SummaryRow]], at: int) -> tuple[int, int]:
    """How many scopes from here on repeat, and how often, so that the fewest rows remain."""
    best = 1, 1
    for period in range(1, min(_LONGEST, (len(kinds) - at) // 2) + 1):
        end = at + period
        while end < len(kinds) and kinds[end] == kinds[end - period]:
            end += 1
        times = (end - at) // period
        if period * (times - 1) > best[0] * (best[1] - 1):
            best = period, times
    return best


def _together(alike: Sequence[Scope]) -> Iterator[SummaryRow]:
    """The rows of scopes that take the same; what lives at most is told of the fullest."""
    first, last = alike[0], alike[-1]
    for i, row in enumerate(first):
        name = f"{row.scope} ... {last[i].scope}" if len(alike) > 1 else row.scope
        yield replace(row, scope=name, times=len(alike), live=max(scope[i].live for scope in alike))
