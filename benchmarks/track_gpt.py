"""The model of the nanoGPT speedrun's track 3 as a plain function, in its own size and in a small one.

Root mean squares are normalized, places are rotations, queries and keys are normalized, the square of relu
stands between the two matrices of a block, logits are capped at 15; what a block adds begins at zero, and so
do the logits. Nothing of it is to be changed between two optimizers.

>>> size = Size(layers=2, d=8, heads=2, seq=4, words=16)
>>> params = init(size, seed=0)
>>> words = np.zeros((1, 4), np.int32)
>>> round(float(loss_of(size)(params, words, words)), 4), round(float(np.log(16)), 4)
(2.7726, 2.7726)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

Params = Any


@dataclass(frozen=True)
class Size:
    """How large the model is, and in which dtype it computes; parameters are float32."""

    layers: int = 12
    d: int = 768
    heads: int = 6
    seq: int = 1024
    words: int = 50_304
    embed: float = 1.0  # standard deviation of the embedding at the start
    dtype: str = "float32"


def init(size: Size, seed: int) -> Params:
    """The parameters before the first step, those of the track's tuned baseline."""
    rng, d = np.random.default_rng(seed), size.d

    def dense(inputs: int, outputs: int, scale: float = 1.0) -> Params:
        w = rng.normal(0, scale * (0.33 / inputs) ** 0.5, (inputs, outputs)) if scale else 0
        return {"w": jnp.full((inputs, outputs), w, jnp.float32), "b": jnp.zeros(outputs)}

    def block() -> Params:
        inside = {name: dense(d, d) for name in ("query", "key", "value")} | {"up": dense(d, 4 * d)}
        return inside | {
            "out": dense(d, d, 0.0),
            "down": dense(4 * d, d, 0.0),
            "norm_1": {"gain": jnp.ones(d)},
            "norm_2": {"gain": jnp.ones(d)},
        }

    return {
        "embed": jnp.asarray(rng.normal(0, size.embed, (size.words, d)), jnp.float32),
        "norm_1": {"gain": jnp.ones(d)},
        "layers": [block() for _ in range(size.layers)],
        "norm_2": {"gain": jnp.ones(d)},
        "head": dense(d, size.words, 0.0),
    }


def loss_of(size: Size) -> Callable[[Params, Array, Array], Array]:
    """The loss: the mean cross-entropy of the tokens that follow, in nats."""

    def attention(layer: Params, x: Array) -> Array:
        q, k, v = (
            _dense(layer[name], x).reshape(*x.shape[:2], size.heads, -1) for name in ("query", "key", "value")
        )
        q, k = _rotated(_normalized(q)), _rotated(_normalized(k))
        scale = 0.12 * 128 / q.shape[-1]  # the track's, whose heads have 128 numbers
        mixed = jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=True)
        return _dense(layer["out"], mixed.reshape(x.shape))

    def block(layer: Params, x: Array) -> Array:
        x = x + attention(layer, _gained(layer["norm_1"], x))
        hidden = jnp.square(jax.nn.relu(_dense(layer["up"], _gained(layer["norm_2"], x))))
        return x + _dense(layer["down"], hidden)

    def loss(params: Params, words: Array, following: Array) -> Array:
        x = _gained(params["norm_1"], params["embed"][words].astype(size.dtype))
        for layer in params["layers"]:
            x = block(layer, x)
        logits = _dense(params["head"], _gained(params["norm_2"], x)).astype(jnp.float32)
        logits = 15 * logits * jax.lax.rsqrt(jnp.square(logits) + 15**2)
        logs = jax.nn.log_softmax(logits)
        return -jnp.take_along_axis(logs, following[..., None], axis=-1).mean()

    return loss


def _dense(layer: Params, x: Array) -> Array:
    return x @ layer["w"].astype(x.dtype) + layer["b"].astype(x.dtype)


def _gained(layer: Params, x: Array) -> Array:
    return _normalized(x) * layer["gain"].astype(x.dtype)


def _normalized(x: Array) -> Array:
    """The last axis with a mean square of 1."""
    wide = x.astype(jnp.float32)
    square = jnp.square(wide).mean(-1, keepdims=True)
    return (wide * jax.lax.rsqrt(square + jnp.finfo(x.dtype).eps)).astype(x.dtype)


def _rotated(x: Array) -> Array:
    """Heads [batch, seq, heads, n], pairs of whose numbers turn with the place; half of the pairs stay."""
    quarter = x.shape[-1] // 4
    speed = np.concatenate([(1 / 1024) ** np.linspace(0, 1, quarter), np.zeros(quarter)])
    angle = np.outer(np.arange(x.shape[1]), speed)[None, :, None, :]
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos + b * sin, b * cos - a * sin], axis=-1).astype(x.dtype)
