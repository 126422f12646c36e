"""Steps of attention number by number: how an op changes scores before softmax, and weights behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from onward.core.primitives.traits import Linear
from onward.core.program import Op, Variable
from onward.develop.attention.axes import Axes
from onward.develop.attention.operands import Operand, ScoreOperands, row_of
from onward.develop.attention.parts import Rule, ScoreChange, ScoreStep
from onward.develop.attention.truths import conjuncts, disjuncts
from onward.develop.chunk.numbered import operands_of


def score_change(own: ScoreOperands, op: Op, scores: Variable, axes: Axes) -> ScoreStep | None:
    """A step with scores and what is not computed of them; None if it does something else."""
    row, at, others = row_of(op), operands_of(op).index(scores), _others(own, op, scores, axes)
    if row.chooses:
        return _choice(own, op, at, others)
    if len(others) != 1:
        return None
    (other,) = others
    if row.adds:
        return ScoreStep(ScoreChange.ADD, op, (other,))
    if row.linear is Linear.TOGETHER and at == 0:
        return ScoreStep(ScoreChange.SUBTRACT, op, (other,))
    return _scaled(op, at, other) if other.size == 1 else None


def weighing(own: ScoreOperands, op: Op, weights: Variable, axes: Axes) -> ScoreStep | None:
    """Weights times what is not computed of them, divided by it, or 0 where a mask says so, as by dropout.

    None if it does something else.
    """
    at, others = operands_of(op).index(weights), _others(own, op, weights, axes)
    if row_of(op).chooses:
        step = _choice(own, op, at, others)
        return step if step is not None and step.fill is not None and step.fill.number == 0 else None
    return _scaled(op, at, others[0]) if len(others) == 1 else None


def log_weighing(own: ScoreOperands, op: Op, logarithms: Variable, axes: Axes) -> ScoreStep | None:
    """Logarithms of weights, minus infinity where a mask says so: the weights are 0 there; None otherwise."""
    step = score_change(own, op, logarithms, axes)
    if step is None or step.fill is None or step.fill.number != -np.inf:
        return None
    return replace(step, fill=own.number(np.zeros((), logarithms.dtype)))


def never_seen(steps: Sequence[ScoreStep]) -> frozenset[Rule]:
    """The masks by which scores are minus infinity when all steps are done."""
    found: frozenset[Rule] = frozenset()
    for step in reversed(steps):
        if step.fill is not None and step.fill.number == -np.inf:
            found |= step.rules
        elif step.change is not ScoreChange.ROUND:
            break
    return found


def _others(own: ScoreOperands, op: Op, v: Variable, axes: Axes) -> list[Operand]:
    """The operands of an op but for one."""
    values, numbers = operands_of(op), op.body.numbers
    at = values.index(v)
    return [
        own.number(numbers[i]) if x is None else own.of(x, axes if x.ndim else ())
        for i, x in enumerate(values)
        if i != at
    ]


def _scaled(op: Op, at: int, other: Operand) -> ScoreStep | None:
    """The product with another operand, or the quotient by it."""
    row = row_of(op)
    if row.multiplies and row.linear is Linear.EACH:
        return ScoreStep(ScoreChange.MULTIPLY, op, (other,))
    if row.divides and at == 0:
        return ScoreStep(ScoreChange.DIVIDE, op, (other,))
    return None


def _choice(own: ScoreOperands, op: Op, at: int, others: Sequence[Operand]) -> ScoreStep | None:
    """The choice between an operand and another, by a mask."""
    if row_of(op).linear is not Linear.TOGETHER or op.inputs[0].dtype != bool or at == 0:
        return None
    mask, fill = others
    chooses = at == 2
    if (mask, chooses) not in own.apart:  # known by what they are: the same mask has the same parts
        own.apart[mask, chooses] = conjuncts(mask) if chooses else disjuncts(mask)
    return ScoreStep(
        ScoreChange.CHOOSE if chooses else ScoreChange.DISMISS, op, own.apart[mask, chooses], fill
    )
