"""What was measured, as a table, as JSON, and as a picture.

>>> from benchmarks.harness import compare
>>> row = compare("a case", "the peer", ours=lambda: 2.0, peer=lambda: 4.0, rounds=3, target=1.0)
>>> print(table([row]))
case    against   rounds  time     peer     ratio  min   max   target
a case  the peer  3       2000 ms  4000 ms  0.50   0.50  0.50  <= 1.00
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

from benchmarks.harness import ONWARD, Row
from benchmarks.sides import REFERENCE

try:
    from matplotlib.figure import Figure
except ImportError:
    Figure = None


@dataclass(frozen=True)
class Measured:
    """What a benchmark printed, its table at the end, and the rows of that."""

    command: str
    printed: str
    rows: Sequence[Row]


_HEAD = ["case", "side", "against", "rounds", "time", "peer", "ratio", "min", "max", "cores", "target"]


def table(rows: Sequence[Row]) -> str:
    """The rows as plain text in columns, but for what is the same in all tables; below them the notes."""
    usual = {"side": {ONWARD}, "against": {REFERENCE}, "cores": {None}}
    shown = [
        i for i, name in enumerate(_HEAD) if {getattr(row, name, None) for row in rows} != usual.get(name)
    ]
    lines = [[line[i] for i in shown] for line in (_HEAD, *map(_cells, rows))]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = (map(str.ljust, line, widths) for line in lines)
    notes = [f"{_name(row)}: {row.note}" for row in rows if row.note]
    return "\n".join([*("  ".join(cells).rstrip() for cells in padded), *notes])


_LIBRARIES = ("optax", "flax", "equinox", "torch", "keras", "ray")


def environment() -> dict[str, str | int | None]:
    """What the numbers depend on and a reader cannot see."""
    return {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "cores": os.cpu_count(),
        **{name: version(name) for name in _LIBRARIES if find_spec(name) is not None},
    }


def write_json(path: str | Path, found: Mapping[str, Any]) -> None:
    """What was measured by each benchmark, a dataclass such as ``Measured``; seconds as they were measured.

    A file that is there keeps what it says of other benchmarks, so that one can be measured again by itself.
    """
    path = Path(path)
    earlier = json.loads(path.read_text()) if path.exists() else {}
    new = {name: {"environment": environment(), **asdict(measured)} for name, measured in found.items()}
    path.write_text(json.dumps(earlier | new, indent=2) + "\n")


def plot(path: str | Path, results: Mapping[str, Sequence[Row]]) -> None:
    """A bar for each row's ratio, on a logarithmic scale; its whisker from min to max, marks at targets."""
    if Figure is None:
        raise SystemExit("--plot needs matplotlib: pip install 'onward[plot]'")
    rows = [row for found in results.values() for row in found if row.ratio is not None]
    figure = Figure(figsize=(10, 1.4 + 0.24 * len(rows)), layout="constrained")
    axes = figure.subplots()
    ratios = [row.ratio or 0.0 for row in rows]
    whiskers = [
        [ratio - (row.low or 0.0) for ratio, row in zip(ratios, rows, strict=True)],
        [(row.high or 0.0) - ratio for ratio, row in zip(ratios, rows, strict=True)],
    ]
    axes.barh(
        range(len(rows)),
        [ratio - 1 for ratio in ratios],
        left=1,
        xerr=whiskers,
        color=[_colour(row) for row in rows],
        error_kw={"elinewidth": 0.8, "capsize": 2, "ecolor": "0.35"},
    )
    marks = [(row.target, i) for i, row in enumerate(rows) if row.target is not None]
    if marks:
        style = {
            "color": "black",
            "markersize": 11,
            "markeredgewidth": 2,
            "label": "target; orange: missed, grey: not Onward",
        }
        axes.plot(*zip(*marks, strict=True), "|", **style)
        figure.legend(loc="outside upper left", frameon=False, fontsize=8)
    _label(axes, rows)
    figure.savefig(path)


def _label(axes: Any, rows: Sequence[Row]) -> None:
    axes.set_xscale("log")
    axes.axvline(1, color="0.35", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [*map(_name, rows)], fontsize=8)
    axes.invert_yaxis()
    axes.margins(y=0.01)
    axes.set_xlabel(f"time over that of {REFERENCE}, or of what is named (less is faster)")
    axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    axes.spines[["top", "right"]].set_visible(False)
    for i, row in enumerate(rows):
        axes.text(1.01, i, _number(row.ratio), transform=axes.get_yaxis_transform(), fontsize=7, va="center")


def _name(row: Row) -> str:
    other = "" if row.against == REFERENCE else f" / {row.against}"
    return f"{row.case.strip()}: {row.side}{other}"


def _colour(row: Row) -> str:
    if not row.side.startswith(ONWARD):
        return "0.75"
    return "tab:orange" if row.met is False else "tab:blue"


def _cells(row: Row) -> list[str]:
    numbers = [_number(x) for x in (row.ratio, row.low, row.high)]
    cells = [row.case, row.side, row.against, str(row.rounds), _time(row.time), _time(row.peer), *numbers]
    target = "" if row.target is None else f"<= {row.target:.2f}{'' if row.met else '  missed'}"
    return [*cells, "-" if row.cores is None else f"{row.cores:.1f}", target]


def _number(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}" if number >= 0.1 else f"{number:.3f}"


def _time(duration: float | None) -> str:
    """Three digits, in microseconds or in milliseconds."""
    if duration is None:
        return "-"
    number, unit = (duration * 1e6, "us") if duration < 1e-3 else (duration * 1e3, "ms")
    return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
