"""What does the update alone cost, against optax, and against torch where it is installed?

The gradients are given; what is timed is one call that updates parameters and slots: in Onward the update
pass of a Program, in optax ``update`` and ``apply_updates`` under one ``jax.jit``; both donate their state
and are waited for; torch has its fused optimizers. The hyperparameters are constants in optax and state in
Onward. All sides must agree after three updates before anything is timed.

    one leaf        10 million numbers in one array
    many leaves     1,000 arrays of 1,000 numbers: mostly what passing 4,000 arrays through ``jax.jit`` costs
    transformer     12 layers of width 256: 150 arrays, 9.6 million numbers
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import onward as ow
from benchmarks.harness import ONWARD, Row, Side, in_turn, ratio_row
from benchmarks.models import transformer

try:
    import optax
except ImportError:
    optax = None

_RATE = 1e-3
_CLIP = 1.0


class Case(NamedTuple):
    """Parameters, the optimizers (that of torch by name), and the ratios to reach."""

    name: str
    params: list[Any]
    ours: ow.Optimizer
    optax: Any
    torch: str
    targets: dict[str, float]


def cases(quick: bool) -> list[Case]:
    """Three shapes of parameters, each with Adam and with AdamW behind a clip of the global norm."""
    rng = np.random.default_rng(0)
    size, count, small = (1000, 4, 10) if quick else (10_000_000, 1000, 1000)
    model = transformer(layers=1, d=8, heads=2, seq=4, batch=2) if quick else transformer(12, 256, 4, 8, 1)
    shapes = {
        "one leaf": ([(size,)], {"optax": 1.0, "torch": 1.0}),
        "many leaves": ([(small,)] * count, {"optax": 0.1}),
        "transformer": ([p.shape for p in jax.tree.leaves(model.params)], {"optax": 1.0, "torch": 1.0}),
    }
    found = []
    for name, (sizes, targets) in shapes.items():
        params = [jnp.asarray(rng.normal(size=s).astype("float32")) for s in sizes]
        targets = {} if quick else targets
        found.append(Case(f"{name}, Adam", params, ow.Adam(_RATE), optax.adam(_RATE), "Adam", targets))
        clipped = ow.AdamW(_RATE, rules=[ow.ClipByGlobalNorm(_CLIP)])
        peer = optax.chain(optax.clip_by_global_norm(_CLIP), optax.adamw(_RATE, weight_decay=1e-2))
        found.append(Case(f"{name}, clip + AdamW", params, clipped, peer, "clipped AdamW", targets))
    return found


def run(rounds: int | None = None, quick: bool = False) -> list[Row]:
    """A row for each case; none where optax is not installed."""
    if optax is None:
        return []
    rows = []
    for case in cases(quick):
        gradients = [jnp.asarray(np.cos(p)) for p in case.params]
        sides = {ONWARD: _onward(case, gradients), "optax": _optax(case, gradients)}
        if find_spec("torch") is not None:
            sides["torch"] = _torch(case, gradients)
        check_agreement([v.name for v in sides[ONWARD].step.program.parameters], *sides.values())
        count = 1 if quick else max(1, int(0.05 / min(side.seconds(2) for side in sides.values())))
        timed = {name: partial(side.seconds, count) for name, side in sides.items()}
        times = in_turn(timed, rounds or (2 if quick else 40))
        rows += [
            ratio_row(case.name, peer, times[ONWARD], times[peer], target=case.targets.get(peer))
            for peer in times
            if peer != ONWARD
        ]
    return rows


def check_agreement(names: list[str], ours: Side, *peers: Any) -> None:
    """Raise ``AssertionError`` unless three updates take the parameters to the same place."""
    ours.seconds(3)
    for peer in peers:
        peer.seconds(3)
        for name, b in zip(names, peer.state[0], strict=True):
            np.testing.assert_allclose(ours.state[name], b, rtol=1e-4, atol=1e-5)


def _onward(case: Case, gradients: list[Any]) -> Side:
    def loss(params: list[Any]) -> Any:
        return sum(jnp.sum(p) for p in params)

    update = ow.graph.update_pass(case.ours.minimize(loss, case.params))
    step = ow.compile(update)
    named = {v.name: p for v, p in zip(update.parameters, case.params, strict=True)}
    by_name = {g.name: x for (_, g), x in zip(update.gradients, gradients, strict=True)}
    return Side(step, step.init(named), tuple(by_name[v.name] for v in update.inputs))


def _optax(case: Case, gradients: list[Any]) -> Side:
    def step(state: Any, *gradients: Any) -> tuple[Any, Any]:
        params, slots = state
        change, slots = case.optax.update(list(gradients), slots, params)
        return (optax.apply_updates(params, change), slots), ()

    params = [jnp.copy(p) for p in case.params]
    return Side(jax.jit(step, donate_argnums=0), (params, case.optax.init(params)), tuple(gradients))


def _torch(case: Case, gradients: list[Any]) -> Any:
    update: Any = import_module("benchmarks.sides.by_torch").Update
    return update(case.torch, _RATE, case.params, gradients)
