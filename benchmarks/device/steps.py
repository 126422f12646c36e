"""A training step of a work on each side: Onward, the best one written by hand, torch.compile.

Every side begins with the same parameters and reads the same batch; a side is a ``harness.Side`` or a
``Torch``, both of which tell the seconds of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from time import perf_counter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

import onward as ow
from benchmarks.device import networks
from benchmarks.device.part import Sheet
from benchmarks.device.works import Work
from benchmarks.harness import Side
from benchmarks.models import Model, cross_entropy, dense
from benchmarks.sides import SIDES, by_onward, by_optax

HAND, ONWARD, MIXED, TORCH = "by hand", "onward", "onward, mixed_precision", "torch.compile"
_CHECKED = 3


class Sides(NamedTuple):
    """A work on this device, its model, and how attention is computed."""

    work: Work
    model: Model
    attention: str

    def program(self) -> ow.Program:
        """The training Program, of the network in plain Python."""
        optimizer = by_onward.OPTIMIZERS[self.work.optimizer](self.work.rate)
        return optimizer.minimize(self.model.loss, self.model.params, *self.model.data)

    def onward(self) -> Side:
        """As ``compile`` makes it."""
        return self.of_step(ow.compile(self.program()))

    def of_step(self, step: ow.Step) -> Side:
        """Of a step that was compiled otherwise."""
        return Side(step, step.init(self.model.params), self.model.data)

    def mixed(self) -> Side:
        """The network in float32, which ``mixed_precision`` computes in the work's dtype."""
        wide = self._replace(model=self.model._replace(loss=self._loss_in("float32")))
        return self.of_step(ow.compile(ow.mixed_precision(wide.program(), self.work.dtype)))

    def _loss_in(self, dtype: str) -> Callable[..., Array]:
        return networks.loss_of(self.work.builder, **self.work.options(self.attention, dtype))

    def by_hand(self, model: Model | None = None) -> Side:
        """``jax.jit`` of ``jax.value_and_grad`` and optax, donated; a scan over layers; an LSTM by parts."""
        model = model or self.best()
        step, state = by_optax.step_of(self.work.workload, model.loss, model)
        return Side(step, state, model.data)

    def best(self) -> Model:
        """The model as it is best written by hand: layers stacked, products before a loop."""
        if self.work.has_attention:
            return self.model._replace(params=networks.stacked(self.model.params))
        return self.model._replace(loss=lstm_by_parts) if self.work.kind == "lstm" else self.model

    def torch(self) -> Torch:
        """``torch.compile``, on the same device."""
        build = SIDES[TORCH].builder_function()
        return Torch(build(self.work.workload, self.model, self.work.dtype).advance)


class Torch:
    """A step of torch; its loss is waited for, and so is the device."""

    def __init__(self, advance: Callable[[], Any]) -> None:
        self._advance = advance

    def seconds(self, count: int) -> float:
        """How long one of ``count`` steps takes."""
        begin = perf_counter()
        for _ in range(count):
            self.loss = float(self._advance())
        return (perf_counter() - begin) / count


def prepared(work: Work, sheet: Sheet) -> Sides:
    """The work at the sizes of this device, and attention by cuDNN where that works."""
    sized = work.sized(sheet.tiny)
    attention = "xla"
    if jax.default_backend() == "gpu" and sized.has_attention and sized.dtype != "float32":
        attention = "cudnn" if networks.works_on("cudnn") else "xla"
        sheet.note(f"attention in {sized.dtype} on all sides of JAX: {attention}")
    return Sides(sized, sized.model(attention), attention)


def losses(side: Side | Torch) -> list[float]:
    """Of the first three steps, which are taken."""
    found = []
    for _ in range(_CHECKED):
        side.seconds(1)
        found.append(side.loss if isinstance(side, Torch) else side.loss())
    return found


def why_no_torch(work: Work) -> str:
    """Why torch is not compared, in a sentence; empty if it is."""
    if find_spec("torch") is None:
        return "torch is not installed, so it is not compared"
    if work.peers not in SIDES[TORCH].kinds:
        return f"torch is not compared on {work.name}: benchmarks.sides.by_torch has no such network"
    torch = import_module("torch")
    if jax.default_backend() == "gpu" and not torch.cuda.is_available():
        return f"torch {torch.__version__} has no build for this GPU, so it is not compared"
    if jax.default_backend() not in ("gpu", "cpu"):
        return f"torch is not compared on {jax.default_backend()}"
    return ""


def lstm_by_parts(params: Any, x: Array, labels: Array) -> Array:
    """The loss of ``models.lstm``, the products with what it reads before the loop, as one."""
    features, w = x.shape[-1], params["cell"]["w"]
    hidden = w.shape[1] // 4

    def turn(carry: tuple[Array, Array], read: Array) -> tuple[tuple[Array, Array], None]:
        h, c = carry
        i, f, g, o = jnp.split(read + h @ w[features:], 4, axis=1)
        c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

    start = jnp.zeros((x.shape[1], hidden))
    (h, _), _ = lax.scan(turn, (start, start), x @ w[:features] + params["cell"]["b"])
    return cross_entropy(dense(params["last"], h), labels)
