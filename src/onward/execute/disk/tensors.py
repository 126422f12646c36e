"""The safetensors format: a head in JSON, then the bytes of plain arrays. Any safetensors reader opens it.

Checkpoints and model files are written here, piece by piece, so that no second copy of the arrays is made.
What is read is judged by the library: it may come from a stranger.

>>> head, pieces = packed({"w": np.arange(3.0)}, {"about": "three"})
>>> data = b"".join([head, *pieces])
>>> dict(unpacked(data)), head_of(data) == head
({'w': array([0., 1., 2.])}, True)
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from onward.execute.disk.fields import parse

CODES = {"bool": "BOOL"} | {
    f"{kind}{bits}": f"{kind[0].upper()}{bits}"
    for kind, sizes in {"int": (8, 16, 32, 64), "uint": (8, 16, 32, 64), "float": (16, 32, 64)}.items()
    for bits in sizes
}
METADATA = "__metadata__"
"""The key in the head under which no array may stand."""
_NAMES = {code: name for name, code in CODES.items()}
_LENGTH = struct.Struct("<Q")
_LARGEST_HEAD = 64 * 2**20


def packed(
    arrays: Mapping[str, np.ndarray],
    metadata: Mapping[str, str] | None = None,
    codes: Mapping[str, str] = CODES,
) -> tuple[bytes, list[memoryview]]:
    """The head of a file, and the bytes behind it, which are the memory of the arrays."""
    ordered = dict(sorted(arrays.items(), key=lambda item: (-item[1].itemsize, item[0])))
    entries: dict[str, Any] = {} if metadata is None else {METADATA: metadata}
    start = 0
    for key, array in ordered.items():
        place = [start, start := start + array.nbytes]
        entries[key] = {"dtype": codes[array.dtype.name], "shape": list(array.shape), "data_offsets": place}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the arrays behind it are aligned
    return _LENGTH.pack(len(text)) + text, [bytes_of(array) for array in ordered.values()]


def write(path: Path, head: bytes, pieces: Iterable[memoryview]) -> None:
    """Write a file that is not there yet."""
    with open(path, "xb") as file:
        file.write(head)
        file.writelines(pieces)


def bytes_of(array: np.ndarray) -> memoryview:
    """The memory of an array that is contiguous."""
    return array.reshape(-1).view(np.uint8).data


def head_of(data: bytes | memoryview) -> bytes:
    """The head of a file, as long as its first 8 bytes say; raises ValueError if that is not possible."""
    if len(data) < _LENGTH.size:
        raise ValueError(f"it has {len(data)} bytes, too few for any")
    (length,) = _LENGTH.unpack(data[: _LENGTH.size])
    if length > min(_LARGEST_HEAD, len(data) - _LENGTH.size):
        raise ValueError(f"it would begin with a header of {length} bytes, and has {len(data)} in all")
    return bytes(data[: _LENGTH.size + length])


def entries_of(head: bytes) -> Any:
    """The JSON of a head."""
    return parse(head[_LENGTH.size :])


def spans(data: memoryview) -> Iterator[tuple[str, int, int]]:
    """Where the head says that each key lies in the file."""
    head = head_of(data)
    for key, entry in entries_of(head).items():
        if key != METADATA:
            start, end = entry["data_offsets"]
            yield key, len(head) + start, len(head) + end


def unpacked(data: bytes) -> Iterator[tuple[str, np.ndarray]]:
    """The arrays by key; raises ``safetensors.SafetensorError`` where the head says what cannot be."""
    deserialize: Any = safetensors.deserialize
    for key, found in deserialize(data):
        yield key, np.frombuffer(found["data"], _NAMES[found["dtype"]]).reshape(found["shape"])
