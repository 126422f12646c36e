"""The contents of a folder of records: whole ones, the logs behind them, the versions that they make.

A log goes on where the one before it ends: a whole record may still be on its way to the disk, and those who
read take the way over the one before it::

    record-00000001-0      record-00000001-0.log       the versions 0, and 1 to 50
                           record-00000002-50.log      the versions 51 to 53
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from onward.core.errors import ArgumentError, CheckpointError
from onward.fleet.frame import Change, Frame, damage, frames_of, load

NAME = re.compile(r"(record-(\d{8,})-(\d+))(\.log)?")
GAP = "it goes on from version {begin}, and what stands before it ends at version {end}"

Replay = Callable[[Mapping[str, np.ndarray], Change], Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class Record:
    """All that a server has: updates made, generation, (incarnation, sequence) by trainer, arrays by name."""

    version: int
    generation: int
    ledger: Mapping[int, tuple[int, int]]
    arrays: Mapping[str, np.ndarray]


class File(NamedTuple):
    """A whole record, by what its name says; it may be its log alone that is there."""

    serial: int
    version: int
    path: Path

    @staticmethod
    def of(folder: Path, serial: int, version: int) -> File:
        """The one of this serial and version."""
        return File(serial, version, folder / f"record-{serial:08d}-{version}")

    @property
    def log(self) -> Path:
        """The path of the log of changes from this version on."""
        return self.path.with_name(f"{self.path.name}.log")


def files(folder: Path) -> list[File]:
    """Every record that a file or a log of this folder is named after, newest first."""
    try:
        names = [m for entry in os.listdir(folder) if (m := NAME.fullmatch(entry))]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}. Expected a folder of records.") from error
    return sorted({File(int(m[2]), int(m[3]), folder / m[1]) for m in names}, reverse=True)


def line(folder: Path) -> list[File]:
    """The whole records of this history, newest first: each of a lower version than all newer ones."""
    found: list[File] = []
    for file in files(folder):
        if file.path.exists() and (not found or file.version < found[-1].version):
            found.append(file)
    return found


def history(base: File) -> Generator[Frame, None, None]:
    """The frame of a whole record, then those of its log, and of the logs that go on from there.

    Raises:
        CheckpointError: a file is not what was written, or what is before it is missing.
    """
    later = [file for file in reversed(files(base.path.parent)) if file.serial > base.serial]
    frames = list(frames_of(base.path, base.serial))
    if len(frames) != 1 or frames[0].header.version != base.version:
        raise damage(base.path, 0, "it is cut off, or was renamed")
    yield frames[0]
    last = base.version
    for file in (base, *later):
        if file.version != last and file.path.exists():  # a way back, or another beginning
            return
        with closing(frames_of(file.log, file.serial)) as frames_in_log:
            for frame in frames_in_log:
                if frame.start == 0 and file.version != last:
                    raise damage(file.log, 0, GAP.format(begin=file.version, end=last))
                yield frame
                last = frame.header.version


def rebuild(base: File, version: int | None, replay: Replay | None) -> Record:
    """A whole record with the changes of the logs made to it, up to a version."""
    with closing(history(base)) as told:
        return _with_changes(
            base, takewhile(lambda f: version is None or f.header.version <= version, told), replay
        )


def _with_changes(base: File, frames: Iterator[Frame], replay: Replay | None) -> Record:
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
