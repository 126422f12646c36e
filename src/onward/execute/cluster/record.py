"""What a parameter server has on the disk: who pushed what, version, parameters and slots, as one record.

A checkpoint is written now and then, for people; a record is written before every acknowledgement, so that
a server killed between any two instructions comes back with what it acknowledged. There are two kinds of
file, made of the same frames::

    record-<serial>-<version>       one frame, whole: written aside, then renamed
    record-<serial>-<version>.log   frames with what changed since, or what was sent, appended; a torn last
                                    one does not count

    frame = prefix, CRC-32, header (JSON), CRC-32, buffers, CRC-32; each CRC-32 is of everything before it

The highest serial is the newest record, whatever its version: a server that goes back writes a lower version.
A record whose version is not below that of a newer one belongs to a future that was given up: it is never
read, and removed before the one that hides it.

>>> import tempfile
>>> store = Store(Path(tempfile.mkdtemp()))
>>> store.write(Record(1, 0, {}, {"table": np.zeros((4, 2))}))
>>> store.append(Change(2, 0, {7: (0, 1)}, {}, {"table": (np.array([3]), np.ones((1, 2)))}))
>>> store.versions(), store.read().ledger, store.read().arrays["table"].sum(), store.read(1).ledger
([1, 2], {7: (0, 1)}, np.float64(2.0), {})
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from onward.core.errors import ArgumentError, CheckpointError
from onward.execute.checkpoint.durable import make_folder, sync
from onward.execute.cluster.frame import END, Change, Form, Frame, Header, damage, frames_of, load, pack

PART = ".part-record"
SPARE, SPARE_LOG, WORTH_KEEPING = ".spare-record", ".spare-record.log", 2**20
"""Files to write over, of so many bytes at least: new ones cost more than what is written to them."""
NAME = re.compile(r"(record-(\d{8,})-(\d+))(\.log)?")
MOST_UPDATES, MOST_ROOM = 50, 3
"""What a log of gradients may have before a whole record: updates, and bytes in terms of the record's."""

Replay = Callable[[Mapping[str, np.ndarray], Change], Mapping[str, np.ndarray]]
FULL = (
    "{folder} cannot take {needed} bytes more: {error}; {free} bytes are free. Make room for at least "
    "{needed} bytes and write again. All that was acknowledged is still there, and nothing of this write."
)


@dataclass(frozen=True)
class Record:
    """All that a server has: updates made, generation, (incarnation, sequence) by trainer, arrays by name."""

    version: int
    generation: int
    ledger: Mapping[int, tuple[int, int]]
    arrays: Mapping[str, np.ndarray]


class Store:
    """The records of one server in a folder that nobody else writes to; the ``keep`` newest whole ones stay.

    Without ``fsync`` a record outlives the death of the process, with it also that of the machine. ``reach``
    is called with ``"during write"`` when half of the bytes of a record or a change are written. ``replay``
    makes the arrays after an update of those before it and what was sent.
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

    def write(self, record: Record) -> None:
        """Write a whole record, now the newest; those of the same or a higher version are given up.

        Raises:
            CheckpointError: the disk does not take it; everything is as before.
        """
        serial = 1 + max((file.serial for file in _files(self.folder)), default=0)
        header, pieces = pack(Change(**vars(record), rows={}), serial)
        file = _File(serial, header.version, self.folder / f"record-{serial:08d}-{header.version}")
        self._tail, self._is_over_old = None, False
        with self._room_for(pieces):
            make_folder(self.folder)
            try:
                with suppress(FileNotFoundError):
                    os.replace(self.folder / SPARE, self.folder / PART)
                self._put_part(pieces)
                os.replace(self.folder / PART, file.path)
            finally:
                (self.folder / PART).unlink(missing_ok=True)
            if self.fsync:
                sync(self.folder)
        self._tail = _Tail(file, sum(map(len, pieces)), 0, header.version, header.arrays, 0)
        with suppress(OSError):  # not read any more, and tried again by the next write
            self._tidy()

    def append(self, change: Change, whole: Callable[[], Record] | None = None) -> None:
        """Write what changed behind the newest record, or ``whole()`` once that takes less room than the log.

        Raises:
            ArgumentError: there is no whole record, or the change is not one of it.
            CheckpointError: the disk does not take it; everything is as before.
        """
        tail = self._tail or self._last()
        header, pieces = pack(change, tail.base.serial)
        forms = {**tail.forms, **header.arrays}
        _check(change, tail, forms, header.rows)
        if whole is not None and tail.end > tail.size:
            self.write(_same_version(whole(), change))
            return
        self._log(tail, header, pieces, forms)

    def takes(self, size: int) -> bool:
        """Whether what was sent, so many bytes, goes to the log, so that recovery stays short."""
        tail = self._tail
        if tail is None or self.replay is None or size > tail.size:
            return False
        return tail.frames < MOST_UPDATES and tail.end + size <= MOST_ROOM * tail.size

    def append_pushed(self, change: Change) -> None:
        """Write what an update is made of behind the newest record, of the next version.

        Raises:
            CheckpointError: the disk does not take it; everything is as before.
        """
        tail = self._tail or self._last()
        header, pieces = pack(change, tail.base.serial)
        if change.version != tail.version + 1:
            raise ArgumentError(f"the update to version {change.version} cannot follow {tail.version}")
        self._log(tail, header, pieces, tail.forms)

    def _log(self, tail: _Tail, header: Header, pieces: list[memoryview], forms: Mapping[str, Form]) -> None:
        with self._room_for(pieces):
            if tail.end == 0 and not self.fsync:
                self._begin_in_spare(tail.base.log)
            self._put(tail.base.log, tail.end, pieces)
            if self.fsync and tail.end == 0:
                sync(self.folder)
        end = tail.end + sum(map(len, pieces))
        self._tail = replace(tail, end=end, version=header.version, forms=forms, frames=tail.frames + 1)

    def read(self, version: int | None = None) -> Record | None:
        """The newest record, or that of a version, in arrays of its own; None if there is none.

        Raises:
            CheckpointError: what would have to be read is not what was written.
        """
        for base in _line(self.folder):
            if version is None or base.version <= version:
                record = _rebuild(base, version, self.replay)
                return record if version in (None, record.version) else None
        return None

    def versions(self) -> list[int]:
        """The versions that can be read, ascending; judged by the headers, the buffers are not looked at.

        Raises:
            CheckpointError: a file is not what was written.
        """
        line, found = _line(self.folder), set[int]()
        for newer, base in zip([None, *line], line, strict=False):
            versions = {frame.header.version for frame in _history(base)}
            found |= {v for v in versions if newer is None or v < newer.version}
        return sorted(found)

    def _last(self) -> _Tail:
        """Where the next change goes; what a writer that is no more left half done is removed on the way."""
        line = _line(self.folder)
        if not line:
            raise ArgumentError(f"{self.folder} has no whole record that changed; write(record) comes first")
        (self.folder / PART).unlink(missing_ok=True)
        first, *changes = list(_history(line[0]))
        told = (frame.header for frame in (first, *changes) if frame.header.pushed is None)
        forms = {name: form for header in told for name, form in header.arrays.items()}
        end = changes[-1].end if changes else 0
        version = (first, *changes)[-1].header.version
        return _Tail(line[0], first.end, end, version, forms, len(changes))

    def _put_part(self, pieces: list[memoryview]) -> None:
        """Write a file that nobody reads yet, over what it may hold."""
        descriptor = os.open(self.folder / PART, os.O_WRONLY | os.O_CREAT, 0o666)
        try:
            self._put_all(descriptor, pieces)
            os.ftruncate(descriptor, sum(map(len, pieces)))
            if self.fsync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _begin_in_spare(self, log: Path) -> None:
        """Let a log that is not there yet be written over an old one, which says nothing any more."""
        spare = self.folder / SPARE_LOG
        if not log.exists() and spare.exists():
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
                self.bytes_written += os.pwrite(descriptor, first, start)
            if self.fsync:
                os.fsync(descriptor)
        except BaseException:
            with suppress(OSError):
                os.ftruncate(descriptor, start)
            raise
        finally:
            os.close(descriptor)

    def _put_all(self, descriptor: int, pieces: list[memoryview]) -> None:
        half, done = sum(map(len, pieces)) // 2, 0
        for piece in pieces:
            while piece:
                count = os.write(descriptor, piece[: half - done] if done < half else piece)
                piece, done = piece[count:], done + count
                self.bytes_written += count
                if done == half:
                    self.reach("during write")

    def _tidy(self) -> None:
        """Remove what is not kept, oldest first: what was given up does not outlive what hides it."""
        kept = _line(self.folder)[: self.keep]
        for file in reversed(_files(self.folder)):
            if file not in kept:
                self._set_aside(file.log, SPARE_LOG)
                self._set_aside(file.path, SPARE)
        for newer, older in pairwise(kept):
            logged = (frame for frame in _history(older) if frame.path == older.log)
            end = max((frame.end for frame in logged if frame.header.version < newer.version), default=0)
            if older.log.exists():
                os.truncate(older.log, end)

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


class _File(NamedTuple):
    """A whole record, by what its name says."""

    serial: int
    version: int
    path: Path

    @property
    def log(self) -> Path:
        return self.path.with_name(f"{self.path.name}.log")


@dataclass(frozen=True)
class _Tail:
    """Where the next change goes: the newest whole record and its bytes, the log's end, state and length."""

    base: _File
    size: int
    end: int
    version: int
    forms: Mapping[str, Form]
    frames: int


def _files(folder: Path) -> list[_File]:
    """Every record that a file or a log of this folder is named after, newest first."""
    try:
        names = [m for entry in os.listdir(folder) if (m := NAME.fullmatch(entry))]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}. Expected a folder of records.") from error
    return sorted({_File(int(m[2]), int(m[3]), folder / m[1]) for m in names}, reverse=True)


def _line(folder: Path) -> list[_File]:
    """The whole records of this history, newest first: each of a lower version than all newer ones."""
    line: list[_File] = []
    for file in _files(folder):
        if file.path.exists() and (not line or file.version < line[-1].version):
            line.append(file)
    return line


def _history(base: _File) -> Iterator[Frame]:
    """The frame of a whole record, then those of its log."""
    frames = list(frames_of(base.path, base.serial))
    if len(frames) != 1 or frames[0].header.version != base.version:
        raise damage(base.path, 0, "it is cut off, or was renamed")
    yield frames[0]
    yield from frames_of(base.log, base.serial)


def _rebuild(base: _File, version: int | None, replay: Replay | None) -> Record:
    """A whole record with the changes of its log made to it, up to a version."""
    frames = takewhile(lambda f: version is None or f.header.version <= version, _history(base))
    last = load(next(frames))
    ledger, arrays = dict(last.ledger), dict(last.arrays)
    for last in map(load, frames):
        ledger |= last.ledger
        if last.pushed is not None:
            if replay is None:
                raise ArgumentError(f"{base.log} holds what was sent; who reads it has to know the update")
            arrays = dict(replay(arrays, last))
            continue
        arrays |= last.arrays
        for name, (numbers, values) in last.rows.items():
            arrays[name][numbers] = values
    return Record(last.version, last.generation, ledger, arrays)


def _same_version(record: Record, change: Change) -> Record:
    if record.version != change.version:
        raise ArgumentError(f"whole() is of version {record.version}, the change of version {change.version}")
    return record


def _check(change: Change, tail: _Tail, forms: Mapping[str, Form], rows: Mapping[str, Form]) -> None:
    """Refuse now what could not be read later."""
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
