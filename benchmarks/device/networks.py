"""Networks of the sizes that people train on accelerators, as plain functions: drawn where they will run.

    loss, params, data = gpt2(layers=2, width=64, heads=2, sequence=8, batch=2, words=16)

``params["layers"]`` may be a list, or stacked with ``stacked``: then a ``jax.lax.scan`` runs over them.
Parameters are float32; what a network computes in another dtype is cast where it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from benchmarks.models import Model, Params, cross_entropy, dense, normalized

_CLASSES = 1000
_STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))


def gpt2(
    layers: int = 12,
    width: int = 768,
    heads: int = 12,
    sequence: int = 1024,
    batch: int = 8,
    words: int = 50257,
    dtype: str = "float32",
    attention: str = "xla",
) -> Model:
    """GPT-2 of 124 million parameters: the table of words is the head as well; no biases in attention."""

    def block(x: Array, layer: Params) -> Array:
        layer = _cast(layer, dtype)
        h = normalized(layer["norm_1"], x)
        q, k, v = (_in_heads(h @ layer[name], heads) for name in ("query", "key", "value"))
        x = x + _attended(q, k, v, attention) @ layer["out"]
        return x + dense(layer["down"], jax.nn.gelu(dense(layer["up"], normalized(layer["norm_2"], x))))

    def loss(params: Params, text: Array, following: Array) -> Array:
        table = params["words"].astype(dtype)
        x = table[text] + params["places"].astype(dtype)
        x = _through(block, x, params["layers"])
        logits = normalized(_cast(params["norm"], dtype), x) @ table.T
        return cross_entropy(logits.astype(jnp.float32), following)

    def layer(key: Array) -> Params:
        keys = iter(jax.random.split(key, 6))
        square = {name: _drawn(next(keys), width, width) for name in ("query", "key", "value", "out")}
        return {
            **square,
            "up": {"w": _drawn(next(keys), width, 4 * width), "b": jnp.zeros(4 * width)},
            "down": {"w": _drawn(next(keys), 4 * width, width), "b": jnp.zeros(width)},
            "norm_1": _norm(width),
            "norm_2": _norm(width),
        }

    def begin(key: Array) -> tuple[Params, tuple[Array, ...]]:
        first, second, third, *keys = jax.random.split(key, layers + 3)
        text = jax.random.randint(third, (batch, sequence + 1), 0, words)
        params = {
            "words": 0.02 * jax.random.normal(first, (words, width)),
            "places": 0.02 * jax.random.normal(second, (sequence, width)),
            "layers": [layer(k) for k in keys],
            "norm": _norm(width),
        }
        return params, (text[:, :-1], text[:, 1:])

    return _made(loss, begin)


def llama(
    layers: int = 4,
    width: int = 4096,
    heads: int = 32,
    groups: int = 8,
    hidden: int = 14336,
    sequence: int = 8192,
    batch: int = 1,
    dtype: str = "bfloat16",
    attention: str = "xla",
) -> Model:
    """Layers of Llama 3.1 8B, between no embedding and no head; the loss is a mean of squares."""
    size = width // heads

    def block(x: Array, layer: Params) -> Array:
        layer = _cast(layer, dtype)
        h = _scaled(layer["norm_1"], x)
        q = _turned(_in_heads(h @ layer["query"], heads))
        k = _turned(_in_heads(h @ layer["key"], groups))
        x = x + _attended(q, k, _in_heads(h @ layer["value"], groups), attention) @ layer["out"]
        h = _scaled(layer["norm_2"], x)
        return x + (jax.nn.silu(h @ layer["gate"]) * (h @ layer["up"])) @ layer["down"]

    def loss(params: Params, x: Array, y: Array) -> Array:
        x = _through(block, x.astype(dtype), params["layers"])
        return jnp.mean((x.astype(jnp.float32) - y) ** 2)

    shapes = {
        "query": (width, width),
        "key": (width, groups * size),
        "value": (width, groups * size),
        "out": (width, width),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }

    def layer(key: Array) -> Params:
        keys = jax.random.split(key, len(shapes))
        drawn = {name: _drawn(k, *shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}
        return {**drawn, "norm_1": jnp.ones(width), "norm_2": jnp.ones(width)}

    def begin(key: Array) -> tuple[Params, tuple[Array, ...]]:
        first, second, *keys = jax.random.split(key, layers + 2)
        x, y = (jax.random.normal(k, (batch, sequence, width)) for k in (first, second))
        return {"layers": [layer(k) for k in keys]}, (x, y)

    return _made(loss, begin)


def resnet_50(
    stages: tuple[tuple[int, int], ...] = _STAGES, size: int = 224, batch: int = 64, dtype: str = "float32"
) -> Model:
    """ResNet-50 as it trains: normalized over the batch. Running statistics are not kept."""

    def convolved(w: Array, x: Array, stride: int = 1) -> Array:
        layout = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=layout)

    def norm(layer: Params, x: Array) -> Array:
        wide = x.astype(jnp.float32)
        mean, variance = wide.mean((0, 1, 2)), wide.var((0, 1, 2))
        scaled = (wide - mean) * lax.rsqrt(variance + 1e-5) * layer["scale"] + layer["shift"]
        return scaled.astype(x.dtype)

    def block(layer: Params, x: Array, stride: int) -> Array:
        h = jax.nn.relu(norm(layer["norm_1"], convolved(layer["first"], x)))
        h = jax.nn.relu(norm(layer["norm_2"], convolved(layer["second"], h, stride)))
        h = norm(layer["norm_3"], convolved(layer["third"], h))
        if "shortcut" in layer:
            x = norm(layer["norm_4"], convolved(layer["shortcut"], x, stride))
        return jax.nn.relu(x + h)

    def loss(params: Params, x: Array, labels: Array) -> Array:
        params = _cast(params, dtype)
        x = jax.nn.relu(norm(params["norm"], convolved(params["stem"], x.astype(dtype), 2)))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for i, stage in enumerate(params["stages"]):
            for j, layer in enumerate(stage):
                x = block(layer, x, 2 if i and not j else 1)
        return cross_entropy(dense(params["last"], x.mean((1, 2))).astype(jnp.float32), labels)

    def layer(key: Array, inputs: int, inner: int) -> Params:
        keys = jax.random.split(key, 4)
        made = {
            "first": _kernel(keys[0], 1, inputs, inner),
            "second": _kernel(keys[1], 3, inner, inner),
            "third": _kernel(keys[2], 1, inner, 4 * inner),
            **{f"norm_{n}": _norm(inner * m) for n, m in ((1, 1), (2, 1), (3, 4))},
        }
        if inputs == 4 * inner:
            return made
        return made | {"shortcut": _kernel(keys[3], 1, inputs, 4 * inner), "norm_4": _norm(4 * inner)}

    def stage(key: Array, inputs: int, count: int, inner: int) -> list[Params]:
        keys = jax.random.split(key, count)
        return [layer(k, 4 * inner if i else inputs, inner) for i, k in enumerate(keys)]

    def begin(key: Array) -> tuple[Params, tuple[Array, ...]]:
        stem, last, images, labels, *keys = jax.random.split(key, len(stages) + 4)
        widths = [stages[0][1], *(4 * inner for _, inner in stages)]
        made = zip(keys, stages, pairwise(widths), strict=True)
        params = {
            "stem": _kernel(stem, 7, 3, widths[0]),
            "norm": _norm(widths[0]),
            "stages": [stage(k, inputs, *counts) for k, counts, (inputs, _) in made],
            "last": {"w": _drawn(last, widths[-1], _CLASSES), "b": jnp.zeros(_CLASSES)},
        }
        x = jax.random.normal(images, (batch, size, size, 3))
        return params, (x, jax.random.randint(labels, (batch,), 0, _CLASSES))

    return _made(loss, begin)


def stacked(params: Params) -> Params:
    """The same with the layers of a list as one tree of arrays, for a scan over them."""
    return {**params, "layers": jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])}


def shapes_of(make: Callable[..., Model], **sizes: Any) -> Model:
    """The model with shapes in place of arrays: nothing is drawn, and no memory taken."""
    found: list[Callable[..., Array]] = []

    def begin() -> tuple[Params, tuple[Array, ...]]:
        model = make(**sizes)
        found.append(model.loss)
        return model.params, model.data

    return Model(lambda *arguments: found[0](*arguments), *jax.eval_shape(begin))


def loss_of(make: Callable[..., Model], **sizes: Any) -> Callable[..., Array]:
    """The loss alone, of parameters that are there already."""
    return shapes_of(make, **sizes).loss


def works_on(implementation: str) -> bool:
    """Whether attention of bfloat16 can be computed and derived so here."""
    x = jnp.ones((1, 128, 2, 64), jnp.bfloat16)
    loss = lambda x: _attended(x, x, x, implementation).astype(jnp.float32).sum()  # noqa: E731
    try:
        jax.block_until_ready(jax.jit(jax.grad(loss))(x))
    except Exception:
        return False
    return True


def _made(loss: Callable[..., Array], begin: Callable[[Array], tuple[Params, tuple[Array, ...]]]) -> Model:
    return Model(loss, *jax.jit(begin)(jax.random.key(0)))


def _through(block: Callable[[Array, Params], Array], x: Array, layers: Params) -> Array:
    """One layer after the other, or a scan where they are stacked."""
    if not isinstance(layers, list):
        return lax.scan(lambda x, layer: (block(x, layer), None), x, layers)[0]
    for layer in layers:
        x = block(x, layer)
    return x


def _attended(q: Array, k: Array, v: Array, implementation: str) -> Array:
    found = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
    return found.reshape(*found.shape[:2], -1)


def _turned(x: Array) -> Array:
    """Rotary positions: each half of a head turned against the other, by its place in the sequence."""
    half = x.shape[-1] // 2
    rates = 500_000.0 ** (-jnp.arange(half) / half)
    angles = jnp.arange(x.shape[1])[:, None, None] * rates
    cos, sin = jnp.cos(angles).astype(x.dtype), jnp.sin(angles).astype(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def _scaled(scale: Array, x: Array) -> Array:
    """Normalized by the root of the mean of squares, which is computed in float32."""
    squares = jnp.square(x.astype(jnp.float32)).mean(-1, keepdims=True)
    return x * lax.rsqrt(squares + 1e-5).astype(x.dtype) * scale


def _cast(tree: Params, dtype: str) -> Params:
    return jax.tree.map(lambda x: x.astype(dtype), tree)


def _in_heads(x: Array, heads: int) -> Array:
    return x.reshape(*x.shape[:2], heads, -1)


def _drawn(key: Array, inputs: int, outputs: int) -> Array:
    return jax.random.normal(key, (inputs, outputs)) * inputs**-0.5


def _kernel(key: Array, window: int, inputs: int, outputs: int) -> Array:
    return jax.random.normal(key, (window, window, inputs, outputs)) * (window**2 * inputs / 2) ** -0.5


def _norm(width: int) -> Params:
    return {"scale": jnp.ones(width), "shift": jnp.zeros(width)}


BUILDERS: dict[str, Callable[..., Model]] = {"gpt2": gpt2, "llama": llama, "resnet_50": resnet_50}
