"""From a checkpoint to the State of a Program: by name, and whole or not at all."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from onward.core.errors import ArgumentError, CheckpointError, nearest
from onward.core.program import Program, Variable
from onward.core.source import user_level
from onward.core.structure import describe
from onward.core.words import some
from onward.execute.checkpoint.checkpoints import Checkpoints
from onward.execute.checkpoint.contents import POSITION
from onward.execute.checkpoint.loaded import Checkpoint
from onward.execute.checkpoint.manifest import MANIFEST
from onward.execute.fingerprints import differences
from onward.execute.initialize import initialized
from onward.execute.layout import Layout
from onward.execute.loop.reader import move
from onward.execute.lying import beside
from onward.execute.saved_values import SavedValues
from onward.execute.state import State, copied


@dataclass(frozen=True)
class Restored:
    """The report on restoring a checkpoint: the names of the values that were taken, and of the others.

    Attributes:
        taken: Variables that have the value of the checkpoint.
        kept: Variables that the checkpoint lacks, or holds with another type; they keep the value they had.
        left: values of the checkpoint that this Program has no Variable for.
        changed: hyperparameters that are as saved, and that the optimizer is given another value for than it
            was in the training that saved them; what that training itself changed is not among them.
        laid_out: Variables that were saved by another number of devices, and are laid out for these.
        merged: parameters that are the mean of what each device had made of them since they last met, as in
            ``LocalSGD``; here the devices have but one.
        differences: a sentence for each of network, optimizer and schedules that is another than it was.
    """

    taken: tuple[str, ...]
    kept: tuple[str, ...]
    left: tuple[str, ...]
    changed: tuple[str, ...]
    laid_out: tuple[str, ...] = ()
    merged: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"{len(self.taken)} Variables restored"]
        of_another_type = [name for name in self.kept if name in self.left]
        if missing := [name for name in self.kept if name not in of_another_type]:
            parts.append(f"not in the checkpoint, newly initialized: {some(missing, 6)}")
        if surplus := [name for name in self.left if name not in of_another_type]:
            parts.append(f"in the checkpoint, not needed here: {some(surplus, 6)}")
        if of_another_type:
            parts.append(f"of another type in the checkpoint, newly initialized: {some(of_another_type, 6)}")
        if self.laid_out:
            parts.append(f"laid out for another number of devices: {some(self.laid_out, 6)}")
        if self.merged:
            parts.append(f"the mean of what each device had made of them: {some(self.merged, 6)}")
        if self.changed:
            parts.append(
                "hyperparameters that are as saved, not as given: "
                f"{some(self.changed, 6)} (replace sets them)"
            )
        return ". ".join(["; ".join(parts), *(sentence.rstrip(".") for sentence in self.differences)])

    def warn(self, path: Any) -> None:
        """Warn where the checkpoint is not of the same Variables, or not of the same training."""
        if self.kept or self.left or self.changed or self.differences:
            warnings.warn(f"{path}: {self}.", stacklevel=user_level())

    def expect_all(self, path: Any) -> None:
        """Raise ``CheckpointError`` where it is not; hyperparameters may change."""
        if self.kept or self.left or self.differences:
            raise CheckpointError(f"{path}: {self}. {STRICT}")


def matched(state: State, needed: Sequence[Variable], found: Checkpoint) -> tuple[list[Any], Restored]:
    """The values of the State with those of the checkpoint in their places.

    Raises:
        CheckpointError: some of ``needed`` are not in it, or of another type; it lists what does not fit.
    """
    layout, variables = state.layout, state.layout.variables
    known, saved = found.arrays, SavedValues.of_checkpoint(found)
    fits = saved.all_over(layout)
    _expect_fits(needed, fits, layout, found)
    values = [
        beside(was_there, copied(fits[v.name], v.dtype)) if v.name in fits else state[v]
        for v, was_there in zip(variables, _arrays(state), strict=True)
    ]
    given = {v.name: state[v] for v in layout.hyperparameters}
    merged = [name for name in fits if saved.merged(name, layout) is not None]
    used = {*fits, *(own for p, own in saved.copies.items() if p in fits and own not in layout.position)}
    report = Restored(
        taken=tuple(fits),
        kept=tuple(v.name for v in variables if v.name not in fits),
        left=tuple(name for name in known if name not in used),
        changed=tuple(n for n, x in given.items() if n in fits and not np.array_equal(x, known[n])),
        laid_out=tuple(n for n, value in fits.items() if value is not known[n] and n not in merged),
        merged=tuple(merged),
    )
    return values, report


def say(sentences: Sequence[str], strict: bool | None) -> None:
    """Warn of each; with ``strict=True`` raise ``CheckpointError`` for the first, with False say nothing."""
    for sentence in sentences if strict is not False else ():
        if strict:
            raise CheckpointError(f"{sentence} {STRICT}")
        warnings.warn(sentence, stacklevel=user_level())


STRICT = "Nothing was changed, since restore was given strict=True; strict=None warns, False says nothing."


def loaded(source: Any, which: Any = "latest", fallback: bool = False) -> Checkpoint:
    """The checkpoint that a person names: a loaded one, one of a store or of a folder, or its own folder.

    Raises:
        ArgumentError: something else.
        CheckpointError: nothing whole is there.
    """
    if isinstance(source, Checkpoint):
        return source
    if isinstance(source, Checkpoints):
        return source.load(which, fallback=fallback)
    if not isinstance(source, str | PathLike):
        raise ArgumentError(
            f"restore was given {describe(source)}; expected a folder of checkpoints, restore('runs/one'), "
            "one of them, 'runs/one/000007-step-120', or Checkpoints('runs/one')."
        )
    path = Path(source)
    if which == "latest" and (path / MANIFEST).exists():
        return Checkpoints(path.parent).load(path, fallback=fallback)
    return Checkpoints(path).load(which, fallback=fallback)


def restored(layout: Layout, source: Any, which: Any, fallback: bool, reader: Any) -> list[Any]:
    """The values of a layout from the checkpoint that a person names, whose reader goes on from there."""
    found = loaded(source, which, fallback)
    values = complete(layout, found)
    if reader is not None:
        move(reader, found.extra.get(POSITION))
    return values


def complete(layout: Layout, found: Checkpoint) -> list[Any]:
    """The values of a layout, all of them from a checkpoint.

    Raises:
        CheckpointError: some are not in it, or of another type; it lists what does not fit.
    """
    fits = SavedValues.of_checkpoint(found).all_over(layout)
    _expect_fits(layout.variables, fits, layout, found)
    return [copied(fits[v.name], v.dtype) for v in layout.variables]


def _arrays(state: State) -> Sequence[Any]:
    """The arrays of a State, spent or not; None where several Variables share one."""
    return state.buffers if state.storage is None else [None] * len(state.layout.variables)


def _expect_fits(
    needed: Sequence[Variable], fits: Mapping[str, Any], layout: Layout, found: Checkpoint
) -> None:
    """Raise ``CheckpointError`` unless all that is needed fits, with everything that does not."""
    misfits = [layout.whole(v) for v in needed if v.name not in fits]
    if not misfits:
        return
    missing = [v for v in misfits if v.name not in found.arrays]
    surplus = [repr(name) for name in found.arrays if name not in layout.position]
    told = []
    if missing:
        told.append(f"holds no {some([f'{v.name!r} ({v.type})' for v in missing], 6)}")
    if others := [_otherwise(v, found.arrays[v.name]) for v in misfits if v not in missing]:
        told.append(f"holds {some(others, 6)}")
    if surplus:
        told.append(f"holds {some(surplus, 6)}, which the model lacks")
    near = f" {nearest(missing[0].name, found.arrays)}" if len(missing) == 1 else ""
    raise CheckpointError(f"{found.path} {'; it '.join(told)}.{near} Nothing was changed.")


def _otherwise(v: Variable, value: Any) -> str:
    return f"{v.name!r} as {value.dtype}{list(jnp.shape(value))} (the model has {v.type})"


def compared(
    report: Restored, was: Mapping[str, Any], here: Mapping[str, Any], given: Mapping[str, float]
) -> Restored:
    """The report with what the fingerprints of a checkpoint tell, if it has some."""
    if not was:
        return report
    changed = tuple(n for n in report.changed if was["given"].get(n) != given[n])
    return replace(report, changed=changed, differences=tuple(differences(was, here)))


def begun_anew(program: Program, layout: Layout, values: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """The values of a state, those of these names that are computed from others computed again."""
    given = {v: x for v, x in zip(layout.variables, values, strict=True) if v.name not in names}
    computed = {v for op in program.initializers if set(op.inputs) & set(given) for v in op.outputs}
    if computed.issubset(given):
        return list(values)
    made = initialized(program, given, 0)
    return [made[v] if v in computed else x for v, x in zip(layout.variables, values, strict=True)]
