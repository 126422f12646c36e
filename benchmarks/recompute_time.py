"""What does it cost to train in half the memory?

A transformer of 24 layers. Temporary memory is what the compiled step asks for beside its arguments and
results, by ``memory_analysis``; nearly all of it are activations.

    onward                 the plain step; its layers are one loop, which ``compile`` makes lean by itself
    onward, half memory    ``recompute(program, budget=0.5)``: half of what keeping everything takes
    jax.checkpoint         by hand: ``jit`` and optax, with ``jax.checkpoint`` around each layer
    onward, as much        ``recompute`` with the memory of that as its budget

Below the table stands the temporary memory of a side over that of the one it is compared with.
"""

from __future__ import annotations

from benchmarks.contest import contest
from benchmarks.harness import ONWARD, Row
from benchmarks.sides import AS_MUCH, CHECKPOINT, HALF

_WORK, _QUICK_WORK = "24-layer transformer", "100-layer MLP"
_AGAINST = {HALF: ONWARD, CHECKPOINT: ONWARD, AS_MUCH: CHECKPOINT}
_TARGETS = {HALF: 1.15, AS_MUCH: 1.0}


def run(rounds: int | None = None, quick: bool = False) -> list[Row]:
    """The recomputing steps beside the plain one, and beside ``jax.checkpoint``."""
    work = _QUICK_WORK if quick else _WORK
    sides = [HALF, CHECKPOINT] if quick else list(_AGAINST)  # tiny ones cannot do with as little
    return contest(work, sides, rounds, _TARGETS, quick, _AGAINST, memory=True)
