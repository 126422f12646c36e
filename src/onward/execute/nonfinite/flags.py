"""Three flags that tell how a value is not finite: NaN, infinity, minus infinity.

>>> import jax.numpy as jnp
>>> flags_of(jnp.array([1.0, -jnp.inf])).tolist()
[False, False, True]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from onward.execute.feeds import is_on_host

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


def flags_of(x: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """The flags of an array, bool[3]."""
    return unpacked(flagging(x))


def flagging(x: Any) -> Any:
    """The flags as the bits of one number, computed where the array lies; no device is waited for."""
    if is_on_host(x):
        return _code_on_host(np.asarray(x))
    return _code_on_device(x)


def _code_on_host(x: np.ndarray) -> int:
    with np.errstate(all="ignore"):
        if np.isfinite(x).all():
            return 0
        parts = (np.real(x), np.imag(x)) if np.iscomplexobj(x) else (x,)
        each = zip(*((np.isnan(part), part == np.inf, part == -np.inf) for part in parts), strict=True)
        return sum(1 << bad for bad, found in zip(Bad, each, strict=True) if np.any(found))


def code_of(x: Any) -> Any:
    """The flags of an array as the bits of one number.

    Each of them is reduced apart: devices that have parts of the array cannot combine bits, GPUs included.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return code_of(jnp.real(x)) | code_of(jnp.imag(x))
    if x.dtype.itemsize < 4:  # compilers may compute wider within a loop: look at what is stored
        x = jax.lax.optimization_barrier(x).astype(jnp.float32)
    tests = zip(Bad, (x != x, x == jnp.inf, x == -jnp.inf), strict=True)
    return sum(jnp.any(test).astype(jnp.int32) << bad for bad, test in tests)


_code_on_device = compiled_alone(code_of)


def unpacked(codes: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """The flags in one more axis."""
    found = np.asarray(codes)[..., None] >> np.arange(len(Bad))
    return np.asarray(found & 1, np.bool_)


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
    """The Program that returns the flags of all its floats, int32[1, floats], and changes no state."""
    builder = Builder(program, program.ops, made_by=Pass.UPDATE)
    rows = [
        builder.add("flags", [v], [f"flags({v.name})"], _flags(v.shape, v.dtype))[0] for v in floats(program)
    ]
    body = body_of(lambda *xs: [jnp.stack(xs)[None]], *[Type((), np.dtype(np.int32))] * len(rows))
    return _returning(builder, builder.add(STACK, rows, ["flags"], body))


class FlagsOnDemand(Mapping[Variable, np.ndarray]):
    """The flags of what was computed, and those of what was given, which are computed when asked for."""

    def __init__(self, computed: Flags, given: Mapping[Variable, Any]) -> None:
        self._found = dict(computed)
        self._given = {v: x for v, x in given.items() if is_float(v)}

    def __getitem__(self, v: Variable) -> np.ndarray:
        if v not in self._found:
            self._found[v] = flags_of(self._given[v])[None]
        return self._found[v]

    def __iter__(self) -> Iterator[Variable]:
        return iter(dict.fromkeys((*self._given, *self._found)))

    def __len__(self) -> int:
        return len({*self._given, *self._found})


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
        codes = [code_of(x) for x in found[count:]]
        return found[:count], jnp.stack(codes) if codes else jnp.zeros(0, jnp.int32)

    compiled = compiled_alone(look)

    def line(values: Sequence[Any]) -> tuple[list[Any], Flags]:
        outputs, codes = compiled(values)
        return outputs, {v: row[None] for v, row in zip(watched, unpacked(codes), strict=True)}

    return line


@lru_cache(maxsize=1024)
def _flags(shape: tuple[int, ...], dtype: Any) -> Body:
    return body_of(lambda x: [code_of(x)], Type(shape, dtype))
