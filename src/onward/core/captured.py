"""What a Python value is, as a key: two keys are equal only where the values do the same.

Numbers, texts, arrays and containers are known by what they hold. A function is known by its code together
with all that it captured and the globals it names, so that a rule defined anew in every layer is the same
rule, and one over another number is not. Whatever else there is, is known by identity.

>>> def scaled(by):
...     return lambda x: by * x
>>> key_of(scaled(2.0)) == key_of(scaled(2.0)), key_of(scaled(2.0)) == key_of(scaled(3.0))
(True, False)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from enum import Enum
from functools import lru_cache, partial
from hashlib import sha256
from types import BuiltinMethodType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import jax
import numpy as np

from onward.core.source import is_library

_BY_CONTENT = 2**16  # bytes; larger arrays are known by identity
_PATIENCE = 10_000  # captured values to look at; a function that captured more is known by itself
_PLAIN = frozenset({int, bool, str, bytes, type(None)})
_BY_VALUE = ("jax", "jaxlib", "numpy", "builtins", "enum")
_OF_ONE_TRACE = frozenset({"DynamicJaxprTrace", "TraceTag", "Store", "EqualStore"})
_known_by_value: set[type] = set()  # dtypes and enumerations met so far
_AROUND_A_VALUE = frozenset({"Unhashable", "WrapHashably", "_HashableWithStrictTypeEquality"})


class Same:
    """Equal to another one only for the very same object, which it keeps alive."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


Special = Callable[[Any], Hashable | None]


def key_of(value: Any, special: Special = lambda value: None) -> Hashable:
    """The key of a value.

    Args:
        value: anything.
        special: the key of what the caller knows better, or None.

    Example:
        >>> key_of(1) == key_of(True), key_of(0.0) == key_of(-0.0), key_of([1, 2]) == key_of([1, 2])
        (False, False, True)
    """
    kind = type(value)
    if kind in _PLAIN or kind in _known_by_value:
        return kind, value
    if kind is tuple and _PLAIN.issuperset(kinds := tuple(map(type, value))):
        return kinds, value
    return _Reader(special).key(value)


class _Reader:
    """One walk over a value and what it holds; what is met again is known by when it was met first."""

    def __init__(self, special: Special) -> None:
        self.special = special
        self.met: dict[int, int] = {}
        self.kept: list[Any] = []
        self.named: frozenset[str] = frozenset()
        self.modules: set[tuple[int, frozenset[str]]] = set()

    def key(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in _PLAIN:
            return kind, value
        if kind in (float, complex):
            return kind, repr(value)
        if isinstance(value, np.ndarray | np.generic | jax.Array):
            return _array(value)
        if (known := self.special(value)) is not None:
            return known
        if _root(kind) == "jax" and kind.__name__ in _OF_ONE_TRACE:
            return kind.__name__
        if _root(kind) == "jax" and kind.__name__ in _AROUND_A_VALUE:
            return kind, self.key(value.val)
        return self.first_time(value, kind)

    def first_time(self, value: Any, kind: type) -> Hashable:
        """The key of what may hold itself."""
        if isinstance(value, ModuleType):
            return self.module(value)
        if (place := self.met.get(id(value))) is not None:
            return "met", place
        if len(self.met) > _PATIENCE:
            return Same(object())
        if not isinstance(value, tuple):  # made anew with equal contents, which are looked at
            self.met[id(value)] = len(self.met)
            self.kept.append(value)
        if isinstance(value, tuple | list):
            return kind, tuple(map(self.key, value))
        if isinstance(value, set | frozenset):
            return kind, frozenset(map(self.key, value))
        if isinstance(value, dict | Mapping):
            return kind, tuple((self.key(k), self.key(v)) for k, v in value.items())
        if isinstance(value, FunctionType):
            return self.function(value)
        if isinstance(value, MethodType):
            return "method", self.key(value.__func__), self.key(value.__self__)
        if isinstance(value, BuiltinMethodType) and not isinstance(value.__self__, ModuleType | type(None)):
            return "method", value.__name__, self.key(value.__self__)
        if isinstance(value, staticmethod | classmethod):
            return kind, self.key(value.__func__)
        if isinstance(value, property):
            return kind, self.key((value.fget, value.fset))
        if isinstance(value, partial):
            return "partial", self.key(value.func), self.key(value.args), self.key(value.keywords)
        if _root(kind) == "jax" and hasattr(value, "transforms") and hasattr(value, "call_wrapped"):
            return "wrapped", self.key(value.f), self.wrappings(value.transforms), self.key(value.params)
        return self.thing(value, kind)

    def wrappings(self, transforms: Any) -> Hashable:
        """What JAX has put around a function: each a function of its own with arguments."""
        return tuple((Same(around), self.key(arguments)) for around, arguments in transforms)

    def function(self, function: FunctionType) -> Hashable:
        code = function.__code__
        if function.__qualname__ == "_memoize.<locals>.memoized" and "fn" in code.co_freevars:
            return "memoized", self.key(_cells(function)["fn"])
        library = is_library(code.co_filename)
        cells = _cells(function)
        if library and not cells:
            return Same(function)
        if not library:
            self.named |= _names(code)
        named = (
            {} if library else {n: function.__globals__[n] for n in _names(code) & {*function.__globals__}}
        )
        return (
            "function",
            Same(code),
            self.key(function.__defaults__),
            self.key(function.__kwdefaults__),
            self.each(cells),
            self.each(named),
            self.each(vars(function)),
        )

    def each(self, values: Mapping[str, Any]) -> Hashable:
        return tuple((name, self.key(values[name])) for name in sorted(values))

    def thing(self, value: Any, kind: type) -> Hashable:
        """Any other object: by value if it is JAX's or NumPy's, else by identity and by what it holds."""
        if isinstance(value, type):
            return Same(value), tuple(map(self.of_class, value.__mro__))
        if kind in (jax.custom_jvp, jax.custom_vjp) and not _is_from_library(value.__module__):
            return Same(value), self.each(vars(value))
        if isinstance(value, Enum) or _root(kind) in _BY_VALUE:
            if not _is_hashable(value):
                return Same(object())  # may change and still be the same object
            if isinstance(value, np.dtype | Enum):
                _known_by_value.add(kind)
            return kind, value
        held = _held(value)
        return Same(object() if held is None else value), self.each(held or {}), self.key(kind)

    def of_class(self, kind: type) -> Hashable:
        """What a class of the user's own holds: its methods, and values that may be set anew."""
        return None if _is_from_library(kind.__module__) else self.each(_attributes(kind))

    def module(self, module: ModuleType) -> Hashable:
        """What the functions met so far may read of a module of the user's own."""
        if _is_from_library(module.__name__):
            return Same(module)
        read = self.named & {*vars(module)}
        if (met := (id(module), read)) in self.modules:
            return Same(module)
        self.modules.add(met)
        return Same(module), self.each({name: vars(module)[name] for name in read})


def _array(value: Any) -> Hashable:
    """An array by its numbers where they are few and can be read."""
    kind = type(value)
    known = isinstance(value, np.ndarray | np.generic) or _can_be_read(value)
    if not known or value.dtype.hasobject:
        return Same(value)
    if value.nbytes > _BY_CONTENT:
        if isinstance(value, jax.Array):
            return Same(value)
        return kind, value.dtype, value.shape, sha256(np.ascontiguousarray(value).data.cast("B")).digest()
    place = (value.sharding, value.weak_type) if isinstance(value, jax.Array) else None
    return kind, value.dtype, value.shape, place, np.asarray(value).tobytes()


def _can_be_read(value: jax.Array) -> bool:
    return (
        not isinstance(value, jax.core.Tracer)
        and not jax.numpy.issubdtype(value.dtype, jax.dtypes.extended)
        and not value.is_deleted()
        and value.is_fully_addressable
    )


def _cells(function: FunctionType) -> dict[str, Any]:
    """What a function captured, by name."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not given a value yet
            found[name] = ...
    return found


@lru_cache(maxsize=4096)
def _names(code: CodeType) -> frozenset[str]:
    """The names that a function and the functions in it may look up among the globals."""
    return frozenset(code.co_names).union(*map(_names, _codes_in(code)))


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, CodeType))


_OF_PYTHON = ("__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__annotations__")


def _attributes(kind: type) -> dict[str, Any]:
    """What a class holds, without what Python keeps there and the descriptors of its slots."""
    held = vars(kind).items()
    return {n: x for n, x in held if n not in _OF_PYTHON and not isinstance(x, MemberDescriptorType)}


def _held(value: Any) -> dict[str, Any] | None:
    """The attributes of an object; None for one that shows none."""
    kinds = type(value).__mro__
    slots = [n for kind in kinds for n, x in vars(kind).items() if isinstance(x, MemberDescriptorType)]
    if not hasattr(value, "__dict__") and not any("__slots__" in vars(kind) for kind in kinds):
        return None
    return {n: getattr(value, n) for n in slots if hasattr(value, n)} | dict(getattr(value, "__dict__", {}))


@lru_cache(maxsize=4096)
def _is_from_library(module: str) -> bool:
    found = sys.modules.get(module)
    file = getattr(found, "__file__", None)
    if file is None:
        return module.partition(".")[0] in sys.stdlib_module_names
    return is_library(file)


def _root(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except Exception:
        return False
    return True
