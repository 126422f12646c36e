"""The order of boxes in rows: who stands below whom, and who beside whom.

Source: Sugiyama, Tagawa and Toda, Methods for Visual Understanding of Hierarchical System Structures, 1981
(layers and few crossings, as igraph has it).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from onward.core.extras import require

_MOST_IN_A_ROW = 6
_SWEEPS, _LAST = 13, 0


def rows_of(count: int, edges: Sequence[tuple[int, int]], high: Collection[int] = frozenset()) -> list[int]:
    """The row of each of ``count`` boxes, given in an order in which edges lead from earlier to later ones.

    A box stands below all it reads from; one that reads from none stands just above its first reader, unless
    it is among those that are to stand ``high``, since lines reach them from above.

    >>> rows_of(4, [(0, 2), (1, 3), (2, 3)])
    [0, 1, 1, 2]
    """
    before: dict[int, list[int]] = {}
    after: dict[int, list[int]] = {}
    for a, b in edges:
        if a < b:
            before.setdefault(b, []).append(a)
            after.setdefault(a, []).append(b)
    rows: dict[int, int] = {}
    filled: dict[int, int] = {}
    for box in (b for b in range(count) if b in before or b in high or b not in after):
        row = max((rows[a] + 1 for a in before.get(box, ()) if a in rows), default=0)
        row = max([row, *(1 for a in before.get(box, ()) if a not in rows)])
        while filled.get(row, 0) >= _MOST_IN_A_ROW:
            row += 1
        rows[box] = row
        filled[row] = filled.get(row, 0) + 1
    for box in (b for b in range(count) if b not in rows):
        row = min(rows[b] for b in after[box]) - 1
        while filled.get(row, 0) >= _MOST_IN_A_ROW:
            row -= 1
        rows[box] = row
        filled[row] = filled.get(row, 0) + 1
    first = min(rows.values(), default=0)
    return [rows[box] - first for box in range(count)]


def order_of(rows: Sequence[int], edges: Sequence[tuple[int, int]]) -> list[float]:
    """Where the boxes of each row stand from left to right, such that few edges cross.

    Raises:
        MissingExtraError: igraph is not installed.
    """
    igraph = require("igraph", "plot")
    graph = igraph.Graph(n=len(rows), edges=list(edges), directed=True)
    layout = graph.layout_sugiyama(layers=list(rows), maxiter=200)
    return [layout[i][0] for i in range(len(rows))]


def centres(
    rows: Sequence[Sequence[int]],
    widths: Mapping[int, tuple[float, float]],
    edges: Sequence[tuple[int, int, float]],
    start: Mapping[int, float],
) -> dict[int, float]:
    """Places from left to right that make edges straight, without that two boxes of a row overlap.

    Args:
        rows: the boxes of each row in order.
        widths: how far each box reaches to the left and to the right of its place.
        edges: pairs of boxes, and how much they want to be below each other.
        start: a place for each box to begin with.
    """
    upper: dict[int, list[tuple[int, float]]] = {}
    lower: dict[int, list[tuple[int, float]]] = {}
    for a, b, weight in edges:
        upper.setdefault(b, []).append((a, weight))
        lower.setdefault(a, []).append((b, weight))
    both = {box: [*upper.get(box, ()), *lower.get(box, ())] for row in rows for box in row}
    place = {box: float(start[box]) for row in rows for box in row}
    for sweep in range(_SWEEPS):
        is_down = sweep % 2 == 0
        near = both if sweep >= _SWEEPS - _LAST else upper if is_down else lower
        for row in rows if is_down else reversed(rows):
            wanted = [_mean(place, near.get(box, ()), place[box]) for box in row]
            place.update(zip(row, apart([widths[box] for box in row], wanted), strict=True))
    return place


def _mean(
    place: Mapping[int, float], near: Sequence[tuple[int, float]], default: float
) -> tuple[float, float]:
    """Where the neighbours of a box are on average, and how much that counts."""
    total = sum(weight for _, weight in near)
    if not total:
        return default, 0.01
    return sum(place[box] * weight for box, weight in near) / total, total


def apart(widths: Sequence[tuple[float, float]], wanted: Sequence[tuple[float, float]]) -> list[float]:
    """The places nearest to those wanted, each with its weight, at which boxes in this order do not overlap.

    Source: Barlow, Bartholomew, Bremner and Brunk, Statistical Inference under Order Restrictions, 1972
    (pooling of neighbours that violate the order).

    >>> apart([(5, 5), (5, 5)], [(0, 1), (4, 1)])
    [-3.0, 7.0]
    """
    shift, shifts = 0.0, []
    for i, (left, _) in enumerate(widths):
        shift += left + widths[i - 1][1] if i else 0.0
        shifts.append(shift)
    pools: list[tuple[float, float, int]] = []
    for (place, weight), s in zip(wanted, shifts, strict=True):
        pool = (place - s, weight, 1)
        while pools and pools[-1][0] >= pool[0]:
            mean, mass, size = pools.pop()
            both = mass + pool[1]
            pool = ((mean * mass + pool[0] * pool[1]) / both, both, size + pool[2])
        pools.append(pool)
    flat = [mean for mean, _, size in pools for _ in range(size)]
    return [mean + s for mean, s in zip(flat, shifts, strict=True)]
