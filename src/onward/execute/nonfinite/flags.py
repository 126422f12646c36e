"""Three flags that tell how a value is not finite: NaN, infinity, minus infinity.

>>> import jax.numpy as jnp
>>> flags_of(jnp.array([1.0, -jnp.inf])).tolist()
[False, False, True]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.builder import Builder
from onward.core.check import check
from onward.core.compiler import compiled_alone
from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.equations import Type
from onward.core.lower import lower
from onward.core.marks import STACK
from onward.core.program import Program, Variable
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
    builder = Builder(program, program.ops, made_by=Pass.UPDATE)
    watched = floats(program)
    rows = [builder.add("flags", [v], [f"flags({v.name})"], _flags(v.shape, v.dtype))[0] for v in watched]
    body = body_of(lambda *xs: [jnp.stack(xs)[None]], *[Type((3,), np.dtype(np.bool_))] * len(rows))
    return _returning(builder, builder.add(STACK, rows, ["flags"], body))


def lifted(program: Program, wanted: Sequence[Variable]) -> Program:
    """The Program that returns the values of these Variables, one axis more in front, one row a device."""
    builder = Builder(program, program.ops, made_by=Pass.UPDATE)
    bodies = [body_of(lambda x: [x[None]], v.aval) for v in wanted]
    pairs = zip(wanted, bodies, strict=True)
    return _returning(builder, [builder.add("lift", [v], [f"lifted({v.name})"], b)[0] for v, b in pairs])


def _returning(builder: Builder, outputs: Sequence[Variable]) -> Program:
    """The Program that returns these and changes no state."""
    made = replace(builder.source, next_state={}, gradients=(), signature=None, recipe=None)
    return check(replace(made, ops=builder.ops, outputs=tuple(outputs), loss=None, hyperparameters=()))


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
