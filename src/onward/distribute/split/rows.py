"""Tables of which a step reads a few rows: the trainer gets these rows alone, and sends their gradients.

A parameter is such a table if every op that reads it looks up rows of it, at places that the data alone tell,
and if these are fewer than its rows. In the trainer's Program it is as long as the batch has lookups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.jaxprs.body import body_of
from onward.core.jaxprs.patterns import RowLookup, row_lookup
from onward.core.names import Names
from onward.core.program import Op, Program, Variable
from onward.core.walk import ancestors, consumers, needed_ops, prune, substitute
from onward.core.words import Kind

_INTEGER = np.dtype(np.int32)


@dataclass(frozen=True)
class Table:
    """A parameter that travels by rows.

    Attributes:
        parameter: all of it, as the servers keep it.
        rows: the rows of a batch, as the trainer gets them; more than it reads are filled up with zeros.
        places: which rows are looked up: integers ``[..., 1]``, which ``rows_read`` reads.
        positions: in the trainer's Program, where among ``rows`` each of these is.
        computed: in the forward Program, what says which rows are looked up; it may point outside.
        clips: for each of these, whether the nearest row gets the gradient where it points outside.
    """

    parameter: Variable
    rows: Variable
    places: tuple[Variable, ...]
    positions: tuple[Variable, ...]
    computed: tuple[Variable, ...]
    clips: tuple[bool, ...]


@dataclass(frozen=True)
class RowsRead:
    """The rows of a table that a batch reads.

    Attributes:
        rows: their numbers, each once, in order.
        moved: which of them get a gradient; the others are read for places outside of the table.
        positions: where among them each place finds its own.
    """

    rows: np.ndarray
    moved: np.ndarray
    positions: tuple[np.ndarray, ...]


def rows_read(places: Sequence[np.ndarray]) -> RowsRead:
    """The rows that are looked up at these places of a table; a row that is only read is told as ``~row``.

    >>> found = rows_read([np.array([[7], [2]]), np.array([[2], [~9]])])
    >>> found.rows, found.moved, [x.ravel() for x in found.positions]
    (array([2, 7, 9]), array([ True,  True, False]), [array([1, 0], dtype=int32), array([0, 2], dtype=int32)])
    """
    read = [np.where(x < 0, ~x, x) for x in places]
    rows = np.unique(np.concatenate([x.ravel() for x in read]))
    moved = np.isin(rows, np.concatenate([x[x >= 0] for x in places]))
    return RowsRead(rows, moved, tuple(np.searchsorted(rows, x).astype(_INTEGER) for x in read))


def tables_in(forward: Program, parameters: Sequence[Variable], always: bool = False) -> tuple[Table, ...]:
    """The tables among the parameters of a forward Program; ``always``: even if all rows would be fewer."""
    readers = consumers(forward)
    kept = set(forward.outputs) | set(forward.next_state.values())
    names = Names(forward.variables)
    found = []
    for p in parameters:
        ops = readers.get(p, ())
        if not ops or p in kept or not all(_is_lookup(forward, p, op) for op in ops):
            continue
        computed = tuple(dict.fromkeys(op.inputs[1] for op in ops))
        count = sum(prod(v.shape[:-1]) for v in computed)
        if always or count < p.shape[0]:
            rows = replace(p, shape=(count, *p.shape[1:]))
            places, positions = (
                tuple(
                    Variable(names.new(f"{what}({p.name})"), (*v.shape[:-1], 1), _INTEGER, kind)
                    for v in computed
                )
                for what, kind in (("places", Kind.ACTIVATION), ("positions", Kind.DATA))
            )
            clips = tuple(any(_lookup(op).clips for op in ops if op.inputs[1] is v) for v in computed)
            found.append(Table(p, rows, places, positions, computed, clips))
    return tuple(found)


def why_whole(program: Program, forward: Program, p: Variable) -> str:
    """Why a parameter of a training Program travels whole, as the end of a sentence about it."""
    if p not in [trained for trained, _ in program.gradients]:
        return "it is not trained"
    p = forward[p.name]
    ops = consumers(forward).get(p, ())
    if p in (*forward.outputs, *forward.next_state.values()):
        return "the function returns it"
    if other := next((op for op in ops if not _is_lookup(forward, p, op)), None):
        return (
            f"{other.type}{other.at} reads it, and by rows goes what is read by lookups of whole rows alone "
            "(table[ids]), at places that the data tell"
        )
    count = sum(prod(op.inputs[1].shape[:-1]) for op in ops)
    return f"a batch looks up {count} rows, and it has {p.shape[0]}"


def by_rows(forward: Program, tables: Sequence[Table]) -> Program:
    """The forward Program that reads each table's rows of the batch in place of the table."""
    if not tables:
        return forward
    lookups = {
        (t.parameter, place): position
        for t in tables
        for place, position in zip(t.computed, t.positions, strict=True)
    }
    rows = {t.parameter: t.rows for t in tables}
    ops = tuple(
        _from_rows(op, rows, lookups) if op.inputs[:1] and op.inputs[0] in rows else op for op in forward.ops
    )
    looked = replace(
        forward,
        inputs=(*forward.inputs, *(v for t in tables for v in t.positions)),
        ops=ops,
        initializers=tuple(op for op in forward.initializers if rows.keys().isdisjoint(op.outputs)),
        signature=None,
        recipe=None,
    )
    needed = needed_ops(looked, (*looked.outputs, *looked.next_state.values()))
    return substitute(replace(looked, ops=tuple(needed)), rows)


def places_of(forward: Program, tables: Sequence[Table]) -> Program:
    """The part of the forward Program that computes which rows are looked up.

    A place outside of the table asks for the nearest row, as one device reads it unless told to fill; that
    row gets the gradient only where it was told to clip.
    """
    ops = tuple(
        _inside(t, *place) for t in tables for place in zip(t.computed, t.places, t.clips, strict=True)
    )
    longer = replace(forward, ops=(*forward.ops, *ops), signature=None, recipe=None)
    return prune(longer, [v for t in tables for v in t.places])


def _is_lookup(forward: Program, p: Variable, op: Op) -> bool:
    """Whether an op reads rows of ``p`` at places that the data alone tell."""
    if len(op.inputs) != 2 or op.inputs[0] is not p or op.inputs[1] is p or row_lookup(op.body) is None:
        return False
    return ancestors(forward, [op.inputs[1]]).isdisjoint(forward.state)


def _lookup(op: Op) -> RowLookup:
    """The lookup that an op is known to be."""
    lookup = row_lookup(op.body)
    assert lookup is not None
    return lookup


def _inside(table: Table, computed: Variable, place: Variable, clips: bool) -> Op:
    """The op that makes row numbers computed from the data places of rows that the table has."""
    count = table.parameter.shape[0]

    def inside(at: Any) -> list[jax.Array]:
        row = jnp.clip(_wide(at[..., :1]), 0, count - 1).astype(_INTEGER)
        return [row if clips else jnp.where(_is_inside(at, count)[..., None], row, ~row)]

    return Op("inside", (computed,), (place,), body_of(inside, computed.aval))


def _from_rows(
    op: Op, rows: Mapping[Variable, Variable], lookups: Mapping[tuple[Variable, Variable], Variable]
) -> Op:
    """The lookup among the rows of the batch; where a place is outside, it reads what one device does.

    Unless told to clip, one device drops the gradient there.
    """
    table, place = op.inputs
    position = lookups[table, place]
    lookup = _lookup(op)
    shape = op.outputs[0].shape

    def look_up(values: Any, position: Any, *at: Any) -> list[jax.Array]:
        found = values.at[position[..., 0]].get(mode="promise_in_bounds")
        for a in at:
            known = _is_inside(a, table.shape[0]).reshape(*position.shape[:-1], *(1 for _ in table.shape[1:]))
            nearest = jax.lax.stop_gradient(found)
            outside = nearest if lookup.fill is None else jnp.asarray(lookup.fill, found.dtype)
            found = jnp.where(known, found, outside)
        return [found.reshape(shape)]

    few = rows[table]
    others = (position,) if lookup.clips else (position, place)
    body = body_of(look_up, *(v.aval for v in (few, *others)))
    return replace(op, type="lookup", inputs=(table, *others), body=body)


def _is_inside(places: Any, rows: int) -> Any:
    """Whether the row at each place is one of so many, and begins where rows begin."""
    wide = _wide(places)
    return (wide[..., 0] >= 0) & (wide[..., 0] < rows) & (wide[..., 1:] == 0).all(-1)


def _wide(places: Any) -> Any:
    """Integers in a dtype that can count the rows of a table."""
    return places.astype(_INTEGER) if places.dtype.itemsize < _INTEGER.itemsize else places
