"""The contents of boxes: facts about a Program's ops, and the words and numbers for them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from onward.core.cost import Cost, cost
from onward.core.homes import own_scopes
from onward.core.program import Op, Program, Variable
from onward.explain.draw.scene import shortened

_LONGEST_TYPE = 22
_TURNS = ("length", "steps")


@dataclass(frozen=True)
class Facts:
    """The facts about a Program that its picture shows.

    Attributes:
        program: the Program.
        index: the place of each op in it.
        costs: what each op costs.
        scopes: the one that each op stands in.
        following: for each next value of state, the Variable whose value it replaces.
        hyperparameters: the state that people set.
        lengths: for each op with Programs inside that run more than once, how often they do.
    """

    program: Program
    index: Mapping[Op, int]
    costs: Mapping[Op, Cost]
    scopes: Mapping[Op, str]
    following: Mapping[Variable, Variable]
    hyperparameters: frozenset[Variable]
    lengths: Mapping[Op, str]

    def places(self, ops: Iterable[Op]) -> tuple[int, ...]:
        """Where in the Program these ops are."""
        return tuple(sorted(self.index[op] for op in ops))


def facts_of(program: Program) -> Facts:
    """The facts about a Program."""
    index = {op: i for i, op in enumerate(program.ops)}
    costs = {op: cost(op) for op in program.ops}
    following = {new: old for old, new in program.next_state.items()}
    lengths = {op: _length(op, costs[op].endless) for op in program.ops if op.subprograms}
    return Facts(
        program, index, costs, own_scopes(program), following, frozenset(program.hyperparameters), lengths
    )


def _length(op: Op, is_endless: bool) -> str:
    """The number of times a loop runs, as text; ``⟳`` if it is unknown, empty for other ops."""
    length = next((op.attributes[key] for key in _TURNS if key in op.attributes), None)
    return f"× {length}" if length else "⟳" if is_endless else ""


def together(ops: Collection[Op]) -> str:
    """A title for several ops: how many there are, and their type if they share one."""
    types = {op.type for op in ops}
    if len(types) == 1:
        return f"{shortened(types.pop(), _LONGEST_TYPE)} × {len(ops)}"
    return f"{len(ops)} ops"
