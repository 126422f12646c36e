"""Which pass each op of a traced training step belongs to, read off what JAX has wrapped around it.

JAX marks every equation of a forward pass ``jvp(...)`` and every equation of a backward pass
``transpose(jvp(...))``. The pass of an op without a mark is told by what it reads and what reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from onward.core.jaxprs.loops import transforms_within
from onward.core.primitives.table import of
from onward.core.primitives.traits import Linear, Reduces, Runs
from onward.core.program import Op, Variable
from onward.core.words import Pass


def with_passes(ops: Sequence[Op], under: Sequence[frozenset[str]]) -> tuple[Op, ...]:
    """The ops, each with its pass; ``under`` holds the transforms around each.

    A loop, or another op that holds forward and backward equations at once, counts as backward: it makes
    the gradients, as does what only adds gradients up. What reads gradients updates; a collective that is not
    part of the forward pass is one of the collective pass. What reads none is forward if a marked op depends
    on it, or if only results do.
    """
    made_by = [_marked(op, marks) for op, marks in zip(ops, under, strict=True)]
    _collectives(ops, made_by)
    _sums(ops, under, made_by)
    _after_gradients(ops, made_by)
    _before(ops, made_by, Pass.FORWARD, (Pass.FORWARD, Pass.BACKWARD))
    _before(ops, made_by, Pass.UPDATE, (Pass.UPDATE,))
    _left_over(ops, made_by)
    return tuple(replace(op, made_by=found or Pass.FORWARD) for op, found in zip(ops, made_by, strict=True))


def is_mixed(op: Op) -> bool:
    """Whether an op computes a loss and its gradients at once, such as a loop that accumulates gradients."""
    if "transpose" not in transforms_within(op.body):
        return False
    return of(next(op.body.calls).primitive).runs not in (Runs.AGAIN, Runs.RULE)


def _marked(op: Op, marks: frozenset[str]) -> Pass | None:
    """The pass that the marks of an op tell, if any."""
    if "transpose" in marks:
        return Pass.BACKWARD
    if "jvp" in marks:
        return Pass.FORWARD
    return Pass.BACKWARD if "transpose" in transforms_within(op.body) else None


def _collectives(ops: Sequence[Op], made_by: list[Pass | None]) -> None:
    """Mark ops that only exchange numbers as collective, except in the forward pass (a shared batch norm)."""
    for i, op in enumerate(ops):
        if made_by[i] is not Pass.FORWARD and op.body.collectives and not op.subprograms:
            made_by[i] = Pass.COLLECTIVE


def _sums(ops: Sequence[Op], under: Sequence[frozenset[str]], made_by: list[Pass | None]) -> None:
    """Mark the sums of gradients backward, as of micro-batches that a person adds up by hand.

    A sum may begin with zeros, of which an op is made that reads nothing. It may also be one over what a loop
    stacks, or ``vmap`` computes side by side.
    """
    marked = zip(ops, under, strict=True)
    stacked = {v for op, marks in marked if "vmap" in marks or is_mixed(op) for v in op.outputs}
    gradients = {
        v for op, found in zip(ops, made_by, strict=True) if found is Pass.BACKWARD for v in op.outputs
    }
    zeros = {v for op in ops if not op.inputs for v in op.outputs}
    for i, op in enumerate(ops):
        summed = set(op.inputs) - zeros
        is_sum = op.primitive.reduces is Reduces.SUM and bool(op.outputs[0].shape)
        adds = _adds(op) or (is_sum and stacked.issuperset(summed))
        if made_by[i] is None and adds and summed and gradients.issuperset(summed):
            made_by[i] = Pass.BACKWARD
            gradients.update(op.outputs)


def _adds(op: Op) -> bool:
    row = op.primitive
    adds = row.linear is Linear.TOGETHER and row.is_elementwise and not row.chooses
    return adds and len(op.body.operands) > 1


def _after_gradients(ops: Sequence[Op], made_by: list[Pass | None]) -> None:
    """Mark every unmarked op that depends on a gradient as part of the update."""
    reached: set[Variable] = set()
    for i, op in enumerate(ops):
        follows = not reached.isdisjoint(op.inputs)
        if made_by[i] is None and follows:
            made_by[i] = Pass.UPDATE
        if made_by[i] is Pass.BACKWARD or follows:
            reached.update(op.outputs)


def _before(
    ops: Sequence[Op], made_by: list[Pass | None], word: Pass, readers: Collection[Pass | None]
) -> None:
    """Give the pass ``word`` to every unmarked op that an op of the passes ``readers`` depends on."""
    needed: set[Variable] = set()
    for i in reversed(range(len(ops))):
        if made_by[i] is None and not needed.isdisjoint(ops[i].outputs):
            made_by[i] = word
        if made_by[i] in readers:
            needed.update(ops[i].inputs)


def _left_over(ops: Sequence[Op], made_by: list[Pass | None]) -> None:
    """Mark ops that only results need: update if from scalars alone, such as a step counter; else forward."""
    trains = any(found in (Pass.BACKWARD, Pass.UPDATE) for found in made_by)
    wide: set[Variable] = set()
    for i, op in enumerate(ops):
        is_wide = made_by[i] is Pass.FORWARD or any(v.ndim or v in wide for v in op.inputs)
        if made_by[i] is None:
            made_by[i] = Pass.FORWARD if is_wide or not trains else Pass.UPDATE
        if is_wide:
            wide.update(op.outputs)
