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
    for name, value in fed.items():
        _check(name, value)


def _check(name: str, value: Any) -> None:
    """Raise ``ArgumentError`` if data on the host holds NaN or infinity."""
    if isinstance(value, list | tuple):
        with suppress(ValueError):  # what is ragged the step refuses
            value = np.asarray(value)
    is_array = isinstance(value, np.ndarray | jax.Array) and is_on_host(value)
    if not is_array or not jnp.issubdtype(value.dtype, np.inexact):
        return
    value = np.asarray(value)
    finite = np.isfinite(value)
    if not finite.all():
        place = np.argwhere(~finite)[0]
        raise ArgumentError(
            f"{name!r} holds {value[tuple(place)]} at {place.tolist()}. One such number spoils all "
            "parameters. Clean the data, or train with check=False if the network expects it."
        )
