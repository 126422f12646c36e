"""Nested containers as data: how a network is called and what it returns, without the user's classes.

Dicts, lists, tuples, namedtuples and None stay what they are. Another class of the user's own (a dataclass, a
module of another library) becomes a dict of its fields, for its code is not in the file.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Mapping
from functools import cache
from keyword import iskeyword
from math import isfinite
from typing import Any

import jax

from onward.core.program import Variable
from onward.core.structure import Static, Structure, path_name

_DEEPEST = 100
_WORDS = (str, bool, int, float, type(None))


def described(structure: Structure, number: Mapping[Variable, int]) -> Any:
    """A Structure as JSON data, each Variable by its number."""
    places = [_leaf(leaf, number) for leaf in structure.leaves]
    return _described(jax.tree.unflatten(structure.treedef, [_LeafPlace(record) for record in places]))


def rebuilt(record: Any, variables: list[Variable]) -> Structure:
    """The Structure again.

    Raises:
        ValueError, TypeError, LookupError: no record that ``described`` makes.
    """
    tree = _rebuilt(record, variables, 0)
    leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, Variable | Static))
    return Structure(treedef, tuple(leaves))


class _LeafPlace:
    """A placeholder for a leaf, which is not a container for JAX."""

    def __init__(self, record: Any) -> None:
        self.record = record


def _leaf(leaf: Variable | Static, number: Mapping[Variable, int]) -> Any:
    if isinstance(leaf, Variable):
        return {"variable": number[leaf]}
    value = leaf.value
    if isinstance(value, float) and not isfinite(value):
        return {"not_finite": str(value)}  # JSON has no such number
    return {"static": value if isinstance(value, _WORDS) else repr(value)[:200]}


def _described(tree: Any) -> Any:
    if isinstance(tree, _LeafPlace):
        return tree.record
    if tree is None:
        return {"none": True}
    if type(tree) in (list, tuple):
        return {type(tree).__name__: list(map(_described, tree))}
    fields = getattr(tree, "_fields", ("",)) if isinstance(tree, tuple) else ("",)
    if all(map(_is_field, fields)):
        return {"namedtuple": [type(tree).__name__, list(fields), list(map(_described, tree))]}
    if type(tree) is dict and all(isinstance(key, str) for key in tree):
        return {"dict": {key: _described(value) for key, value in tree.items()}}
    if type(tree) is dict and all(type(key) is int for key in tree):
        return {"numbered": [[key, _described(value)] for key, value in tree.items()]}
    paths, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    return {"dict": {path_name(path): _described(value) for path, value in paths}}


def _is_field(name: str) -> bool:
    """Whether a namedtuple may have a field of this name."""
    return name.isidentifier() and not iskeyword(name) and not name.startswith("_")


@cache
def _namedtuple(name: str, fields: tuple[str, ...]) -> Any:
    """A namedtuple of its own, the same one for equal names, which must be plain ones."""
    return namedtuple(name, fields)


def _rebuilt(record: Any, variables: list[Variable], depth: int) -> Any:
    if depth > _DEEPEST or not isinstance(record, dict) or len(record) != 1:
        raise ValueError("a container is none that Onward writes")
    ((kind, value),) = record.items()
    match kind, value:
        case "variable", int() if 0 <= value < len(variables):
            return variables[value]
        case "static", _ if isinstance(value, _WORDS):
            return Static(value)
        case "not_finite", ("inf" | "-inf" | "nan"):
            return Static(float(value))
        case "none", _:
            return None
        case (("list" | "tuple"), list()):
            found = [_rebuilt(part, variables, depth + 1) for part in value]
            return found if kind == "list" else tuple(found)
        case "namedtuple", [str() as name, list() as fields, list() as parts]:
            found = [_rebuilt(part, variables, depth + 1) for part in parts]
            return _namedtuple(name, tuple(fields))(*found)
        case "numbered", list():
            return {int(key): _rebuilt(part, variables, depth + 1) for key, part in value}
        case "dict", dict():
            return {key: _rebuilt(part, variables, depth + 1) for key, part in value.items()}
    raise ValueError(f"a container is a {str(kind)[:40]!r}, which is none that Onward writes")
