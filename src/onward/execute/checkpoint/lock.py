"""One writer for a folder: a lock of the operating system on a file in it, which ends with its process.

The lock is on the file, not that the file exists: the file that a killed process leaves behind blocks none.
It says which process holds the lock, for the message of one that has to wait.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakSet

from onward.core.errors import CheckpointError
from onward.execute.checkpoint.identity import moment

NAME = ".writer"
_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
_held: WeakSet[Lock] = WeakSet()


class Lock:
    """The right to write to a folder; a second one in the same process has to wait as well.

    A child that was forked does not hold it, and cannot keep it from being free when its parent ends.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> one, two = Lock(folder), Lock(folder)
        >>> one.acquire()
        >>> try:
        ...     two.acquire()
        ... except CheckpointError as error:
        ...     print("this process" in str(error))
        True
        >>> one.release()
        >>> two.acquire()
        >>> two.is_held
        True
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether it is held, and the file is still the one that is locked."""
        return self._descriptor is not None and _is_at(self._descriptor, self.path)

    def acquire(self) -> None:
        """Take the lock, or keep it.

        Raises:
            CheckpointError: another holds it; the message names the process and its machine.
            OSError: the file cannot be made.
        """
        while not self.is_held:
            self._close()
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                self._lock(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            self._descriptor = descriptor
            _held.add(self)

    def release(self) -> None:
        """Let others write, and leave nothing behind."""
        if self.is_held:
            with suppress(OSError):
                self.path.unlink()
        self._close()

    def _lock(self, descriptor: int) -> None:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _TAKEN:
                raise CheckpointError(_refusal(self.path)) from None
            warnings.warn(NO_LOCKS.format(folder=self.path.parent, error=error), UserWarning, stacklevel=5)
        about = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(about).encode(), 0)

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
        _held.discard(self)


def _refusal(path: Path) -> str:
    """Who holds the lock, and what to do."""
    try:
        about: Any = json.loads(path.read_bytes())
        pid, host, since = int(about["pid"]), str(about["host"]), moment(about["since"])
    except (OSError, ValueError, TypeError, LookupError):  # it has only just been taken, or let go
        return HELD.format(folder=path.parent, who="another process", out="Wait until it has ended")
    if (pid, host) == (os.getpid(), socket.gethostname()):
        return HELD.format(folder=path.parent, who=f"this process (pid {pid}), since {since}", out=HERE)
    who = f"process {pid} on {host}, since {since}"
    return HELD.format(folder=path.parent, who=who, out=f"Wait until it has ended, or end it (kill {pid})")


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether a path still leads to the file that is open."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def _forget() -> None:
    """In a child that was forked: the lock is the parent's, and closing its copy leaves it so."""
    for lock in list(_held):
        lock._close()


os.register_at_fork(after_in_child=_forget)

HELD = (
    "{folder} is being written by {who}. A folder has one writer at a time; nothing was changed. {out}; or "
    "write to another folder."
)
HERE = (
    "It is another Checkpoints of the same folder: use that one, or let it go (the end of its `with` block, "
    "or `del`)"
)
NO_LOCKS = (
    "{folder} lies where no file can be locked ({error}): see to it yourself that only one process writes "
    "there."
)
