"""The values of a State by name, laid out over other devices than those that saved them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from onward.core.program import Variable
from onward.core.variable import holds_keys
from onward.core.words import Kind, Placement
from onward.execute.checkpoint.contents import COPIES, PLACEMENTS
from onward.execute.checkpoint.loaded import Checkpoint
from onward.execute.layout import Layout
from onward.execute.processes import gathered
from onward.execute.state import State

_UNNOTED = "/local"  # how copies are named in checkpoints that do not say which these are


@dataclass(frozen=True)
class SavedValues:
    """The values of a checkpoint or a State.

    Attributes:
        arrays: the arrays by name.
        was: how those that are not replicated lay over the devices that saved them.
        copies: for a parameter, the array in which each device has its own of it.
    """

    arrays: Mapping[str, Any]
    was: Mapping[str, Placement]
    copies: Mapping[str, str]

    @classmethod
    def of_checkpoint(cls, found: Checkpoint) -> Self:
        """Those of a checkpoint."""
        was = {name: Placement(word) for name, word in found.extra.get(PLACEMENTS, {}).items()}
        own = (name for name, where in was.items() if where is Placement.PER_REPLICA)
        unnoted = {name.removesuffix(_UNNOTED): name for name in own if name.endswith(_UNNOTED)}
        return cls(found.arrays, was, found.extra.get(COPIES, unnoted))

    @classmethod
    def of_state(cls, state: State) -> Self:
        """Those of a State."""
        variables = state.layout.variables
        was = {v.name: v.placement for v in variables}
        return cls({v.name: state[v] for v in variables}, was, state.layout.copies)

    def all_over(self, layout: Layout) -> dict[str, Any]:
        """The values that fit the Variables of a layout, by name, over its devices."""
        found = {v.name: self.over(v, layout) for v in layout.variables}
        return {name: value for name, value in found.items() if value is not None}

    def over(self, v: Variable, layout: Layout) -> Any:
        """The value of a Variable over the devices of this layout; None if there is none that fits.

        A parameter of which each device had its own is their mean where the layout has but one of it.
        """
        value = self.arrays.get(v.name)
        if value is None:
            return None
        if (own := self.merged(v.name, layout)) is not None:
            value = _merged(_gathered(self.arrays[own]))
        return laid_out(value, v, layout, self.was.get(v.name, Placement.REPLICATED))

    def merged(self, name: str, layout: Layout) -> str | None:
        """The array whose mean a parameter becomes; None where devices have agreed, or go on on their own."""
        own = self.copies.get(name)
        if own is None or own in layout.position or own not in self.arrays:
            return None
        each, agreed = _gathered(self.arrays[own]), _gathered(self.arrays[name])
        return None if _agree(each, agreed) else own


def apart(state: State) -> list[str]:
    """The parameters of which a device of this process has made something else since they last met."""
    return [
        name
        for name, own in state.layout.copies.items()
        if not all(_agree(np.asarray(s.data), np.asarray(state[name])) for s in state[own].addressable_shards)
    ]


def laid_out(value: Any, v: Variable, layout: Layout, was: Placement = Placement.REPLICATED) -> Any:
    """A value of a checkpoint over the devices of this layout; None if it is none of this Variable.

    ``was`` says how it lay over the devices that saved it. Parts of a slot (``Sharded``) are laid end to end
    and filled up with zeros, for any number of devices. What each device had for itself (error feedback, the
    parameters of local SGD) becomes the mean.
    """
    whole = layout.whole(v)
    if value.dtype != v.dtype or np.shape(value) == whole.shape:
        return value if value.dtype == v.dtype else None
    if v.kind is not Kind.STATE:
        return None
    value = _gathered(value)
    if was is Placement.PER_REPLICA:
        value = _merged(value)
    if v.placement is Placement.SHARDED:
        return np.resize(np.pad(np.ravel(value), (0, whole.shape[0])), whole.shape)
    if was is Placement.SHARDED and np.size(value) >= v.size:
        value = np.reshape(value[: v.size], v.shape)
    return np.broadcast_to(value, whole.shape) if np.shape(value) == v.shape else None


def _gathered(value: Any) -> Any:
    return value if holds_keys(value.dtype) else np.asarray(gathered(value))


def _agree(each: Any, agreed: Any) -> bool:
    return np.array_equal(each, np.broadcast_to(agreed, each.shape), equal_nan=True)


def _merged(each: Any) -> Any:
    """One value of those that the devices have: of numbers with a point the mean, else the first."""
    return np.mean(each, 0, dtype=each.dtype) if jnp.issubdtype(each.dtype, np.inexact) else each[0]
