"""torch on the same device: eager with fused optimizers, and the model through ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

import jax
import numpy as np
import torch
from torch import Tensor, nn, optim
from torch.nn import functional

from benchmarks.models import Model, Params
from benchmarks.sides import Running
from benchmarks.workloads import CLIP, EPSILON, FIRST_SUM, MOMENTUM, WEIGHT_DECAY, Workload

_OPTIMIZERS: dict[str, Callable[..., optim.Optimizer]] = {
    "SGD": lambda parameters, rate: optim.SGD(parameters, rate, fused=True),
    "Momentum": lambda parameters, rate: optim.SGD(parameters, rate, MOMENTUM, fused=True),
    "Adagrad": lambda parameters, rate: optim.Adagrad(
        parameters, rate, initial_accumulator_value=FIRST_SUM, eps=EPSILON, fused=True
    ),
    "Adam": lambda parameters, rate: optim.Adam(parameters, rate, eps=EPSILON, fused=True),
    "clipped AdamW": lambda parameters, rate: optim.AdamW(
        parameters, rate, eps=EPSILON, weight_decay=WEIGHT_DECAY, fused=True
    ),
}


def eager(work: Workload, model: Model) -> Running:
    """The training loop that people write."""
    module = _MODULES[work.kind](model.params, **work.given("heads"))
    return _running(work, model, module, module)


def compiled(work: Workload, model: Model, dtype: str = "float32") -> Running:
    """The same with ``torch.compile(model)``, in a dtype by ``torch.autocast``."""
    module = _MODULES[work.kind](model.params, **work.given("heads"))
    return _running(work, model, module, torch.compile(module), dtype)


def _running(
    work: Workload, model: Model, module: nn.Module, forward: Any, dtype: str = "float32"
) -> Running:
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    torch.set_float32_matmul_precision("high" if device == "cuda" else "highest")  # as JAX multiplies there
    module.to(device)
    lower = torch.autocast(device, getattr(torch, dtype), enabled=dtype != "float32")
    parameters = [p for p in module.parameters() if p.requires_grad]
    optimizer = _OPTIMIZERS[work.optimizer](parameters, work.rate)
    clips = work.optimizer.startswith("clipped")
    x, *labels = (torch.from_numpy(np.array(array)).to(device) for array in model.data)
    labels = [y.long() for y in labels]
    if work.kind == "cnn":
        x = x.permute(0, 3, 1, 2).contiguous()

    def advance() -> Tensor:
        optimizer.zero_grad()
        with lower:
            value = forward(x)
        if labels:
            value = functional.cross_entropy(value.flatten(0, -2).float(), labels[0].flatten())
        value.backward()
        if clips:
            nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        return value.detach()

    return Running(advance)


class Update:
    """The update alone, of parameters whose gradients are given: as ``benchmarks.harness.Side``.

    Clipping writes into the gradients. What is clipped once is of norm 1, so later updates have the same.
    """

    def __init__(self, optimizer: str, rate: float, params: Params, gradients: Params) -> None:
        self._parameters = [nn.Parameter(torch.from_numpy(np.array(p))) for p in params]
        for p, gradient in zip(self._parameters, gradients, strict=True):
            p.grad = torch.from_numpy(np.array(gradient))
        self.state = ([p.detach() for p in self._parameters],)
        self._optimizer = _OPTIMIZERS[optimizer](self._parameters, rate)
        self._clips = optimizer.startswith("clipped")

    def seconds(self, count: int) -> float:
        """How long one of ``count`` updates takes."""
        begin = perf_counter()
        for _ in range(count):
            if self._clips:
                nn.utils.clip_grad_norm_(self._parameters, CLIP)
            self._optimizer.step()
        return (perf_counter() - begin) / count


class _MLP(nn.Module):
    def __init__(self, params: Params) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_linear(p) for p in params])

    def forward(self, x: Tensor) -> Tensor:
        *hidden, last = self.layers
        for layer in hidden:
            x = functional.relu(layer(x))
        return last(x)


class _ResidualMLP(nn.Module):
    def __init__(self, params: Params) -> None:
        super().__init__()
        self.norms = nn.ModuleList([_norm(p["norm"]) for p in params["layers"]])
        self.layers = nn.ModuleList([_linear(p["dense"]) for p in params["layers"]])
        self.last = _linear(params["last"])

    def forward(self, x: Tensor) -> Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + functional.relu(layer(norm(x)))
        return self.last(x)


class _CNN(nn.Module):
    def __init__(self, params: Params) -> None:
        super().__init__()
        *convolutions, last = params
        self.convolutions = nn.ModuleList([_convolution(p) for p in convolutions])
        channels = convolutions[-1]["b"].size
        size = int((len(last["w"]) // channels) ** 0.5)
        w = last["w"].reshape(size, size, channels, -1).transpose(2, 0, 1, 3).reshape(last["w"].shape)
        self.last = _linear({"w": w, "b": last["b"]})

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.convolutions:
            x = functional.max_pool2d(functional.relu(layer(x)), 2)
        return self.last(x.flatten(1))


class _LSTM(nn.Module):
    def __init__(self, params: Params) -> None:
        super().__init__()
        w, b = params["cell"].values()
        hidden = w.shape[1] // 4
        inputs = w.shape[0] - hidden
        self.cell = nn.LSTM(inputs, hidden)
        forget = np.zeros(4 * hidden, np.float32)
        forget[hidden : 2 * hidden] = 1
        values = w[:inputs].T, w[inputs:].T, b + forget, np.zeros_like(forget)
        for parameter, value in zip(self.cell.parameters(), values, strict=True):
            _set(parameter, value)
        self.cell.bias_hh_l0.requires_grad_(False)  # the other libraries have one bias
        self.last = _linear(params["last"])

    def forward(self, x: Tensor) -> Tensor:
        _, (h, _) = self.cell(x)
        return self.last(h[0])


class _Block(nn.Module):
    def __init__(self, params: Params, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out, self.up, self.down = (
            _linear(params[name]) for name in ("query", "key", "value", "out", "up", "down")
        )
        self.norm_1, self.norm_2 = _norm(params["norm_1"]), _norm(params["norm_2"])

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm_1(x)
        layers = self.query, self.key, self.value
        q, k, v = (layer(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in layers)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm_2(x)), approximate="tanh"))


class _Transformer(nn.Module):
    def __init__(self, params: Params, heads: int) -> None:
        super().__init__()
        self.words = nn.Embedding(*params["words"].shape)
        self.places = nn.Parameter(torch.empty(params["places"].shape))
        _set(self.words.weight, params["words"])
        _set(self.places, params["places"])
        self.blocks = nn.ModuleList([_Block(p, heads) for p in params["layers"]])
        self.norm = _norm(params["norm"])
        self.last = _linear(params["last"]) if "last" in params else self._words_again

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places
        for block in self.blocks:
            x = block(x)
        return self.last(self.norm(x))

    def _words_again(self, x: Tensor) -> Tensor:
        """The table of words as the head, where the model has no other."""
        return functional.linear(x, self.words.weight)


class _Leaves(nn.Module):
    def __init__(self, params: Params) -> None:
        super().__init__()
        self.leaves = nn.ParameterList([torch.from_numpy(np.array(p)) for p in params])

    def forward(self, x: Tensor) -> Tensor:
        return (sum(self.leaves) * x).sum()


_MODULES: dict[str, Any] = {
    "mlp": _MLP,
    "residual_mlp": _ResidualMLP,
    "cnn": _CNN,
    "lstm": _LSTM,
    "transformer": _Transformer,
    "leaves": _Leaves,
}


def _set(parameter: Tensor, value: Any) -> None:
    parameter.data.copy_(torch.from_numpy(np.array(value)))


def _linear(p: Params) -> nn.Linear:
    """Of weight and bias, or of a weight alone."""
    w = p["w"] if isinstance(p, dict) else p
    layer = nn.Linear(*w.shape, bias=isinstance(p, dict))
    _set(layer.weight, w.T)
    if isinstance(p, dict):
        _set(layer.bias, p["b"])
    return layer


def _convolution(p: Params) -> nn.Conv2d:
    *window, inputs, outputs = p["w"].shape
    layer = nn.Conv2d(inputs, outputs, tuple(window), padding="same")
    _set(layer.weight, p["w"].transpose(3, 2, 0, 1))
    _set(layer.bias, p["b"])
    return layer


def _norm(p: Params) -> nn.LayerNorm:
    layer = nn.LayerNorm(p["scale"].size, eps=1e-6)
    _set(layer.weight, p["scale"])
    _set(layer.bias, p["shift"])
    return layer
