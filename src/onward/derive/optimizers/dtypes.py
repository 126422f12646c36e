"""The dtype in which optimizers keep what they accumulate."""

from typing import Any

import jax.numpy as jnp


def accumulator(dtype: Any) -> Any:
    """The dtype of a slot: that of the parameter, at least float32.

    >>> accumulator(jnp.bfloat16), accumulator(jnp.float32), accumulator(jnp.complex64)
    (dtype('float32'), dtype('float32'), dtype('complex64'))
    """
    return jnp.promote_types(dtype, jnp.float32)
