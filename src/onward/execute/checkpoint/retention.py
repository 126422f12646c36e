"""Which checkpoints of a run stay: the newest that are whole, and the best that is whole."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from onward.execute.checkpoint.archive import FoundFolder
from onward.execute.checkpoint.manifest import MANIFEST, SEAL, Manifest, fault_in
from onward.execute.disk.durable import files_in

Print = tuple[tuple[str, int, int, int, int], ...]
_SETTLED = 100_000_000  # nanoseconds: within a tick of the clock a file may change and keep its time


class Inspection:
    """Whether checkpoints are what was written. One that was found whole is read again only when touched.

    Args:
        say: is told what is wrong, once for each checkpoint.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._whole: dict[Path, Print] = {}
        self._damaged: set[Path] = set()

    def is_whole(self, path: Path, manifest: Manifest) -> bool:
        """Whether every byte is as the manifest says."""
        try:
            before = _print(path)
            if self._whole.get(path) == before:
                return True
            fault = fault_in(path, manifest)
            sentence = None if fault is None else fault.sentence
        except OSError as error:
            sentence = f"{path} cannot be read: {error}"
        if sentence is None:
            if all(changed < time.time_ns() - _SETTLED for *_, changed, _ in before):
                self._whole[path] = before
            return True
        if path not in self._damaged:
            self._damaged.add(path)
            self._say(f"{sentence}. It does not count towards what is kept: an older one stays in its place.")
        return False

    def keep_only(self, paths: set[Path]) -> None:
        """Forget all others."""
        self._whole = {path: seen for path, seen in self._whole.items() if path in paths}


def superfluous(
    newest: Sequence[FoundFolder],
    best: Sequence[FoundFolder],
    keep: int,
    is_whole: Callable[[FoundFolder], bool],
) -> list[FoundFolder]:
    """List a run's checkpoints not needed beside the ``keep`` newest whole ones and the best whole one.

    Args:
        newest: all, the newest first.
        best: those that have the metric, the best first.
        keep: how many whole ones have to stay.
        is_whole: whether one is what was written.
    """
    whole = 0
    for place, found in enumerate(newest):
        whole += is_whole(found)
        if whole == keep:
            chosen = next((f for f in best if is_whole(f)), None)
            return [f for f in newest[place + 1 :] if f is not chosen]
    return []


def _print(path: Path) -> Print:
    """The name, size, times and inode of each data file, to detect changes; the manifest is always read."""
    stats = (
        (name, file.stat()) for name, file in sorted(files_in(path).items()) if name not in (MANIFEST, SEAL)
    )
    return tuple((name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for name, s in stats)
