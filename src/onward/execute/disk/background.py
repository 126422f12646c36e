"""Write beside the training, in a thread, and report errors to the caller that waits for it."""

from __future__ import annotations

import atexit
import sys
import warnings
from collections.abc import Callable
from threading import Thread

from onward.execute.loop.interrupt import uninterrupted


class WritingThread:
    """One piece of writing at a time, in a thread that the interpreter waits for when it exits.

    Args:
        asynchronous: whether to write in a thread; otherwise ``run`` writes.
    """

    def __init__(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self._thread: Thread | None = None
        self._error: BaseException | None = None
        self._notes: list[str] = []

    def note(self, text: str) -> None:
        """Keep a warning for the caller that waits for the writing."""
        self._notes.append(text)

    @uninterrupted
    def run(self, write: Callable[[], None]) -> None:
        """Write beside what follows, or now."""
        if not self.asynchronous:
            write()
            self._warn()
            return
        self._thread = Thread(target=self._catch, args=(write,), name="onward-checkpoint")
        self._thread.start()

    @uninterrupted
    def join(self) -> None:
        """Return when everything is written, whatever became of it. Ctrl-C waits: it would cut this off."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait(self) -> None:
        """Return when everything is written; raise what went wrong, and warn of what was noted."""
        self.join()
        error, self._error = self._error, None
        atexit.unregister(self._report)
        self._warn()
        if error is not None:
            raise error

    def _catch(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error
        if self._error is not None or self._notes:
            atexit.register(self._report)

    def _report(self) -> None:
        """Print an error, and the warnings, for which no caller waited."""
        if self._error is not None:
            print(f"CheckpointError: {self._error}", file=sys.stderr)
        for note in self._notes:
            print(f"Warning: {note}", file=sys.stderr)

    def _warn(self) -> None:
        """Say what the writing has noticed, in the thread of the caller."""
        notes = self._notes[:]
        self._notes.clear()
        for note in notes:
            warnings.warn(note, UserWarning, stacklevel=5)
