"""Inside an op: which of its equations, in which turn of a loop, made the first number that is not finite.

The op is run once more on the values that it read, part by part: the equations of a gradient op or an update,
the function that a ``custom_vjp`` calls, the branch that a choice took, the turns of a loop one after the
other. A loop is walked back turn by turn, through what is carried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from onward.core.compiler import compiled_alone
from onward.core.described import DescribedBody
from onward.core.jaxprs.body import Body
from onward.core.jaxprs.loops import carry_of, result_of
from onward.core.jaxprs.reading import program_of
from onward.core.lower import lower
from onward.core.primitives.table import of
from onward.core.primitives.traits import Runs
from onward.core.program import Op, Program, Variable, programs_within
from onward.develop.roll.literals import numbers
from onward.execute.nonfinite.flags import Bad, Flags, bad_in, line_of_flags
from onward.execute.nonfinite.numbers import Numbers
from onward.execute.nonfinite.walk_back import BadValue, FaultOrigin, walk_back

Wanted = Iterable[tuple[int, Bad]]  # outputs by position, and in which way they are not finite
_DEPTH = 16


@dataclass(frozen=True)
class Inside:
    """An op within an op, where in it (``turn 3 of 10``, ``branch 1``, or nothing to say), what it read.

    ``is_written``: what is not finite stands in the code of the op.
    """

    where: str
    op: Op
    reads: tuple[Numbers, ...] = ()
    is_written: bool = False


def inside(op: Op, values: Sequence[Any], wanted: Wanted, depth: int = 0) -> tuple[Inside, ...]:
    """The ops within this one that made its outputs what they are, from the outermost to the innermost.

    Empty for an op of one primitive, for one whose parts cannot be run alone (collectives), and where what
    runs alone turns out finite.

    Args:
        op: the one to look into.
        values: what it read.
        wanted: its outputs that are not finite.
        depth: how many ops it is in already.
    """
    body = op.body
    if body.collectives or body.has_effects or depth > _DEPTH or isinstance(body, DescribedBody):
        return ()
    parts, names = programs_within(body), [v.name for v in op.inputs]
    if len(body.equations) != 1 or (not parts and op.type not in body.primitives):
        return _straight(_ProgramWithin("", program_of(body.closed, op.type), names), values, wanted, depth)
    if not parts or "constant" in body.operands:
        return ()
    operands = _operands(body, values)
    names = [names[x] if isinstance(x, int) else x for x in body.operands]
    wanted = [(result_of(body, j), bad) for j, bad in wanted]
    runs = of(next(body.calls).primitive).runs
    if runs is Runs.SCAN:
        return _turns(_scan(body, _ProgramWithin("", parts["jaxpr"], names), operands), wanted, depth)
    if runs is Runs.WHILE:
        return _turns(_while(body, parts, names, operands), wanted, depth)
    if runs is Runs.BRANCH:
        branch = int(operands[0])
        part = _ProgramWithin(f"branch {branch}", list(parts.values())[branch], names[1:])
        return _straight(part, operands[1:], wanted, depth)
    called = next(iter(parts.values()))
    if len(called.inputs) != len(operands):
        return ()
    return _straight(_ProgramWithin("", called, names), operands, wanted, depth)


@dataclass(frozen=True)
class _ProgramWithin:
    """A Program within an op, where it stands in that, and how what it is given is called outside."""

    where: str
    program: Program
    names: Sequence[str]

    def name(self, v: Variable) -> str:
        """The name of one of its Variables as users know it."""
        return dict(zip(self.program.inputs, self.names, strict=False)).get(v, v.name)


def _straight(part: _ProgramWithin, values: Sequence[Any], wanted: Wanted, depth: int) -> tuple[Inside, ...]:
    """The op of a part without turns."""
    program = part.program
    _, flags = line_of_flags(program)(values)
    starts = [BadValue(program.outputs[j], 0, bad) for j, bad in wanted]
    origin = walk_back(program, flags, starts).first(program)
    return _closer(part, values, origin, depth)


def _closer(
    part: _ProgramWithin, values: Sequence[Any], origin: FaultOrigin | None, depth: int
) -> tuple[Inside, ...]:
    """An op of a part, and what is in it in turn."""
    if origin is None or (op := origin.op) is None:
        return ()
    read = compiled_alone(lower(part.program, op.inputs))((), values)
    wanted = [(op.outputs.index(origin.place.variable), origin.place.bad)]
    reads = tuple(Numbers.of(part.name(v), x) for v, x in zip(op.inputs, read, strict=True))
    found = Inside(part.where, op, reads, origin.is_written)
    return (found, *inside(op, read, wanted, depth + 1))


@dataclass(frozen=True)
class _OpenedLoop:
    """A loop taken apart: the values of a turn are what is fixed, carried, and cut from what it runs over."""

    part: _ProgramWithin
    fixed: Sequence[Any]
    first: Sequence[Any]
    turns: Sequence[int] | None
    cut: Callable[[int], Sequence[Any]]
    goes_on: Callable[[Sequence[Any]], bool]

    def run(self, upto: int | None = None) -> tuple[list[Flags], Sequence[Any]]:
        """The flags of every turn, and the values of the turn that would follow."""
        line, carried, flags = line_of_flags(self.part.program), self.first, list[Flags]()
        for turn in self.turns if self.turns is not None else count():
            values = [*self.fixed, *carried, *self.cut(turn)]
            if len(flags) == upto or not self.goes_on(carried):
                return flags, values
            outputs, found = line(values)
            carried = outputs[: len(self.first)]
            flags.append(found)
        return flags, ()


def _turns(loop: _OpenedLoop, wanted: Wanted, depth: int) -> tuple[Inside, ...]:
    """The first turn, and its op, from which what is not finite reached these results of a loop."""
    flags, _ = loop.run()
    program, carried = loop.part.program, len(loop.first)
    begin = len(loop.fixed)
    wanted = set(wanted)
    reached = {(j, bad) for j, bad in wanted if j < carried}
    found: tuple[int, FaultOrigin] | None = None
    for number in reversed(range(len(flags))):
        stacked = {p for p in wanted if p[0] >= carried and _holds(flags[number], program, p)}
        starts = [BadValue(program.outputs[j], 0, bad) for j, bad in reached | stacked]
        walk = walk_back(program, flags[number], starts)
        given = [(program.inputs.index(o.place.variable), o.place.bad) for o in walk.given]
        walk.given = []
        origin = walk.first(program)
        if origin is not None and (walk.births or found is None or found[1].is_written):
            found = number, origin
        reached = {(i - begin, bad) for i, bad in given if begin <= i < begin + carried}
    if found is None:
        return ()
    number, origin = found
    turn = number if loop.turns is None else loop.turns[number]
    part = replace(loop.part, where=loop.part.where.format(turn))
    return _closer(part, loop.run(number)[1], origin, depth)


def _holds(flags: Flags, program: Program, result: tuple[int, Bad]) -> bool:
    """Whether a result of a turn is not finite in this way."""
    return result[1] in bad_in(flags, program.outputs[result[0]], 0)


def _scan(body: Body, part: _ProgramWithin, operands: Sequence[Any]) -> _OpenedLoop:
    """A scan: what it runs over has one axis more outside than inside."""
    (call,) = body.calls
    begin, carried = carry_of(body)
    length = call.params["length"]
    turns = range(length)[::-1] if call.params["reverse"] else range(length)
    return _OpenedLoop(
        replace(part, where=f"turn {{}} of {length} (counted from 0)"),
        operands[:begin],
        operands[begin : begin + carried],
        turns,
        lambda turn: [x[turn] for x in operands[begin + carried :]],
        lambda carried: True,
    )


def _while(
    body: Body, parts: Mapping[str, Program], names: Sequence[str], operands: Sequence[Any]
) -> _OpenedLoop:
    """A while loop: the condition reads what is fixed for it, and what is carried."""
    (call,) = body.calls
    asked, begin = call.params["cond_nconsts"], call.params["body_nconsts"]
    condition = parts["cond_jaxpr"]
    ask = compiled_alone(lower(condition, condition.outputs))
    return _OpenedLoop(
        _ProgramWithin("turn {} (counted from 0)", parts["body_jaxpr"], names[asked:]),
        operands[asked : asked + begin],
        operands[asked + begin :],
        None,
        lambda turn: [],
        lambda carried: bool(ask((), [*operands[:asked], *carried])[0]),
    )


def _operands(body: Body, values: Sequence[Any]) -> list[Any]:
    """The operands of the equation: the given values, and the numbers written in it."""
    written = iter(numbers(body))
    return [values[x] if isinstance(x, int) else next(written) for x in body.operands]
