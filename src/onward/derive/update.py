"""From forward + backward to the whole training Program: gradient rules, update ops, parameter rules.

The hyperparameters of the optimizer become float32 state Variables, its slots state Variables named
``parameter/slot``, its schedules ops that read the step counter. Whatever is shared (counter,
schedules, hyperparameters) is made once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.errors import GraphError, HyperparameterError
from onward.core.jaxprs import Body, Type, body_of
from onward.core.names import Names
from onward.core.placement import expect_one_device
from onward.core.program import Op, Program, Variable
from onward.core.transform import transform
from onward.core.walk import substitute
from onward.core.words import Kind, Pass, Placement, UpdateType
from onward.define.trace import explaining
from onward.derive.accumulate import accumulation_of
from onward.derive.act import Act, Slot
from onward.derive.groups import Route, Routing, own_fields
from onward.derive.loss import LossFunction
from onward.derive.precision import is_low, master, narrowed, rounded_at_random, slots_of, widened
from onward.derive.rule import GradientRule, ParameterRule, Rule

if TYPE_CHECKING:
    from onward.derive.optimizer import Optimizer

_STEP = "step"
Pair = tuple[Variable, Variable]


@transform
def append_update(program: Program, optimizer: Optimizer) -> Program:
    """Add the operators that update the parameters of ``program.gradients``.

    Adds ops and state, changes none. Every parameter keeps its dtype.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.trace(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3))
        >>> program = append_update(ow.append_backward(program), ow.Momentum(0.1, 0.9))
        >>> [v.name for v in program.state]
        ['w', 'learning_rate', 'momentum', 'step', 'w/velocity']
    """
    expect_one_device(program, "the update")
    return with_update(program, optimizer)


@dataclass(frozen=True)
class StandIns:
    """What an update works on in place of each parameter: a part of it, or a copy.

    Attributes:
        make: from the ops so far and the pairs of parameter and gradient to the ops that make the stand-ins,
            and for each parameter what stands in for it and its gradient.
        placement: where the slots lie.
        parts: of how many parts laid end to end a slot consists that is sharded.
        last: whether the stand-ins are made after the gradient rules, which then see whole parameters.
    """

    make: Callable[[Program], tuple[tuple[Op, ...], Mapping[Variable, Pair]]]
    placement: Placement
    parts: int = 1
    last: bool = False


def with_update(
    program: Program, optimizer: Optimizer, routing: Routing | None = None, stand_ins: StandIns | None = None
) -> Program:
    """The Program with the update pass, neither checked nor remembered; see ``append_update``.

    Args:
        program: forward and backward pass.
        optimizer: what updates.
        routing: which optimizer updates which parameter, where that is known already.
        stand_ins: what the update works on in place of the parameters; what replaces it is in ``next_state``.
    """
    return updated(program, optimizer, routing, stand_ins).program()


def updated(
    program: Program, optimizer: Optimizer, routing: Routing | None = None, stand_ins: StandIns | None = None
) -> Update:
    """The whole update pass, with what is known about it; see ``with_update``."""
    if not program.gradients:
        raise GraphError(
            f"Program {program.name!r} has no gradients to update with. Derive the backward pass first: "
            "append_backward(program), or call optimizer.minimize."
        )
    if any(p in program.next_state for p, _ in program.gradients):
        raise GraphError(f"Program {program.name!r} updates its parameters already; minimize it only once.")
    update = Update(program, optimizer, routing or Routing.of(optimizer, program.parameters))
    if accumulation_of(program) is not None:
        _expect_gradients_only(update.routing.all_rules())
    if stand_ins and not stand_ins.last:
        update.put(stand_ins)
    for rule in update.routing.rules(GradientRule):
        update.change_gradients(rule)
    if stand_ins and stand_ins.last:
        update.put(stand_ins)
    update.widen()
    for route in update.routing.routes:
        update.update(route)
    for rule in update.routing.rules(ParameterRule):
        update.change_parameters(rule)
    update.narrow()
    return update


@dataclass(eq=False)
class Trained:
    """One parameter on its way through the update pass.

    Attributes:
        parameter: the state Variable.
        place: what is updated: the parameter, or what stands in for it.
        value: the number before the step as rules read it.
        gradient: its gradient as it is so far.
        updated: what has become of the value so far.
        ops: how many ops are still to make ``updated``; the last one makes the next value.
    """

    parameter: Variable
    place: Variable
    value: Variable
    gradient: Variable
    updated: Variable
    ops: int = 1
    rest: Variable | None = None


class Update:
    """The update pass as it grows: ops, new state, and what replaces what."""

    def __init__(self, program: Program, optimizer: Optimizer, routing: Routing) -> None:
        self.source, self.optimizer, self.routing = program, optimizer, routing
        self.names = Names(v.name for v in (*program.inputs, *program.state, *program.constants))
        self.state: list[Variable] = []
        self.initializers: list[Op] = []
        self.next_state: dict[Variable, Variable] = {}
        self.ops: list[Op] = []
        self.bodies: dict[Any, tuple[Body, tuple[int, ...]]] = {}
        self.numbers: list[Variable] = []
        self.placement, self.parts = Placement.REPLICATED, 1
        self.trained = [Trained(p, p, p, g, p) for p, g in program.gradients if not routing[p].frozen]
        self.rules: list[Rule] = [*routing.rules(GradientRule), *routing.rules(ParameterRule)]
        self.values = self.hyperparameters()
        self.evaluated: list[tuple[Trained, Any, dict[str, Slot], Mapping[str, Variable]]] = []

    # What is shared: counter, hyperparameters, schedules.

    def hyperparameters(self) -> dict[Any, dict[str, Variable]]:
        """For each route and rule, by its number, the Variables of its hyperparameters by name."""
        owners: list[tuple[Any, str, Rule, frozenset[str]]] = [
            (key, key.name, key.optimizer, own) for key, own in own_fields(self.routing.routes).items()
        ]
        owners += [(i, rule.name, rule, frozenset(rule.hyperparameters)) for i, rule in enumerate(self.rules)]
        values: dict[Any, dict[str, Variable]] = {}
        for key, prefix, rule, own in owners:
            values[key] = {
                k: self.hyperparameter(f"{prefix}/{k}" if prefix else k, v)
                for k, v in rule.hyperparameters.items()
                if k in own and not callable(v)
            }
        step = self.count()
        for key, prefix, rule, own in owners:
            for name, schedule in rule.hyperparameters.items():
                if callable(schedule) and name in own:
                    full = f"{prefix}/{name}" if prefix else name
                    values[key][name] = self.scheduled(full, schedule, step)
            base = values.get(key.base, {}) if isinstance(key, Route) else {}
            known = {**base, **values[key], _STEP: step}
            values[key] = {k: known[k] for k in (_STEP, *rule.hyperparameters) if k in known}
        return values

    def hyperparameter(self, name: str, value: Any) -> Variable:
        """A float32 state Variable that people may change."""
        v = self.number(name, value, np.float32)
        self.numbers.append(v)
        return v

    def number(self, name: str, value: float, dtype: Any) -> Variable:
        """A state Variable that begins with this number."""
        v = Variable(self.names.new(name), (), np.dtype(dtype), Kind.STATE)
        self.state.append(v)
        body = body_of(lambda: [jnp.asarray(value, dtype)])
        self.initializers.append(_op("constant", (), (v,), body))
        return v

    def count(self) -> Variable:
        """The step counter: the number of updates made so far."""
        step = self.number(_STEP, 0, np.int32)
        following = Variable(self.names.new(f"next({step.name})"), (), step.dtype)
        body = body_of(lambda n: [n + 1], Type((), step.dtype))
        self.ops.append(_op("count", (step,), (following,), body, UpdateType.BOOKKEEPING))
        self.next_state[step] = following
        return step

    def scheduled(self, name: str, schedule: Callable[[Any], Any], step: Variable) -> Variable:
        """A hyperparameter that a schedule computes from the step."""
        result = explaining(f"The schedule of {name}", jax.eval_shape, schedule, Type((), step.dtype))
        if getattr(result, "shape", None) != ():
            raise HyperparameterError(
                f"The schedule of {name} returns {result} for a step; it must return one number."
            )
        value = Variable(self.names.new(name), (), np.dtype(np.float32))
        body = body_of(lambda n: [jnp.asarray(schedule(n), jnp.float32)], Type((), step.dtype))
        self.ops.append(_op("schedule", (step,), (value,), body, UpdateType.BOOKKEEPING))
        return value

    # What is done with each parameter, in this order.

    def put(self, stand_ins: StandIns) -> None:
        """Go on with what stands in for the parameters."""
        so_far = replace(
            self.source,
            state=(*self.source.state, *self.state),
            ops=(*self.source.ops, *self.ops),
            gradients=tuple((t.parameter, t.gradient) for t in self.trained),
        )
        ops, pairs = stand_ins.make(so_far)
        self.ops.extend(ops)
        self.placement, self.parts = stand_ins.placement, stand_ins.parts
        for t in self.trained:
            place, t.gradient = pairs[t.parameter]
            t.place = t.value = t.updated = place

    def change_gradients(self, rule: Any) -> None:
        """The ops of one gradient rule."""
        chosen = [t for t in self.trained if self.routing.applies(rule, t.parameter)]
        for members in _together(rule, chosen):
            types = [
                Variable(f"{rule.name}({t.gradient.name})", t.gradient.shape, t.gradient.dtype)
                for t in members
            ]
            columns = {
                "parameter": [t.value for t in members],
                "gradient": [t.gradient for t in members],
            }
            made = self.act(self.number_of(rule), rule, members, columns, types, Kind.GRADIENT)
            for t, v in zip(members, made, strict=True):
                t.gradient = v

    def widen(self) -> None:
        """The float32 value of parameters of a lower dtype, and how many ops are still to come."""
        rules = self.routing.rules(ParameterRule)
        for t in self.trained:
            t.ops = 1 + sum(self.routing.applies(rule, t.parameter) for rule in rules)
            if not is_low(t.place.dtype):
                continue
            t.ops += 1
            if self.routing[t.parameter].optimizer.low_precision == "master":
                t.rest = self.rest_of(t)
                t.value = t.updated = self.made(
                    "widen", (t.place, t.rest), [(f"master({t.place.name})", t.rest)], master
                )[0]

    def rest_of(self, t: Trained) -> Variable:
        """The slot that holds what a low precision parameter cannot."""
        like = Type(t.place.shape, np.dtype(np.float32))
        return self.kept(t, "rest", {"rest": like}, lambda p: [jnp.zeros(p.shape, np.float32)])[0]

    def update(self, route: Route) -> None:
        """The update ops of one optimizer."""
        mine = [t for t in self.trained if self.routing[t.parameter] is route]
        for members in _together(route.optimizer, mine):
            columns = {
                "parameter": [t.value for t in members],
                "gradient": [t.gradient for t in members],
            }
            self.follow(route, route.optimizer, members, columns)

    def change_parameters(self, rule: Any) -> None:
        """The ops of one parameter rule."""
        chosen = [t for t in self.trained if self.routing.applies(rule, t.parameter)]
        for members in _together(rule, chosen):
            columns = {
                "parameter": [t.value for t in members],
                "updated": [t.updated for t in members],
                "gradient": [t.gradient for t in members],
            }
            self.follow(self.number_of(rule), rule, members, columns)

    def follow(
        self,
        number: Any,
        rule: Any,
        members: Sequence[Trained],
        columns: Mapping[str, Sequence[Variable]],
    ) -> None:
        """An op that makes what becomes of parameters."""
        types = []
        for t in members:
            t.ops -= 1
            name = f"{rule.name}({t.place.name})" if t.ops else f"next({t.place.name})"
            dtype = jnp.promote_types(t.value.dtype, np.float32) if t.ops else t.place.dtype
            types.append(Variable(name, t.place.shape, np.dtype(dtype)))
        for t, v in zip(
            members, self.act(number, rule, members, columns, types, Kind.ACTIVATION), strict=True
        ):
            t.updated = v
            if not t.ops:
                self.next_state[t.place] = v

    def narrow(self) -> None:
        """The next value of parameters of a lower dtype."""
        for t in self.trained:
            if not t.ops:
                continue
            following = (f"next({t.place.name})", t.place)
            if t.rest is not None:
                new, rest = self.made(
                    "narrow",
                    (t.updated,),
                    [following, (f"next({t.rest.name})", t.rest)],
                    lambda x, dtype=t.place.dtype: narrowed(x, dtype),
                )
                self.next_state[t.rest] = rest
            elif self.routing[t.parameter].optimizer.low_precision == "stochastic":
                step = self.values[self.routing[t.parameter]][_STEP]
                (new,) = self.made(
                    "round",
                    (t.updated, step),
                    [following],
                    lambda x, n, dtype=t.place.dtype: [rounded_at_random(x, dtype, n)],
                )
            else:
                (new,) = self.made(
                    "narrow", (t.updated,), [following], lambda x, dtype=t.place.dtype: [x.astype(dtype)]
                )
            self.next_state[t.place] = new

    # How ops and slots are made.

    def act(
        self,
        number: Any,
        rule: Any,
        members: Sequence[Trained],
        columns: Mapping[str, Sequence[Variable]],
        results: Sequence[Variable],
        kind: Kind,
    ) -> list[Variable]:
        """One op of a rule; returns its results, named and typed as these are."""
        if rule.evaluates_loss and self.placement is Placement.PER_REPLICA:
            raise GraphError(
                f"{type(rule).__name__} evaluates the loss of all devices together, and here every device "
                "trains parameters of its own. Merge the gradients: replicate(program, devices, Average())."
            )
        values = self.values[number] if isinstance(number, Route) else self.values_for(number, rule, members)
        slots = [self.slots(number, rule, t) for t in members]
        if rule.has_evaluated:
            self.evaluated += [(t, rule, own, values) for t, own in zip(members, slots, strict=True)]
        loss = LossFunction(self.source, [t.parameter for t in members]) if rule.evaluates_loss else None
        act = Act(rule, columns, slots, values, results, loss)
        if act.key not in self.bodies:
            self.bodies[act.key] = _tight(explaining(f"The update of {type(rule).__name__}", act.body))
        body, taken = self.bodies[act.key]
        old = [v for kept_slots in slots for slot in kept_slots.values() for v in slot.arrays]
        made = [Variable(self.names.new(v.name), v.shape, v.dtype, kind) for v in results]
        new = [Variable(self.names.new(f"next({v.name})"), v.shape, v.dtype) for v in old]
        self.next_state.update(zip(old, new, strict=True))
        inputs = tuple(act.inputs[i] for i in taken)
        self.ops.append(_op(rule.name, inputs, (*made, *new), body, rule.type))
        return made

    def number_of(self, rule: Rule) -> int:
        """The number of a rule."""
        return next(i for i, other in enumerate(self.rules) if other == rule)

    def values_for(self, number: int, rule: Rule, members: Sequence[Trained]) -> Mapping[str, Variable]:
        """The hyperparameters that a rule sees: its own; unless it looks across, the optimizer's too."""
        if rule.type is UpdateType.ACROSS:
            return self.values[number]
        return {**self.values[self.routing[members[0].parameter]], **self.values[number]}

    def made(
        self,
        kind: str,
        inputs: tuple[Variable, ...],
        results: Sequence[tuple[str, Variable]],
        function: Callable[..., Any],
    ) -> list[Variable]:
        """An op that is no rule's; the results are named so, and typed as these Variables are."""
        key = (kind, tuple((v.shape, v.dtype) for v in (*inputs, *(like for _, like in results))))
        if key not in self.bodies:
            body = body_of(lambda *xs: list(function(*xs)), *(Type(v.shape, v.dtype) for v in inputs))
            self.bodies[key] = (body, ())
        outputs = [Variable(self.names.new(name), like.shape, like.dtype) for name, like in results]
        op = _op(kind, inputs, tuple(outputs), self.bodies[key][0], UpdateType.ELEMENTWISE)
        self.ops.append(op)
        return outputs

    def slots(self, number: Any, rule: Any, t: Trained) -> dict[str, Slot]:
        """What a rule keeps for a parameter, by name."""
        found = slots_of(rule, t.place, rule.slot_dtype if isinstance(number, Route) else None)
        types = {f"{name}{end}": kind for name, how in found.items() for end, kind in how.types.items()}

        def first(p: Any) -> list[Any]:
            values = rule.init(p)
            step = jnp.int32(0)
            return [array for name, how in found.items() for array in how.write(values[name], step)]

        supply = iter(self.kept(t, number, types, first))
        return {name: Slot(how, tuple(next(supply) for _ in how.types)) for name, how in found.items()}

    def kept(
        self, t: Trained, owner: Any, types: Mapping[str, Type], first: Callable[[Any], list[Any]]
    ) -> list[Variable]:
        """State Variables that belong to a parameter, and the op that gives them their first values."""
        sharded = self.placement is Placement.SHARDED
        made = [
            Variable(
                self.names.new(f"{t.parameter.name}/{name}"),
                kind.shape,
                kind.dtype,
                Kind.STATE,
                Placement.REPLICATED if sharded and not kind.shape else self.placement,
            )
            for name, kind in types.items()
        ]
        if not made:
            return []
        whole = Type(t.parameter.shape, t.parameter.dtype)
        length = prod(t.place.shape) * self.parts if sharded else None
        key = (owner, whole.shape, whole.dtype, length)
        if key not in self.bodies:
            self.bodies[key] = _tight(body_of(_begin(first, length), whole))
        body, read = self.bodies[key]
        self.state.extend(made)
        self.initializers.append(_op("init", (t.parameter,) if read else (), tuple(made), body))
        return made

    def program(self) -> Program:
        """The Program with the update pass at its end.

        State keeps its name whatever the network computes: an activation of the same name gives way.
        """
        longer = replace(
            self.source,
            state=(*self.source.state, *self.state),
            ops=(*self.source.ops, *self.ops),
            next_state={**self.source.next_state, **self.next_state},
            initializers=(*self.source.initializers, *self.initializers),
            hyperparameters=(*self.source.hyperparameters, *self.numbers),
        )
        mine = {v.name for v in (*self.state, *(v for op in self.ops for v in op.outputs))}
        names = Names(mine | self.source.variables.keys())
        computed = (v for op in self.source.ops for v in op.outputs)
        given_way = {v: replace(v, name=names.new(v.name)) for v in computed if v.name in mine}
        return substitute(longer, given_way) if given_way else longer


def _begin(first: Callable[[Any], list[Any]], length: int | None) -> Callable[[Any], list[Any]]:
    """The first values from a parameter; of all parts of it end to end, where a length is given."""

    def begin(p: Any) -> list[Any]:
        p = widened(p)
        return first(p if length is None else jnp.pad(p.ravel(), (0, length - p.size)))

    return begin


def _expect_gradients_only(rules: Sequence[Rule]) -> None:
    """Refuse rules that evaluate the loss where gradients are accumulated over micro-batches."""
    for rule in rules:
        if rule.evaluates_loss:
            raise GraphError(
                f"{type(rule).__name__} evaluates the loss again on the batch, and accumulate runs the loss on "
                "micro-batches alone. Take one that needs the gradient only, or leave accumulate out."
            )


def _together(rule: Any, trained: Sequence[Trained]) -> list[list[Trained]]:
    """Which parameters a rule takes at once."""
    if rule.type is UpdateType.ACROSS:
        return [list(trained)] if trained else []
    return [[t] for t in trained]


def _tight(body: Body) -> tuple[Body, tuple[int, ...]]:
    """The body without the inputs it does not read, and the positions of those it does."""
    return body.restricted(range(len(body.out_avals)))


def _op(
    kind: str,
    inputs: tuple[Variable, ...],
    outputs: tuple[Variable, ...],
    body: Body,
    update: UpdateType | None = None,
) -> Op:
    return Op(kind, inputs, outputs, body, Pass.UPDATE, update=update)
