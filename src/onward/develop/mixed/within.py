"""Within ``jax.checkpoint`` and ``scan`` the low dtype is taken where it would be outside of them.

What they are given in the low dtype they read so, and their results are of the dtype that is computed. A loop
carries a value in the low dtype where each turn is given it so and makes it so; else in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.edited import call_with_inner
from onward.core.jaxprs.equations import Type
from onward.core.jaxprs.joining import joined
from onward.core.jaxprs.loops import result_of
from onward.core.primitives.table import of
from onward.core.primitives.traits import Precision, Runs
from onward.core.program import Op, Program, Variable
from onward.core.turn import ScanTurn


@dataclass(frozen=True)
class InputReading:
    """How what an op runs is to read an input.

    Attributes:
        is_low: in the low dtype.
        is_pliant: it gives way to values beside it, as a parameter does.
        is_kept: what reads it computes in float32.
        is_chosen: products that read it are taken in float8.
    """

    is_low: bool = False
    is_pliant: bool = False
    is_kept: bool = False
    is_chosen: bool = False


Lower = Callable[[Program, Mapping[Variable, InputReading]], Program | None]
"""The lowering of what an op runs, for inputs that are read so; None if nothing of it is lowered."""


@dataclass(frozen=True)
class LoweredRun:
    """An op that runs something in the low dtype: its Body, and what it reads and gives in that dtype."""

    body: Body
    reads: tuple[bool, ...]
    gives: tuple[bool, ...]


def has_gain(op: Op) -> bool:
    """Whether an op computes, or runs, what gains from a low precision: a product or a convolution."""
    return any(of(name).precision is Precision.LOW for name in op.body.primitives)


def is_run_with_gain(op: Op) -> bool:
    """Whether an op runs, once or in a loop of known length, what gains from a low precision."""
    runs = op.primitive.runs in (Runs.AGAIN, Runs.SCAN) and "constant" not in op.body.operands
    return runs and has_gain(op)


def lowered_run(
    op: Op, readings: Sequence[InputReading], dtype: np.dtype[Any], lower: Lower
) -> LoweredRun | None:
    """The op with what it runs in the low dtype; None if nothing of that is."""
    if op.primitive.runs is Runs.AGAIN:
        found = _run_once(op, readings, lower)
    else:
        turn = ScanTurn.of(op.body)
        found = None if turn is None else _in_loop(turn, readings, dtype, lower)
    if found is None:
        return None
    made, reads = found
    types = [Type(v.shape, dtype if is_low else v.dtype) for v, is_low in zip(op.inputs, reads, strict=True)]
    results = [result_of(op.body, j) for j in range(len(op.outputs))]

    def run(*values: Any) -> list[Any]:
        all_made = made(values)
        return [all_made[j] for j in results]

    body = body_of(run, *types)
    gives = (new.dtype != v.dtype for new, v in zip(body.out_avals, op.outputs, strict=True))
    return LoweredRun(body, reads, tuple(gives))


_Run = tuple[Callable[[Sequence[Any]], Sequence[Any]], tuple[bool, ...]]


def _run_once(op: Op, readings: Sequence[InputReading], lower: Lower) -> _Run | None:
    """Of ``jax.checkpoint``: from the values of an op its results, and what it reads in the low dtype."""
    ((name, inner),) = op.subprograms.items()
    given = [readings[x] if isinstance(x, int) else InputReading() for x in op.body.operands]
    new = lower(inner, dict(zip(inner.inputs, given, strict=True)))
    if new is None:
        return None
    run = call_with_inner(op.body, name, joined(new.ops, new.inputs, new.outputs, is_inner=True))
    return run, tuple(reading.is_low for reading in readings)


def _in_loop(
    turn: ScanTurn, readings: Sequence[InputReading], dtype: np.dtype[Any], lower: Lower
) -> _Run | None:
    """Of a loop: the same, each carried value in one dtype from the first turn to the last."""
    begin, count = turn.first_carried, turn.count_carried
    while True:
        given = [readings[x] if isinstance(x, int) else InputReading() for x in turn.operands]
        carried = [replace(reading, is_pliant=False) for reading in given[begin : begin + count]]
        given[begin : begin + count] = carried
        new = lower(turn.program, dict(zip(turn.program.inputs, given, strict=True)))
        if new is None:
            return None
        made = [v.dtype == dtype for v in new.outputs[:count]]
        full = {
            x
            for x, reading, is_low in zip(turn.operands[begin:], carried, made, strict=False)
            if reading.is_low and not is_low
        }
        if not full:
            break
        readings = [replace(r, is_low=r.is_low and x not in full) for x, r in enumerate(readings)]
    wide = [v.dtype for v in new.inputs[begin : begin + count]]
    lowered = replace(turn, program=new)

    def once(*values: Any) -> list[Any]:
        found = lowered.once(*values)
        return [*(x.astype(t) for x, t in zip(found, wide, strict=False)), *found[count:]]

    return lambda values: lowered.scan(once, values), tuple(reading.is_low for reading in readings)
