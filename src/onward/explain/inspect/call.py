"""The call of someone's step: its arguments by name, flat, and the step as a function of flat arrays.

Modules of flax.nnx are changed in place: they go in as their state, and their state after the call comes out.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from onward.core.errors import ArgumentError
from onward.core.structure import Static, describe, path_keys
from onward.define.arguments import Leaf, Specification, specify


@dataclass(frozen=True, eq=False)
class Graph:
    """The arguments that hold flax.nnx modules, which share parts: what they are, and their arrays."""

    places: tuple[int, ...]
    definition: Any
    state: Specification


@dataclass(frozen=True, eq=False)
class CalledStep:
    """A step and what it is called with.

    Attributes:
        step: the function.
        title: its name.
        names: of every argument, in the order in which they are flattened.
        plain: every argument that holds no module of flax.nnx, by its place.
        graph: the others.
        rebuild: from the values of all arguments to positional and keyword arguments.
    """

    step: Callable[..., Any]
    title: str
    names: tuple[str, ...]
    plain: Mapping[int, Specification]
    graph: Graph | None
    rebuild: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]

    @property
    def leaves(self) -> list[tuple[str, Leaf]]:
        """Every array that goes in, with the name of its Variable."""
        found = [(_joined(s.name, leaf.path), leaf) for s in self.plain.values() for leaf in s.arrays]
        if self.graph is not None:
            found += [
                (_joined(self.names[self.graph.places[int(keys[0])]], "/".join(keys[1:])), leaf)
                for keys, leaf in _in_graph(self.graph.state)
                if isinstance(leaf, Leaf)
            ]
        return found

    @property
    def has_numbers(self) -> bool:
        """Whether Python numbers are among the arguments."""
        return any(isinstance(leaf, Number) for s in self.plain.values() for leaf in s.leaves)

    def with_fixed(self, *kinds: type) -> CalledStep:
        """The same call with Python numbers of these kinds as they are, not as arrays."""
        return replace(self, plain={i: _fixed(s, kinds) for i, s in self.plain.items()})

    def run(self, leaves: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Run the step; returns its result, and the new value of each array in the modules, None if gone."""
        supply = iter(leaves)
        values = {i: s.fill(supply) for i, s in self.plain.items()}
        if self.graph is None:
            args, kwargs = self.rebuild(_in_order(values))
            return self.step(*args, **kwargs), []
        nnx = sys.modules["flax.nnx"]
        modules = nnx.merge(self.graph.definition, self.graph.state.fill(supply))
        args, kwargs = self.rebuild(
            _in_order({**values, **dict(zip(self.graph.places, modules, strict=True))})
        )
        returned = self.step(*args, **kwargs)
        return returned, self.after(nnx.split(modules)[1])

    def after(self, state: Any) -> list[Any]:
        """The arrays of the modules after the step, in the places of those that went in."""
        assert self.graph is not None
        paths, _ = jax.tree_util.tree_flatten_with_path(state)
        found = {path_keys(path): value for path, value in paths}
        return [found.get(keys) for keys, leaf in self.graph.state.places if isinstance(leaf, Leaf)]


def expect_function(step: Any, what: str = "inspect") -> None:
    """Raise ``ArgumentError`` for what is not a function."""
    if not callable(step):
        raise ArgumentError(
            f"{what} was given {describe(step)} in place of a function. Write {what}(train_step, *args), "
            "with the arguments that train_step is called with, or their shapes."
        )


def call_of(step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CalledStep:
    """The call of a step; raises ``ArgumentError`` for what is not a function, or does not take that."""
    expect_function(step)
    title = _title(step)
    names = _names(step, title, args, kwargs)
    values = (*args, *kwargs.values())
    modules = [i for i, value in enumerate(values) if holds_modules(value)]
    count, keywords = len(args), tuple(kwargs)

    def rebuild(all_of_them: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rest = zip(keywords, all_of_them[count:], strict=True)
        return tuple(all_of_them[:count]), dict(rest)

    plain = {i: specify(value, names[i]) for i, value in enumerate(values) if i not in modules}
    graph = None
    if modules:
        definition, state = sys.modules["flax.nnx"].split(tuple(values[i] for i in modules))
        graph = Graph(tuple(modules), definition, specify(state, "modules"))
    noted = {i: _noted(s, values[i]) for i, s in plain.items()}
    return CalledStep(step, title, tuple(names), noted, graph, rebuild)


def placed(call: CalledStep, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CalledStep:
    """The same call with arrays that lie over a mesh of explicit axes as they lie, which the step may ask."""
    values = (*args, *kwargs.values())
    return replace(call, plain={i: _laid(s, values[i]) for i, s in call.plain.items()})


def _laid(specification: Specification, argument: Any) -> Specification:
    pairs = zip(specification.leaves, jax.tree.leaves(argument), strict=True)
    leaves = (
        replace(leaf, type=_laid_type(leaf.type, value)) if isinstance(leaf, Leaf) else leaf
        for leaf, value in pairs
    )
    return replace(specification, leaves=tuple(leaves))


def _laid_type(kind: jax.ShapeDtypeStruct, value: Any) -> jax.ShapeDtypeStruct:
    if not isinstance(value, jax.Array) or not any(jax.typeof(value).sharding.spec):
        return kind
    return jax.ShapeDtypeStruct(
        kind.shape, kind.dtype, weak_type=kind.weak_type, sharding=jax.typeof(value).sharding
    )


@dataclass(frozen=True)
class Number(Leaf):
    """A Python number among the arguments, which ``jax.jit`` makes an array of."""

    value: Any = None


def _noted(specification: Specification, argument: Any) -> Specification:
    """The specification with the Python numbers that stand in the argument."""
    pairs = zip(specification.leaves, jax.tree.leaves(argument), strict=True)
    return replace(
        specification,
        leaves=tuple(
            Number(leaf.path, leaf.type, value)
            if isinstance(leaf, Leaf) and isinstance(value, bool | int | float | complex)
            else leaf
            for leaf, value in pairs
        ),
    )


def _fixed(specification: Specification, kinds: tuple[type, ...]) -> Specification:
    leaves = [
        Static(leaf.value) if isinstance(leaf, Number) and isinstance(leaf.value, kinds) else leaf
        for leaf in specification.leaves
    ]
    return replace(specification, leaves=tuple(leaves))


def _in_order(values: Mapping[int, Any]) -> list[Any]:
    return [values[i] for i in range(len(values))]


def _in_graph(state: Specification) -> Iterator[tuple[tuple[str, ...], Leaf | Static]]:
    """The places in the state of modules; the box of a variable is not part of its name."""
    for keys, leaf in state.places:
        yield keys[:-1] if len(keys) > 1 and keys[-1] == "value" else keys, leaf


def _joined(name: str, path: str) -> str:
    return f"{name}/{path}" if path else name


def _title(step: Any) -> str:
    """The name of a function, or of what a partial applies."""
    step = getattr(step, "func", step)
    return str(getattr(step, "__name__", type(step).__name__)).strip("<>")


def _names(step: Any, title: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """The name of every argument as the step calls it."""
    try:
        signature = inspect.signature(step)
    except (TypeError, ValueError):
        return [*(f"argument_{i}" for i in range(len(args))), *kwargs]
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise ArgumentError(
            f"{title}{signature} cannot be called with these arguments: {error}. Give the step, then all "
            "that it is called with, or their shapes."
        ) from None
    names: list[str] = []
    for p in signature.parameters.values():
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            names.append(p.name)
        elif p.kind is p.VAR_POSITIONAL:
            names.extend(f"{p.name}/{i}" for i in range(len(args) - len(names)))
    return [*names[: len(args)], *kwargs]


def holds_modules(value: Any) -> bool:
    """Whether there is a module, optimizer or metric of flax.nnx in it, which a step changes in place."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    base = getattr(nnx, "Pytree", None) or nnx.Object
    return any(isinstance(x, base) for x in jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, base)))


def is_array(value: Any) -> bool:
    """Whether a leaf of a result is an array; a Python number is a fixed value."""
    return isinstance(value, jax.Array | np.ndarray | np.generic)
