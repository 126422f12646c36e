"""First values of parameters: placeholder while being written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Initializer:
    name: str
    arguments: tuple[Any, ...] = ()

    def __call__(self, key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        if self.name == "constant":
            return jnp.full(shape, self.arguments[0], dtype)
        return jax.nn.initializers.xavier_uniform()(key, shape, dtype)


def constant(value: float) -> Initializer:
    return Initializer("constant", (value,))


def xavier_uniform() -> Initializer:
    return Initializer("xavier_uniform")
