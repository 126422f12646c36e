"""Fences: values of a deep network that a compiler would compute again for every reader, and again.

XLA's CPU compiler fuses a chain of cheap operations into each operation that reads its result. One that
has but one large operand it always computes again, since that saves memory traffic: a residual sum plus a
bias, times a number, normalized. When such values build on each other, as from layer to layer, the hundredth
reader computes a hundred layers of sums. A fence behind such a value makes it be stored once.

An ``optimization_barrier`` would not do: that compiler removes it before it fuses. A fence is
``max(x, x - 1)``, which is ``x`` for each number, and which is too much of an operation to be done twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jax.numpy as jnp

from onward.core.builder import with_behind
from onward.core.check import expect_program
from onward.core.jaxprs.body import Body, Wire, body_of
from onward.core.jaxprs.equations import Type
from onward.core.jaxprs.patterns import primitives_in
from onward.core.marks import FENCE, SUM
from onward.core.primitives.table import of
from onward.core.primitives.traits import OnCpu
from onward.core.program import Op, Program, Variable
from onward.core.structure import is_word
from onward.core.transform import transform
from onward.core.words import Pass

_NESTED = 3  # so many values that would be computed again build on each other before one is fenced


@transform
def fence(program: Program, platform: str = "cpu") -> Program:
    """Put fences where XLA's CPU compiler would compute a long-lived value again and again.

    Adds an op ``fence`` behind such a value, which later ops read in place of it; the value keeps its name,
    and every number of the step stays what it was. It comes last, behind backward and update: a Program that
    is replicated, rolled or differentiated afterwards may need other fences. On other platforms, and where
    ``worth_fencing`` says no, the Program stays as it is.

    Args:
        program: a Program, as a rule one that trains.
        platform: what it should run on, as ``jax.default_backend()`` says it.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> def loss(scales, x):
        ...     for scale in scales:
        ...         x = (x + jnp.tanh(x @ jnp.ones((2, 2)))) * scale
        ...     return jnp.mean(x**2)
        >>> program = ow.trace(loss, [jnp.float32(0.9)] * 8, jnp.ones((3, 2)))
        >>> [v.name for v in fences(fence(program))]
        ['fenced(mul_2)', 'fenced(mul_5)']
    """
    places = _places(program) if is_word(platform, ["cpu"]) else ()
    if not places:
        return program
    return with_behind(program, frozenset(places), FENCE, "fenced", lambda v: _body(v.shape, v.dtype))


def worth_fencing(program: Program, platform: str = "cpu") -> tuple[bool, str]:
    """Whether ``fence`` would change this Program, and why, in words; it only looks.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> worth_fencing(ow.trace(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3)))
        (False, 'no value that is read again and again builds on 2 others like it')
    """
    expect_program(program, "worth_fencing")
    if not is_word(platform, ["cpu"]):
        return False, f"only XLA's CPU compiler computes cheap values again; this is for {platform}"
    places = _places(program)
    if not places:
        return False, f"no value that is read again and again builds on {_NESTED - 1} others like it"
    names = ", ".join(v.name for v in places[:3]) + (", ..." if len(places) > 3 else "")
    return True, f"{len(places)} values would be computed again for each reader: {names}"


def fences(program: Program) -> tuple[Variable, ...]:
    """The fences in a Program, as the Variables that are read in place of what they stand behind.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> ow.graph.fences(ow.trace(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3)))
        ()
    """
    expect_program(program, "fences")
    return tuple(op.outputs[0] for op in program.ops if op.type is FENCE)


@cache
def _body(shape: tuple[int, ...], dtype: Any) -> Body:
    """A body that returns its input, NaN, infinity and minus zero too, by an operation on two operands."""
    return body_of(lambda x: [jnp.maximum(x, x - 1)], Type(shape, dtype))


@dataclass
class _Value:
    """A model of how the compiler would compute and store one value.

    Attributes:
        variable: the Variable that stands for it; Variables that only pass it on share this entry.
        reads: how many ops read it.
        generation: how many operations that are never fused, such as products, lead to it one by one.
        lasting: whether some op reads it together with a value of a later generation, or is never fused.
        stored: those values in memory that computing it reads, of its own size; itself if it is stored.
        nested: how many values that are computed for each reader lie one inside the other in it.
        spread: whether it only repeats a smaller array.
    """

    variable: Variable
    reads: int = 0
    generation: int = 0
    lasting: bool = False
    stored: frozenset[Variable] = field(default_factory=frozenset)
    nested: int = 0
    spread: bool = False


def _places(program: Program) -> tuple[Variable, ...]:
    """The values to fence, first ones first: each is then stored, and the next ones build on that."""
    values = _values(program)
    found = []
    for op in program.ops:
        if op.made_by is Pass.UPDATE or op.made_by is Pass.COLLECTIVE:
            continue
        for v in op.outputs:
            value = values[v]
            if value.variable is v and _look(op, value, values) and _can_be_fenced(v):
                value.stored, value.nested = frozenset([v]), 0
                found.append(v)
    return tuple(found)


def _values(program: Program) -> Mapping[Variable, _Value]:
    """The value of every Variable: one for all that are only passed on."""
    known = {v: _Value(v) for v in (*program.inputs, *program.state, *program.constants)}
    for op in program.ops:
        wires = op.body.wires
        latest = _read(op, [known[v] for v in op.inputs]) if None in wires else 0
        for v, wire in zip(op.outputs, wires, strict=True):
            if isinstance(wire, Wire) and wire.input is not None:
                known[v] = known[op.inputs[wire.input]]
            else:
                known[v] = _Value(v, generation=latest, spread=_spreads(op, v))
    for value in known.values():
        value.stored = frozenset([value.variable])
    return known


def _read(op: Op, read: Sequence[_Value]) -> int:
    """Note that an op reads these values, and return the generation of its results."""
    latest = max((value.generation for value in read), default=0)
    fused = all(of(p).on_cpu is not OnCpu.APART for p in primitives_in(op.body))
    for value in read:
        value.reads += 1
        value.lasting |= not fused or value.generation < latest
    return latest + (not fused)


def _look(op: Op, value: _Value, values: Mapping[Variable, _Value]) -> bool:
    """Find what computing a value reads, and tell whether it is to be fenced."""
    if op.type is FENCE or not _is_cheap(op.body):
        return False
    v = value.variable
    large = [values[i] for i in op.inputs if i.size >= v.size]
    if value.reads > 1 and value.lasting and _operands(op, v, values) > 1:
        return False
    value.stored = frozenset().union(*(i.stored for i in large))
    value.nested = max((i.nested for i in large), default=0) + (value.reads > 1 and len(value.stored) > 1)
    return value.reads > 1 and value.nested >= _NESTED


def _operands(op: Op, v: Variable, values: Mapping[Variable, _Value]) -> int:
    """How many operands of the size of the result the last operation behind it has: 1, or more."""
    large = {id(values[i]): values[i] for i in op.inputs if i.size >= v.size}
    if op.type is SUM and len(op.inputs) > 1:  # added up from the left
        return 1 if values[op.inputs[-1]].spread else 2
    return sum(not value.spread for value in large.values())


def _spreads(op: Op, v: Variable) -> bool:
    """Whether it only repeats a smaller array."""
    return all(i.size < v.size for i in op.inputs) and [*primitives_in(op.body)][-1:] == ["broadcast_in_dim"]


def _can_be_fenced(v: Variable) -> bool:
    return bool(jnp.issubdtype(v.dtype, jnp.floating))


def _is_cheap(body: Body) -> bool:
    return all(of(p).on_cpu is OnCpu.AGAIN for p in primitives_in(body))
