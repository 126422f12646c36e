"""State that a micro-batch hands on to the next one: of data it is nothing that stages can wait for."""

from __future__ import annotations

from collections.abc import Collection

from onward.core.errors import GraphError
from onward.core.marks import REMEMBER
from onward.core.program import Op, Program, Variable
from onward.core.walk import ancestors, descendants
from onward.develop.accumulation.loop import LoopPlan

_ALONE = "accumulate(program, micro_batches) on one device"


def expect_handed_on(program: Program, loop: LoopPlan) -> None:
    """Raise ``GraphError`` where what a micro-batch hands on to the next one waits for its data."""
    turn = loop.turn
    waits: Collection[Variable] = {*turn.inputs, *turn.parameters}
    for old, new, _ in loop.threaded:
        made = ancestors(turn, [new])
        if not made.isdisjoint(waits):
            what, instead = _told(turn, old, new, made)
            raise GraphError(
                f"pipeline: {program.name!r} hands {old.name!r} on from one micro-batch to the next, and "
                f"makes it of their data{what}. The stages of a pipeline work on several at once. {instead}."
            )


def _told(turn: Program, old: Variable, new: Variable, made: Collection[Variable]) -> tuple[str, str]:
    """Where state of this kind comes from, and what to write instead."""
    maker: Op | None = next((op for op in turn.ops if new in op.outputs), None)
    if maker is not None and maker.type is REMEMBER:
        return (
            ", for the scales of float8 are delayed",
            'Take scales of the tensors at hand: mixed_precision(program, "float8", scaling="current")',
        )
    if _is_batch_norm(turn, old, made):
        return (
            ", as batch norm does with its statistics",
            f"Take what normalizes each example by itself (layer_norm, group_norm), or {_ALONE}",
        )
    return "", f"Leave out that state, or take {_ALONE}"


def _is_batch_norm(turn: Program, old: Variable, made: Collection[Variable]) -> bool:
    """Whether the examples are normalized by the very statistics that state follows, and not by the state."""
    if turn.loss is None or not old.ndim or not old.is_float:
        return False
    read, of_examples = ancestors(turn, [turn.loss]), descendants(turn, turn.inputs)
    shared = read.intersection(made, of_examples)
    return old not in read and any(
        v.size == old.size and any(larger.size > v.size for larger in of_examples.intersection(op.inputs))
        for op in turn.ops
        for v in shared.intersection(op.outputs)
    )
