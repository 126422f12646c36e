"""Run benchmarks by name, all of them unless named: ``python -m benchmarks [name ...]``.

``python -m benchmarks device [part ...]`` is ``python -m benchmarks.device [part ...]``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from typing import TextIO

from benchmarks import (
    accumulate_time,
    budget_time,
    check_finite_time,
    chunk_time,
    derive_time,
    first_step_time,
    looking,
    multi_device,
    options_time,
    parameter_server,
    partition_time,
    pipeline_time,
    recompute_time,
    serving,
    step_time,
    threads,
    update_time,
)
from benchmarks.device import __main__ as device
from benchmarks.harness import Row
from benchmarks.quiet import look, verdict
from benchmarks.report import Measured, environment, plot, table, write_json

BENCHMARKS: dict[str, Callable[[int | None, bool], list[Row]]] = {
    "accumulate_time": accumulate_time.run,
    "budget_time": budget_time.run,
    "check_finite_time": check_finite_time.run,
    "chunk_time": chunk_time.run,
    "derive_time": derive_time.run,
    "first_step_time": first_step_time.run,
    "looking": looking.run,
    "multi_device": multi_device.run,
    "options_time": options_time.run,
    "parameter_server": parameter_server.run,
    "partition_time": partition_time.run,
    "pipeline_time": pipeline_time.run,
    "recompute_time": recompute_time.run,
    "serving": serving.run,
    "step_time": step_time.run,
    "threads": threads.run,
    "update_time": update_time.run,
}

_DEVICE = (
    "device [part ...], as the first name: what Onward does on an accelerator; device --help tells more."
)


def main(arguments: Sequence[str] | None = None) -> dict[str, list[Row]]:
    """Run, print the tables and write the JSON if asked to; return the rows by benchmark."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["device"]:
        sys.exit(device.main(given[1:]))
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="What Onward costs.", epilog=_DEVICE
    )
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(BENCHMARKS)}; all if none")
    parser.add_argument("--rounds", type=int, help="how often to compare the two sides of each row")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything runs")
    parser.add_argument("--json", metavar="PATH", help="write the numbers to this file, beside others in it")
    parser.add_argument("--plot", metavar="PATH", help="draw the ratios into this file, .svg or .png")
    chosen = parser.parse_args(given)
    if unknown := set(chosen.names) - set(BENCHMARKS):
        parser.error(f"no benchmark is named {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    print(", ".join(f"{key} {value}" for key, value in environment().items()))
    found: dict[str, Measured] = {}
    for name in chosen.names or BENCHMARKS:
        found[name] = measured(name, chosen.rounds, chosen.quick)
        if chosen.json:
            write_json(chosen.json, {name: found[name]})
    results = {name: list(what.rows) for name, what in found.items()}
    if chosen.plot:
        plot(chosen.plot, results)
    return results


def measured(name: str, rounds: int | None = None, quick: bool = False) -> Measured:
    """Run one benchmark, print what it says and its table, and keep both."""
    options = [*(["--rounds", str(rounds)] if rounds else []), *(["--quick"] if quick else [])]
    both = _Both(sys.stdout)
    with redirect_stdout(both):
        before = None if quick else look()
        found = BENCHMARKS[name](rounds, quick)
        print(f"\n{name}\n{table(found)}", flush=True)
        print(end="" if quick else f"{verdict(before, look())}\n")
    return Measured(" ".join(["python -m benchmarks", name, *options]), both.getvalue().strip(), found)


class _Both(StringIO):
    """Text that is kept and printed as well."""

    def __init__(self, shown: TextIO) -> None:
        super().__init__()
        self.shown = shown

    def write(self, text: str) -> int:
        """Keep it, and print it at once."""
        self.shown.write(text)
        self.shown.flush()
        return super().write(text)


if __name__ == "__main__":
    main()
