"""How the result of one op follows the batch, from how what it reads does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from onward.core.jaxprs.body import Call
from onward.core.primitives.table import of
from onward.core.primitives.traits import Index, Linear, Moves
from onward.core.program import Op, Variable
from onward.core.variable import limits_of
from onward.develop.over_batch.known import OWN, SAME, BatchWalk, Follows, How, Need

COUNTS = "counts the examples from 0"


class Operands:
    """The operands of an op's equation, and the values that it would have to read in their place."""

    def __init__(self, walk: BatchWalk, op: Op, other: Op) -> None:
        self.walk, self.op, self.other = walk, op, other
        found = walk.result.found
        self.arrays = [(found[v], v) for v in op.inputs]
        self.values = list(map(self._value, op.body.operands, op.body.numbers, other.body.numbers))

    def _value(self, operand: int | str, number: Any, theirs: Any) -> tuple[Follows, Variable | None]:
        if isinstance(operand, int):
            v = self.op.inputs[operand]
            return self.walk.result.found[v], v
        return self._of_number(number, theirs), None

    def _of_number(self, mine: Any, theirs: Any) -> Follows:
        """A number that counts examples is a power of their share, or is replaced by the whole's."""
        if mine is None or theirs is None or np.array_equal(mine, theirs, equal_nan=_is_inexact(mine)):
            return SAME
        is_added = of(next(self.op.body.calls).primitive).linear is Linear.TOGETHER
        if not _is_inexact(mine) and self._is_index(is_added):
            return SAME
        power = power_between(mine, theirs, self.walk.parts) if _is_inexact(mine) or is_added else None
        self.walk.result.counted.add(self.op)
        if power is None:
            self._take_numbers()
        return Follows(How.SAME, power or 0)

    def _is_index(self, is_added: bool) -> bool:
        """Whether an integer in the op is, or may be, of a place in an array, and no number of examples.

        A function that speaks of devices itself counts with those of its own.
        """
        found = [self.walk.result.found[v] for v in self.op.inputs]
        row = of(next(self.op.body.calls).primitive)
        finds = row.moves in (Moves.LOOKS_UP, Moves.CUTS_AT) or bool(row.update)
        if is_added and self.op.outputs[0] in self.walk.from_end:
            return True
        return bool(found) and ((is_added and self.counts()) or finds or self.walk.has_own_axis)

    def _take_numbers(self) -> None:
        self.walk.result.numbers[self.op] = self.op.body.with_numbers_of(self.other.body)

    def combined(self, call: Call) -> Follows:
        """How the result follows the whole's, its shape apart; asks for what cannot be told otherwise."""
        self.settle_extremes()
        if any(map(self.walk.axes, self.op.outputs)):  # examples read it, even if it stands alone
            self._merge([i for i, (f, _) in enumerate(self.values) if f.kind is How.MEAN])
        linear = of(call.primitive).linear
        if linear is Linear.FIRST and _keeps_inexact(call):
            self.settle(*range(1, len(self.values)))
            return self._kept(self.values[0][0])
        if linear is Linear.EACH:
            return self._product()
        if of(call.primitive).divides and _is_inexact(self.op.outputs[0]):
            return self._quotient()
        if linear is Linear.TOGETHER:
            chosen = (0,) if call.primitive == "select_n" else ()
            self.settle(*chosen)
            return self._sum(range(len(chosen), len(self.values)))
        return self.settled()

    def settle_extremes(self) -> None:
        """Ask for the largest and the smallest of the whole where those of the part would be read."""
        self._merge([i for i, (f, _) in enumerate(self.values) if f.kind in (How.MOST, How.LEAST)])

    def zeros(self) -> list[bool]:
        """Which operands are 0 throughout."""
        return [self._is_zero(i) or v in self.walk.zeros for i, (_, v) in enumerate(self.values)]

    def settled(self) -> Follows:
        """How the result follows if all is read exactly as the whole would."""
        self.settle(*range(len(self.values)))
        return self._kind_of_all()

    def counts_on(self, call: Call, walk: BatchWalk) -> bool:
        """Whether the result numbers examples as well; noted, unless an index is made of it."""
        row = of(call.primitive)
        index = None if row.compares and not self._asks_for_sign() else row.index
        if not self.counts():
            return False
        finds = row.moves in (Moves.LOOKS_UP, Moves.CUTS_AT) and self.values[0][0].kind is not How.ROWS
        if index is Index.ENDS and not finds:
            return False
        if not finds and index is Index.STAYS and self._keeps_count(call):
            return True
        walk.note(self.op, COUNTS)
        return False

    def _keeps_count(self, call: Call) -> bool:
        """Whether the result numbers the same examples, each as before."""
        if call.primitive == "add":
            return self.op.outputs[0] in self.walk.from_end
        if call.primitive == "select_n":
            return all(f.counts for f, _ in self.values[1:])
        counting, walk = [v for f, v in self.arrays if f.counts], self.walk
        before, after = (
            {v.shape[i] for v in vs for i in walk.axes(v) or ()} for vs in (counting, self.op.outputs)
        )
        return before == after

    def counts(self) -> bool:
        """Whether an operand numbers the examples."""
        return any(f.counts for f, _ in self.arrays)

    def _asks_for_sign(self) -> bool:
        """Whether it compares with 0, as an index is that may count from the end."""
        return any(self._is_zero(i) for i in range(len(self.values)))

    def _kept(self, first: Follows) -> Follows:
        return first if first.kind is How.ROWS or not self._has(How.ROWS) else Follows(How.ROWS, first.power)

    def _product(self) -> Follows:
        means = [i for i, (f, _) in enumerate(self.values) if f.kind is How.MEAN]
        if len(means) > 1:  # the mean of one times the others, exact, is that of the whole
            left = next((i for i in means if not self._can_have(i)), None)
            self._merge([i for i in means if i != left])
        if not _is_inexact(self.op.outputs[0]):  # a sum over the parts makes up for one power alone
            self.settle(*(i for i, (f, _) in enumerate(self.values) if f.kind is How.SAME))
        return replace(self._kind_of_all(), power=sum(f.power for f, _ in self.values))

    def _quotient(self) -> Follows:
        above, below = (f for f, _ in self.values)
        self._merge([1] if below.kind is How.MEAN else [])
        above, below = (f for f, _ in self.values)
        return replace(self._kind_of_all(), power=above.power - below.power)

    def _sum(self, places: Sequence[int]) -> Follows:
        if self._has(How.ROWS):
            self._merge([i for i in places if self.values[i][0].kind is How.MEAN])
        powers = {self.values[i][0].power for i in places if not self._is_zero(i)}
        if len(powers) > 1:
            for i in places:
                self._exact(i)
            powers = {0}
        return replace(self._kind_of_all(), power=next(iter(powers), 0))

    def _is_zero(self, place: int) -> bool:
        number = self.op.body.numbers[place]
        return number is not None and not np.any(number)

    def _has(self, kind: How) -> bool:
        return any(f.kind is kind for f, _ in self.values)

    def _kind_of_all(self) -> Follows:
        for kind in (How.ROWS, How.OWN, How.MEAN):
            if self._has(kind):
                return Follows(kind)
        return SAME

    def settle(self, *places: int) -> None:
        """Ask for exactly what the whole would read in these places."""
        for i in places:
            self._exact(i, merged=True)

    def _exact(self, place: int, merged: bool = False) -> None:
        """Ask for a value times its power, of which an integer is merged as well, or it counts more often."""
        follows, v = self.values[place]
        if follows.kind is How.MEAN and (merged or not _is_inexact(v)):
            self._merge([place])
        self._scale(place)

    def _merge(self, places: Iterable[int]) -> None:
        for i in places:
            follows, v = self.values[i]
            assert v is not None
            reaches = self.op in self.walk.reaching
            summed = follows.kind is How.MEAN
            if self._can_have(i) and (_is_inexact(v) or not summed or follows.power == 1):
                self._need(v, merged=follows.kind)
                self.values[i] = replace(follows, kind=How.SAME), v
                if summed and (self.walk.in_turn or not _is_inexact(v)):
                    self._scale(i)
            elif reaches:
                self.walk.normalizes(self.op)
                self.values[i] = SAME, v
            else:
                self.walk.result.bent.append(self.op)
                self.values[i] = OWN, v

    def _can_have(self, place: int) -> bool:
        follows, v = self.values[place]
        assert v is not None
        return self.walk.can_have(v, Need(follows.kind), self.op in self.walk.reaching)

    def _scale(self, place: int) -> None:
        follows, v = self.values[place]
        if follows.power == 0 or follows.kind is How.OWN:
            return
        if v is None:
            self._take_numbers()
        elif self.walk.can_have(v, Need(How.SAME, follows.power), False):
            self._need(v, power=follows.power)
        else:
            self.walk.result.bent.append(self.op)
        self.values[place] = replace(follows, power=0), v

    def _need(self, v: Variable, merged: How = How.SAME, power: int = 0) -> None:
        needs = self.walk.result.needs.setdefault(self.op, {})
        before = needs.get(v, Need(How.SAME))
        needs[v] = Need(before.merged if merged is How.SAME else merged, power or before.power)


def place_from_end(op: Op, made: Mapping[Variable, Op]) -> Variable | None:
    """The place that is chosen where an index is negative, and counts from the end; ``made`` has the ops.

    None if the op chooses something else.
    """
    if op.type != "select_n" or len(op.body.operands) != 3:
        return None
    which, index, place = _read(op)
    asking, adding = made.get(which), made.get(place)
    if asking is None or adding is None or asking.type != "lt" or adding.type != "add":
        return None
    return place if _read(asking) == [index, "0"] and _read(adding)[0] == index else None


def _read(op: Op) -> list[Any]:
    """The operands of an equation: Variables, and numbers that stand in it as text."""
    return [op.inputs[i] if isinstance(i, int) else i for i in op.body.operands]


def power_between(mine: Any, theirs: Any, parts: int) -> int | None:
    """The power of the number of parts by which a number of the whole is as large; None if by another."""
    powers, dtype = (0, 1, -1, 2, -2), np.result_type(mine)
    near = 8 * float(limits_of(dtype).eps) if _is_inexact(mine) else 0.0
    return next((p for p in powers if np.allclose(theirs, mine * float(parts) ** p, near, atol=0)), None)


def _keeps_inexact(call: Call) -> bool:
    """Whether a conversion is to a floating dtype, or there is none."""
    return call.primitive != "convert_element_type" or _is_inexact(call.results[0])


def _is_inexact(value: Any) -> bool:
    return bool(jnp.issubdtype(getattr(value, "dtype", np.result_type(value)), np.inexact))
