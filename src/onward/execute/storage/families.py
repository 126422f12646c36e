"""Ops that do the same to different parameters: families, which one op over stacked arrays can replace.

Two ops are of one family if they compute the same, read the same hyperparameters, and stand in the same
relation to ops that are of one family themselves: the Adam of every bias behind the same clip.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from onward.core.jaxprs.devices import only_exchange
from onward.core.marks import FETCH, STACK, STORE, UNSTACK, gradient_type
from onward.core.program import Op, Program, Variable
from onward.core.walk import consumers, producers
from onward.core.words import Pass

_ROWS = (UNSTACK, gradient_type(STACK))
_ROUNDS = 6


@dataclass(frozen=True, eq=False)
class Family:
    """Ops of one kind, member by member, and which of their inputs differ from member to member."""

    ops: tuple[Op, ...]
    varies: tuple[bool, ...]

    def column(self, position: int) -> tuple[Variable, ...]:
        """The Variables that the members read at this position."""
        return tuple(op.inputs[position] for op in self.ops)

    @property
    def columns(self) -> list[tuple[Variable, ...]]:
        """The Variables that differ from member to member, input by input."""
        return [self.column(i) for i, varies in enumerate(self.varies) if varies]

    @property
    def results(self) -> list[tuple[Variable, ...]]:
        """The Variables that the members make, output by output."""
        return list(zip(*(op.outputs for op in self.ops), strict=True))

    def reordered(self, order: Sequence[int]) -> Family:
        """The same family with its members in another order."""
        return Family(tuple(self.ops[i] for i in order), self.varies)


def families_of(program: Program) -> list[Family]:
    """The families of the update pass and of the collectives, those of one member left out."""
    colours = _Colours(program)
    members: dict[int, list[Op]] = defaultdict(list)
    for op in colours.candidates:
        members[colours.of[op]].append(op)
    return [
        Family(tuple(ops), colours.varies[ops[0]])
        for ops in members.values()
        if len(ops) > 1 and any(colours.varies[ops[0]])
    ]


def is_stack(op: Op) -> bool:
    """Whether an op lays arrays of one type on top of each other."""
    return op.type is STACK and op.outputs[0].shape == (len(op.inputs), *op.inputs[0].shape)


def is_rows(op: Op) -> bool:
    """Whether an op hands out the rows of one array, each as an array of its own."""
    if not any(op.type is rows for rows in _ROWS) or len(op.inputs) != 1:
        return False
    (whole,) = op.inputs
    return whole.shape[:1] == (len(op.outputs),) and all(v.shape == whole.shape[1:] for v in op.outputs)


class _Colours:
    """Equal numbers for ops of one family, refined until neighbours agree (Weisfeiler and Leman, 1968)."""

    def __init__(self, program: Program) -> None:
        apart = _moved_by_itself(program)
        able = [op for op in program.ops if op not in apart and _may_join(op)]
        count = Counter(map(_kind, able))
        self.candidates = [op for op in able if count[_kind(op)] > 1]
        self.program = program
        self.varies = self._varying()
        self.of = _numbered({op: self._first(op) for op in self.candidates})
        self._makers, self._readers = producers(program), consumers(program)
        stacks = (op for op in program.ops if is_stack(op) or is_rows(op))
        self._number = {op: i for i, op in enumerate(stacks)}
        self._replaces = {new: old for old, new in program.next_state.items()}
        for _ in range(_ROUNDS):
            before = len(set(self.of.values()))
            self.of = _numbered({op: (self.of[op], self._surroundings(op)) for op in self.candidates})
            if len(set(self.of.values())) == before:
                break

    def _varying(self) -> dict[Op, tuple[bool, ...]]:
        """For each op which of its inputs no other op of its kind reads at that place."""
        seen = Counter((_kind(op), i, v) for op in self.candidates for i, v in enumerate(op.inputs))
        return {
            op: tuple(seen[_kind(op), i, v] == 1 for i, v in enumerate(op.inputs)) for op in self.candidates
        }

    def _first(self, op: Op) -> Hashable:
        shared = (None if varies else v for v, varies in zip(op.inputs, self.varies[op], strict=True))
        return (_kind(op), *shared)

    def _surroundings(self, op: Op) -> Hashable:
        reads = [v for v, varies in zip(op.inputs, self.varies[op], strict=True) if varies]
        return tuple(map(self._touching, reads)), tuple(map(self._touching, op.outputs))

    def _touching(self, v: Variable) -> Hashable:
        """The colours of what makes and reads a Variable, and the state that it replaces."""
        old = self._replaces.get(v)
        around = [*self._around(v), *(self._around(old) if old is not None and old is not v else ())]
        return v.kind, tuple(sorted(set(around)))

    def _around(self, v: Variable) -> Iterable[tuple[int, int, int]]:
        """The ops that read and make a Variable, and at which place; outside families only stacks count."""
        maker = self._makers.get(v)
        reads = [(op, op.inputs.index(v)) for op in self._readers.get(v, ()) if self._counts(op)]
        makes = [(maker, -1 - maker.outputs.index(v))] if maker is not None and self._counts(maker) else []
        for op, at in (*reads, *makes):
            yield (0, self.of[op], at) if op in self.of else (1, self._number[op], 0)

    def _counts(self, op: Op) -> bool:
        return op in self.of or op in self._number


def _may_join(op: Op) -> bool:
    if op.made_by not in (Pass.UPDATE, Pass.COLLECTIVE) or op.body.collected is not None:
        return False
    return bool(op.inputs) and only_exchange(op.body.equations) and not is_stack(op) and not is_rows(op)


def _moved_by_itself(program: Program) -> set[Op]:
    """The ops on state from host memory: as one op for many they would have all of it there at once."""
    there = {v for op in program.ops if op.type is FETCH for v in (*op.inputs, *op.outputs)}
    there |= {v for op in program.ops if op.type is STORE for v in op.inputs}
    return {op for op in program.ops if not there.isdisjoint((*op.inputs, *op.outputs))}


def _kind(op: Op) -> Hashable:
    return op.type, op.made_by, op.body.signature


def _numbered(keys: Mapping[Op, Hashable]) -> dict[Op, int]:
    """Equal numbers for equal keys."""
    numbers: dict[Hashable, int] = {}
    return {op: numbers.setdefault(key, len(numbers)) for op, key in keys.items()}


def components(families: Sequence[Family]) -> list[list[Family]]:
    """The families that hand values to each other, together."""
    parent = list(range(len(families)))

    def root(i: int) -> int:
        while parent[i] != i:
            i = parent[i]
        return i

    owner: dict[Variable, int] = {}
    for i, family in enumerate(families):
        for v in (v for column in (*family.columns, *family.results) for v in column):
            parent[root(i)] = root(owner.setdefault(v, i))
    found: dict[int, list[Family]] = defaultdict(list)
    for i, family in enumerate(families):
        found[root(i)].append(family)
    return list(found.values())
