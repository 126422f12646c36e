"""equinox: modules that are pytrees, of single examples; ``eqx.filter_jit`` and optax."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import Array

from benchmarks.models import Model, Params
from benchmarks.sides import Running
from benchmarks.sides.by_optax import OPTIMIZERS
from benchmarks.workloads import Workload

_KEY = jax.random.key(0)


def plain(work: Workload, model: Model) -> Running:
    """The training step of the documentation."""
    module = _MODULES[work.kind](model.params, **work.given("heads"))
    optimizer = OPTIMIZERS[work.optimizer](work.rate)
    slots = optimizer.init(eqx.filter(module, eqx.is_inexact_array))

    @eqx.filter_jit
    def step(module: Any, slots: Any, *data: Array) -> tuple[Any, Any, Array]:
        value, gradients = eqx.filter_value_and_grad(_loss)(module, *data)
        updates, slots = optimizer.update(gradients, slots, eqx.filter(module, eqx.is_inexact_array))
        return eqx.apply_updates(module, updates), slots, value

    def advance() -> Array:
        nonlocal module, slots
        module, slots, value = step(module, slots, *model.data)
        return value

    return Running(advance)


def _loss(module: Any, x: Array, *labels: Array) -> Array:
    if not labels:
        return module(x)
    logits = jax.vmap(module, in_axes=module.batch_axis)(x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, *labels).mean()


class _Module(eqx.Module):
    batch_axis = 0


class _MLP(_Module):
    layers: list[eqx.nn.Linear]

    def __init__(self, params: Params) -> None:
        self.layers = [_linear(p) for p in params]

    def __call__(self, x: Array) -> Array:
        *hidden, last = self.layers
        for layer in hidden:
            x = jax.nn.relu(layer(x))
        return last(x)


class _ResidualMLP(_Module):
    norms: list[eqx.nn.LayerNorm]
    layers: list[eqx.nn.Linear]
    last: eqx.nn.Linear

    def __init__(self, params: Params) -> None:
        self.norms = [_norm(p["norm"]) for p in params["layers"]]
        self.layers = [_linear(p["dense"]) for p in params["layers"]]
        self.last = _linear(params["last"])

    def __call__(self, x: Array) -> Array:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + jax.nn.relu(layer(norm(x)))
        return self.last(x)


class _CNN(_Module):
    convolutions: list[eqx.nn.Conv2d]
    pool: eqx.nn.MaxPool2d
    last: eqx.nn.Linear

    def __init__(self, params: Params) -> None:
        *convolutions, last = params
        self.convolutions = [_convolution(p) for p in convolutions]
        self.pool = eqx.nn.MaxPool2d(2, 2)
        self.last = _linear(last)

    def __call__(self, x: Array) -> Array:
        x = x.transpose(2, 0, 1)
        for layer in self.convolutions:
            x = self.pool(jax.nn.relu(layer(x)))
        return self.last(x.transpose(1, 2, 0).ravel())


class _LSTM(_Module):
    cell: eqx.nn.LSTMCell
    last: eqx.nn.Linear
    batch_axis = 1

    def __init__(self, params: Params) -> None:
        w, b = params["cell"].values()
        hidden = w.shape[1] // 4
        inputs = w.shape[0] - hidden
        forget = jnp.zeros_like(b).at[hidden : 2 * hidden].set(1)
        cell = eqx.nn.LSTMCell(inputs, hidden, key=_KEY)
        values = w[:inputs].T, w[inputs:].T, b + forget
        self.cell = eqx.tree_at(lambda cell: (cell.weight_ih, cell.weight_hh, cell.bias), cell, values)
        self.last = _linear(params["last"])

    def __call__(self, x: Array) -> Array:
        zeros = jnp.zeros(self.cell.hidden_size)
        (h, _), _ = jax.lax.scan(lambda carry, now: (self.cell(now, carry), None), (zeros, zeros), x)
        return self.last(h)


class _Block(_Module):
    heads: int
    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    out: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    norm_1: eqx.nn.LayerNorm
    norm_2: eqx.nn.LayerNorm

    def __init__(self, params: Params, heads: int) -> None:
        self.heads = heads
        self.query, self.key, self.value, self.out, self.up, self.down = (
            _linear(params[name]) for name in ("query", "key", "value", "out", "up", "down")
        )
        self.norm_1, self.norm_2 = _norm(params["norm_1"]), _norm(params["norm_2"])

    def __call__(self, x: Array) -> Array:
        h = jax.vmap(self.norm_1)(x)
        layers = self.query, self.key, self.value
        q, k, v = (jax.vmap(layer)(h).reshape(len(x), self.heads, -1) for layer in layers)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + jax.vmap(self.out)(attended.reshape(x.shape))
        return x + jax.vmap(lambda h: self.down(jax.nn.gelu(self.up(self.norm_2(h)))))(x)


class _Transformer(_Module):
    words: eqx.nn.Embedding
    places: Array
    blocks: list[_Block]
    norm: eqx.nn.LayerNorm
    last: eqx.nn.Linear

    def __init__(self, params: Params, heads: int) -> None:
        self.words = eqx.nn.Embedding(weight=params["words"])
        self.places = params["places"]
        self.blocks = [_Block(p, heads) for p in params["layers"]]
        self.norm = _norm(params["norm"])
        self.last = _linear(params["last"])

    def __call__(self, words: Array) -> Array:
        x = jax.vmap(self.words)(words) + self.places
        for block in self.blocks:
            x = block(x)
        return jax.vmap(lambda h: self.last(self.norm(h)))(x)


class _Leaves(_Module):
    leaves: list[Array]

    def __call__(self, x: Array) -> Array:
        return jnp.sum(sum(self.leaves) * x)


_MODULES: dict[str, Any] = {
    "mlp": _MLP,
    "residual_mlp": _ResidualMLP,
    "cnn": _CNN,
    "lstm": _LSTM,
    "transformer": _Transformer,
    "leaves": _Leaves,
}


def _linear(p: Params) -> eqx.nn.Linear:
    """Of weight and bias, or of a weight alone."""
    if not isinstance(p, dict):
        layer = eqx.nn.Linear(*p.shape, use_bias=False, key=_KEY)
        return eqx.tree_at(lambda layer: layer.weight, layer, p.T)
    layer = eqx.nn.Linear(*p["w"].shape, key=_KEY)
    return eqx.tree_at(lambda layer: (layer.weight, layer.bias), layer, (p["w"].T, p["b"]))


def _convolution(p: Params) -> eqx.nn.Conv2d:
    *window, inputs, outputs = p["w"].shape
    layer = eqx.nn.Conv2d(inputs, outputs, tuple(window), padding="SAME", key=_KEY)
    values = p["w"].transpose(3, 2, 0, 1), p["b"][:, None, None]
    return eqx.tree_at(lambda layer: (layer.weight, layer.bias), layer, values)


def _norm(p: Params) -> eqx.nn.LayerNorm:
    layer = eqx.nn.LayerNorm(p["scale"].size, eps=1e-6)
    return eqx.tree_at(lambda layer: (layer.weight, layer.bias), layer, (p["scale"], p["shift"]))
