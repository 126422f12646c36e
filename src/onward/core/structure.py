"""How a person's nested containers map to a flat list of Variables, and back.

A ``Structure`` remembers the containers and, leaf by leaf, either the Variable that stands for an
array or the static value itself (an activation function inside an equinox module, a string).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from onward.core.errors import ArgumentError, OnwardError
from onward.core.variable import Variable


@dataclass(frozen=True)
class Static:
    """A leaf that is not an array: kept as it is, compared when the structure is filled again."""

    value: Any


@dataclass(frozen=True, eq=False)
class Structure:
    """Containers with a Variable or a static value at every leaf."""

    treedef: Any
    leaves: tuple[Variable | Static, ...]

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The Variables at the leaves, in order."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, Variable))

    def mapped(self, new: Callable[[Variable], Variable]) -> Structure:
        """The same containers with other Variables."""
        return replace(self, leaves=tuple(new(v) if isinstance(v, Variable) else v for v in self.leaves))

    def flatten(self, tree: Any, what: str) -> list[Any]:
        """The arrays of a tree of this structure, in the order of ``variables``.

        Raises ``ArgumentError`` that names the first place where the tree differs.
        """
        values, treedef = jax.tree.flatten(tree)
        if treedef != self.treedef and not _are_named_alike(treedef, self.treedef):
            raise ArgumentError(self._difference(tree, what))
        arrays = []
        for leaf, value in zip(self.leaves, values, strict=True):
            if isinstance(leaf, Variable):
                arrays.append(value)
            elif not same_static(leaf.value, value):
                raise ArgumentError(
                    f"{what} holds {value!r} where the traced one holds {leaf.value!r}. A leaf that is "
                    "no array is part of the Program: trace again with the new value."
                )
        return arrays

    def unflatten(self, values: Iterable[Any]) -> Any:
        """The containers with these values in the places of the Variables."""
        supply = iter(values)
        filled = [leaf.value if isinstance(leaf, Static) else next(supply) for leaf in self.leaves]
        return jax.tree.unflatten(self.treedef, filled)

    def _difference(self, tree: Any, what: str) -> str:
        whole = jax.tree.unflatten(self.treedef, list(range(len(self.leaves))))
        if type(whole) is tuple and not isinstance(tree, tuple):  # such as what an adopted step carries on
            return f"{what}: expected a tuple of these {len(whole)}, and {describe(tree)} was given."
        expected, found = _paths(whole), _paths(tree)
        missing = [p or "an array itself" for p in expected if p not in found]
        surplus = [p or "an array itself" for p in found if p not in expected]
        parts = []
        if missing:
            parts.append(f"it lacks {', '.join(map(repr, missing[:5]))}")
        if surplus:
            parts.append(f"it has {', '.join(map(repr, surplus[:5]))}, which the traced one has not")
        if not parts:
            given, wanted = str(jax.tree.structure(tree)), str(self.treedef)
            if given == wanted:
                given, wanted = ", ".join(found), ", ".join(expected)
            if given == wanted:
                parts.append("a container has another value beside its arrays")
            else:
                parts.append(f"its containers are {given}, expected {wanted}")
        said = f"{what} is not built as it was when the Program was traced: {'; '.join(parts)}."
        return said + (_MORE.format(what=what) if self._is_among(tree, whole) else "")

    def _is_among(self, tree: Any, whole: Any) -> bool:
        """Whether a tuple holds all of this, and more, such as all that an adopted step is given."""
        if type(tree) is not tuple:
            return False
        wanted = self.treedef.children() if type(whole) is tuple else [self.treedef]
        given = [jax.tree.structure(x) for x in tree]
        return len(given) > len(wanted) and all(child in given for child in wanted)


_MORE = (
    " If these are arguments of an adopted step, {what} alone is carried on, and what else it takes is fed "
    "with each call. Where that is carried on too, name all that is: ow.adopt(..., carried=[...])."
)


@dataclass(frozen=True, eq=False)
class Signature:
    """How the traced function is called: parameters, model state, data; and what it returns."""

    parameters: Structure
    model_state: Structure | None
    data: tuple[Structure, ...]
    names: tuple[str, ...]
    result: Structure
    has_aux: bool

    def mapped(self, new: Callable[[Variable], Variable]) -> Signature:
        """The same with other Variables."""
        return replace(
            self,
            parameters=self.parameters.mapped(new),
            model_state=self.model_state and self.model_state.mapped(new),
            data=tuple(structure.mapped(new) for structure in self.data),
            result=self.result.mapped(new),
        )


def path_name(path: Sequence[Any]) -> str:
    """The name of a place in a tree: keys, indices and attributes joined by ``/``.

    >>> [(path, _)] = jax.tree_util.tree_flatten_with_path({"layers": [1]})[0]
    >>> path_name(path)
    'layers/0'
    """
    return "/".join(path_keys(path))


def path_keys(path: Sequence[Any]) -> tuple[str, ...]:
    """The keys, indices and attributes that lead to a place in a tree."""
    return tuple(map(_key_name, path))


def is_word(value: Any, words: Iterable[str]) -> bool:
    """Whether a value is one of these texts, whatever else it may be.

    >>> is_word("sum", ("sum", "mean")), is_word(np.ones(3), ("sum", "mean"))
    (True, False)
    """
    return isinstance(value, str) and value in words


def is_count(value: Any, least: int = 1) -> bool:
    """Whether a value is a whole number, and at least this; neither True nor 2.0 is one."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= least)


def is_number(value: Any) -> bool:
    """Whether a value is a real number, finite or not; True is none."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def expect_count(
    value: Any,
    what: str,
    least: int = 1,
    of: str = "a whole number",
    error: type[OnwardError] = ArgumentError,
) -> None:
    """Raise an error for what is not a whole number, or less than this.

    >>> expect_count(0, "split: servers", of="how many")
    Traceback (most recent call last):
    onward.core.errors.ArgumentError: split: servers is 0; expected how many, at least 1.
    """
    if not is_count(value, least):
        raise error(f"{what} is {describe(value)}; expected {of}, at least {least}.")


def expect_flag(value: Any, what: str) -> None:
    """Raise ``ArgumentError`` for what is neither True nor False."""
    if not isinstance(value, bool | np.bool_):
        raise ArgumentError(f"{what} is {describe(value)}; expected True or False.")


def describe(value: Any) -> str:
    """Describe a value in a few words.

    >>> describe({"a": 1}), describe((1, 2)), describe(np.ones(3)), describe("fast"), describe(int)
    ('a dict of 1', 'a tuple of 2', 'an array of shape (3,)', "'fast'", 'int, a class')
    """
    if isinstance(value, type):
        return f"{value.__name__}, a class"
    if isinstance(value, tuple | list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return f"an array of shape {np.shape(value)}"
    if value is None or isinstance(value, str | bool | int | float | complex):
        return repr(value)
    return f"a {type(value).__name__}"


def _key_name(key: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def _are_named_alike(treedef: Any, other: Any) -> bool:
    """Whether two trees are built alike, but for namedtuples of other classes with the same name and fields.

    As those of a file are, or of a cell that was run again.
    """
    node, theirs = treedef.node_data(), other.node_data()
    if node is None or theirs is None:
        return bool(treedef == other)
    kinds = [(kind.__name__, getattr(kind, "_fields", None)) for kind, _ in (node, theirs)]
    are_named = kinds[0] == kinds[1] and kinds[0][1] is not None
    is_alike = are_named if node[0] is not theirs[0] else bool(node[1] == theirs[1])
    children, others = treedef.children(), other.children()
    return is_alike and len(children) == len(others) and all(map(_are_named_alike, children, others))


def _paths(tree: Any) -> list[str]:
    return [path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]


def same_static(a: Any, b: Any) -> bool:
    """Whether two static leaves are equal; arrays and odd types never raise here."""
    if a is b:
        return True
    if isinstance(a, np.ndarray | jax.Array) or isinstance(b, np.ndarray | jax.Array):
        return False
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:
        return False
