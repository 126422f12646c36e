"""Onward: ``minimize``, ``compile`` with its defaults, ``step``; and what it offers beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

import onward as ow
from benchmarks.models import Model
from benchmarks.sides import Running, by_optax
from benchmarks.workloads import CLIP, EPSILON, FIRST_SUM, MOMENTUM, WEIGHT_DECAY, Workload
from onward.develop.recompute.recompute import recompute
from onward.execute.host_memory import keep_host_memory

OPTIMIZERS: dict[str, Callable[[float], ow.Optimizer]] = {
    "SGD": ow.SGD,
    "Momentum": lambda rate: ow.Momentum(rate, momentum=MOMENTUM),
    "Adagrad": lambda rate: ow.Adagrad(rate, epsilon=EPSILON, initial_accumulator=FIRST_SUM),
    "Adam": lambda rate: ow.Adam(rate, epsilon=EPSILON),
    "clipped AdamW": lambda rate: ow.AdamW(
        rate, epsilon=EPSILON, weight_decay=WEIGHT_DECAY, rules=[ow.ClipByGlobalNorm(CLIP)]
    ),
}
_STEPS = 10


def plain(work: Workload, model: Model) -> Running:
    """The step as ``compile`` makes it."""
    return _running(_program(work, model), model)


def memory_kept(work: Workload, model: Model) -> Running:
    """The same in a process that keeps the memory of a step for the next one."""
    keep_host_memory()
    return plain(work, model)


def half_the_memory(work: Workload, model: Model) -> Running:
    """The same Program with half the memory that keeping everything takes."""
    return _running(recompute(_program(work, model), budget=work.budget), model)


def memory_of_checkpoint(work: Workload, model: Model) -> Running:
    """The same Program with as much temporary memory as ``jax.checkpoint`` around each layer needs."""
    temporary = by_optax.checkpointed(work, model).temporary
    assert temporary is not None
    return _running(recompute(_program(work, model), budget=temporary()), model)


def ten_steps(work: Workload, model: Model) -> Running:
    """Ten steps in each compiled call, two of them at once: while one computes, the other is laid out."""
    step = ow.compile(_program(work, model))
    state = step.init(model.params)
    batches = [model.data] * (2 * _STEPS)

    def advance() -> Any:
        nonlocal state
        state, outs = step.run(state, batches, steps=_STEPS)
        return outs.loss

    return Running(advance, len(batches))


def _program(work: Workload, model: Model) -> ow.Program:
    return OPTIMIZERS[work.optimizer](work.rate).minimize(model.loss, model.params, *model.data)


def _running(program: ow.Program, model: Model) -> Running:
    step = ow.compile(program)
    state = step.init(model.params)

    def advance() -> Any:
        nonlocal state
        state, out = step(state, *model.data)
        return out.loss

    def temporary() -> int:
        return by_optax.temporary_bytes(jax.jit(step.function, donate_argnums=0), state, model)

    return Running(advance, temporary=temporary)
