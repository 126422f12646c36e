"""Whether ops compute row by row, and which dimension of each value counts the rows.

Dimensions that an equation ties together belong to one family (``core/wiring.py``). The family of a
dimension of the logits is that of the rows: an op that ties the rows of what it reads to those of what it
gives computes each row of that one alone. Where a sum takes the rows away, what is left is a total, which
nothing among the ops may read. Everything else mixes rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from onward.core.jaxprs.body import Call
from onward.core.jaxprs.by_number import by_number
from onward.core.primitives.table import of
from onward.core.primitives.traits import Moves, Runs, Work
from onward.core.program import Op, Variable
from onward.core.wiring import Place, wiring
from onward.develop.chunk.numbered import Numbered, numbered, operands_of

Dimension = tuple[Variable, int]


@dataclass(frozen=True)
class Rows:
    """The facts about ops that compute row by row.

    Attributes:
        axis: for each value that has rows, the dimension that counts them.
        totals: sums over all rows.
        columns: for ops that look each row up by its number, the column of the indices that holds it.
    """

    axis: Mapping[Variable, int]
    totals: frozenset[Variable]
    columns: Mapping[Op, int]


@dataclass(frozen=True)
class Mixes:
    """An op because of which rows cannot be computed apart, and what it does."""

    op: Op
    why: str


def rows_of(ops: Sequence[Op], logits: Variable, axis: int) -> Rows | Mixes:
    """How these ops compute the rows that are counted by a dimension of the logits.

    >>> import jax, jax.numpy as jnp, onward as ow
    >>> def head(w, x):
    ...     return jnp.sum(jnp.tanh(x @ w), axis=1)
    >>> program = ow.trace(head, jnp.ones((3, 9)), jnp.ones((4, 3)))
    >>> rows = rows_of(program.ops, program["dot_general"], 0)
    >>> {v.name: axis for v, axis in rows.axis.items()}
    {'dot_general': 0, 'x': 0, 'tanh': 0, 'reduce_sum': 0}
    >>> print(rows_of(program.ops, program["dot_general"], 1).totals)
    frozenset({Variable('reduce_sum', float32[4], activation)})
    """
    for op in ops:
        if why := _unfit(op):
            return Mixes(op, why)
    found = numbered(ops)
    ties = {op: tuple(_ties(op, found)) for op in ops}
    family = _family(ties, (logits, axis))
    axes: dict[Variable, int] = {}
    for v, i in family:
        if axes.setdefault(v, i) != i:
            return Mixes(_maker(ops, v), "makes an array of all pairs of rows")
    return _Walk(axes, ties, found).over(ops)


class _Walk:
    """One walk over the ops, of which each has to keep the rows apart."""

    def __init__(
        self, axes: Mapping[Variable, int], ties: Mapping[Op, Sequence[tuple[Place, Place]]], found: Numbered
    ) -> None:
        self.axes, self.ties, self.found = axes, ties, found
        self.totals: set[Variable] = set()
        self.columns: dict[Op, int] = {}

    def over(self, ops: Iterable[Op]) -> Rows | Mixes:
        for op in ops:
            if why := self.mixes(op):
                return Mixes(op, why)
        return Rows(self.axes, frozenset(self.totals), self.columns)

    def mixes(self, op: Op) -> str:
        """How an op mixes rows; empty if it does not."""
        if not self.totals.isdisjoint(op.inputs):
            return "reads a number that depends on all rows"
        call = next(op.body.calls)
        values = [*operands_of(op), *op.outputs]
        count = len(call.operands)
        rows = {(k, self.axes[v]) for k, v in enumerate(values) if v is not None and v in self.axes}
        tied = {(a, b) for a, b in self.ties[op] if a in rows and b in rows}
        kept = {place for pair in tied for place in pair}
        given = {place for place in rows if place[0] < count}
        made = rows - given
        if free := given - kept:
            return self._without(op, call, free, made)
        if made - kept and not (not given and of(call.primitive).moves in (Moves.REPEATS, Moves.MAKES)):
            return "makes rows of something else"
        self._note_column(op, call, given)
        return ""

    def _without(self, op: Op, call: Call, free: set[Place], made: set[Place]) -> str:
        """The way in which an op takes rows away; empty if it adds them up."""
        sums = wiring(call).sums if of(call.primitive).sums else ()
        if not made and free in [set(group) for group in sums]:
            self.totals.update(op.outputs)
            return ""
        row = of(call.primitive)
        if row.reduces is not None:
            return "reduces the rows to one"
        return "runs along the rows" if row.along else "does not keep the rows apart"

    def _note_column(self, op: Op, call: Call, given: set[Place]) -> None:
        columns = dict(_lookups(op, call, self.found))
        for place in given:
            if place in columns:
                self.columns[op] = columns[place][0]


def _unfit(op: Op) -> str:
    """Why an op cannot be computed for some of its rows, whatever these are; empty if it can."""
    calls = list(op.body.calls)
    if op.body.has_effects:
        return "has an effect (a debug print, a callback)"
    if len(calls) != 1 or len(calls[0].results) != len(op.outputs):
        return "computes several things at once"
    if any(of(name).draws for name in op.body.primitives):
        return "draws random numbers for all rows at once"
    if op.body.collectives or op.body.has_own_mesh:
        return "speaks of devices (chunk comes first, then partition)"
    if calls[0].inner and not _is_by_number(op, calls[0]):
        return "runs a function that is not looked into (a loop, jax.checkpoint, a derivative of its own)"
    return ""


def _is_by_number(op: Op, call: Call) -> bool:
    """Whether a function with a derivative of its own looks at each number by itself."""
    return of(call.primitive).runs is Runs.RULE and by_number(op.body, op.outputs[0].shape) is not None


def _ties(op: Op, found: Numbered) -> Iterator[tuple[Place, Place]]:
    """The pairs of dimensions of which one row of the one is computed of that row of the other alone."""
    call = next(op.body.calls)
    row = of(call.primitive)
    if call.inner:
        alike = [k for k, t in enumerate(call.operands) if t.shape == op.outputs[0].shape]
        yield from (((k, i), (len(call.operands), i)) for k in alike for i in range(op.outputs[0].ndim))
        return
    if row.update or row.work in (Work.WINDOW, Work.WINDOW_CHOICE, Work.WINDOW_SPREAD):
        return
    padded = [i for i, sides in enumerate(call.params.get("padding_config", ())) if any(sides)]
    for first, second in wiring(call).ties:
        if first[1] not in padded:
            yield first, second
    for place, (_, dimension) in _lookups(op, call, found):
        yield place, (1, dimension)


def _lookups(op: Op, call: Call, found: Numbered) -> Iterator[tuple[Place, tuple[int, int]]]:
    """The dimensions of a table looked up by row number, each with the column and the dimension it counts."""
    if of(call.primitive).moves is not Moves.LOOKS_UP:
        return
    numbers = call.params["dimension_numbers"]
    index = operands_of(op)[1]
    if index is None:
        return
    for column, dimension in found.get(index, {}).items():
        at = numbers.start_index_map[column or 0]
        if at in numbers.collapsed_slice_dims and index.shape[dimension] == call.operands[0].shape[at]:
            yield (0, at), (column or 0, dimension)


def _family(ties: Mapping[Op, Iterable[tuple[Place, Place]]], first: Dimension) -> Iterable[Dimension]:
    """The dimensions that are tied to this one, or summed with it, over any number of ops."""
    near: dict[Dimension, list[Dimension]] = {}
    for op, pairs in ties.items():
        values = [*operands_of(op), *op.outputs]
        summed = (group for group in wiring(next(op.body.calls)).sums if len(group) == 2)
        for (k, i), (m, j) in (*pairs, *summed):
            v, w = values[k], values[m]
            if v is not None and w is not None:
                near.setdefault((v, i), []).append((w, j))
                near.setdefault((w, j), []).append((v, i))
    found = dict.fromkeys([first])
    waiting = [first]
    while waiting:
        new = [d for d in near.get(waiting.pop(), ()) if d not in found]
        found.update(dict.fromkeys(new))
        waiting.extend(new)
    return found


def _maker(ops: Sequence[Op], v: Variable) -> Op:
    """The op that makes a value; the first that reads it, if none of these does."""
    made = (op for op in ops if v in op.outputs)
    return next(made, next(op for op in ops if v in op.inputs))
