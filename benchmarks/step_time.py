"""Does a training step of Onward cost more than the one that people write by hand, or less?

The step by hand is one ``jax.jit`` of ``jax.value_and_grad`` and an optax update, its state donated: all
others are compared with it. Onward is ``compile(optimizer.minimize(loss, params, *data))`` with its defaults,
of the same loss function. Every library that is installed takes the same steps, in its own words.

    onward                 as it comes
    onward, memory kept    in a process that called ``ow.keep_host_memory()``, which would help the peers that
                           run on JAX as well: what it gains over ``onward`` comes from there
    onward, 10 per call    ``step.run(state, batches, steps=10)``
    jit + optax, again     the step by hand beside itself: how far a median can be off

``cores`` is how many of them a side kept busy: the CPU time of its step is its time times that.

Each side runs in its own process, only one computes at a time, each call is waited for by its loss. Before
anything is timed, the losses of its first ten steps must be those of the step by hand.
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.contest import contest, peers_of
from benchmarks.harness import ONWARD, Row
from benchmarks.sides import CONTROL, KEPT, PEERS, TEN_STEPS


class Case(NamedTuple):
    """A workload, the ratios to reach, and the sides beside Onward and the other libraries."""

    work: str
    targets: dict[str, float]
    more: tuple[str, ...] = ()
    peers: tuple[str, ...] = PEERS


CASES = (
    Case("MLP, Adam", {ONWARD: 1.0, TEN_STEPS: 0.94}, (TEN_STEPS, CONTROL)),
    Case("4-layer transformer", {ONWARD: 0.7}, (TEN_STEPS, CONTROL)),
    Case("24-layer transformer", {ONWARD: 0.25}),
    Case("100-layer MLP", {ONWARD: 0.1}),
    Case("CNN, Momentum", {ONWARD: 0.45}),
    Case("GPT-2, 124 M", {ONWARD: 1.0}, peers=("torch", "torch.compile")),  # a side takes 2 to 4 GB
    Case("LSTM, Adagrad", {ONWARD: 0.8}),
    Case("1,000 leaves, SGD", {ONWARD: 0.03}),
    Case("2 numbers, SGD", {}, (CONTROL,)),
)


def run(rounds: int | None = None, quick: bool = False) -> list[Row]:
    """A row for each side of each workload; ``quick`` takes some."""
    rows = []
    for case in CASES[:5:4] if quick else CASES:
        sides = [ONWARD] if quick else [ONWARD, KEPT, *case.more, *peers_of(case.work, case.peers)]
        rows += contest(case.work, sides, rounds, case.targets, quick)
    return rows
