"""flax.nnx: modules that hold their parameters, ``nnx.Optimizer``, ``nnx.jit``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array

from benchmarks.models import Model, Params
from benchmarks.sides import Running
from benchmarks.sides.by_optax import OPTIMIZERS
from benchmarks.workloads import Workload


def plain(work: Workload, model: Model) -> Running:
    """The training step of the documentation."""
    module = _MODULES[work.kind](model.params, **work.given("heads"))
    optimizer = nnx.Optimizer(module, OPTIMIZERS[work.optimizer](work.rate), wrt=nnx.Param)

    @nnx.jit
    def step(module: nnx.Module, optimizer: nnx.Optimizer, *data: Array) -> Array:
        value, gradients = nnx.value_and_grad(_loss)(module, *data)
        optimizer.update(module, gradients)
        return value

    return Running(lambda: step(module, optimizer, *model.data))


def _loss(module: Any, x: Array, *labels: Array) -> Array:
    if not labels:
        return module(x)
    return optax.softmax_cross_entropy_with_integer_labels(module(x), *labels).mean()


class _MLP(nnx.Module):
    def __init__(self, params: Params) -> None:
        self.layers = nnx.List([_linear(p) for p in params])

    def __call__(self, x: Array) -> Array:
        *hidden, last = self.layers
        for layer in hidden:
            x = nnx.relu(layer(x))
        return last(x)


class _ResidualMLP(nnx.Module):
    def __init__(self, params: Params) -> None:
        self.norms = nnx.List([_norm(p["norm"]) for p in params["layers"]])
        self.layers = nnx.List([_linear(p["dense"]) for p in params["layers"]])
        self.last = _linear(params["last"])

    def __call__(self, x: Array) -> Array:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + nnx.relu(layer(norm(x)))
        return self.last(x)


class _CNN(nnx.Module):
    def __init__(self, params: Params) -> None:
        *convolutions, last = params
        self.convolutions = nnx.List([_convolution(p) for p in convolutions])
        self.last = _linear(last)

    def __call__(self, x: Array) -> Array:
        for layer in self.convolutions:
            x = nnx.max_pool(nnx.relu(layer(x)), (2, 2), strides=(2, 2))
        return self.last(x.reshape(x.shape[0], -1))


class _LSTM(nnx.Module):
    def __init__(self, params: Params) -> None:
        w, b = params["cell"].values()
        self.hidden = w.shape[1] // 4
        inputs = w.shape[0] - self.hidden
        self.cell = nnx.OptimizedLSTMCell(inputs, self.hidden, rngs=nnx.Rngs(0))
        self.cell.dense_i = _linear(w[:inputs])
        forget = jnp.zeros_like(b).at[self.hidden : 2 * self.hidden].set(1)
        self.cell.dense_h = _linear({"w": w[inputs:], "b": b + forget})
        self.last = _linear(params["last"])

    def __call__(self, x: Array) -> Array:
        zeros = jnp.zeros((x.shape[1], self.hidden))
        (_, h), _ = jax.lax.scan(self.cell, (zeros, zeros), x)
        return self.last(h)


class _Block(nnx.Module):
    def __init__(self, params: Params, heads: int) -> None:
        self.heads = heads
        self.query, self.key, self.value, self.out, self.up, self.down = (
            _linear(params[name]) for name in ("query", "key", "value", "out", "up", "down")
        )
        self.norm_1, self.norm_2 = _norm(params["norm_1"]), _norm(params["norm_2"])

    def __call__(self, x: Array) -> Array:
        h = self.norm_1(x)
        q, k, v = (
            layer(h).reshape(*x.shape[:2], self.heads, -1) for layer in (self.query, self.key, self.value)
        )
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class _Transformer(nnx.Module):
    def __init__(self, params: Params, heads: int) -> None:
        words = params["words"]
        self.words = nnx.Embed(*words.shape, embedding_init=_constant(words), rngs=nnx.Rngs(0))
        self.places = nnx.Param(jnp.copy(params["places"]))
        self.blocks = nnx.List([_Block(p, heads) for p in params["layers"]])
        self.norm = _norm(params["norm"])
        self.last = _linear(params["last"])

    def __call__(self, words: Array) -> Array:
        x = self.words(words) + self.places
        for block in self.blocks:
            x = block(x)
        return self.last(self.norm(x))


class _Leaves(nnx.Module):
    def __init__(self, params: Params) -> None:
        self.leaves = nnx.List([nnx.Param(jnp.copy(p)) for p in params])

    def __call__(self, x: Array) -> Array:
        return jnp.sum(sum(p[...] for p in self.leaves) * x)


_MODULES: dict[str, Any] = {
    "mlp": _MLP,
    "residual_mlp": _ResidualMLP,
    "cnn": _CNN,
    "lstm": _LSTM,
    "transformer": _Transformer,
    "leaves": _Leaves,
}


def _constant(value: Array) -> Any:
    return lambda *_: jnp.copy(value)


def _linear(p: Params) -> nnx.Linear:
    """Of weight and bias, or of a weight alone."""
    if not isinstance(p, dict):
        return nnx.Linear(*p.shape, use_bias=False, kernel_init=_constant(p), rngs=nnx.Rngs(0))
    shape = p["w"].shape
    return nnx.Linear(*shape, kernel_init=_constant(p["w"]), bias_init=_constant(p["b"]), rngs=nnx.Rngs(0))


def _convolution(p: Params) -> nnx.Conv:
    *window, inputs, outputs = p["w"].shape
    given = {"kernel_init": _constant(p["w"]), "bias_init": _constant(p["b"])}
    return nnx.Conv(inputs, outputs, tuple(window), **given, rngs=nnx.Rngs(0))


def _norm(p: Params) -> nnx.LayerNorm:
    given = {"scale_init": _constant(p["scale"]), "bias_init": _constant(p["shift"])}
    return nnx.LayerNorm(p["scale"].size, epsilon=1e-6, **given, rngs=nnx.Rngs(0))
