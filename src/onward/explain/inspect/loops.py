"""Loops over steps, epochs, mini-batches or micro-batches, opened: one turn as a Program, with its roles.

What a turn hands to the next one is its state, and nothing has to be guessed. A loop that trains carries
parameters; one that accumulates gradients is given them, and adds up their gradients. What ``shard_map`` runs
on each device is opened alike, and so are the branches of a condition that train; what these carry on is
what the step does.

>>> import jax, jax.numpy as jnp, onward as ow
>>> def epoch(w, xs):
...     def once(w, x):
...         loss, gradient = jax.value_and_grad(lambda w: jnp.sum(jnp.sin(w * x)))(w)
...         return w - 0.1 * gradient, loss
...     w, losses = jax.lax.scan(once, w, xs)
...     return w, losses.mean()
>>> program = ow.inspect(epoch, jnp.ones(3), jnp.ones((5, 3)))
>>> (turn,) = program.ops[0].subprograms.values()
>>> [v.name for v in turn.parameters], [g.name for _, g in turn.gradients], turn.loss.name
(['w'], ['grad(w)'], 'reduce_sum')
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onward.core.jaxprs.loops import LoopTurn, turns_of
from onward.core.jaxprs.reading import Reading, read_jaxpr
from onward.core.names import Names
from onward.core.primitives.traits import Reduces
from onward.core.program import Op, Program, Variable
from onward.core.words import Kind, Pass
from onward.explain.inspect.losses import StepLosses, losses_of, made_of
from onward.explain.inspect.naming import named
from onward.explain.inspect.opened import OpenedBody, OpenedTurn
from onward.explain.inspect.passes import is_mixed, with_passes
from onward.explain.inspect.roles import Pair, facing, gradients_of, likely_loss, parameters_among

_UNDER = frozenset({"jvp", "transpose"})


@dataclass(frozen=True, eq=False)
class StepRoles:
    """The roles of what is in a step, or in a turn of a loop over steps.

    Attributes:
        ops: in their order, those of loops opened.
        trained: the parameters.
        gradients: the pairs (parameter, gradient).
        losses: the losses.
    """

    ops: tuple[Op, ...]
    trained: frozenset[Variable]
    gradients: tuple[Pair, ...]
    losses: StepLosses

    def program(self, **fields: Any) -> Program:
        """The Program with these roles, and its other fields."""
        return Program(
            ops=self.ops,
            gradients=self.gradients,
            loss=self.losses.loss,
            losses=self.losses.several,
            **fields,
        )

    def kinds(self, among: Iterable[Variable]) -> dict[Variable, Kind]:
        """Parameters told from other state."""
        return {v: Kind.PARAMETER if v in self.trained else Kind.STATE for v in among}


def ops_of(reading: Reading) -> tuple[Op, ...]:
    """The ops that were read, each in its pass; loops that compute gradients in their turns are opened."""
    ops = facing(with_passes(reading.ops, reading.under))
    marked = zip(ops, reading.under, strict=True)
    return tuple(_opened(op) if _UNDER.isdisjoint(marks) and is_mixed(op) else op for op, marks in marked)


def differentiated(reading: Reading) -> set[Variable]:
    """The Variables that are computed under ``jax.grad``."""
    marked = zip(reading.ops, reading.under, strict=True)
    return {v for op, marks in marked if "jvp" in marks for v in op.outputs}


def roles_of(
    ops: Sequence[Op],
    reading: Reading,
    following: Mapping[Variable, Variable],
    outputs: Sequence[Variable],
    carried: Collection[Variable] = (),
    summed: Sequence[Pair] = (),
) -> StepRoles:
    """The roles in a step of which it is known what is carried on.

    Args:
        ops: those of the step, as ``ops_of`` gives them.
        reading: what they come from.
        following: for what is carried on its next value.
        outputs: the results.
        carried: in a loop what the turn before hands on.
        summed: in a loop that adds up gradients the pairs (parameter, gradient of one turn).
    """
    ops = [_finished(op, (), following) for op in ops]
    pairs = gradients_of(ops, following)
    trained = {p for p, _ in summed} or parameters_among(ops, following, _trained_within(ops, following))
    mine = (*summed, *(pair for pair in pairs if pair[0] in trained))
    within = {v for op in ops for v in _losses_within(op)}
    losses = losses_of(ops, differentiated(reading), outputs, mine or pairs, within, carried)
    if losses.loss is None and not losses.several and not within:
        losses = replace(losses, loss=likely_loss(ops, outputs))
    finished = [_updating(_finished(op, _before_sums(ops, mine), following)) for op in ops]
    told = made_of(finished, within, carried).keys() - following.values()
    return StepRoles(_telling(finished, told), frozenset(trained), mine, losses)


def _telling(ops: Sequence[Op], told: Collection[Variable]) -> tuple[Op, ...]:
    """The ops, of which those that only tell of the losses of a loop, as their mean does, update nothing."""
    needed: set[Variable] = set()
    found = []
    for op in reversed(ops):
        updates = op.made_by is Pass.UPDATE
        if updates and not isinstance(op.body, OpenedBody) and needed.isdisjoint(op.outputs):
            updates = not all(v in told for v in op.outputs)
            op = op if updates else replace(op, made_by=Pass.FORWARD)
        needed.update(op.inputs if updates else ())
        found.append(op)
    return tuple(found[::-1])


def _trained_within(ops: Sequence[Op], following: Mapping[Variable, Variable]) -> set[Variable]:
    """The state that loops train: they are given it, and give its next value."""
    return {old for op in ops for old, new in _carried_parameters(op) if following.get(old) is new}


def _carried_parameters(op: Op) -> list[Pair]:
    """The parameters that a loop or a branch is given and trains, as they stand outside, before and after."""
    turns = op.body.turns if isinstance(op.body, OpenedBody) else ()
    return [pair for opened in turns for pair in _carried_by(op, opened)]


def _carried_by(op: Op, opened: OpenedTurn) -> list[Pair]:
    told, turn = opened.told, opened.turn
    outside = dict(zip(told.results, op.outputs, strict=True))
    return [
        (op.inputs[at], outside[j])
        for i, j in opened.handed
        if (at := told.given[i]) is not None and j in outside and turn.inputs[i].kind is Kind.PARAMETER
    ]


def _losses_within(op: Op) -> list[Variable]:
    """The results of a loop that are made of the losses of its turns."""
    if not isinstance(op.body, OpenedBody):
        return []
    pairs = zip(op.body.first.told.results, op.outputs, strict=True)
    return [v for j, v in pairs if j in op.body.losses]


def _before_sums(ops: Sequence[Op], gradients: Sequence[Pair]) -> list[Pair]:
    """The pairs (parameter, gradient), with what a loop has stacked in place of the sum over it."""
    summed = {op.outputs[0]: op.inputs[0] for op in ops if op.primitive.reduces is Reduces.SUM}
    return [(p, summed.get(g, g)) for p, g in gradients]


def _finished(op: Op, gradients: Sequence[Pair], following: Mapping[Variable, Variable]) -> Op:
    """An opened op, opened again now that it is known what it gives the gradients and next values of."""
    if not isinstance(op.body, OpenedBody):
        return op
    given, made, told = set(op.inputs), list(op.outputs), op.body.first.told
    mine = [(p, g) for p, g in gradients if p in given and g in made]
    pairs = [
        (i, told.results[made.index(following[op.inputs[at]])])
        for i, at in enumerate(told.given)
        if at is not None and following.get(op.inputs[at]) in made
    ]
    if mine or (pairs and not told.carried):
        op = _opened(op, mine, pairs)
    return op


def _updating(op: Op) -> Op:
    """An op that trains within is part of the update."""
    trains = isinstance(op.body, OpenedBody) and op.body.trains
    return replace(op, made_by=Pass.UPDATE) if trains else op


def _opened(op: Op, gradients: Sequence[Pair] = (), pairs: Sequence[tuple[int, int]] = ()) -> Op:
    """A loop with its turn as a Program, a ``shard_map`` with what a device does, a condition's branches.

    Args:
        op: the loop.
        gradients: the pairs (parameter, gradient) outside that it gives.
        pairs: what is carried on from step to step where no turn hands it on: positions (input, output).
    """
    turns = [_opened_turn(op, told, gradients, pairs) for told in turns_of(op.body)]
    return replace(op, body=OpenedBody(op.body, turns)) if turns else op


def _opened_turn(
    op: Op, told: LoopTurn, gradients: Sequence[Pair], pairs: Sequence[tuple[int, int]]
) -> OpenedTurn:
    names = Names()
    inputs = tuple(
        Variable(names.new(_name_within(op, told, i)), tuple(t.shape), t.dtype, Kind.DATA)
        for i, t in enumerate(told.body.in_avals)
    )
    reading = read_jaxpr(told.body.closed, inputs, names, apart=True)
    ops, outputs, handed = ops_of(reading), reading.outputs, told.carried or tuple(pairs)
    following = {inputs[i]: outputs[j] for i, j in handed if outputs[j] is not inputs[i]}
    added = dict(gradients_of(ops, following)) if told.carried else {}
    one = {j: added.get(inputs[i]) for i, j in told.carried}
    each = [one.get(j, v) for j, v in enumerate(outputs)]  # a sum that is handed on, or a stacked gradient
    summed = _of_one_turn(op, told, inputs, each, gradients)
    shows = differentiated(reading) or any(isinstance(op.body, OpenedBody) for op in ops)
    carried = {inputs[i] for i, _ in handed}
    roles = roles_of(
        ops, reading, following if shows else {}, outputs, carried if told.carried else (), summed
    )
    turn = roles.program(
        name=told.function,
        inputs=inputs,
        constants=reading.constants,
        outputs=outputs,
        next_state=following,
    )
    kinds = roles.kinds((*carried, *roles.trained))
    made = frozenset(j for j, v in enumerate(outputs) if v in roles.losses.made)
    marked = frozenset(i for i, marks in enumerate(reading.under) if "jvp" in marks)
    return OpenedTurn(told, named(turn, names, kinds), tuple(handed), made, marked)


def _name_within(op: Op, told: LoopTurn, i: int) -> str:
    """The name of an input of a turn: that of what the loop is given for it."""
    at = told.given[i]
    return op.inputs[at].name if at is not None else f"input_{i}"


def _of_one_turn(
    op: Op,
    told: LoopTurn,
    inputs: Sequence[Variable],
    each: Sequence[Variable | None],
    gradients: Sequence[Pair],
) -> list[Pair]:
    """The pairs (parameter, gradient) of one turn of a loop that adds up gradients.

    Args:
        op: the loop.
        told: its turn.
        inputs: what the turn is given.
        each: for each of its results the gradient that is added to it, or stacked.
        gradients: the pairs (parameter, sum or stack) outside.
    """
    inside = {op.inputs[at]: inputs[i] for i, at in enumerate(told.given) if at is not None}
    pairs = [(inside[p], each[told.results[op.outputs.index(g)]]) for p, g in gradients]
    return [(p, g) for p, g in pairs if g is not None and g.shape == p.shape]
