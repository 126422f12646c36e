"""A small network of flax.linen: its loss, of parameters and a batch, and its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array


def made() -> tuple[Callable[..., Array], Any]:
    """Dense layers around a norm."""
    model = nn.Sequential([nn.Dense(16), nn.LayerNorm(), nn.gelu, nn.Dense(2)])
    params = model.init(jax.random.key(0), jnp.zeros((1, 8)))
    return lambda p, x, y: jnp.mean((model.apply(p, x) - y) ** 2), params
