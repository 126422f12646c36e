"""A region as one op: a loop over chunks of its rows, which the backward pass runs again chunk by chunk.

One turn is a Program of its own, the ops of the region on fewer rows. It is wrapped in ``jax.checkpoint``,
so that the loop keeps nothing but its inputs, and the loop in the backward pass holds the logits of one chunk
and their gradient. Gradients of what all chunks read, such as the weight, are added up turn by turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onward.core.homes import own_scopes
from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.by_number import by_number
from onward.core.jaxprs.shortened import shortened
from onward.core.jaxprs.tracing import traced
from onward.core.lower import lower
from onward.core.marks import CHUNK
from onward.core.names import Names
from onward.core.program import Op, Program, Variable, programs_within
from onward.core.words import Kind
from onward.develop.chunk.numbered import is_numbering, operands_of
from onward.develop.chunk.region import Region
from onward.develop.chunk.rows import Rows


class Chunks(Body):
    """The body of a ``chunk`` op, which lets the Program of one chunk be inspected."""

    def __init__(self, closed: Any, plan: ChunkPlan) -> None:
        super().__init__(closed)
        self.plan, self.turn = plan, plan.turn

    @property
    def attributes(self) -> Mapping[str, str]:
        """How many chunks there are."""
        return {"chunks": str(self.plan.count)}


@programs_within.register
def _programs_within(body: Chunks) -> Mapping[str, Program]:
    """The Program that is run on each chunk."""
    return {"chunk": body.turn}


class ChunkPlan:
    """The plan of the loop: what is cut, what all chunks read, what is added up and what is joined.

    Args:
        region: the ops.
        rows: how they compute row by row.
        count: how many chunks; it divides all lengths that count rows.
    """

    def __init__(self, region: Region, rows: Rows, count: int) -> None:
        self.region, self.rows, self.count = region, rows, count
        self.cut = [v for v in region.inputs if v in rows.axis]
        self.shared = [v for v in region.inputs if v not in rows.axis]
        self.added = [v for v in region.results if v in rows.totals]
        self.joined = [v for v in region.results if v not in rows.totals]

    @cached_property
    def turn(self) -> Program:
        """One turn as a Program: the number of the chunk, what is cut, what all read."""
        values = [*self.cut, *self.shared, *(v for op in self.region.ops for v in op.outputs)]
        small = {v: replace(v, shape=self.shape(v), kind=Kind.ACTIVATION) for v in values}
        given = [replace(small[v], kind=Kind.DATA) for v in (*self.cut, *self.shared)]
        small.update(zip((*self.cut, *self.shared), given, strict=True))
        chunk = Variable(Names(v.name for v in values).new("chunk"), (), np.dtype(np.int32), Kind.DATA)
        ops = tuple(self.small_op(op, small, chunk) for op in self.region.ops)
        outputs = tuple(small[v] for v in (*self.added, *self.joined))
        return Program("chunk", (chunk, *given), ops=ops, outputs=outputs)

    def shape(self, v: Variable) -> tuple[int, ...]:
        """The shape of a chunk of a value."""
        at = self.rows.axis.get(v)
        return tuple(n // self.count if i == at else n for i, n in enumerate(v.shape))

    def small_op(self, op: Op, small: Mapping[Variable, Variable], chunk: Variable) -> Op:
        """An op on the rows of a chunk."""
        inputs = tuple(small[v] for v in op.inputs)
        outputs = tuple(small[v] for v in op.outputs)
        body = _shortened(op, inputs, outputs)
        if body is None:
            raise CannotShortenError(op)
        by_number = self.by_number(op, body, small)
        if by_number is not None:
            inputs, body = (*inputs, chunk), by_number
        return replace(op, inputs=inputs, outputs=outputs, body=body, primal=None)

    def by_number(self, op: Op, body: Body, small: Mapping[Variable, Variable]) -> Body | None:
        """The Body that also reads which chunk it is, if numbers of rows are made or read in an op."""
        at = self.rows.axis.get(op.outputs[0])
        if at is not None and is_numbering(op) and next(op.body.calls).params["dimension"] == at:
            return _numbering(small[op.outputs[0]], at)
        if op not in self.rows.columns:
            return None
        table, index = operands_of(op)[:2]
        assert table is not None
        assert index is not None
        rows = small[table].shape[self.rows.axis[table]]
        return _looking_up(body, op.inputs.index(index), self.rows.columns[op], rows)

    def op(self) -> Op:
        """The one op."""
        inputs, results, product = self.region.inputs, self.region.results, self.region.product

        def run(*values: Any) -> list[Any]:
            found = self.run(dict(zip(inputs, values, strict=True)))
            return [found[v] for v in results]

        body = Chunks(traced(run, *(v.aval for v in inputs)), self)
        return Op(CHUNK, inputs, results, body, scope=product.scope, source=product.source)

    def run(self, env: Mapping[Variable, Any]) -> Mapping[Variable, Any]:
        """The results of the region, from its inputs."""
        one = jax.checkpoint(self.one([_wide(env[v]) for v in self.shared]), prevent_cse=False)
        zeros = [jnp.zeros(v.shape, _wide_dtype(v.dtype)) for v in self.added]
        numbers = jnp.arange(self.count, dtype=np.int32)
        cut = [self.pieces(env[v], v) for v in self.cut]
        totals, parts = lax.scan(one, zeros, (numbers, cut))
        return {
            **{v: x.astype(v.dtype) for v, x in zip(self.added, totals, strict=True)},
            **{v: self.whole(x, v) for v, x in zip(self.joined, parts, strict=True)},
        }

    def one(self, shared: list[Any]) -> Callable[[list[Any], Any], tuple[list[Any], list[Any]]]:
        """One turn as a function of the sums so far and what is cut, where all read what is shared."""
        count = len(self.added)
        compute = lower(self.turn, self.turn.outputs, scopes=own_scopes(self.turn))

        def turn(carry: list[Any], given: Any) -> tuple[list[Any], list[Any]]:
            number, cut = given
            same = [_as_before(x, v) for x, v in zip(shared, self.shared, strict=True)]
            found = compute([], [number, *cut, *same])
            sums = [total + x.astype(total.dtype) for total, x in zip(carry, found, strict=False)]
            return sums, found[count:]

        return turn

    def pieces(self, x: Any, v: Variable) -> Any:
        """An array as ``[chunks, ...]``."""
        at = self.rows.axis[v]
        laid = x.reshape(*v.shape[:at], self.count, v.shape[at] // self.count, *v.shape[at + 1 :])
        return jnp.moveaxis(laid, at, 0)

    def whole(self, parts: Any, v: Variable) -> Any:
        """An array from ``[chunks, ...]``."""
        return jnp.moveaxis(parts, 0, self.rows.axis[v]).reshape(v.shape)


class CannotShortenError(Exception):
    """An op that cannot be computed for fewer rows."""

    def __init__(self, op: Op) -> None:
        super().__init__(op.type)
        self.op = op


def _shortened(op: Op, inputs: Sequence[Variable], outputs: Sequence[Variable]) -> Body | None:
    """The Body of an op for these in place of its Variables; None if there is none."""
    if next(op.body.calls).inner:
        return by_number(op.body, outputs[0].shape)
    return shortened(op.body, [v.aval for v in inputs], [v.shape for v in outputs])


def _numbering(v: Variable, at: int) -> Body:
    """The op that numbers the rows of a chunk as those of the whole, exactly in any dtype."""

    def run(chunk: Any) -> list[Any]:
        places = lax.broadcasted_iota(np.int32, v.shape, at)
        return [(places + chunk * v.shape[at]).astype(v.dtype)]

    return body_of(run, _NUMBER)


def _looking_up(body: Body, at: int, column: int, rows: int) -> Body:
    """The op that looks up rows of a chunk by the numbers that they have in the whole."""

    def run(*values: Any) -> list[Any]:
        *given, chunk = values
        index = given[at]
        given[at] = index.at[..., column].add(-chunk.astype(index.dtype) * rows)
        return body(*given)

    return body_of(run, *body.in_types, _NUMBER)


_NUMBER = jax.ShapeDtypeStruct((), np.int32)


def _wide_dtype(dtype: Any) -> Any:
    """The dtype in which numbers of this one are added up: float32 at least."""
    return np.dtype(np.float32) if jnp.issubdtype(dtype, np.inexact) and dtype.itemsize < 4 else dtype


def _wide(x: Any) -> Any:
    """A value that all chunks read, so that its gradient is added up without loss."""
    return x if _wide_dtype(x.dtype) == x.dtype else x.astype(_wide_dtype(x.dtype))


def _as_before(x: Any, v: Variable) -> Any:
    return x if x.dtype == v.dtype else x.astype(v.dtype)
