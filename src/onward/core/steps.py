"""The ops of a Program taken apart: one step for each equation, whatever calls it stands in.

An op is what a person looks at; an equation is what a device does. A gradient op, a ``custom_jvp`` function
or an update rule is one op of several equations; a loop stays one step, with the Programs of its turn.

>>> import jax, jax.numpy as jnp, onward as ow
>>> program = ow.trace(lambda w: jnp.sum(jax.nn.relu(w)), jnp.ones(3))
>>> [(program.ops[step.op].type, step.kind) for step in steps(program)]
[('relu', 'max'), ('reduce_sum', 'reduce_sum')]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

from onward.core.described import DescribedBody
from onward.core.jaxprs.body import Body
from onward.core.jaxprs.reading import program_of
from onward.core.primitives.table import of
from onward.core.primitives.traits import Runs
from onward.core.program import Op, Program, Variable, programs_within

_SAME = "copy"
_HELD = "optimization_barrier"


@dataclass(frozen=True, eq=False, slots=True)
class Equation:
    """One equation: the number of the op it belongs to, its primitive, what it reads and computes.

    ``programs`` are those of the turn of a loop, or of the branches of a choice; ``body`` holds the equation
    itself, and is None for a copy, which stands in no code.
    """

    op: int
    kind: str
    inputs: tuple[Variable, ...]
    outputs: tuple[Variable, ...]
    programs: tuple[Program, ...] = ()
    body: Body | None = None


# Programs that differ in a few ops share the others. What is remembered holds no op, so that it goes with it.
_looked_into: WeakKeyDictionary[Op, tuple[Equation, ...]] = WeakKeyDictionary()


def steps(program: Program) -> tuple[Equation, ...]:
    """The equations of a Program in the order of its ops."""
    opened = _OpOpener()
    return tuple(step for i, op in enumerate(program.ops) for step in opened.steps(i, op))


class _OpOpener:
    """Looks into ops, once for each computation."""

    def __init__(self) -> None:
        self._known: dict[object, Program] = {}

    def steps(self, number: int, op: Op) -> Iterator[Equation]:
        """The equations of an op."""
        if isinstance(op.body, DescribedBody):
            yield from self._one(number, op, op.inputs, op.outputs)
        elif not op.body.holds_functions:
            (kind,) = op.body.primitives
            yield Equation(number, kind, op.inputs, op.outputs, (), op.body)
        else:
            if op not in _looked_into:
                inside = self._inside(number, self._program(op.body), op.inputs, op.outputs)
                _looked_into[op] = tuple(inside)
            for e in _looked_into[op]:
                yield Equation(number, e.kind, e.inputs, e.outputs, e.programs, e.body)

    def _program(self, body: Body) -> Program:
        """A body as a Program; one for all that are equal."""
        known = self._known.get(body.signature)
        if known is None:
            known = self._known[body.signature] = program_of(body.closed, "body")
        return known

    def _inside(
        self, number: int, program: Program, given: tuple[Variable, ...], wanted: tuple[Variable, ...]
    ) -> Iterator[Equation]:
        """The equations of a Program that is called with given Variables and computes wanted ones."""
        now: dict[Variable, Variable] = dict(zip(program.inputs, given, strict=True))
        made = {v for op in program.ops for v in op.outputs}
        for inner, outer in zip(program.outputs, wanted, strict=True):
            if inner in made:
                now.setdefault(inner, outer)
        for op in program.ops:
            inputs, outputs = (tuple(_own(now, v) for v in group) for group in (op.inputs, op.outputs))
            yield from self._one(number, op, inputs, outputs)
        for inner, outer in zip(program.outputs, wanted, strict=True):
            if (source := _own(now, inner)) is not outer:
                yield Equation(number, _SAME, (source,), (outer,))

    def _one(
        self, number: int, op: Op, inputs: tuple[Variable, ...], outputs: tuple[Variable, ...]
    ) -> Iterator[Equation]:
        """The equations of an op of one equation, which may be a call."""
        inner = tuple(programs_within(op.body).values())
        kind = op.type if isinstance(op.body, DescribedBody) else next(op.body.calls).primitive
        if of(kind).is_loop:
            yield Equation(number, kind, inputs, outputs, inner, op.body)
        elif len(inner) == 1 and _is_called(inner[0], op):
            operands = zip(op.body.operands, inner[0].inputs, strict=True)
            given = tuple(inputs[x] if isinstance(x, int) else replace(v) for x, v in operands)
            if of(kind).runs is Runs.AGAIN and _is_held_back(op.body):
                held = tuple(map(replace, given))
                yield Equation(number, _HELD, given, held)
                given = held
            yield from self._inside(number, inner[0], given, outputs)
        else:
            yield Equation(number, kind, inputs, outputs, (), op.body)


def _is_held_back(body: Body) -> bool:
    """Whether JAX puts a barrier before it, so that a compiler computes it a second time."""
    call = next(body.calls, None)
    return call is not None and bool(call.params["differentiated"] and call.params["prevent_cse"])


def _is_called(program: Program, op: Op) -> bool:
    """Whether a Program within an op is what it computes, and not what it does with pairs of numbers."""
    given = [v.shape for v in program.inputs], [v.shape for v in program.outputs]
    shapes = [op.inputs[x].shape if isinstance(x, int) else () for x in op.body.operands]
    return given == (shapes, [v.shape for v in op.outputs])


def _own(now: dict[Variable, Variable], v: Variable) -> Variable:
    """The Variable that stands for another one in this call, made when it is first needed."""
    if v not in now:
        now[v] = replace(v)
    return now[v]
