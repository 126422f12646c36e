"""The arrays that a compiled call takes over, and those that it only reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Lending:
    """Arrays in two groups: at ``reused`` of ``count`` places those that a call takes over, the others lent.

    >>> lending = Lending([1], 3)
    >>> lending.apart("abc")
    (('b',), ('a', 'c'))
    >>> lending.together("b", "ac")
    ['a', 'b', 'c']
    """

    def __init__(self, reused: Sequence[int], count: int) -> None:
        taken = set(reused)
        self.reused = list(reused)
        self.lent = [i for i in range(count) if i not in taken]
        self._are_first = self.reused == list(range(len(taken)))

    def apart(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The values that are taken over, and those that are lent."""
        if self._are_first:
            return tuple(values[: len(self.reused)]), tuple(values[len(self.reused) :])
        return tuple(values[i] for i in self.reused), tuple(values[i] for i in self.lent)

    def together(self, reused: Sequence[Any], lent: Sequence[Any]) -> list[Any]:
        """The values in their places again."""
        at = dict(zip((*self.reused, *self.lent), (*reused, *lent), strict=True))
        return [at[i] for i in range(len(at))]
