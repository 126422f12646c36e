"""The plan of an optimizer for each parameter of a Program, shown before anything runs.

>>> import jax.numpy as jnp, onward as ow
>>> params = {"w": jnp.ones((64, 32)), "b": jnp.ones(32)}
>>> optimizer = ow.Adam(1e-3, rules=[ow.ClipByGlobalNorm(1.0), ow.WeightDecay(0.01, where="w")])
>>> forward = ow.trace(lambda p, x: jnp.mean(x @ p["w"] + p["b"]), params, jnp.ones((8, 64)), name="loss")
>>> print(optimizer.plan(forward))
Plan of Adam for loss: 2 parameters, 8.1 KiB, with slots of 16.2 KiB
<BLANKLINE>
parameter  type        by    learning rate  decay           keeps                       bytes
b          f32[32]     adam  0.001                          mean f32, variance f32      256 B
w          f32[64,32]  adam  0.001          0.01 decoupled  mean f32, variance f32   16.0 KiB
<BLANKLINE>
1. clip_by_global_norm  max_norm=1.0, across parameters on all 2
2. adam                 learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-08, elementwise on all 2
3. weight_decay         rate=0.01, mode='decoupled', elementwise on w
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from onward.core.check import expect_program
from onward.core.columns import columns
from onward.core.errors import UnknownNameError, nearest
from onward.core.program import Program, Variable
from onward.core.show import human_bytes, nbytes, short_type
from onward.derive.rule import GradientRule, ParameterRule, Rule
from onward.derive.rules.decay import L1, L2, WeightDecay
from onward.derive.update.groups import OptimizerRule, Route, Routing
from onward.derive.update.precision import is_low

_ROUNDING = {"stochastic": "rounded at random", "nearest": "rounded to the nearest"}
_AROUND = ("rules", "groups", "slot_dtype", "low_precision", "maximize", "where")


@dataclass(frozen=True)
class Destination:
    """The treatment that an optimizer plans for one parameter.

    Attributes:
        parameter: its Variable.
        by: the type of its update op; ``frozen`` where it has none.
        learning_rate: a number, or the schedule; None where the optimizer has none.
        decay: the weight decay and penalties that apply, in words.
        slots: what is kept for it, by name.
        rounding: how its next value is rounded, where it is of low precision and nothing keeps the rest.
    """

    parameter: Variable
    by: str
    learning_rate: Any
    decay: str
    slots: dict[str, Variable]
    rounding: str = ""

    @property
    def slot_bytes(self) -> int:
        """The bytes of its slots."""
        return sum(map(nbytes, self.slots.values()))

    @property
    def cells(self) -> tuple[str, ...]:
        """Its row in the printout."""
        p, kept = self.parameter, self.slots.items()
        rate = "" if self.learning_rate is None else _word(self.learning_rate)
        slots = [f"{name.removeprefix(p.name + '/')} {_form(v, p)}" for name, v in kept]
        keeps = ", ".join([*slots, self.rounding] if self.rounding else slots)
        return (p.name, short_type(p), self.by, rate, self.decay, keeps, human_bytes(self.slot_bytes))


@dataclass(frozen=True)
class UpdatePlan:
    """The route of every parameter, and the order of what acts on them.

    Attributes:
        optimizer: the name of the optimizer.
        program: the name of the Program.
        destinations: parameter by parameter.
        order: the rules and optimizers in the order in which they act, and the names of the parameters of
            each.
    """

    optimizer: str
    program: str
    destinations: tuple[Destination, ...]
    order: tuple[tuple[Rule, tuple[str, ...]], ...]

    def __getitem__(self, name: str) -> Destination:
        """The planned treatment of the parameter with this name.

        Raises:
            UnknownNameError: no parameter has this name.
        """
        found = {d.parameter.name: d for d in self.destinations}
        if name not in found:
            raise UnknownNameError(f"The plan has no parameter named {name!r}. {nearest(name, found)}")
        return found[name]

    def __str__(self) -> str:
        size = sum(nbytes(d.parameter) for d in self.destinations)
        slots = sum(d.slot_bytes for d in self.destinations)
        count = len(self.destinations)
        head = f"Plan of {self.optimizer} for {self.program}: {count} parameter{'' if count == 1 else 's'}, "
        head += f"{human_bytes(size)}, with slots of {human_bytes(slots)}"
        names = ("parameter", "type", "by", "learning rate", "decay", "keeps", "bytes")
        table = columns([names, *(d.cells for d in self.destinations)], right=[len(names) - 1])
        order = [
            (f"{i}. {rule.name}", ", ".join([*_values(rule), f"{rule.type} on {self._share(names)}"]))
            for i, (rule, names) in enumerate(self.order, 1)
        ]
        return f"{head}\n\n{table}\n\n{columns(order)}"

    def _share(self, names: tuple[str, ...]) -> str:
        if len(names) == 1:
            return names[0]
        return f"all {len(names)}" if len(names) == len(self.destinations) else f"{len(names)}"


def plan_update(program: Program, optimizer: OptimizerRule) -> UpdatePlan:
    """The plan of an optimizer for the parameters of a Program; see ``Optimizer.plan``."""
    expect_program(program, "plan")
    routing = Routing.of(optimizer, program.parameters, program)
    trained = [p for p, _ in program.gradients] or list(program.parameters)
    return UpdatePlan(
        optimizer.title,
        program.name,
        tuple(_destination(p, routing, p in trained) for p in program.parameters),
        tuple(_order(routing, [p for p in trained if not routing[p].frozen])),
    )


def _destination(p: Variable, routing: Routing, trained: bool) -> Destination:
    route = routing[p]
    if route.frozen or not trained:
        return Destination(p, "frozen", None, "", {})
    slots = {
        name: Variable(name, tuple(kind.shape), np.dtype(kind.dtype))
        for name, kind in routing.slots(p).items()
    }
    named = route.name not in ("", route.optimizer.name)
    by = f"{route.optimizer.name} ({route.name})" if named else route.optimizer.name
    by += ", maximizes" * route.optimizer.maximize
    rate = route.optimizer.hyperparameters.get("learning_rate")
    rounding = _ROUNDING.get(route.optimizer.low_precision, "") if is_low(p.dtype) else ""
    return Destination(p, by, rate, _decay(p, route, routing), slots, rounding)


def _decay(p: Variable, route: Route, routing: Routing) -> str:
    """The weight decay of the optimizer itself, and of the rules that apply."""
    own = route.optimizer.hyperparameters.get("weight_decay")
    found = [] if own is None else [f"{_word(own)} {route.optimizer.own_decay}"]
    for rule in route.optimizer.rules:
        if isinstance(rule, L1 | L2 | WeightDecay) and routing.applies(rule, p):
            found.append(f"{_word(rule.rate)} {getattr(rule, 'mode', rule.name)}")
    return ", ".join(found)


def _order(routing: Routing, trained: Sequence[Variable]) -> list[tuple[Rule, tuple[str, ...]]]:
    """The rules in the order in which they act, each with the names of its parameters."""
    found: list[tuple[Rule, tuple[str, ...]]] = []
    for rule in routing.rules(GradientRule):
        found.append((rule, tuple(p.name for p in trained if routing.applies(rule, p))))
    for route in routing.routes:
        found.append((route.optimizer, tuple(p.name for p in trained if routing[p] is route)))
    for rule in routing.rules(ParameterRule):
        found.append((rule, tuple(p.name for p in trained if routing.applies(rule, p))))
    return found


def _form(slot: Variable, p: Variable) -> str:
    """The dtype of a slot, and its shape where that is not the parameter's."""
    return short_type(replace(slot, shape=()) if slot.shape == p.shape else slot).removesuffix("[]")


def _values(rule: Rule) -> list[str]:
    """The fields of a rule with their values."""
    return [f"{f.name}={_word(getattr(rule, f.name))}" for f in fields(rule) if f.name not in _AROUND]


def _word(value: Any) -> str:
    """A value in few words; a function and an optimizer by its name."""
    if hasattr(value, "minimize"):
        return type(value).__name__
    if callable(value) and not hasattr(value, "__dataclass_fields__"):
        return str(getattr(value, "__name__", type(value).__name__)).strip("<>")
    return str(value) if isinstance(value, float | int) else repr(value)
