"""Which checkpoint of a folder is meant: the latest, the best by a metric, or that of a path."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onward.core.errors import ArgumentError, CheckpointError
from onward.execute.checkpoint.archive import by_age, look
from onward.execute.checkpoint.loaded import CheckpointEntry


@dataclass(frozen=True)
class Selection:
    """The checkpoints of a folder as one chooses among them: by age, or by a metric where one is named."""

    folder: Path
    best: str | None
    mode: str

    def entries(self) -> tuple[CheckpointEntry, ...]:
        """The checkpoints, oldest first; those whose manifest is damaged are left out."""
        manifests = [(f.path, f.manifest) for f in look(self.folder)]
        found = [
            CheckpointEntry(path, m.sequence, m.step, m.metrics) for path, m in manifests if m is not None
        ]
        return tuple(sorted(found, key=lambda e: (e.sequence, e.step, e.path.name)))

    def ranked(self) -> list[CheckpointEntry]:
        """Those that have the metric, the best last."""
        if (best := self.best) is None:
            return []
        sign = -1 if self.mode == "min" else 1
        having = [e for e in self.entries() if not math.isnan(e.metrics.get(best, math.nan))]
        return sorted(having, key=lambda e: sign * e.metrics[best])

    def candidates(self, which: str | os.PathLike[str]) -> list[Path]:
        """List the checkpoints to try, the first choice last."""
        if which not in ("latest", "best"):
            return _up_to(by_age(look(self.folder)), Path(which))
        found = self._by_metric() if which == "best" else by_age(look(self.folder))
        if not found:
            what = f"checkpoint with a metric {self.best!r}" if which == "best" else "checkpoint"
            raise CheckpointError(EMPTY.format(folder=self.folder, what=what))
        return found

    def _by_metric(self) -> list[Path]:
        """The best last, after it those whose manifest is damaged: any of them may be better."""
        if self.best is None:
            raise ArgumentError('load("best"): no metric was named. Write Checkpoints(folder, best="loss").')
        damaged = [f.path for f in look(self.folder) if f.manifest is None]
        return [*(e.path for e in self.ranked()), *damaged]


def _up_to(found: Sequence[Path], path: Path) -> list[Path]:
    """The checkpoints up to this one; this one alone if it is not among them."""
    places = [p.resolve() for p in found]
    return [*found[: places.index(path.resolve()) + 1]] if path.resolve() in places else [path]


EMPTY = (
    "{folder} holds no {what}. Expected folders such as 000007-step-120, each with manifest.json, "
    "manifest.sha256 and the files that the manifest lists, as Checkpoints.save writes them in the "
    "background: what is being written is there after checkpoints.wait()."
)
