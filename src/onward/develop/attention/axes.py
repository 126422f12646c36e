"""Which axis of the scores each dimension of a value counts along, whatever was permuted or merged since.

The scores are the product of queries and keys. Each of their dimensions is an axis, a number. A dimension of
any value that is computed of them counts along one axis, or along several that were merged, the last of them
fastest, or along none, where it is 1 long or repeats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np

from onward.core.jaxprs.body import Call
from onward.core.primitives.table import of
from onward.core.primitives.traits import Moves

Axes: TypeAlias = tuple[tuple[int, ...], ...]
"""For each dimension of a value the axes along which it counts."""

Lengths: TypeAlias = Mapping[int, int]
"""How long each axis is."""


def own_axes(shape: Sequence[int]) -> Axes:
    """Each dimension of an array as an axis, but for those that are 1 long.

    >>> own_axes((2, 1, 5))
    ((0,), (), (2,))
    """
    return tuple((i,) if n > 1 else () for i, n in enumerate(shape))


def moved(call: Call, axes: Axes, lengths: Lengths) -> Axes | None:
    """The axes of what an equation moves its first operand to; None where it takes numbers apart.

    >>> import jax.numpy as jnp
    >>> from onward.core.jaxprs.body import body_of
    >>> (call,) = body_of(lambda x: [x.T], jnp.ones((2, 3))).calls
    >>> moved(call, ((0,), (1,)), {0: 2, 1: 3})
    ((1,), (0,))
    """
    moves, shape = of(call.primitive).moves, call.results[0].shape
    if moves in (Moves.KEEPS, Moves.ROUNDS):
        return axes
    if moves is Moves.PERMUTES and "permutation" in call.params:
        return tuple(axes[i] for i in call.params["permutation"])
    if moves is Moves.RESHAPES:
        return regrouped(axes, shape, lengths)
    if moves is Moves.REPEATS and "broadcast_dimensions" in call.params:
        at, before = call.params["broadcast_dimensions"], call.operands[0].shape
        places = {i: axes[j] for j, i in enumerate(at) if before[j] == shape[i]}
        return tuple(places.get(i, ()) for i in range(len(shape)))
    return None


def before_moved(call: Call, axes: Axes, lengths: Lengths) -> Axes | None:
    """The axes of the operand of an equation that moves it to these."""
    operand, result = call.operands[0].shape, call.results[0].shape
    moves = of(call.primitive).moves
    if moves in (Moves.KEEPS, Moves.ROUNDS):
        return axes
    if moves is Moves.PERMUTES and "permutation" in call.params:
        places = dict(zip(call.params["permutation"], axes, strict=True))
        return tuple(places[i] for i in range(len(operand)))
    if moves is Moves.RESHAPES:
        return regrouped(axes, operand, lengths)
    if moves is Moves.REPEATS:
        at = call.params.get("broadcast_dimensions", range(len(operand)))
        if all(n in (1, result[j]) for n, j in zip(operand, at, strict=True)):
            return tuple(axes[j] if n == result[j] else () for n, j in zip(operand, at, strict=True))
    return None


def factors(call: Call, first: int) -> tuple[Axes, Axes, dict[int, int]]:
    """The axes of both factors of a product whose dimensions are the axes, and how long those of its sum are.

    >>> import jax.numpy as jnp
    >>> from onward.core.jaxprs.body import body_of
    >>> (call,) = body_of(lambda x, y: [jnp.inner(x, y)], jnp.ones((2, 3)), jnp.ones((5, 3))).calls
    >>> factors(call, first=2)
    (((0,), (2,)), ((1,), (2,)), {2: 3})
    """
    contracted, batch = call.params["dimension_numbers"]
    summed = {first + n: call.operands[0].shape[i] for n, i in enumerate(contracted[0])}
    free = iter(range(len(batch[0]), len(call.results[0].shape)))
    sides = []
    for side in range(2):
        places = dict(zip((*batch[side], *contracted[side]), (*range(len(batch[0])), *summed), strict=True))
        shape = call.operands[side].shape
        sides.append(tuple((places[i] if i in places else next(free),) for i in range(len(shape))))
    return sides[0], sides[1], summed


def multiplied(call: Call, at: int, axes: Axes, first: int) -> tuple[Axes, Axes, dict[int, int]]:
    """The axes of the other factor and of a product where one has these, and how long those of the other are.

    >>> import jax.numpy as jnp
    >>> from onward.core.jaxprs.body import body_of
    >>> (call,) = body_of(lambda x, y: [x @ y], jnp.ones((2, 3)), jnp.ones((3, 5))).calls
    >>> multiplied(call, 0, ((0,), (1,)), first=2)
    (((1,), (2,)), ((0,), (2,)), {2: 5})
    """
    contracted, batch = call.params["dimension_numbers"]
    shared = zip((*batch[1 - at], *contracted[1 - at]), (*batch[at], *contracted[at]), strict=True)
    places = {i: axes[j] for i, j in shared}
    shape = call.operands[1 - at].shape
    alone = [i for i in range(len(shape)) if i not in places]
    places |= {i: (first + n,) for n, i in enumerate(alone)}
    own = [axes[j] for j in range(len(axes)) if j not in (*batch[at], *contracted[at])]
    others = [places[i] for i in alone]
    made = (*(axes[j] for j in batch[at]), *(own + others if at == 0 else others + own))
    return tuple(places[i] for i in range(len(shape))), made, {places[i][0]: shape[i] for i in alone}


def regrouped(axes: Axes, shape: Sequence[int], lengths: Lengths) -> Axes | None:
    """The axes of the same numbers in another shape; None where an axis would be cut.

    >>> regrouped(((0,), (1,), (2,)), (2, 15), {0: 2, 1: 3, 2: 5})
    ((0,), (1, 2))
    """
    waiting = [axis for group in axes for axis in group if lengths[axis] > 1]
    if prod(shape) != prod(lengths[axis] for axis in waiting):
        return None  # a dimension repeats
    found: list[tuple[int, ...]] = []
    for n in shape:
        group: list[int] = []
        while prod(lengths[a] for a in group) < n and waiting:
            group.append(waiting.pop(0))
        if prod(lengths[a] for a in group) != n:
            return None
        found.append(tuple(group))
    return tuple(found)


@dataclass(frozen=True)
class AxisCut:
    """An axis that counts along two dimensions of a value, and how long each part of it is."""

    axis: int
    parts: tuple[int, int]


def cut(axes: Axes, shape: Sequence[int], lengths: Lengths) -> AxisCut | None:
    """The first axis that would be cut where numbers are laid out in another shape, if it is cut in two.

    >>> cut(((0,), (1,)), (2, 3, 5), {0: 6, 1: 5})
    AxisCut(axis=0, parts=(2, 3))
    """
    waiting = [axis for group in axes for axis in group if lengths[axis] > 1]
    if prod(shape) != prod(lengths[axis] for axis in waiting):
        return None
    for n in shape:
        while n > 1 and waiting:
            axis = waiting.pop(0)
            if n % lengths[axis] == 0:
                n //= lengths[axis]
            elif lengths[axis] % n == 0:
                return AxisCut(axis, (n, lengths[axis] // n))
            else:
                return None
    return None


def spread(x: jnp.ndarray | np.ndarray, axes: Axes, lengths: Lengths) -> jnp.ndarray | np.ndarray:
    """An array with one dimension for each axis of the scores, 1 long where it does not count along it.

    >>> spread(np.ones((6, 5)), ((2, 0), (1,)), {0: 3, 1: 5, 2: 2}).shape
    (3, 5, 2)
    """
    order = [axis for group in axes for axis in group]
    apart = x.reshape([lengths[axis] for axis in order])
    ranked = apart.transpose(np.argsort(order))
    return ranked.reshape([lengths[axis] if axis in order else 1 for axis in range(len(lengths))])


def grouped(x: jnp.ndarray, axes: Axes, groups: Sequence[Sequence[int]], lengths: Lengths) -> jnp.ndarray:
    """An array with a dimension for each group of axes, all of which it counts along.

    >>> grouped(jnp.ones((6, 5)), ((2, 0), (1,)), ((1,), (), (0, 2)), {0: 3, 1: 5, 2: 2}).shape
    (5, 1, 6)
    """
    order = [axis for group in axes for axis in group]
    apart = x.reshape([lengths[axis] for axis in order])
    wanted = [axis for group in groups for axis in group]
    laid = apart.transpose([order.index(axis) for axis in wanted if axis in order])
    return laid.reshape([prod(lengths[axis] for axis in group) for group in groups])
