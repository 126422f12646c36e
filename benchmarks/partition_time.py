"""What does a model that is split over devices cost, beside a sharded ``jit`` over a scan of its layers?

A transformer with Adam on up to eight devices, parameters and slots split over the axis of the batch: FSDP.
Onward is given the plain loss, whose layers it rolls, and ``partition(program, {"data": 8}, {"*": "data"})``.

    sharded jit      by hand: parameters stacked, ``jax.lax.scan`` over them, ``jax.value_and_grad`` and the
                     update, all under ``jax.jit`` with a ``NamedSharding`` for each array in and out
    and checkpoint   the same with ``jax.checkpoint`` around each layer; beside ``recompute(program, 0.25)``

Both sides split the same dimensions, donate their state, and must agree after three steps before anything is
timed. Below the table stands the temporary memory of each device over that of the peer, by
``memory_analysis``. Where JAX shows one device there are no rows: eight are made of the host by
``XLA_FLAGS=--xla_force_host_platform_device_count=8``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import onward as ow
from benchmarks import models
from benchmarks.by_hand import adam
from benchmarks.harness import Row, Side, compare
from benchmarks.models import Model

_RATE = 1e-3
_TARGET = 1.0
_LEAST = 0.25  # of what keeping everything takes: a layer keeps what it is given, as with jax.checkpoint


def model(quick: bool, checkpoint: bool = False) -> Model:
    """The model that is split."""
    if quick:
        return models.residual_mlp(layers=2, width=16, batch=16, checkpoint=checkpoint)
    return models.transformer(layers=8, d=128, heads=4, seq=64, batch=16, checkpoint=checkpoint)


def run(rounds: int | None = None, quick: bool = False) -> list[Row]:
    """A row for each step by hand; none where there is one device."""
    count = min(8, jax.device_count())
    return _rows(count, rounds, quick) if count > 1 else []


def _rows(count: int, rounds: int | None, quick: bool) -> list[Row]:
    name = f"{'residual MLP, 2' if quick else 'transformer, 8'} layers, {count} devices"
    rows = []
    for against, lean in {"sharded jit": False, "and checkpoint": True}.items():
        if lean and quick:
            break
        (ours, used), (peer, needed) = onward(model(quick), count, lean), by_hand(model(quick, lean), count)
        check_agreement(ours, peer)
        sides = (partial(side.seconds, 1 if quick else 2) for side in (ours, peer))
        row = compare(name, against, *sides, rounds or (2 if quick else 20), None if quick else _TARGET)
        told = f"{used / needed:.2f} of the temporary memory, {used / 2**20:.2f} MiB a device"
        rows.append(replace(row, note=told))
    return rows


def onward(model: Model, count: int, lean: bool = False) -> tuple[Side, int]:
    """The step of a partitioned Program, and its temporary memory on each device."""
    loss, params, data = model
    program = ow.roll(ow.Adam(_RATE).minimize(loss, params, *data))
    program = ow.partition(ow.recompute(program, _LEAST) if lean else program, {"data": count}, {"*": "data"})
    step = ow.compile(program)
    state = step.init(params)
    return Side(step, state, data), step.executable(state, *data).memory.temp_size_in_bytes


def by_hand(model: Model, count: int) -> tuple[Side, int]:
    """The step of a scan over stacked layers under ``jax.jit``, and its temporary memory on each device."""
    loss, params, data = model
    params = params | {"layers": _stacked(params["layers"])}
    mesh = Mesh(jax.devices()[:count], ("data",))
    slots = tuple(jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    split = {"layers": _split(params["layers"], mesh, 1)}
    split |= {name: _split(params[name], mesh) for name in params if name != "layers"}
    shardings = split, (split, split), NamedSharding(mesh, P())
    state = jax.device_put((params, slots, jnp.int32(0)), shardings)
    placed = jax.device_put(data, NamedSharding(mesh, P("data")))

    def step(state: Any, *data: Array) -> tuple[Any, Array]:
        params, slots, t = state
        value, gradient = jax.value_and_grad(loss)(params, *data)
        return (*adam(params, gradient, slots, t + 1, _RATE), t + 1), value

    compiled = (
        jax.jit(step, donate_argnums=0, out_shardings=(shardings, None)).lower(state, *placed).compile()
    )
    return Side(compiled, state, placed), compiled.memory_analysis().temp_size_in_bytes


def _split(params: Any, mesh: Mesh, leading: int = 0) -> Any:
    """For each array a sharding over the longest dimension that devices divide, behind ``leading`` ones."""

    def spec(x: Array) -> NamedSharding:
        fitting = [(n, -i) for i, n in enumerate(x.shape) if i >= leading and n % mesh.size == 0]
        at = [None] * -max(fitting)[1] if fitting else None
        return NamedSharding(mesh, P() if at is None else P(*at, "data"))

    return jax.tree.map(spec, params)


def _stacked(layers: list[Any]) -> Any:
    return jax.tree.map(lambda *arrays: np.stack(arrays), *layers)


def check_agreement(ours: Side, peer: Side, steps: int = 3) -> None:
    """Raise ``AssertionError`` unless both sides have moved the parameters to the same place."""
    ours.seconds(steps)
    peer.seconds(steps)
    found = ours.state.parameters
    found = {**found, "layers": _stacked(found["layers"])}
    for a, b in zip(*map(jax.tree.leaves, (found, peer.state[0])), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        apart, size = (float(np.linalg.norm(np.ravel(x))) for x in (a - b, b))
        assert apart <= 1e-3 * size, f"parameters of size {size} are {apart} apart"
