"""Another computation in the place of what a pattern found, in a Program and in the loops within."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from onward.core.errors import GraphError
from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.edited import call_with_inner, with_inner
from onward.core.jaxprs.joining import joined
from onward.core.jaxprs.loops import turns_of
from onward.core.jaxprs.reading import read_jaxpr
from onward.core.names import Names
from onward.core.primitives.traits import Runs
from onward.core.program import Op, Program, Variable
from onward.core.words import Pass
from onward.develop.rewrite.match import Match, Nearest, PatternSearch
from onward.develop.rewrite.pattern import Pattern

_HOLDS_ARRAYS = (
    "rewrite: {new} would stand in the {op}{at}, which cannot hold the arrays that it closes over. Make them "
    "in it, such as with jnp.arange, or let the pattern read them as arguments."
)
_ENTERED = (Runs.AGAIN, Runs.SCAN, Runs.WHILE, Runs.BRANCH)


def occurrences(
    program: Program, patterns: Sequence[Pattern], nearest: Nearest, within: str = ""
) -> list[Match]:
    """Where patterns occur in the forward pass, and in the loops, branches and checkpoints within."""
    found = PatternSearch(program, nearest, within).of(patterns)
    for op in entered(program):
        for inner in op.subprograms.values():
            found += occurrences(inner, patterns, nearest, inside(op, within))
    return found


@dataclass(frozen=True)
class Rewriting:
    """The replacement of patterns, where they are meant.

    Attributes:
        patterns: what is replaced.
        new: what stands in place of each occurrence.
        is_meant: whether an occurrence is replaced.
    """

    patterns: Sequence[Pattern]
    new: Pattern
    is_meant: Callable[[Match], bool]

    def of(self, program: Program, within: str = "") -> Program:
        """The Program with the replacement."""

        def changed(inner: Program, op: Op) -> Program:
            new = self.of(inner, inside(op, within))
            if new is not inner and new.constants:
                raise GraphError(_HOLDS_ARRAYS.format(new=self.new.name, op=op.type, at=op.at))
            return new

        loops = {op: changed_within(op, changed) for op in entered(program)}
        search = PatternSearch(program, within=within)
        matches = [match for match in search.of(self.patterns) if self.is_meant(match)]
        if not matches and all(op is new for op, new in loops.items()):
            return program
        at: dict[Op, list[Match]] = {}
        for match in matches:
            at.setdefault(_first_reader(program, match), []).append(match)
        gone = {op for match in matches for op in match.ops}
        placed = RewrittenOps(program)
        for op in program.ops:
            for match in at.get(op, ()):
                placed.put(match, self.new)
            if op not in gone:
                placed.ops.append(loops.get(op, op))
        ops = _in_order(placed.ops) if any(len(match.outputs) > 1 for match in matches) else placed.ops
        return replace(program, ops=tuple(ops), constants=placed.constants)


class RewrittenOps:
    """The ops of a Program as they grow by what replaces some of them."""

    def __init__(self, program: Program) -> None:
        self.names = Names(program.variables)
        self.ops: list[Op] = []
        self.constants = dict(program.constants)

    def put(self, match: Match, new: Pattern) -> None:
        """Add the ops of a replacement, which compute the Variables that the pattern did."""
        word = new.name if new.name.isidentifier() else "rewritten"
        scope = "/".join(filter(None, (match.ops[-1].scope, word)))
        self.compute(new.body(match.types), match.inputs, match.outputs, scope)

    def compute(
        self, body: Body, inputs: Sequence[Variable], outputs: Sequence[Variable], scope: str
    ) -> None:
        """Add the ops of a Body, which compute these Variables."""
        read = read_jaxpr(body.closed, inputs, self.names)
        self.constants.update(read.constants)
        made = {v for op in read.ops for v in op.outputs}
        pairs = list(zip(read.outputs, outputs, strict=True))
        instead = {mine: theirs for mine, theirs in reversed(pairs) if mine in made}
        for op in read.ops:
            given, made_now = (tuple(instead.get(v, v) for v in g) for g in (op.inputs, op.outputs))
            below = "/".join(filter(None, (scope, op.scope)))
            self.ops.append(replace(op, inputs=given, outputs=made_now, scope=below))
        for mine, theirs in pairs:
            if instead.get(mine) is not theirs:
                self._copy(instead.get(mine, mine), theirs, scope)

    def _copy(self, v: Variable, name: Variable, scope: str) -> None:
        """Let a result be what something else is already."""
        self.ops.append(Op("copy", (v,), (name,), body_of(lambda x: [x], v.aval), scope=scope))


def entered(program: Program) -> Iterator[Op]:
    """The ops of the forward pass whose Programs are looked into."""
    return filter(_is_entered, program.ops)


def changed_within(op: Op, changed: Callable[[Program, Op], Program]) -> Op:
    """An op of the forward pass with the Programs that it runs changed; itself where none is."""
    body = op.body
    for name, inner in op.subprograms.items() if _is_entered(op) else ():
        new = changed(inner, op)
        if new is not inner:
            numbers = _numbers(new)
            inside = joined(new.ops, new.inputs, new.outputs, is_inner=True, numbers=numbers)
            body = with_inner(body, name, inside)
    return op if body is op.body else replace(op, body=body)


def opened(
    program: Program,
    again: Op,
    inner: Program | None = None,
    kept: Sequence[Op] = (),
    wanted: Sequence[Variable] = (),
) -> tuple[Program, tuple[Variable, ...]]:
    """The Program with the ops of a ``jax.checkpoint`` in its place, and what values within are there.

    Args:
        program: a Program.
        again: the op of it.
        inner: stands in place of what that runs.
        kept: those of the ops that stay in a ``jax.checkpoint``, which stands before the others.
        wanted: values that the others make.
    """
    ((name, runs),) = again.subprograms.items()
    inner = inner or runs
    body, operands = again.body, zip(inner.inputs, again.body.operands, again.body.numbers, strict=True)
    numbers = {v: number for v, x, number in operands if not isinstance(x, int)} | _numbers(inner)
    rest = [op for op in inner.ops if op not in kept]
    made = {v for op in kept for v in op.outputs}
    passed = [v for v in dict.fromkeys(chain(*(op.inputs for op in rest), inner.outputs)) if v in made]
    placed = RewrittenOps(program)
    more = [v for v in wanted if v not in inner.outputs]
    outputs = dict(zip(inner.outputs, again.outputs, strict=True))
    outputs |= {v: replace(v, name=placed.names.new(v.name)) for v in more}
    results = tuple(replace(v, name=placed.names.new(v.name)) for v in passed)
    stays = joined(kept, inner.inputs, passed, is_inner=True, numbers=_numbers(inner))
    run = call_with_inner(body, name, stays)
    first = body_of(lambda *values: run(values), *body.in_types) if kept else body
    read = [v for v in inner.inputs if v not in numbers] + passed
    own = joined(rest, read, [*inner.outputs, *more], is_inner=True, numbers=numbers)
    given = [again.inputs[x] for x in body.operands if isinstance(x, int)]
    for op in program.ops:
        if op is not again:
            placed.ops.append(op)
            continue
        placed.ops += [replace(again, outputs=results, body=first)] if kept else []
        placed.compute(own, [*given, *results], [*again.outputs, *(outputs[v] for v in more)], again.scope)
    result = replace(program, ops=tuple(placed.ops), constants=placed.constants)
    return result, tuple(outputs[v] for v in wanted)


def _numbers(program: Program) -> dict[Variable, Any]:
    """The numbers that stand in what an op runs, such as one that it returns."""
    return {v: number for v, number in program.constants.items() if v.ndim == 0}


@dataclass(frozen=True, eq=False)
class RunPart:
    """A Program that an op of the forward pass runs.

    Attributes:
        name: that of the parameter that holds it.
        program: it.
        given: for each of its inputs the position among the inputs of the op; None for a number.
        carried: the positions (input, output) of what one turn of a loop hands to the next.
    """

    name: str
    program: Program
    given: tuple[int | None, ...]
    carried: tuple[tuple[int, int], ...]


def parts_of(op: Op) -> Iterator[RunPart]:
    """The Programs that an op runs, but for what says whether a loop goes on."""
    turns = {turn.part: turn for turn in turns_of(op.body)}
    for name, program in op.subprograms.items():
        turn = turns.get(name)
        if turn is not None:
            yield RunPart(name, program, turn.given, turn.carried)
        elif op.primitive.runs is not Runs.WHILE:
            operands = op.body.operands  # of a branch behind the number that chooses it
            given = operands[len(operands) - len(program.inputs) :]
            yield RunPart(name, program, tuple(x if isinstance(x, int) else None for x in given), ())


def _is_entered(op: Op) -> bool:
    return op.made_by is Pass.FORWARD and op.primitive.runs in _ENTERED


def inside(op: Op, within: str) -> str:
    """The words before the names of what a loop computes within."""
    return f"{within}{op.outputs[0].name}/" if op.outputs else within


def _in_order(ops: Sequence[Op]) -> list[Op]:
    """The ops, each behind all that it reads, else in the order in which they stand."""
    makers = {v: i for i, op in enumerate(ops) for v in op.outputs}
    done: dict[int, Op] = {}
    for i in range(len(ops)):
        waiting = [i]
        while waiting:
            at = waiting[-1]
            missing = [makers[v] for v in ops[at].inputs if v in makers and makers[v] not in done]
            if not missing:
                done[waiting.pop()] = ops[at]
            else:
                waiting += missing
    return list(done.values())


def _first_reader(program: Program, match: Match) -> Op:
    """The op before which the replacement stands."""
    own, wanted = set(match.ops), set(match.outputs)
    readers = (op for op in program.ops if op not in own and not wanted.isdisjoint(op.inputs))
    return next(readers, match.ops[-1])
