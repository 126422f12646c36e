"""The parts of attention: what a value is in it, how scores are changed, and a whole that was found."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TypeAlias

from onward.core.program import Op, Variable
from onward.develop.attention.axes import Axes, AxisCut
from onward.develop.attention.operands import Operand


class AttentionPart(Enum):
    """The part of a value in attention."""

    SCORES = auto()
    SHARED = auto()  # by all keys, such as the largest score
    EXPONENTIALS = auto()
    SUM = auto()  # of the exponentials
    INVERSE = auto()  # of that sum
    LOG_SUM = auto()
    LOG_WEIGHTS = auto()
    WEIGHTS = auto()
    UNWEIGHED = auto()  # the product of exponentials and values
    MEAN = auto()  # that of weights and values: the result


OF_TWO = {
    (frozenset((AttentionPart.EXPONENTIALS, AttentionPart.SUM)), "divides"): AttentionPart.WEIGHTS,
    (frozenset((AttentionPart.EXPONENTIALS, AttentionPart.INVERSE)), "multiplies"): AttentionPart.WEIGHTS,
    (frozenset((AttentionPart.UNWEIGHED, AttentionPart.SUM)), "divides"): AttentionPart.MEAN,
    (frozenset((AttentionPart.UNWEIGHED, AttentionPart.INVERSE)), "multiplies"): AttentionPart.MEAN,
}
"""The part of the quotient or product of two."""


class ScoreChange(Enum):
    """A step from the product to the numbers whose softmax is taken."""

    ADD = auto()
    SUBTRACT = auto()
    MULTIPLY = auto()
    DIVIDE = auto()
    CHOOSE = auto()  # the score where a mask is true, and a number where it is not
    DISMISS = auto()  # the score where it is not true
    ROUND = auto()  # to another dtype


Rule: TypeAlias = tuple[Operand, bool]
"""A mask, and whether it rules out where it is true."""


@dataclass(frozen=True, eq=False)
class ScoreStep:
    """A change of scores.

    Attributes:
        change: which.
        op: makes it.
        by: its operand; of a choice the masks: all have to be true for the score, or none.
        fill: what stands where they are not.
    """

    change: ScoreChange
    op: Op
    by: tuple[Operand, ...] = ()
    fill: Operand | None = None

    @property
    def told(self) -> tuple[Operand, ...]:
        """The operands but for those that follow from others."""
        return tuple(operand for operand in self.by if not operand.is_implied)

    @property
    def reads(self) -> tuple[Variable, ...]:
        """The values that it reads beside the scores."""
        operands = (*self.by, *(() if self.fill is None else (self.fill,)))
        return tuple(v for operand in operands for v in operand.reads)

    @property
    def rules(self) -> frozenset[Rule]:
        """The masks of a choice, and of each whether it rules out where it is true."""
        is_choice = self.fill is not None
        return frozenset((by, self.change is ScoreChange.DISMISS) for by in self.by if is_choice)


@dataclass(frozen=True, eq=False)
class Attention:
    """Attention as a region of a Program.

    Attributes:
        ops: those of it, in order, the first product first.
        query: the factor of the scores that does not count along the keys.
        key: the other one.
        value: what is averaged.
        result: what is computed.
        query_axes: along which the dimensions of the query count, and so on; the axes of the scores come
            first, then that of the features of the value, then that of those of query and key.
        lengths: of all axes.
        own: how many axes the scores have; a dimension of them that is cut later has several.
        source: the axis of the keys.
        steps: from the product of query and key to the numbers whose softmax is the weights.
        means: the op that multiplies weights and values.
        weights: what it reads beside the values, perhaps without having been divided by the sum.
        weighings: how the weights are changed behind softmax, such as by dropout: multiplied or divided by
            what is not computed of them, or 0 where a mask says so.
        undivided: how many of these come before the division by the sum.
    """

    ops: tuple[Op, ...]
    query: Variable
    key: Variable
    value: Variable
    result: Variable
    query_axes: Axes
    key_axes: Axes
    value_axes: Axes
    result_axes: Axes
    lengths: dict[int, int]
    own: int
    source: int
    steps: tuple[ScoreStep, ...]
    means: Op
    weights: Variable
    weighings: tuple[ScoreStep, ...] = ()
    undivided: int = 0

    @property
    def scores(self) -> Op:
        """The op that multiplies queries and keys."""
        return self.ops[0]

    @property
    def inputs(self) -> tuple[Variable, ...]:
        """All that it reads: query, key and value first."""
        others = (v for step in (*self.steps, *self.weighings) for v in step.reads)
        return tuple(dict.fromkeys((self.query, self.key, self.value, *others)))


class NoPartError(Exception):
    """An op that plays no part in attention, and why."""

    def __init__(self, op: Op, why: str) -> None:
        super().__init__(why)
        self.op, self.why = op, why


class AxisCutError(NoPartError):
    """An op that cuts an axis of the scores in two."""

    def __init__(self, op: Op, cut: AxisCut) -> None:
        super().__init__(op, "cuts an axis in a way that is not followed")
        self.cut = cut
