"""The cells of a summary as people read them: units, heads of columns, names of scopes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace

from onward.core.show import human_bytes, human_number
from onward.explain.summary.rows import SummaryRow

NUMBERS = ("ops", "parameters", "flops", "read", "written", "saved", "live", "exchanged")
BYTES = ("read", "written", "saved", "live", "exchanged")
HEADS = {
    "scope": "scope",
    "made_by": "pass",
    "output": "output",
    "ops": "ops",
    "parameters": "parameters",
    "flops": "FLOP",
    "read": "read",
    "written": "written",
    "saved": "saved",
    "live": "live, as written",
    "exchanged": "exchanged",
}


def shown_columns(totals: Sequence[SummaryRow]) -> tuple[str, ...]:
    """The names of the columns that hold anything."""
    names = [f.name for f in fields(SummaryRow) if f.name in HEADS]
    return tuple(n for n in names if n not in NUMBERS or any(getattr(row, n) for row in totals))


def lines(rows: Iterable[SummaryRow], names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The rows as text, a scope named once."""
    before = None
    for row in rows:
        shown = replace(row, scope="") if row.scope == before else row
        yield tuple(cell(shown, name) if name != "scope" or shown is row else "" for name in names)
        before = row.scope


def cell(row: SummaryRow, name: str) -> str:
    """One number or word of a row as people read it."""
    value = getattr(row, name)
    if name == "scope":
        return f"{value or '(no scope)'}{f'  x {row.times}' if row.times > 1 else ''}"
    if name == "made_by":
        return str(value) if value is not None else "all"
    if name == "flops":
        return human_number(value)
    if name in BYTES:
        return human_bytes(value) if value else "-"
    return f"{value:,}" if name in NUMBERS and value else str(value or "-" if name in NUMBERS else value)
