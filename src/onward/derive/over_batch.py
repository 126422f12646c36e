"""What one part of a batch tells of the whole: for every value of a function that was traced for both.

``follow(whole, part, parts)`` walks over a function that was traced for a batch, and again for one of
``parts`` equal parts of it. An axis that is ``parts`` times as long in the whole is that of the examples. A
sum over it is a statistic: the whole's is the mean over the parts, times their number. Sums and products with
what is the same in every part keep that; what is not linear (a root, a quotient of two statistics) does not,
and needs the statistic of the whole batch first.

>>> import jax.numpy as jnp, onward as ow
>>> def loss(w, x):
...     return jnp.sum((x @ w) ** 2)
>>> whole, part = (ow.trace(loss, jnp.ones(3), jnp.ones((rows, 3))) for rows in (8, 4))
>>> follow(whole, part, 2, {"x"}).found[part.loss]
Follows(kind=<How.MEAN: 'mean'>, power=1, layout=None)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from onward.core.jaxprs import Body, Call
from onward.core.placement import equal_variables
from onward.core.program import Op, Program, Variable
from onward.core.walk import ancestors

_STRUCTURAL = frozenset(
    [
        *(
            "neg",
            "convert_element_type",
            "copy",
            "copy_p",
            "real",
            "imag",
            "conj",
            "reduce_precision",
            "name",
        ),
        *("reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "rev", "slice"),
        *("dynamic_slice", "gather", "reduce_sum", "psum", "cumsum"),
    ]
)
_PRODUCTS = frozenset(["mul", "dot_general", "conv_general_dilated"])
_SUMS = frozenset(["add", "sub", "add_any", "concatenate", "select_n", "pad"])
_ADDS = ("reduce_sum", "dot_general", "psum")  # psum: what vmap made of one
_ALONG = {"sort": "dimension", "rev": "dimensions"} | dict.fromkeys(
    ["cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"], "axis"
)
_REDUCES = ("reduce_", "arg", "dot_general")


class How(StrEnum):
    """How the whole's value comes from those of the parts."""

    SAME = "same"  # every part has it
    MEAN = "mean"  # over the parts
    MOST = "most"  # the largest of the parts
    LEAST = "least"  # the smallest of the parts
    ROWS = "rows"  # laid end to end, example by example
    OWN = "own"  # nothing is known of it


_EXTREMES = {"reduce_max": How.MOST, "reduce_min": How.LEAST}
_MERGED = (How.MEAN, How.MOST, How.LEAST)


@dataclass(frozen=True)
class Layout:
    """Where the examples of an array are: ``blocks`` times all of them, ``each`` numbers in a row of one."""

    axis: int
    blocks: int = 1
    each: int = 1


@dataclass(frozen=True)
class Follows:
    """The whole's value is ``parts ** power`` times what ``kind`` says; ``layout`` is known of some ROWS."""

    kind: How
    power: int = 0
    layout: Layout | None = None


SAME, OWN = Follows(How.SAME), Follows(How.OWN)


@dataclass(frozen=True)
class Need:
    """What an op has to read in place of a value: the parts' merged so, times ``parts ** power``."""

    merged: How
    power: int = 0


@dataclass
class Following:
    """What is known of a function's values, and what it would take to compute what the whole computes.

    Attributes:
        found: how the whole's values come from the part's.
        needs: for ops that are not linear in a statistic, what they have to read in place of it.
        numbers: ops with numbers in them that count examples, with the whole's.
        mixing: ops in which examples see each other, and how.
        bent: ops that are not linear in a statistic that the parts cannot have.
    """

    found: dict[Variable, Follows]
    needs: dict[Op, dict[Variable, Need]] = field(default_factory=dict)
    numbers: dict[Op, Body] = field(default_factory=dict)
    mixing: list[tuple[Op, str]] = field(default_factory=list)
    bent: list[Op] = field(default_factory=list)

    def reaching(self, program: Program, targets: Iterable[Variable]) -> Following:
        """The same without what these Variables do not depend on."""
        needed = ancestors(program, list(targets))

        def kept(op: Op) -> bool:
            return not needed.isdisjoint(op.outputs)

        mixing = [(op, why) for op, why in self.mixing if kept(op)]
        return replace(self, mixing=mixing, bent=list(filter(kept, self.bent)))


def follow(
    whole: Program,
    part: Program,
    parts: int,
    split: Collection[str],
    can_have: Callable[[bool], bool] = lambda reaches: True,
) -> Following | None:
    """How the values of ``part`` follow those of ``whole``; None if they are not the same ops.

    Args:
        whole: a forward Program.
        part: the same function traced for one of the parts.
        parts: how many.
        split: the names of the data of which a part holds its examples only.
        can_have: whether the parts can have a statistic of the whole batch, told whether it comes back to
            the examples (as that of batch normalization does). What they cannot have is theirs alone.
    """
    pairs = _aligned(whole, part)
    return None if pairs is None else _Walk(whole, part, parts, split, can_have).over(pairs)


def _aligned(whole: Program, part: Program) -> list[tuple[Op, Op | None]] | None:
    """The ops of the part, each with that of the whole; what layers merge is the part's alone."""
    theirs, pairs = list(reversed(whole.ops)), list[tuple[Op, Op | None]]()
    for op in part.ops:
        if theirs and theirs[-1].type == op.type and _alike(op, theirs[-1]):
            pairs.append((op, theirs.pop()))
        elif op.body.collectives:
            pairs.append((op, None))
        else:
            return None
    return None if theirs else pairs


def _alike(op: Op, other: Op) -> bool:
    ranks = [[v.ndim for v in (*o.inputs, *o.outputs)] for o in (op, other)]
    return ranks[0] == ranks[1]


class _Walk:
    def __init__(
        self,
        whole: Program,
        part: Program,
        parts: int,
        split: Collection[str],
        can_have: Callable[[bool], bool],
    ) -> None:
        self.part, self.parts, self.can_have = part, parts, can_have
        self.equal = equal_variables(part)
        self.like = dict(zip((*part.inputs, *part.state), (*whole.inputs, *whole.state), strict=True))
        self.rows = next((v.shape[0] for v in part.inputs if v.name in split), 0)
        self.result = Following(dict.fromkeys(self.like, SAME))
        for v in part.inputs:
            if v.name in split:
                self.result.found[v] = Follows(How.ROWS, 0, Layout(0))
        for v, other in zip(part.constants, whole.constants, strict=False):
            self.like[v] = other
            same = np.shape(part.constants[v]) == np.shape(whole.constants[other])
            self.result.found[v] = SAME if same else Follows(How.ROWS)

    def over(self, pairs: Sequence[tuple[Op, Op | None]]) -> Following:
        """The walk over all ops."""
        for op, other in pairs:
            if other is None:
                self.like.update((v, self.like[op.inputs[0]]) for v in op.outputs)
            else:
                self.like.update(zip(op.outputs, other.outputs, strict=True))
        self.reaching = self._reaching(op for op, _ in pairs)
        for op, other in pairs:
            self.result.found.update(zip(op.outputs, self._followed(op, other), strict=True))
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

    def axes(self, v: Variable) -> list[int] | None:
        """The axes along which the examples lie; None if lengths follow the batch in another way."""
        other = self.like[v]
        pairs = list(zip(v.shape, other.shape, strict=True))
        if any(mine not in (theirs, theirs / self.parts) for mine, theirs in pairs):
            return None
        return [i for i, (mine, theirs) in enumerate(pairs) if mine != theirs]

    def _followed(self, op: Op, other: Op | None) -> list[Follows]:
        """How the outputs of an op follow the whole's."""
        if op.body.collectives or other is None:  # merged over the parts by the function itself
            power = self._power_of_merged(op)
            return [Follows(How.SAME, power) if v in self.equal else OWN for v in op.outputs]
        calls = list(op.body.calls)
        if len(calls) != 1:
            return [self._by_shape(v, OWN) for v in op.outputs]
        given = _Operands(self, op, other)
        how = given.combined(calls[0])
        return [self._output(op, v, calls[0], given, how) for v in op.outputs]

    def _power_of_merged(self, op: Op) -> int:
        """A sum over the parts is their number times the mean."""
        power = max((self.result.found[v].power for v in op.inputs), default=0)
        return power - any(c.kind.startswith("psum") for c in op.body.collectives)

    def _by_shape(self, v: Variable, otherwise: Follows) -> Follows:
        axes = self.axes(v)
        return Follows(How.ROWS) if axes and len(axes) == 1 else otherwise

    def _output(self, op: Op, v: Variable, call: Call, given: _Operands, how: Follows) -> Follows:
        axes = self.axes(v)
        if axes is None:
            return OWN
        if how.kind is not How.ROWS:
            return how if not axes else self._by_shape(v, OWN)
        if len(axes) > 1:
            self.note(op, "makes an array of all pairs of examples")
            return OWN
        if axes:
            return replace(how, layout=self._layout(op, v, axes[0], call, given))
        if call.primitive in _ADDS:
            return Follows(How.MEAN, how.power + 1)
        if call.primitive in _EXTREMES:
            return Follows(_EXTREMES[call.primitive])
        if not call.inner:
            self.note(op, "takes some of the examples")
        return OWN

    def _layout(self, op: Op, v: Variable, axis: int, call: Call, given: _Operands) -> Layout | None:
        known = [(f.layout, w) for f, w in given.arrays if f.kind is How.ROWS and f.layout is not None]
        if not known:
            return None
        first, source = known[0]
        if call.primitive == "reshape":
            return self._reshaped(op, first, source, v, axis)
        if call.primitive in _ALONG:
            along = call.params[_ALONG[call.primitive]]
            if first.axis in (along if isinstance(along, tuple) else (along,)):
                self.note(op, "runs along the examples")
        if call.primitive == "concatenate" and call.params["dimension"] == first.axis:
            blocks = [layout.blocks for layout, _ in known]
            return replace(first, blocks=sum(blocks)) if len(blocks) == len(given.arrays) else None
        if call.primitive == "slice":
            return self._sliced(op, first, call)
        alike = [layout for layout, w in known if w.shape[layout.axis] == v.shape[axis]]
        if len({(x.blocks, x.each) for x in alike}) > 1:
            self.note(op, "pairs examples that do not belong together")
            return None
        return replace(alike[0], axis=axis) if alike else None

    def _reshaped(self, op: Op, layout: Layout, source: Variable, v: Variable, axis: int) -> Layout | None:
        before = prod(source.shape[: layout.axis]) * layout.blocks
        blocks, rest = divmod(before, prod(v.shape[:axis]) or 1)
        each, odd = divmod(v.shape[axis], (blocks or 1) * self.rows)
        if rest or odd or not blocks:
            self.note(op, "moves numbers of one example to another")
            return None
        return Layout(axis, blocks, each)

    def _sliced(self, op: Op, layout: Layout, call: Call) -> Layout | None:
        start, limit = (call.params[k][layout.axis] for k in ("start_indices", "limit_indices"))
        strides = call.params["strides"]
        block = self.rows * layout.each
        if (strides and strides[layout.axis] != 1) or start % block or limit % block:
            self.note(op, "takes some of the examples")
            return None
        return replace(layout, blocks=(limit - start) // block)

    def note(self, op: Op, why: str) -> None:
        """Remember an op in which examples see each other."""
        self.result.mixing.append((op, why))


class _Operands:
    """What the equation of an op reads, and what it would have to read in place of that."""

    def __init__(self, walk: _Walk, op: Op, other: Op) -> None:
        self.walk, self.op, self.other = walk, op, other
        self.values = list(map(self._value, op.body.operands, op.body.numbers, other.body.numbers))
        found = walk.result.found
        self.arrays = [(found[v], v) for v in op.inputs]

    def _value(self, operand: int | str, number: Any, theirs: Any) -> tuple[Follows, Variable | None]:
        if isinstance(operand, int):
            v = self.op.inputs[operand]
            return self.walk.result.found[v], v
        return self._of_number(number, theirs), None

    def _of_number(self, mine: Any, theirs: Any) -> Follows:
        """A number that counts examples is a power of their share, or is replaced by the whole's."""
        if mine is None or theirs is None or not _is_inexact(mine):
            return SAME
        if np.array_equal(mine, theirs, equal_nan=True):
            return SAME
        for power in (1, -1, 2, -2):
            if np.allclose(theirs, mine * float(self.walk.parts) ** power, rtol=1e-6, atol=0):
                return Follows(How.SAME, power)
        self._take_numbers()
        return SAME

    def _take_numbers(self) -> None:
        self.walk.result.numbers[self.op] = self.op.body.with_numbers_of(self.other.body)

    def combined(self, call: Call) -> Follows:
        """How the result follows the whole's, its shape apart; asks for what cannot be told otherwise."""
        self._merge([i for i, (f, _) in enumerate(self.values) if f.kind in (How.MOST, How.LEAST)])
        if not call.inner:
            if call.primitive in _STRUCTURAL and _keeps_inexact(call):
                self._settle(self.values[1:])
                return self._kept(self.values[0][0])
            if call.primitive in _PRODUCTS:
                return self._product()
            if call.primitive == "div":
                return self._quotient()
            if call.primitive in _SUMS:
                cases = self.values[1:] if call.primitive == "select_n" else self.values
                self._settle(self.values[: len(self.values) - len(cases)])
                return self._sum([i for i, x in enumerate(self.values) if x in cases])
        elif self._reduces_within():
            return self._opaque_loop()
        self._settle(self.values)
        return self._kind_of_all()

    def _kept(self, first: Follows) -> Follows:
        return first if first.kind is How.ROWS or not self._has(How.ROWS) else Follows(How.ROWS, first.power)

    def _product(self) -> Follows:
        means = [i for i, (f, _) in enumerate(self.values) if f.kind is How.MEAN]
        if self._has(How.ROWS) or len(means) > 1:
            self._merge(means)
        return replace(self._kind_of_all(), power=sum(f.power for f, _ in self.values))

    def _quotient(self) -> Follows:
        above, below = (f for f, _ in self.values)
        self._merge([1] if below.kind is How.MEAN else [])
        if self._has(How.ROWS):
            self._merge([0] if above.kind is How.MEAN else [])
        above, below = (f for f, _ in self.values)
        return replace(self._kind_of_all(), power=above.power - below.power)

    def _sum(self, places: Sequence[int]) -> Follows:
        if self._has(How.ROWS):
            self._merge([i for i in places if self.values[i][0].kind is How.MEAN])
        powers = {self.values[i][0].power for i in places if not self._is_zero(i)}
        if len(powers) > 1 and not _is_inexact(self.op.outputs[0]):
            return Follows(How.ROWS) if self._has(How.ROWS) else OWN  # counts are merged as such
        if len(powers) > 1:
            for i in places:
                self._scale(i)
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

    def _settle(self, values: Sequence[tuple[Follows, Variable | None]]) -> None:
        """Ask for exactly what the whole would read in these places."""
        for i, value in enumerate(self.values):
            if any(value is x for x in values):
                if value[0].kind is How.MEAN:
                    self._merge([i])
                self._scale(i)

    def _merge(self, places: Iterable[int]) -> None:
        for i in places:
            follows, v = self.values[i]
            assert v is not None
            reaches = self.op in self.walk.reaching
            summed = follows.kind is How.MEAN
            if self.walk.can_have(reaches) and (_is_inexact(v) or not summed or follows.power == 1):
                self._need(v, merged=follows.kind)
                self.values[i] = replace(follows, kind=How.SAME), v
                if summed and not _is_inexact(v):
                    self._scale(i)
            elif reaches:
                self.values[i] = SAME, v
            else:
                self.walk.result.bent.append(self.op)
                self.values[i] = OWN, v

    def _scale(self, place: int) -> None:
        follows, v = self.values[place]
        if follows.power == 0 or follows.kind is How.OWN:
            return
        if v is None:
            self._take_numbers()
        elif self.walk.can_have(False):
            self._need(v, power=follows.power)
        else:
            self.walk.result.bent.append(self.op)
        self.values[place] = replace(follows, power=0), v

    def _need(self, v: Variable, merged: How = How.SAME, power: int = 0) -> None:
        needs = self.walk.result.needs.setdefault(self.op, {})
        before = needs.get(v, Need(How.SAME))
        needs[v] = Need(before.merged if merged is How.SAME else merged, power or before.power)

    def _reduces_within(self) -> bool:
        """Whether a loop or a function that is called reduces over the examples somewhere in it."""
        pairs = zip(_calls_within(self.op.body), _calls_within(self.other.body), strict=False)
        return any(mine.primitive.startswith(_REDUCES) and _shrinks(mine, theirs) for mine, theirs in pairs)

    def _opaque_loop(self) -> Follows:
        if self._has(How.ROWS) and any(self.walk.axes(v) for v in self.op.outputs):
            self.walk.note(self.op, "computes a statistic of the examples within, and goes on with it")
        self._settle(self.values)
        return self._kind_of_all()


def _calls_within(body: Body) -> Iterator[Call]:
    for call in body.calls:
        yield call
        for bodies in call.inner.values():
            for inner in bodies:
                yield from _calls_within(inner)


def _shrinks(mine: Call, theirs: Call) -> bool:
    """Whether an equation reads what is longer in the whole, and gives what is not."""

    def lengths(call: Call) -> tuple[list[Any], list[Any]]:
        return [t.shape for t in call.operands], [t.shape for t in call.results]

    (read, given), (read_whole, given_whole) = lengths(mine), lengths(theirs)
    return read != read_whole and given == given_whole


def _keeps_inexact(call: Call) -> bool:
    """Whether a conversion is to a floating dtype, or there is none."""
    return call.primitive != "convert_element_type" or _is_inexact(call.results[0])


def _is_inexact(value: Any) -> bool:
    return bool(jnp.issubdtype(getattr(value, "dtype", np.result_type(value)), np.inexact))
