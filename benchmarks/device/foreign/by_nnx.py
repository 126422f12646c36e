"""A small network of flax.nnx: its loss, of parameters and a batch, and its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array


class _Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.norm = nnx.Linear(8, 16, rngs=rngs), nnx.LayerNorm(16, rngs=rngs)
        self.last = nnx.Linear(16, 2, rngs=rngs)

    def __call__(self, x: Array) -> Array:
        return self.last(nnx.gelu(self.norm(self.first(x))))


def made() -> tuple[Callable[..., Array], Any]:
    """Linear layers around a norm; its parameters as a plain dict."""
    graph, params = nnx.split(_Network(nnx.Rngs(0)))

    def loss(values: Any, x: Array, y: Array) -> Array:
        state = jax.tree.map(lambda v: v, params)
        nnx.replace_by_pure_dict(state, values)
        return jnp.mean((nnx.merge(graph, state)(x) - y) ** 2)

    return loss, nnx.to_pure_dict(params)
