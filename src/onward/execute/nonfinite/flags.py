"""Three flags that tell how a value is not finite: NaN, infinity, minus infinity.

>>> import jax.numpy as jnp
>>> flags_of(jnp.array([1.0, -jnp.inf])).tolist()
[False, False, True]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.check import check
from onward.core.compiler import compiled_alone
from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.equations import Type
from onward.core.lower import lower
from onward.core.marks import STACK
from onward.core.names import Names
from onward.core.program import Op, Program, Variable
from onward.core.words import Pass

Flags = Mapping[Variable, np.ndarray]
"""For each Variable of floats its flags, one row for each device: bool[devices, 3]."""


class Bad(IntEnum):
    """In which way a number is not finite: NaN, infinity, minus infinity; the order of the flags."""

    NAN = 0
    PLUS = 1
    MINUS = 2


def is_float(v: Any) -> bool:
    """Whether something with a dtype can hold what is not finite."""
    return bool(jnp.issubdtype(v.dtype, jnp.inexact))


def flags_of(x: Any) -> Any:
    """The flags of an array, bool[3]."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return flags_of(jnp.real(x)) | flags_of(jnp.imag(x))
    if x.dtype.itemsize < 4:  # compilers may compute wider within a loop: look at what is stored
        x = jax.lax.optimization_barrier(x).astype(jnp.float32)
    return jnp.stack([jnp.any(jnp.isnan(x)), jnp.any(x == jnp.inf), jnp.any(x == -jnp.inf)])


def bad_in(flags: Flags, v: Variable, device: int) -> frozenset[Bad]:
    """In which ways the value of a Variable on a device is not finite."""
    rows = flags.get(v)
    if rows is None:
        return frozenset()
    row = rows[device if len(rows) > 1 else 0]
    return frozenset(bad for bad in Bad if row[bad])


def floats(program: Program) -> list[Variable]:
    """Every Variable of a Program that can hold what is not finite."""
    return [v for v in program.variables.values() if is_float(v)]


def flagged(program: Program) -> Program:
    """The Program that returns the flags of all its floats, bool[1, floats, 3], and changes no state."""
    names = Names(program.variables)
    watched = floats(program)
    rows = [Variable(names.new(f"flags({v.name})"), (3,), np.dtype(np.bool_)) for v in watched]
    whole = Variable(names.new("flags"), (1, len(rows), 3), np.dtype(np.bool_))
    added = [
        Op("flags", (v,), (row,), _flags(v.shape, v.dtype), Pass.UPDATE)
        for v, row in zip(watched, rows, strict=True)
    ]
    body = body_of(lambda *xs: [jnp.stack(xs)[None]], *[Type((3,), np.dtype(np.bool_))] * len(rows))
    return _returning(program, (*added, Op(STACK, tuple(rows), (whole,), body, Pass.UPDATE)), (whole,))


def lifted(program: Program, wanted: Sequence[Variable]) -> Program:
    """The Program that returns the values of these Variables, one axis more in front, one row a device."""
    names = Names(program.variables)
    made = [Variable(names.new(f"lifted({v.name})"), (1, *v.shape), v.dtype) for v in wanted]
    added = [
        Op("lift", (v,), (out,), body_of(lambda x: [x[None]], v.aval), Pass.UPDATE)
        for v, out in zip(wanted, made, strict=True)
    ]
    return _returning(program, added, made)


def _returning(program: Program, added: Sequence[Op], outputs: Sequence[Variable]) -> Program:
    return check(
        Program(
            name=program.name,
            inputs=program.inputs,
            state=program.state,
            constants=program.constants,
            ops=(*program.ops, *added),
            outputs=tuple(outputs),
            initializers=program.initializers,
            replicas=program.replicas,
            code=program.code,
        )
    )


def line_of_flags(program: Program) -> Callable[[Sequence[Any]], tuple[list[Any], Flags]]:
    """The compiled function from the inputs of a part without state to its outputs and its flags."""
    watched, count = floats(program), len(program.outputs)
    run = lower(program, [*program.outputs, *watched])

    def look(values: Sequence[Any]) -> tuple[list[Any], Any]:
        found = run((), values)
        rows = [flags_of(x) for x in found[count:]]
        return found[:count], jnp.stack(rows) if rows else jnp.zeros((0, 3), bool)

    compiled = compiled_alone(look)

    def line(values: Sequence[Any]) -> tuple[list[Any], Flags]:
        outputs, rows = compiled(values)
        return outputs, {v: row[None] for v, row in zip(watched, np.asarray(rows), strict=True)}

    return line


@lru_cache(maxsize=1024)
def _flags(shape: tuple[int, ...], dtype: Any) -> Body:
    return body_of(lambda x: [flags_of(x)], Type(shape, dtype))
