"""The cost of an op: operations on numbers, bytes read and written, bytes exchanged between devices.

Operations are counted by ``core.flops``, as XLA counts them: two for each multiply-add of a product. A loop
costs its length times its body, where XLA counts one turn; of the branches of a ``cond`` the dearest counts;
a ``while`` loop, whose length is not known, counts as one turn.

Bytes are those of an op that reads its inputs and writes its outputs once; a loop and a branch, those of the
ops within. An op that picks rows of a table reads the rows, not the table.

>>> import jax.numpy as jnp, onward as ow
>>> program = ow.trace(lambda w, x: jnp.sum(x @ w), jnp.ones((8, 4)), jnp.ones((2, 8)))
>>> cost(program.ops[0])
Cost(flops=128, read=192, written=32)
>>> cost(program).flops
135
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any
from weakref import WeakKeyDictionary

from onward.core.check import expect_program
from onward.core.described import DescribedBody
from onward.core.flops import flops, has_rule
from onward.core.jaxprs.body import Body, Call
from onward.core.jaxprs.equations import Type
from onward.core.jaxprs.signature import BodySignature
from onward.core.primitives.table import of
from onward.core.primitives.traits import Moves, Runs, Work
from onward.core.program import Op, Program
from onward.core.variable import holds_keys


@dataclass(frozen=True, repr=False)
class Cost:
    """The cost of an op or a Program: operations, bytes read and written, bytes exchanged.

    Attributes:
        flops: operations on numbers.
        read: bytes read from memory.
        written: bytes written to memory.
        exchanged: bytes that each device puts into collectives.
        transcendentals: how many of the operations are exponentials, logarithms, roots and their like.
        endless: whether a loop is in it whose length is not known before it runs.
    """

    flops: int = 0
    read: int = 0
    written: int = 0
    exchanged: int = 0
    transcendentals: int = 0
    endless: bool = False

    @property
    def bytes(self) -> int:
        """Bytes read and written."""
        return self.read + self.written

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            self.flops + other.flops,
            self.read + other.read,
            self.written + other.written,
            self.exchanged + other.exchanged,
            self.transcendentals + other.transcendentals,
            self.endless or other.endless,
        )

    def __mul__(self, times: int) -> Cost:
        return Cost(
            times * self.flops,
            times * self.read,
            times * self.written,
            times * self.exchanged,
            times * self.transcendentals,
            self.endless,
        )

    def __repr__(self) -> str:
        exchanged = f", exchanged={self.exchanged}" if self.exchanged else ""
        return f"Cost(flops={self.flops}, read={self.read}, written={self.written}{exchanged})"


def cost(of: Op | Program) -> Cost:
    """Compute the cost of an op, or of all ops of a Program together.

    On many devices: the cost on each of them, with the bytes that it puts into collectives.

    Args:
        of: an op, or a Program at any stage.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> def loss(w, x):
        ...     return jnp.sum((x @ w) ** 2)
        >>> program = ow.SGD(0.1).minimize(loss, jnp.ones((8, 4)), jnp.ones((2, 8)))
        >>> {op.type: ow.cost(op).flops for op in program.ops if "dot" in op.type}
        {'dot_general': 128, 'dot_general_grad': 128}
    """
    if isinstance(of, Op):
        return _of_body(of.body)
    expect_program(of, "cost")
    return sum(map(cost, of.ops), Cost())


def size(v: Any) -> int:
    """The bytes of anything with a shape and a dtype; a random key counts as the words it holds.

    >>> import jax
    >>> size(jax.ShapeDtypeStruct((3, 2), "float16"))
    12
    """
    width = 8 if holds_keys(v.dtype) else int(v.dtype.itemsize)
    return int(prod(v.shape)) * width


_known: WeakKeyDictionary[BodySignature, Cost] = WeakKeyDictionary()


def _of_body(body: Body) -> Cost:
    """The cost of a Body; counted once for all that compute the same."""
    found = _known.get(body.signature)
    if found is None:
        found = _known[body.signature] = _counted(body)
    return found


def _counted(body: Body) -> Cost:
    if isinstance(body, DescribedBody):
        return Cost(**body.description.cost)
    calls = list(body.calls)
    parts = list(map(_of_call, calls))
    total = sum(parts, Cost())
    if len(parts) == 1 or any(of(call.primitive).runs in _CONTROL for call in calls):
        return total
    return replace(total, read=_bytes(body.in_types), written=_bytes(body.out_types))


def _of_call(call: Call) -> Cost:
    row = of(call.primitive)
    if row.runs in _CONTROL:
        return _CONTROL[row.runs](call)
    runs = [] if has_rule(call) else [body for name in _RUN for body in call.inner.get(name, ())]
    within = sum(map(_of_body, runs), Cost())
    own = 0 if runs else flops(call)
    transcendentals = own if row.work is Work.ROOT else 0
    read, written = _moved(call)
    exchanged = _bytes(call.operands) if row.exchanges is not None else 0
    return Cost(
        own + within.flops,
        read,
        written,
        exchanged + within.exchanged,
        transcendentals + within.transcendentals,
        within.endless,
    )


def _bytes(types: Iterable[Type]) -> int:
    return sum(map(size, types))


# What runs other ops: their costs, as often as they run.

_RUN = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def _scan(call: Call) -> Cost:
    (body,) = call.inner["jaxpr"]
    return _each_apart(body) * int(call.params["length"])


def _while(call: Call) -> Cost:
    return replace(_call(call), endless=True)


def _cond(call: Call) -> Cost:
    return max(map(_each_apart, call.inner["branches"]), key=lambda cost: (cost.flops, cost.bytes))


def _call(call: Call) -> Cost:
    return sum((_each_apart(body) for bodies in call.inner.values() for body in bodies), Cost())


def _solve(call: Call) -> Cost:
    """The solver alone: what it is checked against and differentiated by does not run."""
    given = call.params["jaxprs"]
    before = sum(body is not None for body in (given.matvec, given.vecmat))
    return _each_apart(call.inner["jaxprs"][before])


def _each_apart(body: Body) -> Cost:
    """The cost of ops that a person wrote one by one, each of which reads and writes."""
    return sum(map(_of_call, body.calls), Cost())


_CONTROL: Mapping[Runs | None, Callable[[Call], Cost]] = {
    Runs.SCAN: _scan,
    Runs.WHILE: _while,
    Runs.BRANCH: _cond,
    Runs.SOLVE: _solve,
    Runs.AGAIN: _call,
    Runs.DEVICES: _call,
}

# What a primitive reads and writes, where that is not all of its operands and results.


def _moved(call: Call) -> tuple[int, int]:
    results, operands, row = _bytes(call.results), call.operands, of(call.primitive)
    if row.moves in (Moves.LOOKS_UP, Moves.CUTS_AT, Moves.CUTS):
        return results + _bytes(operands[1:]), results
    if row.update:
        return _bytes(operands[1:]), size(operands[row.update])
    return _bytes(operands), results
