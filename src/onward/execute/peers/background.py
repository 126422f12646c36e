"""A worker thread for a caller that may not wait for the end of the work.

>>> background = TaskThread("worker")
>>> background.begin(lambda: 6 * 7)
>>> background.result(timeout=5.0)
(42, None)
"""

from __future__ import annotations

from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any


class TaskThread:
    """A daemon thread that does one piece of work after the other.

    Handing over work and taking its result costs some ten microseconds; starting a thread costs more.
    """

    def __init__(self, name: str) -> None:
        self._work: SimpleQueue[Callable[[], Any]] = SimpleQueue()
        self._done: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self._thread = Thread(target=self._labour, name=name, daemon=True)

    def begin(self, work: Callable[[], Any]) -> None:
        """Do this next."""
        if self._thread.ident is None:
            self._thread.start()
        self._work.put(work)

    def result(self, timeout: float | None) -> tuple[Any, BaseException | None] | None:
        """The return value of the work, and the exception that it raised; None if it is not done."""
        try:
            return self._done.get(timeout=timeout)
        except Empty:
            return None

    def _labour(self) -> None:
        while True:
            work = self._work.get()
            done: tuple[Any, BaseException | None]
            try:
                done = work(), None
            except BaseException as error:
                done = None, error
            self._done.put(done)
            del work, done  # or the arrays of this work would live until the next one
