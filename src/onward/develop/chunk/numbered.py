"""Integers that number the rows of an array from 0, as ``jnp.arange`` gives them, on their way to a look-up.

``logits[jnp.arange(rows), labels]`` looks each row up by its number. Such indices are the rows' own; any
others may ask for rows that are not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import jax.numpy as jnp
import numpy as np

from onward.core.jaxprs.body import Call
from onward.core.primitives.table import of
from onward.core.primitives.traits import Moves
from onward.core.program import Op, Variable
from onward.core.wiring import wiring

Columns = Mapping[int | None, int]
"""For each column of indices that numbers rows (None: the only one) the dimension along which it does."""

Numbered = Mapping[Variable, Columns]

_KEPT = (Moves.REPEATS, Moves.RESHAPES, Moves.KEEPS, Moves.ROUNDS)


def operands_of(op: Op) -> list[Variable | None]:
    """The operands of an op's equation; None for a number that is written in it."""
    return [op.inputs[o] if isinstance(o, int) else None for o in op.body.operands]


def is_numbering(op: Op) -> bool:
    """Whether an op counts from 0."""
    return op.primitive.moves is Moves.MAKES and "dimension" in next(op.body.calls).params


def numbered(ops: Iterable[Op]) -> Numbered:
    """The values that number rows.

    >>> import jax.numpy as jnp, onward as ow
    >>> program = ow.trace(lambda x: x[jnp.arange(3), jnp.array([0, 2, 1])], jnp.ones((3, 3)))
    >>> {v.name: columns for v, columns in numbered(program.ops).items() if len(v.shape) == 2}
    {'broadcast_in_dim': {None: 0}, 'concatenate': {0: 0}}
    """
    found: dict[Variable, Columns] = {}
    never: set[Variable] = set()  # whether a number is negative
    for op in ops:
        calls = list(op.body.calls)
        if len(calls) != 1 or len(op.outputs) != 1 or calls[0].inner:
            continue
        if _asks_for_negative(op, calls[0], found):
            never.update(op.outputs)
        elif columns := _columns(op, calls[0], found, never):
            found[op.outputs[0]] = columns
    return found


def _asks_for_negative(op: Op, call: Call, found: Numbered) -> bool:
    """Whether an op asks if the numbers of rows are below 0."""
    if call.primitive != "lt" or operands_of(op)[0] not in found:
        return False
    number = op.body.numbers[1]
    return number is not None and not np.any(number)


def _columns(op: Op, call: Call, found: Numbered, never: set[Variable]) -> Columns:
    """Of the result of an op."""
    if is_numbering(op):
        return _counted(op.outputs[0], call.params["dimension"])
    values, row = operands_of(op), of(call.primitive)
    known = [{} if v is None else found.get(v, {}) for v in values]
    if row.chooses and row.index is not None and values[0] in never:
        return known[1]
    if row.moves is Moves.JOINS and call.params.get("dimension") == op.outputs[0].ndim - 1:
        return _joined(values, found)
    if row.moves in _KEPT and known[0]:
        return _moved(op, call, known[0])
    return {}


def _joined(values: Iterable[Variable | None], found: Numbered) -> Columns:
    """Of columns side by side."""
    columns: dict[int | None, int] = {}
    at = 0
    for v in values:
        if v is None:
            return {}
        if v in found and v.shape[-1] == 1 and None in found[v]:
            columns[at] = found[v][None]
        at += v.shape[-1]
    return columns


def _moved(op: Op, call: Call, columns: Columns) -> Columns:
    """Of the same numbers in another shape, if they still number as many."""
    source, result = op.inputs[0], op.outputs[0]
    if set(columns) != {None}:
        return {}
    for (_, i), (_, j) in wiring(call).ties:
        if i == columns[None] and source.shape[i] == result.shape[j]:
            return _counted(result, j)
    return {}


def _counted(v: Variable, dimension: int) -> Columns:
    """The one column of integers that count along a dimension, if their dtype counts as far."""
    far = jnp.issubdtype(v.dtype, np.integer) and np.iinfo(v.dtype).max >= v.shape[dimension] - 1
    return {None: dimension} if far else {}
