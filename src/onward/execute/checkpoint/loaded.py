"""A loaded checkpoint, and an entry that its manifest describes without reading the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from onward.core.errors import CheckpointError
from onward.core.words import some
from onward.execute.checkpoint.contents import HISTORY, KEY
from onward.execute.checkpoint.identity import UNKNOWN, Identity
from onward.execute.checkpoint.manifest import Manifest
from onward.execute.loop.history import History


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint: arrays by name (NumPy, or JAX arrays of random keys), and their metadata."""

    arrays: Mapping[str, Any]
    step: int
    metrics: Mapping[str, float]
    extra: Mapping[str, Any]
    path: Path
    identity: Identity = UNKNOWN
    newest: int = 0
    beside: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path, manifest: Manifest, arrays: Mapping[str, Any], newest: int) -> Checkpoint:
        """The checkpoint of this manifest; ``newest`` is the highest sequence number beside it."""
        beside = {name: arrays[name] for name in (KEY, HISTORY) if name in arrays}
        kept = {name: x for name, x in arrays.items() if name not in beside}
        about = manifest.step, manifest.metrics, manifest.extra
        return cls(kept, *about, path, manifest.identity, newest, beside)

    @property
    def key(self) -> Any:
        """The random key that was saved beside the arrays; None where none was."""
        key = self.beside.get(KEY)
        return jnp.asarray(key) if isinstance(key, np.ndarray) else key

    @property
    def history(self) -> History:
        """The numbers that were saved beside the arrays; empty where none were.

        Raises:
            CheckpointError: they are not one row for each name.
        """
        names, rows = list(self.extra.get(HISTORY, ())), self.beside.get(HISTORY, np.empty(0))
        if np.shape(rows)[:1] != (len(names),) or (names and np.ndim(rows) != 2):
            raise CheckpointError(
                f"{self.path}: its history has numbers of shape {list(np.shape(rows))} for "
                f"{some(names, 6) or 'no names'}; expected a row for each name. Save a History with "
                "checkpoints.save(state, step, history=history), or restore another checkpoint: which=path."
            )
        return History.from_dict(dict(zip(names, rows, strict=True)))


@dataclass(frozen=True)
class CheckpointEntry:
    """One checkpoint of a folder, as its manifest describes it; nothing else has been read."""

    path: Path
    sequence: int
    step: int
    metrics: Mapping[str, float]
