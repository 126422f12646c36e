"""What all sides compute: a model, its sizes, an optimizer.

The learning rates are small, for many steps on one batch with a larger one would drive the gradients into
denormal numbers, on which some libraries are slow; they are large enough for the losses to move.

>>> WORKLOADS["MLP, Adam"].small.model().data[0].shape
(4, 8)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks import models
from benchmarks.models import Model

# The same on all sides:
WEIGHT_DECAY, CLIP, MOMENTUM, FIRST_SUM, EPSILON = 1e-2, 1.0, 0.9, 0.1, 1e-8

_TEXT = {"layers": 4, "d": 128, "heads": 4, "seq": 128, "batch": 8}
_SHORT_TEXT = {"layers": 24, "d": 128, "heads": 4, "seq": 64, "batch": 8}
_GPT2 = {"layers": 12, "d": 768, "heads": 12, "seq": 256, "batch": 1, "words": 50_257, "tied": True}
_QUICK_TEXT = {"layers": 1, "d": 8, "heads": 2, "seq": 4, "batch": 2}


@dataclass(frozen=True)
class Workload:
    """One of ``benchmarks.models`` with an optimizer: a training step that every side takes.

    ``budget`` is the part of its memory that is left when it recomputes.
    """

    name: str
    kind: str
    optimizer: str
    rate: float
    sizes: Mapping[str, Any] = field(default_factory=dict)
    quick: Mapping[str, Any] = field(default_factory=dict)
    budget: float = 0.5

    def model(self) -> Model:
        """The loss, parameters and data, always the same."""
        made: Model = getattr(models, self.kind)(**self.sizes)
        return made

    def given(self, *names: str) -> dict[str, Any]:
        """Those of the sizes that the model has, for libraries that build it from its parameters."""
        return {name: self.sizes[name] for name in names if name in self.sizes}

    @property
    def small(self) -> Workload:
        """The same in tiny, to see that everything runs."""
        return replace(self, sizes=self.quick, rate=1000 * self.rate, budget=0.8)


WORKLOADS = {
    work.name: work
    for work in (
        Workload("MLP, Adam", "mlp", "Adam", 1e-6, quick={"sizes": (8, 8, 4), "batch": 4}),
        Workload("4-layer transformer", "transformer", "clipped AdamW", 1e-6, _TEXT, _QUICK_TEXT),
        Workload("24-layer transformer", "transformer", "clipped AdamW", 1e-6, _SHORT_TEXT, _QUICK_TEXT),
        Workload("GPT-2, 124 M", "transformer", "Adam", 1e-6, _GPT2, {**_QUICK_TEXT, "tied": True}),
        Workload(
            "100-layer MLP",
            "residual_mlp",
            "Adam",
            1e-6,
            {"layers": 100, "width": 32, "batch": 32},
            {"layers": 3, "width": 8, "batch": 64},
        ),
        Workload(
            "100-layer MLP, batch 1",
            "residual_mlp",
            "Adam",
            1e-6,
            {"layers": 100, "width": 32, "batch": 1},
            {"layers": 3, "width": 4, "batch": 1},
        ),
        Workload("CNN, Momentum", "cnn", "Momentum", 1e-5, quick={"channels": (2, 2), "size": 8, "batch": 2}),
        Workload(
            "LSTM, Adagrad",
            "lstm",
            "Adagrad",
            1e-4,
            quick={"hidden": 8, "features": 4, "seq": 4, "batch": 2},
        ),
        Workload("1,000 leaves, SGD", "leaves", "SGD", 1e-6, quick={"count": 10}),
        Workload("2 numbers, SGD", "line", "SGD", 1e-6),
    )
}
