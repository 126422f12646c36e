"""Is a compiled Onward step as fast as one written by hand?

The step by hand is one ``jax.jit`` of ``jax.value_and_grad`` and of the same update formula, its state
donated, its hyperparameters Python constants (in Onward they are state, so that they may change). Each
step is waited for. Before anything is timed, both sides must agree after three steps with a learning
rate that moves the parameters; it is timed with one that hardly does, since many steps on one batch
would drive the gradients into denormal numbers.

    a model     the whole step; its row says the optimizer, the next one compares the peer with itself
    dispatch    the step of a model of two numbers, not waited for: what a call costs

Run it with ``python -m benchmarks step_time``. To expect:

    python 3.11.7, jax 0.10.2, device cpu, cores 2

    step_time
    case                against  rounds  onward   peer     ratio  min   max   target
    MLP, Adam           by hand  60      2.92 ms  2.94 ms  0.98   0.71  1.17  <= 1.02
      the same by hand  by hand  60      2.8 ms   2.84 ms  0.99   0.84  1.26
    MLP, Adam           optax    60      2.71 ms  2.75 ms  0.98   0.68  1.21
    CNN, Momentum       by hand  60      37.3 ms  38.6 ms  1.00   0.39  1.77  <= 1.02
      the same by hand  by hand  60      36.2 ms  36.4 ms  1.00   0.70  1.34
    transformer, AdamW  by hand  60      67 ms    63.5 ms  1.06   0.63  2.38  <= 1.02  missed
      the same by hand  by hand  60      61.8 ms  65.6 ms  0.99   0.54  1.58
    LSTM, Adagrad       by hand  60      13.2 ms  12.9 ms  0.99   0.77  1.44  <= 1.02
      the same by hand  by hand  60      13 ms    12.9 ms  1.00   0.87  1.44
    dispatch, SGD       by hand  60      11.8 us  8.45 us  1.40   1.09  1.74
    dispatch, Adam      by hand  60      15 us    11 us    1.37   0.98  1.96

That is two shared, noisy cores: the rows "the same by hand" compare the step by hand with itself and show how
far a median can be off there. The transformer again, alone and over 200 rounds: 0.99 (0.57 to 1.32), by hand
against itself 1.00 (0.71 to 1.97).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import onward as ow
from benchmarks import models
from benchmarks.harness import Row, compare
from benchmarks.models import Model, Params

try:
    import optax
except ImportError:
    optax = None

_RATE, _VISIBLE_RATE = 1e-6, 1e-3
_TARGET = 1.02
_ROUND = 0.02  # seconds that one side of a round lasts at least
_BY_HAND = "by hand"

Slots = tuple[Params, ...]
Rule = Callable[[Params, Params, Slots, Array, float], tuple[Params, Slots]]
Step = Callable[..., tuple[Any, Any]]


class Case(NamedTuple):
    """A model, its optimizer in Onward, and the same rule by hand with its number of slots."""

    name: str
    model: Model
    optimizer: Callable[[float], ow.Optimizer]
    rule: Rule
    slots: int


def cases(quick: bool) -> list[Case]:
    """The four models, each with an optimizer of its own."""
    made: list[Callable[[], Model]] = [models.mlp, models.cnn, models.transformer, models.lstm]
    if quick:
        made = [
            partial(models.mlp, (8, 8, 4), batch=4),
            partial(models.cnn, (2, 2), size=8, batch=2),
            partial(models.transformer, layers=1, d=8, heads=2, seq=4, batch=2),
            partial(models.lstm, hidden=8, features=4, seq=4, batch=2),
        ]
    mlp, cnn, transformer, lstm = (make() for make in made)
    return [
        Case("MLP, Adam", mlp, ow.Adam, adam, 2),
        Case("CNN, Momentum", cnn, ow.Momentum, momentum, 1),
        Case("transformer, AdamW", transformer, ow.AdamW, adamw, 2),
        Case("LSTM, Adagrad", lstm, ow.Adagrad, adagrad, 1),
    ]


def run(rounds: int | None = None, quick: bool = False) -> list[Row]:
    """A row for each model, one against optax where it is installed, and those of the call itself."""
    rounds = rounds or (2 if quick else 60)
    lasting = 0.0 if quick else _ROUND
    rows: list[Row] = []
    for case in cases(quick):
        ours, peer = _onward(case, _VISIBLE_RATE), _by_hand(case, _VISIBLE_RATE)
        check_agreement(case, ours, peer)
        if not quick:
            ours, peer = _onward(case, _RATE), _by_hand(case, _RATE)
        target = None if quick else _TARGET
        rows.append(_compared(case.name, _BY_HAND, (ours, peer), rounds, lasting, target))
        if not quick:
            control = peer, _by_hand(case, _RATE)
            rows.append(_compared("  the same by hand", _BY_HAND, control, rounds, lasting))
        if case.optimizer is ow.Adam and optax is not None:
            rows.append(_compared(case.name, "optax", (ours, _optax(case, _RATE)), rounds, lasting))
    for case in (
        Case("dispatch, SGD", models.line(), ow.SGD, sgd, 0),
        Case("dispatch, Adam", models.line(), ow.Adam, adam, 2),
    ):
        sides = _onward(case, _RATE), _by_hand(case, _RATE)
        rows.append(_compared(case.name, _BY_HAND, sides, rounds, lasting, wait=False))
    return rows


class Side:
    """A step with the state it goes on from."""

    def __init__(self, step: Step, state: Any, data: tuple[Any, ...]) -> None:
        self.step, self.state, self.data = step, state, data

    def seconds(self, count: int, wait: bool = True) -> float:
        """How long one of ``count`` steps takes; each is waited for, or only the last."""
        begin = perf_counter()
        for _ in range(count):
            self.state, out = self.step(self.state, *self.data)
            if wait:
                jax.block_until_ready((_arrays(self.state), _arrays(out)))
        jax.block_until_ready((_arrays(self.state), _arrays(out)))
        return (perf_counter() - begin) / count


def check_agreement(case: Case, ours: Side, peer: Side, steps: int = 3) -> None:
    """Raise ``AssertionError`` unless both sides move every parameter to the same place.

    Compared as whole arrays: Adam magnifies the rounding of single gradients that are close to zero.
    """
    ours.seconds(steps)
    peer.seconds(steps)
    found, expected = (jax.tree.leaves(p) for p in (ours.state.parameters, peer.state[0]))
    before = jax.tree.leaves(case.model.params)
    for a, b, start in zip(found, expected, before, strict=True):
        apart, moved = (float(jnp.linalg.norm(jnp.ravel(x))) for x in (a - b, b - start))
        assert apart <= 1e-3 * moved > 0, f"{case.name}: moved by {moved}, and {apart} apart"


def _compared(
    name: str,
    against: str,
    sides: tuple[Side, Side],
    rounds: int,
    lasting: float,
    target: float | None = None,
    wait: bool = True,
) -> Row:
    for side in sides:
        side.seconds(3)
    count = max(1, int(lasting / min(side.seconds(5, wait) for side in sides)) + 1)
    ours, peer = (partial(side.seconds, count, wait) for side in sides)
    return compare(name, against, ours, peer, rounds, target)


def _onward(case: Case, rate: float) -> Side:
    loss, params, data = case.model
    step = ow.compile(case.optimizer(rate).minimize(loss, params, *data))
    return Side(step, step.init(params), data)


def _by_hand(case: Case, rate: float) -> Side:
    loss, params, data = case.model

    def step(state: Any, *data: Array) -> tuple[Any, Array]:
        params, slots, t = state
        value, gradient = jax.value_and_grad(loss)(params, *data)
        params, slots = case.rule(params, gradient, slots, t + 1, rate)
        return (params, slots, t + 1), value

    slots = tuple(jax.tree.map(jnp.zeros_like, params) for _ in range(case.slots))
    return Side(jax.jit(step, donate_argnums=0), (_copy(params), slots, jnp.int32(0)), data)


def _optax(case: Case, rate: float) -> Side:
    loss, params, data = case.model
    optimizer = optax.adam(rate)

    def step(state: Any, *data: Array) -> tuple[Any, Array]:
        params, slots = state
        value, gradient = jax.value_and_grad(loss)(params, *data)
        change, slots = optimizer.update(gradient, slots, params)
        return (optax.apply_updates(params, change), slots), value

    params = _copy(params)
    return Side(jax.jit(step, donate_argnums=0), (params, optimizer.init(params)), data)


def sgd(params: Params, gradient: Params, slots: Slots, t: Array, rate: float) -> tuple[Params, Slots]:
    return jax.tree.map(lambda w, g: w - rate * g, params, gradient), slots


def momentum(params: Params, gradient: Params, slots: Slots, t: Array, rate: float) -> tuple[Params, Slots]:
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, slots[0], gradient)
    return jax.tree.map(lambda w, v: w - rate * v, params, velocity), (velocity,)


def adagrad(params: Params, gradient: Params, slots: Slots, t: Array, rate: float) -> tuple[Params, Slots]:
    total = jax.tree.map(lambda s, g: s + g**2, slots[0], gradient)
    step = jax.tree.map(lambda g, s: g / (jnp.sqrt(s) + 1e-10), gradient, total)
    return jax.tree.map(lambda w, d: w - rate * d, params, step), (total,)


def adam(params: Params, gradient: Params, slots: Slots, t: Array, rate: float) -> tuple[Params, Slots]:
    direction, slots = _direction(gradient, slots, t)
    return jax.tree.map(lambda w, d: w - rate * d, params, direction), slots


def adamw(params: Params, gradient: Params, slots: Slots, t: Array, rate: float) -> tuple[Params, Slots]:
    direction, slots = _direction(gradient, slots, t)
    return jax.tree.map(lambda w, d: w - rate * (d + 1e-2 * w), params, direction), slots


def _direction(gradient: Params, slots: Slots, t: Array) -> tuple[Params, Slots]:
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, slots[0], gradient)
    variance = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, slots[1], gradient)
    scale_m, scale_v = 1 - 0.9**t, 1 - 0.999**t
    direction = jax.tree.map(lambda m, v: (m / scale_m) / (jnp.sqrt(v / scale_v) + 1e-8), mean, variance)
    return direction, (mean, variance)


def _arrays(value: Any) -> Any:
    """What to wait for: the arrays of a State or an Out of Onward, or those of the peer."""
    return value.values if isinstance(value, ow.State | ow.Out) else value


def _copy(params: Params) -> Params:
    return jax.tree.map(jnp.copy, params)
