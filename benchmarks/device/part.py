"""A part of the benchmark of a device, and the sheet on which its cases tell what they found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from time import monotonic
from typing import Any, NamedTuple

from onward.core.columns import columns

Cells = dict[str, Any]


class Column(NamedTuple):
    """A column of a part's table: its head, the key in the cells, and how a value is shown."""

    head: str
    key: str
    shown: Callable[[Any], str] = str


@dataclass
class Told:
    """What the cases of a part told: rows, what was left out with the reason, notes."""

    rows: list[Cells] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def take(self, kind: str, content: Any) -> None:
        """One thing that a case tells."""
        if kind == "row":
            self.rows.append(content)
        elif kind == "left out":
            self.left_out.update([content])
        elif content not in self.notes:
            self.notes.append(content)


class Sheet:
    """Where a case writes what it finds; each line goes off at once, so it stays if the case crashes.

    Attributes:
        tiny: whether sizes are to be tiny.
        rounds: how many rounds are measured at most.
    """

    def __init__(self, write: Callable[[str, Any], None], seconds: float, tiny: bool, rounds: int) -> None:
        self._write, self._end = write, monotonic() + seconds
        self.tiny, self.rounds = tiny, rounds

    @property
    def left(self) -> float:
        """The seconds that are left to the case."""
        return self._end - monotonic()

    def row(self, **cells: Any) -> None:
        """A row of the part's table."""
        self._write("row", cells)

    def leave_out(self, name: str, reason: str) -> None:
        """Say that something is not in the table, and why."""
        self._write("left out", (name, reason))

    def note(self, text: str) -> None:
        """A sentence below the table; the same one stands there once."""
        self._write("note", text)

    @contextmanager
    def trying(self, name: str) -> Iterator[None]:
        """What fails within is left out by name with its reason, and the rest goes on."""
        try:
            yield
        except Exception as error:
            self.leave_out(name, reason_of(error))


Case = Callable[[Sheet], None]


@dataclass(frozen=True)
class Part:
    """A question, the cases that answer it, the table that they fill.

    Attributes:
        share: of the time, relative to the other parts.
        legend: what the numbers mean, formulas among it.
        complete: adds to the rows what only all of them together tell.
        closing: sentences about all rows, below the table.
        is_bad: whether the rows are such that the command ends with 1.
    """

    name: str
    question: str
    columns: Sequence[Column]
    cases: Mapping[str, Case]
    share: float
    legend: str = ""
    complete: Callable[[list[Cells]], None] = lambda rows: None
    closing: Callable[[list[Cells]], list[str]] = lambda rows: []
    is_bad: Callable[[list[Cells]], bool] = lambda rows: False

    def text(self, told: Told) -> str:
        """Its table, what was left out, and notes."""
        head = f"{self.name}: {self.question} ({told.seconds:.0f} s)"
        lines = [tuple(column.head for column in self.columns)]
        lines += [tuple(self._cell(row, column) for column in self.columns) for row in told.rows]
        table = [columns(lines)] if told.rows else []
        left_out = [f"left out: {name}: {reason}" for name, reason in told.left_out.items()]
        return "\n".join([head, *table, *left_out, *told.notes, *filter(None, [self.legend])])

    def _cell(self, row: Cells, column: Column) -> str:
        value = row.get(column.key)
        return "-" if value is None else column.shown(value)


def reason_of(error: Exception) -> str:
    """The first line of an error; of one for want of memory, that it is this."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
    return f"out of memory ({text})" if is_out_of_memory(error) else text


def is_out_of_memory(error: Exception) -> bool:
    """Whether a device or the host had no memory left; JAX and torch say it by different classes."""
    told = f"{type(error).__name__}: {error}"
    return isinstance(error, MemoryError) or any(
        word in told for word in ("RESOURCE_EXHAUSTED", "OutOfMemory", "out of memory", "Out of memory")
    )


def as_json(told: Mapping[str, Told]) -> dict[str, Any]:
    """What all parts told, for a file."""
    return {name: asdict(found) for name, found in told.items()}
