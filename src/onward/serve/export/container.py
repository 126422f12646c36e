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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors

from onward.core.errors import ModelFileError, OnwardError
from onward.core.words import some
from onward.execute.disk import tensors
from onward.execute.disk.durable import appearing, make_folder, sync
from onward.execute.disk.fields import parse
from onward.execute.disk.tensors import METADATA, entries_of, head_of, packed, unpacked

_SEAL = "sha256"
_ABOUT = "onward"
_SECTIONS = "sections"  # the SHA-256 of each array that is not a parameter; older files have none
OURS = "onward:"
"""How the names of arrays begin that are not parameters."""
_UNSEALED = "0" * 64
_OURS_SAYS = frozenset((_SEAL, _ABOUT, _SECTIONS))
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
    head, pieces = packed(arrays, metadata)
    seal = _digest(head, pieces)
    try:
        make_folder(path.parent)
        with appearing(path) as part:
            tensors.write(part, _resealed(head, _UNSEALED, seal), pieces)
        sync(path.parent)
    except OSError as error:
        raise ModelFileError(f"{path} cannot be written: {error}.") from error
    return seal


def read(path: Path) -> Contents:
    """Read the contents of a file, every bit as it was written.

    Raises:
        ModelFileError: there is no such file, or anything at all is not as it was written.
    """
    data = _bytes(path)
    _expect_ours(path, data)
    try:
        head = head_of(data)
        seal, about, digests = _said(head)
        rest = memoryview(data)[len(head) :]
        if _digest(_resealed(head, seal, _UNSEALED), [rest]) != seal:
            raise ValueError("its SHA-256 is not that of what was written: it is damaged, or cut off")
        arrays = dict(unpacked(data))
        if digests is not None:
            _expect(digests, arrays)
        return Contents(about, arrays, seal)
    except (*_UNREADABLE, safetensors.SafetensorError) as error:
        raise ModelFileError(f"{path} is not a whole model file: {short(error)}. {EXPECTED}") from error


def _expect_ours(path: Path, data: bytes) -> None:
    """Raise ``ModelFileError`` for a healthy safetensors file that others wrote; ``read`` tells of damage."""
    try:
        said = entries_of(head_of(data)).get(METADATA, {})
        with safetensors.safe_open(path, "np") as opened:
            names = list(opened.keys())
    except (*_UNREADABLE, AttributeError, OSError, safetensors.SafetensorError):
        return
    if _OURS_SAYS.isdisjoint(said) and not any(name.startswith(OURS) for name in names):
        raise ModelFileError(
            f"{path} is a safetensors file of other contents: {some(names, 3) or 'nothing'}, and no "
            "network. onward.load_safetensors(path, like=parameters) reads them, for a network in code. "
            f"{EXPECTED}"
        )


def _digest(head: bytes, rest: Iterable[memoryview]) -> str:
    """The SHA-256 of a file, taken while the place of it holds zeros."""
    digest = hashlib.sha256(head)
    for piece in rest:
        digest.update(piece)
    return digest.hexdigest()


def _resealed(head: bytes, seal: str, by: str) -> bytes:
    """A head with another seal in the place of this one."""
    found, other = (f'"{_SEAL}":"{digits}"'.encode() for digits in (seal, by))
    if head.count(found) != 1:
        raise ValueError("its header does not hold one seal")
    return head.replace(found, other)


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
    return "is not a file" if path.exists() else "does not exist"


def _digests(arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    ours = (name for name in arrays if name.startswith(OURS))
    return {name: hashlib.sha256(np.ascontiguousarray(arrays[name])).hexdigest() for name in ours}


def _expect(digests: Mapping[str, str], arrays: Mapping[str, np.ndarray]) -> None:
    """Raise ``ValueError`` unless the arrays that are not parameters are as they were written."""
    found = _digests(arrays)
    for name in sorted(found.keys() | digests.keys()):
        if found.get(name) != digests.get(name):
            raise ValueError(f"its section {name[:60]!r} is not as it was written, whatever the seal says")


def _said(head: bytes) -> tuple[str, dict[str, Any], dict[str, str] | None]:
    """The seal, what is said about the file, and the SHA-256 of its sections if it names them."""
    metadata = entries_of(head)[METADATA]
    seal, about = metadata[_SEAL], parse(metadata[_ABOUT])
    digests = parse(metadata[_SECTIONS]) if _SECTIONS in metadata else None
    is_ours = isinstance(about, dict) and (digests is None or isinstance(digests, dict))
    if not is_ours or not isinstance(seal, str) or len(seal) != 64:
        raise ValueError("its header is not one that Onward writes")
    return seal, about, digests


def short(error: BaseException) -> str:
    """The text of an error on one line; with its type, where the text alone tells nothing."""
    said = " ".join(str(error).split())[:200]
    return said if isinstance(error, ValueError | OnwardError) else f"{type(error).__name__}: {said}"
