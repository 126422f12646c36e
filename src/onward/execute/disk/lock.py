"""One process at a time: a lock of the operating system on a file, which ends with its process.

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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakSet

from onward.execute.disk.durable import has_ended
from onward.execute.disk.fields import expect

_TAKEN = (errno.EWOULDBLOCK, errno.EACCES)
_AFTER_DEATH = 2.0  # seconds in which the files of a process that was killed are closed
_held: WeakSet[Lock] = WeakSet()


@dataclass(frozen=True)
class ProcessName:
    """A process, as it names itself in a file.

    Attributes:
        pid: its number.
        host: its machine.
        since: seconds since 1970 when it wrote so; 0 where it did not say.
    """

    pid: int
    host: str
    since: float = 0.0

    @classmethod
    def own(cls) -> ProcessName:
        """This process, now."""
        return cls(os.getpid(), socket.gethostname(), time.time())

    @classmethod
    def read(cls, path: Path) -> ProcessName | None:
        """The process that wrote a file; None where the file does not say."""
        try:
            said = json.loads(path.read_bytes())
            since = float(said.get("since", 0))
            expect(0 <= since < 1e11, "it is not a time")
            return cls(int(said["pid"]), str(said["host"]), since)
        except (OSError, ValueError, TypeError, LookupError, AttributeError):  # only just taken, or let go
            return None

    @property
    def is_own(self) -> bool:
        """Whether it is this process."""
        return (self.pid, self.host) == (os.getpid(), socket.gethostname())

    @property
    def has_ended(self) -> bool:
        """Whether it was a process of this machine, and is none any more."""
        return self.host == socket.gethostname() and has_ended(self.pid)

    def to_bytes(self) -> bytes:
        """The contents of a file for ``read``."""
        return json.dumps(vars(self)).encode()


class LockedError(Exception):
    """Another holds the lock: ``holder``, None if it does not say who it is."""

    def __init__(self, holder: ProcessName | None) -> None:
        super().__init__(holder)
        self.holder = holder


class Lock:
    """The right to what a file stands for; a second one in the same process has to wait as well.

    A child that was forked does not hold it, and cannot keep it from being free when its parent ends.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "lock"
        >>> one, two = Lock(path), Lock(path)
        >>> one.acquire()
        >>> try:
        ...     two.acquire()
        ... except LockedError as error:
        ...     print(error.holder.is_own)
        True
        >>> one.release()
        >>> two.acquire()
        >>> two.is_held
        True
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether it is held, and the file is still the one that is locked."""
        return self._descriptor is not None and _is_at(self._descriptor, self.path)

    def acquire(self) -> OSError | None:
        """Take the lock, or keep it.

        Returns:
            The error of a file system that locks nothing, where it is taken and keeps nobody out.

        Raises:
            LockedError: another holds it.
            OSError: the file cannot be made.
        """
        unsupported = None
        while not self.is_held:
            self._close()
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                unsupported = self._lock(descriptor)
            except BaseException:
                os.close(descriptor)
                raise
            self._descriptor = descriptor
            _held.add(self)
        return unsupported

    def release(self) -> None:
        """Let others have it, and leave nothing behind."""
        if self.is_held:
            with suppress(OSError):
                self.path.unlink()
        self._close()

    def _lock(self, descriptor: int) -> OSError | None:
        unsupported, end = None, time.monotonic() + _AFTER_DEATH
        while (error := _refusal(descriptor)) is not None:
            if error.errno not in _TAKEN:
                unsupported = error
                break
            holder = ProcessName.read(self.path)
            if holder is None or not holder.has_ended or time.monotonic() > end:
                raise LockedError(holder)
            time.sleep(0.01)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, ProcessName.own().to_bytes(), 0)
        return unsupported

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None
        _held.discard(self)


def _refusal(descriptor: int) -> OSError | None:
    """The error of the system that does not lock a file at once."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.with_traceback(None)  # which would keep the caller's frames alive
    return None


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
