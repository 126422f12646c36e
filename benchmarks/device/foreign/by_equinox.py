"""A small network of equinox: its loss, of parameters and a batch, and its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array


def made() -> tuple[Callable[..., Array], Any]:
    """An MLP of single examples, mapped over a batch."""
    model = eqx.nn.MLP(8, 2, 16, 2, jax.nn.gelu, key=jax.random.key(0))
    params, rest = eqx.partition(model, eqx.is_inexact_array)

    def loss(params: Any, x: Array, y: Array) -> Array:
        return jnp.mean((jax.vmap(eqx.combine(params, rest))(x) - y) ** 2)

    return loss, params
