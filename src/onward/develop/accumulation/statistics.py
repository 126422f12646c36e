"""Statistics of the whole batch, which every micro-batch reads in place of its own.

A loss such as ``sum(mask * error) / sum(mask)`` divides by a number of the whole batch. What is made of data
alone is known before the loop: an op ``of_whole_batch`` hands it in. A sum beside a mean, which is as many
times as small for a micro-batch as there are of them, is scaled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from onward.core.builder import Builder
from onward.core.errors import RecipeError
from onward.core.graph import Origin
from onward.core.marks import OF_WHOLE_BATCH, SCALE
from onward.core.program import Op, Program, Variable
from onward.core.words import Pass
from onward.develop.over_batch.known import Following, How, Need


@dataclass(frozen=True)
class StandIn:
    """A value that an op of the forward pass reads in place of one of its micro-batch.

    Attributes:
        op: the name of the op's first result.
        value: the name of the value.
        is_whole: the whole batch's is read, not that of the micro-batch.
        factor: what is read, over the value of the micro-batch; 1 for that of the whole batch.
    """

    op: str
    value: str
    is_whole: bool
    factor: float


def made_of_data(program: Program) -> set[Variable]:
    """The Variables computed of data alone: of no parameter, and of nothing that a step carries to the next.

    >>> import jax.numpy as jnp, onward as ow
    >>> found = ow.trace(lambda w, x: jnp.sum(x * w) / jnp.sum(x), jnp.ones(3), jnp.ones((4, 3)))
    >>> [op.type for op in found.ops if not made_of_data(found).isdisjoint(op.outputs)]
    ['reduce_sum']
    """
    others = set(program.state)
    for op in program.ops:
        if not others.isdisjoint(op.inputs):
            others.update(op.outputs)
    return {*program.inputs, *program.constants, *(v for op in program.ops for v in op.outputs)} - others


def counting(following: Following, known: AbstractSet[Variable]) -> set[Op]:
    """The ops of known values with numbers in them that count the examples, such as n - 1."""
    return {op for op in following.numbers if known >= {*op.outputs}}


def stand_ins(
    part: Program, following: Following, steps: int, known: AbstractSet[Variable]
) -> tuple[StandIn, ...]:
    """The values that ops have to read to compute what the whole does.

    Args:
        part: the forward Program of a micro-batch.
        following: how it follows the whole, with exact statistics.
        steps: how many micro-batches there are.
        known: what is made of data.
    """

    def found(op: Op, v: Variable, need: Need) -> StandIn:
        factor = 1.0 if v in known else float(steps) ** need.power
        return StandIn(op.outputs[0].name, v.name, v in known, factor)

    needs = {(op, v): need for op, asked in following.needs.items() for v, need in asked.items()}
    read = {v for op in counting(following, known) for v in op.outputs}
    needs |= {(op, v): Need(How.SAME) for op in part.ops for v in op.inputs if v in read}
    return tuple(found(op, v, need) for (op, v), need in needs.items())


@dataclass(frozen=True)
class OfMicroBatch:
    """A traced function whose ops read what they have to: an origin, as the one it stands for."""

    function: Origin
    stand_ins: tuple[StandIn, ...]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.function, name)

    def trace(self, data: tuple[Any, ...]) -> Program:
        """The forward Program for data of these types, its statistics those of the whole batch."""
        return with_stand_ins(self.function.trace(data), self.stand_ins)


def with_stand_ins(program: Program, given: tuple[StandIn, ...]) -> Program:
    """The forward Program whose ops read these.

    Raises:
        RecipeError: it has no such op, for at another length the function builds another graph.
    """
    asked: dict[str, dict[str, StandIn]] = defaultdict(dict)
    for one in given:
        asked[one.op][one.value] = one
    builder = Builder(program, made_by=Pass.FORWARD)
    for op in program.ops:
        mine = asked.pop(op.outputs[0].name, {})
        if not mine.keys() <= {v.name for v in op.inputs}:
            asked[op.outputs[0].name] = mine
            break
        builder.append(replace(op, inputs=tuple(_read(builder, v, mine) for v in op.inputs)))
    if asked:
        raise RecipeError(
            f"{program.name}: for this number of examples the function builds another graph than for others, "
            f"without the op that makes {next(iter(asked))!r}, which reads a statistic of the whole batch. "
            "Let it branch on no length of its data, or feed more examples."
        )
    return replace(program, ops=builder.ops)


def _read(builder: Builder, v: Variable, asked: Mapping[str, StandIn]) -> Variable:
    if (found := asked.get(v.name)) is None:
        return v
    kind, name = (OF_WHOLE_BATCH, "") if found.is_whole else (SCALE, f"scaled({v.name})")

    def read(x: Any) -> list[Any]:
        return [jnp.copy(x) if found.is_whole else (x * found.factor).astype(x.dtype)]

    met: Variable = builder.once(
        (v, found.is_whole, found.factor), lambda: builder.behind(v, kind, read, name)
    )
    return met
