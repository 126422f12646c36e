"""Which ops of a Program go into the loop over micro-batches, and what is read of them outside of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from onward.core.errors import GraphError, RecipeError
from onward.core.marks import KEEP, OF_WHOLE_BATCH, SCALE
from onward.core.program import Op, Program, Variable
from onward.core.walk import ancestors
from onward.core.words import Pass
from onward.develop.accumulation.carried import State, keys_in, made_of
from onward.develop.accumulation.micro_batches import Accumulation
from onward.develop.over_batch.known import Follows


class LoopCut:
    """The ops of a Program that go into the loop, those it needs before, and those that come after it.

    The loop holds the forward and backward ops, and those collectives that these need, that make the state
    carried by the forward pass, or that read how much a device's part of a micro-batch counts. Ops that make
    statistics of the whole batch stand before it, and in it as well where it reads what they make; and so do
    those that make the next value of state of no example, such as a count of steps, which is made once.

    Args:
        program: a Program with a backward pass.
        how: how its batch is cut.
    """

    def __init__(self, program: Program, how: Accumulation) -> None:
        self.program, self.behind, self._merged = program, how.behind, how.merged
        self.late = _late(program)
        self.following = {old: self.proposed.get(new, new) for old, new in program.next_state.items()}
        carried = self._carried()
        handed = {**made_of(program, how.split, carried), **keys_in(program, carried)}
        once = {old: new for old, new in carried.items() if old not in handed}
        self.threaded = {old: new for old, new in carried.items() if old in handed}
        of_whole = [v for op in program.ops if op.type is OF_WHOLE_BATCH for v in op.outputs]
        known = ancestors(program, [*of_whole, *once.values()])
        first = {op for op in program.ops if not known.isdisjoint(op.outputs)}
        inside = self._inside()
        self.loop = self._loop(inside, first)
        looped = {v for op in self.loop for v in op.outputs}
        self.made = looped.difference(*(op.outputs for op in first))
        self.read = {v for op in self.loop for v in op.inputs} - looped
        needed = ancestors(program, self.read)
        self.outside = [op for op in program.ops if op not in inside or op in first]
        self.before = [op for op in self.outside if not needed.isdisjoint(op.outputs)]
        self.after = [op for op in self.outside if needed.isdisjoint(op.outputs)]
        for op in self.before:
            if not self.made.isdisjoint(op.inputs):
                raise GraphError(
                    f"{program.name}: {op!r} stands between two parts of the forward and backward pass, and "
                    "accumulate runs both in one loop and updates after it. Add what updates last."
                )

    @property
    def proposed(self) -> dict[Variable, Variable]:
        """The next state that the update proposes to a guard, by the Variables that the guard makes of it."""
        keeping = (op for op in self.program.ops if op.type is KEEP and op.made_by is Pass.UPDATE)
        return {op.outputs[0]: op.inputs[1] for op in keeping}

    def _carried(self) -> State:
        """The state that the forward pass carries from batch to batch and nothing puts together."""
        makers = (Pass.FORWARD, Pass.COLLECTIVE)
        made = {v for op in self.program.ops if op.made_by in makers for v in op.outputs} - self.late
        found: dict[Variable, Variable] = {}
        known: set[Variable] = set()
        while True:  # what replaces one state Variable may be another one that is carried
            following = [(old, new) for old, new in self.following.items() if old.name not in self._merged]
            found = {old: new for old, new in following if new in made or (new in known and new is not old)}
            if known == found.keys():
                return found
            known = set(found)

    def _inside(self) -> set[Op]:
        ops = self.program.ops
        passes = (Pass.FORWARD, Pass.BACKWARD)
        core = {op for op in ops if op.made_by in passes} - self._after()
        read = {v for op in core for v in op.inputs}
        needed = ancestors(self.program, read | set(self.threaded.values()))
        told: set[Variable] = set()  # by a collective about the micro-batch
        for op in ops:
            if op.made_by is not Pass.COLLECTIVE:
                continue
            if not needed.isdisjoint(op.outputs) or not told.isdisjoint(op.inputs):
                core.add(op)
                told.update(v for v in op.outputs if v not in self.late)
        return core

    def _after(self) -> set[Op]:
        """The forward ops that come after the loop, with those that scale what they give for many devices.

        And those that scale a constant which is returned.
        """
        found, made = set[Op](), set[Variable]()
        read = {v for op in self.program.ops for v in op.inputs}
        for op in self.program.ops:
            passes_on = op.made_by is Pass.COLLECTIVE or op.type is SCALE
            known = made if not read.isdisjoint(op.outputs) else {*made, *self.program.constants}
            if {v.name for v in op.outputs[:1]} & self.behind or (passes_on and known.issuperset(op.inputs)):
                found.add(op)
                made.update(op.outputs)
        return found

    def _loop(self, inside: set[Op], first: set[Op]) -> tuple[Op, ...]:
        """The ops that run in each turn, of those made ``first`` what others of them read."""
        needed = {v for op in inside - first for v in op.inputs} | set(self.threaded.values())
        kept = []
        for op in reversed(self.program.ops):
            if op in first and (op.type is OF_WHOLE_BATCH or needed.isdisjoint(op.outputs)):
                continue
            if op in inside:
                kept.append(op)
                needed.update(op.inputs if op in first else ())
        return tuple(reversed(kept))

    @property
    def ports(self) -> list[Variable]:
        """The Variables that are read outside of the loop, in the same order for every batch size."""
        program = self.program
        read = [v for op in self.outside for v in op.inputs]
        following = [program.next_state[v] for v in program.state if v in program.next_state]
        loss = [] if program.loss is None else [program.loss]
        return [*read, *program.outputs, *following, *(g for _, g in program.gradients), *loss]

    def told_of(self, names: Mapping[str, Follows]) -> dict[Variable, Follows]:
        """The values made in the loop of which it is told how they follow, merged over devices as well."""
        program = self.program
        told = {program[name]: follows for name, follows in names.items() if name in program}
        for op in program.ops:
            if (op.made_by is Pass.COLLECTIVE or op.type is SCALE) and {*op.inputs} <= told.keys():
                told |= dict.fromkeys(op.outputs, told[op.inputs[0]])
        return {v: follows for v, follows in told.items() if v in self.made}

    def merged_into(self, results: Iterable[Variable | None]) -> set[Variable]:
        """The Variables made in the loop from which these are merged over devices, or which they are."""
        needed = set(results)
        for op in reversed(self.outside):
            if not needed.isdisjoint(op.outputs):
                needed.update(op.inputs)
        return {v for v in needed if v in self.made}


def _late(program: Program) -> set[Variable]:
    """The Variables that the backward pass makes, and all that depend on them."""
    found: set[Variable] = set()
    for op in program.ops:
        if op.made_by is Pass.BACKWARD or not found.isdisjoint(op.inputs):
            found.update(op.outputs)
    return found


def expect_same_graph(whole: LoopCut, part: LoopCut) -> None:
    """Raise ``RecipeError`` unless both Programs are the same but for the length of the batch."""
    ports = list(zip(whole.ports, part.ports, strict=False))
    same = [op.type for op in whole.outside] == [op.type for op in part.outside]
    same &= len(whole.ports) == len(part.ports) and len(whole.before) == len(part.before)
    same &= {v.name for v in whole.threaded} == {v.name for v in part.threaded}
    if not same or any((v in whole.made) != (p in part.made) for v, p in ports):
        raise RecipeError(
            f"{whole.program.name}: for the rows of a micro-batch the function builds another graph than for "
            "those of the batch, so accumulate cannot tell what belongs together. Let it branch on no length "
            "of its data."
        )


def expect_no_data_in_updates(cut: LoopCut, split: Collection[str]) -> None:
    """Raise ``GraphError`` for an update that evaluates the loss again, on the batch itself."""
    data = {v for v in cut.program.inputs if v.name in split}
    for op in cut.outside:
        if op.made_by is Pass.UPDATE and (read := [v for v in op.inputs if v in data]):
            raise GraphError(
                f"{cut.program.name}: the update {op.type!r} reads {read[0].name!r}, for it evaluates the "
                "loss again on the batch, and accumulate runs the loss on micro-batches alone. Take an "
                "optimizer that needs the gradient only, or leave accumulate out."
            )
