"""Names for the arrays of a state that came as nested containers, by where they stand in it.

>>> import jax, jax.numpy as jnp
>>> from typing import NamedTuple
>>> class ScaleByAdamState(NamedTuple):
...     count: object
...     mu: object
>>> params, _ = jax.tree_util.tree_flatten_with_path({"b": "b", "w": "w"})
>>> state = (ScaleByAdamState(0, {"b": 1, "w": 2}),)
>>> [(place.full_name, place.owner) for place in places_of(state, params)]
[('scale_by_adam/count', None), ('scale_by_adam/mu', 0), ('scale_by_adam/mu', 1)]
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from onward.core.structure import path_keys

_HYPERPARAMETERS = "hyperparams"


@dataclass(frozen=True)
class Place:
    """A place in a state.

    Attributes:
        name: the last name on the way there, that of its parameter left out.
        within: what the part of the state is called that it stands in; empty for a plain container.
        owner: the number of the parameter whose place ends the way there, if there is one.
        is_hyperparameter: whether it stands in a mapping named ``hyperparams``.
    """

    name: str
    within: str
    owner: int | None
    is_hyperparameter: bool

    @property
    def full_name(self) -> str:
        """The name behind that of the part of the state."""
        return f"{self.within}/{self.name}" if self.within else self.name


def places_of(state: Any, parameters: Sequence[tuple[Any, Any]]) -> list[Place]:
    """The places of the arrays of a state.

    Args:
        state: its containers, with anything at the leaves.
        parameters: for each parameter the way to it, and anything.
    """
    ways = {tuple(way): i for i, (way, _) in enumerate(parameters) if way}
    found = jax.tree_util.tree_flatten_with_path(state)[0]
    return [_place(state, tuple(way), ways) for way, _ in found]


def _place(state: Any, way: tuple[Any, ...], ways: dict[tuple[Any, ...], int]) -> Place:
    ends = (way[n:] for n in range(len(way)))
    end = next((end for end in ends if end in ways), ())
    before = way[: len(way) - len(end)]
    keys = path_keys(before)
    words = [key for key in keys if not key.isdigit()]
    return Place(
        name=words[-1] if words else "state",
        within=_within(state, before),
        owner=ways.get(end),
        is_hyperparameter=_HYPERPARAMETERS in keys,
    )


def _within(state: Any, way: Sequence[Any]) -> str:
    """The class of the innermost part of a state with a class of its own, in lower case."""
    found = ""
    for key in way:
        kind = type(state)
        found = found if kind in (tuple, list, dict) else kind.__name__
        state = _step(state, key)
    words = re.findall(r"[A-Z]+[0-9]*(?![a-z])|[A-Z][a-z0-9]*|[a-z0-9]+", found.removesuffix("State"))
    return "_".join(words).lower()


def _step(tree: Any, key: Any) -> Any:
    """The part of a container at a key of a way."""
    if isinstance(key, jax.tree_util.GetAttrKey):
        return getattr(tree, key.name)
    if isinstance(key, jax.tree_util.SequenceKey):
        return tree[key.idx]
    if isinstance(key, jax.tree_util.DictKey):
        return tree[key.key]
    children = jax.tree.leaves(tree, is_leaf=lambda x: x is not tree)
    return children[key.key]
