"""``watch`` for a Program that is cut: each trainer looks at the values that it computes itself.

The step counter, by which every k-th step is looked at, is the first server's, which tells it to trainers.

>>> import jax.numpy as jnp, onward as ow
>>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.mean(x @ w), jnp.ones(6), jnp.ones((8, 6)))
>>> cut = ow.split(ow.watch(program, gradients=True), servers=2)
>>> [op.type for op in cut.trainer.ops if op.type == "watch"], [v.name for v in cut.server_parts[0].given]
(['watch'], ['w[0:3]', 'step'])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onward.core.errors import GraphError
from onward.core.names import Names
from onward.core.program import Program, Variable
from onward.derive.watch.choice import Role, WatchEntry, variables_of
from onward.derive.watch.watch import Watch, with_looks
from onward.distribute.split.rows import Table

_UNSEEN = "split: {label!r} is watched, and {why}, or train on one machine: replicate(program, devices)."
_UPDATE = (
    "what an update adds is made on the servers, of which each has a part. Watch the parameters before it, "
    "watch(parameters=True), in steps that follow each other (every=1)"
)
_MERGED = (
    "the gradients of {trainers} trainers are merged on the servers, where no trainer sees them. Watch what "
    "each trainer computes, watch(activations=...), or take asynchronous updates"
)
_TABLE = (
    "of {name!r} a trainer has the rows alone that its batch looks up. Watch others, by name or pattern "
    "(gradients='w*' in place of True), or let it travel whole (split, rows=False)"
)
_INSIDE = (
    "neither the forward nor the backward pass of a trainer hands it out: rules and updates are the "
    "servers', micro-batches keep their activations. Leave it out"
)


def expect_seen(base: Program, watches: Sequence[Watch], tables: Sequence[Table], trainers: int) -> None:
    """Refuse by its name a watched value that no trainer has.

    Raises:
        GraphError: an update; a gradient that is merged, or of a table by rows; a value inside of a loop.
    """
    for entry in (entry for how in watches for entry in how.entries):
        if why := _unseen(base, entry, {t.parameter.name for t in tables}, trainers):
            raise GraphError(_UNSEEN.format(label=entry.label, why=why))


def _unseen(base: Program, entry: WatchEntry, tables: set[str], trainers: int) -> str:
    """Why no trainer can look at this; empty, if each can."""
    by_row = next((name for name in entry.names if name in tables), None)
    if entry.role is Role.UPDATE:
        return _UPDATE
    if entry.role is Role.GRADIENT and trainers > 1:
        return _MERGED.format(trainers=trainers)
    if by_row is not None:
        return _TABLE.format(name=by_row)
    return _INSIDE if variables_of(base, entry) is None else ""


def looked_at(
    base: Program, watches: Sequence[Watch], counter: Variable | None
) -> tuple[Program, tuple[Variable, ...]]:
    """Forward and backward pass with the ops that look, and the step counter, if there is one."""
    if not watches or counter is None:
        step = None
    else:
        step = replace(counter, name=Names(base.variables).new(counter.name))
        base = replace(base, state=(*base.state, step))
    for how in watches:
        base = with_looks(base, how, step)
    return base, () if step is None else (step,)
