"""The structure of an argument of a traced function: its containers, and a type for every array."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from onward.core.errors import ArgumentError, TraceError, nearest
from onward.core.structure import Static, path_keys, path_name
from onward.core.variable import holds_keys

Type = jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Leaf:
    """An array in an argument: its place and its type."""

    path: str
    type: Type


@dataclass(frozen=True, eq=False)
class Specification:
    """One argument: its name, its containers, and a Leaf or a static value in every place."""

    name: str
    treedef: Any
    leaves: tuple[Leaf | Static, ...]
    is_sequence: bool = False

    @property
    def arrays(self) -> tuple[Leaf, ...]:
        """The leaves that are arrays."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, Leaf))

    def fill(self, supply: Iterator[Any]) -> Any:
        """The argument with its arrays taken from ``supply``."""
        values = [leaf.value if isinstance(leaf, Static) else next(supply) for leaf in self.leaves]
        return jax.tree.unflatten(self.treedef, values)

    def retyped(self, other: Specification) -> Specification:
        """Another specification of this argument, its Python numbers still Python numbers."""
        leaves = [
            replace(new, type=Type((), new.type.dtype, weak_type=True))
            if isinstance(old, Leaf) and isinstance(new, Leaf) and old.type.weak_type
            else new
            for old, new in zip(self.leaves, other.leaves, strict=True)
        ]
        return replace(other, leaves=tuple(leaves))

    def leaves_of(self, next_state: Any, function: str) -> list[Any]:
        """The arrays of the next model state, in the places of this one."""
        paths, _ = jax.tree_util.tree_flatten_with_path(next_state)
        found = {path_keys(path): value for path, value in paths}
        known = {keys for keys, _ in self.places}
        values = [
            self._next_value(leaf, found.get(keys), function)
            for keys, leaf in self.places
            if isinstance(leaf, Leaf)
        ]
        if surplus := [keys for keys in found if keys not in known]:
            raise TraceError(
                f"The next state that {function} returned has {'/'.join(surplus[0])!r}, and {self.name} has "
                "not. It must have what the state that goes in has, no more."
            )
        return values

    @property
    def places(self) -> list[tuple[tuple[str, ...], Leaf | Static]]:
        """Every leaf with the keys that lead to it."""
        numbered = jax.tree.unflatten(self.treedef, list(range(len(self.leaves))))
        paths, _ = jax.tree_util.tree_flatten_with_path(numbered)
        return [(path_keys(path), self.leaves[i]) for path, i in paths]

    def _next_value(self, leaf: Leaf, value: Any, function: str) -> Any:
        found = None if value is None else type_of(value)
        if found is None:
            raise TraceError(
                f"The next state that {function} returned lacks {leaf.path!r} of {self.name}. It must "
                "have every array of the state that goes in."
            )
        if found.weak_type and not found.shape and not leaf.type.shape:
            return jax.numpy.asarray(value, leaf.type.dtype)
        if found.shape != leaf.type.shape or found.dtype != leaf.type.dtype:
            raise TraceError(
                f"{self.name}/{leaf.path} goes in as {leaf.type.dtype}{list(leaf.type.shape)} and "
                f"{function} returned {found.dtype}{list(found.shape)} as its next value. "
                "State keeps its type from step to step."
            )
        return value


def specify(argument: Any, name: str) -> Specification:
    """The specification of an argument: arrays by type, other leaves as they are."""
    if isinstance(argument, Specification):
        return argument
    module = _is_equinox_module(argument)
    leaves: list[Leaf | Static] = []
    paths, treedef = jax.tree_util.tree_flatten_with_path(argument)
    for path, value in paths:
        kind = type_of(value, numbers=not module)
        leaves.append(Static(value) if kind is None else Leaf(path_name(path), kind))
    is_sequence = any(path and isinstance(path[0], jax.tree_util.SequenceKey) for path, _ in paths)
    return Specification(name, treedef, tuple(leaves), is_sequence)


def type_of(value: Any, numbers: bool = True) -> Type | None:
    """The type that ``jax.jit`` would give a value, or None for a value that is not an array."""
    if isinstance(value, Type):
        return value
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        expect_unmasked(value, "An argument")
        if isinstance(value, np.ndarray) and value.dtype.kind not in "biufcV":
            raise ArgumentError(
                f"An argument holds a NumPy array of dtype {value.dtype}, which no device can hold. Encode "
                "it as numbers first."
            )
        dtype = value.dtype
        return Type(value.shape, dtype if holds_keys(dtype) else jax.dtypes.canonicalize_dtype(dtype))
    if numbers and isinstance(value, bool | int | float | complex):
        number = jax.typeof(value)
        return Type((), number.dtype, weak_type=True)
    return None


def expect_unmasked(value: Any, what: str) -> None:
    """Raise ``ArgumentError`` for a masked array of NumPy, of which JAX would take what is under the mask."""
    if isinstance(value, np.ma.MaskedArray):
        raise ArgumentError(
            f"{what} is a masked array of NumPy, {value.dtype}{list(value.shape)}. No device knows a mask, "
            "and what is under it would count like anything else. Pass x.filled(0), and "
            "~np.ma.getmaskarray(x) as data of its own, such as the weights of a cost."
        )


def taken_for(name: str, declared: Sequence[str], data: Sequence[Specification]) -> str:
    """A sentence on the data that a function takes in place of a name: declared, or its arguments."""
    if declared or not data:
        return nearest(name, declared)
    return f"Its data are the arguments {', '.join(s.name for s in data)}, which are given by place."


def _is_equinox_module(value: Any) -> bool:
    """Equinox keeps Python numbers among a module's leaves and calls them static; so do we."""
    nodes = jax.tree.leaves(value, is_leaf=_has_equinox_base)
    return any(map(_has_equinox_base, nodes))


def _has_equinox_base(value: Any) -> bool:
    return any(base.__module__.partition(".")[0] == "equinox" for base in type(value).__mro__)


@contextmanager
def tracing_again(
    first: Sequence[Specification], now: Sequence[Specification], carried: Iterable[Specification] = ()
) -> Iterator[None]:
    """Say, in an error of what is traced inside, that arrays of other shapes were given than before.

    What is ``carried`` on from step to step stays as it was, though it may be as long.
    """
    try:
        yield
    except TraceError as error:
        again = _traced_again(first, now, carried)
        raise TraceError(f"{str(error).removesuffix('.')}.{again}") from error.__cause__


def _traced_again(
    first: Sequence[Specification], now: Sequence[Specification], carried: Iterable[Specification]
) -> str:
    changed = [
        ("/".join(filter(None, (before.name, old.path))), old.type.shape, new.type.shape)
        for before, other in zip(first, now, strict=True)
        for old, new in zip(before.arrays, other.arrays, strict=False)
        if old.type.shape != new.type.shape
    ]
    if not changed:
        return ""
    told = " and ".join(f"{name} of shape {shape}" for name, shape, _ in changed)
    again = " and ".join(str(shape) for *_, shape in changed)
    lengths = {shape[:1] for _, shape, _ in changed}
    places = [
        ("/".join(filter(None, (s.name, leaf.path))), leaf.type.shape) for s in carried for leaf in s.arrays
    ]
    held = [f"{name} of shape {shape}" for name, shape in places if shape[:1] in lengths]
    state = (
        f" If {' and '.join(held)} is of each example: what is carried from step to step is not cut. Feed it "
        "as data, and return its next value beside the loss; or take ow.partition, which cuts nothing."
    )
    whole = _whole([name for name, *_ in changed], now)
    return (
        f" It was traced for {told}, and again for {again}, that of a part of the batch or of another batch: "
        f"let it take any number of examples.{whole}{state if held else ''}"
    )


def _whole(changed: Sequence[str], data: Sequence[Specification]) -> str:
    """In words, that some of what is cut may hold no examples."""
    if sum(len(s.arrays) for s in data) == 1:
        return ""
    name, _, below = changed[0].partition("/")
    pattern = repr(f"{name}/*" if below else name)
    first = f" {changed[0]} is taken for the batch, as the first of the data. If it holds no examples"
    by_chance = ""
    if len(changed) > 1:
        by_chance = " If another of them is only as long by chance, say that of it."
    return (
        f"{first}, as the weights of another network, let the batch come before it, or say that it goes "
        f"whole: whole=[{pattern}]. The next array is taken for the batch then.{by_chance}"
    )
