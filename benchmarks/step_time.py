"""Does a training step of Onward cost more than the one that people write by hand, or less?

The step by hand is one ``jax.jit`` of ``jax.value_and_grad`` and an optax update, its state donated: all
others are compared with it, but for those whose goal is another: to be no slower than torch on all cores, or
than a scan by hand. Onward is ``compile(optimizer.minimize(loss, params, *data))`` with its defaults,
of the same loss function. Every library that is installed takes the same steps, in its own words.

    onward                 as it comes
    ..., memory given back ``compile(program, keep_memory=False)``: temporary arrays go back to the system
    onward, 10 per call    ``step.run(state, batches, steps=10)``
    onward, cores='auto'   ``compile(program, cores="auto")``: one replica on each core, where that pays
    onward, 2 cores        ``compile(program, cores=2)``: two replicas on two host devices
    jit + optax, a scan    the step by hand with the arrays of all layers stacked, and a scan over them
    jit + optax, again     the step by hand beside itself: how far a median can be off

``cores`` is how many of them a side kept busy: the CPU time of its step is its time times that.

Each side runs in its own process, only one computes at a time, each call is waited for by its loss. Before
anything is timed, the losses of its first ten steps must be those of the step by hand.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

from benchmarks.contest import contest, peers_of
from benchmarks.harness import ONWARD, Row
from benchmarks.sides import ALL_CORES, CONTROL, CORES, GIVEN_BACK, PEERS, SCAN, TEN_STEPS


class Case(NamedTuple):
    """A workload, the ratios to reach, the sides beside Onward and the peers, and with whom some compare."""

    work: str
    targets: Mapping[str, float]
    more: tuple[str, ...] = ()
    peers: tuple[str, ...] = PEERS
    against: Mapping[str, str] = MappingProxyType({})

    def rows(self, rounds: int | None, sides: Collection[str]) -> list[Row]:
        """A row for each side, whose goal counts where the one that it is about is installed."""
        rivals = {side: rival for side, rival in self.against.items() if rival in sides}
        targets = {side: t for side, t in self.targets.items() if side not in self.against or side in rivals}
        return contest(self.work, [*sides], rounds, targets, against=rivals)


_CORES = {ALL_CORES: "torch"}
_AS_TORCH = {ALL_CORES: 1.05}
CASES = (
    Case("MLP, Adam", {ONWARD: 0.95, TEN_STEPS: 0.89}, (TEN_STEPS, CONTROL)),
    Case("4-layer transformer", _AS_TORCH, (ALL_CORES, TEN_STEPS, CONTROL), against=_CORES),
    Case("24-layer transformer", {ONWARD: 0.33}, (CORES, SCAN)),
    Case("100-layer MLP", {ONWARD: 1.0}, (SCAN,), against={ONWARD: SCAN}),
    Case("CNN, Momentum", _AS_TORCH, (ALL_CORES,), against=_CORES),
    Case("GPT-2, 124 M", {ONWARD: 1.05}, (), ("torch",), {ONWARD: "torch"}),  # a side takes 2 to 4 GB
    Case("LSTM, Adagrad", _AS_TORCH, (ALL_CORES,), against=_CORES),
    Case("1,000 leaves, SGD", {ONWARD: 0.03}),
    Case("2 numbers, SGD", {}, (CONTROL,)),
)


def run(rounds: int | None = None, quick: bool = False) -> list[Row]:
    """A row for each side of each workload; ``quick`` takes some."""
    if quick:
        return [row for case in CASES[:5:4] for row in contest(case.work, [ONWARD], rounds, quick=True)]
    found = []
    for case in CASES:
        found += case.rows(rounds, [ONWARD, GIVEN_BACK, *case.more, *peers_of(case.work, case.peers)])
    return found
