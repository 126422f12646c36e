"""When a loop over layers is worth it: where they are many, and no convolution stands in them on a CPU.

A loop costs: what its layers save for the backward pass is written into one array and read back, and nothing
is fused over the border of two layers. It saves what grows with depth: compiling, and on a CPU the arithmetic
that XLA repeats where many layers read one long sum.

Steps with a loop over stacked parameters, relative to steps without (AdamW, two CPU cores, process time):

    ==============================================  ====  ====  ====  ====  ====  ====
    layers                                             4     8    12    16    24   100
    ==============================================  ====  ====  ====  ====  ====  ====
    transformer of width 128, 80 ops in a layer     1.46  1.10  1.02        0.80
    residual MLP of width 32, 16 ops                0.79  0.57        0.42        0.13
    MLP of width 64, 4 ops                                0.75              0.66
    MLP of width 512, batch 128                                             1.07
    convolutions of 16 channels                           14.3
    ==============================================  ====  ====  ====  ====  ====  ====

Compiling took 4.1 s in place of 16 s for the transformer of 24 layers, 1.7 s in place of 98 s for the
residual MLP of 100, and as long as without a loop for a plain MLP. Unrolling the loop by 2 or 4 made the
residual MLP 1.2 and 1.4 times slower; a barrier before what is carried made no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax

from onward.core.check import expect_program
from onward.core.primitives.table import of
from onward.core.program import Program
from onward.develop.roll.find import GIVEN_UP, find_runs
from onward.develop.roll.forward import forward_ops
from onward.develop.roll.line import line_of
from onward.develop.roll.run import LayerRun

_LEAST_TIMES = 12
_LEAST_SAVED = 200


@dataclass(frozen=True)
class Verdict:
    """Whether the layers of a Program are worth a loop, and why."""

    is_worth: bool
    reason: str

    def __bool__(self) -> bool:
        return self.is_worth


def worth_rolling(program: Program) -> Verdict:
    """Whether ``roll`` gains from a Program, as far as its ops tell; nothing is traced.

    Worth a loop are layers that repeat 12 times or more and save 200 equations or more, those that an op such
    as ``jax.checkpoint`` runs among them, without convolutions if a CPU is to run them.

    Args:
        program: a Program at any stage.

    Example:
        >>> import functools, jax.numpy as jnp, onward as ow
        >>> def loss(w, x):
        ...     return jnp.sum(functools.reduce(lambda h, _: h + jnp.tanh(h @ w), range(6), x))
        >>> print(worth_rolling(ow.trace(loss, jnp.eye(4), jnp.ones((2, 4)))).reason)
        6 layers of 3 ops: fewer than 12 layers gain too little from a loop
    """
    expect_program(program, "worth_rolling")
    line = line_of(replace(program, ops=forward_ops(program)), frozenset(), frozenset())
    found = find_runs(line)
    verdict = _verdict(found.runs)
    return replace(verdict, reason=f"{verdict.reason} ({GIVEN_UP})") if found.is_given_up else verdict


def _verdict(runs: Sequence[LayerRun]) -> Verdict:
    if not runs:
        return Verdict(False, "no layer repeats")
    verdicts = [verdict_on(run) for run in runs]
    good = [verdict for verdict in verdicts if verdict]
    longest = max(range(len(runs)), key=lambda i: runs[i].saved)
    return good[0] if len(good) == 1 else _together(good) if good else verdicts[longest]


def verdict_on(run: LayerRun) -> Verdict:
    """Whether one run is worth a loop."""
    words = f"{run.times} layers of {run.period} op{'s' if run.period > 1 else ''}"
    if run.times < _LEAST_TIMES:
        return Verdict(False, f"{words}: fewer than {_LEAST_TIMES} layers gain too little from a loop")
    if not any(v.size > 1 for op in run.layers[0] for v in op.outputs):
        return Verdict(False, f"{words}: they compute single numbers")
    if run.saved < _LEAST_SAVED:
        return Verdict(False, f"{words}: so few ops gain too little from a loop")
    within = {name for op in run.layers[0] for name in op.body.primitives}
    if jax.default_backend() == "cpu" and any(of(name).is_slow_in_loop for name in within):
        return Verdict(False, f"{words}: a convolution is slow within a loop on a CPU")
    return Verdict(True, words)


def is_worth(run: LayerRun) -> bool:
    """The rule by which only what is worth it becomes a loop."""
    return verdict_on(run).is_worth


def _together(verdicts: list[Verdict]) -> Verdict:
    return Verdict(True, ", ".join(verdict.reason for verdict in verdicts))
