"""Norms, inner products and quotients that are right for complex numbers, for zeros and for empty arrays."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from onward.derive.optimizers.arithmetic import squared


def inner(x: Any, y: Any) -> Any:
    """The inner product of two arrays, complex numbers taken as pairs of real ones.

    >>> float(inner(jnp.array([1j, 2]), jnp.array([1j, 3])))
    7.0
    """
    return jnp.sum(jnp.real(jnp.conj(x) * y))


def norm(x: Any) -> Any:
    """The Euclidean norm of all numbers of an array; of very large and very small ones, too.

    >>> float(norm(jnp.array([[3.0], [4.0]]))), float(norm(jnp.array([3e-30, 4e-30]))) > 4e-30
    (5.0, True)
    """
    largest = jnp.max(jnp.abs(x), initial=0)
    scale = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    return scale * jnp.sqrt(jnp.sum(squared(x / scale)))


def root_mean_square(x: Any) -> Any:
    """The root of the mean of the squares; 0 for an array of no numbers.

    >>> float(root_mean_square(jnp.array([1.0, 7.0]))), float(root_mean_square(jnp.zeros(0)))
    (5.0, 0.0)
    """
    return norm(x) / max(x.size, 1) ** 0.5


def quotient(x: Any, y: Any, otherwise: float = 0.0) -> Any:
    """``x / y``, and ``otherwise`` where y is 0.

    >>> quotient(jnp.array([1.0, 1.0]), jnp.array([2.0, 0.0])).tolist()
    [0.5, 0.0]
    """
    return jnp.where(y == 0, otherwise, x / jnp.where(y == 0, 1, y))
