"""Weights that every turn of a loop would lay out anew for its product: turned once, before the loop.

A product reads its left operand along the last axis, its right one along the first. Where a loop has a weight
the other way round, as the gradient of ``h @ w`` has, XLA's CPU compiler turns it in every turn, which for
few rows can cost more than the product: at 4 rows 0.35 to 0.6 of the time of a loop is left, at 16 rows 0.7
to 0.9, at 128 all of it (weights of 128 x 512 to 512 x 512, two cores, jax 0.10 and 0.12).
"""

from __future__ import annotations

from dataclasses import replace

from jax import lax

from onward.core.builder import op_of
from onward.core.cost import size
from onward.core.jaxprs.products import reading_before
from onward.core.names import Names
from onward.core.primitives.traits import Moves
from onward.core.program import Op, Variable
from onward.core.turn import ScanTurn
from onward.core.walk import producers
from onward.core.words import Pass
from onward.develop.fission.waits import Waits, factors, waits_of

_ROWS = range(4, 65)  # of the other operand: fewer and more gain nothing
_LARGEST = 64 * 2**20  # bytes of a weight, of which there are two then


def with_turned_weights(turn: ScanTurn) -> ScanTurn:
    """The loop whose products read weights as they lie: transposes that wait for nothing turn them."""
    waits, names = waits_of(turn), Names(turn.program.variables)
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


def reads_turned(turn: ScanTurn) -> bool:
    """Whether a product reads the transpose of what is the same in all turns, which gains before the loop."""
    waits, makers = waits_of(turn), producers(turn.program)
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
    pair = factors(op) if op.primitive.is_product and v.ndim == 2 else ()
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
