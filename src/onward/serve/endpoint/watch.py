"""Looks whether the file of a model has changed, and reloads it once it is written."""

from __future__ import annotations

from pathlib import Path
from threading import Event, Thread
from typing import Any

Mark = tuple[int, ...]


class FileWatch:
    """A thread that calls ``reload`` after a file was replaced and has come to rest.

    Args:
        path: the file.
        reload: what to call.
        since: the mark of what was read last, taken before it was read.
        every: seconds between two looks.
    """

    def __init__(self, path: Path, reload: Any, since: Mark | None, every: float = 1.0) -> None:
        self.path, self.reload, self.every = path, reload, every
        self._since = since
        self._ended = Event()
        self._thread = Thread(target=self._look, name="onward-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        served = before = self._since
        while not self._ended.wait(self.every):
            now = mark_of(self.path)
            if now is not None and now == before != served:  # twice the same: nobody is writing
                served = now
                self.reload()
            before = now


def mark_of(path: Path) -> Mark | None:
    """The modification time, size and inode of a file, by which a change shows; None while there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
