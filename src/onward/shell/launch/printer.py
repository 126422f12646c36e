r"""Prints what several processes print, line by line, each line with the index of its process.

Of a line that is drawn again and again, as a progress bar does, the last drawing is printed.

>>> tagged(1, b"  0%\r 50%\r100%\n")
b'[1] 100%\n'
"""

from __future__ import annotations

import signal
import subprocess
import sys
from threading import Lock, Thread
from typing import IO, TextIO

PATIENCE = 2.0  # seconds to wait for the last lines; what a process started may keep its pipe open


def tagged(index: int, line: bytes) -> bytes:
    """A line of process ``index``, as it is printed."""
    return b"[%d] %s\n" % (index, line.rstrip(b"\r\n").rsplit(b"\r", 1)[-1])


class Printer:
    """Copies the lines of processes to this one's stdout and stderr, never two into one.

    Args:
        count: the number of processes; a single one writes by itself, to the terminal if there is one.

    Attributes:
        pipe: what to start a process with, as ``stdout`` and ``stderr``.
    """

    def __init__(self, count: int) -> None:
        self.pipe = subprocess.PIPE if count > 1 else None
        self._lock = Lock()
        self._threads: list[Thread] = []
        self._is_read = True

    def follow(self, index: int, process: subprocess.Popen[bytes]) -> None:
        """Copy the lines of a process."""
        for source, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            if source is not None:
                thread = Thread(
                    target=self._copy, args=(index, source, sink), name="onward-printer", daemon=True
                )
                thread.start()
                self._threads.append(thread)

    def finish(self) -> None:
        """Wait for the last lines."""
        for thread in self._threads:
            thread.join(PATIENCE)

    def _copy(self, index: int, source: IO[bytes], sink: TextIO) -> None:
        with source:
            for line in source:
                with self._lock:
                    self._print(tagged(index, line), sink)

    def _print(self, line: bytes, sink: TextIO) -> None:
        """Write a line; when nobody reads any more, end as if the terminal was closed."""
        if self._is_read:
            try:
                sink.buffer.write(line)
                sink.flush()
            except (OSError, ValueError):
                self._is_read = False
                signal.raise_signal(signal.SIGHUP)
