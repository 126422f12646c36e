"""Does a training step of Onward cost more than the one that people write by hand, or less?

The step by hand is one ``jax.jit`` of ``jax.value_and_grad`` and an optax update, its state donated: all
others are compared with it. Onward is ``compile(optimizer.minimize(loss, params, *data))`` with its defaults,
of the same loss function. Every library that is installed takes the same steps, in its own words.

    onward                 as it comes
    onward, memory kept    in a process that called ``ow.keep_host_memory()``, which would help the peers that
                           run on JAX as well: what it gains over ``onward`` comes from there
    onward, 10 per call    ``step.run(state, batches, steps=10)``
    jit + optax, again     the step by hand beside itself: how far a median can be off

Each side runs in its own process, only one computes at a time, each call is waited for by its loss. Before
anything is timed, the losses of its first ten steps must be those of the step by hand.

Run it with ``python -m benchmarks step_time``. To expect:

    python 3.11.7, jax 0.10.2, device cpu, cores 2

    step_time
    case                  side                 rounds  time     peer     ratio  min    max    target
    MLP, Adam             onward               7       3.27 ms  2.99 ms  1.06   0.66   1.49   <= 1.00  missed
    MLP, Adam             onward, memory kept  7       3.04 ms  2.99 ms  0.98   0.73   1.26   <= 1.00
    MLP, Adam             onward, 10 per call  7       2.32 ms  2.99 ms  0.73   0.63   1.02   <= 0.94
    MLP, Adam             jit + optax, again   7       2.99 ms  2.99 ms  0.98   0.76   1.14
    MLP, Adam             flax.nnx             7       4.96 ms  2.99 ms  1.68   1.46   2.11
    MLP, Adam             equinox              7       3.89 ms  2.99 ms  1.38   0.91   1.60
    4-layer transformer   onward               7       71.5 ms  74.4 ms  0.95   0.86   1.12   <= 0.70  missed
    4-layer transformer   onward, memory kept  7       65.1 ms  74.4 ms  0.89   0.79   1.09   <= 0.70  missed
    4-layer transformer   onward, 10 per call  7       40.3 ms  74.4 ms  0.57   0.50   0.65
    4-layer transformer   jit + optax, again   7       73.2 ms  74.4 ms  0.98   0.91   1.09
    4-layer transformer   flax.nnx             7       64.6 ms  74.4 ms  0.92   0.82   1.23
    4-layer transformer   equinox              7       75.7 ms  74.4 ms  1.00   0.91   1.15
    24-layer transformer  onward               7       135 ms   228 ms   0.62   0.56   0.70   <= 0.25  missed
    24-layer transformer  onward, memory kept  7       135 ms   228 ms   0.61   0.51   0.73   <= 0.25  missed
    24-layer transformer  flax.nnx             7       177 ms   228 ms   0.74   0.68   0.98
    24-layer transformer  equinox              7       408 ms   228 ms   1.82   1.54   2.18
    100-layer MLP         onward               7       1.07 ms  13.9 ms  0.077  0.046  0.092  <= 0.10
    100-layer MLP         onward, memory kept  7       1.09 ms  13.9 ms  0.082  0.041  0.089  <= 0.10
    100-layer MLP         flax.nnx             7       42.3 ms  13.9 ms  3.26   2.76   5.79
    100-layer MLP         equinox              7       24.5 ms  13.9 ms  1.83   1.67   1.96
    CNN, Momentum         onward               7       15.2 ms  50.4 ms  0.32   0.28   0.40   <= 0.45
    CNN, Momentum         onward, memory kept  7       15.8 ms  50.4 ms  0.35   0.25   0.39   <= 0.45
    CNN, Momentum         flax.nnx             7       44.9 ms  50.4 ms  0.95   0.78   1.13
    CNN, Momentum         equinox              7       47.4 ms  50.4 ms  0.97   0.82   1.22
    LSTM, Adagrad         onward               7       11.9 ms  10.8 ms  1.10   0.91   1.14   <= 0.80  missed
    LSTM, Adagrad         onward, memory kept  7       10.6 ms  10.8 ms  0.98   0.79   1.15   <= 0.80  missed
    LSTM, Adagrad         flax.nnx             7       12.9 ms  10.8 ms  1.17   0.97   1.40
    LSTM, Adagrad         equinox              7       13.2 ms  10.8 ms  1.10   0.91   1.32
    1,000 leaves, SGD     onward               7       83.7 us  1.16 ms  0.070  0.036  0.092  <= 0.03  missed
    1,000 leaves, SGD     onward, memory kept  7       75.5 us  1.16 ms  0.067  0.032  0.090  <= 0.03  missed
    1,000 leaves, SGD     flax.nnx             7       21.7 ms  1.16 ms  17.56  10.85  36.23
    1,000 leaves, SGD     equinox              7       2.73 ms  1.16 ms  1.72   1.12   2.78
    2 numbers, SGD        onward               7       14.2 us  11.5 us  1.53   1.16   1.59
    2 numbers, SGD        onward, memory kept  7       16 us    11.5 us  1.52   1.12   2.32
    2 numbers, SGD        jit + optax, again   7       9.5 us   11.5 us  0.87   0.69   1.32
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.contest import contest, peers_of
from benchmarks.harness import ONWARD, Row
from benchmarks.sides import CONTROL, KEPT, TEN_STEPS


class Case(NamedTuple):
    """A workload, the ratios to reach, and the sides beside Onward and the other libraries."""

    work: str
    targets: dict[str, float]
    more: tuple[str, ...] = ()


CASES = (
    Case("MLP, Adam", {ONWARD: 1.0, TEN_STEPS: 0.94}, (TEN_STEPS, CONTROL)),
    Case("4-layer transformer", {ONWARD: 0.7}, (TEN_STEPS, CONTROL)),
    Case("24-layer transformer", {ONWARD: 0.25}),
    Case("100-layer MLP", {ONWARD: 0.1}),
    Case("CNN, Momentum", {ONWARD: 0.45}),
    Case("LSTM, Adagrad", {ONWARD: 0.8}),
    Case("1,000 leaves, SGD", {ONWARD: 0.03}),
    Case("2 numbers, SGD", {}, (CONTROL,)),
)


def run(rounds: int | None = None, quick: bool = False) -> list[Row]:
    """A row for each side of each workload; ``quick`` takes some."""
    rows = []
    for case in CASES[::4] if quick else CASES:
        sides = [ONWARD] if quick else [ONWARD, KEPT, *case.more, *peers_of(case.work)]
        rows += contest(case.work, sides, rounds, case.targets, quick)
    return rows
