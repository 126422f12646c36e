"""Rows of words as text in columns."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """The rows under each other; the columns of these numbers stand to the right.

    >>> print(columns([("name", "bytes"), ("w", "12")], right=[1]))
    name  bytes
    w        12
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = (
            f"{x:>{w}}" if i in right else f"{x:<{w}}"
            for i, (x, w) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    return "\n".join(map(line, rows))
