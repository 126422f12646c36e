"""Pairwise arrays: of two variants of anything, each pair in some row, in few rows of the full product."""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

from allpairspy import AllPairs

__all__ = ["missing_pairs", "pairs"]


def pairs(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Rows with one value of each axis, in which every two values of two axes meet.

    ``pytest.mark.parametrize(("depth", "way", "merge"), pairs(DEPTHS, WAYS, MERGES))``
    """
    values = [list(axis) for axis in axes]
    rows = AllPairs([range(len(axis)) for axis in values])
    return [tuple(axis[i] for axis, i in zip(values, row, strict=True)) for row in rows]


def missing_pairs(rows: list[tuple[Any, ...]], *axes: Iterable[Any]) -> list[tuple[Any, Any]]:
    """The pairs of values of two axes that no row holds."""
    columns = [list(axis) for axis in axes]
    return [
        (x, y)
        for i, j in combinations(range(len(columns)), 2)
        for x, y in product(columns[i], columns[j])
        if not any(row[i] == x and row[j] == y for row in rows)
    ]
