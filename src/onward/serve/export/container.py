"""The file itself: a safetensors file, sealed by the SHA-256 of every byte of it.

Whatever opens safetensors reads the parameters. What else a model is, the graph and the executables, are
arrays of bytes in the same file; what is said about it stands in the header, as JSON. Nothing in it is code
of Python, and no name in it is a path.

Those arrays of bytes have a SHA-256 each in the header as well: JAX reads an executable with a flipped bit as
another one, crashes, or never comes back. So a file that was changed and sealed again is refused before that.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import safetensors
from safetensors.numpy import save_file

from onward.core.errors import ModelFileError
from onward.execute.checkpoint.durable import make_folder, sync

_SEAL = "sha256"
_ABOUT = "onward"
_SECTIONS = "sections"  # the SHA-256 of each array that is no parameter; older files have none
OURS = "onward:"
"""How the names of arrays begin that are no parameters."""
_UNSEALED = "0" * 64
_LARGEST_HEADER = 64 * 2**20
_DTYPES = {
    "BOOL": np.bool_,
    "I8": np.int8,
    "I16": np.int16,
    "I32": np.int32,
    "I64": np.int64,
    "U8": np.uint8,
    "U16": np.uint16,
    "U32": np.uint32,
    "U64": np.uint64,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
}
_UNREADABLE = (ValueError, TypeError, LookupError, RecursionError, MemoryError)
EXPECTED = "Expected a file that onward.save wrote. Nothing was loaded."


@dataclass(frozen=True)
class Contents:
    """The contents of a file: its description, its arrays by name, and the seal of them all."""

    about: Mapping[str, Any]
    arrays: Mapping[str, np.ndarray]
    sha256: str


def write(path: Path, about: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> str:
    """Write a file that appears under its path whole, or not at all; returns its SHA-256.

    Raises:
        ModelFileError: the disk refuses.
    """
    path = path.resolve()  # of a link, the file that it leads to
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "no file but a device or a pipe"
        raise ModelFileError(f"{path} is {what}; expected the name of a file, such as trained.model.")
    metadata = {_ABOUT: json.dumps(about, allow_nan=False), _SEAL: _UNSEALED}
    metadata[_SECTIONS] = json.dumps(_digests(arrays))
    try:
        make_folder(path.parent)
        with _appearing(path) as part:
            part.touch()
            mode = part.stat().st_mode  # who may read it, as with any new file
            save_file(dict(arrays), part, metadata)
            part.chmod(mode)
            return _seal(part)
    except (OSError, safetensors.SafetensorError) as error:
        raise ModelFileError(f"{path} cannot be written: {error}.") from error


def read(path: Path) -> Contents:
    """Read the contents of a file, every bit as it was written.

    Raises:
        ModelFileError: there is no such file, or anything at all is not as it was written.
    """
    data = _bytes(path)
    try:
        header = _header(data)
        seal, about, digests = _said(header)
        if _digest(data, header, seal) != seal:
            raise ValueError("its SHA-256 is not that of what was written: it is damaged, or cut off")
        arrays = dict(_arrays(data))
        if digests is not None:
            _expect(digests, arrays)
        return Contents(about, arrays, seal)
    except (*_UNREADABLE, safetensors.SafetensorError) as error:
        raise ModelFileError(f"{path} is no whole model file: {_short(error)}. {EXPECTED}") from error


@contextmanager
def _appearing(path: Path) -> Iterator[Path]:
    part = path.with_name(f".part-{os.getpid()}-{secrets.token_hex(8)}")
    try:
        yield part
        sync(part)
        os.replace(part, path)
        sync(path.parent)
    finally:
        part.unlink(missing_ok=True)


def _seal(path: Path) -> str:
    """Put the SHA-256 of a file, taken while the place of it holds zeros, into that place."""
    with open(path, "r+b") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.seek(8)
        header = file.read(struct.unpack("<Q", _first(file, 8))[0])
        file.seek(8 + _place_of(header, _UNSEALED))
        file.write(digest.encode())
    return digest


def _first(file: Any, count: int) -> bytes:
    file.seek(0)
    found: bytes = file.read(count)
    return found


def _place_of(header: bytes, seal: str) -> int:
    """Where in the header the digits of the seal begin."""
    found = f'"{_SEAL}":"{seal}"'.encode()
    if header.count(found) != 1:
        raise ValueError("its header does not hold one seal")
    return header.index(found) + len(found) - 65


def _digest(data: bytes, header: bytes, seal: str) -> str:
    """The SHA-256 of a file where zeros stand in place of its seal."""
    place = 8 + _place_of(header, seal)
    view = memoryview(data)
    digest = hashlib.sha256(view[:place])
    digest.update(_UNSEALED.encode())
    digest.update(view[place + 64 :])
    return digest.hexdigest()


def _bytes(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise ModelFileError(f"{path} {_no_file(path)}. {EXPECTED}")
        return path.read_bytes()
    except ModelFileError:
        raise
    except (OSError, MemoryError, ValueError) as error:
        raise ModelFileError(f"{str(path)!r} cannot be read: {error}. {EXPECTED}") from error


def _no_file(path: Path) -> str:
    if path.is_dir():
        return "is a folder; what Model.save or a Trainer wrote, a checkpoint, is for model.restore(folder)"
    return "is no file" if path.exists() else "does not exist"


def _header(data: bytes) -> bytes:
    """The JSON at the beginning; as long as the first 8 bytes say, if that is possible."""
    if len(data) < 8:
        raise ValueError(f"it has {len(data)} bytes, too few for any")
    (length,) = struct.unpack("<Q", data[:8])
    if length > min(_LARGEST_HEADER, len(data) - 8):
        raise ValueError(f"it would begin with a header of {length} bytes, and has {len(data)} in all")
    return data[8 : 8 + length]


def _digests(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    ours = (name for name in arrays if name.startswith(OURS))
    return {name: hashlib.sha256(np.ascontiguousarray(arrays[name])).hexdigest() for name in ours}


def _expect(digests: Mapping[str, str], arrays: Mapping[str, np.ndarray]) -> None:
    """Raise ``ValueError`` unless the arrays that are no parameters are as they were written."""
    found = _digests(arrays)
    for name in sorted(found.keys() | digests.keys()):
        if found.get(name) != digests.get(name):
            raise ValueError(f"its section {name[:60]!r} is not as it was written, whatever the seal says")


def _said(header: bytes) -> tuple[str, dict[str, Any], dict[str, str] | None]:
    """The seal, what is said about the file, and the SHA-256 of its sections if it names them."""
    metadata = json.loads(header, object_pairs_hook=_once)["__metadata__"]
    seal, about = metadata[_SEAL], json.loads(metadata[_ABOUT], parse_constant=_refuse)
    digests = json.loads(metadata[_SECTIONS]) if _SECTIONS in metadata else None
    is_ours = isinstance(about, dict) and (digests is None or isinstance(digests, dict))
    if not is_ours or not isinstance(seal, str) or len(seal) != 64:
        raise ValueError("its header is not one that Onward writes")
    return seal, about, digests


def _arrays(data: bytes) -> Iterator[tuple[str, np.ndarray]]:
    deserialize: Any = safetensors.deserialize
    for name, found in deserialize(data):
        dtype = np.dtype(_DTYPES[found["dtype"]])
        yield name, np.frombuffer(found["data"], dtype).reshape(found["shape"])


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("its header holds the same name twice")
    return found


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")


def _short(error: BaseException) -> str:
    said = " ".join(str(error).split())[:200]
    return said if isinstance(error, ValueError) else f"{type(error).__name__} {said}".strip()
