"""Processes that run together and end together: when one fails, the others are ended.

>>> print(blamed([Ending(0, 75, 14.2), Ending(1, -9, 12.1)]))
process 1 was killed by SIGKILL after 12 s
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from onward.shell.launch.worker import GAVE_UP

TICK = 0.02  # seconds between two looks at the processes
GRACE = 5.0  # seconds in which the others say what they know, after one has failed
SAVING = 30.0  # seconds after Ctrl-C or SIGTERM in which a training may save
LAST = 3.0  # seconds between asking a process to end and ending it

Ladder = Sequence[tuple[float, signal.Signals]]  # what is sent to all processes, and after how many seconds

FAILED: Ladder = ((GRACE, signal.SIGTERM), (GRACE + LAST, signal.SIGKILL))
LEAVING: Ladder = ((GRACE, signal.SIGTERM), (SAVING, signal.SIGKILL))  # one was, and the others may be saving
INTERRUPTED: Ladder = ((0, signal.SIGINT), (SAVING, signal.SIGTERM), (SAVING + LAST, signal.SIGKILL))
TERMINATED: Ladder = ((0, signal.SIGTERM), (SAVING, signal.SIGKILL))
ENDED: Ladder = ((0, signal.SIGTERM), (GRACE, signal.SIGKILL))


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
        return f"process {self.index} was killed by {name_of(-self.code)} {after}"


def blamed(failed: Iterable[Ending]) -> Ending | None:
    """The failure that came first and was not for another one's sake; None of none."""
    return min(failed, key=lambda e: (e.code == GAVE_UP, e.seconds, e.code >= 0), default=None)


def name_of(number: int) -> str:
    """The name of a signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


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
    """Runs processes to their end, each in a process group of its own, with all that it started.

    Args:
        start: starts process ``index``.
        count: how many.
        signals: what this process is asked to do meanwhile, which is passed on.

    Attributes:
        failed: how those ended that failed by themselves.
    """

    def __init__(self, start: Callable[[int], subprocess.Popen[bytes]], count: int, signals: Signals) -> None:
        self.failed: list[Ending] = []
        self._begun = time.monotonic()
        self._signals, self._answered = signals, 0
        self._ladder: deque[tuple[float, signal.Signals]] = deque()
        self._is_untouched = True
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for index in range(count):
                self._running[index] = start(index)
        except BaseException:
            self.kill()
            raise

    def run(self) -> None:
        """Wait until all have ended, and see to it that they do."""
        try:
            while self._running:
                time.sleep(TICK)
                self._look()
                self._climb()
        finally:
            self.kill()

    def kill(self) -> None:
        """Leave nothing behind."""
        self._send(signal.SIGKILL)
        for process in self._running.values():
            process.wait()

    def _look(self) -> None:
        """See who has ended, and what this process was asked to do."""
        seconds = time.monotonic() - self._begun
        ended = {i: code for i, process in self._running.items() if (code := process.poll()) is not None}
        failed = [Ending(i, code, seconds) for i, code in ended.items() if code]
        for ending in failed:
            _send(self._running[ending.index], signal.SIGKILL)  # what it started
        self._running = {i: process for i, process in self._running.items() if i not in ended}
        if self._is_untouched:
            self.failed += failed
        if failed and not self._ladder:
            asked = {128 + signal.SIGTERM, 128 + signal.SIGINT}
            saved = all(ending.code in asked for ending in failed)  # the others may be saving yet
            self._begin(LEAVING if saved else FAILED)
        if new := self._signals.seen[self._answered :]:
            is_first = not self._answered and not self.failed and len(new) == 1
            self._answered += len(new)
            patient = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}
            self._begin(patient.get(signal.Signals(new[0]), ENDED) if is_first else ENDED)

    def _begin(self, ladder: Ladder) -> None:
        now = time.monotonic()
        self._ladder = deque((now + after, number) for after, number in ladder)

    def _climb(self) -> None:
        """Send what is due."""
        while self._ladder and time.monotonic() >= self._ladder[0][0]:
            self._send(self._ladder.popleft()[1])

    def _send(self, number: signal.Signals) -> None:
        self._is_untouched = False
        for process in self._running.values():
            _send(process, number)


def _send(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """Send a signal to a process and to what it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
        os.killpg(process.pid, signal.SIGCONT)  # or one that was stopped would not notice
