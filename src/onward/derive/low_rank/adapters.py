"""The factors beside each weight: which weights, of what shapes, under what names."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from onward.core.errors import ArgumentError, GraphError, HyperparameterError, UnknownNameError
from onward.core.names import Names
from onward.core.program import Op, Program, Variable
from onward.core.structure import describe, expect_count, expect_flag, is_number, is_word
from onward.core.walk import Where, select
from onward.core.words import Kind, some
from onward.derive.low_rank.base import BASES
from onward.derive.low_rank.readers import Axes, Reader, axes_of, products_of, readers_of


@dataclass(frozen=True)
class LowRank:
    """The arguments of ``low_rank``."""

    where: tuple[Where, ...] | None
    rank: int
    alpha: float | None
    rank_stabilized: bool
    base: str | None
    train: tuple[Where, ...]

    def __post_init__(self) -> None:
        expect_count(self.rank, "low_rank: rank", 1, "a whole number", HyperparameterError)
        expect_flag(self.rank_stabilized, "low_rank: rank_stabilized")
        if self.where == ():
            raise ArgumentError(
                "low_rank: where is empty: nothing is adapted. Leave it out to adapt every weight that "
                "products read and nothing else."
            )
        if self.alpha is not None and not (
            is_number(self.alpha) and math.isfinite(self.alpha) and self.alpha > 0
        ):
            raise HyperparameterError(
                f"low_rank: alpha is {self.alpha!r}; expected a number above 0, or None for the rank, of "
                "which the scale alpha / rank is 1."
            )
        if self.base is not None and not is_word(self.base, BASES):
            raise ArgumentError(
                f"low_rank: base is {describe(self.base)}; expected 'bfloat16', 'int8', or None for the "
                "weights as they are."
            )

    @property
    def scale(self) -> float:
        """The number by which the product of the factors is multiplied."""
        alpha = self.rank if self.alpha is None else self.alpha
        return float(alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank))


@dataclass(frozen=True, eq=False)
class Adapter:
    """A weight with its two factors: ``weight + scale * a b``, over the axes for inputs and outputs."""

    weight: Variable
    axes: Axes
    a: Variable
    b: Variable
    readers: tuple[Reader, ...]


def adapters_of(program: Program, given: LowRank) -> list[Adapter]:
    """The weights of a forward Program that are adapted, with their factors.

    Raises:
        UnknownNameError: a name or pattern that no parameter has.
        GraphError: a weight that something else than a product reads.
        HyperparameterError: a rank that is too large for a weight.
    """
    names = Names(program.variables)
    read = (
        {v: readers_of(program, v) for v in _chosen(program, given)}
        if given.where is not None
        else _all(program, given.rank)
    )
    if is_trained(program):
        _expect_read(program, read)
    _expect_one_each(read)
    return [_adapter(v, products, given.rank, names) for v, products in read.items() if products]


def is_trained(program: Program) -> bool:
    """Whether it is the Program that trains; one for tests may lack some of that."""
    return program.recipe is None or program.recipe.origin.training


def picked(program: Program, where: Sequence[Where], what: str) -> tuple[Variable, ...]:
    """The parameters that names and patterns pick; of a Program for tests, those that are there."""
    if is_trained(program):
        return select(program.parameters, where, what)
    found: list[Variable] = []
    for choice in where:
        try:
            found += select(program.parameters, [choice], what)
        except UnknownNameError:
            continue
    return tuple(dict.fromkeys(found))


def _chosen(program: Program, given: LowRank) -> tuple[Variable, ...]:
    found = picked(program, given.where or (), "low_rank, where")
    for v in found:
        if not jnp.issubdtype(v.dtype, np.floating):
            raise GraphError(
                f"low_rank: {v.name!r} is {v.type}; expected real floating point numbers. Leave it out of "
                "where=, or train it as a whole, train=[...]."
            )
    return found


def _all(program: Program, rank: int) -> dict[Variable, list[Reader]]:
    """The parameters that products read and nothing else, but for those thinner than the factors."""
    found = {}
    for v in program.parameters:
        if v.ndim < 2 or not jnp.issubdtype(v.dtype, np.floating):
            continue
        try:
            found[v] = readers_of(program, v)
        except GraphError:
            continue
    read = {v: products for v, products in found.items() if products}
    return {v: products for v, products in read.items() if _most(v, axes_of(products, v)) >= rank} or read


def _most(weight: Variable, axes: Axes) -> int:
    """The largest rank of a weight."""
    return min(axes.count(weight.shape, axes.inputs), axes.count(weight.shape, axes.outputs))


def _expect_read(program: Program, read: dict[Variable, list[Reader]]) -> None:
    """Raise ``GraphError`` where nothing is adapted, or a weight that nothing reads was named."""
    if not read:
        known = some([v.name for v in program.parameters], 5) or "no parameters"
        raise GraphError(
            f"low_rank: no parameter of {program.name!r} is read by products (@, jnp.dot, einsum) and by "
            f"nothing else; it has {known}. Name one with where= to see what reads it."
        )
    if unread := [v.name for v, products in read.items() if not products]:
        raise GraphError(
            f"low_rank: no op of {program.name!r} reads {some(unread, 5)}; expected weights that products "
            "read. Leave them out of where=."
        )


def _expect_one_each(read: dict[Variable, list[Reader]]) -> None:
    """Raise ``GraphError`` for a product of two weights that are both adapted."""
    seen: dict[Op, Variable] = {}
    for v, readers in read.items():
        for op in (product.op for product in products_of(readers)):
            if (other := seen.setdefault(op, v)) is not v:
                raise GraphError(
                    f"low_rank: {op.type}{op.at} multiplies {other.name!r} and {v.name!r} with each other; "
                    "expected one adapted weight in a product. Leave one out of where=."
                )


def _adapter(weight: Variable, products: Sequence[Reader], rank: int, names: Names) -> Adapter:
    axes = axes_of(products, weight)
    most = _most(weight, axes)
    if rank > most:
        raise HyperparameterError(
            f"low_rank: rank is {rank}, and {weight.name!r} ({weight.type}) has {most} as its largest rank: "
            f"{axes.count(weight.shape, axes.inputs)} inputs, {axes.count(weight.shape, axes.outputs)} "
            "outputs. Give a smaller rank, or choose other weights with where=."
        )
    dtype = jnp.promote_types(weight.dtype, jnp.float32)

    def factor(word: str, *shape: int) -> Variable:
        return Variable(names.new(f"{weight.name}/{word}"), shape, dtype, Kind.PARAMETER)

    batch, inputs, outputs = (
        [weight.shape[i] for i in chosen] for chosen in (axes.batch, axes.inputs, axes.outputs)
    )
    a = factor("low_rank_a", *batch, *inputs, rank)
    b = factor("low_rank_b", *batch, rank, *outputs)
    return Adapter(weight, axes, a, b, tuple(products))
