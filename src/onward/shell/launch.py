"""``onward launch``: one script in several processes of this machine, as one JAX computation.

The script knows nothing of it: it runs in one process and in several. What ends them all is decided here; how
one process joins the others is in ``worker``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import FrameType
from typing import Any

from onward.core.errors import ArgumentError
from onward.shell.printer import Printer
from onward.shell.relay import Relay
from onward.shell.worker import GAVE_UP, VARIABLE, Place

TICK = 0.02  # seconds between two looks at the processes
GRACE = 5.0  # seconds in which the others say what they know, after one has failed
SAVING = 30.0  # seconds after Ctrl-C in which a training may save
LAST = 3.0  # seconds between asking a process to end and ending it

Ladder = deque[tuple[float, signal.Signals]]  # what is sent to all processes, and when


@dataclass(frozen=True)
class Plan:
    """What to launch.

    Args:
        script: a Python file.
        arguments: what it finds in ``sys.argv[1:]``.
        processes: how many.
        devices: host devices of each process; None: as many as JAX shows by itself.
        restarts: how often all are started again when one fails.
        deadline: how many seconds a step may wait for other processes.
    """

    script: Path
    arguments: tuple[str, ...]
    processes: int
    devices: int | None
    restarts: int
    deadline: float


@dataclass(frozen=True)
class Ending:
    """How one process ended.

    Args:
        index: of the process.
        code: its exit status, or minus the signal that killed it.
        seconds: how long it had run.
    """

    index: int
    code: int
    seconds: float

    @property
    def status(self) -> int:
        """The exit status, as shells count."""
        return self.code if self.code >= 0 else 128 - self.code

    def __str__(self) -> str:
        after = f"after {self.seconds:.0f} s"
        if self.code == GAVE_UP:
            return f"process {self.index} gave up {after} because of another process; its message says why"
        if self.code >= 0:
            return f"process {self.index} ended with status {self.code} {after}"
        return f"process {self.index} was killed by {_name(-self.code)} {after}"


def launch(plan: Plan) -> int:
    """Start the processes, print what they print, and wait; returns the exit status.

    Raises:
        OSError: there is no such script.
        ArgumentError: there are fewer GPUs than processes.
    """
    _check(plan.script)
    gpus = shares(visible_gpus(os.environ), plan.processes)
    status = 0
    with Signals() as signals:
        for attempt in range(plan.restarts + 1):
            if attempt:
                _report(f"starting all again ({attempt} of {plan.restarts} restarts)")
            failed = Gang(plan, gpus, signals).run()
            if signals.seen:
                _report(f"ended by {_name(signals.seen[0])}")
                return 128 + signals.seen[0]
            if failed is None:
                return 0
            _report(str(failed))
            status = failed.status
    return status


class Signals:
    """Ctrl-C and requests to end, as a list to look into, in place of an exception that may come anywhere."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self._former: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._former[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen.append(number)


class Gang:
    """The processes of one start: they run together, and end together."""

    def __init__(self, plan: Plan, gpus: list[str | None], signals: Signals) -> None:
        self.plan, self.gpus, self.signals = plan, gpus, signals
        self.children: list[subprocess.Popen[bytes]] = []
        self.running: set[int] = set()
        self.failed: list[Ending] = []  # those that failed by themselves
        self._ladder: Ladder = deque()
        self._sent = False  # whether any signal was sent
        self._answered = 0  # signals to the launcher
        self._begun = time.monotonic()
        self._printer = Printer(tagged=plan.processes > 1)

    def run(self) -> Ending | None:
        """Run to the end; returns how the process ended that failed first, or None if none did."""
        with ExitStack() as stack:
            relay = stack.enter_context(Relay())
            lifeline, end = os.pipe()
            stack.callback(os.close, end)
            stack.callback(self._kill)
            stack.callback(os.close, lifeline)
            for index in range(self.plan.processes):
                self._start(Place(index, self.plan, relay.address, relay.target, lifeline))
            while self.running:
                time.sleep(TICK)
                self._look(time.monotonic())
                self._decide(time.monotonic())
        self._printer.finish()
        return blamed(self.failed)
