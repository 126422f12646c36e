"""Chooses the cases that the check runs: those that together take every way that all of them take.

    python -m pytest -n 3 --dist loadfile -p tests.faults.record
    python -m tests.faults.choose [--record .faults] [--times 1]

All cases run that take no time, and those that the recorder does not see into: of files at the top of
``tests``, which are about pages, programs and the house, and what starts processes. Of every other test the
first case runs, unless that takes long. To them are added, by what is new in each for its time, the cases
that it takes for each function of ``src/onward`` to be entered, and each way of each branch to be taken, by
as many as ``--times`` says, if so many do it, and by one from the folder of tests of the same name. A test
that takes long, and no way that others do not take, is left to the run of all. ``tests/cases.txt`` is written
anew.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tests.cases import LIST, NONE
from tests.quick import function_of

LEAST = 0.005  # seconds of a case that takes none
CHEAP = 0.06  # seconds of a case that is not worth leaving out
LONG = 0.5  # seconds of a first case that has to be worth it


class Case(NamedTuple):
    """A recorded case: its seconds, those of its processes, and the numbers of what it enters."""

    name: str
    cpu: float
    processes: float
    entered: np.ndarray

    @property
    def seconds(self) -> float:
        return max(self.cpu, LEAST) + self.processes

    @property
    def always(self) -> bool:
        """Whether it runs whatever it enters."""
        at_top = folder_of(self.name).startswith("test_")
        return at_top or self.processes > 0.05 or self.seconds < CHEAP


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.choose")
    parser.add_argument("--record", type=Path, default=Path(".faults"))
    parser.add_argument("--times", type=int, default=1)
    options = parser.parse_args()
    cases, folders = recorded(options.record)
    chosen = choice(cases, folders, options.times)
    write(cases, chosen)
    all_seconds, seconds = (sum(cases[i].seconds for i in which) for which in (range(len(cases)), chosen))
    print(f"{len(chosen)} of {len(cases)} cases, {seconds:.0f} of {all_seconds:.0f} seconds")


def recorded(folder: Path) -> tuple[list[Case], list[str]]:
    """The cases, and for each function and each way the folder of its file."""
    numbers: dict[tuple[object, ...], int] = {}
    cases = []
    for path in sorted(folder.glob("*.jsonl")):
        here: list[int] = []
        for line in path.read_text().splitlines():
            row = json.loads(line)
            here += [numbers.setdefault(tuple(way), len(numbers)) for way in row.get("ways", ())]
            if "test" in row:
                functions = (tuple(name.rsplit(":", 1)) for name in row["functions"])
                entered = [numbers.setdefault(function, len(numbers)) for function in functions]
                entered += [here[i] for i in row["branches"]]
                cases.append(
                    Case(
                        row["test"], row["cpu"], row["cpu of processes"], np.array(sorted(entered), np.int64)
                    )
                )
    return cases, [str(file).split("/")[0] for file, *_ in numbers]


def choice(cases: list[Case], folders: list[str], times: int) -> set[int]:
    """The places of the cases that run, greedily by what is new for their time."""
    asked, needed = _asked(cases, folders, times)
    chosen: set[int] = set()

    def take(i: int) -> None:
        chosen.add(i)
        needed[asked[i]] -= 1

    def worth(i: int) -> float:
        return float(np.count_nonzero(needed[asked[i]] > 0)) / cases[i].seconds

    first = {function_of(case.name): i for i, case in reversed([*enumerate(cases)])}
    short = {i for i in first.values() if cases[i].seconds < LONG}
    for i in short | {i for i, case in enumerate(cases) if case.always}:
        take(i)
    heap = [(-worth(i), i) for i in range(len(cases)) if i not in chosen]
    heapq.heapify(heap)
    while heap:
        before, i = heapq.heappop(heap)
        now = worth(i)
        if now and now < -before:  # worth less than when it was looked at
            heapq.heappush(heap, (-now, i))
        elif now:
            take(i)
    return chosen


def _asked(cases: list[Case], folders: list[str], times: int) -> tuple[list[np.ndarray], np.ndarray]:
    """For each case what it does, and how often each of that has to be done.

    A way counts twice: taken by any test, and by one of its own folder.
    """
    folder, asked = np.array(folders), []
    for case in cases:
        at_home = case.entered[folder[case.entered] == folder_of(case.name)]
        asked.append(np.concatenate([case.entered, at_home + len(folders)]))
    done = np.zeros(2 * len(folders), np.int64)
    for doing in asked:
        done[doing] += 1
    return asked, np.minimum(done, np.repeat([times, 1], len(folders)))


def folder_of(test: str) -> str:
    """The folder of the source that a test is about: that of its name, or that of its docstring."""
    top, *rest = test.partition("::")[0].split("/")
    return rest[1 if top == "src" else 0]


def write(cases: list[Case], chosen: set[int]) -> None:
    kept: dict[str, list[str]] = defaultdict(list)
    for i in chosen:
        kept[function_of(cases[i].name)].append(cases[i].name)
    cut = {function_of(case.name) for i, case in enumerate(cases) if i not in chosen}
    lines = sorted(name for function in cut for name in kept.get(function) or [f"{NONE}{function}"])
    LIST.write_text("".join(f"{line}\n" for line in lines))


if __name__ == "__main__":
    main()
