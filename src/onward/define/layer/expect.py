"""Requirements of layers on the arrays that they are given, and the errors where they are not met."""

from __future__ import annotations

import math
import operator
from typing import Any

import jax.numpy as jnp
import numpy as np

from onward.core.errors import ArgumentError, HyperparameterError
from onward.core.source import user_line


def floating(x: Any) -> Any:
    """The dtype of the parameters that this is multiplied with: its own, or float32 for integers."""
    return x.dtype if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.dtype("float32")


def precise(x: Any) -> Any:
    """The array in float32 or wider: what sums and logarithms of 16 bit numbers are computed in."""
    return x.astype(jnp.promote_types(floating(x), "float32"))


def words(x: Any) -> str:
    """The type of an array as it is printed."""
    return f"{x.dtype}{list(x.shape)}"


def is_integer(x: Any) -> bool:
    """Whether the array holds integers (not booleans)."""
    return bool(jnp.issubdtype(x.dtype, jnp.integer))


def expect_axes(layer: str, x: Any, axes: tuple[int, ...], meaning: str) -> None:
    """Raise ``ArgumentError`` unless the array has one of these numbers of axes."""
    if x.ndim not in axes:
        raise ArgumentError(f"{layer} at {user_line()} was given {words(x)}; expected {meaning}.")


def expect_features(layer: str, x: Any) -> None:
    """Raise ``ArgumentError`` for a single number, which has no axis of features."""
    if not x.ndim:
        raise ArgumentError(
            f"{layer} at {user_line()} was given a single number; expected an array whose last axis holds "
            "the features: x[None] makes one of it."
        )


def expect_same_shape(layer: str, first: Any, second: Any, names: tuple[str, str]) -> None:
    """Raise ``ArgumentError`` where two arrays would be broadcast to a third shape."""
    if first.shape == second.shape:
        return
    raise ArgumentError(
        f"{layer} at {user_line()} was given {names[0]} of shape {list(first.shape)} and {names[1]} of shape "
        f"{list(second.shape)}. It compares number by number and does not broadcast"
        f"{_remedy(first.shape, second.shape, names)}"
    )


def expect_fraction(layer: str, name: str, value: float) -> None:
    """Raise ``HyperparameterError`` unless ``0 <= value < 1``."""
    if not 0 <= _number(value) < 1:
        _refuse(layer, name, value, "a number of at least 0 and less than 1")


def expect_share(layer: str, name: str, value: float) -> None:
    """Raise ``HyperparameterError`` unless ``0 <= value <= 1``."""
    if not 0 <= _number(value) <= 1:
        _refuse(layer, name, value, "a number from 0 to 1")


def expect_least(layer: str, name: str, value: float, above: bool = False) -> None:
    """Raise ``HyperparameterError`` unless the number is finite and not negative, or ``above`` 0."""
    number = _number(value)
    if not 0 <= number < math.inf or (above and number == 0):
        _refuse(layer, name, value, f"a finite number {'above 0' if above else 'of at least 0'}")


def count(layer: str, name: str, value: Any) -> int:
    """A whole number of at least 1, such as a size; ``ArgumentError`` for anything else.

    >>> count("fc", "size", 8)
    8
    """
    try:
        found = 0 if isinstance(value, bool | np.bool_) else operator.index(value)
    except TypeError:
        found = 0
    if found < 1:
        hint = (
            f" Write {int(value)}." if isinstance(value, float) and value.is_integer() and value > 0 else ""
        )
        raise ArgumentError(
            f"{layer} at {user_line()} was given {name}={value!r}; expected a whole number of at least 1."
            f"{hint}"
        )
    return found


def expect_axis(layer: str, x: Any, axis: Any) -> None:
    """Raise ``ArgumentError`` unless this is one of the axes of the array."""
    is_whole = isinstance(axis, int | np.integer) and not isinstance(axis, bool)
    if not is_whole or not -x.ndim <= axis < x.ndim:
        raise ArgumentError(
            f"{layer} at {user_line()} was given axis={axis!r} for {words(x)}; expected a whole number from "
            f"{-x.ndim} to {x.ndim - 1}."
        )


def _number(value: Any) -> float:
    """The value as a number; NaN, which no comparison holds for, if it is none."""
    if isinstance(value, bool | str):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def _refuse(layer: str, name: str, value: Any, expected: str) -> None:
    raise HyperparameterError(f"{layer} at {user_line()} was given {name}={value!r}; expected {expected}.")


def _remedy(first: tuple[int, ...], second: tuple[int, ...], names: tuple[str, str]) -> str:
    if first == (*second, 1):
        return f": write {names[1]}[..., None]."
    if second == (*first, 1):
        return f": write {names[1]}[..., 0]."
    return "; give both the same shape, such as [8, 1]."
