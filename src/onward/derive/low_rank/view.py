"""A weight as a product reads it: reshaped, transposed or cast, axis by axis.

>>> view = WeightView.of((6, 4)).reshaped((2, 3, 4)).permuted((2, 0, 1))
>>> view.axes
((Atom(axis=1, stride=1, size=4),), (Atom(axis=0, stride=3, size=2),), (Atom(axis=0, stride=1, size=3),))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp

from onward.core.primitives.traits import Moves
from onward.core.program import Op


class Atom(NamedTuple):
    """A part of one axis of the weight: so many of its numbers, so far apart."""

    axis: int
    stride: int
    size: int


@dataclass(frozen=True)
class WeightView:
    """For each axis of what is read the atoms of the weight that it goes over, the slowest first.

    An axis of one number has none.
    """

    axes: tuple[tuple[Atom, ...], ...]

    @classmethod
    def of(cls, shape: Sequence[int]) -> WeightView:
        """The weight as it is."""
        return cls(tuple((Atom(i, 1, size),) if size > 1 else () for i, size in enumerate(shape)))

    def permuted(self, order: Iterable[int]) -> WeightView:
        """Its axes in this order."""
        return WeightView(tuple(self.axes[i] for i in order))

    def reshaped(self, shape: Sequence[int]) -> WeightView | None:
        """The same numbers in another shape; None where an axis would go over parts of others."""
        rest = [atom for axis in self.axes for atom in axis][::-1]
        axes: list[tuple[Atom, ...]] = []
        for size in shape:
            if (found := _taken(rest, size)) is None:
                return None
            axes.append(tuple(found))
        return WeightView(tuple(axes))

    def atoms(self, dimensions: Iterable[int]) -> list[Atom]:
        """The atoms of these axes."""
        return [atom for d in dimensions for atom in self.axes[d]]


def _taken(rest: list[Atom], size: int) -> list[Atom] | None:
    """Atoms that make an axis of this size, from the end of ``rest``, where the last may be split."""
    found: list[Atom] = []
    while size > 1:
        if not rest:
            return None
        axis, stride, count = rest.pop()
        if size % count == 0:
            found.append(Atom(axis, stride, count))
        elif count % size == 0:
            found.append(Atom(axis, stride * (count // size), size))
            rest.append(Atom(axis, stride, count // size))
        else:
            return None
        size //= min(size, count)
    return found


def moved(op: Op, view: WeightView) -> WeightView | None:
    """The view through an op that only moves or casts what it reads; None for any other."""
    if len(op.inputs) != 1 or len(op.outputs) != 1 or not op.outputs[0].is_float:
        return None
    (before,), (after,) = op.inputs, op.outputs
    if op.primitive.stops_gradient:
        return None  # the factors would have the gradients that the weight has not
    how = op.primitive.moves
    if how in (Moves.KEEPS, Moves.ROUNDS):
        return view
    if how is Moves.RESHAPES or (how is Moves.REPEATS and before.size == after.size):
        return view.reshaped(after.shape)
    order = next(iter(op.body.calls)).params.get("permutation") if how is Moves.PERMUTES else None
    return None if order is None else view.permuted(order)


Around = tuple[Sequence[int], Sequence[int]]
"""The axes before that of the rank, and those behind it."""


def laid(factor: Any, own: Around, view: WeightView, dimensions: Around) -> Any:
    """A factor as a product reads it.

    Args:
        factor: axes of the weight, with the rank among them.
        own: which axes of the weight these are.
        view: the weight as the product reads it.
        dimensions: the axes of the view that it is to have.
    """
    wanted = [view.atoms(around) for around in dimensions]
    found = [a for atoms in wanted for a in atoms]
    have = [
        sorted((a for a in found if a.axis in around), key=lambda a: (around.index(a.axis), -a.stride))
        for around in own
    ]
    rank, flat = factor.shape[len(own[0])], [*have[0], None, *have[1]]
    split = jnp.reshape(factor, [rank if a is None else a.size for a in flat])
    ordered = jnp.transpose(split, [flat.index(a) for a in (*wanted[0], None, *wanted[1])])
    first, last = ([prod(a.size for a in view.axes[d]) for d in around] for around in dimensions)
    return jnp.reshape(ordered, (*first, rank, *last))
