"""Advice for a step that does not fit in memory: of what helps against it, what fits this one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import floor

from onward.core.program import Phase, Program, Recipe
from onward.core.show import human_bytes, short_type
from onward.core.words import Pass
from onward.develop.batch import WEIGHT, batch_names
from onward.develop.recompute.loops import is_recomputed
from onward.execute.memory.held import Held, MemoryShare
from onward.execute.memory.table import place
from onward.execute.memory.use import MemoryUse

_KEPT = (MemoryShare.PARAMETERS, MemoryShare.STATE)
_OF_BATCH = (MemoryShare.FEEDS, MemoryShare.SAVED, MemoryShare.TEMPORARIES)
_OF_PASSES = (MemoryShare.SAVED, MemoryShare.GRADIENTS, MemoryShare.TEMPORARIES)
_SPREAD = {Phase.DEVICES, Phase.MICRO_BATCHES}
_MOST_ROWS = 2**24
_FILLED = 0.9  # the estimate is a few percent off, and memory is never filled to the last byte


@dataclass(frozen=True)
class Shortage:
    """A Program that did not fit in memory.

    Attributes:
        use: its memory.
        beside: the bytes of next state that lie beside the old one, because that is not donated.
        platform: that of the device, such as ``"gpu"``.
        room: the bytes that the device has for it; None where that is not known.
    """

    use: MemoryUse
    beside: int = 0
    platform: str = "cpu"
    room: int | None = None

    def bytes(self, shares: Iterable[MemoryShare]) -> int:
        """The bytes that these take at the peak."""
        return sum(self.use.shares[share] for share in shares)


def advice(found: Shortage) -> tuple[str, ...]:
    """The sentences that fit, the most direct first.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.trace(lambda w, x: jnp.sum(jnp.sort(x @ x.T)) * w, jnp.ones(()), jnp.ones((64, 2)))
        >>> advice(Shortage(MemoryUse(program)))[-1]
        'fewer rows at a time: 64 are fed at once'
    """
    return tuple(_fitting(found))


def _fitting(found: Shortage) -> Iterator[str]:
    use, program, beside = found.use, found.use.program, found.beside
    computed = [held for held in use.held if held.maker is not None]
    if computed and 2 * computed[0].bytes > use.peak:
        yield _in_parts(computed[0])
    if 20 * beside > use.peak:
        yield f"ow.compile(program, donate=True): {human_bytes(beside)} of next state lie beside the old"
    is_training = any(op.made_by is Pass.BACKWARD for op in program.ops)
    if not is_training and 5 * found.bytes(_OF_BATCH) > use.peak and (rows := _rows(program)) > 1:
        yield f"fewer rows at a time: {rows:,} are fed at once"
    if is_training and program.recipe is None and program.code is None:
        yield (
            "ow.adopt(step, ...) in place of ow.inspect: that Program takes ow.recompute, ow.accumulate and "
            "all other transforms"
        )
    elif is_training and program.recipe is not None:
        yield from _transforms(found, program.recipe)
    yield from _of_state(found)


def _in_parts(held: Held) -> str:
    assert held.maker is not None
    return (
        f"one array takes {human_bytes(held.bytes)}, the {short_type(held.variable)} of {place(held.maker)}: "
        "compute it in parts, by jax.lax.map(..., batch_size=...) or jax.lax.scan"
    )


def _transforms(found: Shortage, recipe: Recipe) -> Iterator[str]:
    """The transforms that a Program takes which can be traced again, as far as they help."""
    use, phases = found.use, {step.phase for step in recipe.steps}
    if found.room is not None and not phases & _SPREAD:
        room = human_bytes(int(_FILLED * found.room))
        yield f'ow.fit_memory(program, "{room}"): chunks, recomputation and host memory, if they are enough'
    if 5 * use.shares[MemoryShare.SAVED] > use.peak and not is_recomputed(use.program):
        yield _recomputed(found)
    if 5 * found.bytes(_OF_BATCH) > use.peak:
        if Phase.MICRO_BATCHES in phases:
            yield "more micro-batches, each with fewer rows: ow.accumulate(program, steps)"
        elif words := _accumulated(found):
            yield words
    computed = (held for held in use.held if held.maker is not None)
    wide = sum(held.bytes for held in computed if held.variable.dtype == "float32")
    if 2 * wide > use.peak and Phase.PRECISION not in phases and found.platform != "cpu":
        yield (f'ow.mixed_precision(program, "bfloat16"): {human_bytes(wide)} of what is computed is float32')


def _recomputed(found: Shortage) -> str:
    """``recompute``, with the budget that would fit."""
    saved, computed = found.use.shares[MemoryShare.SAVED], found.bytes(_OF_PASSES)
    fraction, alone = 0.5, ""
    if found.room is not None:
        left = (_FILLED * found.room - (found.use.peak - computed)) / computed
        is_enough = left > 1 - saved / computed
        fraction = min(floor(20 * left) / 20, 0.9) if is_enough else fraction
        alone = "" if is_enough else "; not enough alone"
    kept = f"{human_bytes(saved)} are kept for the backward pass, {100 * saved / found.use.peak:.0f} %"
    return f"ow.recompute(program, budget={fraction:.2g}): {kept} of the peak{alone}"


def _accumulated(found: Shortage) -> str:
    """``accumulate``, in as many micro-batches as would fit; empty where none are small enough."""
    rows, of_batch = _rows(found.use.program), found.bytes(_OF_BATCH)
    rest = found.use.peak - of_batch
    counts = (n for n in range(2, rows + 1) if rows % n == 0) if rows <= _MOST_ROWS else ()
    for steps in counts:
        needed = int(rest + of_batch / steps)
        if (steps >= 4) if found.room is None else (needed < _FILLED * found.room):
            return (
                f"ow.accumulate(program, {steps}): {rows // steps:,} rows at a time in place of {rows:,}, "
                f"about {human_bytes(needed)} in all; or a smaller batch"
            )
    return ""


def _of_state(found: Shortage) -> Iterator[str]:
    """Advice about parameters and the state of the optimizer, where these are most of it."""
    kept, state = found.bytes(_KEPT), found.use.shares[MemoryShare.STATE]
    if 2 * kept <= found.use.peak:
        return
    yield f"parameters and state take {human_bytes(kept)}, however small the batch"
    program = found.use.program
    if program.replicas is None and program.partition is None and program.recipe is not None:
        yield 'ow.partition(program, {"data": devices}, {"*": "data"}): each device keeps its part of them'
    if 4 * state > found.use.peak and found.platform != "cpu" and program.recipe and not found.use.on_host:
        yield "ow.offload(program): the state of the optimizer lies in host memory between the steps"
    if 4 * state > found.use.peak:
        yield f"an optimizer that keeps less than {human_bytes(state)}, such as ow.Adafactor"


def _rows(program: Program) -> int:
    """How many rows are fed at once; 1 where nothing shows a batch."""
    fixed = frozenset[str]() if program.recipe is None else program.recipe.origin.fixed_data
    names = batch_names(program, (), WEIGHT, fixed)
    return int(program[names[0]].shape[0]) if names else 1
