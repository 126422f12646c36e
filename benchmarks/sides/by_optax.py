"""``jax.jit`` of ``jax.value_and_grad`` and an optax update, the state donated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from benchmarks.models import Model
from benchmarks.sides import Running
from benchmarks.workloads import CLIP, EPSILON, FIRST_SUM, MOMENTUM, WEIGHT_DECAY, Workload

OPTIMIZERS: dict[str, Callable[[float], Any]] = {
    "SGD": optax.sgd,
    "Momentum": lambda rate: optax.sgd(rate, momentum=MOMENTUM),
    "Adagrad": lambda rate: optax.adagrad(rate, initial_accumulator_value=FIRST_SUM, eps=EPSILON),
    "Adam": lambda rate: optax.adam(rate, eps=EPSILON),
    "clipped AdamW": lambda rate: optax.chain(
        optax.clip_by_global_norm(CLIP), optax.adamw(rate, eps=EPSILON, weight_decay=WEIGHT_DECAY)
    ),
}


def plain(work: Workload, model: Model) -> Running:
    """The step that people write."""
    step, state = step_of(work, model.loss, model)
    return _running(step, state, model)


def checkpointed(work: Workload, model: Model) -> Running:
    """The same with ``jax.checkpoint`` around every layer."""
    deep = replace(work, sizes={**work.sizes, "checkpoint": True})
    step, state = step_of(work, deep.model().loss, model)
    return _running(step, state, model)


def scanned(work: Workload, model: Model) -> Running:
    """The same as a ``jax.lax.scan`` over layers whose arrays are stacked, which compiles faster."""
    layers = jax.tree.map(lambda *arrays: jnp.stack(arrays), *model.params["layers"])
    stacked = model._replace(params={**model.params, "layers": layers})
    step, state = step_of(work, model.loss, stacked)
    return _running(step, state, stacked)


def step_of(work: Workload, loss: Callable[..., Array], model: Model) -> tuple[Any, Any]:
    """The jitted step of a loss, which takes its state over, and the first state."""
    optimizer = OPTIMIZERS[work.optimizer](work.rate)

    def step(state: Any, *data: Array) -> tuple[Any, Array]:
        params, slots = state
        value, gradients = jax.value_and_grad(loss)(params, *data)
        updates, slots = optimizer.update(gradients, slots, params)
        return (optax.apply_updates(params, updates), slots), value

    params = jax.tree.map(jnp.copy, model.params)
    return jax.jit(step, donate_argnums=0), (params, optimizer.init(params))


def temporary_bytes(step: Any, state: Any, model: Model) -> int:
    """The temporary memory of a jitted step, compiled once more for that."""
    analysis = step.lower(state, *model.data).compile().memory_analysis()
    return int(analysis.temp_size_in_bytes)


def _running(step: Any, state: Any, model: Model) -> Running:
    def advance() -> Array:
        nonlocal state
        state, value = step(state, *model.data)
        return value

    return Running(advance, temporary=lambda: temporary_bytes(step, state, model))
