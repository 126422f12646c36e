"""Statistics of the whole batch, which every micro-batch reads in place of its own.

A loss such as ``sum(mask * error) / sum(mask)`` divides by a number of the whole batch. What is made of data
alone is known before the loop: an op ``of_whole_batch`` hands it in. A sum beside a mean, which is as many
times as small for a micro-batch as there are of them, is scaled.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from onward.core.builder import Builder
from onward.core.errors import RecipeError
from onward.core.graph import Origin
from onward.core.marks import OF_WHOLE_BATCH, OWN_KEY, Mark
from onward.core.names import Names
from onward.core.program import Op, Program, Variable
from onward.core.walk import ancestors, descendants
from onward.core.words import Kind, Pass
from onward.develop.over_batch.behind import behind, computed
from onward.develop.over_batch.known import SAME, Following, Follows, How, Need
from onward.develop.over_batch.own_keys import folded, in_common
from onward.develop.over_batch.reading import reading, times

_NUMBER = np.int32(0)  # this very object: layers that are rolled read it too


@dataclass(frozen=True)
class StandIn:
    """A value that an op of the forward pass reads in place of one of its micro-batch.

    Attributes:
        op: the name of the op's first result.
        value: the name of the value.
        read: ``OF_WHOLE_BATCH`` for its value in the whole batch, ``OWN_KEY`` for a random key of the
            micro-batch's own, a number for as many times the value of the micro-batch.
    """

    op: str
    value: str
    read: Mark | float


def made_of_data(program: Program) -> set[Variable]:
    """The Variables computed of data alone: of no parameter, and of nothing that a step carries to the next.

    >>> import jax.numpy as jnp, onward as ow
    >>> found = ow.trace(lambda w, x: jnp.sum(x * w) / jnp.sum(x), jnp.ones(3), jnp.ones((4, 3)))
    >>> [op.type for op in found.ops if not made_of_data(found).isdisjoint(op.outputs)]
    ['reduce_sum']
    """
    return {*program.inputs, *program.constants, *computed(program)} - descendants(program, program.state)


def _is_whole(follows: Follows) -> bool:
    """Whether a loop over micro-batches hands out the value of the whole batch."""
    is_mean = follows.kind is How.MEAN and follows.power in (0, 1)
    return is_mean or follows == SAME or follows.kind in (How.MOST, How.LEAST)


class KnownOfWhole:
    """The values of the whole batch that micro-batches can have: made of data alone, or multiples of sums.

    What they hand on from one to the next is their own. Nothing is known where the loss is left to the
    weights of examples, or to people.

    Args:
        whole: the forward Program of the whole batch.
        part: that of a micro-batch.
        is_left: whether nothing is known.
        handed: the state that micro-batches hand on, with what replaces it.
    """

    def __init__(
        self, whole: Program, part: Program, is_left: bool, handed: Mapping[Variable, Variable]
    ) -> None:
        data, self.carried = made_of_data(part), ancestors(part, handed.values())
        self.of_data, self.is_left, self.handed = data, is_left, handed
        same = {v for v in data if v.name in whole and whole[v.name].shape == v.shape}
        self.values = set[Variable]() if is_left else same - self.carried

    def can_have(self, v: Variable, need: Need, reaches: bool) -> bool:
        """Whether they can have what is needed in place of a value."""
        can_scale = need.merged is How.SAME and v not in self.of_data and v not in self.carried
        return not self.is_left and (v in self.values or can_scale)

    def after_the_loop(
        self, whole: Program, part: Program, following: Following
    ) -> tuple[set[Op], set[Variable]]:
        """The ops of results that need no example, and the values of the loop that they read.

        They run once, on the statistics of the whole batch: a perplexity, a root, whether all is finite.
        """
        if self.is_left:
            return set(), set()
        stays = [*self.handed.values(), *([] if part.loss is None else [part.loss])]
        after = behind(whole, part, following, stays, _is_whole)
        held, made = {v for op in after for v in op.outputs}, set(computed(part))
        return after, {v for op in after for v in op.inputs if v in made and v not in held}

    def known_counts(self, following: Following) -> set[Op]:
        """The ops of known values with numbers in them that count the examples, such as n - 1."""
        return {op for op in following.numbers if self.values >= {*op.outputs}}

    def stand_ins(
        self, part: Program, following: Following, steps: int, results: Iterable[Variable]
    ) -> tuple[StandIn, ...]:
        """The values that ops have to read to compute what the whole does.

        Args:
            part: the forward Program of a micro-batch.
            following: how it follows the whole, with exact statistics.
            steps: how many micro-batches there are.
            results: what is put together.
        """
        told = following.reaching(part, results)
        needs = {(op, v): need for op, asked in told.needs.items() for v, need in asked.items()}
        read = {v for op in self.known_counts(told) for v in op.outputs} | (
            told.constants.keys() & self.values
        )
        needs |= {(op, v): Need(How.SAME) for op in part.ops if op.outputs for v in op.inputs if v in read}
        return tuple(
            StandIn(op.outputs[0].name, v.name, OF_WHOLE_BATCH if known else float(steps) ** need.power)
            for (op, v), need in needs.items()
            for known in [v in self.values]
        )


def own_keys(
    part: Program, following: Following, split: Iterable[str], handed: Iterable[Variable]
) -> tuple[StandIn, ...]:
    """Keys of their own for what micro-batches draw for their examples from a key that all of them have.

    That is made of no example, and of no state that they hand on.
    """
    keys = in_common(part, {*handed, *following.drawn, *(v for v in part.inputs if v.name in set(split))})
    drawing = [op for op in part.ops if not following.drawn.isdisjoint(op.outputs)]
    pairs = [(op.outputs[0].name, v.name) for op in drawing for v in op.inputs if v in keys]
    return tuple(StandIn(name, key, OWN_KEY) for name, key in pairs)


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
    makers = [op for op in program.ops if op.outputs]
    places = {(op.outputs[0].name, v.name): (op, v) for op in makers for v in op.inputs}
    needs = defaultdict[Op, dict[Variable, Mark | float]](dict)
    for one in given:
        if (place := places.get((one.op, one.value))) is None:
            raise RecipeError(
                f"{program.name}: for this number of examples the function builds another graph than for "
                f"others, without the op that makes {one.op!r} and reads something for the whole batch, a "
                "statistic or a random key. Let it branch on no length of its data, or feed more examples."
            )
        needs[place[0]][place[1]] = one.read
    number = Variable(Names(program.variables).new("micro_batch"), (), np.dtype(np.int32), Kind.CONSTANT)

    def read(builder: Builder, v: Variable, what: Mark | float) -> Variable:
        if what is OWN_KEY:
            return builder.add(OWN_KEY, [v, number], [f"own({v.name})"], folded)[0]
        if what is OF_WHOLE_BATCH:
            return builder.behind(v, OF_WHOLE_BATCH, lambda x: [jnp.copy(x)])
        return times(builder, v, float(what))

    has_own = any(one.read is OWN_KEY for one in given)
    numbers = {number: _NUMBER} if has_own else None  # the loop counts
    return reading(program, needs, read, Pass.FORWARD, constants=numbers)


def numbers_of(program: Program, read: Collection[Variable]) -> tuple[Variable, ...]:
    """The Variable that holds the number of a micro-batch, if it is among those that are read."""
    number: Any = _NUMBER
    return tuple(v for v, value in program.constants.items() if value is number and v in read)
