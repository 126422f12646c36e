"""Which optimizer, with which hyperparameters and rules, updates which parameter.

>>> import jax.numpy as jnp, onward as ow
>>> params = {"body": {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}, "head": jnp.ones(2)}
>>> optimizer = ow.AdamW(1e-3, groups=[ow.Group("*/b", weight_decay=0.0), ow.Group("head", ow.SGD(0.1))])
>>> program = optimizer.minimize(lambda p: jnp.sum(p["body"]["w"] @ p["body"]["b"] * p["head"]), params)
>>> [v.name for v in program.hyperparameters if "/" in v.name]
['b/weight_decay', 'head/learning_rate']
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np

from onward.core.errors import ArgumentError, GraphError, HyperparameterError, UnknownNameError
from onward.core.jaxprs.equations import Type
from onward.core.names import Names
from onward.core.program import Program, Variable
from onward.core.structure import Signature, describe, expect_flag, is_word
from onward.core.walk import Where, name_of, select
from onward.derive.rule import GradientRule, ParameterRule, Rule
from onward.derive.update.apart import Apart
from onward.derive.update.precision import KeptSlot, check_form, dtype_word, is_low, real_of, slots_of
from onward.derive.update.rule_lists import choices, distinct, in_order, shown_rules

_LOW_PRECISION = ("master", "stochastic", "nearest")


class OptimizerRule(Rule):
    """The data of an optimizer: its own rule, the rules around it, and the groups it updates otherwise.

    ``Optimizer``, which every optimizer inherits, derives Programs with it, and explains the fields.
    """

    own_decay: ClassVar[str] = "decoupled"  # how a field ``weight_decay`` acts, in a word for the plan
    apart: ClassVar[Apart | None] = None  # the update of all parameters, where one function makes it
    rules: Sequence[Rule] = field(default=(), kw_only=True)
    groups: Sequence[Group] = field(default=(), kw_only=True)
    slot_dtype: str | None = field(default=None, kw_only=True)
    low_precision: str = field(default="master", kw_only=True)
    maximize: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        groups = self.groups if isinstance(self.groups, list | tuple) else (self.groups,)
        for group in groups:
            if not isinstance(group, Group):
                raise HyperparameterError(
                    f"groups holds {group!r}; expected groups, such as [Group('*/b', learning_rate=0.1)]."
                )
        object.__setattr__(self, "rules", shown_rules(self.rules))
        object.__setattr__(self, "groups", tuple(groups))
        for group in groups:
            group.of(self)  # refuses what the optimizer does not have
        object.__setattr__(self, "slot_dtype", dtype_word(self.slot_dtype))
        check_form(type(self).__name__, self.slot_dtype)
        expect_flag(self.maximize, f"{type(self).__name__}: maximize")
        if not is_word(self.low_precision, _LOW_PRECISION):
            raise HyperparameterError(
                f"{type(self).__name__}: low_precision is {self.low_precision!r}; expected 'master', "
                "'stochastic' or 'nearest'."
            )

    def update(self, parameter: Any, gradient: Any, slots: Any, /) -> tuple[Any, Any]:
        """The next parameter and the next slots.

        Every hyperparameter is the array of this step, such as ``self.learning_rate``, and ``self.step`` the
        number of updates made before it.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how to update a parameter")

    def route(self, parameter: Variable) -> OptimizerRule:
        """The optimizer of one parameter, where a rule is not fit for all of them; this one by default."""
        return self

    def told(self, parameters: Sequence[Variable], signature: Signature | None) -> OptimizerRule:
        """The optimizer that knows its parameters and their containers; itself unless it has to know."""
        return self


class Group:
    """Parameters that are updated in a way of their own.

    Args:
        where: the parameters, by name, pattern (``"layers/*/b"``) or predicate of a Variable; or several.
        optimizer: what updates them, in place of the optimizer that the group is given to; with rules of its
            own, and none unless it is given some.
        name: what the names of its hyperparameters begin with; the pattern without wildcards unless given.
        frozen: leave the parameters as they are; no gradient of them is computed.
        changes: other values for fields of the optimizer, such as ``learning_rate=1e-4`` or ``rules=()``.

    Raises:
        HyperparameterError: a field that the optimizer does not have, or a value out of its range.

    Example:
        >>> import onward as ow
        >>> ow.Group("encoder/*", learning_rate=1e-5)
        Group('encoder/*', learning_rate=1e-05)
    """

    def __init__(
        self,
        where: Where | Iterable[Where],
        optimizer: OptimizerRule | None = None,
        *,
        name: str | None = None,
        frozen: bool = False,
        **changes: Any,
    ) -> None:
        if "groups" in changes or (frozen and (optimizer or changes)) or (optimizer and changes):
            raise HyperparameterError(
                f"Group {where!r} was given more than one of: an optimizer, other values for fields of the "
                "optimizer, frozen=True. Give one of them, and no groups inside a group."
            )
        if optimizer is not None and (isinstance(optimizer, type) or not hasattr(optimizer, "minimize")):
            raise HyperparameterError(
                f"Group {where!r} was given {describe(optimizer)}; expected an optimizer, such as SGD(0.1)."
            )
        if optimizer is not None and optimizer.groups:
            raise HyperparameterError(
                f"Group {where!r} was given an optimizer with groups of its own. Give all groups to the one "
                "optimizer that minimizes."
            )
        self.where, self.optimizer, self.frozen, self.changes = (
            choices("A group", where),
            optimizer,
            frozen,
            changes,
        )
        self.name = name or _plain(self.where[0])

    def of(self, optimizer: OptimizerRule) -> OptimizerRule:
        """The optimizer of these parameters, where that of all the others is given."""
        return self.optimizer or replace(optimizer, groups=(), **self.changes)

    def __repr__(self) -> str:
        words = [name_of(choice) or getattr(choice, "__name__", choice) for choice in self.where]
        parts = [repr(words[0] if len(words) == 1 else words)]
        parts += [repr(self.optimizer)] if self.optimizer else []
        parts += ["frozen=True"] if self.frozen else []
        return f"Group({', '.join([*parts, *(f'{k}={v!r}' for k, v in self.changes.items())])})"


@dataclass(frozen=True, eq=False)
class Route:
    """One optimizer on the way to a parameter.

    Attributes:
        name: what the names of its hyperparameters begin with; empty for the optimizer that minimizes.
        optimizer: what updates; its own ``groups`` are of no account.
        base: the route whose hyperparameters it shares where the values are the same.
        frozen: whether the parameters stay as they are.
    """

    name: str
    optimizer: OptimizerRule
    base: Route | None = None
    frozen: bool = False


class Routing:
    """For each parameter, by name, its route; and where the rules apply.

    ``names`` says for what stands in for a parameter (rows of it, say) which parameter that is. ``real`` is
    the dtype of the hyperparameters: float32, or float64 where a parameter is as precise.
    """

    def __init__(
        self,
        optimizer: OptimizerRule,
        routes: Mapping[str, Route],
        chosen: Sequence[tuple[Rule, frozenset[str]]],
        names: Mapping[str, str],
        real: np.dtype[Any],
    ) -> None:
        self.optimizer, self.real = optimizer, real
        self._routes, self._chosen, self._names = routes, chosen, names

    @classmethod
    def of(
        cls, optimizer: OptimizerRule, parameters: Sequence[Variable], program: Program | None = None
    ) -> Routing:
        """The routes of these parameters, all that there are; with the Program that is to be updated.

        Raises:
            UnknownNameError: the pattern of a group or rule that no parameter matches.
            HyperparameterError: two groups for one parameter.
        """
        if not hasattr(type(optimizer), "minimize"):
            raise ArgumentError(f"{describe(optimizer)} is not an optimizer; expected one like Adam(1e-3).")
        routes: dict[str, Route] = {}
        sent: list[tuple[tuple[Route, OptimizerRule], Route]] = []
        main = Route("", optimizer)
        grouped = _grouped(optimizer.groups, parameters)
        ways = {
            g: Route(g.name, g.of(optimizer), None if g.optimizer else main, g.frozen)
            for g in optimizer.groups
        }
        for p in parameters:
            first = ways[grouped[p.name]] if p.name in grouped else main
            routes[p.name] = _onward(first, p, sent)
        if program is not None:
            routes = _told(routes, program)
        used = dict.fromkeys(routes.values())
        rules = distinct([rule for route in used for rule in route.optimizer.rules])
        chosen = [(rule, _names_where(rule, parameters)) for rule in rules]
        routing = cls(optimizer, routes, chosen, {}, real_of(parameters))
        for rule, names in chosen:
            if not any(routing.applies(rule, p) for p in parameters):
                raise UnknownNameError(
                    f"{rule!r} picks {', '.join(map(repr, sorted(names)[:5]))}, which the optimizer or group "
                    "that it is given to does not update. Give it to the one that does."
                )
        return routing

    def standing_for(self, names: Mapping[str, str]) -> Routing:
        """The same, that knows which parameter is meant by other names."""
        return Routing(self.optimizer, self._routes, self._chosen, names, self.real)

    def __getitem__(self, parameter: Variable) -> Route:
        """The route of a parameter, or of what stands in for one."""
        return self._routes[self.meant(parameter)]

    def meant(self, parameter: Variable) -> str:
        """The name of a parameter, or of the one that this stands in for."""
        return self._names.get(parameter.name, parameter.name)

    def __iter__(self) -> Iterator[Route]:
        """Every route once."""
        return iter(dict.fromkeys(self._routes.values()))

    def all_rules(self) -> list[Any]:
        """Everything that acts in an update: optimizers and rules."""
        optimizers = [route.optimizer for route in self.routes]
        return [*self.rules(GradientRule), *optimizers, *self.rules(ParameterRule)]

    def expect_gradients_only(self, why_not: str) -> None:
        """Raise ``GraphError`` for what evaluates the loss in an update, with the reason why it cannot."""
        for rule in self.all_rules():
            if rule.evaluates_loss:
                raise GraphError(f"{type(rule).__name__} evaluates the loss {why_not}")

    @property
    def routes(self) -> list[Route]:
        """The routes of parameters that are updated."""
        return [route for route in self if not route.frozen]

    def applies(self, rule: Rule, parameter: Variable) -> bool:
        """Whether a rule is about this parameter."""
        name = self.meant(parameter)
        if not any(rule == other for other in self._routes[name].optimizer.rules):
            return False
        return any(rule == other and name in names for other, names in self._chosen)

    def slots(self, parameter: Variable) -> dict[str, Type]:
        """The types of the arrays that are kept for a parameter between steps, by name."""
        optimizer = self[parameter].optimizer
        kept = [slots_of(r, parameter, None) for r in self._applied(GradientRule, parameter)]
        if is_low(parameter.dtype) and optimizer.low_precision == "master":
            kept.append({"rest": KeptSlot(Type(parameter.shape, np.dtype(np.float32)))})
        kept.append(self._own_slots(optimizer, parameter))
        kept += [slots_of(r, parameter, None) for r in self._applied(ParameterRule, parameter)]
        names = Names()
        return {
            names.new(f"{parameter.name}/{name}{end}"): kind
            for own in kept
            for name, how in own.items()
            for end, kind in how.types.items()
        }

    def _own_slots(self, optimizer: OptimizerRule, parameter: Variable) -> dict[str, KeptSlot]:
        """The slots that an optimizer keeps for a parameter, by name."""
        if optimizer.apart is None:
            return slots_of(optimizer, parameter, optimizer.slot_dtype)
        own = optimizer.apart.own(optimizer.apart.parameters.index(self.meant(parameter)))
        return {leaf.name: KeptSlot(leaf.type) for leaf in own}

    def _applied(self, kind: type[Rule], parameter: Variable) -> list[Any]:
        """The rules of this kind that are about a parameter, in order."""
        return [rule for rule in self.rules(kind) if self.applies(rule, parameter)]

    def rules(self, kind: type[Rule]) -> list[Any]:
        """The gradient rules or the parameter rules of all routes, each once, in an order that suits all."""
        return in_order([[r for r in route.optimizer.rules if isinstance(r, kind)] for route in self.routes])


def _told(routes: Mapping[str, Route], program: Program) -> dict[str, Route]:
    """The routes, their optimizers told which parameters of a Program are theirs."""
    chosen = {p.name for p, _ in program.gradients} or {p.name for p in program.parameters}
    trained = [p for p in program.parameters if p.name in chosen]
    told: dict[Route, Route] = {}
    for route in dict.fromkeys(routes.values()):
        mine = [p for p in trained if routes[p.name] is route]
        known = route.optimizer if route.frozen or not mine else route.optimizer.told(mine, program.signature)
        told[route] = route if known is route.optimizer else replace(route, optimizer=known)
    return {name: told[route] for name, route in routes.items()}


def _grouped(groups: Sequence[Group], parameters: Sequence[Variable]) -> dict[str, Group]:
    """The group of each parameter that is in one."""
    found: dict[str, Group] = {}
    for group in groups:
        for p in select(parameters, group.where, repr(group)):
            if p.name in found:
                raise HyperparameterError(
                    f"The parameter {p.name!r} is in two groups: {found[p.name]!r} and {group!r}. Narrow one "
                    "of the patterns, or give a predicate."
                )
            found[p.name] = group
    return found


def _onward(
    route: Route, parameter: Variable, known: list[tuple[tuple[Route, OptimizerRule], Route]]
) -> Route:
    """Where an optimizer sends a parameter on to, such as Muon a vector."""
    mine = route.optimizer
    other = mine.route(parameter)
    if other is mine or route.frozen:
        return route
    for (begin, given), found in known:
        if begin is route and given == other:
            return found
    name = f"{route.name}/{other.name}" if route.name else other.name
    sent_on = replace(
        other,
        rules=tuple(distinct((*mine.rules, *other.rules))),
        slot_dtype=other.slot_dtype or mine.slot_dtype,
        maximize=mine.maximize or other.maximize,
        low_precision=mine.low_precision if other.low_precision == "master" else other.low_precision,
    )
    known.append(((route, other), Route(name, sent_on)))
    return known[-1][1]


def _names_where(rule: Any, parameters: Sequence[Variable]) -> frozenset[str]:
    if rule.where is None:
        return frozenset(p.name for p in parameters)
    return frozenset(p.name for p in select(parameters, rule.where, type(rule).__name__))


def _plain(where: Where) -> str:
    """A name for a group, from the pattern that picks it."""
    name = name_of(where) or getattr(where, "__name__", "group").strip("<>")
    words = [word.strip("*?[]") for word in name.split("/")]
    return "/".join(word for word in words if word) or "group"


def own_fields(routes: Sequence[Route]) -> dict[Route, frozenset[str]]:
    """For each route the hyperparameters that are its own, not those of its base; a base before what shares.

    A base that updates nothing itself has those that others share.
    """
    shared = {route: _shared_fields(route) for route in routes}
    found: dict[Route, frozenset[str]] = {}
    for base in dict.fromkeys(route.base for route in routes if route.base is not None):
        found[base] = frozenset().union(*(shared[route] for route in routes if route.base is base))
    for route in routes:
        found[route] = frozenset(route.optimizer.hyperparameters) - shared[route]
    return found


def _shared_fields(route: Route) -> frozenset[str]:
    """The hyperparameters that a route has in common with its base."""
    if route.base is None:
        return frozenset()
    mine, theirs = route.optimizer.hyperparameters, route.base.optimizer.hyperparameters
    return frozenset(name for name, value in mine.items() if theirs.get(name) == value)
