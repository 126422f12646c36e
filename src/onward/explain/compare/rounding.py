"""How far rounding alone can move the results of some ops: they are run again with every rounding moved.

The ops of a region are run on given numbers three times more, and each number that is read or computed is
moved up or down by what its rounding may be: by the epsilon of its dtype for what is computed number by
number; for a sum by that of the sum of all magnitudes, times the root of how many they are (Higham, Mary, A
New Approach to Probabilistic Rounding Error Analysis, 2019); not at all for what only moves numbers. So what
cancels, what is divided by nearly nothing and what saturates is judged by what it does to these numbers, not
by a tolerance for all.

Up or down is told by the bits of the number itself, as in a real rounding: equal numbers are moved alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import prod, sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.compiler import options_to_look
from onward.core.described import DescribedBody
from onward.core.jaxprs.body import Body, Call
from onward.core.jaxprs.reading import program_of
from onward.core.primitives.table import of
from onward.core.primitives.traits import Moves, Primitive, Reduces
from onward.core.program import Op, Program, Variable, programs_within
from onward.core.variable import Replicas, holds_keys, limits_of
from onward.core.words import Kind
from onward.develop.roll.literals import numbers
from onward.execute.pieces import Compiled, PiecewiseRun

_MARGIN = 4.0  # times the largest movement seen of a number
_OF_ALL = 4.0  # times the root of the mean square of all movements


def epsilon_of(dtype: Any) -> float:
    """The distance from 1 to the next number of a dtype; 0 of integers and keys."""
    return float(limits_of(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0


@dataclass(frozen=True, eq=False)
class BoundedValue:
    """Values, and for each number how far from it rounding alone can lead."""

    value: Any
    bound: Any


def bounded(
    program: Program,
    ops: Sequence[Op],
    given: Mapping[Variable, Any],
    wanted: Sequence[Variable],
    epsilon: float,
    compiled: Compiled | None = None,
) -> dict[Variable, BoundedValue]:
    """The values that ops give to Variables when they read given ones, with bounds of their rounding.

    What an op gives to a Variable that is given itself is asked for, and not read by the ops behind it.

    Args:
        program: theirs; on several devices every value has a row for each.
        ops: in order.
        given: the values they read.
        wanted: what is asked for.
        epsilon: the least that is taken for that of a dtype.
        compiled: what was compiled for this Program and epsilon before; it grows.
    """
    made = {v: replace(v, kind=Kind.ACTIVATION) for op in ops for v in op.outputs if v in given}
    read = {v: replace(v, kind=Kind.DATA) for v in given}
    part = Program(
        program.name,
        inputs=tuple(read.values()),
        ops=tuple(
            replace(
                op,
                inputs=tuple(read.get(v, v) for v in op.inputs),
                outputs=tuple(made.get(v, v) for v in op.outputs),
            )
            for op in ops
        ),
    )
    run = PiecewiseRun(part, compiled, partial(_noisy_run, epsilon=epsilon, replicas=program.replicas))
    values = {read[v]: x for v, x in given.items()}
    asked = {made.get(v, v): v for v in wanted}
    results = [_results(run, values, asked, size, seed) for size, seed in _RUNS]
    first, *moved = results
    return {v: BoundedValue(first[v], _bound(first[v], [sample[v] for sample in moved])) for v in wanted}


def _results(
    run: PiecewiseRun,
    values: Mapping[Variable, Any],
    asked: Mapping[Variable, Variable],
    size: float,
    seed: int,
) -> dict[Variable, Any]:
    """The values asked for, from one run of all pieces."""
    found: dict[Variable, Any] = {}
    for results in run(values, asked.__contains__, jnp.float32(size), jnp.uint32(seed)):
        found |= {asked[v]: x if holds_keys(x.dtype) else np.asarray(x) for v, x in results.items()}
    return found


_RUNS = ((0.0, 1), (1.0, 0x9E3779B1), (1.0, 0x85EBCA6B), (1.0, 0xC2B2AE35))


def _bound(value: Any, moved: Sequence[Any]) -> Any:
    """For each number the bound; of what is not a float, whether it moved at all."""
    if holds_keys(value.dtype):
        return None
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        return np.any([x != value for x in moved], axis=0)
    with np.errstate(all="ignore"):
        wide = value.astype(np.complex128 if value.dtype.kind == "c" else np.float64)
        moves = np.stack([np.abs(x.astype(wide.dtype) - wide) for x in moved])
        moves = np.where(np.isfinite(moves), moves, np.where(np.isfinite(wide), np.inf, 0.0))
        finite = moves[np.isfinite(moves)]
        typical = np.sqrt(np.mean(finite**2)) if finite.size else 0.0
        return _MARGIN * moves.max(axis=0) + _OF_ALL * typical


def _noisy_run(part: Program, epsilon: float, replicas: Replicas | None) -> Callable[..., list[Any]]:
    """The compiled function of some ops that moves what they are given, and all that they compute."""

    def run(values: Sequence[Any], size: Any, seed: Any) -> list[Any]:
        noise = _RoundingMoves(size, seed, epsilon)
        pairs = zip(part.inputs, values, strict=True)
        env = {v: noise.relative(x) if v.kind is Kind.DATA else x for v, x in pairs}
        for op in part.ops:
            results = noise.of_body(op.body, [env[v] for v in op.inputs])
            env.update(zip(op.outputs, results, strict=True))
        return [env[v] for v in part.outputs]

    if replicas is not None:
        run = jax.vmap(run, in_axes=(0, None, None), axis_name=replicas.name, axis_size=replicas.count)
    return jax.jit(run, compiler_options=options_to_look())


@dataclass(frozen=True, eq=False)
class _RoundingMoves:
    """Moves numbers by their rounding, ``size`` times."""

    size: Any
    seed: Any
    epsilon: float

    def relative(self, x: Any) -> Any:
        """Numbers that were rounded once."""
        return self.moved(x, jnp.abs(x)) if jnp.issubdtype(x.dtype, jnp.inexact) else x

    def moved(self, x: Any, scale: Any) -> Any:
        """Numbers up or down by the epsilon of their dtype times this scale."""
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return x
        epsilon = max(epsilon_of(x.dtype), self.epsilon)
        return _moved(x, jnp.asarray(scale, jnp.real(x).dtype), self.size, self.seed, epsilon)

    def of_body(self, body: Body, values: Sequence[Any]) -> list[Any]:
        """The results of a Body, each of its equations moved."""
        part = _straight_part(body)
        if part is None:
            return self.of_equation(body, values)
        program, operands = part
        env: dict[Variable, Any] = dict(program.constants)
        given = [values[x] if isinstance(x, int) else x.number for x in operands]
        env.update(zip(program.inputs, given, strict=True))
        for op in program.ops:
            env.update(zip(op.outputs, self.of_body(op.body, [env[v] for v in op.inputs]), strict=True))
        return [env[v] for v in program.outputs]

    def of_equation(self, body: Body, values: Sequence[Any]) -> list[Any]:
        """The results of one equation, or of a loop, moved by the rounding within."""
        results = body(*values)
        calls = list(body.calls)
        if len(calls) != 1:
            return [self.relative(x) for x in results]
        (call,) = calls
        row = of(call.primitive)
        if _is_exact(row):
            return results
        if row.is_elementwise or row.moves is Moves.ROUNDS:
            return [self.relative(x) for x in results]
        if row.linear is not None:
            magnitudes = body(*(jnp.abs(x) if jnp.issubdtype(x.dtype, jnp.number) else x for x in values))
            growth = 1 + sqrt(_length(call)) / 2
            pairs = zip(results, magnitudes, strict=True)
            return [self.moved(x, growth * jnp.abs(m)) for x, m in pairs]
        turns = sqrt(float(call.params.get("length", 1)))
        return [self._of_whole(x, turns) for x in results]

    def _of_whole(self, x: Any, times: float) -> Any:
        """Numbers moved by what the largest of them may be rounded by."""
        is_number = jnp.issubdtype(x.dtype, jnp.inexact)
        return self.moved(x, times * jnp.max(jnp.abs(x), initial=0)) if is_number else x


@partial(jax.jit, static_argnums=4)  # traced once for each type: tracing it everywhere takes longer than XLA
def _moved(x: Any, scale: Any, size: Any, seed: Any, epsilon: float) -> Any:
    """Numbers up or down, as their bits say, by a part of this scale."""
    bits = jax.lax.bitcast_convert_type(jnp.real(x).astype(jnp.float32), jnp.uint32)
    mixed = (bits ^ (bits >> 15)) * seed
    part = jax.lax.bitcast_convert_type(size * jnp.float32(epsilon), jnp.uint32)
    signed = jax.lax.bitcast_convert_type((mixed & jnp.uint32(1 << 31)) | part, jnp.float32)
    there = x + signed.astype(jnp.real(x).dtype) * scale
    return jnp.where(jnp.isfinite(there), there, x).astype(x.dtype)


@dataclass(frozen=True, eq=False)
class _NumberInEquation:
    """A number that stands in an equation."""

    number: Any


@lru_cache(maxsize=1024)
def _straight_part(body: Body) -> tuple[Program, Sequence[int | _NumberInEquation]] | None:
    """The Program that a Body runs once from start to end, and what it is given; None for one equation."""
    if isinstance(body, DescribedBody):
        return None
    if len(body.equations) != 1:
        return program_of(body.closed, "body"), tuple(range(len(body.in_avals)))
    (name,) = {call.primitive for call in body.calls}
    parts = list(programs_within(body).values())
    if not of(name).calls_once or len(parts) != 1 or "constant" in body.operands:
        return None
    written = iter(numbers(body))
    operands = tuple(x if isinstance(x, int) else _NumberInEquation(next(written)) for x in body.operands)
    if len(operands) != len(parts[0].inputs) or len(parts[0].outputs) != len(body.out_avals):
        return None
    return parts[0], operands


def _is_exact(row: Primitive) -> bool:
    """Whether a primitive rounds nothing: it moves numbers, or chooses among them."""
    moves = row.moves is not None and row.moves is not Moves.ROUNDS
    return moves or row.chooses or row.reduces in _CHOOSING


_CHOOSING = (Reduces.LARGEST, Reduces.SMALLEST, Reduces.ALL, Reduces.ANY, Reduces.ODD, Reduces.PLACE)


def _length(call: Call) -> float:
    """How many numbers are added up for one of the result."""
    sizes = [prod(t.shape) for t in call.operands]
    result = max(prod(call.results[0].shape), 1)
    if len(sizes) == 1:
        along = max(call.operands[0].shape, default=1) if sizes[0] == result else 1
        return float(max(sizes[0] / result, along, 1))
    return max(sqrt(sizes[0] * sizes[1] / result), 1.0)
