"""Two ways to put named arrays into a folder: one safetensors file, or Orbax.

A backend writes plain numbers under keys and reads them back, nothing more. That a checkpoint is whole and
undamaged is the business of the manifest, the same for both:

    keys      which key stands for which name; names hold any characters and never become paths
    write     arrays into files
    read      files into arrays
    damaged   which keys lie in a file, and are not what was written: for the message of an error
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeAlias

import jax
import numpy as np
from safetensors import safe_open

from onward.core.extras import require
from onward.execute.disk.tensors import METADATA, packed, spans, write

BackendName: TypeAlias = Literal["safetensors", "orbax"]


class Backend(Protocol):
    """The interface that a store of checkpoints requires of a file format."""

    name: ClassVar[BackendName]

    def keys(self, names: Iterable[str]) -> dict[str, str]:
        """Name -> key, different keys for different names."""

    def write(self, folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
        """Write plain arrays by key into a folder that is this checkpoint's own."""

    def read(self, folder: Path, expected: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, np.ndarray]:
        """The arrays by key; raises anything at all where the files do not hold what is expected."""

    def damaged(self, folder: Path, file: str, checksums: Mapping[str, int]) -> list[str]:
        """The keys whose bytes in this file are not those of the checksum, as far as that can be told."""


class SafetensorsBackend:
    """One file, ``arrays.safetensors``.

    Example:
        >>> import tempfile
        >>> backend, folder = SafetensorsBackend(), Path(tempfile.mkdtemp())
        >>> backend.write(folder, {"w": np.arange(3.0)})
        >>> backend.read(folder, {"w": jax.ShapeDtypeStruct((3,), np.float64)})
        {'w': array([0., 1., 2.])}
    """

    name: ClassVar[BackendName] = "safetensors"
    FILE: ClassVar[str] = "arrays.safetensors"

    def keys(self, names: Iterable[str]) -> dict[str, str]:
        """The names themselves; numbers if one of them cannot stand in the header."""
        names = list(names)
        if all(name != METADATA and _is_utf8(name) for name in names):
            return {name: name for name in names}
        return {name: str(i) for i, name in enumerate(names)}

    def write(self, folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
        """Write the file."""
        write(folder / self.FILE, *packed(arrays))

    def read(self, folder: Path, expected: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, np.ndarray]:
        """Read the file array by array, so that no second copy of all of them is made."""
        with safe_open(folder / self.FILE, framework="np") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, not iterable itself

    def damaged(self, folder: Path, file: str, checksums: Mapping[str, int]) -> list[str]:
        """Compare each span of bytes that the header names; none if the header cannot be read."""
        try:
            data = memoryview((folder / self.FILE).read_bytes())
            found = {key: zlib.crc32(data[start:end]) for key, start, end in spans(data)}
        except (ValueError, TypeError, LookupError, OSError, RecursionError):
            return []
        return [key for key, value in checksums.items() if key in found and found[key] != value]


class OrbaxBackend:
    """A folder that Orbax writes, uncompressed and one sub-folder per variable; an optional extra.

    Raises:
        MissingExtraError: Orbax is not installed.
    """

    name: ClassVar[BackendName] = "orbax"
    FOLDER: ClassVar[str] = "orbax"

    def __init__(self) -> None:
        self.orbax = require("orbax.checkpoint", "orbax")

    def keys(self, names: Iterable[str]) -> dict[str, str]:
        """Numbers, because Orbax makes folders of its keys."""
        return {name: f"v{i}" for i, name in enumerate(names)}

    def write(self, folder: Path, arrays: Mapping[str, np.ndarray]) -> None:
        """Write what has elements; Orbax refuses arrays that have none."""
        filled = {key: array for key, array in arrays.items() if array.size}
        if filled:
            with self._checkpointer() as checkpointer:
                checkpointer.save((folder / self.FOLDER).absolute(), filled)

    def read(self, folder: Path, expected: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, np.ndarray]:
        """Read once it is certain that the files are as large as the arrays."""
        arrays = {key: np.empty(e.shape, e.dtype) for key, e in expected.items() if 0 in e.shape}
        filled = {key: e for key, e in expected.items() if key not in arrays}
        if filled:
            self._check_arrays(folder / self.FOLDER, filled)
            restore = {key: self.orbax.RestoreArgs(restore_type=np.ndarray) for key in filled}
            with self._checkpointer() as checkpointer:
                path = (folder / self.FOLDER).absolute()
                arrays |= checkpointer.restore(path, item=dict(filled), restore_args=restore)
        return arrays

    def damaged(self, folder: Path, file: str, checksums: Mapping[str, int]) -> list[str]:
        """The variable whose sub-folder the file lies in."""
        top, _, rest = file.partition("/")
        return [key for key in checksums if top == self.FOLDER and rest.startswith(f"{key}/")]

    def _checkpointer(self) -> Any:
        return self.orbax.PyTreeCheckpointer(use_ocdbt=False, use_zarr3=False, use_compression=False)

    def _check_arrays(self, path: Path, filled: Mapping[str, jax.ShapeDtypeStruct]) -> None:
        """Raise ValueError where a variable is another, or claims more bytes than its files have."""
        for key, e in filled.items():
            found = json.loads((path / key / ".zarray").read_bytes())
            described = (found["shape"], found["dtype"], found["compressor"])
            if described != (list(e.shape), e.dtype.str, None):
                raise ValueError(f"{key} is {described}; expected {e.dtype.str} of shape {list(e.shape)}")
            present = sum(p.stat().st_size for p in (path / key).iterdir())
            if max(math.prod(e.shape), math.prod(found["chunks"])) * e.dtype.itemsize > present:
                raise ValueError(f"{key} claims more than the {present} bytes of its files")


BACKENDS: Mapping[str, type[SafetensorsBackend] | type[OrbaxBackend]] = {
    backend.name: backend for backend in (SafetensorsBackend, OrbaxBackend)
}


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True
