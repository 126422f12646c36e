"""The manifest of a checkpoint, and whether its files agree with it.

``manifest.json`` lists every file with its size and SHA-256 and every variable with its dtype, shape and
CRC-32; ``manifest.sha256`` seals the manifest. So a changed bit anywhere is found, and the variable in which
it lies can be named.
"""

from __future__ import annotations

import hashlib
import json
import math
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from onward.core.errors import CheckpointError
from onward.core.words import some
from onward.execute.checkpoint.backends import BACKENDS, Backend
from onward.execute.checkpoint.identity import UNKNOWN, Identity
from onward.execute.disk.durable import files_in
from onward.execute.disk.encoding import DTYPES, KEY, ArrayForm
from onward.execute.disk.fields import expect, natural, one_of, parse, take

MANIFEST = "manifest.json"
SEAL = "manifest.sha256"
FORMAT = 1
LARGEST = 16 * 2**20


@dataclass(frozen=True)
class FileDigest:
    """The size and the SHA-256 of one file."""

    bytes: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileDigest:
        """Read a file and describe it."""
        with open(path, "rb") as file:
            return cls(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


@dataclass(frozen=True)
class Stored:
    """How one variable is stored: what it is, its key in the files, the checksum of its bytes."""

    form: ArrayForm
    key: str
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but the numbers."""

    backend: str
    sequence: int
    step: int
    metrics: Mapping[str, float]
    extra: Mapping[str, Any]
    files: Mapping[str, FileDigest]
    variables: Mapping[str, Stored]
    identity: Identity = UNKNOWN

    def to_bytes(self) -> bytes:
        """The manifest as JSON, which has no word for NaN and infinity: they become strings."""
        variables = {
            name: {**vars(v.form), "key": v.key, "crc32": v.crc32} for name, v in self.variables.items()
        }
        described = {
            "format": FORMAT,
            "onward": version("onward"),
            "jax": jax.__version__,
            "backend": self.backend,
            "run": vars(self.identity),
            "sequence": self.sequence,
            "step": self.step,
            "metrics": {name: v if math.isfinite(v) else repr(v) for name, v in self.metrics.items()},
            "extra": self.extra,
            "files": {name: vars(file) for name, file in self.files.items()},
            "variables": variables,
        }
        return json.dumps(described, indent=1, allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """The manifest again; raises ValueError where anything is not what ``to_bytes`` writes."""
        record = parse(data)
        written = take(record, "format", int)
        if written > FORMAT:
            raise ValueError(f"it is of format {written}, this Onward reads up to {FORMAT}; update Onward")
        variables = {name: _variable(v) for name, v in take(record, "variables", dict).items()}
        expect(len({v.key for v in variables.values()}) == len(variables), "two variables share a key")
        return cls(
            one_of(take(record, "backend", str), BACKENDS),
            natural(record, "sequence"),
            natural(record, "step"),
            {name: _metric(v) for name, v in take(record, "metrics", dict).items()},
            take(record, "extra", dict),
            {
                name: FileDigest(natural(f, "bytes"), take(f, "sha256", str))
                for name, f in take(record, "files", dict).items()
            },
            variables,
            _identity(record),
        )

    def expected(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The shapes and dtypes that the backend has to read, by key."""
        forms = {v.key: v.form for v in self.variables.values()}
        return {key: jax.ShapeDtypeStruct(f.stored_shape, f.stored_dtype) for key, f in forms.items()}


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and its seal; raises ValueError if it is too large to be read again."""
    data = manifest.to_bytes()
    if len(data) > LARGEST:
        raise ValueError(
            f"the manifest would be {len(data)} bytes, the limit is {LARGEST}; save less in extra="
        )
    (folder / MANIFEST).write_bytes(data)
    (folder / SEAL).write_bytes(_digest(data))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is not the one that was written.
    """
    data, seal = _read(folder, MANIFEST), _read(folder, SEAL)
    if seal != _digest(data):
        raise CheckpointError(f"{folder / MANIFEST} is damaged: {SEAL} beside it does not agree. {NOTHING}")
    try:
        return Manifest.from_bytes(data)
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(f"{folder / MANIFEST} cannot be understood: {error}. {NOTHING}") from error


def check_files(folder: Path, manifest: Manifest, backend: Backend) -> None:
    """Raise ``CheckpointError`` unless names, then sizes, then contents are those of the manifest."""
    try:
        fault = fault_in(folder, manifest)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}. {NOTHING}") from error
    if fault is not None:
        where = f"; {_where(folder, fault.file, manifest, backend)}" if fault.file else ""
        raise CheckpointError(f"{fault.sentence}{where}. {NOTHING}")


@dataclass(frozen=True)
class Fault:
    """A fault in a checkpoint, and the damaged file if the fault lies in one."""

    sentence: str
    file: str | None = None


def fault_in(folder: Path, manifest: Manifest) -> Fault | None:
    """The first thing that is not as the manifest says; None where all is. Every byte is read.

    Raises:
        OSError: the folder cannot be read.
    """
    found = files_in(folder)
    if fault := _fault_of_names(folder, found.keys() - {MANIFEST, SEAL}, manifest.files.keys()):
        return fault
    for name, file in manifest.files.items():
        if (size := found[name].stat().st_size) != file.bytes:
            how = f"it has {size} bytes, {file.bytes} were written"
            return Fault(f"{folder / name} is damaged: {how}", name)
    for name, file in manifest.files.items():
        if FileDigest.of(found[name]) != file:
            how = "its SHA-256 is not that of what was written"
            return Fault(f"{folder / name} is damaged: {how}", name)
    return None


def _variable(record: Any) -> Stored:
    shape = take(record, "shape", list)
    expect(all(type(n) is int and 0 <= n < 2**63 for n in shape), "a shape is not a list of sizes")
    dtype = one_of(take(record, "dtype", str), [*DTYPES, KEY])
    generator = take(record, "generator", str) if dtype == KEY else None
    return Stored(
        ArrayForm(dtype, tuple(shape), generator), take(record, "key", str), natural(record, "crc32")
    )


def _metric(value: Any) -> float:
    expect(type(value) is float or value in ("nan", "inf", "-inf"), "a metric is not a number")
    return float(value)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def _read(folder: Path, name: str) -> bytes:
    path = folder / name
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > LARGEST:
            raise CheckpointError(f"{path} is not a file of at most {LARGEST} bytes. {NOTHING}")
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointError(FOREIGN.format(folder=folder, name=name)) from error
    except CheckpointError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}. {NOTHING}") from error


def _identity(record: Any) -> Identity:
    """The run, which older manifests do not name."""
    if "run" not in record:
        return UNKNOWN
    run = take(record, "run", dict)
    return Identity(take(run, "id", str), take(run, "begun", str))


def _fault_of_names(folder: Path, found: Iterable[str], expected: Iterable[str]) -> Fault | None:
    missing, spare = sorted({*expected} - {*found}), sorted({*found} - {*expected})
    if missing:
        return Fault(f"{folder} lacks {missing[0]!r}, which its {MANIFEST} lists")
    if spare:
        return Fault(f"{folder} holds {spare[0]!r}, which its {MANIFEST} does not list")
    return None


def _where(folder: Path, file: str, manifest: Manifest, backend: Backend) -> str:
    """Which variables lie in the damaged part of a file."""
    keys = set(backend.damaged(folder, file, {v.key: v.crc32 for v in manifest.variables.values()}))
    names = [repr(name) for name, v in manifest.variables.items() if v.key in keys]
    return f"damaged there: {some(names, 8)}" if names else "no variable can be told apart in it"


NOTHING = "Nothing was loaded; load(fallback=True) takes the checkpoint before it."
FOREIGN = (
    "{folder} is not a checkpoint of Onward: it has no {name}. Expected a folder that Checkpoints.save "
    "wrote, with manifest.json, manifest.sha256 and the files that the manifest lists."
)
