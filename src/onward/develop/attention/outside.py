"""Masks that a loop, a branch or ``jax.checkpoint`` is given: what is known of them where it stands.

A model makes its mask once, and a loop over layers reads it. Within the loop it is an input like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from onward.core.jaxprs.body import body_of
from onward.core.program import Op, Program, Variable
from onward.develop.attention.axes import Axes, Lengths
from onward.develop.attention.operands import Operand, ScoreOperands
from onward.develop.attention.truths import conjuncts, disjuncts
from onward.develop.rewrite.put import RunPart, parts_of


@dataclass(frozen=True, eq=False)
class Outside:
    """The Program around one that an op of it runs.

    Attributes:
        program: it.
        makers: the ops that make its values.
        op: runs the one within.
        part: the one within.
        around: the same of the Program itself; None where nothing is around it.
    """

    program: Program
    makers: Mapping[Variable, Op]
    op: Op
    part: RunPart
    around: Outside | None = None
    _found: dict[Variable, Operand | None] = field(default_factory=dict)

    @staticmethod
    def of(
        program: Program, makers: Mapping[Variable, Op], op: Op, inner: Program, around: Outside | None
    ) -> Outside | None:
        """The Program around one that an op runs; None of one that says whether a loop goes on."""
        part = next((part for part in parts_of(op) if part.program is inner), None)
        return None if part is None else Outside(program, makers, op, part, around)

    def operand(self, v: Variable, axes: Axes, lengths: Lengths) -> Operand | None:
        """An input of the Program within, whose dimensions count along these axes, as far as it is known."""
        if v not in self._found:
            self._found[v] = self._known(v)
        found = self._found[v]
        if found is None:
            return None
        plain = Operand(axes, lengths, v)
        if not found.is_known:
            return _with(found, plain, axes, lengths)
        if not found.reads:
            return _relaid(found, axes, lengths)
        return None if found.value is None else replace(plain, known=np.broadcast_to(found.value, v.shape))

    def _known(self, v: Variable) -> Operand | None:
        """A value as it is computed outside, if it is the same in each turn."""
        at = {x: i for i, x in enumerate(self.part.program.inputs)}.get(v)
        x = None if at is None else self.part.given[at]
        results = {i: self.part.program.outputs[o] for i, o in self.part.carried}
        if at is None or x is None or results.get(at, v) is not v:
            return None
        outer = self.op.inputs[x]
        if outer.shape != v.shape or not all(isinstance(n, int) for n in v.shape):
            return None  # each turn has its own
        own = ScoreOperands(self.program, self.makers, dict(enumerate(outer.shape)), self.around)
        return own.of(outer, tuple((i,) for i in range(outer.ndim)))


def _with(found: Operand, plain: Operand, axes: Axes, lengths: Lengths) -> Operand | None:
    """A mask with what it says whatever else it depends on: both are true where it is, or one of them."""
    assert plain.variable is not None
    if plain.variable.dtype != bool:
        return None
    kind = plain.variable.aval
    for apart, joins in ((conjuncts, lambda a, b: [a & b]), (disjuncts, lambda a, b: [a | b])):
        known = [x for x in apart(found) if not x.reads and x.value is not None]
        if known:
            op = Op("mask", (plain.variable,) * 2, (plain.variable,), body_of(joins, kind, kind))
            whole = plain
            for x in known:
                whole = Operand((), lengths, op=op, parts=(_relaid(x, axes, lengths), whole))
            return whole
    return None


def _relaid(operand: Operand, axes: Axes, lengths: Lengths) -> Operand:
    """An operand that counts along the dimensions of a value, along the axes of these dimensions."""
    laid = tuple(tuple(axis for i in group for axis in axes[i]) for group in operand.axes)
    parts = tuple(_relaid(part, axes, lengths) for part in operand.parts)
    return replace(operand, axes=laid, lengths=lengths, parts=parts)
