"""``python -m benchmarks.device [part ...]``: all parts unless named, results after each."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.device.apart import Order, Write, here, in_a_process, part_named, probe
from benchmarks.device.found import found
from benchmarks.device.part import Part, Told, as_json

PARTS = ("right", "step", "first", "memory", "devices")
MOST = 8.0  # minutes
_LEAST = 3.0  # seconds with which a case is still begun
_SHARES = 3.0  # how many times its even share of what is left a case may take
_ROUNDS = 20

Runs = Callable[[Order, Write], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, print a table after each, write the JSON if asked to; 1 if any is bad."""
    begin = monotonic()
    chosen = _parsed(arguments)
    environment = found() if chosen.quick else probe()
    is_tiny = chosen.quick or environment["platform"] == "cpu"
    print(", ".join(f"{key} {value}" for key, value in environment.items() if value is not None))
    print(_sizes(chosen.quick, is_tiny), flush=True)
    parts = [part_named(name) for name in dict.fromkeys(chosen.parts or PARTS)]
    told: dict[str, Told] = {}
    for i, part in enumerate(parts):
        left = begin + 60 * chosen.minutes - monotonic()
        seconds = left * part.share / sum(other.share for other in parts[i:])
        runs = here if chosen.quick else in_a_process
        told[part.name] = _run(part, seconds, is_tiny, 2 if chosen.quick else _ROUNDS, runs)
        print(f"\n{part.text(told[part.name])}", flush=True)
        if chosen.json:
            _write(chosen.json, environment, is_tiny, chosen.minutes, told)
    return 1 if any(part.is_bad(told[part.name].rows) for part in parts) else 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.device",
        description="What Onward does on the device at hand, beside the best step written by hand.",
    )
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}; all if none")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, two rounds, all in this process")
    parser.add_argument("--json", metavar="PATH", help="write the numbers to this file as well")
    parser.add_argument(
        "--minutes", type=_minutes, default=MOST, help="for all parts together (default: %(default)g)"
    )
    chosen = parser.parse_args(arguments)
    if unknown := sorted(set(chosen.parts) - set(PARTS)):
        parser.error(f"no part is named {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if chosen.json and not Path(chosen.json).absolute().parent.is_dir():
        parser.error(f"--json {chosen.json}: there is no folder {Path(chosen.json).absolute().parent}")
    return chosen


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = -1.0
    if not 0 < minutes <= MOST:
        raise argparse.ArgumentTypeError(f"{text!r}; expected minutes, more than 0 and at most {MOST:g}")
    return minutes


def _sizes(quick: bool, is_tiny: bool) -> str:
    if not is_tiny:
        return "sizes: those of the device"
    return f"sizes: tiny, for {'--quick asks for them' if quick else 'this is a CPU'}"


def _run(part: Part, seconds: float, tiny: bool, rounds: int, runs: Runs) -> Told:
    """The cases one after the other, for as long as there is time."""
    told, begin = Told(), monotonic()
    for i, case in enumerate(part.cases):
        left = begin + seconds - monotonic()
        if left < _LEAST:
            told.take("left out", (case, f"not begun, for the {seconds:.0f} s of this part are used up"))
            continue
        limit = min(left, _SHARES * left / (len(part.cases) - i))
        runs(Order(part.name, case, limit, tiny, rounds), told.take)
    part.complete(told.rows)
    told.notes += part.closing(told.rows)
    told.seconds = monotonic() - begin
    return told


def _write(path: str, environment: dict[str, Any], tiny: bool, minutes: float, told: dict[str, Told]) -> None:
    about = {"environment": environment, "tiny": tiny, "minutes": minutes}
    Path(path).write_text(json.dumps({**about, "parts": as_json(told)}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
