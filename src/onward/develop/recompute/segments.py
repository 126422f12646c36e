"""Where the forward pass is narrow: the places between ops that few bytes cross.

What crosses a boundary is kept, so that the backward pass computes again one segment at a time, from the
boundary before it.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import pairwise

from onward.core.program import Variable
from onward.develop.recompute.activations import Activations


def segments(found: Activations) -> tuple[int, ...]:
    """The ops, by their numbers, at which a segment of the forward pass begins; the first is 0.

    Of segments of many sizes those are taken for which what crosses boundaries and the largest segment need
    the fewest bytes together.

    Source: Chen et al., Training deep nets with sublinear memory cost, 2016, section 4.2 and algorithm 3.
    """
    made = [sum(map(found.held, op.outputs)) for op in found.forward]
    crossing = _crossing(found)
    total = sum(made)
    best: tuple[int, ...] = (0,)
    least = float("inf")
    count = 1
    while count <= len(made):
        begins = _cut(made, crossing, total // count)
        if (need := _need(found, made, begins)) < least:
            best, least = begins, need
        count += 1 + count // 4
    return best


def crossing(found: Activations, begins: tuple[int, ...]) -> set[Variable]:
    """The values that are made before one of these ops and read by it or a later op."""
    ends = (*begins, len(found.forward))
    made = ((v, i) for v, i in found.position.items() if v not in found.there)
    return {v for v, i in made if ends[bisect_right(begins, i)] <= found.last_read.get(v, -1)}


def _crossing(found: Activations) -> list[int]:
    """For each op the bytes that are made before it, and read by it or one after it."""
    change = [0] * (len(found.forward) + 1)
    for v, i in found.position.items():
        last = found.last_read.get(v, i)
        change[i + 1] += found.held(v)
        change[last + 1] -= found.held(v)
    total, crossing = 0, []
    for step in change[:-1]:
        total += step
        crossing.append(total)
    return crossing


def _cut(made: list[int], crossing: list[int], limit: int) -> tuple[int, ...]:
    """Boundaries at the narrowest places, the next one before a segment outgrows the limit."""
    begins, size, i = [0], 0, 0
    while i < len(made):
        size += made[i]
        if size > limit and i > begins[-1]:
            narrow = min(range(begins[-1] + 1, i + 1), key=lambda k: (crossing[k], -k))
            begins.append(narrow)
            i, size = narrow, 0
        else:
            i += 1
    return tuple(begins)


def _need(found: Activations, made: list[int], begins: tuple[int, ...]) -> int:
    kept = sum(map(found.held, crossing(found, begins)))
    return kept + max(sum(made[a:b]) for a, b in pairwise((*begins, len(made))))
