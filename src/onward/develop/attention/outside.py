"""Masks that a loop, a branch or ``jax.checkpoint`` is given: what is known of them where it stands.

A model makes its mask once, and a loop over layers reads it. Within the loop it is an input like any other.
Of masks that are stacked, one for each turn, that is known which holds in all turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import Any, TypeAlias

import numpy as np

from onward.core.primitives.traits import Moves
from onward.core.program import Op, Program, Variable
from onward.develop.attention.axes import Axes, Lengths, own_axes
from onward.develop.attention.layout import is_low
from onward.develop.attention.operands import Operand, ScoreOperands, bound
from onward.develop.attention.truths import addends, conjuncts, disjuncts
from onward.develop.chunk.numbered import operands_of
from onward.develop.rewrite.put import RunPart, parts_of

_Apart: TypeAlias = Callable[[Operand], tuple[Operand, ...]]


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
        return None if found is None else _relaid(found, axes, lengths)

    def _known(self, v: Variable) -> Operand | None:
        """An input as far as it is known in each turn; its dimensions are the axes."""
        at = {x: i for i, x in enumerate(self.part.program.inputs)}.get(v)
        x = None if at is None else self.part.given[at]
        results = {i: self.part.program.outputs[o] for i, o in self.part.carried}
        if at is None or x is None or results.get(at, v) is not v:
            return None
        outer = self.op.inputs[x]
        if not all(isinstance(n, int) and n for n in outer.shape):
            return None
        found = [self._outer(piece, v) for piece in self._pieces(outer, v)]
        if len(found) == 1 and found[0].is_known and not found[0].reads and v.ndim not in found[0].counts:
            return found[0]
        return _in_each(Operand(own_axes(v.shape), dict(enumerate(v.shape)), v), found)

    def _pieces(self, outer: Variable, v: Variable) -> Sequence[Variable]:
        """The arrays that are joined to one of which each turn is given a part; else the one that it is."""
        op = self.makers.get(outer)
        if op is None or outer.ndim == v.ndim or op.primitive.moves is not Moves.JOINS:
            return (outer,)
        params = next(op.body.calls).params
        pieces = [x for x in operands_of(op) if x is not None]
        is_first = params.get("dimension", params.get("axis")) == 0 and len(pieces) == len(op.body.operands)
        return pieces if is_first else (outer,)

    def _outer(self, given: Variable, v: Variable) -> Operand:
        """An array that turns are given: its axes are the dimensions of an input, then that of the turns."""
        turns = given.shape[: given.ndim - v.ndim]
        own = ScoreOperands(
            self.program, self.makers, dict(enumerate((*v.shape, *(turns or (1,))))), self.around
        )
        return own.of(given, (*((v.ndim,) for _ in turns), *own_axes(v.shape)))


def _in_each(plain: Operand, found: Sequence[Operand]) -> Operand | None:
    """An input that is given one of several operands in each turn, with what is known of all of them."""
    variable, values = plain.variable, [x.value for x in found]
    assert variable is not None
    ends = [f(x, axis=-1) for x in values if x is not None for f in (np.max, np.min)]
    if len(ends) == 2 * len(values) and all(np.array_equal(x, ends[0]) for x in ends):
        return replace(plain, known=np.broadcast_to(ends[0], variable.shape))
    if variable.dtype == bool:
        most, least = (
            _in_all(found, conjuncts, np.maximum, np.minimum),
            _in_all(found, disjuncts, np.minimum, np.maximum),
        )
    else:
        most, least = _in_all(found, addends, np.maximum, np.minimum) if variable.is_float else (), ()
    return replace(plain, most=most, least=least) if most or least else None


def _in_all(found: Sequence[Operand], apart: _Apart, high: Any, low: Any) -> tuple[Operand, ...]:
    """The bounds that hold whichever of these is given, of those that ``apart`` tells of each."""
    known = [[x.value for x in apart(one) if x.value is not None] for one in found]
    known = [[high.reduce(x, axis=-1) for x in some if x.dtype == bool or is_low(x)] for some in known]
    if not all(known):
        return ()
    bounds = known[0] if len(known) == 1 else [reduce(high, (reduce(low, some) for some in known))]
    return tuple(map(bound, bounds))


def _relaid(operand: Operand, axes: Axes, lengths: Lengths) -> Operand:
    """An operand that counts along the dimensions of a value, along the axes of these dimensions."""
    laid = tuple(tuple(axis for i in group for axis in axes[i]) for group in operand.axes)
    parts, most, least = (
        tuple(_relaid(x, axes, lengths) for x in group)
        for group in (operand.parts, operand.most, operand.least)
    )
    return replace(operand, axes=laid, lengths=lengths, parts=parts, most=most, least=least)
