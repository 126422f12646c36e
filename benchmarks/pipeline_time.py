"""What does a pipeline cost beside one by hand, and how long do stages wait under each schedule?

A residual network with Adam in four stages, a batch in eight micro-batches. Onward is given the plain loss.

    GPipe by hand    what JAX alone offers: one program for all devices, parameters stacked by stage, a
                     ``jax.lax.scan`` in a ``shard_map`` whose every turn sends activations on by
                     ``ppermute``, with ``jax.value_and_grad`` of it all. Both must agree after three steps
    1f1b             ``zero_bubble`` beside it, of a network whose layers take equally long forward, for the
                     input gradient and for the weight gradient, as the schedules count. Idle is the share of
                     a step in which a stage does not compute; how long it computes, one device without
                     stages tells. Once the works compute, in as many stages as there are cores; once they
                     sleep (``benchmarks.slowed``), in four stages, whatever cores there are

Where JAX shows fewer than four devices there are no rows: four are made of the host by
``XLA_FLAGS=--xla_force_host_platform_device_count=4``. Run it by

    python -m benchmarks pipeline_time --rounds 7

Nothing else may run beside it: where the stages share one core, all schedules take the same time. There is
no row of sleeping stages without a C++ compiler.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import onward as ow
from benchmarks.by_hand import adam
from benchmarks.harness import Row, Side, compare, in_turn, ratio_row
from benchmarks.models import Model
from benchmarks.slowed import slowed
from onward.typing import Pipeline

_RATE, _TARGET = 1e-3, 1.0
STAGES, MICRO_BATCHES = 4, 8
_WIDTH = 64
_SCHEDULES = ("zero_bubble", "1f1b")
_ALONE = "one device"
Params = Any
Slow = Callable[[Array], Array]


def run(rounds: int | None = None, quick: bool = False) -> list[Row]:
    """A row beside the pipeline by hand, and two of the schedules; none where there are too few devices."""
    if jax.device_count() < STAGES:
        return []
    sizes = (STAGES, 8, 16) if quick else (2 * STAGES, 512, 1024)
    rounds = rounds or (2 if quick else 9)
    rows = [_beside_by_hand(sizes, rounds, quick)]
    computing = uniform(max(2, min(STAGES, cores())), looping(100 if quick else 2_000))
    rows.append(_schedules("stages that take equally long", computing, rounds))
    if (slow := slowed(microseconds=100 if quick else 20_000)) is not None:
        more = () if quick else ("gpipe",)
        rows.append(
            _schedules("stages that sleep equally long", uniform(2 if quick else STAGES, slow), rounds, more)
        )
    return rows


def model(layers: int, width: int, batch: int) -> Model:
    """A residual network whose layers are alike, so that stages can be stacked by hand."""
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(batch, width)).astype("float32") for _ in range(2))
    params = {
        f"layer_{i}": rng.normal(0, width**-0.5, (width, width)).astype("float32") for i in range(layers)
    }
    return Model(_loss, params, (x, y))


def _loss(params: Params, x: Array, y: Array) -> Array:
    for name, w in params.items():
        with jax.named_scope(name):
            x = _layer(x, w)
    return jnp.mean((x - y) ** 2)


def _layer(x: Array, w: Array) -> Array:
    return x + jnp.tanh(x @ w)


def _beside_by_hand(sizes: tuple[int, int, int], rounds: int, quick: bool) -> Row:
    layers, width, batch = sizes
    made = model(*sizes)
    ours, peer = onward(made, ow.Adam(_RATE), "gpipe"), by_hand(made)
    check_agreement(ours, peer)
    name = f"{layers} layers of {width}, {batch} rows, 4 stages"
    sides = (partial(whole_step, side) for side in (ours, peer))
    return compare(name, "GPipe by hand", *sides, rounds, None if quick else _TARGET)


def onward(model: Model, optimizer: ow.Optimizer, schedule: str, stages: int = STAGES) -> Side:
    """The step of a Pipeline."""
    step = ow.compile(cut(model, optimizer, schedule, stages))
    return Side(step, step.init(model.params), model.data)


def cut(model: Model, optimizer: ow.Optimizer, schedule: str, stages: int) -> Pipeline:
    """The Pipeline, each stage of which has equally many layers."""
    loss, params, data = model
    names = list(params)
    begins = [names[i * len(names) // stages] for i in range(1, stages)]
    program = optimizer.minimize(loss, params, *data)
    return ow.pipeline(program, stages, MICRO_BATCHES, schedule, at=begins, is_sum=False)


def by_hand(model: Model) -> Side:
    """The step of a scan with ``ppermute`` under ``shard_map``, as JAX's documentation has it."""
    _, params, data = model
    mesh = Mesh(jax.devices()[:STAGES], ("stage",))
    apart = NamedSharding(mesh, P("stage"))
    stacked = jax.device_put(np.stack(list(params.values())), apart)
    slots = tuple(jax.device_put(jnp.zeros_like(stacked), apart) for _ in range(2))
    state = (stacked, slots, jax.device_put(jnp.int32(0), NamedSharding(mesh, P())))
    placed = jax.device_put(data, NamedSharding(mesh, P()))
    loss = jax.shard_map(_piped, mesh=mesh, in_specs=(P("stage"), P(), P()), out_specs=P())

    def step(state: Any, *data: Array) -> tuple[Any, Array]:
        params, slots, t = state
        value, gradient = jax.value_and_grad(loss)(params, *data)
        return (*adam(params, gradient, slots, t + 1, _RATE), t + 1), value

    return Side(jax.jit(step, donate_argnums=0).lower(state, *placed).compile(), state, placed)


def _piped(params: Array, x: Array, y: Array) -> Array:
    """The loss of a batch, as each stage computes it with its layers."""
    stage = lax.axis_index("stage")
    parts = x.reshape(MICRO_BATCHES, -1, x.shape[1])

    def turn(carried: Array, i: Array) -> tuple[Array, Array]:
        h = jnp.where(stage == 0, parts[jnp.minimum(i, MICRO_BATCHES - 1)], carried)
        h, _ = lax.scan(lambda h, w: (_layer(h, w), None), h, params)
        return lax.ppermute(h, "stage", [(s, s + 1) for s in range(STAGES - 1)]), h

    empty = lax.pcast(jnp.zeros_like(parts[0]), "stage", to="varying")
    _, made = lax.scan(turn, empty, jnp.arange(MICRO_BATCHES + STAGES - 1))
    last = jnp.mean((made[STAGES - 1 :].reshape(x.shape) - y) ** 2)
    return lax.psum(jnp.where(stage == STAGES - 1, last, 0.0), "stage")


def check_agreement(ours: Side, peer: Side, steps: int = 3) -> None:
    """Raise ``AssertionError`` unless both sides have moved the parameters to the same place."""
    ours.seconds(steps)
    peer.seconds(steps)
    found = np.stack([np.asarray(w) for w in ours.state.parameters.values()])
    np.testing.assert_allclose(found, np.asarray(peer.state[0]), atol=1e-4)


def _schedules(case: str, made: Model, rounds: int, more: Sequence[str] = ()) -> Row:
    """Zero-bubble beside 1F1B, each layer a stage, and how long stages wait under these and more."""
    names, stages = (*_SCHEDULES, *more), len(made.params)
    sides = {name: onward(made, ow.SGD(_RATE), name, stages) for name in names}
    alone = one_device(made)
    measures = {name: partial(whole_step, side) for name, side in {**sides, _ALONE: alone}.items()}
    in_turn(measures, 2)
    times = in_turn(measures, rounds)
    row = ratio_row(case, "1f1b", *(times[name] for name in _SCHEDULES))
    told = [f"{stages} stages"]
    for name in names:
        shares = [alone / (stages * time) for alone, time in zip(times[_ALONE], times[name], strict=True)]
        counted = schedule_idle(made, name, stages)
        told.append(f"{name} idle {1 - median(shares):.0%} as measured, {counted:.0%} as counted")
    return replace(row, side=_SCHEDULES[0], note="; ".join(told))


def whole_step(side: Side) -> float:
    """How long a step takes until all of its state is there: the loss is there long before."""
    begin = perf_counter()
    side.seconds(1)
    jax.block_until_ready(jax.tree.leaves(side.state))
    return perf_counter() - begin


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def schedule_idle(model: Model, schedule: str, stages: int) -> float:
    """The idle share that the schedule counts."""
    return cut(model, ow.SGD(_RATE), schedule, stages).schedule.idle


def one_device(model: Model) -> Side:
    """The step over the same micro-batches on one device, which waits for nothing."""
    loss, params, data = model
    program = ow.SGD(_RATE).minimize(loss, params, *data)
    step = ow.compile(ow.accumulate(program, MICRO_BATCHES, is_sum=False), roll=False)
    return Side(step, step.init(params), data)


def looping(turns: int) -> Slow:
    """A function that computes for so many turns of a loop."""
    half = np.eye(_WIDTH, dtype="float32") / 2
    return lambda x: lax.fori_loop(0, turns, lambda _, a: jnp.tanh(a @ half + x), x)


def uniform(stages: int, slow: Slow) -> Model:
    """A network of one layer for each stage, each of whose three works is so slow."""
    half = np.eye(_WIDTH, dtype="float32") / 2

    def long(x: Array) -> Array:
        # a product of that size: what XLA counts few operations in, JAX runs on a CPU before the call returns
        return slow(jnp.tanh(x @ half))

    @jax.custom_vjp
    def layer(x: Array, w: Array) -> Array:
        return long(x * w)

    def backward(kept: tuple[Array, Array], g: Array) -> tuple[Array, Array]:
        x, w = kept
        return long(g * w), long(g * x).sum(0)

    layer.defvjp(lambda x, w: (layer(x, w), (x, w)), backward)

    def loss(params: Params, x: Array) -> Array:
        x = x * params["layer_0"]  # so that the first layer has an input gradient as well
        for name, w in params.items():
            with jax.named_scope(name):
                x = layer(x, w)
        return jnp.mean(x**2)

    ones = np.ones((1, _WIDTH), "float32")
    params = {f"layer_{i}": np.ones((_WIDTH,), "float32") for i in range(stages)}
    return Model(loss, params, (np.repeat(ones, 16 * MICRO_BATCHES, 0),))
