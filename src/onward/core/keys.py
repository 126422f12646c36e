"""Keys of the parameters of operations: two keys are equal only if the values do the same.

A value of exactly a builtin type, NumPy's or JAX's is known by what it holds. Anything else, a
function or an object of the user's own, is known by identity: nobody can tell from outside what it will do.

>>> key_of([1, 2.0]) == key_of([1, 2.0]), key_of([1]) == key_of([True]), key_of(0.0) == key_of(-0.0)
(True, False, False)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from enum import Enum
from functools import partial
from types import FunctionType
from typing import Any

import jax
import numpy as np

from onward.core.source import is_library
from onward.core.variable import holds_keys

_BY_CONTENT = 2**16  # bytes; larger arrays are known by identity
_DEEP = 32  # a value that holds more values within values is known by itself
_PLAIN = frozenset({int, bool, str, bytes, type(None)})
_BY_VALUE = ("jax", "jaxlib", "numpy", "builtins", "enum")
_known_by_value: set[type] = set()  # dtypes and enumerations met so far

Special = Callable[[Any], Hashable | None]


class Same:
    """Equal to another one only for the very same object, which it keeps alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def key_of(value: Any, special: Special = lambda value: None, deep: int = 0) -> Hashable:
    """The key of a value.

    Args:
        value: anything.
        special: the key of what the caller knows better, or None.
        deep: within how many others it lies.

    Example:
        >>> class Settings(dict):
        ...     pass
        >>> key_of({"rate": 1}) == key_of({"rate": 1}), key_of(Settings(rate=1)) == key_of(Settings(rate=1))
        (True, False)
    """
    kind = type(value)
    if kind in _PLAIN or kind in _known_by_value:
        return kind, value
    if kind is float or kind is complex:
        return kind, repr(value)
    if kind is np.ndarray or isinstance(value, np.generic | jax.Array):
        return _array(value)
    if (known := special(value)) is not None:
        return known
    if deep > _DEEP:
        return Same(object())

    def within(held: Any) -> Hashable:
        return key_of(held, special, deep + 1)

    of_library = kind.__module__.partition(".")[0] in _BY_VALUE
    if kind is tuple or kind is list or (of_library and isinstance(value, tuple)):
        return kind, tuple(map(within, value))
    if kind is set or kind is frozenset:
        return kind, frozenset(map(within, value))
    if kind is dict:
        return kind, tuple((within(k), within(v)) for k, v in value.items())
    if kind is partial:
        return kind, within(value.func), within(value.args), within(value.keywords)
    if kind is FunctionType and is_library(value.__code__.co_filename):
        return kind, Same(value.__code__), within(value.__defaults__), tuple(map(within, _captured(value)))
    if of_library or isinstance(value, Enum):
        return _by_value(value, kind)
    return Same(value)


def _array(value: Any) -> Hashable:
    """An array by its numbers where they are few and can be read."""
    known = not isinstance(value, jax.Array) or _can_be_read(value)
    if not known or value.dtype.hasobject or value.nbytes > _BY_CONTENT:
        return Same(value)
    place = (value.sharding, value.weak_type) if isinstance(value, jax.Array) else None
    return type(value), value.dtype, value.shape, place, np.asarray(value).tobytes()


def _can_be_read(value: jax.Array) -> bool:
    return (
        not isinstance(value, jax.core.Tracer)
        and not holds_keys(value.dtype)
        and not value.is_deleted()
        and value.is_fully_addressable
    )


def _by_value(value: Any, kind: type) -> Hashable:
    """JAX's and NumPy's own objects say themselves whether they are equal."""
    try:
        hash(value)
    except Exception:
        return Same(object())  # may change and still be the same object
    if isinstance(value, np.dtype | Enum):
        _known_by_value.add(kind)
    return kind, value


def _captured(function: FunctionType) -> list[Any]:
    """The values that a function captured; an ellipsis for a variable that has no value yet."""
    found = []
    for cell in function.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:
            found.append(...)
    return found
