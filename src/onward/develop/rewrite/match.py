"""Where a pattern occurs among ops: first by the kinds of ops and their wiring, then exactly.

Nobody knows the shapes of a pattern before it is found. So its sketch, traced at any types, is laid over the
ops; where it fits, it is traced again at the types that are read there, and has to fit with every parameter
and every number. The operands of a sum or a product may stand in either order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from onward.core.jaxprs.edited import exchanged
from onward.core.jaxprs.equations import Type
from onward.core.program import Op, Program, Variable
from onward.core.walk import consumers, producers
from onward.core.words import Pass
from onward.develop.rewrite.pattern import Pattern

Bound = Mapping[Variable, Variable]


@dataclass(frozen=True)
class Match:
    """An occurrence of a pattern.

    Attributes:
        pattern: what was found.
        ops: those that it stands for, in order.
        inputs: what they read, in the order of the pattern's arguments.
        outputs: what they give, in the order of its results.
        within: the name of what the loop computes in which they stand, with a slash; empty outside of loops.
    """

    pattern: Pattern
    ops: tuple[Op, ...]
    inputs: tuple[Variable, ...]
    outputs: tuple[Variable, ...]
    within: str = ""

    @property
    def name(self) -> str:
        """The name of its first result, behind that of the loop it stands in."""
        return f"{self.within}{self.outputs[0].name}"

    @property
    def types(self) -> tuple[Type, ...]:
        """Those of what it reads."""
        return tuple(v.aval for v in self.inputs)

    def __str__(self) -> str:
        last = self.ops[-1]
        types = ", ".join(f"{v.name} {v.type}" for v in self.inputs)
        return f"{self.pattern.name} is {self.name}{last.at}: {len(self.ops)} ops on {types}"


@dataclass
class Nearest:
    """The occurrence of a pattern that came closest, in words."""

    pattern: str = ""
    fitting: int = 0
    count: int = 0
    why: str = ""

    def note(self, pattern: Pattern, fitting: int, why: str) -> None:
        """Remember it if it is closer than what came before."""
        if fitting > self.fitting:
            self.pattern, self.fitting, self.why = pattern.name, fitting, why
            self.count = len(pattern.sketches[0].ops)


@dataclass
class PatternSearch:
    """The forward ops of a Program, and where patterns occur among them."""

    program: Program
    nearest: Nearest = field(default_factory=Nearest)
    within: str = ""

    def __post_init__(self) -> None:
        program = self.program
        self.makers, self.readers = producers(program), consumers(program)
        self.number = {op: i for i, op in enumerate(program.ops)}
        self.kept = {*program.outputs, *program.next_state.values(), *program.losses}
        self.kept |= {v for pair in program.gradients for v in pair}
        self.kept |= set() if program.loss is None else {program.loss}

    def of(self, patterns: Sequence[Pattern]) -> list[Match]:
        """The occurrences of these patterns that share no op; the first patterns first."""
        found: list[Match] = []
        self.taken: dict[Op, Match] = {}
        for pattern in patterns:
            for op in self.program.ops:
                if op.made_by is Pass.FORWARD and op not in self.taken:
                    match = next(self._at(op, pattern), None)
                    if match is not None:
                        found.append(match)
                        self.taken.update(dict.fromkeys(match.ops, match))
        return sorted(found, key=lambda match: self.number[match.ops[-1]])

    def _at(self, op: Op, pattern: Pattern) -> Iterator[Match]:
        """The occurrences of a pattern whose first result this op computes."""
        for sketch in pattern.sketches:
            for rough in _PatternWalk(self, pattern, sketch, is_exact=False).ending_in(op):
                exact = pattern.at([rough[v].aval for v in sketch.inputs])
                if exact is not None:
                    for bound in _PatternWalk(self, pattern, exact, is_exact=True).ending_in(op):
                        match = self._match(pattern, exact, bound)
                        if self.taken.keys().isdisjoint(match.ops) and self._is_apart(match):
                            yield match

    def _match(self, pattern: Pattern, exact: Program, bound: Bound) -> Match:
        ops = {self.makers[bound[v]] for op in exact.ops for v in op.outputs if v in bound}
        inputs, outputs = (tuple(bound[v] for v in group) for group in (exact.inputs, exact.outputs))
        return Match(pattern, tuple(sorted(ops, key=self.number.__getitem__)), inputs, outputs, self.within)

    def _is_apart(self, match: Match) -> bool:
        """Whether nothing else reads what is computed between, and one op can stand for all."""
        ops = set(match.ops)
        for op in match.ops:
            for v in op.outputs:
                others = [reader for reader in self.readers.get(v, ()) if reader not in ops]
                if v not in match.outputs and (others or v in self.kept):
                    by = f"{others[0].type}{others[0].at} reads" if others else "the Program returns"
                    why = f"all of it stands at {match.outputs[0].name}{op.at}, but {by} {v.name} as well"
                    self.nearest.note(match.pattern, len(match.ops), why)
                    return False
        made = {v for op in match.ops for v in op.outputs}
        return (made | self._reached(match)).isdisjoint(match.inputs)

    def _reached(self, match: Match) -> set[Variable]:
        """All that is computed of the results of a match, what other matches compute as a whole included."""
        reached, waiting = set(match.outputs), list(match.outputs)
        while waiting:
            for reader in self.readers.get(waiting.pop(), ()):
                other = self.taken.get(reader)
                made = reader.outputs if other is None else (*reader.outputs, *other.outputs)
                if reader not in match.ops:
                    waiting += [v for v in made if v not in reached]
                    reached.update(made)
        return reached


class _PatternWalk:
    """One walk backwards over a pattern and the ops of a Program side by side."""

    def __init__(self, search: PatternSearch, pattern: Pattern, graph: Program, is_exact: bool) -> None:
        self.search, self.pattern, self.graph, self.is_exact = search, pattern, graph, is_exact
        self.makers = producers(graph)

    def ending_in(self, op: Op) -> Iterator[Bound]:
        """The values that stand for those of the pattern, if this op computes its first result."""
        first, *others = self.graph.outputs
        maker = self.makers.get(first)
        if maker is None or maker.type != op.type or len(maker.outputs) != len(op.outputs):
            return
        pairs = ((first, op.outputs[maker.outputs.index(first)]),)
        for bound in self._fitted(pairs, {}):
            yield from self._with(others, bound)

    def _with(self, others: Sequence[Variable], bound: Bound) -> Iterator[Bound]:
        """The same with the other results of the pattern, which may stand anywhere."""
        if not others:
            yield bound
            return
        maker = self.makers[others[0]]
        at = maker.outputs.index(others[0])
        results = {bound[v] for v in self.graph.outputs if v in bound}
        for op in self.search.program.ops:
            is_like = op.type == maker.type and op.made_by is Pass.FORWARD and len(op.outputs) > at
            if is_like and op.outputs[at] not in results:
                for more in self._fitted(((others[0], op.outputs[at]),), bound):
                    yield from self._with(others[1:], more)

    def _fitted(self, pairs: tuple[tuple[Variable, Variable], ...], bound: Bound) -> Iterator[Bound]:
        """All ways to let these values of the pattern be these of the Program."""
        if not pairs:
            yield bound
            return
        (mine, theirs), *rest = pairs
        if mine in bound:
            if bound[mine] is theirs:
                yield from self._fitted(tuple(rest), bound)
            return
        if mine in self.graph.inputs:
            if not self.is_exact or (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype):
                yield from self._fitted(tuple(rest), {**bound, mine: theirs})
            return
        if mine in self.graph.constants:
            if self._same_constant(mine, theirs):
                yield from self._fitted(tuple(rest), {**bound, mine: theirs})
            return
        maker, op = self.makers[mine], self.search.makers.get(theirs)
        ways = list(self._inputs(maker, op, mine, theirs))
        if op is None or not ways:
            self._note(maker, op, bound)
            return
        for inputs in ways:
            known = {**bound, **dict(zip(maker.outputs, op.outputs, strict=True))}
            yield from self._fitted((*zip(maker.inputs, inputs, strict=True), *rest), known)

    def _inputs(
        self, maker: Op, op: Op | None, mine: Variable, theirs: Variable
    ) -> Iterator[tuple[Variable, ...]]:
        """The inputs of an op, in each order in which it does what that of the pattern does."""
        if op is None or op.made_by is not Pass.FORWARD or op.type != maker.type:
            return
        if len(op.inputs) != len(maker.inputs) or len(op.outputs) != len(maker.outputs):
            return
        if maker.outputs.index(mine) != op.outputs.index(theirs):
            return
        commutes = op.primitive.commutes
        if self.is_exact and not _is_same(maker, op):
            return
        yield op.inputs
        if commutes and len(op.inputs) == 2:
            yield op.inputs[::-1]

    def _same_constant(self, mine: Variable, theirs: Variable) -> bool:
        value = self.search.program.constants.get(theirs)
        if value is None or mine.dtype != theirs.dtype:
            return False
        own = self.graph.constants[mine]
        if mine.is_key:
            own, value = jax.random.key_data(own), jax.random.key_data(value)
        return np.array_equal(np.asarray(own), np.asarray(value))

    def _note(self, maker: Op, op: Op | None, bound: Bound) -> None:
        """Remember where the pattern parts from what is there, if it came far."""
        fitting = len({id(self.makers[v]) for v in bound if v in self.makers})
        ends = self.graph.outputs[0]
        if not fitting or ends not in bound:
            return
        last = self.search.makers[bound[ends]]
        if op is None:
            there = "there is what nothing computes"
        elif op.type == maker.type:
            there = f"there is {op.type}{op.at} with other parameters, numbers or operands"
        else:
            there = f"there is {op.type}{op.at}"
        why = f"{bound[ends].name}{last.at} ends like it, but where the pattern has {maker.type}, {there}"
        self.search.nearest.note(self.pattern, fitting, why)


def _is_same(mine: Op, theirs: Op) -> bool:
    """Whether two ops compute the same of their inputs, a number perhaps on the other side."""
    body = theirs.primal or theirs.body
    if mine.body.signature == body.signature:
        return True
    is_number_beside = theirs.primitive.commutes and len(theirs.inputs) == 1
    return is_number_beside and exchanged(mine.body).signature == body.signature
