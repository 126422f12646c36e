"""What does a step over 8 micro-batches cost, against ``optax.MultiSteps`` and against a loop by hand?

One cycle is timed: eight micro-batches and the one update by Adam. ``optax.MultiSteps`` computes its inner
update at every micro-batch and throws seven of eight away; it is driven as well as it can be.

    one by one    each micro-batch is a call of one jitted step, its state donated; the last one is waited for
    in a scan     the same step over all eight micro-batches in one ``jax.lax.scan``, jitted and donated
    by hand       no MultiSteps: a scan that adds up gradients, then one ``optax.adam``

How much is saved depends on what the update costs beside a micro-batch: it is the same for each, however
few rows that has (a text has 32 words). Data is cut for the peers before anything is timed; Onward is fed
the whole batch. All sides must agree after three cycles with a learning rate that moves the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

import onward as ow
from benchmarks import models
from benchmarks.by_hand import Case, adam, check_agreement
from benchmarks.harness import Row, Side, compare
from benchmarks.models import Model
from onward.develop.accumulation.accumulate import accumulate

try:
    import optax
except ImportError:
    optax = None

STEPS = 8
_RATE, _VISIBLE_RATE = 1e-6, 1e-3
_TARGET, _BY_HAND_TARGET = 0.6, 1.02
_ROUND = 0.05  # seconds that one side of a round lasts at least

Peer = Callable[[Case, float], Side]


def cases(quick: bool) -> list[Case]:
    """An MLP and a small transformer, their batch eight micro-batches long."""
    if quick:
        mlp = models.mlp((8, 8, 4), batch=2 * STEPS)
        transformer = models.transformer(layers=1, d=8, heads=2, seq=4, batch=STEPS)
    else:
        mlp = models.mlp(batch=16 * STEPS)
        transformer = models.transformer(layers=2, d=128, seq=32, batch=STEPS)
    return [
        Case("MLP, 16 rows", mlp, ow.Adam, adam, 2),
        Case("transformer, 1 text", transformer, ow.Adam, adam, 2),
    ]


def run(rounds: int | None = None, quick: bool = False) -> list[Row]:
    """For each model a row against each peer; none where optax is not installed."""
    rounds = rounds or (2 if quick else 60)
    rows: list[Row] = []
    for case in cases(quick) if optax is not None else ():
        for against, peer, target in PEERS:
            sides = _onward(case, _VISIBLE_RATE), peer(case, _VISIBLE_RATE)
            check_agreement(case, *sides)
            if not quick:
                sides = _onward(case, _RATE), peer(case, _RATE)
            rows.append(_compared(case.name, against, sides, rounds, quick, target))
    return rows


def _compared(
    name: str, against: str, sides: tuple[Side, Side], rounds: int, quick: bool, target: float
) -> Row:
    for side in sides:
        side.seconds(3)
    count = 1 if quick else int(_ROUND / min(side.seconds(5) for side in sides)) + 1
    ours, peer = (partial(side.seconds, count) for side in sides)
    return compare(name, against, ours, peer, rounds, None if quick else target)


def _onward(case: Case, rate: float) -> Side:
    loss, params, data = case.model
    step = ow.compile(accumulate(case.optimizer(rate).minimize(loss, params, *data), STEPS))
    return Side(step, step.init(params), data)


def _one_by_one(case: Case, rate: float) -> Side:
    one, state = _multi_steps(case.model, rate)
    jitted = jax.jit(one, donate_argnums=0)

    def cycle(state: Any, *pieces: tuple[Array, ...]) -> tuple[Any, Array]:
        for piece in pieces:
            state, value = jitted(state, piece)
        return state, value

    pieces = ([jnp.asarray(piece) for piece in np.asarray(x)] for x in _cut(case.model))
    return Side(cycle, state, tuple(zip(*pieces, strict=True)))


def _in_a_scan(case: Case, rate: float) -> Side:
    one, state = _multi_steps(case.model, rate)

    def cycle(state: Any, *data: Array) -> tuple[Any, Array]:
        state, values = lax.scan(one, state, data)
        return state, values.mean()

    return Side(jax.jit(cycle, donate_argnums=0), state, _cut(case.model))


def _by_hand(case: Case, rate: float) -> Side:
    loss, params, _ = case.model
    optimizer = optax.adam(rate)

    def cycle(state: Any, *data: Array) -> tuple[Any, Array]:
        params, slots = state

        def add(total: Any, piece: tuple[Array, ...]) -> tuple[Any, None]:
            found = jax.value_and_grad(loss)(params, *piece)
            return jax.tree.map(jnp.add, total, found), None

        zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
        (value, gradient), _ = lax.scan(add, zeros, data)
        gradient = jax.tree.map(lambda g: g / STEPS, gradient)
        change, slots = optimizer.update(gradient, slots, params)
        return (optax.apply_updates(params, change), slots), value / STEPS

    params = jax.tree.map(jnp.copy, params)
    return Side(jax.jit(cycle, donate_argnums=0), (params, optimizer.init(params)), _cut(case.model))


def _multi_steps(model: Model, rate: float) -> tuple[Callable[..., tuple[Any, Array]], Any]:
    """One micro-batch of ``optax.MultiSteps``, and the state that it begins with."""
    optimizer = optax.MultiSteps(optax.adam(rate), STEPS)

    def one(state: Any, piece: tuple[Array, ...]) -> tuple[Any, Array]:
        params, slots = state
        value, gradient = jax.value_and_grad(model.loss)(params, *piece)
        change, slots = optimizer.update(gradient, slots, params)
        return (optax.apply_updates(params, change), slots), value

    params = jax.tree.map(jnp.copy, model.params)
    return one, (params, optimizer.init(params))


def _cut(model: Model) -> tuple[Array, ...]:
    """The data as ``[steps, rows, ...]``."""
    return tuple(jnp.asarray(np.reshape(x, (STEPS, -1, *x.shape[1:]))) for x in model.data)


PEERS: list[tuple[str, Peer, float]] = [
    ("MultiSteps, one by one", _one_by_one, _TARGET),
    ("MultiSteps in a scan", _in_a_scan, _TARGET),
    ("by hand", _by_hand, _BY_HAND_TARGET),
]
