"""Who may write to a folder of records: one driver at a time, and of each server the newest process.

A lock keeps a second driver out where the operating system knows the first one. Where it does not (another
machine, a partition), an epoch decides: a pair of numbers that only grow, the driver's and, of each server,
how many processes it has had::

    lock                             held while a driver lives; it dies with its process
    driver-00000002                  the second driver of this folder: its process and machine
    server-0/epoch-00000002-00000001 the records of one process of server 0, and of no other

Each process of a server writes below a name of its own. It claims that name first and copies what it finds
second, and it looks for a newer name between every write and its acknowledgement. So what a process that lost
its place wrote before the claim is in the copy, and what it writes after it is neither acknowledged nor read,
wherever in a write it was stopped.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import sleep
from typing import NamedTuple

from onward.core.errors import CheckpointError, ClusterError
from onward.execute.disk.durable import make_folder, sync
from onward.execute.disk.lock import Lock, LockedError, ProcessName
from onward.fleet.link import Unreachable

DRIVER = re.compile(r"driver-(\d{8,})")
NAME = re.compile(r"epoch-(\d{8,})-(\d{8,})")
TRIES = 5  # to copy the records of a process that may be at work on them

IN_USE = (
    "The folder {folder} is in use by another training: {who}. Two drivers of one folder would overwrite "
    "each other's records. Wait until it has ended, end it, or give another folder."
)
TAKEN = (
    "{name} of epoch {own} has lost its folder to epoch {newest}: another driver goes on with the "
    "training in {folder} ({who}). Nothing that this one writes from now on is used. End it, or give it "
    "another folder."
)
REPLACED = "{name} of epoch {own} (pid {pid}) ends: its place was taken by the process of epoch {newest}"


class Epoch(NamedTuple):
    """Which driver of a folder, counted from 1, and which process of a server, counted from 0."""

    driver: int = 0
    start: int = 0

    def __str__(self) -> str:
        return f"{self.driver}.{self.start}"


FIRST = Epoch()


@contextmanager
def only_driver(folder: Path) -> Iterator[None]:
    """Keep other drivers out of a folder until the end of the block, or of this process.

    Raises:
        ClusterError: another driver is at work there.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> try:
        ...     with only_driver(folder), only_driver(folder):
        ...         pass
        ... except ClusterError as error:
        ...     print(str(error).split(": pid")[0].replace(str(folder), "'records'"))
        The folder 'records' is in use by another training
    """
    lock = Lock(folder / "lock")
    try:
        make_folder(folder)
        lock.acquire()  # a file system without locks leaves it to the epochs
    except LockedError as locked:
        raise ClusterError(IN_USE.format(folder=folder, who=_who(locked.holder))) from None
    except OSError as error:
        raise ClusterError(f"The folder {folder} cannot be used for records: {error}") from error
    try:
        yield
    finally:
        lock.release()


def claim_driver(folder: Path) -> int:
    """The number of this driver, higher than that of any before it, and on the disk."""
    while True:
        before = _drivers(folder)
        number = 1 + max(before, default=0)
        path = folder / _driver(number)
        try:
            with open(path, "xb") as file:
                file.write(ProcessName.own().to_bytes())
                file.flush()
                os.fsync(file.fileno())  # not by its name, which a newer driver may have removed by now
        except FileExistsError:
            continue
        sync(folder)
        if max(_drivers(folder)) == number:
            for older in before:
                (folder / _driver(older)).unlink(missing_ok=True)
            return number
        path.unlink(missing_ok=True)  # others were faster, and the first of them has removed their traces


class ServerPlace:
    """The place of one process of a server, in the folder that all processes of this server share.

    Args:
        folder: of this server.
        driver: the number of its driver.
        name: what people call it.

    Raises:
        ClusterError: a newer driver is at work in the folder.
    """

    def __init__(self, folder: Path, driver: int, name: str) -> None:
        self.root, self.name = folder, name
        make_folder(folder)
        self.epoch = Epoch(driver, -1)
        while True:
            newest = max(_epochs(folder), default=self.epoch)
            if newest.driver > driver:
                raise self._lost(newest)
            self.epoch = Epoch(driver, newest.start + 1 if newest.driver == driver else 0)
            self.folder = folder / _name(self.epoch)
            with suppress(FileExistsError):  # another process was faster, and is not the newest any more
                self.folder.mkdir()
                break
        sync(folder)

    def inherit(self, copy: Callable[[Path, Path], bool]) -> None:
        """Take over what the processes before this one acknowledged: whole, or not at all.

        Args:
            copy: from a folder to an empty one; whether there was anything.
        """
        part = self.root / f".part-{self.folder.name}"
        older = sorted((e for e in _epochs(self.root) if e < self.epoch), reverse=True)
        sources = [self.root / _name(e) for e in older]
        for source in (*sources, self.root):  # where records were before there were epochs
            if _tried(copy, source, part):
                os.rename(part, self.folder)
                sync(self.root)
                break
        self.expect()
        for source in sources:
            shutil.rmtree(source, ignore_errors=True)
            shutil.rmtree(self.root / f".part-{source.name}", ignore_errors=True)

    def expect(self) -> None:
        """Raise what a process that lost its place has to say.

        Raises:
            Unreachable: another process of this driver has it: ask that one.
            ClusterError: a newer driver has it.
        """
        found = _epochs(self.root)
        if not found or max(found) != self.epoch:
            raise self._lost(max(found, default=None))

    def _lost(self, newest: Epoch | None) -> Exception:
        if newest is not None and newest.driver > self.epoch.driver:
            who = _who(ProcessName.read(self.root.parent / _driver(newest.driver)))
            folder = self.root.parent
            return ClusterError(
                TAKEN.format(name=self.name, own=self.epoch, newest=newest, folder=folder, who=who)
            )
        return Unreachable(
            REPLACED.format(name=self.name, own=self.epoch, pid=os.getpid(), newest=newest or "none")
        )


def _drivers(folder: Path) -> list[int]:
    """The numbers of drivers that a folder knows, also by what their servers have left there."""
    named = [int(m[1]) for name in os.listdir(folder) if (m := DRIVER.fullmatch(name))]
    return named + [e.driver for path in folder.glob("server-*") for e in _epochs(path)]


def _driver(number: int) -> str:
    return f"driver-{number:08d}"


def _name(epoch: Epoch) -> str:
    return f"epoch-{epoch.driver:08d}-{epoch.start:08d}"


def _epochs(folder: Path) -> list[Epoch]:
    """The epochs that were claimed in the folder of a server and are not yet removed."""
    with suppress(FileNotFoundError, NotADirectoryError):
        names = os.listdir(folder)
        return [Epoch(int(m[1]), int(m[2])) for name in names if (m := NAME.fullmatch(name))]
    return []


def _tried(copy: Callable[[Path, Path], bool], source: Path, part: Path) -> bool:
    """Whether there was something to copy; again, if a process that has lost its place wrote meanwhile."""
    for left in reversed(range(TRIES)):
        shutil.rmtree(part, ignore_errors=True)
        try:
            return copy(source, part)
        except CheckpointError:
            if not left:
                raise
            sleep(0.05)
    raise AssertionError


def _who(process: ProcessName | None) -> str:
    return "its process is not known" if process is None else f"pid {process.pid} on {process.host}"
