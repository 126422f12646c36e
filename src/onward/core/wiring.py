"""The dimensions of arrays that one equation ties together: split one, and the other is split with it.

    y[b, f] = sum over d of x[b, d] w[d, f]

ties the rows of ``x`` to those of ``y``, the columns of ``w`` to those of ``y``, and sums over the columns of
``x`` with the rows of ``w``. What an equation neither ties nor sums, it needs whole.

Source: Xu et al., GSPMD, 2021, section 3.5 (propagation of shardings, one rule for each kind of operator).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from onward.core.jaxprs.body import Call
from onward.core.primitives.table import of
from onward.core.primitives.traits import Moves, Primitive, Work

Place = tuple[int, int]
"""Which value of an equation, its results counted on behind its operands, and which dimension of it."""

Ties = Iterator[tuple[Place, Place]]

_WINDOWS = (Work.WINDOW, Work.WINDOW_CHOICE, Work.WINDOW_SPREAD)


@dataclass(frozen=True)
class Wiring:
    """The dimensions that an equation ties together, and those that it sums over, together or alone."""

    ties: tuple[tuple[Place, Place], ...] = ()
    sums: tuple[tuple[Place, ...], ...] = ()


def wiring(call: Call) -> Wiring:
    """The wiring of one equation that runs no others.

    >>> import jax.numpy as jnp
    >>> from onward.core.jaxprs.body import body_of
    >>> (call,) = body_of(lambda x, w: [x @ w], jnp.ones((2, 3)), jnp.ones((3, 5))).calls
    >>> wiring(call)
    Wiring(ties=(((0, 0), (2, 0)), ((1, 1), (2, 1))), sums=(((0, 1), (1, 0)),))
    """
    row = of(call.primitive)
    if row.work is Work.PRODUCT:
        return _product(call)
    if row.work is Work.CONVOLUTION:
        return _convolution(call)
    if row.reduces is not None:
        return _reduction(call)
    return Wiring(tuple(_moved(call, row)))


def _moved(call: Call, row: Primitive) -> Ties:
    if row.moves in _MOVES:
        return _MOVES[row.moves](call)
    if row.update:
        return _scattered(call)
    if row.is_elementwise or row.along or row.keeps_places:
        return _each(call, axes_along(call))
    if row.work in _WINDOWS:
        return _each(call, [i for i, n in enumerate(call.params["window_dimensions"]) if n > 1])
    if row.on_last is not None:
        return _each_problem(call, row.on_last)
    return iter(())


def axes_along(call: Call) -> tuple[int, ...]:
    """The axes along which an equation runs, as its parameters say."""
    row = of(call.primitive)
    along = call.params[row.along] if row.along else ()
    found = along if isinstance(along, tuple | list) else (along,)
    return tuple(i % len(call.operands[0].shape) for i in found)


def _each(call: Call, along: Sequence[int]) -> Ties:
    """Numbers that stay in their place; results are computed each of its operand, or of all."""
    paired = len(call.results) == len(call.operands)
    for j, result in enumerate(call.results):
        for k, operand in enumerate(call.operands):
            if len(operand.shape) == len(result.shape) and (not paired or j == k):
                for i, (n, m) in enumerate(zip(operand.shape, result.shape, strict=True)):
                    if n == m and i not in along:  # an operand may be 1 long, and is repeated
                        yield (k, i), _result(call, i, j)


def _each_problem(call: Call, last: int | str) -> Ties:
    """Axes that count problems, such as matrices, in front of those that make up one."""
    own = last if isinstance(last, int) else len(call.params[last])
    for j, result in enumerate(call.results):
        for k, operand in enumerate(call.operands):
            axes = range(min(len(operand.shape) - own, len(result.shape)))
            yield from (((k, i), _result(call, i, j)) for i in axes if operand.shape[i] == result.shape[i])
    if "left_side" in call.params:  # the columns of a right side, or its rows, are systems of their own
        i = len(call.results[0].shape) - (1 if call.params["left_side"] else 2)
        yield (1, i), _result(call, i)


def _alike(call: Call) -> Ties:
    """Dimensions that are as long in an operand as in the result, but for one that joins arrays."""
    for j, result in enumerate(call.results):
        for k, operand in enumerate(call.operands):
            before, after = (list(range(len(x.shape))) for x in (operand, result))
            axis = call.params.get("axis")
            if (
                len(before) != len(after) and axis is not None
            ):  # arrays that are stacked, or taken apart again
                (after if len(after) > len(before) else before).pop(axis)
            if len(before) == len(after):
                for i, m in zip(before, after, strict=True):
                    if operand.shape[i] == result.shape[m]:
                        yield (k, i), _result(call, m, j)


def _cut(call: Call) -> Ties:
    first = Call(call.primitive, call.operands[:1], call.results, call.params, {}, call.numbers[:1])
    for (k, i), (r, j) in _alike(first):
        yield (k, i), (r + len(call.operands) - 1, j)


def _repeated(call: Call) -> Ties:
    (x, *_), places = call.operands, call.params.get("broadcast_dimensions", ())
    for i, place in enumerate(places):
        if x.shape[i] == call.results[0].shape[place]:
            yield (0, i), _result(call, place)


def _permuted(call: Call) -> Ties:
    order = call.params.get("permutation", range(len(call.operands[0].shape)))
    yield from (((0, i), _result(call, j)) for j, i in enumerate(order) if i not in axes_along(call))


def _reshaped(call: Call) -> Ties:
    """The outermost dimensions of what is as long before as after."""
    before, after = call.operands[0].shape, call.results[0].shape
    if 0 in before:  # whose lengths do not tell what belongs together
        return
    i = j = 0
    while i < len(before) and j < len(after):
        first, second = i, j
        n, m = before[i], after[j]
        while n != m and i + 1 < len(before) + len(after):
            if n < m:
                i, n = i + 1, n * before[i + 1]
            else:
                j, m = j + 1, m * after[j + 1]
        left = next((x for x in range(first, i + 1) if before[x] > 1), None)
        right = next((x for x in range(second, j + 1) if after[x] > 1), None)
        if left is not None and right is not None:
            yield (0, left), _result(call, right)
        i, j = i + 1, j + 1


def _looked_up(call: Call) -> Ties:
    numbers, sizes = call.params["dimension_numbers"], call.params["slice_sizes"]
    table = call.operands[0]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    own = [i for i in range(len(table.shape)) if i not in gone]
    for i, j in zip(own, numbers.offset_dims, strict=True):
        if sizes[i] == table.shape[i]:
            yield (0, i), _result(call, j)
    others = [j for j in range(len(call.results[0].shape)) if j not in numbers.offset_dims]
    yield from (((1, i), _result(call, j)) for i, j in enumerate(others))
    pairs = zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True)
    yield from (((0, i), (1, j)) for i, j in pairs)


def _scattered(call: Call) -> Ties:
    numbers, (x, _, updates, *_) = call.params["dimension_numbers"], call.operands
    yield from (((0, i), _result(call, i)) for i in range(len(x.shape)))
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    own = [i for i in range(len(x.shape)) if i not in gone]
    for i, j in zip(own, numbers.update_window_dims, strict=True):
        if x.shape[i] == updates.shape[j]:
            yield (0, i), (2, j)
    others = [j for j in range(len(updates.shape)) if j not in numbers.update_window_dims]
    yield from (((1, i), (2, j)) for i, j in enumerate(others))
    pairs = zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True)
    yield from (((0, i), (1, j)) for i, j in pairs)


def _product(call: Call) -> Wiring:
    (contracted, batch), (x, y) = call.params["dimension_numbers"], call.operands
    ties: list[tuple[Place, Place]] = []
    for i, (a, b) in enumerate(zip(*batch, strict=True)):
        ties += [((0, a), (2, i)), ((1, b), (2, i))]
    at = len(batch[0])
    for k, operand in enumerate((x, y)):
        for i in range(len(operand.shape)):
            if i not in contracted[k] and i not in batch[k]:
                ties.append(((k, i), (2, at)))
                at += 1
    sums = tuple(((0, a), (1, b)) for a, b in zip(*contracted, strict=True))
    return Wiring(tuple(ties), sums)


def _convolution(call: Call) -> Wiring:
    numbers, params = call.params["dimension_numbers"], call.params
    image, kernel, made = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    if params["feature_group_count"] > 1 or params["batch_group_count"] > 1:
        return Wiring((((0, image[0]), (2, made[0])),) if params["batch_group_count"] == 1 else ())
    ties = (((0, image[0]), (2, made[0])), ((1, kernel[0]), (2, made[1])))
    return Wiring(ties, (((0, image[1]), (1, kernel[1])),))


def _reduction(call: Call) -> Wiring:
    gone = call.params.get("axes", call.params.get("dimensions", ()))
    kept = [i for i in range(len(call.operands[0].shape)) if i not in gone]
    ties = [((0, i), _result(call, j)) for j, i in enumerate(kept)]
    return Wiring(tuple(ties), tuple(((0, i),) for i in gone))


def _result(call: Call, dimension: int, number: int = 0) -> Place:
    return len(call.operands) + number, dimension


_MOVES: Mapping[Any, Callable[[Call], Ties]] = {
    Moves.CUTS: _cut,
    Moves.CUTS_AT: _cut,
    Moves.JOINS: _alike,
    Moves.LOOKS_UP: _looked_up,
    Moves.PADS: _alike,
    Moves.PERMUTES: _permuted,
    Moves.REPEATS: _repeated,
    Moves.RESHAPES: _reshaped,
}
