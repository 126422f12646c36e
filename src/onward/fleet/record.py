"""The record of a parameter server on the disk: who pushed what, version, parameters and slots.

A checkpoint is written now and then, for people; a record is written before every acknowledgement, so that
a server killed between any two instructions comes back with what it acknowledged. There are two kinds of
file, made of the same frames::

    record-<serial>-<version>       one frame, whole: written aside, then renamed
    record-<serial>-<version>.log   frames with what changed since, or what was sent, appended; a torn last
                                    one does not count

The highest serial is the newest record, whatever its version: a server that goes back writes a lower version.
A record whose version is not below that of a newer one belongs to a future that was given up: it is never
read, and removed before the one that hides it. A log may go on before its whole record is there, which a
thread writes meanwhile: see ``recorded``.

>>> import tempfile
>>> store = Store(Path(tempfile.mkdtemp()))
>>> store.write(Record(1, 0, {}, {"table": np.zeros((4, 2))}))
>>> store.append(Change(2, 0, {7: (0, 1)}, {}, {"table": (np.array([3]), np.ones((1, 2)))}))
>>> store.versions(), store.read().ledger, store.read().arrays["table"].sum(), store.read(1).ledger
([1, 2], {7: (0, 1)}, np.float64(2.0), {})
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Lock

import numpy as np

from onward.core.errors import ArgumentError, CheckpointError
from onward.execute.disk.background import WritingThread
from onward.execute.disk.durable import appearing, make_folder, sync
from onward.fleet.faults import MEANWHILE
from onward.fleet.frame import END, Change, Form, pack
from onward.fleet.recorded import File, Record, Replay, files, history, line, rebuild

PART = ".part-record"
SPARE, SPARE_LOG, WORTH_KEEPING = ".spare-record", ".spare-record.log", 2**20
"""Files to write over, of so many bytes at least: new ones cost more than what is written to them."""
MOST_UPDATES, MOST_ROOM = 50, 3
"""What a log may have before a whole record is due: updates to make again, bytes in terms of the record's."""
STRIDE = 2**20
"""Bytes after which the disk is asked to begin with them, where the end waits for it."""

FULL = (
    "{folder} cannot take {needed} bytes more: {error}; {free} bytes are free. Make room for at least "
    "{needed} bytes and write again. All that was acknowledged is still there, and nothing of this write."
)


class Store:
    """The records of one server in a folder that nobody else writes to; the ``keep`` newest whole ones stay.

    Without ``fsync`` a record outlives the death of the process, with it also that of the machine. ``reach``
    is called when half of the bytes of a record or a change are written: with ``"during write"``, and in a
    thread that writes a whole record with ``"meanwhile"``. ``replay`` makes the arrays after an update of
    those before it and what was sent.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fsync: bool = False,
        keep: int = 2,
        reach: Callable[[str], None] = lambda edge: None,
        replay: Replay | None = None,
    ) -> None:
        if keep < 1:
            raise ArgumentError(f"keep is {keep}; expected at least 1, the newest record")
        self.folder, self.fsync, self.keep, self.reach = Path(folder), fsync, keep, reach
        self.replay = replay
        self.bytes_written = 0
        self._tail: _Tail | None = None
        self._is_over_old = False
        self._background, self._counting = WritingThread(asynchronous=True), Lock()

    def write(self, record: Record) -> None:
        """Write a whole record, now the newest; those of the same or a higher version are given up.

        Raises:
            CheckpointError: the disk does not take it; everything is as before.
        """
        with suppress(CheckpointError):  # what this one takes the place of
            self._background.wait()
        file = self._next(record.version)
        header, pieces = pack(Change(**vars(record), rows={}), file.serial)
        self._tail = None
        self._put_whole(file, pieces, "during write")
        self._begin_in_spare(file.log)
        self._tail = _Tail(file, sum(map(len, pieces)), header.version, header.arrays)

    def begin(self, record: Record) -> None:
        """Write a whole record of this version beside what is appended from now on, which need not wait.

        Raises:
            ArgumentError: it is of another version than what was appended last.
            CheckpointError: the disk did not take the one before; all that was appended is there.
        """
        tail = self._tail or self._last()
        if record.version != tail.version:
            raise ArgumentError(f"the record is of version {record.version}, the log of {tail.version}")
        self._background.wait()
        file = self._next(record.version)
        self._begin_in_spare(file.log)  # before the thread puts another one there
        self._tail = _Tail(file, tail.size, tail.version, tail.forms)
        self._background.run(partial(self._put_meanwhile, file, record))

    def append(self, change: Change) -> None:
        """Write what changed, or what an update of the next version is made of, behind the newest record.

        Raises:
            ArgumentError: there is no whole record, or the change is not one of it.
            CheckpointError: the disk does not take it; everything is as before.
        """
        tail = self._tail or self._last()
        header, pieces = pack(change, tail.base.serial)
        forms = tail.forms if change.pushed is not None else {**tail.forms, **header.arrays}
        _check(change, tail, forms, header.rows)
        with self._room_for(pieces):
            self._put(tail.base.log, tail.end, pieces)
            if self.fsync and tail.end == 0:
                sync(self.folder)
        self._tail = tail.after(header.version, forms, sum(map(len, pieces)), change.pushed is not None)

    def takes(self, size: int) -> bool:
        """Whether what was sent, so many bytes, is worth a log: less than a whole record."""
        return self._tail is not None and self.replay is not None and size <= self._tail.size

    @property
    def is_due(self) -> bool:
        """Whether a whole record should ``begin``, so that recovery stays short and the log small."""
        return self._tail is not None and self._tail.is_long

    def settle(self) -> None:
        """Return when no thread writes any more."""
        self._background.join()

    def read(self, version: int | None = None) -> Record | None:
        """The newest record, or that of a version, in arrays of its own; None if there is none.

        Raises:
            CheckpointError: what would have to be read is not what was written.
        """
        self.settle()
        for base in line(self.folder):
            if version is None or base.version <= version:
                record = rebuild(base, version, self.replay)
                return record if version in (None, record.version) else None
        return None

    def versions(self) -> list[int]:
        """The versions that can be read, ascending; judged by the headers, the buffers are not looked at.

        Raises:
            CheckpointError: a file is not what was written.
        """
        self.settle()
        bases, found = line(self.folder), set[int]()
        for newer, base in zip([None, *bases], bases, strict=False):
            versions = {frame.header.version for frame in history(base)}
            found |= {v for v in versions if newer is None or v < newer.version}
        return sorted(found)

    def _next(self, version: int) -> File:
        """The name of a whole record that is not there yet."""
        serial = 1 + max((file.serial for file in files(self.folder)), default=0)
        return File.of(self.folder, serial, version)

    def _last(self) -> _Tail:
        """Where the next change goes; what a writer that is no more left half done is removed on the way."""
        bases = line(self.folder)
        if not bases:
            raise ArgumentError(f"{self.folder} has no whole record that changed; write(record) comes first")
        (self.folder / PART).unlink(missing_ok=True)
        first, *changes = history(bases[0])
        tail = _Tail(bases[0], first.end, first.header.version, first.header.arrays)
        by_log = {file.log: file for file in files(self.folder)}
        for frame in changes:
            header, sent = frame.header, frame.header.pushed is not None
            if (file := by_log[frame.path]) != tail.base:
                tail = _Tail(file, tail.size, tail.version, tail.forms)
            forms = tail.forms if sent else {**tail.forms, **header.arrays}
            tail = tail.after(header.version, forms, frame.end - frame.start, sent)
        return tail

    def _put_meanwhile(self, file: File, record: Record) -> None:
        """Write a whole record in a thread, from arrays that nobody changes."""
        self._put_whole(file, pack(Change(**vars(record), rows={}), file.serial)[1], MEANWHILE)

    def _put_whole(self, file: File, pieces: list[memoryview], edge: str) -> None:
        """Write a whole record aside, and give it its name; remove what it takes the place of."""
        with self._room_for(pieces):
            make_folder(self.folder)
            with appearing(file.path, self.folder / PART, durable=self.fsync) as part:
                with suppress(FileNotFoundError):
                    os.replace(self.folder / SPARE, part)
                self._put_part(part, pieces, edge)
            if self.fsync:
                sync(self.folder)
        with suppress(OSError):  # not read any more, and tried again by the next write
            self._tidy()

    def _put_part(self, part: Path, pieces: list[memoryview], edge: str) -> None:
        """Write a file that nobody reads yet, over what it may hold."""
        descriptor = os.open(part, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            self._put_all(descriptor, pieces, edge)
            os.ftruncate(descriptor, sum(map(len, pieces)))
        finally:
            os.close(descriptor)

    def _begin_in_spare(self, log: Path) -> None:
        """Let a log that is not there yet be written over an old one, which says nothing any more."""
        spare, self._is_over_old = self.folder / SPARE_LOG, False
        with suppress(OSError):
            with open(spare, "r+b") as file:
                file.write(END)
            os.replace(spare, log)
            self._is_over_old = True

    def _put(self, path: Path, start: int, pieces: list[memoryview]) -> None:
        """Write the pieces from here on, and nothing behind them; on failure the file ends here again.

        Over something old the first byte comes last, and until then the log ends there.
        """
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            over = self._is_over_old and os.fstat(descriptor).st_size > start
            if over:
                os.pwrite(descriptor, END, start)
                first, pieces = pieces[0][:1], [pieces[0][1:], *pieces[1:]]
                end = start + 1 + sum(map(len, pieces))
            else:
                os.ftruncate(descriptor, start)
            os.lseek(descriptor, start + over, os.SEEK_SET)
            self._put_all(descriptor, pieces)
            if over:
                os.pwrite(descriptor, END if os.fstat(descriptor).st_size > end else b"", end)
                self._count(os.pwrite(descriptor, first, start))
            if self.fsync:
                os.fsync(descriptor)
        except BaseException:
            with suppress(OSError):
                os.ftruncate(descriptor, start)
            raise
        finally:
            os.close(descriptor)

    def _put_all(self, descriptor: int, pieces: list[memoryview], edge: str = "during write") -> None:
        half, done, begun = sum(map(len, pieces)) // 2, 0, 0
        for piece in pieces:
            while piece:
                count = os.write(descriptor, piece[: min(half - done, STRIDE) if done < half else STRIDE])
                piece, done = piece[count:], done + count
                self._count(count)
                if done == half:
                    self.reach(edge)
                if self.fsync and done - begun >= STRIDE:
                    _start_writing(descriptor, done - begun)
                    begun = done

    def _count(self, size: int) -> None:
        with self._counting:
            self.bytes_written += size

    def _tidy(self) -> None:
        """Remove what is not kept, oldest first: what was given up does not outlive what hides it."""
        kept = line(self.folder)[: self.keep]
        for file in reversed(files(self.folder)):
            if file not in kept:
                self._set_aside(file.log, SPARE_LOG)
                self._set_aside(file.path, SPARE)
        for newer, older in pairwise(kept):
            logged = [frame for frame in history(older) if frame.path == older.log]
            if logged and logged[-1].header.version > newer.version:
                before = (frame.end for frame in logged if frame.header.version < newer.version)
                os.truncate(older.log, max(before, default=0))

    def _set_aside(self, path: Path, spare: str) -> None:
        """Remove a file; a large one is kept under another name, to be written over."""
        with suppress(FileNotFoundError):
            if self.fsync or path.stat().st_size < WORTH_KEEPING:
                path.unlink()
            else:
                os.replace(path, self.folder / spare)

    @contextmanager
    def _room_for(self, pieces: list[memoryview]) -> Iterator[None]:
        """Say in a sentence what the disk refused."""
        try:
            yield
        except OSError as error:
            free: object = "an unknown number of"
            with suppress(OSError):
                free = shutil.disk_usage(self.folder).free
            needed = sum(map(len, pieces))
            raise CheckpointError(
                FULL.format(folder=self.folder, needed=needed, error=error, free=free)
            ) from error


@dataclass(frozen=True)
class _Tail:
    """Where the next change goes: the newest record, its bytes, the state it is in, what its log has.

    Attributes:
        base: the record whose log it is.
        size: bytes of that record, or of the one before it.
        version: of the last change.
        forms: of all arrays.
        end: bytes of the log; ``last``: of its last change.
        updates: how many of its changes have to be made again.
    """

    base: File
    size: int
    version: int
    forms: Mapping[str, Form]
    end: int = 0
    last: int = 0
    updates: int = 0

    def after(self, version: int, forms: Mapping[str, Form], size: int, sent: bool) -> _Tail:
        """With one change more, of so many bytes."""
        updates, end = self.updates + sent, self.end + size
        return replace(self, version=version, forms=forms, end=end, last=size, updates=updates)

    @property
    def is_long(self) -> bool:
        """Whether one change more, like the last, would be too much."""
        return self.updates >= MOST_UPDATES or self.end + self.last > MOST_ROOM * self.size


def _start_writing(descriptor: int, size: int) -> None:
    """Let the disk begin with the last bytes of a file, so that an fsync waits for less; it is a hint."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            start = os.lseek(descriptor, 0, os.SEEK_CUR) - size
            os.posix_fadvise(descriptor, start, size, os.POSIX_FADV_DONTNEED)


def _check(change: Change, tail: _Tail, forms: Mapping[str, Form], rows: Mapping[str, Form]) -> None:
    """Refuse now what could not be read later."""
    if change.pushed is not None and change.version != tail.version + 1:
        raise ArgumentError(f"the update to version {change.version} cannot follow {tail.version}")
    if change.version < tail.version:
        raise ArgumentError(
            f"version {change.version} cannot follow version {tail.version}; to go back, write a whole record"
        )
    for name, (dtype, shape) in rows.items():
        numbers = np.asarray(change.rows[name][0])
        table = forms.get(name)
        if table is None or (dtype, shape) != (table[0], (len(numbers), *table[1][1:])) or not table[1]:
            raise ArgumentError(
                f"the rows of {name!r} are {dtype}{list(shape)}; the table in the record is {table}"
            )
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < table[1][0]:
            raise ArgumentError(
                f"rows {numbers.min()} to {numbers.max()} of {name!r}, which has {table[1][0]}"
            )
