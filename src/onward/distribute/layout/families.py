"""The dimensions of all arrays of a Program in families: what splits one of a family splits all of it.

One walk over the equations, into loops and branches, ties dimensions together. The rows of the batch are one
family; the columns of a first matrix of a block, all that is computed of them number by number, and the rows
of its second matrix are another.

>>> import jax.numpy as jnp, onward as ow
>>> def loss(w, x):
...     return jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"]) ** 2)
>>> weights = {"up": jnp.ones((4, 8)), "down": jnp.ones((8, 2))}
>>> found = families(ow.trace(loss, weights, jnp.ones((6, 4))))
>>> up, down = (found.of(found.program[name]) for name in ("up", "down"))
>>> up[1] == down[0], up[0] == down[1]
(True, False)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from onward.core.jaxprs.body import Call
from onward.core.jaxprs.loops import carry_of, result_of
from onward.core.liveness import Lifetimes, lifetimes
from onward.core.primitives.table import of
from onward.core.primitives.traits import Runs
from onward.core.program import Program, Variable
from onward.core.steps import Equation
from onward.core.wiring import wiring
from onward.core.words import Kind, Pass
from onward.develop.recompute.measure import results

Dimension = tuple[Variable, int]


@dataclass(frozen=True, eq=False)
class WalkedStep:
    """One equation in the walk.

    Attributes:
        step: the equation.
        op: the number of the op of the whole Program that it is part of.
        call: what it computes; None for a loop, whose turns were walked themselves, and for a copy.
        operands: the Variable of each operand; None for a number.
        times: how often it runs.
        made_by: the pass.
        sums: the dimensions that it sums over, together or alone.
        needs: the dimensions that it needs whole.
        lives: the arrays of the Program or turn that it stands in.
    """

    step: Equation
    op: int
    call: Call | None
    operands: tuple[Variable | None, ...]
    times: int
    made_by: Pass
    sums: tuple[tuple[Dimension, ...], ...] = ()
    needs: tuple[Dimension, ...] = ()
    lives: Lifetimes = field(kw_only=True)


class Families:
    """The families of dimensions of a Program, and the equations that were walked to find them.

    Attributes:
        program: the Program.
        lives: its arrays, and those of the turns of its loops, by their Program.
        steps: all equations, those within loops among them.
        weights: for what is a parameter, or only lays parameters out in another way or precision, these.
        turns: dimensions along which a loop takes its turns.
        read: what is read by anything; a loop may be given what no turn of it reads.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.lives: dict[Program, Lifetimes] = {}
        self.steps: list[WalkedStep] = []
        self.weights: dict[Variable, tuple[Variable, ...]] = {v: (v,) for v in program.parameters}
        self.turns: set[Dimension] = set()
        self.read: set[Variable] = set()
        self._above: dict[Dimension, Dimension] = {}
        self._walk(program, lifetimes(program, results(program)), 1, None)

    def of(self, v: Variable) -> tuple[Dimension, ...]:
        """The families of the dimensions of a Variable, each by the dimension that stands for it."""
        return tuple(self.find((v, i)) for i in range(v.ndim))

    def find(self, dimension: Dimension) -> Dimension:
        """The dimension that stands for the family of another."""
        found = dimension
        while (above := self._above.get(found)) is not None:
            found = above
        while dimension != found:
            self._above[dimension], dimension = found, self._above[dimension]
        return found

    def members(self) -> dict[Dimension, list[Dimension]]:
        """The dimensions of each family."""
        found: dict[Dimension, list[Dimension]] = {}
        for dimension in {*self._above, *self._above.values()}:
            found.setdefault(self.find(dimension), []).append(dimension)
        return found

    def _tie(self, a: Dimension, b: Dimension) -> None:
        first, second = self.find(a), self.find(b)
        if first != second:
            self._above[first] = second

    def _walk(self, program: Program, lives: Lifetimes, times: int, within: tuple[int, Pass] | None) -> None:
        self.lives[program] = lives
        self.read.update(program.outputs, program.next_state.values())
        for step in lives.steps:
            op, made_by = within or (step.op, program.ops[step.op].made_by)
            walked = self._one(step, op, times, made_by, lives)
            self.steps.append(walked)
            self._note_weights(walked)

    def _one(self, step: Equation, op: int, times: int, made_by: Pass, lives: Lifetimes) -> WalkedStep:
        if step.body is None or len(step.body.operands) == 0 or len(step.body.equations) != 1:
            for source, copy in zip(step.inputs, step.outputs, strict=False):
                if step.body is None:
                    self._tie_all(source, copy)
            self.read.update(step.inputs)
            return WalkedStep(step, op, None, step.inputs, times, made_by, lives=lives)
        operands = tuple(step.inputs[x] if isinstance(x, int) else None for x in step.body.operands)
        call = next(step.body.calls)
        if step.programs:
            self._loop(step, call, operands, times, (op, made_by))
            return WalkedStep(step, op, None, operands, times, made_by, lives=lives)
        self.read.update(v for v in operands if v is not None)
        found = wiring(call)
        values = (*operands, *self._results(step, call))
        for (a, i), (b, j) in found.ties:
            if (first := values[a]) is not None and (second := values[b]) is not None:
                self._tie((first, i), (second, j))
        sums = tuple(tuple((v, i) for k, i in group if (v := values[k]) is not None) for group in found.sums)
        for group in sums:
            for other in group[1:]:
                self._tie(group[0], other)
        told = {place for pair in found.ties for place in pair} | {p for group in found.sums for p in group}
        needs = tuple(
            (v, i)
            for k, v in enumerate(operands)
            if v is not None
            for i in range(v.ndim)
            if v.shape[i] > 1 and (k, i) not in told
        )
        return WalkedStep(step, op, call, operands, times, made_by, sums, needs, lives=lives)

    def _results(self, step: Equation, call: Call) -> Sequence[Variable | None]:
        """The Variable of each result of the equation; None for what nobody reads."""
        if len(call.results) == 1:
            return step.outputs
        assert step.body is not None
        found: list[Variable | None] = [None] * len(call.results)
        for output, v in enumerate(step.outputs):
            found[result_of(step.body, output)] = v
        return found

    def _tie_all(self, a: Variable | None, b: Variable | None, more: int = 0) -> None:
        """Tie all dimensions of two Variables; the first one may have one more in front."""
        if a is not None and b is not None:
            for i in range(b.ndim):
                self._tie((a, i + more), (b, i))

    def _loop(
        self,
        step: Equation,
        call: Call,
        operands: Sequence[Variable | None],
        times: int,
        within: tuple[int, Pass],
    ) -> None:
        runs, made = of(step.kind).runs, self._results(step, call)
        if runs is Runs.SCAN:
            assert step.body is not None
            self._scan(step.programs[0], carry_of(step.body), operands, made)
            times *= int(call.params["length"])
        elif runs is Runs.BRANCH:
            for program in step.programs:
                self._enter(program, operands[1:], made)
        else:
            (program, *_) = (p for p in step.programs if len(p.outputs) == len(made))
            given = operands[len(operands) - len(program.inputs) :]
            self._enter(program, given, made)
            for v, result in zip(program.inputs[-len(made) :], made, strict=True):
                self._tie_all(v, result)
        for program in step.programs:
            self._walk(program, lifetimes(program), times, within)
            inputs = program.inputs[::-1]  # the last operands of each, whatever decides stands before them
            read = (v for v, inner in zip(operands[::-1], inputs, strict=False) if inner in self.read)
            self.read.update(v for v in read if v is not None)

    def _enter(
        self, program: Program, given: Sequence[Variable | None], made: Sequence[Variable | None]
    ) -> None:
        for outer, inner in zip(given, program.inputs, strict=True):
            self._tie_all(outer, inner)
            self._hand_on(outer, inner)
        for inner, result in zip(program.outputs, made, strict=True):
            self._tie_all(inner, result)

    def _scan(
        self,
        turn: Program,
        carry: tuple[int, int],
        operands: Sequence[Variable | None],
        made: Sequence[Variable | None],
    ) -> None:
        first, count = carry
        for i, (outer, inner) in enumerate(zip(operands, turn.inputs, strict=True)):
            is_cut = i >= first + count
            self._tie_all(outer, inner, int(is_cut))
            self._hand_on(outer, inner)
            if is_cut and outer is not None:
                self.turns.add((outer, 0))
        for i, (inner, result) in enumerate(zip(turn.outputs, made, strict=True)):
            if i < count:
                self._tie_all(inner, turn.inputs[first + i])
                self._tie_all(inner, result)
            elif result is not None:
                self._tie_all(result, inner, 1)
                self.turns.add((result, 0))

    def _hand_on(self, outer: Variable | None, inner: Variable) -> None:
        if outer in self.weights:
            self.weights[inner] = self.weights[outer]

    def _note_weights(self, walked: WalkedStep) -> None:
        """Note what holds nothing but numbers of parameters."""
        kind = of(walked.step.kind)
        if kind.moves is None and walked.call is not None:
            return
        read = [v for v in walked.operands if v is not None]
        if read and not walked.step.programs and all(v in self.weights for v in read):
            origin = tuple(dict.fromkeys(p for v in read for p in self.weights[v]))
            for v in walked.step.outputs:
                self.weights.setdefault(v, origin)


def families(program: Program) -> Families:
    """Find the families of dimensions of a Program."""
    return Families(program)


def parameters_among(dimensions: Iterable[Dimension]) -> list[Dimension]:
    """Of some dimensions those of parameters."""
    return [(v, i) for v, i in dimensions if v.kind is Kind.PARAMETER]
