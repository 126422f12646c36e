"""Loops that keep little: what a turn can compute again faster than memory can hold it, is not kept."""

from __future__ import annotations

from itertools import pairwise

from onward.core.primitives.traits import Runs
from onward.core.program import Program
from onward.core.show import nbytes
from onward.develop.recompute.ladder import loop_parts, price
from onward.develop.recompute.loops import is_of_layers, keeping_in_loops, saved_by
from onward.develop.recompute.replay import with_step

_PRICE = 25  # effort for a byte
"""With a transformer of 24 layers in one loop (width 128, 512 tokens, two cores, medians of 8 rounds) keeping
all took 0.33 s of processor time and 279 MB a step; up to a price of 3: 0.32 s and 230 MB, 12: 0.26 and 103,
25: 0.24 and 84, 60: 0.24 and 37."""


def lean(program: Program, least: int = 0) -> Program:
    """The Program whose loops keep, for the backward pass, only what is dear to compute again.

    What a turn of a ``scan`` saves is written into memory and read from there. Elementwise arithmetic is
    faster than that: it is done again, and products of matrices are kept. The choice is a least cut, as that
    of ``recompute``; nothing is compiled for it. Programs without loops, and those that cannot be derived
    again, come back as they are.

    Args:
        program: with a backward pass that Onward derived.
        least: loops of the user's are changed where that keeps so many bytes less, over all turns; loops that
            Onward made of layers always are.

    Source: the min-cut of ``recompute``, at one price.

    Example:
        >>> import jax, jax.numpy as jnp, onward as ow
        >>> def loss(ws, x):
        ...     return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(jnp.sin(x @ w)), None), x, ws)[0])
        >>> program = ow.SGD(0.1).minimize(loss, jnp.ones((5, 3, 3)), jnp.ones((4, 3)))
        >>> def saved(program):
        ...     return sum(v.size for v in program.variables.values() if v.name.startswith("saved"))
        >>> saved(program) - saved(lean(program))                # 5 turns of 4 x 3 numbers, twice
        120
    """
    asked = {op: 0 if is_of_layers(op) else least for op in program.ops if op.primitive.runs is Runs.SCAN}
    kept = []
    for part in loop_parts(program, lambda op: sum(nbytes(v) for v in saved_by(op)) >= asked[op]):
        at = sum(price(*pair) <= _PRICE for pair in pairwise(part.curve))
        spared = (part.curve[0].bytes - part.curve[at].bytes) * part.turns
        if at and part.loop is not None and spared >= asked[part.loop]:
            kept.append((part.loop.outputs[0].name, part.kept(at)))
    return with_step(program, keeping_in_loops, tuple(kept)) if kept else program
