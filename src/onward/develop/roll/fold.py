"""A forward Program with its runs as loops."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from onward.core.names import Names
from onward.core.program import Op, Program, Variable
from onward.core.walk import consumers
from onward.develop.roll.build import RolledLoop, Surroundings
from onward.develop.roll.find import Accepts, find_runs
from onward.develop.roll.line import line_of


def with_loops(
    program: Program,
    read: frozenset[Variable],
    apart: frozenset[Variable],
    names: Names,
    accepts: Accepts,
) -> Program:
    """The Program with each run as a loop; ``read`` is what is read of its Variables after its ops."""
    line = line_of(program, read, apart)
    runs = find_runs(line, accepts).runs
    if not runs:
        return program
    readers = consumers(program)
    place = {op: i for i, op in enumerate(line.ops)}
    constants = dict(program.constants)
    ops: list[Op] = []
    done = 0

    def inner(layer: Program) -> Program:
        return with_loops(layer, frozenset(layer.outputs), frozenset(), names, accepts)

    for run in runs:
        inside = {op for layer in run.layers for op in layer}
        made = {v for op in inside for v in op.outputs}
        outside = frozenset(v for v in made if v in read or not inside.issuperset(readers.get(v, ())))
        begin = min(place[op] for op in run.layers[0])
        end = max(place[op] for op in run.layers[-1]) + 1
        before, after = _around(line.ops[begin:end], inside, made)
        loop = RolledLoop(run, Surroundings(outside, constants, names, inner))
        ops += [*line.ops[done:begin], *before, *loop.ops, *after]
        constants.update(loop.constants)
        done = end
    ops += line.ops[done:]
    used = {v for op in ops for v in op.inputs} | read
    return replace(program, ops=tuple(ops), constants={v: c for v, c in constants.items() if v in used})


def _around(ops: Iterable[Op], inside: set[Op], made: set[Variable]) -> tuple[list[Op], list[Op]]:
    """Of the ops that stand among the layers, those that can come before the loop, and the others."""
    before: list[Op] = []
    after: list[Op] = []
    late = set(made)
    for op in ops:
        if op in inside:
            continue
        if late.isdisjoint(op.inputs):
            before.append(op)
        else:
            after.append(op)
            late.update(op.outputs)
    return before, after
