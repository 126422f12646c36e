"""The update pass while its ops are added: what stands for each parameter, and which op comes next."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np

from onward.core.errors import GraphError
from onward.core.jaxprs.body import Body
from onward.core.jaxprs.equations import Type
from onward.core.jaxprs.tracing import current_axis
from onward.core.program import Op, Program, Variable
from onward.core.words import Kind, Placement, UpdateType
from onward.define.trace import explaining
from onward.derive.rule import GradientRule, ParameterRule, Rule, RuleBeside
from onward.derive.update.act import Act, Hyperparameters, Shared, Slot
from onward.derive.update.draft import SlotPlace, UpdateDraft
from onward.derive.update.groups import OptimizerRule, Route, Routing
from onward.derive.update.hyperparameters import STEP, hyperparameters
from onward.derive.update.loss import LossFunction
from onward.derive.update.precision import KeptSlot, is_low, master, narrowed, rounded_at_random, slots_of

Pair = tuple[Variable, Variable]


@dataclass(frozen=True)
class StandIns:
    """The stand-ins that an update works on in place of the parameters: a part of each, or a copy.

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


Sharing = Callable[[UpdateDraft, Rule, Sequence[Variable], Sequence[Variable]], Shared]
"""What a rule across parameters is told of those elsewhere: from the update so far, the rule, and the
parameters and gradients that are here."""


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

    def __init__(
        self, program: Program, optimizer: OptimizerRule, routing: Routing, sharing: Sharing | None = None
    ) -> None:
        self.source, self.optimizer, self.routing, self.sharing = program, optimizer, routing, sharing
        self.draft = UpdateDraft(program)
        self.placement, self.parts = Placement.REPLICATED, 1
        self.forms: dict[Any, dict[str, KeptSlot]] = {}
        self.trained = [Trained(p, p, p, g, p) for p, g in program.gradients if not routing[p].frozen]
        self.rules: list[Rule] = [*routing.rules(GradientRule), *routing.rules(ParameterRule)]
        self.values = hyperparameters(self.draft, routing, self.rules)
        self.evaluated: list[tuple[Trained, Any, dict[str, Slot], Hyperparameters]] = []

    # What is done with each parameter, in this order.

    def put(self, stand_ins: StandIns) -> None:
        """Go on with what stands in for the parameters."""
        pairs_so_far = tuple((t.parameter, t.gradient) for t in self.trained)
        ops, pairs = stand_ins.make(replace(self.draft.so_far, gradients=pairs_so_far))
        for op in ops:
            self.draft.append(op)
        self.placement, self.parts = stand_ins.placement, stand_ins.parts
        for t in self.trained:
            place, t.gradient = pairs[t.parameter]
            t.place = t.value = t.updated = place

    def turn(self) -> None:
        """The gradients of what is to become larger, turned round before any rule sees them."""
        turned = [t for t in self.trained if self.routing[t.parameter].optimizer.maximize]
        if turned and (rule := next((r for r in self.routing.all_rules() if r.evaluates_loss), None)):
            raise GraphError(
                f"{type(rule).__name__} evaluates the loss to make it smaller, and "
                f"{turned[0].parameter.name!r} is to maximize it. Minimize the negative of the loss, or take "
                "a rule that reads gradients alone."
            )
        for t in turned:
            name = f"negative({t.gradient.name})"
            (t.gradient,) = self.draft.made("negate", (t.gradient,), [(name, t.gradient)], lambda g: [-g])

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
                t.value = t.updated = self.draft.made(
                    "widen", (t.place, t.rest), [(f"master({t.place.name})", t.rest)], master
                )[0]

    def rest_of(self, t: Trained) -> Variable:
        """The slot that holds what a low precision parameter cannot."""
        like = Type(t.place.shape, np.dtype(np.float32))

        def zeros(p: Any) -> list[Any]:
            return [jnp.zeros(p.shape, np.float32)]

        return self.draft.keep(t.parameter, "rest", {"rest": like}, zeros, self.place(t))[0]

    def place(self, t: Trained) -> SlotPlace:
        """The placement of the state of a parameter, and its length over all parts."""
        return SlotPlace(self.placement, prod(t.place.shape) * self.parts)

    def members(self, route: Route) -> list[Trained]:
        """The parameters of one optimizer."""
        return [t for t in self.trained if self.routing[t.parameter] is route]

    def update(self, route: Route) -> None:
        """The update ops of one optimizer."""
        for members in _together(route.optimizer, self.members(route)):
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
        types = [self.following(rule, t) for t in members]
        self.becomes(members, self.act(number, rule, members, columns, types, Kind.ACTIVATION))

    def following(self, rule: Rule, t: Trained) -> Variable:
        """The name and type of what the next op makes of a parameter."""
        t.ops -= 1
        name = f"{rule.name}({t.place.name})" if t.ops else f"next({t.place.name})"
        dtype = jnp.promote_types(t.value.dtype, np.float32) if t.ops else t.place.dtype
        return Variable(name, t.place.shape, np.dtype(dtype))

    def becomes(self, members: Sequence[Trained], made: Sequence[Variable]) -> None:
        """Note what ops made of parameters, as their next values where nothing is still to come."""
        for t, v in zip(members, made, strict=True):
            t.updated = v
            if not t.ops:
                self.draft.next_state[t.place] = v

    def narrow(self) -> None:
        """The next value of parameters of a lower dtype."""
        for t in self.trained:
            if not t.ops:
                continue
            following = (f"next({t.place.name})", t.place)
            if t.rest is not None:
                new, rest = self.draft.made(
                    "narrow",
                    (t.updated,),
                    [following, (f"next({t.rest.name})", t.rest)],
                    lambda x, dtype=t.place.dtype: narrowed(x, dtype),
                )
                self.draft.next_state[t.rest] = rest
            elif self.routing[t.parameter].optimizer.low_precision == "stochastic":
                step = self.values[self.routing[t.parameter]][STEP]
                (new,) = self.draft.made(
                    "round",
                    (t.updated, step),
                    [following],
                    lambda x, n, dtype=t.place.dtype: [rounded_at_random(x, dtype, n)],
                )
            else:
                (new,) = self.draft.made(
                    "narrow", (t.updated,), [following], lambda x, dtype=t.place.dtype: [x.astype(dtype)]
                )
            self.draft.next_state[t.place] = new

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
        if rule.evaluates_loss and (low := [t.place for t in members if is_low(t.place.dtype)]):
            raise GraphError(
                f"{type(rule).__name__} evaluates the loss close to where the parameters are, and "
                f"{low[0].name!r} is {low[0].type}, which cannot tell the two apart. Keep it float32, and "
                "compute in a low dtype: mixed_precision(program)."
            )
        values = self.values_for(number, rule, members)
        slots = [self.slots(number, rule, t) for t in members]
        if rule.has_evaluated:
            self.evaluated += [(t, rule, own, values) for t, own in zip(members, slots, strict=True)]
        loss = LossFunction(self.source, [t.parameter for t in members]) if rule.evaluates_loss else None
        shared = None
        if rule.type is UpdateType.ACROSS and self.sharing is not None:
            shared = self.sharing(self.draft, rule, [t.parameter for t in members], columns["gradient"])
        act = Act(rule, columns, slots, values, results, loss, shared)
        body, taken = self.draft.once(act.key, lambda: self.traced(act))
        old = [v for kept_slots in slots for slot in kept_slots.values() for v in slot.arrays]
        made = [self.draft.named(v.name, v, kind) for v in results]
        inputs = tuple(act.inputs[i] for i in taken)
        self.draft.add(rule.name, inputs, made, body, rule.type, replaces=old)
        return made

    def traced(self, act: Act) -> tuple[Body, tuple[int, ...]]:
        """The body of an op of a rule, and which inputs it reads; as it was, where a recipe is built again.

        The act is kept beside it, so that no other rule is taken for this one. A rule with a field that can
        be changed in place, such as a list, is traced each time.
        """
        said, recipe = f"The update of {type(act.rule).__name__}", self.source.recipe
        if recipe is None or act.loss is not None:
            found: tuple[Body, tuple[int, ...]] = explaining(said, act.tight)
            return found
        key = (act.key, *vars(act.rule).values(), current_axis())
        found, _ = recipe.updates.found(key, lambda: (explaining(said, act.tight), act))
        return found

    def number_of(self, rule: Rule) -> int:
        """The number of a rule."""
        return next(i for i, other in enumerate(self.rules) if other == rule)

    def values_for(self, number: Any, rule: Rule, members: Sequence[Trained]) -> Hyperparameters:
        """The hyperparameters that a rule sees: its own; unless it looks across, the optimizer's too."""
        has_optimizer = isinstance(rule, RuleBeside) and rule.type is not UpdateType.ACROSS
        beside = self.values[self.routing[members[0].parameter]] if has_optimizer else {}
        return Hyperparameters(self.values[number], beside)

    def slots(self, number: Any, rule: Any, t: Trained) -> dict[str, Slot]:
        """The slots that a rule keeps for a parameter, by name."""
        key = (id(rule), t.place.shape, t.place.dtype)
        if key not in self.forms:
            form = rule.slot_dtype if isinstance(number, Route) else None
            self.forms[key] = slots_of(rule, t.place, form)
        found = self.forms[key]
        types = {f"{name}{end}": kind for name, how in found.items() for end, kind in how.types.items()}

        def first(p: Any) -> list[Any]:
            values = rule.init(p)
            step = jnp.int32(0)
            return [array for name, how in found.items() for array in how.write(values[name], step)]

        supply = iter(self.draft.keep(t.parameter, number, types, first, self.place(t)))
        return {name: Slot(how, tuple(next(supply) for _ in how.types)) for name, how in found.items()}


def _together(rule: Any, trained: Sequence[Trained]) -> list[list[Trained]]:
    """Which parameters a rule takes at once."""
    if rule.type is UpdateType.ACROSS:
        return [list(trained)] if trained else []
    return [[t] for t in trained]
