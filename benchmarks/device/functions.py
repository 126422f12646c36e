"""A sample of differentiable functions by family: what is compiled, and derived, differently on a device.

A case is ``(function, parameters)``. Its results are contracted with fixed weights, so that every element of
them has a cotangent of its own; a family is one loss, and so one computation.

>>> value = loss_of({"exp": FAMILIES["elementwise"]["exp"]})({"exp": np.zeros(1)})
>>> round(float(value), 3) == round(float(np.cos(0.3)), 3)
True
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Case: TypeAlias = tuple[Callable[[Any], Any], Any]
_random = np.random.default_rng(0)


def _normal(*shape: int) -> np.ndarray:
    return _random.standard_normal(shape)


def _between(low: float, high: float, *shape: int) -> np.ndarray:
    return _random.uniform(low, high, shape)


def _convolved(p: Any, **options: Any) -> Array:
    options = {"window_strides": (1, 1), "padding": "SAME", **options}
    return lax.conv_general_dilated(p["x"], p["w"], dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


def _recurrent(p: Any) -> Array:
    def turn(h: Array, x: Array) -> tuple[Array, Array]:
        h = jnp.tanh(x @ p["w"] + h @ p["u"])
        return h, h

    return lax.scan(turn, jnp.zeros_like(p["x"][0] @ p["w"]), p["x"])[1]


def _attended(p: Any, **options: Any) -> Array:
    return jax.nn.dot_product_attention(p["q"], p["k"], p["v"], implementation="xla", **options)


def _normalized(p: Any) -> Array:
    centered = p["x"] - p["x"].mean(-1, keepdims=True)
    return centered * lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-5) * p["scale"]


def _picked(p: Any) -> Array:
    return p["table"][np.array([2, 0, 2, 5, 7, 2])]


def _crossed(x: Array) -> Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(x), np.arange(len(x))[:, None] % x.shape[1], 1)


_X, _U, _P = _normal(8, 16), _between(-0.9, 0.9, 8, 16), _between(0.5, 2.0, 8, 16)
_IMAGE = {"x": _normal(2, 8, 8, 4), "w": _normal(3, 3, 4, 8)}
_HEADS = {name: _normal(2, 8, 2, 16) for name in ("q", "k", "v")}

FAMILIES: Mapping[str, Mapping[str, Case]] = {
    "elementwise": {
        "exp": (jnp.exp, _X),
        "log": (jnp.log, _P),
        "sqrt": (jnp.sqrt, _P),
        "rsqrt": (lax.rsqrt, _P),
        "cbrt": (jnp.cbrt, _P),
        "power": (lambda p: jnp.power(p["x"], p["y"]), {"x": _P, "y": _U}),
        "integer power": (lambda x: x**3 + x**-2, _P),
        "divide": (lambda p: p["x"] / p["y"], {"x": _X, "y": _P}),
        "sin and cos": (lambda x: jnp.sin(x) * jnp.cos(x), _X),
        "tan": (jnp.tan, _U),
        "arctan2": (lambda p: jnp.arctan2(p["x"], p["y"]), {"x": _X, "y": _P}),
        "tanh": (jnp.tanh, _X),
        "arcsinh": (jnp.arcsinh, _X),
        "sigmoid": (jax.nn.sigmoid, _X),
        "softplus": (jax.nn.softplus, _X),
        "relu": (jax.nn.relu, _X),
        "gelu": (jax.nn.gelu, _X),
        "gelu exact": (partial(jax.nn.gelu, approximate=False), _X),
        "silu": (jax.nn.silu, _X),
        "erf": (jax.scipy.special.erf, _X),
        "lgamma": (jax.scipy.special.gammaln, _P),
        "where": (lambda p: jnp.where(p["x"] > 0, p["x"], p["y"] * p["x"]), {"x": _X, "y": _P}),
        "clip": (lambda x: x * jnp.clip(x, -0.5, 0.5), _X),
        "maximum": (lambda p: jnp.maximum(p["x"], p["y"]), {"x": _X, "y": _P}),
    },
    "reductions": {
        "sum": (lambda x: jnp.sum(x**2, 0), _X),
        "mean and variance": (lambda x: jnp.mean(x, 1) * jnp.var(x, 1), _X),
        "std": (lambda x: jnp.std(x, 0), _X),
        "max": (lambda x: jnp.max(x, 0), _X),
        "prod": (lambda x: jnp.prod(x, 1), _P),
        "logsumexp": (lambda x: jax.scipy.special.logsumexp(x, 1), _X),
        "softmax": (jax.nn.softmax, _X),
        "log softmax and a label": (_crossed, _X),
        "cumsum": (lambda x: jnp.cumsum(x, 1), _X),
        "cumprod": (lambda x: jnp.cumprod(x, 1), _P),
        "cumlogsumexp": (lambda x: lax.cumlogsumexp(x, 1), _X),
        "layer norm": (_normalized, {"x": _X, "scale": _P[0]}),
        "average pool": (
            lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
            _IMAGE["x"],
        ),
        "max pool": (
            lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
            _IMAGE["x"],
        ),
    },
    "indices": {
        "rows of a table": (_picked, {"table": _normal(8, 4)}),
        "scatter add": (lambda x: jnp.zeros((4, 16)).at[np.array([0, 1, 1, 3, 0, 0, 2, 3])].add(x), _X),
        "dynamic slice": (lambda x: lax.dynamic_slice(x, (2, 3), (4, 8)), _X),
        "dynamic update": (
            lambda p: lax.dynamic_update_slice(p["x"], p["y"], (1, 2)),
            {"x": _X, "y": _P[:2, :3]},
        ),
        "sort": (lambda x: jnp.sort(x, 1), _X),
        "top k": (lambda x: lax.top_k(x, 3)[0], _X),
        "concatenate, pad, reverse": (
            lambda x: jnp.pad(jnp.concatenate([x, x[::-1] ** 2], 1), ((0, 0), (1, 2))),
            _X,
        ),
        "transpose and reshape": (lambda x: x * x.reshape(16, 8).T, _X),
    },
    "contractions": {
        "matmul": (lambda p: p["x"] @ p["w"], {"x": _X, "w": _normal(16, 16)}),
        "batched matmul": (lambda p: p["x"] @ p["y"], {"x": _normal(2, 8, 16), "y": _normal(2, 16, 8)}),
        "einsum": (
            lambda p: jnp.einsum("bqhd,bkhd->bhqk", p["q"], p["k"]),
            {name: _HEADS[name] for name in "qk"},
        ),
        "attention": (_attended, _HEADS),
        "causal attention": (partial(_attended, is_causal=True), _HEADS),
        "convolution": (_convolved, _IMAGE),
        "convolution, strides": (partial(_convolved, window_strides=(2, 2)), _IMAGE),
        "convolution, dilation": (partial(_convolved, rhs_dilation=(2, 2)), _IMAGE),
        "convolution, groups": (
            partial(_convolved, feature_group_count=2),
            {"x": _IMAGE["x"], "w": _normal(3, 3, 2, 8)},
        ),
        "solve": (
            lambda p: jnp.linalg.solve(p["a"], p["b"]),
            {"a": _normal(4, 4) + 8 * np.eye(4), "b": _normal(4, 2)},
        ),
        "cholesky": (lambda x: jnp.linalg.cholesky(x @ x.T + 8 * jnp.eye(4)), _normal(4, 4)),
    },
    "control flow": {
        "scan": (_recurrent, {"x": _normal(6, 2, 4), "w": _normal(4, 8) / 2, "u": _normal(8, 8) / 4}),
        "cond": (lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), _X),
        "map": (lambda x: lax.map(jnp.sin, x), _X),
        "checkpoint": (jax.checkpoint(lambda x: jnp.sin(jnp.exp(-x))), _P),
        "remat in scan": (
            lambda x: lax.scan(jax.checkpoint(lambda h, row: (jnp.tanh(h + row), h * row)), x[0], x)[1],
            _X,
        ),
    },
}
MULTIPLY = ("contractions", "control flow")


def loss_of(family: Mapping[str, Case]) -> Callable[[Any], Array]:
    """All of a family in one loss of its parameters; barriers keep its members from being fused."""

    def loss(params: Any) -> Array:
        return sum(_contracted(function(lax.optimization_barrier(params[name]))) for name, function in order)

    order = [(name, function) for name, (function, _) in family.items()]
    return loss


def _contracted(result: Any) -> Array:
    weights = np.cos(np.arange(result.size) + 0.3).reshape(result.shape)
    return jnp.sum(result * weights.astype(result.dtype))
