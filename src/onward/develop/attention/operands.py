"""Operands that change scores, computed from as little as they come from.

A mask of [batch, heads, queries, keys] is mostly a smaller one that is repeated, or counted from nothing.
Here it is an array that has a dimension for each axis of the scores, 1 long where it repeats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.primitives.table import of
from onward.core.primitives.traits import Linear, Moves, Primitive
from onward.core.program import Op, Program, Variable
from onward.develop.attention.axes import Axes, AxisCut, Lengths, before_moved, cut, own_axes, spread

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
        most: masks that are true wherever it is, where more is not known of it; of numbers such as are low
            only where it is as low: what rests on these is looked at when it runs.
        least: masks that are true only where it is.
        is_bound: whether it is one of these of another.
    """

    axes: Axes
    lengths: Lengths
    variable: Variable | None = None
    known: Any = None
    op: Op | None = None
    parts: tuple[Operand, ...] = ()
    most: tuple[Operand, ...] = ()
    least: tuple[Operand, ...] = ()
    is_bound: bool = False

    @cached_property
    def reads(self) -> tuple[Variable, ...]:
        """The values that it is computed of."""
        own = () if self.variable is None else (self.variable,)
        return tuple(dict.fromkeys((*own, *(v for part in self.parts for v in part.reads))))

    @cached_property
    def unknown(self) -> tuple[Variable, ...]:
        """Those of them that are not known."""
        own = () if self.variable is None or self.known is not None else (self.variable,)
        return tuple(dict.fromkeys((*own, *(v for part in self.parts for v in part.unknown))))

    @cached_property
    def is_known(self) -> bool:
        """Whether it depends on nothing but what stands in the Program."""
        return not self.unknown

    @cached_property
    def is_in_part(self) -> bool:
        """Whether it is computed of a value with bounds, or is a sum of which a part is known."""
        is_sum = self.op is not None and len(self.parts) == 2 and row_of(self.op).adds
        some = bool(self.most or self.least) or (
            is_sum and any(x.is_known and x.size > 1 for x in self.parts)
        )
        return some or any(part.is_in_part for part in self.parts)

    @cached_property
    def is_implied(self) -> bool:
        """Whether it is computed of a bound: something else that is read says so too."""
        return self.is_bound or any(part.is_implied for part in self.parts)

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


def _is_less(again: Operand, v: Variable) -> bool:
    """Whether a value is computed again of less than it holds, or of as much that tells more of it."""
    size = sum(x.size for x in again.reads)
    is_of_masks = all(x.dtype == bool for x in (v, *again.unknown))
    tells_more = (is_of_masks or again.is_in_part) and sum(x.size for x in again.unknown) <= v.size
    return again.is_known or size < v.size or tells_more


def bound(value: np.ndarray) -> Operand:
    """A bound of something else, whose dimensions are the axes, but for those in which it repeats."""
    return Operand(own_axes(value.shape), dict(enumerate(value.shape)), known=value, is_bound=True)


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
            self._found[v, axes] = again if again is not None and _is_less(again, v) else plain
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
            return self._bounded(Operand((), self.lengths, op=op, parts=parts))
        if row.moves is None or len(op.inputs) != 1:
            return None if call.inner or row.draws else self._computed(op, v, axes)
        before = before_moved(call, axes, self.lengths)
        if before is None and row.moves is Moves.RESHAPES:
            found = cut(axes, op.inputs[0].shape, self.lengths)
            self.cuts += [found] if found is not None else []
        return None if before is None else self.of(op.inputs[0], before, depth)

    def _bounded(self, made: Operand) -> Operand:
        """A value, with bounds where it is one of two that are known, whichever that is."""
        assert made.op is not None
        row, choice = row_of(made.op), made.parts[1:]
        if not row.chooses or row.linear is not Linear.TOGETHER or len(choice) != 2 or made.is_known:
            return made
        (one, other), is_mask = (x.value for x in choice), made.op.outputs[0].dtype == bool
        if one is None or other is None or one.size == other.size == 1:
            return made
        most, least = (bound(f(one, other)) for f in (np.maximum, np.minimum))
        return replace(made, most=(most,), least=(least,) if is_mask else ())

    def _computed(self, op: Op, v: Variable, axes: Axes) -> Operand | None:
        """A value that is computed of nothing but what is known; None of any other, or a large one."""
        if op.body.has_effects or not all(isinstance(n, int) and n for x in (v, *op.inputs) for n in x.shape):
            return None
        if v.size > _MOST:
            return None
        known = []
        for x in op.inputs:
            own = ScoreOperands(self.program, self.makers, dict(enumerate(x.shape)), self.outside)
            value = own.of(x, own_axes(x.shape)).value
            if value is None:
                return None
            known.append(np.broadcast_to(value, x.shape))
        with jax.ensure_compile_time_eval():
            return Operand(axes, self.lengths, v, np.asarray(op.body(*known)[0]))
