"""The body of a loop, a condition or what each device runs, with its turns as Programs with roles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from onward.core.jaxprs.body import Body
from onward.core.jaxprs.loops import LoopTurn
from onward.core.jaxprs.reading import programs_in
from onward.core.program import Program, programs_within
from onward.core.words import Kind


@dataclass(frozen=True, eq=False)
class OpenedTurn:
    """One turn of a loop, a device or a branch, by its roles.

    Attributes:
        told: where what it is given and gives stands outside.
        turn: its Program; its inputs are in the order in which it is given them.
        handed: the positions (input, output) of what is carried on.
        losses: the outputs that are made of its losses.
        marked: its ops, by number, that are computed under ``jax.grad``.
    """

    told: LoopTurn
    turn: Program
    handed: tuple[tuple[int, int], ...]
    losses: frozenset[int]
    marked: frozenset[int]

    @property
    def trains(self) -> bool:
        """Whether it carries parameters."""
        return any(self.turn.inputs[i].kind is Kind.PARAMETER for i, _ in self.handed)


class OpenedBody(Body):
    """The body of a loop, a ``shard_map`` or a condition that computes gradients, open to be looked into.

    Attributes:
        turns: the turn of a loop, what each device does, or every branch that computes gradients.
        first: the first of them, by which it is told what becomes of what outside.
        losses: the outputs that are made of the losses of all of them.
    """

    def __init__(self, body: Body, turns: Sequence[OpenedTurn]) -> None:
        super().__init__(body.closed)
        self.turns, self.first = tuple(turns), turns[0]
        self.losses = frozenset.intersection(*(opened.losses for opened in turns))
        self.programs = {**programs_in(body), **{opened.told.part: opened.turn for opened in turns}}

    @property
    def trains(self) -> bool:
        """Whether it carries parameters."""
        return any(opened.trains for opened in self.turns)


@programs_within.register
def _programs_within(body: OpenedBody) -> Mapping[str, Program]:
    return body.programs
