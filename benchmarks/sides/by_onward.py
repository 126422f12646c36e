"""Onward: ``minimize``, ``compile`` with its defaults, ``step``; and what it offers beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

import onward as ow
from benchmarks.models import Model
from benchmarks.sides import Running, by_optax
from benchmarks.workloads import CLIP, EPSILON, FIRST_SUM, MOMENTUM, WEIGHT_DECAY, Workload
from onward.core.compiler import OPTION
from onward.develop.recompute.recompute import recompute
from onward.execute.trials.tune import LIBRARIES
from onward.typing import OptionSet

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
_PRODUCTS = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"


def plain(work: Workload, model: Model) -> Running:
    """The step as ``compile`` makes it."""
    return _running(_program(work, model), model)


def memory_given_back(work: Workload, model: Model) -> Running:
    """The same, the memory of a step given back to the system after it."""
    return _running(_program(work, model), model, keep_memory=False)


def on_two_cores(work: Workload, model: Model) -> Running:
    """The step as two replicas, one on each of two host devices."""
    return _on_cores(work, model, min(2, jax.local_device_count()))


def on_all_cores(work: Workload, model: Model) -> Running:
    """The step on as many cores as ``compile`` chooses."""
    return _on_cores(work, model, "auto")


def _on_cores(work: Workload, model: Model, cores: int | str) -> Running:
    model = _batch_first(model) if work.kind == "lstm" else model
    return _running(_program(work, model), model, cores=cores)


def _batch_first(model: Model) -> Model:
    """The same with the examples along the first axis of all data, which is the one that is cut."""
    sequence, labels = model.data
    loss = model.loss
    return Model(
        lambda p, x, y: loss(p, x.swapaxes(0, 1), y), model.params, (sequence.swapaxes(0, 1), labels)
    )


def without_ynn(work: Workload, model: Model) -> Running:
    """Nothing is given to the library YNNPACK."""
    return _running(_program(work, model), model, options={OPTION: ""})


def ynn_for_products(work: Workload, model: Model) -> Running:
    """YNNPACK is given single products."""
    return _running(_program(work, model), model, options={OPTION: _PRODUCTS})


def ynn_for_convolutions(work: Workload, model: Model) -> Running:
    """YNNPACK is given single products and single convolutions."""
    both = f"{_PRODUCTS},LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"
    return _running(_program(work, model), model, options={OPTION: both})


def onednn(work: Workload, model: Model) -> Running:
    """Products and what is around them are given to the library oneDNN."""
    [chosen] = (found for found in LIBRARIES if found.name == "oneDNN products")
    return _running(_program(work, model), model, options=chosen)


def without_fission(work: Workload, model: Model) -> Running:
    """Loops stay as they are."""
    return _running(_program(work, model), model, options=OptionSet(fission=False))


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


def _running(program: ow.Program, model: Model, **options: Any) -> Running:
    step = ow.compile(program, **options)
    state = step.init(model.params)

    def advance() -> Any:
        nonlocal state
        state, out = step(state, *model.data)
        return out.loss

    def temporary() -> int:
        return int(step.executable(state, *model.data).memory.temp_size_in_bytes)

    return Running(advance, temporary=temporary)
