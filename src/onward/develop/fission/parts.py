"""The parts of a loop's turn that may leave it: those that wait for no turn, and those no turn asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property

from jax import lax

from onward.core.builder import op_of
from onward.core.cost import size
from onward.core.jaxprs.products import reading_before
from onward.core.names import Names
from onward.core.primitives.table import of
from onward.core.primitives.traits import Linear, Moves
from onward.core.program import Op, Variable
from onward.core.turn import ScanTurn
from onward.core.variable import limits_of
from onward.core.walk import consumers, producers
from onward.core.words import Pass

_ALLOWANCE = 64 * 2**20  # bytes that may be stacked in any case
_TIMES = 4
"""So many times as large as what a turn stacks for it must a matrix be. With an LSTM (64 turns, one core of a
CPU) a step took 0.87 of its time where the weights are 4 times as large (32 rows, 128 wide), 0.56 at 32 times
(8 rows, 256 wide) and 0.85 at 8 times; 1.2 at 2 times, and 1.25 at a half (256 rows, 128 wide)."""
_ROWS = range(4, 65)  # of the other operand: fewer and more gain nothing
_LARGEST = 64 * 2**20  # bytes of a weight, of which there are two then
"""A product reads its left operand along the last axis, its right one along the first. Where a loop has a
weight the other way round, as the gradient of ``h @ w`` has, XLA's CPU compiler turns it in every turn, which
for few rows can cost more than the product: at 4 rows 0.35 to 0.6 of the time of a loop is left, at 16 rows
0.7 to 0.9, at 128 all of it (weights of 128 x 512 to 512 x 512, two cores, jax 0.10 and 0.12)."""


class Waits(IntEnum):
    """The latest of all that a value of a turn is computed of."""

    NOTHING = 0  # only of what is the same in all turns
    CUT = 1  # of what is cut for each turn as well
    CARRIED = 2  # of what the turn before has made, or it does more than compute


@dataclass(frozen=True)
class Term:
    """A value that each turn adds to another, which it does nothing else with.

    Attributes:
        added: what is added.
        operands: what it is computed of, and what is stacked over the turns for it.
        product: of these operands; None for the sum of the only one.
        tail: the linear ops between that and what is added, in order.
    """

    added: Variable
    operands: tuple[Variable, ...]
    product: Op | None
    tail: tuple[Op, ...]


@dataclass(frozen=True)
class Total:
    """A carried value that turns only add to.

    Attributes:
        carried: which of the carried values.
        terms: what is added after all turns.
        kept: what each turn adds still.
    """

    carried: int
    terms: tuple[Term, ...]
    kept: tuple[Variable, ...]


class Parts:
    """The parts of a loop that need not be computed turn by turn.

    Attributes:
        once: what is the same in all turns.
        early: products that wait for no turn, of which each turn gets its own.
        totals: sums over the turns.
    """

    def __init__(self, turn: ScanTurn) -> None:
        self.turn = turn = _with_turned_weights(turn)
        self.once: list[Variable] = []
        self.early: list[Variable] = []
        self.totals: list[Total] = []
        if turn.length > 1:
            self._room = max(_ALLOWANCE, turn.length * sum(map(size, (*turn.cut, *turn.stacked))))
            self._stacked = set(turn.cut)
            self._find_early()
            self._find_totals()

    def __bool__(self) -> bool:
        products = (v for v in self.once if self._makers[v].primitive.is_product)
        is_turned = bool(self.once) and _reads_turned(self.turn)
        return bool(self.early or self.totals or any(products) or is_turned)

    def __str__(self) -> str:
        before, after = [*self.once, *self.early], [t for total in self.totals for t in total.terms]
        told = [f"{len(before)} before"] * bool(before) + [f"{len(after)} after"] * bool(after)
        return f"of {self.turn.length} turns {' and '.join(told)} them"

    @property
    def stacks(self) -> list[Variable]:
        """The values that the turns stack for the sums, beyond those stacked already."""
        operands = (v for total in self.totals for term in total.terms for v in term.operands)
        return [v for v in dict.fromkeys(operands) if v not in (*self.turn.cut, *self.early)]

    @cached_property
    def _waits(self) -> Mapping[Variable, Waits]:
        return _waits_of(self.turn)

    @cached_property
    def _readers(self) -> Mapping[Variable, Sequence[Op | None]]:
        """The ops that read a value; None stands for the loop, whose result it is."""
        found: dict[Variable, list[Op | None]] = {
            v: [*ops] for v, ops in consumers(self.turn.program).items()
        }
        for v in self.turn.program.outputs:
            found.setdefault(v, []).append(None)
        return found

    @cached_property
    def _makers(self) -> Mapping[Variable, Op]:
        return producers(self.turn.program)

    def _find_early(self) -> None:
        for op in self.turn.program.ops:
            waits = [self._waits[v] for v in op.inputs]
            if not op.outputs or _stays(op) or Waits.CARRIED in waits:
                continue
            if Waits.CUT not in waits:
                if op.primitive.moves not in (Moves.MAKES, Moves.REPEATS):
                    self.once.extend(op.outputs)
            elif op.primitive.is_product and sorted(waits) == [Waits.NOTHING, Waits.CUT]:
                weight = op.inputs[waits.index(Waits.NOTHING)]
                if self._pays(weight, self._behind(op)):
                    self.early.extend(op.outputs)
                    self._stacked.update(op.outputs)

    def _behind(self, op: Op) -> list[Variable]:
        """The values to stack so that an op is computed for all turns at once."""
        needed, found = set(op.inputs), [*op.outputs]
        for earlier in reversed(self.turn.program.ops[: self.turn.program.ops.index(op)]):
            if not needed.isdisjoint(earlier.outputs) and self._waits[earlier.outputs[0]] is Waits.CUT:
                needed.update(earlier.inputs)
                found.extend(earlier.outputs)
        return found

    def _pays(self, matrix: Variable, values: Sequence[Variable]) -> bool:
        """Whether to stack these for a matrix: it is large enough for that, and there is room.

        There is room for as much as the loop stacks anyhow, or for a little; less for the next ones.
        """
        new = sum(size(v) for v in {*values} - self._stacked)
        pays = new * self.turn.length <= self._room and new * _TIMES <= size(matrix)
        self._room -= new * self.turn.length * pays
        return pays

    def _find_totals(self) -> None:
        added = {i: leaves for i in range(len(self.turn.carried)) if (leaves := self._added(i))}
        chosen = {v: term for leaves in added.values() for v in leaves if (term := self._late_product(v))}
        for i, leaves in added.items():  # sums take only what is stacked for products
            chosen.update((v, term) for v in leaves if (term := self._term(v)) and not term.product)
            kept = tuple(v for v in leaves if v not in chosen)
            if len(kept) < len(leaves):
                self.totals.append(Total(i, tuple(chosen[v] for v in leaves if v in chosen), kept))

    def _late_product(self, added: Variable) -> Term | None:
        term = self._term(added)
        if term is None or term.product is None or not self._pays(term.product.outputs[0], term.operands):
            return None
        self._stacked.update(term.operands)
        return term

    def _added(self, carried: int) -> list[Variable]:
        """The values that each turn adds to a carried one; none if it does anything else with it."""
        first, last = self.turn.carried[carried], self.turn.program.outputs[carried]
        leaves = [*self._leaves(last)]
        alone = leaves.count(first) == 1 and len(self._readers[first]) == 1 == len(self._readers[last])
        return [v for v in leaves if v is not first] if alone else []

    def _leaves(self, v: Variable) -> Iterator[Variable]:
        """The values that a sum adds up, each as often as it does."""
        op = self._makers.get(v)
        if op is None or not _adds_arrays(op) or len(self._readers[v]) > 1:
            yield v
        else:
            for i in op.inputs:
                yield from self._leaves(i)

    def _term(self, added: Variable) -> Term | None:
        """How to compute the sum of a value over all turns from what is stacked; None if there is no way."""
        tail: list[Op] = []
        v = added
        while v not in self._stacked:
            op = self._makers.get(v)
            if op is None or len(self._readers[v]) > 1 or not _holds_sums(v, added):
                return None
            if op.primitive.is_product:
                return Term(added, _factors(op), op, tuple(tail)) if self._varies(op) else None
            if not _is_linear(op):
                return None
            tail.insert(0, op)
            (v,) = op.inputs
        return Term(added, (v,), None, tuple(tail)) if _holds_sums(v, added) else None

    def _varies(self, op: Op) -> bool:
        """Whether it is a product of two matrices, each turn's own."""
        pair = _factors(op)
        return len(pair) == 2 and Waits.NOTHING not in [self._waits[v] for v in pair]


def _waits_of(turn: ScanTurn) -> Mapping[Variable, Waits]:
    """For each value of a turn, what it waits for."""
    found = dict.fromkeys((*turn.program.constants, *turn.fixed), Waits.NOTHING)
    found.update(dict.fromkeys(turn.cut, Waits.CUT))
    found.update(dict.fromkeys(turn.carried, Waits.CARRIED))
    for op in turn.program.ops:
        latest = max((found[v] for v in op.inputs), default=Waits.NOTHING)
        found.update(dict.fromkeys(op.outputs, Waits.CARRIED if _stays(op) else latest))
    return found


def _stays(op: Op) -> bool:
    """Whether an op does more than compute, or would be another one for all turns at once."""
    random = any(of(p).draws or of(p).makes_keys for p in op.body.primitives)
    return bool(op.body.has_effects or op.body.collectives or op.primitive.is_loop or random)


def _factors(op: Op) -> tuple[Variable, ...]:
    """The operands of a product of matrices, in order; empty if it is something else."""
    operands = op.body.operands
    (call,) = op.body.calls
    plain = call.primitive == "dot_general" and call.params.get("out_sharding") is None
    return tuple(op.inputs[x] for x in operands if isinstance(x, int)) if plain else ()


def _with_turned_weights(turn: ScanTurn) -> ScanTurn:
    """The loop whose products read weights as they lie: transposes that wait for nothing turn them."""
    waits, names = _waits_of(turn), Names(turn.program.variables)
    turned: dict[Variable, Op] = {}
    ops: list[Op] = []
    for op in turn.program.ops:
        for v in dict.fromkeys(op.inputs):
            if waits[v] is Waits.NOTHING and _rows_beside(op, v, 1) in _ROWS and size(v) <= _LARGEST:
                new = turned.get(v) or _transpose(v, names, op.made_by)
                if (product := _reading(op, v, new)) is not None:
                    op = product
                    ops += [] if v in turned else [new]
                    turned[v] = new
        ops.append(op)
    return replace(turn, program=replace(turn.program, ops=tuple(ops))) if turned else turn


def _reads_turned(turn: ScanTurn) -> bool:
    """Whether a product reads the transpose of what is the same in all turns, which gains before the loop."""
    waits, makers = _waits_of(turn), producers(turn.program)
    return any(
        waits[v] is Waits.NOTHING
        and v in makers
        and makers[v].primitive.moves is Moves.PERMUTES
        and _rows_beside(op, v, 0) in _ROWS
        for op in turn.program.ops
        for v in op.inputs
    )


def _rows_beside(op: Op, v: Variable, across: int) -> int:
    """The rows that a product multiplies with a matrix, which lies along it, or ``across``; else 0."""
    pair = _factors(op) if op.primitive.is_product and v.ndim == 2 else ()
    if len(pair) != 2 or pair.count(v) != 1:
        return 0
    (call,) = op.body.calls
    summed, batched = call.params["dimension_numbers"]
    side = pair.index(v)
    natural = 1 - side
    if any(batched) or tuple(summed[side]) != (natural ^ across,):
        return 0
    return int(pair[1 - side].size // max(v.shape[natural ^ across], 1))


def _transpose(v: Variable, names: Names, made_by: Pass) -> Op:
    turned = replace(v, name=names.new(f"{v.name}.T"), shape=v.shape[::-1])
    return op_of("transpose", [v], [turned], lambda x: [lax.transpose(x, (1, 0))], made_by)


def _reading(op: Op, v: Variable, transpose: Op) -> Op | None:
    """A product that reads the transpose of one of its operands; None where that cannot be."""
    place, (turned,) = op.inputs.index(v), transpose.outputs
    back = op_of("transpose", [turned], [v], lambda x: [lax.transpose(x, (1, 0))], op.made_by)
    body = reading_before(op.body, place, back.body)
    inputs = (*op.inputs[:place], turned, *op.inputs[place + 1 :])
    return None if body is None else replace(op, inputs=inputs, body=body)


def _holds_sums(v: Variable, added: Variable) -> bool:
    """Whether a value may be summed over all turns before it becomes what each turn adds.

    A sum in float16 exceeds its range sooner than what is made of each summand, a wider number or a part.
    """
    return bool(v.is_float and v.dtype == added.dtype and limits_of(v.dtype).maxexp >= 128)


def _adds_arrays(op: Op) -> bool:
    """Whether it adds two arrays of one shape."""
    return op.primitive.adds and len(op.inputs) == 2 and op.inputs[0].shape == op.inputs[1].shape


def _is_linear(op: Op) -> bool:
    """Whether the sum over turns may be taken before an op, which reads one value and gives one."""
    if len(op.outputs) != 1 or sum(isinstance(x, int) for x in op.body.operands) != 1:
        return False
    first = isinstance(op.body.operands[0], int)
    linear = op.primitive.linear
    return linear is Linear.EACH or (first and (linear is Linear.FIRST or op.primitive.lays_out))
