"""One checkpoint on the disk: written, found again, checked from the outside in, read."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from onward.core.errors import CheckpointError
from onward.execute.checkpoint.backends import BACKENDS, Backend, OrbaxBackend, SafetensorsBackend
from onward.execute.checkpoint.identity import Identity
from onward.execute.checkpoint.manifest import (
    MANIFEST,
    NOTHING,
    SEAL,
    FileDigest,
    Manifest,
    Stored,
    check_files,
    read_manifest,
    write_manifest,
)
from onward.execute.disk.durable import appearing, files_in
from onward.execute.disk.encoding import ArrayForm, checksum, decode

MARKS = (MANIFEST, SEAL, SafetensorsBackend.FILE, OrbaxBackend.FOLDER)
NAMED = re.compile(r"(\d{6,18})-step-(\d{1,18})")


def name_of(sequence: int, step: int) -> str:
    """The name of the folder of a checkpoint.

    >>> name_of(7, 120)
    '000007-step-120'
    """
    return f"{sequence:06}-step-{step}"


@dataclass(frozen=True)
class Content:
    """The contents of a checkpoint to write: each variable's form and bits by name, and their metadata."""

    variables: Mapping[str, tuple[ArrayForm, np.ndarray]]
    sequence: int
    step: int
    metrics: Mapping[str, float]
    extra: Mapping[str, Any]
    identity: Identity


@dataclass(frozen=True)
class FoundFolder:
    """A folder that looks like a checkpoint: its manifest, None if damaged, and when the folder changed."""

    path: Path
    manifest: Manifest | None
    time: int

    @property
    def place(self) -> tuple[int, int] | None:
        """Its sequence number and its step, of a damaged manifest as its name says; None if unknown."""
        if self.manifest is not None:
            return self.manifest.sequence, self.manifest.step
        named = NAMED.fullmatch(self.path.name)
        return None if named is None else (int(named[1]), int(named[2]))


def write(path: Path, content: Content, backend: Backend) -> None:
    """Write a checkpoint that appears under this path whole, or not at all."""
    keys = backend.keys(content.variables)
    variables = {
        name: Stored(form, keys[name], checksum(stored)) for name, (form, stored) in content.variables.items()
    }
    about = (content.sequence, content.step, content.metrics, content.extra)
    with appearing(path) as part:
        part.mkdir()
        backend.write(part, {keys[name]: stored for name, (_, stored) in content.variables.items()})
        files = {name: FileDigest.of(file) for name, file in files_in(part).items()}
        write_manifest(part, Manifest(backend.name, *about, files, variables, content.identity))


def read(path: Path) -> tuple[Manifest, dict[str, Any]]:
    """The manifest of a checkpoint and its arrays.

    Raises:
        CheckpointError: anything at all is not as it was written.
    """
    manifest = read_manifest(path)
    backend: Backend = BACKENDS[manifest.backend]()
    check_files(path, manifest, backend)
    try:
        expected = manifest.expected()
        found = backend.read(path, expected)
        if found.keys() != expected.keys():
            raise ValueError(f"its files hold {len(found)} variables, the manifest lists {len(expected)}")
        return manifest, {name: _restore(name, v, found[v.key]) for name, v in manifest.variables.items()}
    except Exception as error:
        raise CheckpointError(f"{path} does not hold what its {MANIFEST} says: {error}. {NOTHING}") from error


def look(folder: Path) -> list[FoundFolder]:
    """Every checkpoint in a folder, in no order; only manifests are read.

    Raises:
        CheckpointError: the folder cannot be read; one that is missing is only empty.
    """
    try:
        times = {p: _time_of_checkpoint(p) for p in folder.iterdir() if not p.name.startswith(".")}
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}.") from error
    return [
        FoundFolder(path, _manifest_or_none(path), time) for path, time in times.items() if time is not None
    ]


def by_age(found: Sequence[FoundFolder]) -> list[Path]:
    """Oldest first; where neither manifest nor name tells the age, the time of the folder's change does."""
    placed = [(f.place, f.path.name, f) for f in found if f.place is not None]
    ordered = [f for *_, f in sorted(placed, key=lambda p: p[:2])]
    for damaged in (f for f in found if f.place is None):
        place = max((i + 1 for i, f in enumerate(ordered) if f.time <= damaged.time), default=0)
        ordered.insert(place, damaged)
    return [f.path for f in ordered]


def newest_first(found: Iterable[FoundFolder]) -> list[FoundFolder]:
    """The newest first; folders of unknown age come last."""
    return sorted(found, key=lambda f: (f.place or (-1, -1), f.path.name), reverse=True)


def last_sequence(found: Sequence[FoundFolder]) -> int:
    """The highest sequence number that was given; 0 if none was."""
    return max((f.place[0] for f in found if f.place is not None), default=0)


def _restore(name: str, v: Stored, found: np.ndarray) -> Any:
    if (found.dtype, found.shape) != (v.form.stored_dtype, v.form.stored_shape):
        raise ValueError(f"{name!r} is stored as {found.dtype}{list(found.shape)}; expected {v.form}")
    if checksum(found) != v.crc32:
        raise ValueError(f"the bytes of {name!r} are not those that were saved")
    return decode(v.form, found)


def _time_of_checkpoint(path: Path) -> int | None:
    """When a folder changed; None if it is not a checkpoint, or has just been removed by a writer.

    A folder with the name of a checkpoint was one, even if it is empty by now.
    """
    try:
        marked = not {entry.name for entry in path.iterdir()}.isdisjoint(MARKS) or NAMED.fullmatch(path.name)
        return path.stat().st_mtime_ns if marked else None
    except (FileNotFoundError, NotADirectoryError):
        return None


def _manifest_or_none(path: Path) -> Manifest | None:
    try:
        return read_manifest(path)
    except CheckpointError:
        return None
