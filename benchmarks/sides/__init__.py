"""The same training steps in several libraries, each written as people write it there.

A file is a library. Each builder takes a Workload and its Model (whose parameters every side begins with)
and returns a Running: a call that takes the next steps. What a side computes is checked by its losses.

    by_optax      jax.jit, jax.value_and_grad and optax, the state donated: what all others are compared with
    by_onward     minimize and compile, and what Onward offers beside them
    by_flax       flax.nnx: modules, nnx.Optimizer, nnx.jit
    by_equinox    equinox: modules, filter_jit, optax
    by_torch      torch: eager with fused optimizers; and with torch.compile
    by_keras      Keras on JAX: layers, compile, train_on_batch

Only what a worker is to run is imported, so none of them needs to be installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

from benchmarks.harness import ONWARD
from benchmarks.models import Model
from benchmarks.workloads import Workload

REFERENCE = "jit + optax"
CONTROL = "jit + optax, again"
SCAN = "jit + optax, a scan"
GIVEN_BACK = "onward, memory given back"
TEN_STEPS = "onward, 10 per call"
CORES = "onward, 2 cores"
ALL_CORES = "onward, cores='auto'"
NO_YNN = "onward, no YNN"
YNN_PRODUCTS = "onward, YNN for products"
YNN_CONVOLUTIONS = "onward, YNN for convolutions"
ONEDNN = "onward, oneDNN"
NO_FISSION = "onward, no fission"
HALF = "onward, half memory"
AS_MUCH = "onward, as much"
CHECKPOINT = "jax.checkpoint"


class Running(NamedTuple):
    """``advance`` takes so many steps in one call and returns their losses, which may still be computing.

    ``temporary`` compiles the step and returns the bytes of temporary memory that it asks for.
    """

    advance: Callable[[], Any]
    steps: int = 1
    temporary: Callable[[], int] | None = None


@dataclass(frozen=True)
class Entry:
    """Where a side is built, which package it needs, which models it has (all if none is named)."""

    builder: str
    package: str
    kinds: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def fits(self, work: Workload) -> bool:
        """Whether it has the model."""
        return not self.kinds or work.kind in self.kinds

    @property
    def is_installed(self) -> bool:
        """Whether its package can be imported."""
        return find_spec(self.package) is not None

    def build(self, work: Workload, model: Model) -> Running:
        """Everything up to the first call."""
        return self.builder_function()(work, model)

    def builder_function(self) -> Callable[[Workload, Model], Running]:
        """Import the file of the library, which may take seconds."""
        module, function = self.builder.split(":")
        found: Callable[[Workload, Model], Running] = getattr(import_module(f"{__name__}.{module}"), function)
        return found


_MODULES = ("mlp", "transformer", "residual_mlp", "cnn", "lstm", "leaves")
_LAYERS = ("mlp", "residual_mlp", "cnn", "lstm")
_TWO = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}

SIDES = {
    REFERENCE: Entry("by_optax:plain", "optax"),
    CONTROL: Entry("by_optax:plain", "optax"),
    SCAN: Entry("by_optax:scanned", "optax", ("transformer", "residual_mlp")),
    CHECKPOINT: Entry("by_optax:checkpointed", "optax", ("transformer", "residual_mlp")),
    ONWARD: Entry("by_onward:plain", "onward"),
    GIVEN_BACK: Entry("by_onward:memory_given_back", "onward"),
    TEN_STEPS: Entry("by_onward:ten_steps", "onward"),
    CORES: Entry("by_onward:on_two_cores", "onward", (), _TWO),
    ALL_CORES: Entry("by_onward:on_all_cores", "onward", (), _TWO),
    NO_YNN: Entry("by_onward:without_ynn", "onward"),
    YNN_PRODUCTS: Entry("by_onward:ynn_for_products", "onward"),
    YNN_CONVOLUTIONS: Entry("by_onward:ynn_for_convolutions", "onward"),
    ONEDNN: Entry("by_onward:onednn", "onward"),
    NO_FISSION: Entry("by_onward:without_fission", "onward"),
    HALF: Entry("by_onward:half_the_memory", "onward"),
    AS_MUCH: Entry("by_onward:memory_of_checkpoint", "optax", ("transformer", "residual_mlp")),
    "flax.nnx": Entry("by_flax:plain", "flax", _MODULES),
    "equinox": Entry("by_equinox:plain", "equinox", _MODULES),
    "torch": Entry("by_torch:eager", "torch", _MODULES),
    "torch.compile": Entry("by_torch:compiled", "torch", _MODULES),
    "keras": Entry("by_keras:plain", "keras", _LAYERS, {"KERAS_BACKEND": "jax"}),
}
PEERS = ("flax.nnx", "equinox", "torch", "torch.compile", "keras")
