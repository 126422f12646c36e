"""A traced step in two: the forward Program up to the loss, and the update behind the gradients."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from onward.core.check import check
from onward.core.errors import GraphError
from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.reading import Differentiation, read_jaxpr
from onward.core.names import Names
from onward.core.program import Op, Program, Variable
from onward.core.structure import Static, Structure
from onward.core.walk import ancestors, substitute
from onward.core.words import Kind, Pass
from onward.derive.update.foreign import ForeignUpdate
from onward.explain.inspect.assembly import Given, in_place, leaves_of, signature_of
from onward.explain.inspect.call import CalledStep
from onward.explain.inspect.matching import Pair
from onward.explain.inspect.parts import TreePart
from onward.explain.inspect.replaced import next_values, without
from onward.explain.inspect.tracing import TracedStep


@dataclass(frozen=True, eq=False)
class CutTrace:
    """The trace of a step in which gradients are left open.

    Attributes:
        call: the call.
        closed: the jaxpr: what the step returns, and what replaces arrays of modules.
        treedef: the containers of what it returns.
        statics: as in ``TracedStep``.
        in_place: as there.
        hidden: the lines of gradients that could not be left open, and what each is within.
        asks_training: whether the step asks if it is being trained.
    """

    call: CalledStep
    closed: Any
    treedef: Any
    statics: Sequence[Static | None]
    in_place: Sequence[bool]
    hidden: Mapping[str, str]
    asks_training: bool = False


@dataclass(frozen=True, eq=False)
class Cut:
    """A step in two parts, over the same Variables; ``trained`` holds the names of what is differentiated."""

    forward: Program
    update: ForeignUpdate
    trained: tuple[str, ...]
    asks_training: bool


def cut(found: CutTrace, pairs: Sequence[Pair], places: Collection[int]) -> Cut:
    """The two parts of a traced step.

    Args:
        found: the trace.
        pairs: the results that replace arguments, as another trace has shown.
        places: the places of these arguments.

    Raises:
        GraphError: the step differentiates no function that can be seen, several, or what is not an argument.
    """
    return _Cutting(found, pairs, places).cut()


class _Cutting:
    """The Variables of a traced step by their roles."""

    def __init__(self, found: CutTrace, pairs: Sequence[Pair], places: Collection[int]) -> None:
        self.found, self.places = found, places
        names = Names()
        given = self.given = Given.of(found.call, names, Body(found.closed).in_types)
        reading = read_jaxpr(found.closed, given.variables, names, apart=True)
        self.constants = reading.constants
        _expect_one_call(found, reading.differentiations)
        (one,) = reading.differentiations
        inside = dict(zip(one.entered, one.wanted, strict=True))
        self.loss, *results = (inside.get(v, v) for v in (one.loss, *reading.outputs))
        self.wanted, self.gradients, self.line = one.wanted, one.gradients, one.line
        ops = _held_outside(reading.ops, inside, one.loss, names)
        whole = TracedStep(found.closed, found.treedef, found.statics, found.in_place)
        returned = Structure(found.treedef, leaves_of(whole, results))
        flat = tuple(leaf for s in given.plain.values() for leaf in s.leaves)
        mine = [(_within(returned.leaves, new), _within(flat, old)) for new, old in pairs]
        self.following = {**next_values(mine), **in_place(given.modules, whole, results)}
        self.result = without(returned, mine)
        self.forward, self.update = self._parts(ops)
        self.later = {v for op in self.update for v in op.outputs} | set(self.gradients)

    def _parts(self, ops: Sequence[Op]) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
        """The ops of the forward pass, which make the loss, or something of data and random keys; the others.

        What follows from a gradient updates, and so does what the numbers of the state decide, as schedules,
        and what the loss itself changes of the state: it is that of the whole batch.
        """
        behind, told, needed = set(self.gradients), {self.loss}, {self.loss}
        carried = _needed_for(ops, self.following.values())
        moved = {v for v in self.given.data(self.places) if v.shape}
        moved |= {v for v in self.given.state(self.places) if v.may_be_key}
        for op in ops:
            if not told.isdisjoint(op.inputs):
                told.update(op.outputs)
            if not behind.isdisjoint(op.inputs) or not (
                told.isdisjoint(op.outputs) or carried.isdisjoint(op.outputs)
            ):
                behind.update(op.outputs)
            elif not moved.isdisjoint(op.inputs):
                moved.update(op.outputs)
                needed.update(op.outputs)
        needed = _needed_for(ops, needed)
        forward = {op for op in ops if not needed.isdisjoint(op.outputs)}
        return tuple(op for op in ops if op in forward), tuple(op for op in ops if op not in forward)

    def cut(self) -> Cut:
        """The two Programs, parameters told from other state."""
        self._expect_arguments()
        forward = self._forward()
        trained = set(self.wanted)
        kinds = {v: Kind.PARAMETER if v in trained else Kind.STATE for v in forward.state}
        new = {v: replace(v, kind=kind) for v, kind in kinds.items()}
        forward = check(substitute(forward, new))
        reached = ancestors(forward, self.loss)
        names = [v.name for v in forward.parameters if v in reached]
        return Cut(forward, self._update(forward, new), tuple(names), self.found.asks_training)

    def _expect_arguments(self) -> None:
        """Raise ``GraphError`` for a step that trains what is not carried on as it is."""
        name, line = self.found.call.title, self.line
        state, data = self.given.state(self.places), self.given.data(self.places)
        for v in self.wanted:
            if self.wanted.count(v) > 1:
                raise GraphError(
                    f"{name} differentiates its loss for {v.name!r} in two arguments ({line}), and a Program "
                    "has one gradient for each parameter. Give the loss the array once."
                )
            if v in data:
                raise GraphError(
                    f"{name} differentiates its loss for {v.name!r} ({line}), which it does not carry on: "
                    "nothing it returns replaces it. Return its next value; if it does, say so: "
                    "carried=[...]."
                )
            if v not in state:
                raise GraphError(
                    f"{name} differentiates its loss for {v.type} ({line}), which is not an argument, but "
                    "computed from them. Differentiate for the argument, and compute it within the loss: "
                    "jax.grad(lambda params: loss(cast(params)))(params)."
                )

    def _forward(self) -> Program:
        made = [v for op in self.forward for v in op.outputs]  # in order, by which other traces are matched
        read = {v for op in self.update for v in op.inputs} | set(self.following.values())
        results = (v for v in self.result.variables if v not in self.later)
        known = [Static(None) if leaf in self.later else leaf for leaf in self.result.leaves]
        return Program(
            name=self.found.call.title,
            inputs=self.given.data(self.places),
            state=self.given.state(self.places),
            constants=self.constants,
            ops=tuple(replace(op, made_by=Pass.FORWARD) for op in self.forward),
            outputs=tuple(dict.fromkeys((*results, self.loss, *(v for v in made if v in read)))),
            next_state={old: new for old, new in self.following.items() if new not in self.later},
            loss=self.loss,
            signature=signature_of(
                self.found.call, self.given, self.places, replace(self.result, leaves=tuple(known))
            ),
        )

    def _update(self, forward: Program, new: dict[Variable, Variable]) -> ForeignUpdate:
        """The update over the Variables of ``forward``; what replaces state is named after it."""
        read = {v for op in self.update for v in op.inputs} | set(self.following.values())
        names = {v: f"next({old.name})" for old, v in self.following.items()}
        made = (v for op in self.update for v in op.outputs if v in names)
        new = {**new, **{v: replace(v, name=names[v]) for v in made}}

        def renewed(v: Variable) -> Variable:
            return new.get(v, v)

        return ForeignUpdate(
            forward=forward,
            gradients={w.name: g for w, g in zip(self.wanted, self.gradients, strict=True)},
            constants={v: x for v, x in self.constants.items() if v in read},
            ops=tuple(
                replace(op, inputs=tuple(map(renewed, op.inputs)), outputs=tuple(map(renewed, op.outputs)))
                for op in self.update
            ),
            next_state={old.name: renewed(v) for old, v in self.following.items() if v in self.later},
            result=self.result.mapped(renewed),
        )


def _held_outside(
    ops: Sequence[Op], inside: Mapping[Variable, Variable], loss: Variable, names: Names
) -> tuple[Op, ...]:
    """The ops, in which no gradient flows to what is differentiated for but through the call itself.

    A loss may read targets that were computed of the parameters before it: constants, to ``jax.grad``.
    """
    outside, needed = set(inside.values()), _needed_for(ops, [loss])
    held: dict[Variable, Op] = {}

    def read(v: Variable, op: Op) -> Variable:
        if v not in outside or needed.isdisjoint(op.outputs):
            return inside.get(v, v)
        if v not in held:
            body = body_of(lambda x: [jax.lax.stop_gradient(x)], jax.ShapeDtypeStruct(v.shape, v.dtype))
            output = replace(v, name=names.new(v.name), kind=op.outputs[0].kind)
            held[v] = Op("stop_gradient", (v,), (output,), body, source=op.source)
        return held[v].outputs[0]

    new = [replace(op, inputs=tuple(read(v, op) for v in op.inputs)) for op in ops]
    return (*held.values(), *new)


def _needed_for(ops: Sequence[Op], targets: Iterable[Variable]) -> set[Variable]:
    """The Variables that these depend on, themselves included."""
    needed = set(targets)
    for op in reversed(ops):
        if not needed.isdisjoint(op.outputs):
            needed.update(op.inputs)
    return needed


def _within(leaves: Sequence[Variable | Static], part: TreePart) -> TreePart:
    """The same part of another trace."""
    return replace(part, leaves=tuple(leaves[part.start : part.start + len(part.leaves)]))


_UNSEEN = (
    "{name}: no call of jax.grad or jax.value_and_grad is seen within it, so its loss and its update cannot "
    "be told apart. Call it within the step, jax.value_and_grad(loss)(params, ...), not once outside of it, "
    "and not jax.vjp or jax.jacrev in its place. ow.inspect shows the step as it is."
)
_HIDDEN = (
    "{name} computes its gradients {what} ({line}), so its loss and its update cannot be told apart. "
    "{advice} ow.inspect shows the step as it is."
)
_OF_A_LOOP = (
    "Of a loop over steps adopt the step within it; of a loop over micro-batches the step for one batch, and "
    "write onward.accumulate."
)
_OF_A_SEARCH = (
    "Of a loop over steps adopt the step within it. Where an optimizer searches along a line, as that of "
    "optax.lbfgs, compute the gradients before it, on a line of their own: jax.value_and_grad(loss)(params)."
)
_ELSEWHERE = "Call jax.value_and_grad(loss)(params, ...) in the step itself, for real numbers."
_SEVERAL = (
    "{name} computes gradients {count} times, at {lines}, and a Program has one loss. {advice} ow.inspect "
    "shows the step as it is."
)
_LOOP = "Adopt the step for one batch, and write onward.accumulate(program, {count})."
_LOSSES = "Make a step of each, which adopt takes, or one loss of both."


def _expect_one_call(found: CutTrace, calls: Sequence[Differentiation]) -> None:
    """Raise ``GraphError`` unless the step differentiates one function, once."""
    name, lines = found.call.title, [call.line for call in calls]
    different = list(dict.fromkeys(lines))
    if not lines and found.hidden:
        line, what = next(iter(found.hidden.items()))
        advice = {"within scan": _OF_A_LOOP, "within while": _OF_A_SEARCH}.get(what, _ELSEWHERE)
        raise GraphError(_HIDDEN.format(name=name, what=what, line=line, advice=advice))
    if not lines:
        raise GraphError(_UNSEEN.format(name=name))
    if len(lines) > 1:
        is_loop = len(different) == 1 and len({call.wanted for call in calls}) == 1
        advice = _LOOP.format(count=len(lines)) if is_loop else _LOSSES
        places = " and ".join(different)
        raise GraphError(_SEVERAL.format(name=name, count=len(lines), lines=places, advice=advice))
