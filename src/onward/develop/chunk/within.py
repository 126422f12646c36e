"""Where heads and scores stand: in a Program, and in the loops, branches and ``jax.checkpoint`` within it.

A value within has a name of its own there; before it stand those of the ops that run it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from onward.core.errors import GraphError
from onward.core.primitives.traits import Runs
from onward.core.program import Op, Program, Variable
from onward.core.turn import ScanTurn
from onward.core.walk import descendants
from onward.core.words import Pass
from onward.develop.chunk.head import in_chunks, is_attention, lifted
from onward.develop.chunk.loop import ChunkPlan
from onward.develop.chunk.region import heads, scores
from onward.develop.rewrite.put import RunPart, changed_within, entered, inside, parts_of


@dataclass(frozen=True)
class Enclosed:
    """A Program, or one that an op of it runs.

    Attributes:
        program: it.
        of_data: the values that depend on data.
        within: the words before the names of what it computes.
        kept: of how many runs the backward pass keeps what is computed: the turns of a loop.
    """

    program: Program
    of_data: frozenset[Variable]
    within: str = ""
    kept: int = 1

    @staticmethod
    def whole(program: Program) -> Enclosed:
        """A Program, in which nothing of what is given without data depends on any."""
        all_of_it = frozenset(program.variables.values())
        return Enclosed(
            program, frozenset(descendants(program, program.inputs)) if program.inputs else all_of_it
        )

    def named(self, v: Variable) -> Variable:
        """A value by its name from outside."""
        return replace(v, name=self.within + v.name) if self.within else v

    @property
    def inner(self) -> Iterator[Enclosed]:
        """The Programs that its ops run."""
        for op in entered(self.program):
            yield from self.of(op)

    def of(self, op: Op) -> Iterator[Enclosed]:
        """The Programs that an op runs."""
        kept = 1 if op.primitive.runs is Runs.AGAIN else self.kept * _length(op)
        for part in parts_of(op):
            pairs = zip(part.program.inputs, part.given, strict=True)
            data = {v for v, x in pairs if x is not None and op.inputs[x] in self.of_data}
            yield Enclosed(part.program, _reached(part, data), inside(op, self.within), kept)

    @property
    def everywhere(self) -> Iterator[Enclosed]:
        """It and all Programs within, in order."""
        yield self
        for inner in self.inner:
            yield from inner.everywhere

    @property
    def scores(self) -> Iterator[Variable]:
        """The scores of attention in it, but not in what its ops run."""
        return (v for v in scores(self.program, self.of_data) if is_attention(self.program, v))

    @property
    def heads(self) -> list[Variable]:
        """The products with parameters that no other comes after, the largest last, with their names outside.

        They are looked for in ``jax.checkpoint`` as well, which computes but what would stand in its place.
        """
        program = self.program
        again = {op: list(self.of(op)) for op in entered(program) if op.primitive.runs is Runs.AGAIN}
        found = {op: [v for inner in run for v in inner.heads] for op, run in again.items()}
        ends = heads(program, self.of_data, [op for op, own in found.items() if own])
        return sorted(
            (v for op in ends for v in found.get(op) or [self.named(op.outputs[0])]), key=lambda v: v.size
        )


def _length(op: Op) -> int:
    """How many turns of a loop the backward pass keeps; 1 of what is none, or of no known length."""
    turn = ScanTurn.of(op.body) if op.primitive.runs is Runs.SCAN else None
    return 1 if turn is None else max(turn.length, 1)


def _reached(part: RunPart, data: set[Variable]) -> frozenset[Variable]:
    """The values that depend on data in a Program that is given these, and in the turns that follow."""
    program = part.program
    while True:
        found = descendants(program, data)
        more = {program.inputs[i] for i, o in part.carried if program.outputs[o] in found}
        if more <= data:
            return frozenset(found)
        data |= more


@dataclass
class ChunkCut:
    """Heads of these names as one op each, wherever they stand, and how each was cut.

    Attributes:
        chunks: how many at least.
        memory: in place of that the bytes of the logits of one.
        names: of the logits, from outside.
        left: the errors of what cannot be cut and stays as it is.
        plans: of those that were cut, by name.
    """

    chunks: int
    memory: int | None
    names: Sequence[str]
    left: tuple[type[GraphError], ...] = ()
    plans: dict[str, ChunkPlan] = field(default_factory=dict)

    def of(self, program: Program, within: str = "") -> Program:
        """The Program with these heads in chunks; what is not there stays as it is."""
        here = {name.removeprefix(within): name for name in self.names if name.startswith(within)}
        _, leaving = lifted(program, here)
        others = replace(self, names=[name for own, name in here.items() if own not in leaving])

        def changed(inner: Program, op: Op) -> Program:
            new = others.of(replace(inner, name=program.name), inside(op, within))
            return inner if new.ops == inner.ops else new

        ops = tuple(others._changed(op, within, changed) for op in program.ops)
        program, names = lifted(program if ops == program.ops else replace(program, ops=ops), leaving)
        for own, name in here.items():
            if (there := names.get(own, own)) in program.variables:
                program = self._cut(program, there, name)
        return program

    def _changed(self, op: Op, within: str, changed: Callable[[Program, Op], Program]) -> Op:
        """An op with what it runs cut, if any of that is meant."""
        is_meant = op.made_by is Pass.FORWARD and bool(op.outputs)
        is_meant = is_meant and any(name.startswith(inside(op, within)) for name in self.names)
        return changed_within(op, changed) if is_meant else op

    def _cut(self, program: Program, own: str, name: str) -> Program:
        with suppress(*self.left):
            program, self.plans[name] = in_chunks(program, program[own], self.chunks, self.memory)
        return program
