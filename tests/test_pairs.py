"""The tables of variants hold every pair, and far fewer rows than the full product."""

from math import prod

import pytest
from tests.pairs import missing_pairs, pairs


@pytest.mark.parametrize("sizes", [(2, 2), (5, 4, 3, 2), (7, 7), (3, 3, 3, 3, 3), (1, 9, 2), (11, 2, 4, 5)])
def test_every_pair_occurs(sizes):
    axes = [[f"{name}{i}" for i in range(size)] for name, size in zip("abcde", sizes, strict=False)]
    rows = pairs(*axes)
    assert missing_pairs(rows, *axes) == []
    assert len(rows) <= prod(sizes)
    assert len(rows) < prod(sizes) or len(sizes) == 2 or 1 in sizes


def test_a_pair_that_is_missing_is_found():
    rows = pairs("ab", "xy", "pq")
    assert missing_pairs([row for row in rows if row[:2] != ("a", "y")], "ab", "xy", "pq")[0] == ("a", "y")
