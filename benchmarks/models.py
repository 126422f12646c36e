"""Models as plain functions of JAX, no framework: (loss, parameters, data) from a fixed seed.

>>> loss, params, data = mlp(sizes=(8, 4, 2), batch=3)
>>> [layer["w"].shape for layer in params], data[0].shape
([(8, 4), (4, 2)], (3, 8))
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

Params = Any
_WORDS = 256
_CLASSES = 10


class Model(NamedTuple):
    """A pure loss function, its parameters and one batch: ``loss(params, *data)``."""

    loss: Callable[..., Array]
    params: Params
    data: tuple[Array, ...]


def mlp(sizes: tuple[int, ...] = (784, 512, 512, _CLASSES), batch: int = 128) -> Model:
    """Dense layers with relu between them."""

    def loss(params: Params, x: Array, labels: Array) -> Array:
        *hidden, last = params
        for layer in hidden:
            x = jax.nn.relu(dense(layer, x))
        return cross_entropy(dense(last, x), labels)

    rng = np.random.default_rng(0)
    params = [_dense_init(rng, a, b) for a, b in pairwise(sizes)]
    data = (
        _noise(rng, (batch, sizes[0])),
        _whole_numbers(rng, (batch,), sizes[-1]),
    )
    return Model(loss, params, data)


def cnn(channels: tuple[int, ...] = (32, 64), size: int = 28, batch: int = 64) -> Model:
    """Convolutions of 3 x 3, each followed by relu and max pooling, then one dense layer."""

    def loss(params: Params, x: Array, labels: Array) -> Array:
        *convolutions, last = params
        for layer in convolutions:
            x = jax.lax.conv_general_dilated(
                x, layer["w"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x + layer["b"])
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return cross_entropy(dense(last, x.reshape(x.shape[0], -1)), labels)

    rng = np.random.default_rng(0)
    params = [
        {"w": _normal(rng, (3, 3, a, b), 9 * a), "b": jnp.zeros(b)}
        for a, b in zip((1, *channels[:-1]), channels, strict=True)
    ]
    left = size // 2 ** len(channels)
    params.append(_dense_init(rng, left * left * channels[-1], _CLASSES))
    data = (
        _noise(rng, (batch, size, size, 1)),
        _whole_numbers(rng, (batch,), _CLASSES),
    )
    return Model(loss, params, data)


def resnet(widths: tuple[int, ...] = (16, 32, 64), size: int = 32, batch: int = 16) -> Model:
    """Residual blocks of two convolutions, one for each width, and the mean over what is left of the image.

    Normalized over the channels, not over the batch: what one example adds does not depend on the others.
    """

    def convolved(w: Array, x: Array, stride: int = 1) -> Array:
        layout = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=layout)

    def block(layer: Params, x: Array, stride: int) -> Array:
        h = jax.nn.relu(normalized(layer["norm_1"], convolved(layer["first"], x, stride)))
        h = normalized(layer["norm_2"], convolved(layer["second"], h))
        return jax.nn.relu(h + convolved(layer["shortcut"], x, stride))

    def loss(params: Params, x: Array, labels: Array) -> Array:
        for i, layer in enumerate(params["blocks"]):
            x = block(layer, x, 2 if i else 1)
        return cross_entropy(dense(params["last"], x.mean((1, 2))), labels)

    rng = np.random.default_rng(0)
    params = {
        "blocks": [
            {
                "first": _normal(rng, (3, 3, a, b), 9 * a),
                "second": _normal(rng, (3, 3, b, b), 9 * b),
                "shortcut": _normal(rng, (1, 1, a, b), a),
                "norm_1": _norm_init(b),
                "norm_2": _norm_init(b),
            }
            for a, b in pairwise((3, *widths))
        ],
        "last": _dense_init(rng, widths[-1], _CLASSES),
    }
    data = (
        _noise(rng, (batch, size, size, 3)),
        _whole_numbers(rng, (batch,), _CLASSES),
    )
    return Model(loss, params, data)


def transformer(
    layers: int = 4,
    d: int = 128,
    heads: int = 4,
    seq: int = 128,
    batch: int = 8,
    words: int = _WORDS,
    checkpoint: bool = False,
    tied: bool = False,
) -> Model:
    """A causal model of text, layer norm before each block, its layers unrolled.

    It reads any of so many words, and tells for each which of the 256 kinds of word follows; ``tied``, which
    word, by the table that it reads them from. With ``checkpoint`` there is a ``jax.checkpoint`` around each
    layer.
    """

    def attention(layer: Params, x: Array) -> Array:
        q, k, v = (_heads(x @ layer[name], heads) for name in ("query", "key", "value"))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / jnp.sqrt(d / heads)
        seen = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
        return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ layer["out"]

    def block(layer: Params, x: Array) -> Array:
        x = x + attention(layer, normalized(layer["norm_1"], x))
        hidden = jax.nn.gelu(dense(layer["up"], normalized(layer["norm_2"], x)))
        return x + dense(layer["down"], hidden)

    one = jax.checkpoint(block) if checkpoint else block

    def loss(params: Params, words: Array, following: Array) -> Array:
        x = params["words"][words] + params["places"]
        x = _through(one, x, params["layers"])
        x = normalized(params["norm"], x)
        return cross_entropy(x @ params["words"].T if tied else dense(params["last"], x), following)

    rng = np.random.default_rng(0)
    square = ("query", "key", "value", "out")
    params = {
        "words": _normal(rng, (words, d), d),
        "places": _normal(rng, (seq, d), d),
        "layers": [
            {name: _normal(rng, (d, d), d) for name in square}
            | {"up": _dense_init(rng, d, 4 * d), "down": _dense_init(rng, 4 * d, d)}
            | {"norm_1": _norm_init(d), "norm_2": _norm_init(d)}
            for _ in range(layers)
        ],
        "norm": _norm_init(d),
    }
    text = _whole_numbers(rng, (batch, seq + 1), words)
    if tied:
        return Model(loss, params, (text[:, :-1], text[:, 1:]))
    params["last"] = _dense_init(rng, d, _WORDS)
    return Model(loss, params, (text[:, :-1], text[:, 1:] % _WORDS))


def _through(block: Callable[[Params, Array], Array], x: Array, layers: Params) -> Array:
    """Behind all layers: a list of them, unrolled; or a scan over one of them whose arrays are stacked."""
    if isinstance(layers, list):
        for layer in layers:
            x = block(layer, x)
        return x
    x, _ = jax.lax.scan(lambda x, layer: (block(layer, x), None), x, layers)
    return x


def lstm(hidden: int = 128, features: int = 32, seq: int = 64, batch: int = 32) -> Model:
    """One LSTM over a sequence as a ``jax.lax.scan``, and a dense layer on its last state."""

    def loss(params: Params, x: Array, labels: Array) -> Array:
        def cell(carry: tuple[Array, Array], now: Array) -> tuple[tuple[Array, Array], None]:
            h, c = carry
            gates = dense(params["cell"], jnp.concatenate([now, h], axis=1))
            i, f, g, o = jnp.split(gates, 4, axis=1)
            c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        start = jnp.zeros((x.shape[1], hidden))
        (h, _), _ = jax.lax.scan(cell, (start, start), x)
        return cross_entropy(dense(params["last"], h), labels)

    rng = np.random.default_rng(0)
    params = {
        "cell": _dense_init(rng, features + hidden, 4 * hidden),
        "last": _dense_init(rng, hidden, _CLASSES),
    }
    data = (
        _noise(rng, (seq, batch, features)),
        _whole_numbers(rng, (batch,), _CLASSES),
    )
    return Model(loss, params, data)


def residual_mlp(layers: int = 100, width: int = 32, batch: int = 32, checkpoint: bool = False) -> Model:
    """Narrow dense layers, each behind a layer norm and around it a sum: four small arrays in every layer.

    With ``checkpoint`` there is a ``jax.checkpoint`` around each layer.
    """

    def block(layer: Params, x: Array) -> Array:
        return x + jax.nn.relu(dense(layer["dense"], normalized(layer["norm"], x)))

    one = jax.checkpoint(block) if checkpoint else block

    def loss(params: Params, x: Array, labels: Array) -> Array:
        return cross_entropy(dense(params["last"], _through(one, x, params["layers"])), labels)

    rng = np.random.default_rng(0)
    params = {
        "layers": [
            {"norm": _norm_init(width), "dense": _dense_init(rng, width, width)} for _ in range(layers)
        ],
        "last": _dense_init(rng, width, _CLASSES),
    }
    return Model(loss, params, (_noise(rng, (batch, width)), _whole_numbers(rng, (batch,), _CLASSES)))


def leaves(count: int = 1000, size: int = 8) -> Model:
    """Many small arrays of which the loss is the sum: what remains is the cost of passing them on."""

    def loss(params: Params, x: Array) -> Array:
        return jnp.sum(sum(params) * x)

    rng = np.random.default_rng(0)
    return Model(loss, [_noise(rng, (size,)) for _ in range(count)], (jnp.ones(size),))


def line(batch: int = 8) -> Model:
    """Two parameters and next to no arithmetic: what remains is the cost of the call."""

    def loss(params: Params, x: Array, y: Array) -> Array:
        return jnp.mean((params["w"] * x + params["b"] - y) ** 2)

    rng = np.random.default_rng(0)
    params = {"w": jnp.float32(1), "b": jnp.float32(0)}
    return Model(loss, params, (_noise(rng, (batch,)), jnp.ones(batch)))


def _noise(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Normal numbers; from NumPy, since JAX would compile once for every shape."""
    return jnp.asarray(rng.standard_normal(shape, np.float32))


def _whole_numbers(rng: np.random.Generator, shape: tuple[int, ...], end: int) -> Array:
    return jnp.asarray(rng.integers(0, end, shape, np.int32))


def _normal(rng: np.random.Generator, shape: tuple[int, ...], fan_in: int) -> Array:
    return jnp.asarray(rng.normal(0, fan_in**-0.5, shape).astype(np.float32))


def _dense_init(rng: np.random.Generator, fan_in: int, fan_out: int) -> Params:
    return {"w": _normal(rng, (fan_in, fan_out), fan_in), "b": jnp.zeros(fan_out)}


def dense(layer: Params, x: Array) -> Array:
    return x @ layer["w"] + layer["b"]


def _norm_init(d: int) -> Params:
    return {"scale": jnp.ones(d), "shift": jnp.zeros(d)}


def normalized(layer: Params, x: Array) -> Array:
    centered = x - x.mean(-1, keepdims=True)
    variance = jnp.square(centered).mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt(variance + 1e-6) * layer["scale"] + layer["shift"]


def _heads(x: Array, heads: int) -> Array:
    return x.reshape(*x.shape[:2], heads, -1)


def cross_entropy(logits: Array, labels: Array) -> Array:
    logs = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(logs, labels[..., None], axis=-1).mean()
