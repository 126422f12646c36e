"""Operands that change scores, computed from as little as they come from.

A mask of [batch, heads, queries, keys] is mostly a smaller one that is repeated, or counted from nothing.
Here it is an array that has a dimension for each axis of the scores, 1 long where it repeats.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.primitives.table import of
from onward.core.primitives.traits import Moves, Primitive
from onward.core.program import Op, Program, Variable
from onward.develop.attention.axes import Axes, AxisCut, Lengths, before_moved, cut, spread

_MOST = 2**26  # numbers of an array that is looked at while a Program is built
_DEEPEST = 16  # ops that are computed again in a row


def row_of(op: Op) -> Primitive:
    """The traits of what an op of one equation computes, whatever its type is called, such as a cast."""
    return of(next(op.body.calls).primitive)


@dataclass(frozen=True, eq=False)
class Operand:
    """A value that is read beside scores: as it is, or computed again of smaller ones.

    Attributes:
        axes: along which its dimensions count; none of a number, or of what is computed of parts.
        lengths: of the axes of the scores.
        variable: a value that is read; None where it is computed, or a number.
        known: what it is, if the Program says so.
        op: computes it of ``parts``; of nothing where there are none.
        parts: other operands.
    """

    axes: Axes
    lengths: Lengths
    variable: Variable | None = None
    known: Any = None
    op: Op | None = None
    parts: tuple[Operand, ...] = ()

    @cached_property
    def reads(self) -> tuple[Variable, ...]:
        """The values that it is computed of."""
        own = () if self.variable is None else (self.variable,)
        return tuple(dict.fromkeys((*own, *(v for part in self.parts for v in part.reads))))

    @cached_property
    def is_known(self) -> bool:
        """Whether it depends on nothing but what stands in the Program."""
        return (self.variable is None or self.known is not None) and all(x.is_known for x in self.parts)

    @cached_property
    def counts(self) -> frozenset[int]:
        """The axes along which its numbers may differ."""
        own = frozenset(axis for group in self.axes for axis in group if self.lengths[axis] > 1)
        return own.union(*(part.counts for part in self.parts))

    @property
    def size(self) -> int:
        """How many numbers it is computed to have."""
        return prod(self.lengths[axis] for axis in self.counts)

    def array(self, env: Mapping[Variable, Any]) -> Any:
        """It, with a dimension for each axis of the scores; what is not in ``env`` is known."""
        if self.op is not None and self.parts:
            return self.op.body(*jnp.broadcast_arrays(*(part.array(env) for part in self.parts)))[0]
        if self.op is not None:
            (value,) = self.op.body()
        else:
            value = self.known if self.variable is None else env.get(self.variable, self.known)
        return spread(jnp.asarray(value), self.axes, self.lengths)

    @cached_property
    def value(self) -> np.ndarray | None:
        """The array, if it is known and not too large to look at."""
        if not self.is_known or self.size > _MOST:
            return None
        with jax.ensure_compile_time_eval():
            return np.asarray(self.array({}))

    @property
    def number(self) -> float | None:
        """The number, if it is one and known."""
        value = None if self.size > 1 else self.value
        return None if value is None or value.size != 1 else float(value.ravel()[0])


def _is_less(again: Operand, v: Variable, constants: Container[Variable]) -> bool:
    """Whether a value is computed again of less than it holds, or a mask of masks, which tell more."""
    size = sum(x.size for x in again.reads)
    masks = [x for x in again.reads if x not in constants]
    is_of_masks = all(x.dtype == bool for x in (v, *masks)) and sum(x.size for x in masks) <= v.size
    return again.is_known or size < v.size or is_of_masks


class KnownInputs(Protocol):
    """Knowledge of the inputs of a Program that an op runs."""

    def operand(self, v: Variable, axes: Axes, lengths: Lengths) -> Operand | None:
        """An input whose dimensions count along these axes; None of any other value, or nothing known."""


class ScoreOperands:
    """The operands beside the scores of one region."""

    def __init__(
        self, program: Program, makers: Mapping[Variable, Op], lengths: Lengths, outside: KnownInputs | None
    ) -> None:
        self.program, self.makers, self.lengths, self.outside = program, makers, lengths, outside
        self.cuts: list[AxisCut] = []  # of axes that operands cut: they stay whole, where they could be less
        self.apart: dict[tuple[Operand, bool], tuple[Operand, ...]] = {}  # masks, by their parts
        self._found: dict[tuple[Variable, Axes], Operand] = {}

    def number(self, value: Any) -> Operand:
        """A number that stands in an equation."""
        return Operand((), self.lengths, known=value)

    def of(self, v: Variable, axes: Axes, depth: int = 0) -> Operand:
        """A value whose dimensions count along these axes, computed of what it comes from if that is less."""
        axes = tuple(group if n > 1 else () for group, n in zip(axes, v.shape, strict=True))
        if (v, axes) not in self._found:
            known = None if self.outside is None else self.outside.operand(v, axes, self.lengths)
            plain = known or Operand(axes, self.lengths, v, self.program.constants.get(v))
            again = self._again(v, axes, depth + 1) if depth < _DEEPEST else None
            self._found[v, axes] = (
                again if again is not None and _is_less(again, v, self.program.constants) else plain
            )
        return self._found[v, axes]

    def _again(self, v: Variable, axes: Axes, depth: int) -> Operand | None:
        """A value as its op makes it of its own operands; None where these are not so laid out."""
        op = self.makers.get(v)
        if op is None or len(op.outputs) != 1 or len(list(op.body.calls)) != 1:
            return None
        (call,), row = op.body.calls, row_of(op)
        if row.moves is Moves.REPEATS and not op.inputs:
            return self.number(np.asarray(op.body.numbers[0], v.dtype))
        if not op.inputs and not call.inner and not row.draws:
            return Operand(axes, self.lengths, op=op)
        if row.moves is Moves.ROUNDS or row.stops_gradient or (row.is_elementwise and not call.inner):
            parts = tuple(self.of(x, axes if x.ndim else (), depth) for x in op.inputs)
            return Operand((), self.lengths, op=op, parts=parts)
        if row.moves is None or len(op.inputs) != 1:
            return None
        before = before_moved(call, axes, self.lengths)
        if before is None and row.moves is Moves.RESHAPES:
            found = cut(axes, op.inputs[0].shape, self.lengths)
            self.cuts += [found] if found is not None else []
        return None if before is None else self.of(op.inputs[0], before, depth)
