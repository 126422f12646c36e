"""What is trained on a device: networks, optimizers, sizes for accelerators and for a CPU, FLOP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax

import onward as ow
from benchmarks import models
from benchmarks.device import networks, peaks
from benchmarks.models import Model
from benchmarks.workloads import WORKLOADS, Workload

_GPT2 = {"layers": 12, "width": 768, "heads": 12, "sequence": 1024, "batch": 8, "words": 50257}
_LLAMA = {"layers": 4, "width": 4096, "heads": 32, "groups": 8, "hidden": 14336, "sequence": 8192, "batch": 1}
_RESNET = {"size": 224, "batch": 64}
_TINY_GPT2 = {"layers": 2, "width": 32, "heads": 2, "sequence": 16, "batch": 2, "words": 64}
_TINY_LLAMA = {
    "layers": 2,
    "width": 32,
    "heads": 4,
    "groups": 2,
    "hidden": 64,
    "sequence": 16,
    "batch": 1,
}
_TINY_RESNET = {"stages": ((1, 4), (1, 8)), "size": 16, "batch": 2}


@dataclass(frozen=True)
class Work:
    """A network with its optimizer in one dtype.

    Attributes:
        kind: a builder of ``networks``, or of ``models``.
        peers: the kind by which other libraries know the network, if they do.
    """

    name: str
    kind: str
    optimizer: str
    rate: float
    dtype: str = "float32"
    sizes: Mapping[str, Any] = field(default_factory=dict)
    tiny: Mapping[str, Any] = field(default_factory=dict)
    peers: str = ""

    def sized(self, tiny: bool) -> Work:
        """With the sizes that are to be run; the losses of a tiny network are to move as well."""
        if not tiny:
            return self
        return replace(self, sizes=self.tiny, rate=self.rate * 10)

    def having(self, **sizes: Any) -> Work:
        """With some sizes replaced."""
        return replace(self, sizes={**self.sizes, **sizes})

    @property
    def builder(self) -> Callable[..., Model]:
        """The function that makes its model."""
        if self.kind in networks.BUILDERS:
            return networks.BUILDERS[self.kind]
        found: Callable[..., Model] = getattr(models, self.kind)
        return found

    def options(self, attention: str = "xla", dtype: str | None = None) -> dict[str, Any]:
        """What its builder is called with."""
        more: dict[str, Any] = {}
        if self.kind in networks.BUILDERS:
            more["dtype"] = dtype or self.dtype
        if self.has_attention:
            more["attention"] = attention if more["dtype"] != "float32" else "xla"
        return {**self.sizes, **more}

    def model(self, attention: str = "xla", dtype: str | None = None) -> Model:
        """The loss, parameters and one batch, always the same."""
        return self.builder(**self.options(attention, dtype))

    def shapes(self, attention: str = "xla") -> Model:
        """The same with shapes in place of arrays."""
        return networks.shapes_of(self.builder, **self.options(attention))

    @property
    def has_attention(self) -> bool:
        """Whether it has layers of attention, and so a list of layers."""
        return self.kind in ("gpt2", "llama")

    @property
    def workload(self) -> Workload:
        """As the sides of other libraries take it."""
        return Workload(self.name, self.peers, self.optimizer, self.rate, self.sizes)

    def tokens(self, model: Model) -> int:
        """What a step reads: words, images, or turns."""
        first = model.data[0]
        if self.kind in ("gpt2", "llama", "lstm"):
            return int(first.shape[0] * first.shape[1])
        return int(first.shape[0])

    def flops(self, model: Model) -> tuple[float, float]:
        """The FLOP of a step by its parameters, and with those of attention."""
        if self.kind == "resnet_50":
            counted = 3.0 * ow.cost(ow.trace(model.loss, model.params, *model.data)).flops
            return counted, counted
        plain = peaks.six_n(_parameters(model), self.tokens(model))
        if not self.has_attention:
            return plain, plain
        layers, width = self.sizes["layers"], self.sizes["width"]
        return plain, plain + peaks.attention(layers, width, self.sizes["sequence"], self.tokens(model))


def _parameters(model: Model) -> int:
    """How many there are, without the positions, which are only looked up."""
    places = model.params.get("places", ()) if isinstance(model.params, dict) else ()
    leaves, looked_up = (jax.tree.leaves(tree) for tree in (model.params, places))
    return sum(leaf.size for leaf in leaves) - sum(leaf.size for leaf in looked_up)


_MLP, _LSTM = WORKLOADS["MLP, Adam"], WORKLOADS["LSTM, Adagrad"]
_MLP_SIZES = {"sizes": (1024, 4096, 4096, 1024), "batch": 1024}
_LSTM_SIZES = {"hidden": 1024, "features": 1024, "seq": 64, "batch": 64}

WORKS = {
    work.name: work
    for work in (
        Work("GPT-2 124M, bfloat16", "gpt2", "Adam", 1e-4, "bfloat16", _GPT2, _TINY_GPT2, "transformer"),
        Work("GPT-2 124M, float32", "gpt2", "Adam", 1e-4, "float32", _GPT2, _TINY_GPT2, "transformer"),
        Work("Llama 3.1 8B layers, bfloat16", "llama", "Adam", 1e-5, "bfloat16", _LLAMA, _TINY_LLAMA),
        Work("ResNet-50, bfloat16", "resnet_50", "Momentum", 1e-3, "bfloat16", _RESNET, _TINY_RESNET),
        Work("MLP", "mlp", "Adam", 1e-5, "float32", _MLP_SIZES, _MLP.quick, "mlp"),
        Work("LSTM", "lstm", "Adagrad", 1e-3, "float32", _LSTM_SIZES, _LSTM.quick, "lstm"),
    )
}
