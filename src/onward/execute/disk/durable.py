"""Files and folders that appear whole or not at all, and vanish the same way.

Each is filled under a temporary name, forced to the disk, and renamed. A process killed half way leaves
only names that begin with ``.part-`` or ``.trash-``, which are never read; ``sweep`` removes them.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PART = re.compile(r"\.part-(\d{1,9})-[0-9a-f]+")
TRASH = re.compile(r"\.trash-[0-9a-f]+")
_writing: set[str] = set()


@contextmanager
def appearing(final: Path, part: Path | None = None, *, durable: bool = True) -> Iterator[Path]:
    """A temporary path for a file or a folder, which becomes ``final`` when the block ends.

    If the block fails, it is removed. Otherwise it is whole, and its own bytes are on the disk. That its name
    is there too, ``sync(final.parent)`` sees to, whose failure means something else: it is there, and may not
    outlive a power cut.

    Args:
        final: where it appears.
        part: the temporary path beside it; one of its own unless given.
        durable: whether its bytes should outlive a power cut.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with appearing(folder / "a") as part:
        ...     _ = part.write_text("whole")
        ...     print((folder / "a").exists())
        False
        >>> [p.name for p in folder.iterdir()]
        ['a']
    """
    part = part or final.with_name(f".part-{os.getpid()}-{secrets.token_hex(8)}")
    _writing.add(part.name)
    try:
        yield part
        if durable:
            _sync_tree(part)
        os.replace(part, final)
    finally:
        _remove(part)
        _writing.discard(part.name)


def make_folder(folder: Path) -> None:
    """Make a folder, and the ones above it, so that they outlive a power cut."""
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync(made.parent)


def discard(folder: Path) -> None:
    """Remove a folder; half removed, it does not have its name any more.

    Raises:
        OSError: it, or a part of it, cannot be removed.
    """
    trash = folder.with_name(f".trash-{secrets.token_hex(8)}")
    with suppress(FileNotFoundError):
        os.rename(folder, trash)
        shutil.rmtree(trash)


def sweep(folder: Path) -> None:
    """Remove what writers that are no more have left behind."""
    with suppress(OSError):
        for path in folder.iterdir():
            part = PART.fullmatch(path.name)
            if TRASH.fullmatch(path.name) or (part and _is_stale(path.name, int(part[1]))):
                _remove(path)


def files_in(folder: Path) -> dict[str, Path]:
    """Every file below a folder by its relative path; raises OSError at links, pipes and the like."""
    found = {}
    for path in _walk(folder):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise OSError(f"{path} is neither a file nor a folder")
        if path.is_file():
            found[path.relative_to(folder).as_posix()] = path
    return found


def sync(path: Path) -> None:
    """Force a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """Remove a file or a folder, as far as that is possible."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _sync_tree(path: Path) -> None:
    for below in _walk(path) if path.is_dir() else ():
        sync(below)
    sync(path)


def _walk(folder: Path) -> Iterator[Path]:
    """Everything below a folder, what is in it before itself; errors are raised, unlike by ``os.walk``."""
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            yield from _walk(path)
        yield path


def _is_stale(name: str, pid: int) -> bool:
    """Whether no process on this host writes to a temporary folder any more."""
    return name not in _writing if pid == os.getpid() else has_ended(pid)


def has_ended(pid: int) -> bool:
    """Whether no process of this machine has this number."""
    try:
        os.kill(pid, 0)
    except OSError as error:
        return isinstance(error, ProcessLookupError)
    return False
