"""Loops over layers whose turns keep part of what they compute: the rest is computed again turn by turn.

A ``scan`` of the forward pass saves for its gradient, stacked over the turns, whatever its body computes and
the gradient reads. Here the body gets a rule of its own: it hands on the chosen values, and its gradient
begins by computing the others again from these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.edited import in_place_of
from onward.core.lower import lower
from onward.core.names import Names
from onward.core.primitives.traits import Runs
from onward.core.program import Op, Phase, Program, Variable
from onward.core.transform import transform
from onward.core.turn import ScanTurn
from onward.core.words import Kind, Pass
from onward.derive.backward import gradients
from onward.develop.recompute.activations import may_run_again
from onward.develop.recompute.again import BARRIER, keeping
from onward.develop.roll.build import Layers

Kept = tuple[tuple[str, tuple[str, ...]], ...]


@transform(phase=Phase.KEEP)
def keeping_in_loops(program: Program, kept: Kept) -> Program:
    """Give the loops of a forward Program bodies that keep what has these names, and no more.

    ``kept``: for each loop the name of its first result, and the names of values in its body.
    """
    chosen = dict(kept)
    return replace(program, ops=tuple(_keeping(op, chosen) for op in program.ops))


def loops(program: Program) -> list[Op]:
    """The loops of the forward pass that are differentiated and may run again."""
    differentiated = {op.of for op in program.ops if op.made_by is Pass.BACKWARD}
    return [
        op
        for op in program.ops
        if op.primitive.runs is Runs.SCAN and op.made_by is Pass.FORWARD
        if op.outputs and op.outputs[0] in differentiated
        if may_run_again(op) and _Turn.of(op) is not None
    ]


def saved_by(op: Op) -> tuple[Variable, ...]:
    """The values that an op of the forward pass computes for its gradient, behind its results."""
    return op.outputs[len((op.primal or op.body).out_avals) :]


def is_of_layers(op: Op) -> bool:
    """Whether Onward made this loop of layers that repeat."""
    return isinstance(op.primal or op.body, Layers)


def turn_of(op: Op) -> Program:
    """One turn of a loop as a Program, with the gradients of what it reads from those of its results."""
    turn = _Turn.of(op)
    assert turn is not None
    return turn.differentiated


def _keeping(op: Op, kept: dict[str, tuple[str, ...]]) -> Op:
    name = "".join(v.name for v in op.outputs[:1])
    turn = _Turn.of(op) if op.primitive.runs is Runs.SCAN and name in kept else None
    if turn is None:
        return op
    body = turn.loop(kept[name])
    return replace(op, body=in_place_of(op.body, body))


@dataclass(frozen=True)
class _Turn:
    """One turn of a loop of the forward pass, and its gradient."""

    op: Op
    parts: ScanTurn

    @staticmethod
    def of(op: Op) -> _Turn | None:
        """The turn of a loop; None if its parts cannot be told apart."""
        body = op.primal or op.body
        parts = ScanTurn.of(body) if len(body.equations) == 1 else None
        if parts is None or len(parts.program.outputs) != len(body.out_avals):  # some are read by nobody
            return None
        # A gradient that the function takes within a turn is part of the forward pass of the loop.
        ops = tuple(replace(op, made_by=Pass.FORWARD) for op in parts.program.ops)
        return _Turn(op, replace(parts, program=replace(parts.program, ops=ops)))

    @property
    def program(self) -> Program:
        """The turn."""
        return self.parts.program

    @property
    def differentiated(self) -> Program:
        """The turn, the gradients of its results as further inputs, and the gradients of its inputs."""
        program = self.program
        names = Names(program.variables)
        results = [v for v in dict.fromkeys(program.outputs) if v.is_float]
        seeds = [Variable(names.new(f"grad({v.name})"), v.shape, v.dtype, Kind.DATA) for v in results]
        given = replace(program, inputs=(*program.inputs, *seeds))
        wanted = [v for v in program.inputs if v.is_float]
        found, parts = gradients(given, results, wanted, seeds)
        pairs = tuple((v, g) for v, g in zip(wanted, parts, strict=True) if g is not None)
        return replace(found, gradients=pairs)

    def loop(self, kept: Sequence[str]) -> Body:
        """The loop whose turns keep what has these names."""
        turn = self.rule(keeping(self.differentiated, tuple(kept), (), False))
        return body_of(lambda *values: self.parts.scan(turn, values), *self.op.body.in_types)

    def rule(self, program: Program) -> Any:
        """The turn as a function with a gradient rule of its own, which keeps what this Program does."""
        late = [op for op in program.ops if op.made_by is Pass.BACKWARD]
        early = [op for op in program.ops if op.made_by is Pass.FORWARD]
        made = {v for op in early for v in op.outputs}
        read = list(dict.fromkeys(v for op in late for v in op.inputs if v in made))
        count = len(self.program.inputs)
        inputs, seeds = program.inputs[:count], program.inputs[count:]
        results = self.program.outputs
        parts = dict(program.gradients)
        known = [parts.get(v) for v in inputs]
        forward = lower(replace(program, ops=tuple(early)), [*results, *read])
        behind = replace(program, inputs=(*program.inputs, *read), ops=tuple(late))
        backward = lower(behind, [g for g in known if g is not None])
        first = {v: results.index(v) for v in dict.fromkeys(results) if v.is_float}

        def zeros() -> list[Any]:
            return [jnp.zeros(v.shape, v.dtype) for v in seeds]

        @jax.custom_vjp
        def turn(*values: Any) -> list[Any]:
            return forward((), [*values, *zeros()])[: len(results)]

        def saving(*values: Any) -> tuple[list[Any], Any]:
            made = forward((), [*values, *zeros()])
            return made[: len(results)], (values, made[len(results) :])

        def pull(saved: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
            values, kept = saved
            arriving = [_sum_of(cotangents, results, v) for v in first]
            gradients = iter(backward((), [*values, *arriving, *kept]))
            return tuple(None if g is None else next(gradients) for g in known)

        turn.defvjp(saving, pull)
        return _stopping(turn, [v.is_float and g is None for v, g in zip(inputs, known, strict=True)])


def _stopping(turn: Any, lost: Sequence[bool]) -> Any:
    """The turn without gradients of what is lost.

    A rule of its own gives everything a gradient, zeros for what has none: then an optimizer would decay, and
    keep slots for, what the loss does not reach.
    """

    def stopped(*values: Any) -> Any:
        return turn(*(jax.lax.stop_gradient(x) if cut else x for x, cut in zip(values, lost, strict=True)))

    return stopped


def _sum_of(cotangents: Sequence[Any], results: Sequence[Variable], v: Variable) -> Any:
    """The gradient of a Variable that is returned once or several times."""
    return sum(g for g, result in zip(cotangents, results, strict=True) if result is v)


def is_recomputed(program: Program) -> bool:
    """Whether the backward pass computes some of the forward pass again."""
    barriers = (op for op in program.ops if op.type is BARRIER)
    return any(barriers) or bool(loops_kept(program))


def loops_kept(program: Program) -> Kept:
    """The loops whose turns compute something again, and what they keep."""
    steps = () if program.recipe is None else program.recipe.of(keeping_in_loops)
    return tuple(pair for step in steps for pair in step.arguments[0])
