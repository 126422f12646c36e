"""One frame of a record on the disk: a header in JSON, raw buffers, and checks of both.

    frame = prefix, CRC-32, header (JSON), CRC-32, buffers, CRC-32; each CRC-32 is of everything before it

It reads the sums of blocks of 4 KiB, as little-endian words of 64 bits, and then what is left over: that
takes a fifth of the time, or less, and no flipped bit escapes it, nor a lost page but one in 2**64.

A frame that ends before it should was never acknowledged; one whose checks fail is damaged. Where the
first byte of a frame would be is 0, a log ends: what stands behind is of a log before it.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from onward.core.errors import ArgumentError, CheckpointError
from onward.execute.disk.tensors import bytes_of

MAGIC, BEFORE = b"onward-s", b"onward-r"  # until 0.1 the CRC-32 read every byte
BLOCK = 4096
PREFIX = struct.Struct("<8sIQ")  # MAGIC, the bytes of the header, the bytes of the buffers
CRC = struct.Struct("<I")
END = b"\0"
"""The first byte of what is not a frame."""
WHOLE = "Move it and its .log elsewhere to go on from the record before it, or put a good copy in its place"
LOG = "Cut it to {start} bytes to go on from what stands before, or put a good copy in its place"
NOT_SILENT = "Nothing was read, so that no acknowledged update is lost in silence"

Form = tuple[str, tuple[int, ...]]
"""The name of a dtype, and a shape."""

Check = Callable[[Any, int], int]
"""The CRC-32 of what was before and of some bytes more."""

Pushed = tuple[tuple[int, tuple[str, ...], tuple[str, ...]] | None, ...]
"""Of each trainer how many arrays it sent, of which tables rows, and which shared values; None: nothing."""


@dataclass(frozen=True)
class Change:
    """The changes since the last version: lines of the ledger, whole arrays, (numbers, values) of rows.

    Or the inputs of its update: with ``pushed`` the arrays are, in order, those that trainers sent.
    """

    version: int
    generation: int
    ledger: Mapping[int, tuple[int, int]]
    arrays: Mapping[str, np.ndarray]
    rows: Mapping[str, tuple[np.ndarray, np.ndarray]]
    pushed: Pushed | None = None


@dataclass(frozen=True)
class Header:
    """A change without its numbers: of every array and of the values of every rows only dtype and shape."""

    serial: int
    version: int
    generation: int
    ledger: Mapping[int, tuple[int, int]]
    arrays: Mapping[str, Form]
    rows: Mapping[str, Form]
    pushed: Pushed | None = None

    @staticmethod
    def parse(text: bytes) -> Header:
        """The header that was written so."""
        said = json.loads(text)
        ledger = {int(trainer): (pair[0], pair[1]) for trainer, pair in said["ledger"].items()}
        arrays, rows = ({n: (f[0], tuple(f[1])) for n, f in said[k].items()} for k in ("arrays", "rows"))
        sent = said.get("pushed")
        pushed = None if sent is None else tuple(s and (s[0], tuple(s[1]), tuple(s[2])) for s in sent)
        return Header(said["serial"], said["version"], said["generation"], ledger, arrays, rows, pushed)


@dataclass(frozen=True)
class Frame:
    """A frame in a file: where it starts, its buffers start and it ends; the CRC-32 up to its buffers."""

    path: Path
    start: int
    buffers: int
    end: int
    crc: int
    check: Check
    header: Header


def pack(change: Change, serial: int) -> tuple[Header, list[memoryview]]:
    """The frame of a change in pieces that share the memory of its arrays where these are contiguous."""
    arrays = {name: np.asarray(a, order="C") for name, a in change.arrays.items()}
    rows = {name: (_numbers(name, n), np.asarray(v, order="C")) for name, (n, v) in change.rows.items()}
    ledger = {int(trainer): (int(i), int(s)) for trainer, (i, s) in change.ledger.items()}
    forms = {n: _form(a) for n, a in arrays.items()}, {n: _form(v) for n, (_, v) in rows.items()}
    header = Header(serial, int(change.version), int(change.generation), ledger, *forms, change.pushed)
    text = json.dumps(vars(header)).encode()
    buffers = [bytes_of(a) for a in (*arrays.values(), *(a for pair in rows.values() for a in pair))]
    prefix = PREFIX.pack(MAGIC, len(text), sum(map(len, buffers)))
    crc, pieces = 0, list[memoryview]()
    for group in ([memoryview(prefix)], [memoryview(text)], buffers):
        for piece in group:
            crc = _check(piece, crc)
        pieces += [*group, memoryview(CRC.pack(crc))]
    return header, pieces


def frames_of(path: Path, serial: int) -> Generator[Frame, None, None]:
    """The frames of a file; what follows the last whole one was never acknowledged."""
    if not path.exists():
        return
    frame, end = None, 0
    with judged(path, 0), open(path, "rb") as file:
        while True:
            with judged(path, end):
                frame = _frame_at(file, path, end, serial)
            if frame is None:
                return
            yield frame
            end = frame.end


def _frame_at(file: BinaryIO, path: Path, start: int, serial: int) -> Frame | None:
    """The frame that starts here, its header checked; None if the file ends before it does."""
    room = os.fstat(file.fileno()).st_size - start - PREFIX.size - 3 * CRC.size
    if room < 0:
        return None
    file.seek(start)
    prefix = file.read(PREFIX.size)
    if prefix.startswith(END):
        return None
    magic, text_size, size = PREFIX.unpack(prefix)
    if magic not in (MAGIC, BEFORE):
        raise ValueError("it was not written by a Store")
    check: Check = zlib.crc32 if magic == BEFORE else _check
    crc = _expect(file, check(prefix, 0))
    if text_size + size > room:
        return None
    text = file.read(text_size)
    crc = _expect(file, check(text, crc))
    header = Header.parse(text)
    if header.serial != serial:
        raise ValueError(f"it belongs to record {header.serial}, and was renamed")
    return Frame(path, start, file.tell(), file.tell() + size + CRC.size, crc, check, header)


def load(frame: Frame) -> Change:
    """A frame with its numbers, in arrays of their own."""
    crc, header = frame.crc, frame.header
    rows = [form for values in header.rows.values() for form in (("<i8", values[1][:1]), values)]
    found = [np.empty(shape, _dtype(name)) for name, shape in (*header.arrays.values(), *rows)]
    with judged(frame.path, frame.start), open(frame.path, "rb") as file:
        file.seek(frame.buffers)
        for array in found:
            file.readinto(bytes_of(array))
            crc = frame.check(bytes_of(array), crc)
        _expect(file, crc)
    arrays = dict(zip(header.arrays, found, strict=False))
    pairs = zip(found[len(arrays) :: 2], found[len(arrays) + 1 :: 2], strict=True)
    by_table = dict(zip(header.rows, pairs, strict=True))
    return Change(header.version, header.generation, header.ledger, arrays, by_table, header.pushed)


def _check(piece: bytes | memoryview, crc: int) -> int:
    """The CRC-32 of what was before and of the sums of these bytes."""
    whole = len(piece) // BLOCK * BLOCK
    if whole:
        words = np.frombuffer(piece, "<u8", whole // 8)
        crc = zlib.crc32(np.add.reduce(words.reshape(-1, BLOCK // 8), axis=1).astype("<u8"), crc)
    return zlib.crc32(piece[whole:], crc)


def _expect(file: BinaryIO, crc: int) -> int:
    if file.read(CRC.size) != CRC.pack(crc):
        raise ValueError("its CRC-32 is not the one that was written")
    return crc


@contextmanager
def judged(path: Path, start: int) -> Iterator[None]:
    """Raise an error about a file again as a ``CheckpointError`` that says what to do about it."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise damage(path, start, error) from error


def damage(path: Path, start: int, what: object) -> CheckpointError:
    """The error for a file that is not what was written, and what to do about it."""
    advice = (LOG if path.suffix == ".log" else WHOLE).format(start=start)
    return CheckpointError(f"{path} is damaged at byte {start} or behind it: {what}. {NOT_SILENT}. {advice}.")


def _dtype(name: str) -> np.dtype[Any]:
    return np.dtype(jnp.dtype(name))


def _form(array: np.ndarray) -> Form:
    """By which name, and in which shape, an array is found again."""
    dtype = array.dtype
    if not dtype.hasobject:
        for name in (dtype.str, dtype.name):
            with suppress(TypeError):
                if _dtype(name) == dtype:
                    return name, array.shape
    raise ArgumentError(
        f"an array is {dtype}{list(array.shape)}; a record holds numbers, booleans, dates, text"
    )


def _numbers(name: str, numbers: np.ndarray) -> np.ndarray:
    """Row numbers as they are stored."""
    array = np.asarray(numbers)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise ArgumentError(
            f"the row numbers of {name!r} are {array.dtype}{list(array.shape)}; expected int64[r]"
        )
    return np.asarray(array, "<i8", order="C")
