"""Which steps the history has: each once, whichever process reports it, and however often it was made.

A trainer tells of its steps, and the first server of those that it applied: a trainer that dies leaves some
of which the server knows alone, and one that begins again may make a step twice.

>>> told = []
>>> steps = Steps(lambda row: told.append((row.trainer, row.sequence)))
>>> row = HistoryRow(0, 7, {}, 0, 0, 1, 0, 0, 0.1, 0.0, 0.0)
>>> steps.expect(row), steps.note(row), steps.note(row), steps.give_up(0)
(None, None, None, None)
>>> told
[(0, 7)]
"""

from __future__ import annotations

from collections.abc import Callable

from onward.fleet.messages import HistoryRow


class Steps:
    """Hands each step on once: as its trainer tells of it, or as the first server does if that has died."""

    def __init__(self, row: Callable[[HistoryRow], None]) -> None:
        self.row = row
        self._had: dict[int, list[list[int]]] = {}
        self._expected: dict[tuple[int, int], HistoryRow] = {}

    def expect(self, row: HistoryRow) -> None:
        """Of this step its trainer will tell, if it lives."""
        if not self._has(row):
            self._expected[row.trainer, row.sequence] = row

    def note(self, row: HistoryRow) -> None:
        """Hand a step on, unless it was."""
        self._expected.pop((row.trainer, row.sequence), None)
        if self._has(row):
            return
        spans = self._had.setdefault(row.trainer, [])
        if spans and spans[-1][1] == row.sequence:
            spans[-1][1] += 1
        else:
            spans.append([row.sequence, row.sequence + 1])
        self.row(row)

    def give_up(self, trainer: int) -> None:
        """A trainer has ended: hand on what is left of its steps."""
        for t, sequence in sorted(self._expected):
            if t == trainer:
                self.note(self._expected[t, sequence])

    def _has(self, row: HistoryRow) -> bool:
        """Whether it was handed on; the newest spans are asked first."""
        return any(a <= row.sequence < b for a, b in reversed(self._had.get(row.trainer, ())))
