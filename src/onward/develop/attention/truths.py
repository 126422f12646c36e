"""Masks taken apart: what all has to be true for a mask to be true, however that is written.

``causal & padding``, ``causal * padding > 0``, ``~(ahead | empty)``, ``(1 - causal * padding) * -1e9``: each
is a chain of functions of one value, a node where several meet. There all of them have to be 1, or one of
them; what the chain makes of 0 and of 1 says what follows for its result. A mask of which only bounds are
known is such a node, of itself and these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

import jax.numpy as jnp
import numpy as np

from onward.core.primitives.traits import Linear, Moves, Primitive
from onward.develop.attention.operands import Operand, row_of

_Path: TypeAlias = Sequence[tuple[Operand, int]]
"""Operands from a result to a node, and which part of each leads there."""


def conjuncts(mask: Operand) -> tuple[Operand, ...]:
    """The masks that all have to be true for it to be true."""
    return _apart(mask, lambda low, high, of_all: (low, high) == ((0, 1) if of_all else (1, 0)))


def disjuncts(mask: Operand) -> tuple[Operand, ...]:
    """The masks of which one has to be true for it to be true."""
    return _apart(mask, lambda low, high, of_all: (low, high) == ((1, 0) if of_all else (0, 1)))


def addends(operand: Operand) -> tuple[Operand, ...]:
    """Numbers below 0 where it is as far below 0, one of them at least; where all are 0, it is.

    Those of a sum, or of numbers of which only a bound is known, say so as far as nothing else is added.
    """
    path, node = _chain(operand)
    if node is not None and not _is_mask(node) and not _is_product(node):
        parts = (
            (replace(node, most=()), *(node.most if _rises(path, node) else ())) if node.most else node.parts
        )
        return tuple(x for part in parts for x in addends(_around(path, part)))
    return _apart(operand, lambda low, high, of_all: high == 0 > low if of_all else low == 0 > high)


def _apart(whole: Operand, is_meant: Callable[[float, float, bool], bool]) -> tuple[Operand, ...]:
    """The same chain around each value that meets at the node, if what it makes of 0 and 1 is meant."""
    path, node = _chain(whole)
    if node is None:
        return (whole,)
    low, high, below = (_at(path, node, n) for n in (0.0, 1.0, -0.0))
    if low is None or high is None or low != below:
        return (whole,)
    for of_all in (True, False):
        factors = _factors(node, of_all) if is_meant(low, high, of_all) else []
        if len(factors) > 1:
            return tuple(part for factor in factors for part in _apart(_around(path, factor), is_meant))
    return (whole,)


def _chain(operand: Operand) -> tuple[_Path, Operand | None]:
    """The way from an operand to what it is computed of, where that is one value and numbers, to a node."""
    path: list[tuple[Operand, int]] = []
    while not _is_node(operand):
        more = [i for i, part in enumerate(operand.parts) if part.number is None]
        if len(more) != 1:
            return path, None
        path.append((operand, more[0]))
        operand = operand.parts[more[0]]
    return path, operand


def _is_node(operand: Operand) -> bool:
    """Whether it is a product or a sum, true where both or one of two masks are, or known by its bounds."""
    if operand.most or operand.least:
        return True
    row = _row_of_two(operand)
    if row is None or _is_product(operand):
        return row is not None
    return row.conjoins or row.disjoins if _is_mask(operand) else row.adds and _is_float(operand)


def _row_of_two(operand: Operand) -> Primitive | None:
    """The primitive that computes it of two values; None where that is one, or a number."""
    is_of_two = len(operand.parts) == 2 and all(part.number is None for part in operand.parts)
    return row_of(operand.op) if operand.op is not None and is_of_two else None


def _is_product(operand: Operand) -> bool:
    """Whether it is the product of two values."""
    row = _row_of_two(operand)
    return row is not None and row.multiplies and row.linear is Linear.EACH


def _factors(node: Operand, of_all: bool) -> list[Operand]:
    """The values that meet at a node: masks that all have to be true, or one of them, or factors.

    The latter are all 0 or 1 but for one.
    """
    if _is_mask(node):
        bounds = node.most if of_all else node.least
        if bounds or node.op is None:
            return [replace(node, most=(), least=()), *bounds]
        return list(node.parts) if row_of(node.op).disjoins is not of_all else []
    if not of_all or not _is_product(node):
        return []
    truths, rest = _split(node)
    return truths if rest is None else [*truths, rest] if truths else []


def _split(operand: Operand) -> tuple[list[Operand], Operand | None]:
    """The factors of a number that are 0 or 1 everywhere, and what is left of it without them."""
    if operand.op is not None and len(operand.parts) == 1 and row_of(operand.op).moves is Moves.ROUNDS:
        (part,) = operand.parts
        if _is_mask(part):
            return [operand], None
        truths, rest = _split(part)
        return [replace(operand, parts=(x,)) for x in truths], rest and replace(operand, parts=(rest,))
    if operand.value is not None and np.all((operand.value == 0) | (operand.value == 1)):
        return [operand], None
    if not _is_product(operand):
        return [], operand
    (first, rest), (more, other) = map(_split, operand.parts)
    left = [x for x in (rest, other) if x is not None]
    whole = replace(operand, parts=tuple(left)) if len(left) == 2 else left[0] if left else None
    return [*first, *more], whole


def _at(path: _Path, node: Operand, number: float) -> float | None:
    """The number that a chain makes of this one at its node."""
    value = np.asarray(number).astype(_dtype(node))
    return _around(path, Operand((), node.lengths, known=value)).number


def _rises(path: _Path, node: Operand) -> bool:
    """Whether a chain makes 0 of 0, and of numbers below that such as are below it, so that bounds stay."""
    at_0, below = _at(path, node, 0.0), _at(path, node, -1.0)
    return at_0 == 0 and below is not None and below < 0


def _around(path: _Path, operand: Operand) -> Operand:
    """A chain around another value than that of its node."""
    for outer, at in reversed(path):
        operand = replace(outer, parts=(*outer.parts[:at], operand, *outer.parts[at + 1 :]))
    return operand


def _is_mask(operand: Operand) -> bool:
    return _dtype(operand).kind == "b"


def _is_float(operand: Operand) -> bool:
    return jnp.issubdtype(_dtype(operand), jnp.floating)


def _dtype(operand: Operand) -> np.dtype:
    value = np.asarray(operand.known) if operand.variable is None else operand.variable
    found: np.dtype = np.dtype((value if operand.op is None else operand.op.outputs[0]).dtype)
    return found
