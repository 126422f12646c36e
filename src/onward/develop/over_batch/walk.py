"""How each value for a whole batch follows from that for one part, in a function traced for both.

``follow(whole, part, parts)`` walks over a function that was traced for a batch, and again for one of
``parts`` equal parts of it. An axis that is ``parts`` times as long in the whole is that of the examples. A
sum over it is a statistic: the whole's is the mean over the parts, times their number. Sums and products with
what is the same in every part keep that; what is not linear (a root, a quotient of two statistics) does not,
and needs the statistic of the whole batch first.

>>> import jax.numpy as jnp, onward as ow
>>> def loss(w, x):
...     return jnp.sum((x @ w) ** 2)
>>> whole, part = (ow.trace(loss, jnp.ones(3), jnp.ones((rows, 3))) for rows in (8, 4))
>>> loss = follow(whole, part, 2, {"x"}).found[part.loss]
>>> str(loss.kind), loss.power
('mean', 1)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import zip_longest
from math import isnan, lcm, prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from onward.core.jaxprs.body import Call
from onward.core.placement import equal_variables
from onward.core.primitives.table import of
from onward.core.primitives.traits import Exchanges, Moves, Reduces, Work
from onward.core.program import Op, Program, Variable
from onward.core.walk import producers
from onward.develop.over_batch.apart import adds_each, has_part, is_own, mixing
from onward.develop.over_batch.known import (
    COUNTED,
    ODD,
    OWN,
    SAME,
    BatchWalk,
    CanHave,
    ExampleLayout,
    Following,
    Follows,
    How,
    Need,
)
from onward.develop.over_batch.operands import COUNTS, Operands, place_from_end, power_between
from onward.develop.over_batch.own_keys import draws_for_examples
from onward.develop.over_batch.within import within

_EXTREMES = {Reduces.LARGEST: How.MOST, Reduces.SMALLEST: How.LEAST}
_ALONG = ("sizes", "feature_group_count", "batch_group_count")  # how long parts along examples are
_OF_TRUTHS = {Reduces.ANY: How.MOST, Reduces.ALL: How.LEAST}


def _always(v: Variable, need: Need, reaches: bool) -> bool:
    """Whatever is needed can be had."""
    return True


def follow(
    whole: Program,
    part: Program,
    parts: int,
    split: Collection[str],
    can_have: CanHave = _always,
    in_turn: bool = False,
    asks_rules: bool = True,
) -> Following | None:
    """How the values of ``part`` follow those of ``whole``; None if they are not the same ops.

    Args:
        whole: a forward Program.
        part: the same function traced for one of the parts.
        parts: how many.
        split: the names of the data of which a part holds its examples only.
        can_have: whether the parts can have what is needed in place of a value, told whether it comes back to
            the examples (as a statistic of batch normalization does). What they cannot have is theirs alone.
        in_turn: the parts are micro-batches, not devices: a statistic that they have is the whole's own, not
            the mean of theirs, and what the function merges over devices is that of one part.
        asks_rules: whether derivative rules are looked at, for there will be gradients.
    """
    rows = next((v.shape[0] for v in part.inputs if v.name in split), 0)
    state, first = [SAME] * len(part.state), Follows(How.ROWS, 0, ExampleLayout(0))
    given = [*(first if v.name in split else SAME for v in part.inputs), *state]
    pairs = _aligned(whole, part)
    if pairs is None:
        return None
    return Follower(pairs, whole, part, given, parts, rows, can_have, in_turn, asks_rules).followed()


def _aligned(whole: Program, part: Program) -> list[tuple[Op, Op | None]] | None:
    """The ops of the part, each with that of the whole; what layers merge is the part's alone."""
    if _ranks(whole.inputs) != _ranks(part.inputs) or _ranks(whole.state) != _ranks(part.state):
        return None
    theirs, pairs = list(reversed(whole.ops)), list[tuple[Op, Op | None]]()
    for op in part.ops:
        if theirs and theirs[-1].type == op.type and _alike(op, theirs[-1]):
            pairs.append((op, theirs.pop()))
        elif op.body.collectives:
            pairs.append((op, None))
        else:
            return None
    return None if theirs else pairs


def where_parted(whole: Program, part: Program) -> str:
    """The op from which on the whole computes something else than the part, in words."""
    pairs = zip_longest(whole.ops, part.ops)
    for theirs, mine in pairs:
        if theirs is None or mine is None or theirs.type != mine.type or not _alike(mine, theirs):
            parted = theirs or mine
            return f", from {parted.type!r}{parted.at} on"
    return ""


def _alike(op: Op, other: Op) -> bool:
    return _ranks(op.inputs) == _ranks(other.inputs) and _ranks(op.outputs) == _ranks(other.outputs)


def _ranks(variables: Iterable[Variable]) -> list[int]:
    return [v.ndim for v in variables]


class Follower(BatchWalk):
    """One walk over the ops of a part, each beside that of the whole; a part has so many ``rows``."""

    def __init__(
        self,
        pairs: Sequence[tuple[Op, Op | None]],
        whole: Program,
        part: Program,
        given: Sequence[Follows],
        parts: int,
        rows: int,
        can_have: CanHave,
        in_turn: bool,
        asks_rules: bool,
    ) -> None:
        known = (*part.inputs, *part.state)
        super().__init__(
            Following(dict(zip(known, given, strict=True))),
            dict(zip(known, (*whole.inputs, *whole.state), strict=True)),
            parts,
            can_have,
            has_own_axis=not in_turn and any(op.body.collectives for op in whole.ops),
            in_turn=in_turn,
            asks_rules=asks_rules,
            rows=rows,
        )
        self.pairs, self.part, self.equal = pairs, part, equal_variables(part)
        for v, other in zip(part.constants, whole.constants, strict=False):
            self.like[v] = other
            self.result.found[v] = self._constant(v, part.constants[v], whole.constants[other])

    def inner(
        self, whole: Program, part: Program, given: Sequence[Follows], asks_rules: bool = True
    ) -> Following | None:
        """How the values of what an op runs follow, from what it is given; None if it is not known."""
        pairs = _aligned(whole, part)
        if pairs is None:
            return None
        how = _always, self.in_turn, asks_rules and self.asks_rules
        return Follower(pairs, whole, part, given, self.parts, self.rows, *how).followed()

    def _constant(self, v: Variable, mine: Any, theirs: Any) -> Follows:
        if np.shape(mine) == np.shape(theirs):
            return self._number(v, mine, theirs)
        axes = self.axes(v) or ()
        if v.is_key or not v.size or len(axes) != 1:
            return Follows(How.ROWS, counts=len(axes) > 1)
        one, other = (np.take(x, [0], axes[0]) for x in (np.asarray(mine), np.asarray(theirs)))
        pairs = ((mine, one), (theirs, other))
        is_alike = all(np.array_equal(x, np.broadcast_to(row, np.shape(x)), v.is_float) for x, row in pairs)
        power = self._power(v, one, other) if is_alike else None
        return replace(self.by_shape(v, OWN), power=power or 0, counts=power is None)

    def _power(self, v: Variable, mine: Any, theirs: Any) -> int | None:
        """The power of the number of parts by which numbers are as large in the whole; None if by another."""
        if np.array_equal(mine, theirs, equal_nan=v.is_float):
            return 0
        return power_between(mine, theirs, self.parts) if jnp.issubdtype(v.dtype, np.number) else None

    def _number(self, v: Variable, mine: Any, theirs: Any) -> Follows:
        """How a constant follows that has as many numbers in the whole."""
        if mine is theirs or v.is_key:
            return SAME
        power = self._power(v, mine, theirs)
        if power is None:
            self.result.constants[v] = theirs
        return Follows(How.SAME, power or 0)

    def _counts(self, v: Variable) -> bool:
        """Whether it is a constant that is as many times as large in the whole, or as small."""
        found = self.result.found[v]
        return v in self.part.constants and found.kind is How.SAME and found.power != 0

    def followed(self) -> Following:
        """The walk over all ops."""
        for op, other in self.pairs:
            if other is None:
                self.like.update((v, self.like[op.inputs[0]]) for v in op.outputs)
            else:
                self.like.update(zip(op.outputs, other.outputs, strict=True))
        self.reaching = self._reaching(op for op, _ in self.pairs)
        made = producers(self.part)
        read = Counter(v for op in self.part.ops for v in op.inputs)
        places = (place_from_end(op, made) for op, _ in self.pairs)
        self.from_end = {v for v in places if v is not None and read[v] == 1}
        for op, other in self.pairs:
            found = self._followed(op, other)
            if other is not None and self._is_made_by_number(op, other):
                self.note(op, COUNTED)
                found = [OWN for _ in found]
            self.result.found.update(zip(op.outputs, found, strict=True))
            self.takes_groups(op, lcm(*(f.layout.each.denominator for f in found if f.layout is not None)))
        return self.result

    def _reaching(self, ops: Iterable[Op]) -> set[Op]:
        """The ops whose results come back to the examples."""
        found: set[Op] = set()
        needed = set[Variable]()
        for op in reversed(list(ops)):
            if not needed.isdisjoint(op.outputs) or any(self.axes(v) for v in op.outputs):
                found.add(op)
                needed.update(op.inputs)
        return found

    def _followed(self, op: Op, other: Op | None) -> list[Follows]:
        """How the outputs of an op follow the whole's."""
        is_merged = bool(op.body.collectives) and not self.in_turn  # over the parts, by the function itself
        if is_merged or other is None:
            power = self._power_of_merged(op)
            return [Follows(How.SAME, power) if v in self.equal else OWN for v in op.outputs]
        if draws_for_examples(op, other):
            self.result.drawn.update(op.outputs)
            if not any(v.is_key for v in op.inputs):
                self.result.hidden_draws.append(op)
        calls = list(op.body.calls)
        if len(calls) != 1:
            return [self.by_shape(v, OWN) for v in op.outputs]
        if any(v in self.result.constants or self._counts(v) for v in op.inputs):
            self.result.counted.add(op)
        given = Operands(self, op, other)
        if calls[0].inner and not of(calls[0].primitive).update:
            return within(self, op, other, calls[0], given)
        if of(calls[0].primitive).moves in (Moves.KEEPS, Moves.HOLDS):
            return [f for f, _ in given.values]
        if of(calls[0].primitive).exchanges is Exchanges.SUM:
            return [
                self._output(op, v, calls[0], given, f)
                for v, (f, _) in zip(op.outputs, given.values, strict=True)
            ]
        how = given.combined(calls[0])
        return [self._output(op, v, calls[0], given, how) for v in op.outputs]

    def _is_made_by_number(self, op: Op, other: Op) -> bool:
        """Whether parameters of an equation count examples, other than the lengths of arrays along them.

        Nothing is said of an op in which examples see each other anyway.
        """
        mine, theirs = (next(iter(each.body.calls), None) for each in (op, other))
        is_said = bool(self.result.mixing) and self.result.mixing[-1][0] is op
        if mine is None or theirs is None or mine.inner or is_said:
            return False
        axes = {i for v in (*op.inputs, *op.outputs) for i in self.axes(v) or ()}
        if of(mine.primitive).work is Work.CONVOLUTION:  # its parameters are of other axes
            axes = set()
        pairs = ((name, x, theirs.params.get(name)) for name, x in mine.params.items())
        return any(name not in _ALONG and _differ(x, y, axes) for name, x, y in pairs)

    def _power_of_merged(self, op: Op) -> int:
        """A sum over the parts is their number times the mean."""
        power = max((self.result.found[v].power for v in op.inputs), default=0)
        return power - any(of(c.kind).exchanges is Exchanges.SUM for c in op.body.collectives)

    def _output(self, op: Op, v: Variable, call: Call, given: Operands, how: Follows) -> Follows:
        axes = self.axes(v)
        if axes is None or len(axes) > 1:
            pairs = "makes an array of all pairs of examples"
            self.note(op, pairs if axes else "takes some of the examples, or adds to them")
            return OWN
        if how.kind is not How.ROWS:
            return self._without_rows(op, v, call, given, how, axes)
        if axes:
            counts = given.counts_on(call, self)
            return replace(how, layout=self._layout(op, v, axes[0], call, given), counts=counts)
        if is_own(call, [f for f, _ in given.values]):
            return SAME
        if given.counts():
            self.note(op, COUNTS)
            return OWN
        row = of(call.primitive)
        if row.sums or (op.inputs[0] in self.zeros and adds_each(call, self._rows_of(given))):
            lies = {(f.layout.blocks, f.layout.each) for f, _ in given.values if f.layout is not None}
            if len(lies) > 1:
                self.note(op, ODD)
            return Follows(How.MEAN, how.power + 1)
        extremes = _OF_TRUTHS if v.dtype == bool else _EXTREMES
        if row.reduces in extremes:
            return Follows(extremes[row.reduces])
        self.note(op, "takes some of the examples")
        return OWN

    def _without_rows(
        self, op: Op, v: Variable, call: Call, given: Operands, how: Follows, axes: list[int]
    ) -> Follows:
        if call.primitive == "broadcast_in_dim" and op.body.numbers[0] is not None:
            self.zeros.update([v] if not np.any(op.body.numbers[0]) else [])
        if axes:
            row = of(call.primitive)
            if row.moves not in (Moves.REPEATS, Moves.MAKES) and not row.draws and not row.makes_keys:
                self.note(op, "takes a number for each example of what is the same for all")
            counts = call.primitive == "iota" and axes == [call.params["dimension"]]
            return replace(self.by_shape(v, OWN), power=how.power, counts=counts)
        return replace(how, counts=True) if given.counts() and given.counts_on(call, self) else how

    def _layout(self, op: Op, v: Variable, axis: int, call: Call, given: Operands) -> ExampleLayout | None:
        if why := mixing(call, [f for f, _ in given.values], self._rows_of(given), axis):
            self.note(op, why)
        unknown = [n for n in self._unknown(given).values() if n is not None]
        if of(call.primitive).moves is Moves.CUTS and v.shape[axis] not in (unknown or v.shape):
            self.note(op, "takes some of the examples")
        known = [(f.layout, w) for f, w in given.arrays if f.kind is How.ROWS and f.layout is not None]
        if has_part(call, self._unknown(given), self.rows, axis):
            self.note(op, "takes some of the examples")
        if not known:
            return None
        first, source = known[0]
        if call.primitive == "reshape":
            return self._reshaped(op, first, source, v, axis)
        if call.primitive == "concatenate" and call.params["dimension"] == first.axis:
            blocks = Fraction(v.shape[axis]) / (self.rows * first.each)
            if blocks.denominator == 1 and all(layout.each == first.each for layout, _ in known):
                return replace(first, blocks=int(blocks))
            self.note(op, ODD)
            return None
        if call.primitive == "tile":
            return replace(first, blocks=first.blocks * call.params["reps"][axis])
        if call.primitive == "slice":
            start, limit = (call.params[k][first.axis] for k in ("start_indices", "limit_indices"))
            strides = call.params["strides"]
            return self._cut(op, first, start, limit, strides[first.axis] if strides else 1)
        if call.primitive == "split" and call.params["axis"] == first.axis:
            limit = sum(call.params["sizes"][: op.outputs.index(v) + 1])
            return self._cut(op, first, limit - v.shape[axis], limit, 1)
        alike = [layout for layout, w in known if w.shape[layout.axis] == v.shape[axis]]
        if len({(x.blocks, x.each) for x in alike}) > 1:
            self.note(op, ODD)
            return None
        return replace(alike[0], axis=axis) if alike else None

    def _unknown(self, given: Operands) -> dict[int, int | None]:
        """For each operand that has rows how many numbers lie along them, None if their layout is known."""
        lengths = {k: (given.values[k], axis) for k, axis in self._rows_of(given).items()}
        return {k: w.shape[axis] if f.layout is None else None for k, ((f, w), axis) in lengths.items() if w}

    def _reshaped(
        self, op: Op, layout: ExampleLayout, source: Variable, v: Variable, axis: int
    ) -> ExampleLayout | None:
        before = prod(source.shape[: layout.axis]) * layout.blocks
        blocks, rest = divmod(before, prod(v.shape[:axis]) or 1)
        found = ExampleLayout(axis, blocks, Fraction(v.shape[axis], (blocks or 1) * self.rows))
        if rest or not blocks or not found.fits(self.rows):
            self.note(op, "moves numbers of one example to another")
            return None
        return found

    def _rows_of(self, given: Operands) -> dict[int, int]:
        """For each operand that has rows the axis along which they lie."""
        found = {k: self.axes(w) for k, (f, w) in enumerate(given.values) if w and f.kind is How.ROWS}
        return {k: axes[0] for k, axes in found.items() if axes}

    def _cut(
        self, op: Op, layout: ExampleLayout, start: int, limit: int, stride: int
    ) -> ExampleLayout | None:
        block, one = self.rows * layout.each, replace(layout, each=layout.each / stride)
        if one.blocks == 1 and one.fits(self.rows) and start < stride and limit > block - stride + start:
            return one  # the same one of each group
        if stride != 1 or start % block or limit % block:
            self.note(op, "takes some of the examples")
            return None
        return replace(layout, blocks=(limit - start) // block)


def _differ(mine: Any, theirs: Any, axes: Collection[int]) -> bool:
    """Whether numbers differ, of an array of them those that do not belong to these axes."""
    if isinstance(mine, tuple) and isinstance(theirs, tuple) and len(mine) == len(theirs):
        pairs = enumerate(zip(mine, theirs, strict=True))
        return any(i not in axes and _differ(a, b, ()) for i, (a, b) in pairs)
    is_number = isinstance(mine, int | float) and not isnan(mine)
    return is_number and mine != theirs
