"""Does anything else compute on this machine, so that times are not those of the benchmark alone?

A benchmark sleeps for a moment, before and after it measures, and looks at what Linux counts meanwhile: the
time of its cores, and that of each process. Elsewhere it sees nothing, and says nothing.

    before = look()
    rows = measure()
    print(verdict(before, look()))
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep

_ENOUGH = 0.05  # of all cores: what others may take of a quiet machine
_NAMED = 3  # of the processes
_PROCESSES = Path("/proc")
_GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
_ADVICE = (
    "End what need not run (browsers, indexers, backups, editors that look through the folder), wait until a "
    "package has been installed or a laptop has cooled down, and measure again: docs/benchmarks.md."
)


@dataclass(frozen=True)
class Look:
    """How many of ``cores`` others kept busy, how many the host of a virtual machine took, and who it was."""

    cores: int
    busy: float
    stolen: float
    who: tuple[tuple[str, float], ...] = ()

    @property
    def is_quiet(self) -> bool:
        """Whether others took next to nothing."""
        return self.busy + self.stolen <= _ENOUGH * self.cores

    def __str__(self) -> str:
        names = ", ".join(f"{name} {cores:.2f}" for name, cores in self.who)
        words = f"other processes kept {self.busy:.2f} of {self.cores} cores busy" + (
            f" ({names})" if names else ""
        )
        if self.stolen < 0.01:
            return words
        return f"{words}, and the host of this virtual machine took {self.stolen:.2f}"


def look(seconds: float = 1.0) -> Look | None:
    """Sleep, and see what others compute meanwhile; None where Linux does not tell."""
    begin, before, processes = perf_counter(), _counted(), dict(_processes())
    sleep(seconds)
    passed, after = (perf_counter() - begin) * os.sysconf("SC_CLK_TCK"), _counted()
    if before is None or after is None:
        return None
    spent = {of: (ticks - processes.get(of, ticks)) / passed for of, ticks in _processes()}
    most = sorted(((name, cores) for (_, name), cores in spent.items() if cores >= 0.01), key=lambda p: -p[1])
    busy, stolen = ((b - a) / passed for a, b in zip(before, after, strict=True))
    return Look(os.cpu_count() or 1, busy, stolen, tuple(most[:_NAMED]))


def verdict(*looks: Look | None) -> str:
    """What to know of the machine before its numbers are believed; empty where nothing was seen."""
    seen = [found for found in looks if found is not None]
    if not seen:
        return ""
    worst = max(seen, key=lambda found: found.busy + found.stolen)
    words = [f"The machine was quiet: {worst}." if worst.is_quiet else f"NOT QUIET: {worst}. {_ADVICE}"]
    if (governor := _governor()) not in ("", "performance", "schedutil"):
        command = "sudo cpupower frequency-set -g performance"
        words.append(f"The clock follows the load (governor {governor!r}): {command}")
    return "\n".join(words)


def _counted() -> tuple[int, int] | None:
    """The ticks that all cores were busy, and that the host took, since the machine began."""
    try:
        fields: Sequence[str] = (_PROCESSES / "stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    user, nice, system, _idle, _waits, interrupts, soft, stolen = map(int, fields[1:9])
    return user + nice + system + interrupts + soft, stolen


def _processes() -> Iterator[tuple[tuple[str, str], int]]:
    """The ticks of each other process that is there, by number and name."""
    for folder in _PROCESSES.glob("[0-9]*"):
        try:
            before, _, after = (folder / "stat").read_text().rpartition(")")
        except OSError:  # it has ended, or is hidden
            continue
        fields = after.split()
        if folder.name != str(os.getpid()):
            yield (folder.name, before.partition("(")[2]), int(fields[11]) + int(fields[12])


def _governor() -> str:
    try:
        return _GOVERNOR.read_text().strip()
    except OSError:
        return ""
