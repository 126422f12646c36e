"""The ops of a Program as a line of numbers: equal numbers for ops that compute the same.

Ops are told apart by type, attributes and types of what they read and write; by no name, scope or place.
What only prepares an input of one other op, such as the cast of a parameter, stands directly before that op,
wherever the function called it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from onward.core.marks import CAST
from onward.core.primitives.traits import Moves
from onward.core.program import Op, Program, Variable
from onward.core.walk import consumers
from onward.core.words import Pass
from onward.develop.roll.literals import pattern

Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class OpLine:
    """The ops in order, a number for what each computes, and what is read of them outside of the ops.

    A number below 0 is that of an op which belongs to no layer: one with effects, or one that is to stay.
    ``sizes`` tells how many equations each op has, those of functions that it runs among them.
    """

    ops: tuple[Op, ...]
    numbers: Numbers
    sizes: Numbers
    returned: frozenset[Variable]


def line_of(program: Program, returned: frozenset[Variable], apart: frozenset[Variable]) -> OpLine:
    """The line of a forward Program.

    Args:
        program: what to read.
        returned: what is read after the ops.
        apart: what should be computed as it is, outside of every loop.
    """
    readers = consumers(program)
    known: dict[Hashable, int] = {}
    following = set(program.next_state.values())
    ops = tuple(_in_order(program, readers, returned | apart))
    keys: list[int] = []
    for place, op in enumerate(ops):
        if _stays(op, apart, following):
            keys.append(-1 - place)
        else:
            is_apart = _moves_on(op, following) and not any(v in readers for v in op.outputs)
            keys.append(known.setdefault((op.type, _computes(op), is_apart), len(known)))
    sizes = np.array([op.body.size for op in ops], np.int64)
    return OpLine(ops, np.array(keys, np.int64), sizes, returned)


def returned_by(program: Program) -> frozenset[Variable]:
    """The Variables of a Program that are read by anything other than its ops."""
    given = (*program.outputs, *program.next_state.values(), *program.bounds)
    loss = () if program.loss is None else (program.loss,)
    return frozenset((*given, *loss, *(g for _, g in program.gradients)))


def _stays(op: Op, apart: frozenset[Variable], following: set[Variable]) -> bool:
    if op.body.has_effects or not apart.isdisjoint(op.outputs) or op.primal is not None:
        return True
    if op.made_by is Pass.COLLECTIVE:
        return not following.isdisjoint(op.outputs)
    return op.made_by is not Pass.FORWARD


def _computes(op: Op) -> Hashable:
    """A key of what an op computes; an op that only gives its input a name computes nothing."""
    return op.inputs[0].type if op.primitive.names and len(op.inputs) == 1 else pattern(op.body)


def _moves_on(op: Op, following: set[Variable]) -> bool:
    """Whether an op makes the next random key of the one that layers derive theirs of, by another number."""
    return op.primitive.makes_keys and not following.isdisjoint(op.outputs)


def _in_order(program: Program, readers: Any, needed: frozenset[Variable]) -> Iterator[Op]:
    """The ops, each that only prepares an input of another one directly before that."""
    waiting: dict[Variable, Op] = {}

    def with_preparations(op: Op) -> Iterator[Op]:
        for v in op.inputs:
            if (before := waiting.pop(v, None)) is not None:
                yield from with_preparations(before)
        yield op

    made: set[Variable] = set()
    for op in program.ops:
        if _prepares(op, readers, needed) and not any(v in made for v in op.inputs):
            waiting[op.outputs[0]] = op
        else:
            yield from with_preparations(op)
            made.update(op.outputs)


def _prepares(op: Op, readers: Any, needed: frozenset[Variable]) -> bool:
    """Whether an op only prepares an input of one other op."""
    row = op.primitive
    prepares = row.lays_out or row.makes_keys or row.moves is Moves.MAKES or op.type is CAST
    if not prepares or len(op.outputs) != 1 or op.body.has_effects:
        return False
    (v,) = op.outputs
    return len(readers.get(v, ())) == 1 and v not in needed
