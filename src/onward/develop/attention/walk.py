"""One walk over ops from a product of queries and keys to that of weights and values.

It gives each value that is computed of the first product a part in softmax(scale q k^T + mask) v: scores,
numbers that all keys share, exponentials and their sum, weights, the mean of the values. Any other value
ends it. Softmax is not changed by a number that all keys share, so whatever is taken off before the
exponential, such as the largest score, is left away.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from onward.core.jaxprs.body import Call
from onward.core.primitives.traits import Linear, Moves, Reduces, Work
from onward.core.program import Op, Program, Variable
from onward.develop.attention.axes import Axes, cut, factors, moved, multiplied
from onward.develop.attention.operands import KnownInputs, ScoreOperands, row_of
from onward.develop.attention.parts import (
    OF_TWO,
    Attention,
    AttentionPart,
    AxisCutError,
    NoPartError,
    ScoreChange,
    ScoreStep,
)
from onward.develop.attention.steps import log_weighing, never_seen, score_change, weighing
from onward.develop.chunk.numbered import operands_of


@dataclass(eq=False)
class AttentionWalk:
    """One walk from a product, of which every value has to play a part.

    Each dimension of the product is an axis, or several, of the lengths that ``pieces`` has for it.
    """

    program: Program
    product: Op
    makers: Mapping[Variable, Op]
    pieces: Sequence[Sequence[int]]
    outside: KnownInputs | None = None
    ops: list[Op] = field(default_factory=list)
    part: dict[Variable, AttentionPart] = field(default_factory=dict)
    axes: dict[Variable, Axes] = field(default_factory=dict)
    of: dict[Variable, Variable] = field(default_factory=dict)  # the scores behind exponentials
    steps: dict[Variable, tuple[ScoreStep, ...]] = field(default_factory=dict)  # behind scores
    weighings: dict[Variable, tuple[ScoreStep, ...]] = field(default_factory=dict)  # of weights
    shifted: dict[Variable, tuple[Variable, Variable]] = field(default_factory=dict)
    undivided: dict[Variable, int] = field(default_factory=dict)  # how many weighings before the sum divides
    source: int | None = None
    means: Op | None = None
    value_axes: Axes = ()
    loose: set[Variable] = field(default_factory=set)  # scores of which something was taken off
    common: frozenset[int] | None = None  # the axes along which everything is shared that is taken off

    def __post_init__(self) -> None:
        (scores,), self.ops = self.product.outputs, [self.product]
        self.lengths = dict(enumerate(n for piece in self.pieces for n in piece))
        axes = iter(self.lengths)
        self.dimensions = tuple(tuple(next(axes) for _ in piece) for piece in self.pieces)
        self.own = ScoreOperands(self.program, self.makers, dict(self.lengths), self.outside)
        self._note(scores, AttentionPart.SCORES, self.dimensions)
        self.steps[scores] = ()

    def over(
        self, ops: Sequence[Op], readers: Mapping[Variable, tuple[Op, ...]], kept: set[Variable]
    ) -> Attention:
        """The attention that begins with the product."""
        result: Variable | None = None
        for op in ops:
            if result is not None and result in op.inputs:
                break
            if not self.part.keys().isdisjoint(op.inputs):
                self.ops.append(op)
                if not any(readers.get(v) or v in kept for v in op.outputs) and not op.body.has_effects:
                    continue
                self._step(op)
                if self.part[op.outputs[0]] is AttentionPart.MEAN:
                    result = op.outputs[0]
        if result is None:
            raise NoPartError(self.ops[-1], "ends without a product of weights and values")
        inside = set(self.ops)
        for v in self.part:
            others = [op for op in readers.get(v, ()) if op not in inside]
            if v is not result and (others or v in kept):
                by = f"{others[0].type}{others[0].at}" if others else "the Program, which returns it,"
                raise NoPartError(self.ops[-1], f"is all there, but {by} reads {v.name} as well")
        return self._found(result)

    def _found(self, result: Variable) -> Attention:
        sides = operands_of(self.product)
        query, key = (v for v in sides if v is not None)
        *both, features = factors(next(self.product.body.calls), len(self.lengths))
        self.lengths |= features
        groups = dict(enumerate(self.dimensions))
        query_axes, key_axes = (tuple(groups.get(i, (i,)) for (i,) in axes) for axes in both)
        assert self.source is not None
        if self.common is not None and self.source not in self.common:
            raise NoPartError(self.product, "takes something else off for each key")
        if (self.source,) in query_axes:
            query, key, query_axes, key_axes = key, query, key_axes, query_axes
        if (self.source,) in query_axes or (self.source,) not in key_axes:
            raise NoPartError(self.product, "sums over what counts queries and keys alike")
        means = self.means
        assert means is not None
        (value,) = (v for v in operands_of(means) if v is not None and v not in self.part)
        weights = next(v for v in means.inputs if v in self.part)
        steps = self.steps[self.of[result]]
        return Attention(
            tuple(self.ops), query, key, value, result, query_axes, key_axes, self.value_axes,
            self.axes[result], self.lengths, len(self.own.lengths), self.source, steps, means, weights,
            *self._changes(result, steps),
        )  # fmt: skip

    def _changes(self, result: Variable, steps: Sequence[ScoreStep]) -> tuple[tuple[ScoreStep, ...], int]:
        """The weighings, and how many of them stand before the division by the sum.

        Before it a mask that scores have as well says nothing new: their exponentials are 0 already.
        """
        found, before = self.weighings.get(result, ()), self.undivided.get(result, 0)
        known = never_seen(steps)
        first = [step for step in found[:before] if step.fill is None or not step.rules <= known]
        return (*first, *found[before:]), len(first)

    def _note(self, v: Variable, part: AttentionPart, axes: Axes, of: Variable | None = None) -> None:
        self.part[v], self.axes[v] = part, axes
        if of is not None:
            self.of[v] = of

    def _step(self, op: Op) -> None:
        """Give the result of an op its part, or raise NoPartError."""
        calls = list(op.body.calls)
        if len(calls) != 1 or len(op.outputs) != 1 or calls[0].inner or op.body.has_effects:
            raise NoPartError(op, "is not looked into")
        row, read = row_of(op), [v for v in operands_of(op) if v in self.part]
        if row.stops_gradient and self.part[op.inputs[0]] is not AttentionPart.SHARED:
            raise NoPartError(op, "lets no gradient through")
        if row.work is Work.PRODUCT:
            self._multiplied(op, calls[0], read)
        elif row.reduces is not None:
            self._reduced(op, calls[0], read)
        elif row.moves is not None:
            self._moved(op, calls[0], read)
        elif row.is_elementwise:
            self._computed(op, read)
        else:
            raise NoPartError(op, "plays no part")

    def _moved(self, op: Op, call: Call, read: Sequence[Variable]) -> None:
        (v, *others), (out,) = read, op.outputs
        axes = moved(call, self.axes[v], self.lengths) if not others and len(op.inputs) == 1 else None
        if axes is None:
            found = cut(self.axes[v], out.shape, self.lengths) if row_of(op).moves is Moves.RESHAPES else None
            if found is not None and found.axis in self.own.lengths:
                raise AxisCutError(op, found)
            raise NoPartError(op, "lays it out in a way that is not followed")
        part = self.part[v]
        repeats = any(n > 1 and not group for n, group in zip(out.shape, axes, strict=True))
        if repeats and part not in _REPEATED:
            raise NoPartError(op, "repeats it")
        rounds = row_of(op).moves is Moves.ROUNDS
        is_repeated = part in _ROUNDED or (part is AttentionPart.WEIGHTS and out.is_float)
        if rounds and not is_repeated and not (out.is_float and out.dtype != v.dtype):
            raise NoPartError(op, "rounds it further than its dtype")
        self._note(out, part, axes, self.of.get(v))
        self._keep_weighings(out, read)
        if rounds and part is AttentionPart.WEIGHTS:
            self.weighings[out] = (*self.weighings.get(out, ()), ScoreStep(ScoreChange.ROUND, op))
        if part is AttentionPart.SCORES:
            if rounds and v in self.loose:
                raise NoPartError(op, "rounds scores of which something was taken off before")
            if v in self.loose:
                self.loose.add(out)
            self.steps[out] = (*self.steps[v], *((ScoreStep(ScoreChange.ROUND, op),) if rounds else ()))

    def _reduced(self, op: Op, call: Call, read: Sequence[Variable]) -> None:
        (v, *_), (out,) = read, op.outputs
        gone = call.params.get("axes")
        if gone is None or len(read) != 1:
            raise NoPartError(op, "reduces it in a way that is not followed")
        axes = tuple(group for i, group in enumerate(self.axes[v]) if i not in gone)
        part = self.part[v]
        if part in (AttentionPart.SCORES, AttentionPart.SHARED):
            self._note(out, AttentionPart.SHARED, axes)
            return
        taken = [self.axes[v][i] for i in gone if self.axes[v][i]]
        if part is not AttentionPart.EXPONENTIALS or row_of(op).reduces is not Reduces.SUM or len(taken) != 1:
            raise NoPartError(op, "reduces what softmax does not")
        self._expect_source(op, taken[0])
        self._note(out, AttentionPart.SUM, axes, self._seen(op, v))

    def _seen(self, op: Op, v: Variable) -> Variable:
        """The scores whose exponentials these are: -inf where exponentials were chosen to be 0."""
        scores, chosen = self.of[v], self.weighings.get(v, ())
        if any(step.fill is None for step in chosen):
            raise NoPartError(op, "sums exponentials that were multiplied before")
        known = never_seen(self.steps[scores])
        more = tuple(
            replace(step, fill=self.own.number(-np.inf)) for step in chosen if not step.rules <= known
        )
        if not more:
            return scores
        self.steps[v] = (*self.steps[scores], *more)
        return v

    def _expect_source(self, op: Op, group: tuple[int, ...]) -> None:
        """The axis of the keys, which is that over which exponentials are summed."""
        if len(group) != 1 or self.source not in (None, group[0]):
            raise NoPartError(op, "sums over another axis than that of the keys")
        self.source = group[0]

    def _multiplied(self, op: Op, call: Call, read: Sequence[Variable]) -> None:
        sides = operands_of(op)
        if self.means is not None:
            raise NoPartError(op, "multiplies weights once more")
        if (
            len(read) != 1
            or None in sides
            or self.part[read[0]] not in (AttentionPart.WEIGHTS, AttentionPart.EXPONENTIALS)
        ):
            raise NoPartError(op, "multiplies what is not weights yet")
        at = sides.index(read[0])
        (contracted, _), axes = call.params["dimension_numbers"], self.axes[read[0]]
        taken = [axes[i] for i in contracted[at] if axes[i]]
        if len(taken) != 1:
            raise NoPartError(op, "sums over another axis than that of the keys")
        self._expect_source(op, taken[0])
        self.means = op
        self.value_axes, made, features = multiplied(call, at, axes, len(self.lengths))
        self.lengths |= features
        part = AttentionPart.MEAN if self.part[read[0]] is AttentionPart.WEIGHTS else AttentionPart.UNWEIGHED
        self._note(op.outputs[0], part, made, self.of[read[0]])
        self._keep_weighings(op.outputs[0], read)

    def _computed(self, op: Op, read: Sequence[Variable]) -> None:
        """The result of arithmetic number by number."""
        (out,), parts = op.outputs, {self.part[v] for v in read}
        axes = self._aligned(op, read)
        if parts == {AttentionPart.SHARED}:
            self._expect_shared(op, axes)
            self._note(out, AttentionPart.SHARED, axes)
        elif parts == {AttentionPart.SCORES} and len(read) == 1:
            self._changed(op, read[0], axes)
        elif AttentionPart.SCORES in parts and len(read) == 2 and len(op.inputs) == 2:
            self._shifted(op, axes)
        elif len(read) == 1 and (parts <= _WEIGHED or (parts <= _LOGARITHMS and row_of(op).chooses)):
            self._weighed(op, read[0], axes)
        else:
            self._normalized(op, read, axes)

    def _aligned(self, op: Op, read: Sequence[Variable]) -> Axes:
        """The axes of a result, if those of all that is read beside each other are the same."""
        found: list[tuple[int, ...]] = []
        for i in range(op.outputs[0].ndim):
            groups = {self.axes[v][i] for v in read if v.ndim}
            groups.discard(())
            if len(groups) > 1:
                raise NoPartError(op, "computes numbers of different places with each other")
            found.append(next(iter(groups), ()))
        return tuple(found)

    def _expect_shared(self, op: Op, axes: Axes) -> None:
        """Raise if an op lets numbers that keys share depend on something else, which may tell them apart."""
        for v in op.inputs:
            if v not in self.part and any(
                n > 1 and not group for n, group in zip(v.shape, axes, strict=False)
            ):
                raise NoPartError(op, "computes something else for each key")

    def _changed(self, op: Op, v: Variable, axes: Axes) -> None:
        """The result of arithmetic with scores and what is not computed of them."""
        (out,), row = op.outputs, row_of(op)
        if row.exponential:
            self._note(out, AttentionPart.EXPONENTIALS, axes, v)
            return
        step = score_change(self.own, op, v, axes)
        if step is None:
            raise NoPartError(op, "changes scores in a way that is not known")
        if step.fill is not None and v in self.loose and step.fill.number != -np.inf:
            raise NoPartError(op, "masks scores of which something was taken off before")
        if v in self.loose:
            self.loose.add(out)
        self._note(out, AttentionPart.SCORES, axes)
        self.steps[out] = (*self.steps[v], step)

    def _weighed(self, op: Op, v: Variable, axes: Axes) -> None:
        """Weights changed behind softmax; exponentials are weights that are not divided by their sum yet."""
        step = (log_weighing if self.part[v] in _LOGARITHMS else weighing)(self.own, op, v, axes)
        if step is None:
            raise NoPartError(op, "does what neither softmax nor dropout does")
        (out,) = op.outputs
        self._note(out, self.part[v], axes, self.of[v])
        self.weighings[out] = (*self.weighings.get(v, ()), step)

    def _shifted(self, op: Op, axes: Axes) -> None:
        """Scores from which something is taken off that all keys share."""
        (first, second), (out,), row = op.inputs, op.outputs, row_of(op)
        if self.part[first] is not AttentionPart.SCORES:
            first, second = second, first
        takes_off = (
            row.linear is Linear.TOGETHER and not row.adds and not row.chooses and op.inputs[0] is first
        )
        if self.part[second] is AttentionPart.LOG_SUM and takes_off and self.of[second] is first:
            self._note(out, AttentionPart.LOG_WEIGHTS, axes, first)
            return
        if self.part[second] is not AttentionPart.SHARED or not (row.adds or takes_off):
            raise NoPartError(op, "changes scores by what is computed of them")
        absent = frozenset(_flat(axes)).difference(_flat(self.axes[second]))
        self.common = absent if self.common is None else self.common & absent
        self._note(out, AttentionPart.SCORES, axes)
        self.loose.add(out)
        self.steps[out] = self.steps[first]
        if takes_off:
            self.shifted[out] = (first, second)

    def _normalized(self, op: Op, read: Sequence[Variable], axes: Axes) -> None:
        """The result of arithmetic behind the exponential."""
        (out,), row, parts = op.outputs, row_of(op), [self.part[v] for v in read]
        values = operands_of(op)
        of = self.of.get(read[0])
        made: AttentionPart | None = None
        if len(read) == 2 and len(values) == 2 and (summed := self._summed(read)) is not None:
            of = summed
            made = OF_TWO.get(
                (frozenset(parts), "divides" if row.divides else "multiplies" if row.multiplies else "")
            )
            if row.divides and parts[1] is not AttentionPart.SUM:
                made = None
        elif len(values) == 1 and parts == [AttentionPart.SUM] and (row.logarithm or row.keeps_positive):
            made = AttentionPart.LOG_SUM if row.logarithm else AttentionPart.SUM
        elif len(values) == 1 and parts == [AttentionPart.LOG_WEIGHTS] and row.exponential:
            made = AttentionPart.WEIGHTS
        elif parts == [AttentionPart.SUM] and row.divides and values[0] is None and op.body.numbers[0] == 1:
            made = AttentionPart.INVERSE
        elif set(parts) == {AttentionPart.LOG_SUM, AttentionPart.SHARED} and row.adds:
            of = self._unshifted(read)
            made = AttentionPart.LOG_SUM if of is not None else None
        if made is None:
            raise NoPartError(op, "does what softmax does not")
        self._note(out, made, axes, of)
        self._keep_weighings(out, read)
        if len(read) == 2:
            self.undivided[out] = len(self.weighings.get(out, ()))

    def _summed(self, read: Sequence[Variable]) -> Variable | None:
        """The scores of exponentials and their sum; None where it is the sum of others."""
        e, total = sorted(read, key=lambda v: self.part[v] in _TOTALS)
        scores, of = self.of.get(e), self.of.get(total)
        if scores is None or of is None or scores is of:
            return scores and of
        # The sum is that of chosen exponentials: those that it divides have to be chosen as well.
        chosen = frozenset(rule for step in self.weighings.get(e, ()) for rule in step.rules)
        is_chosen = never_seen(self.steps[of]) <= chosen | never_seen(self.steps[scores])
        return of if scores is self.of.get(of) and is_chosen else None

    def _keep_weighings(self, out: Variable, read: Sequence[Variable]) -> None:
        """Note of a value how the weights were changed that it is computed of."""
        for v in read:
            if v in self.weighings:
                self.weighings[out] = self.weighings[v]
            if v in self.undivided:
                self.undivided[out] = self.undivided[v]

    def _unshifted(self, read: Sequence[Variable]) -> Variable | None:
        """The scores of which a log-sum is that, with what was taken off before added again."""
        total = next(v for v in read if self.part[v] is AttentionPart.LOG_SUM)
        shared = next(v for v in read if self.part[v] is AttentionPart.SHARED)
        before, taken = self.shifted.get(self.of[total], (None, None))
        return before if taken is not None and self._same(taken, shared) else None

    def _same(self, v: Variable, other: Variable) -> bool:
        """Whether two values hold the same numbers, laid out in other ways."""
        return self._origin(v) is self._origin(other)

    def _origin(self, v: Variable) -> Variable:
        """The value that is only moved to become this one."""
        op = self.makers.get(v)
        while op is not None and row_of(op).moves in _LAID and not row_of(op).stops_gradient:
            (v,) = op.inputs
            op = self.makers.get(v)
        return v


def _flat(axes: Axes) -> Iterator[int]:
    return (axis for group in axes for axis in group)


_TOTALS = (AttentionPart.SUM, AttentionPart.INVERSE, AttentionPart.LOG_SUM)
_LAID = (Moves.REPEATS, Moves.RESHAPES)
_REPEATED = (AttentionPart.SHARED, AttentionPart.SUM, AttentionPart.INVERSE, AttentionPart.LOG_SUM)
_WEIGHED = {AttentionPart.WEIGHTS, AttentionPart.EXPONENTIALS}
_LOGARITHMS = {AttentionPart.LOG_WEIGHTS}
_ROUNDED = (AttentionPart.SCORES, AttentionPart.SHARED)
