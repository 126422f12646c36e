"""Linear algebra that the rules for matrices share: an array seen along one of its axes, inverse roots.

A factor belongs to one axis of length n: it is an (n, n) matrix, or, where that would be too large, the n
numbers on its diagonal. All of this is computed in full precision: the default of accelerators is too
coarse for roots and eigenvectors.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from onward.derive.optimizers.arithmetic import squared

HIGHEST = lax.Precision.HIGHEST


def unfold(array: Any, axis: int) -> Any:
    """The array as a matrix: one axis as rows, everything else as columns.

    >>> unfold(jnp.ones((2, 3, 4)), 1).shape
    (3, 8)
    """
    return jnp.moveaxis(array, axis, 0).reshape(array.shape[axis], -1)


def fold(matrix: Any, axis: int, shape: tuple[int, ...]) -> Any:
    """The array of this shape whose unfolding along the axis is the matrix.

    >>> fold(unfold(jnp.ones((2, 3, 4)), 1), 1, (2, 3, 4)).shape
    (2, 3, 4)
    """
    rest = (*shape[:axis], *shape[axis + 1 :])
    return jnp.moveaxis(matrix.reshape(shape[axis], *rest), 0, axis)


def along(factor: Any, array: Any, axis: int) -> Any:
    """The array multiplied by a factor along one axis.

    >>> along(jnp.array([1.0, 10.0]), jnp.ones((2, 2)), 0).tolist()
    [[1.0, 1.0], [10.0, 10.0]]
    """
    if factor.ndim == 1:
        return array * factor.reshape(-1, *[1] * (array.ndim - axis - 1))
    return fold(jnp.matmul(factor, unfold(array, axis), precision=HIGHEST), axis, array.shape)


def gram(array: Any, axis: int, diagonal: bool = False) -> Any:
    """The products of the slices along an axis with each other, ``X X^H``, or only with themselves.

    >>> gram(jnp.array([[1.0, 2.0], [0.0, 1.0]]), 0).tolist()
    [[5.0, 2.0], [2.0, 1.0]]
    """
    rows = unfold(array, axis)
    if diagonal:
        return jnp.sum(squared(rows), axis=1)
    return jnp.matmul(rows, rows.conj().T, precision=HIGHEST)


def inverse_root(factor: Any, order: int, floor: Any) -> Any:
    """The factor, positive semidefinite, plus ``floor`` times the identity, to the power ``-1 / order``.

    Rounding may turn the smallest eigenvalues negative: they are taken as 0.

    >>> inverse_root(jnp.diag(jnp.array([16.0, 256.0])), 4, 0.0).round(3).tolist()
    [[0.5, 0.0], [0.0, 0.25]]
    """
    if factor.ndim == 1:
        return (factor + floor) ** (-1 / order)
    values, vectors = jnp.linalg.eigh(factor)
    powers = (jnp.maximum(values, 0) + floor) ** (-1 / order)
    return jnp.matmul(vectors * powers, vectors.conj().T, precision=HIGHEST)


def axes_of(array: Any) -> tuple[int, ...]:
    """The shape of an array, a scalar being a vector of one number.

    >>> axes_of(jnp.ones((2, 3))), axes_of(jnp.float32(1))
    ((2, 3), (1,))
    """
    return array.shape or (1,)


def rows_and_columns(shape: tuple[int, ...]) -> tuple[int, int]:
    """The matrix that an array stands for: its last axis as columns, everything else as rows.

    >>> rows_and_columns((3, 3, 16, 32)), rows_and_columns((5,)), rows_and_columns(())
    ((144, 32), (1, 5), (1, 1))
    """
    return math.prod(shape[:-1]), shape[-1] if shape else 1
