"""From a checkpoint to the State of a Program: by name, and whole or not at all."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from onward.core.errors import CheckpointError, nearest
from onward.core.program import Variable
from onward.core.source import user_level
from onward.execute.checkpoint.checkpoints import Checkpoint
from onward.execute.state import State, copied


@dataclass(frozen=True)
class Restored:
    """What became of a checkpoint's values: names of those that were taken, and of the others.

    Attributes:
        taken: Variables that have the value of the checkpoint.
        kept: Variables that the checkpoint lacks, or holds with another type; they keep the value they had.
        left: values of the checkpoint that this Program has no Variable for.
        changed: hyperparameters whose value in the checkpoint is another than the one given to the optimizer.
    """

    taken: tuple[str, ...]
    kept: tuple[str, ...]
    left: tuple[str, ...]
    changed: tuple[str, ...]

    def __str__(self) -> str:
        parts = [f"{len(self.taken)} Variables restored"]
        if self.kept:
            parts.append(f"not in the checkpoint, begun anew: {_some(self.kept)}")
        if self.left:
            parts.append(f"in the checkpoint, not needed here: {_some(self.left)}")
        if self.changed:
            parts.append(f"hyperparameters that are as saved, not as given: {_some(self.changed)}")
        return "; ".join(parts)

    def warn(self, path: Any) -> None:
        """Warn where the checkpoint and the Program are not of the same Variables."""
        if self.kept or self.left or self.changed:
            warnings.warn(f"{path}: {self}.", stacklevel=user_level())


def matched(state: State, needed: Sequence[Variable], found: Checkpoint) -> tuple[list[Any], Restored]:
    """The values of the State with those of the checkpoint in their places.

    Raises:
        CheckpointError: a Variable of ``needed`` is not in it, or of another type.
    """
    variables = state.layout.variables
    whole = {v.name: state.layout.whole(v) for v in variables}
    fits = {name for name, v in whole.items() if _fits(v, found.arrays.get(name))}
    for v in needed:
        if v.name not in fits:
            raise CheckpointError(_misfit(whole[v.name], found))
    values = [copied(found.arrays[v.name], v.dtype) if v.name in fits else state[v] for v in variables]
    given = {v.name: state[v] for v in state.layout.hyperparameters}
    report = Restored(
        taken=tuple(v.name for v in variables if v.name in fits),
        kept=tuple(v.name for v in variables if v.name not in fits),
        left=tuple(name for name in found.arrays if name not in fits),
        changed=tuple(n for n, x in given.items() if n in fits and not np.array_equal(x, found.arrays[n])),
    )
    return values, report


def _fits(v: Variable, value: Any) -> bool:
    return value is not None and tuple(jnp.shape(value)) == v.shape and value.dtype == v.dtype


def _misfit(v: Variable, found: Checkpoint) -> str:
    value = found.arrays.get(v.name)
    if value is None:
        return f"{found.path} holds no {v.name!r} ({v.type}). {nearest(v.name, found.arrays)}"
    return f"{found.path} holds {v.name!r} as {value.dtype}{list(jnp.shape(value))}; the model has {v.type}."


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
