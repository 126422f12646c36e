"""The norm of arrays, of which no square overflows; and gradients shortened by it.

A float32 above 1.8e19 has an infinite square, and a gradient divided by an infinite norm is zero. So the
squares are added up twice in one pass, as they are and of the numbers times a power of two, and the second
sum counts where the first is infinite. What fits is what the plain formula gives, to the bit.

>>> import jax.numpy as jnp
>>> length([jnp.array([3e30, 4e30])]).norm / 1e30
Array(5., dtype=float32)
>>> gradient = jnp.array([3e30, 4e30])
>>> shortened(gradient, length([gradient]), 1.0).round(3).tolist()
[0.6000000238418579, 0.800000011920929]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from onward.core.variable import limits_of


class Length(NamedTuple):
    """A norm times a power of two, which is below 1 for a norm whose square would overflow."""

    scaled: Any
    down: Any

    @property
    def norm(self) -> Any:
        """The norm itself."""
        return self.scaled / self.down


def length(arrays: Sequence[Any], axes: tuple[int, ...] | None = None, keepdims: bool = False) -> Length:
    """The norm of all numbers of these arrays together, along some axes or all."""
    return rooted(*squares(arrays, axes, keepdims))


def squares(
    arrays: Sequence[Any], axes: tuple[int, ...] | None = None, keepdims: bool = False
) -> tuple[Any, Any]:
    """The sum of all squares, as they are and of the numbers times a power of two.

    Of arrays that lie in several places these sums may be added up.
    """
    sizes = [jnp.abs(x) if jnp.iscomplexobj(x) else x for x in arrays]  # a number's sign leaves its square
    dtype = jnp.result_type(*sizes)
    sizes = [x.astype(dtype) for x in sizes]
    small = _small(dtype)
    plain = _added([jnp.sum(jnp.square(x), axes, keepdims=keepdims) for x in sizes])
    scaled = _added([jnp.sum(jnp.square(x * small), axes, keepdims=keepdims) for x in sizes])
    return plain, scaled


def rooted(plain: Any, scaled: Any) -> Length:
    """The norm of the numbers that these are the ``squares`` of."""
    # Asked of the root: XLA would add up the sums of all arrays again in each kernel that asks this of them.
    norm = jnp.sqrt(plain)
    fits = jnp.isfinite(norm)
    down = jnp.where(fits, 1, _small(plain.dtype)).astype(plain.dtype)
    return Length(jnp.where(fits, norm, jnp.sqrt(scaled)), down)


def _small(dtype: Any) -> Any:
    # Behind a barrier: XLA makes ``x**2 * small**2`` of the square of a product with a constant, inf times 0.
    return lax.optimization_barrier(jnp.asarray(2.0 ** -(5 * np.finfo(dtype).maxexp // 8), dtype))


def shortened(gradient: Any, its: Length, longest: Any) -> Any:
    """A gradient times the factor that makes a norm at most so long; 1 for a norm of 0."""
    return all_shortened([gradient], its, longest)[0]


def all_shortened(gradients: Sequence[Any], its: Length, longest: Any) -> tuple[Any, ...]:
    """Gradients times the one factor that makes a norm at most so long."""
    factor = jnp.minimum(1 / its.down, longest / jnp.maximum(its.scaled, np.finfo(its.scaled.dtype).tiny))
    reals = [limits_of(g.dtype).dtype for g in gradients]  # of a complex number that of its parts
    factors = {real: (its.down.astype(real), factor.astype(real)) for real in dict.fromkeys(reals)}
    return tuple(g * factors[real][0] * factors[real][1] for g, real in zip(gradients, reals, strict=True))


def _added(terms: Sequence[Any]) -> Any:
    return sum(terms[1:], terms[0])
