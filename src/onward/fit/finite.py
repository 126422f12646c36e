"""Whether the data that a reader yields are finite."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.errors import ArgumentError
from onward.execute.feeds import is_on_host


def check_numbers(fed: Mapping[str, Any]) -> None:
    """Raise ``ArgumentError`` if data on the host hold NaN or infinity.

    >>> check_numbers({"x": np.array([1.0, np.nan])})
    Traceback (most recent call last):
        ...
    onward.core.errors.ArgumentError: 'x' holds nan at [1]. One such number spoils all parameters. Clean the
    data, or train with check=False if the network expects it.
    """
    if found := not_finite(fed):
        raise ArgumentError(
            f"{found}. One such number spoils all parameters. Clean the data, or train with check=False if "
            "the network expects it."
        )


def not_finite(fed: Mapping[str, Any]) -> str:
    """Where data on the host hold NaN or infinity, in words; empty if they are finite."""
    return next(filter(None, (_not_finite(name, value) for name, value in fed.items())), "")


def _not_finite(name: str, value: Any) -> str:
    if isinstance(value, list | tuple):
        with suppress(ValueError):  # what is ragged the step refuses
            value = np.asarray(value)
    is_array = isinstance(value, np.ndarray | jax.Array) and is_on_host(value)
    if not is_array or not jnp.issubdtype(value.dtype, np.inexact):
        return ""
    value = np.asarray(value)
    finite = np.isfinite(value)
    if finite.all():
        return ""
    place = np.argwhere(~finite)[0]
    return f"{name!r} holds {value[tuple(place)]} at {place.tolist()}"
