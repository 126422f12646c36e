"""Dtypes by name, those of random keys among them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from onward.execute.disk.encoding import DTYPES

_KEYS = {f"key:{generator}": generator for generator in ("threefry2x32", "rbg", "unsafe_rbg")}


def name_of(dtype: Any) -> str:
    """The name of a dtype.

    Raises:
        ValueError: a dtype that no file can hold.

    Example:
        >>> name_of(jnp.dtype("bfloat16")), name_of(jax.random.key(0).dtype)
        ('bfloat16', 'key:threefry2x32')
    """
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        found = next((name for name in _KEYS if dtype_of(name) == dtype), None)
        if found is None:
            raise ValueError(f"random keys of {dtype} cannot be stored; known are {', '.join(_KEYS)}")
        return found
    if str(dtype) not in DTYPES:
        raise ValueError(f"{dtype} cannot be stored")
    return str(dtype)


def dtype_of(name: str) -> Any:
    """The dtype of this name; raises ValueError if there is none."""
    if name in _KEYS:
        return jax.eval_shape(lambda: jax.random.key(0, impl=_KEYS[name])).dtype
    if name not in DTYPES:
        raise ValueError(f"{name[:40]!r} is not a dtype")
    return DTYPES[name]
