"""Measure two sides in turn, compare them round by round, print a table.

>>> from benchmarks.harness import compare, table
>>> row = compare("a case", "the peer", ours=lambda: 2.0, peer=lambda: 4.0, rounds=3, target=1.0)
>>> print(table([row]))
case    against   rounds  onward   peer     ratio  min   max   target
a case  the peer  3       2000 ms  4000 ms  0.50   0.50  0.50  <= 1.00
"""

from __future__ import annotations

import gc
import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter

import jax

Measure = Callable[[], float]  # runs once, returns seconds


@dataclass(frozen=True)
class Row:
    """One comparison: medians in seconds, and the ratios of the rounds."""

    case: str
    against: str
    rounds: int
    onward: float
    peer: float
    ratio: float
    low: float
    high: float
    target: float | None = None

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        return None if self.target is None else self.ratio <= self.target


def compare(
    case: str, against: str, ours: Measure, peer: Measure, rounds: int, target: float | None = None
) -> Row:
    """Measure both sides ``rounds`` times, every other round in the opposite order."""
    times: dict[Measure, list[float]] = {ours: [], peer: []}
    for i in range(rounds):
        for side in (ours, peer) if i % 2 == 0 else (peer, ours):
            gc.collect()
            times[side].append(side())
    ratios = [a / b for a, b in zip(times[ours], times[peer], strict=True)]
    return Row(
        case=case,
        against=against,
        rounds=rounds,
        onward=median(times[ours]),
        peer=median(times[peer]),
        ratio=median(ratios),
        low=min(ratios),
        high=max(ratios),
        target=target,
    )


def seconds(function: Callable[[], object]) -> float:
    """How long one call takes."""
    begin = perf_counter()
    function()
    return perf_counter() - begin


def table(rows: Sequence[Row]) -> str:
    """The rows as plain text in columns."""
    head = ["case", "against", "rounds", "onward", "peer", "ratio", "min", "max", "target"]
    lines = [head, *map(_cells, rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def environment() -> dict[str, str | int | None]:
    """What the numbers depend on and a reader cannot see."""
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
    }


def write_json(path: str | Path, results: Mapping[str, Sequence[Row]]) -> None:
    """The environment and every row, seconds as they were measured."""
    rows = {name: [asdict(row) for row in found] for name, found in results.items()}
    Path(path).write_text(json.dumps({"environment": environment(), "results": rows}, indent=2) + "\n")


def _cells(row: Row) -> list[str]:
    target = "" if row.target is None else f"<= {row.target:.2f}{'' if row.met else '  missed'}"
    numbers = [f"{number:.2f}" for number in (row.ratio, row.low, row.high)]
    return [row.case, row.against, str(row.rounds), _time(row.onward), _time(row.peer), *numbers, target]


def _time(duration: float) -> str:
    """Three digits, in microseconds or in milliseconds."""
    number, unit = (duration * 1e6, "us") if duration < 1e-3 else (duration * 1e3, "ms")
    return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
