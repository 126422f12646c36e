"""The values of a Program's forward pass: those that the backward pass reads, and those available anyway."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from onward.core.cost import cost, size
from onward.core.marks import OF_WHOLE_BATCH, STACK
from onward.core.program import Op, Program, Variable
from onward.core.words import Pass
from onward.develop.recompute.min_cut import Task

_ELEMENTWISE = 8  # an addition that reads its numbers from memory, in multiply-adds of a matrix product
_TRANSCENDENTAL = 32  # an exponential, likewise


class Activations:
    """The forward pass as the backward pass sees it.

    Attributes:
        forward: the ops of the forward pass, in order.
        there: what need not be kept for the backward pass, since it is there at any time: what the step is
            given, what depends on none of it, what it returns, what the update reads, and ``keep``.
        read: what the backward pass reads of the forward pass.
    """

    def __init__(self, program: Program, keep: Iterable[Variable] = ()) -> None:
        self.program = program
        self.forward = tuple(op for op in program.ops if op.made_by is Pass.FORWARD)
        self.made = {v for op in self.forward for v in op.outputs}
        backward = [op for op in program.ops if op.made_by is Pass.BACKWARD]
        others = [op for op in program.ops if op.made_by not in (Pass.FORWARD, Pass.BACKWARD)]
        self.there = {*program.inputs, *program.state, *program.constants, *self._fixed(), *keep}
        self.there |= {
            *program.outputs,
            *program.next_state.values(),
            *(v for op in others for v in op.inputs),
        }
        self.read = {v for op in backward for v in op.inputs if v in self.made}

    @cached_property
    def depends(self) -> set[Variable]:
        """The values given to the step, and all that depend on them: everything but constants."""
        found = {*self.program.inputs, *self.program.state}
        for op in self.forward:
            if not found.isdisjoint(op.inputs):
                found.update(op.outputs)
        return found

    def _fixed(self) -> set[Variable]:
        """The values that depend on nothing, and those never computed twice: of effects and collectives.

        And statistics of the whole batch, which micro-batches are fed: all that makes one runs before them,
        and where it is made again, that takes in a part of the backward pass.
        """
        found = set(self.program.constants)
        for op in self.forward:
            if found.issuperset(op.inputs) or not may_run_again(op) or op.type in (STACK, OF_WHOLE_BATCH):
                found.update(op.outputs)
        return found

    @cached_property
    def position(self) -> dict[Variable, int]:
        """The op, by its number, that makes each Variable of the forward pass."""
        return {v: i for i, op in enumerate(self.forward) for v in op.outputs}

    @cached_property
    def last_read(self) -> dict[Variable, int]:
        """The last op of the forward pass, by its number, that reads each Variable."""
        return {v: i for i, op in enumerate(self.forward) for v in op.inputs}

    def held(self, v: Variable) -> int:
        """The bytes it costs to keep a Variable."""
        return 0 if v in self.there else size(v)

    def task(self, begin: int, end: int) -> tuple[Task, tuple[Variable, ...]]:
        """The task of choosing what to keep of these ops of the forward pass, and its values in order."""
        ops = [i for i in range(begin, end) if any(v not in self.there for v in self.forward[i].outputs)]
        values = [v for i in ops for v in self.forward[i].outputs if v not in self.there]
        number = {v: k for k, v in enumerate(values)}
        maker = {v: k for k, i in enumerate(ops) for v in self.forward[i].outputs}
        task = Task(
            efforts=tuple(effort(self.forward[i]) for i in ops),
            reads=tuple(tuple(number[v] for v in self.forward[i].inputs if v in number) for i in ops),
            values=tuple((maker[v], size(v)) for v in values),
            needed=tuple(k for k, v in enumerate(values) if v in self.read),
        )
        return task, tuple(values)


def may_run_again(op: Op) -> bool:
    """Whether an op does nothing but compute."""
    return not op.body.has_effects and not op.body.collectives


def where(op: Op | None) -> str:
    """The user's line behind an op, in brackets."""
    return f" ({op.type}{op.at})" if op is not None and op.at else ""


def effort(op: Op) -> int:
    """How much work it is to run an op once more, in multiply-adds of a matrix product; at least 1.

    >>> import jax.numpy as jnp, onward as ow
    >>> program = ow.trace(lambda w, x: jnp.exp(x @ w), jnp.ones((8, 4)), jnp.ones((2, 8)))
    >>> [(op.type, effort(op)) for op in program.ops]
    [('dot_general', 65), ('exp', 257)]
    """
    if not op.inputs:
        return 1
    counted = cost(op)
    plain = (counted.flops - counted.transcendentals) * (0.5 if op.primitive.is_product else _ELEMENTWISE)
    return int(1 + plain + _TRANSCENDENTAL * counted.transcendentals)
