"""The part of a step that is the same for all micro-batches, so that a stage computes it once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from onward.core.program import Op, Program, Variable
from onward.core.walk import descendants
from onward.distribute.pipeline.schedule import StageWork

Place = tuple[int, StageWork]
Work = tuple[int, str]  # a Place, or a stage and ONCE
ONCE = "once"


def with_once(
    turn: Program, groups: Mapping[Place, Sequence[Op]], handed_on: Collection[Variable]
) -> dict[Work, list[Op]]:
    """The groups with what is done once a step as groups of their own.

    That is what the forward pass makes of neither data nor what micro-batches hand on, and hands to another
    work or stage: of each micro-batch it would be kept again. What is only read where it is made stays there,
    so that it is computed within what reads it; and so does what a micro-batch gives, with what follows.
    """
    ends = {*turn.outputs}
    given = {v for op in turn.ops if not ends.isdisjoint(op.outputs) for v in op.outputs}
    varies = descendants(turn, [*turn.inputs, *handed_on, *given])
    makers = {v: place for place, ops in groups.items() for op in ops for v in op.outputs}
    handed = {v for place, ops in groups.items() for op in ops for v in op.inputs if makers.get(v) != place}
    needed = handed - varies
    found: dict[Work, list[Op]] = {}
    for (stage, work), ops in reversed([*groups.items()]):
        once = _making(ops, needed) if work is StageWork.FORWARD else set()
        found[stage, work] = [op for op in ops if op not in once]
        if once:
            found[stage, ONCE] = [op for op in ops if op in once]
    return dict(reversed([*found.items()]))


def _making(ops: Sequence[Op], needed: set[Variable]) -> set[Op]:
    """The ops that make what is needed; what these read is needed from then on."""
    found = set()
    for op in reversed(ops):
        if not needed.isdisjoint(op.outputs):
            found.add(op)
            needed.update(op.inputs)
    return found
