"""Computations that the rules of several optimizers share."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from onward.core.errors import HyperparameterError


def squared(x: Any) -> Any:
    """The square of the absolute value: ``|x|**2``, a real number also where x is complex.

    >>> squared(jnp.array([3 + 4j, 1j])).tolist()
    [25.0, 1.0]
    """
    return jnp.square(x.real) + jnp.square(x.imag) if jnp.iscomplexobj(x) else jnp.square(x)


def squarable(gradient: Any) -> Any:
    """A gradient none of whose finite numbers has an infinite square, nor has a sum of a few of them.

    A float32 above 2**62, or 4.6e18, counts as that (a float64 above 2**510). An infinite variance would
    never leave, and the parameter never move again. What is infinite or NaN in the gradient itself is NaN.

    >>> squarable(jnp.array([-1.0, 1e30])).tolist()
    [-1.0, 4.611686018427388e+18]
    """
    if jnp.iscomplexobj(gradient):
        return lax.complex(squarable(gradient.real), squarable(gradient.imag))
    top = 2.0 ** (np.finfo(gradient.dtype).maxexp // 2 - 2)
    return jnp.clip(gradient, -top, top) + (gradient - gradient)


def bias_correction(beta: Any, t: Any) -> Any:
    """How much a running mean that began at zero weighs after t terms: ``1 - beta**t``.

    Computed so that no digits cancel: with beta = 0.9999 and t = 2 the plain formula is wrong by 5e-5
    in float32.

    >>> bias_correction(jnp.float32(0.5), 2)
    Array(0.75, dtype=float32)
    """
    return -jnp.expm1(t * jnp.log1p(beta - 1))


def expect_real(optimizer: Any, parameter: Any, instead: str) -> None:
    """Refuse a complex parameter, for a rule that follows signs.

    Raises:
        HyperparameterError: the parameter is complex.
    """
    if jnp.iscomplexobj(parameter):
        raise HyperparameterError(
            f"{type(optimizer).__name__} follows the sign of every number, and a parameter of dtype "
            f"{parameter.dtype} has none. Use {instead} for it, or keep its real and imaginary parts as two "
            "parameters."
        )
