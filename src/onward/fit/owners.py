"""Whose a state Variable is, where several Programs keep their values in one Scope.

Parameters and other state of a network belong to all Programs, by name. What an optimizer keeps (learning
rate, step counter, slots) is its own: of two optimizers the first one that runs keeps the plain names, and
the names of the other one begin with the name of its cost.

>>> import jax.numpy as jnp, onward as ow
>>> def cost_a():
...     return ow.parameter("a", ()) * ow.data("x", ())
>>> def cost_b():
...     return ow.parameter("b", ()) * ow.data("x", ())
>>> owners = Owners()
>>> for cost in (cost_a, cost_b):
...     program = ow.SGD(0.1).minimize(ow.trace(cost))
...     print(list(owners.names(program, owner_of(program)).values()))
['a', 'learning_rate', 'step']
['b', 'cost_b/learning_rate', 'cost_b/step']
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from onward.core.errors import ArgumentError, StateError
from onward.core.names import Names
from onward.core.program import Program, Variable
from onward.core.words import Kind, Pass
from onward.define.lazy import LazyCall
from onward.derive.rule import Rule
from onward.execute.layout import Layout


@dataclass(frozen=True)
class Owner:
    """An optimizer at work: equal for Programs that are the same training, such as at another batch size.

    Attributes:
        cost: the name of the Program that is minimized.
        trained: the names of the parameters.
        shown: the optimizer in words.
        rules: the optimizer itself; None for one of a checkpoint, until it runs again.
    """

    cost: str
    trained: tuple[str, ...]
    shown: str
    rules: tuple[Rule, ...] | None = None

    def __str__(self) -> str:
        names = ", ".join(self.trained[:3]) + ", ..." * (len(self.trained) > 3)
        return f"{self.shown or 'the optimizer'} of {self.cost!r} (trains {names})"


_NUMBERED_ALIKE = (
    "{name!r} is that of {known!r} here, and {maker!r} is another layer, numbered alike because the two were "
    "traced apart. They would share it. Give layers names of their own, layer.fc(..., name='first'); or run "
    "or trace the two together, fetch=[one, two], before either of them alone."
)
NETWORK = Owner("", (), "", ())


def owner_of(program: Program) -> Owner | None:
    """The optimizer of a training Program; None where nothing is trained."""
    found = {p for p, _ in program.gradients} | program.next_state.keys()
    trained = tuple(v.name for v in program.state if v in found and v.kind is Kind.PARAMETER)
    steps = program.recipe.steps if program.recipe else ()
    given = (x for step in steps for x in (*step.arguments, *step.options.values()))
    rules = tuple(x for x in given if isinstance(x, Rule))
    shown = re.sub(" at 0x[0-9a-f]+", "", ", ".join(map(repr, rules)))
    return Owner(program.name, trained, shown, rules) if trained else None


class Owners:
    """The names that state Variables have in a Scope, and to whom each belongs."""

    def __init__(self) -> None:
        self._owned: dict[str, list[tuple[Owner, str]]] = {}
        self._stored: dict[Variable, str] = {}
        self._makers: dict[str, LazyCall] = {}

    def names(self, program: Program, owner: Owner | None) -> Mapping[Variable, str]:
        """The name of every state Variable of a Program.

        Args:
            program: a training Program, a part of one, or one that trains nothing.
            owner: the optimizer of the training Program.

        Raises:
            StateError: it reads what several optimizers keep, or what a checkpoint keeps for another one; or
                two unnamed layers would share a parameter.
        """
        new = [v for v in program.state if v not in self._stored]
        self._expect_makers(program, new)
        kept = kept_by_optimizer(program) if new else set()
        mine = owner and self._same(owner) if not kept.isdisjoint(new) else None
        for v in new:
            self._stored[v] = self._name(v.name, mine, program) if v in kept else self._claim(v.name, NETWORK)
        return {v: self._stored[v] for v in program.state}

    def name_of(self, v: Variable) -> str:
        """The name of one Variable.

        Raises:
            StateError: it may be that of an optimizer that did not run here yet.
        """
        owned = self._owned.get(v.name, [])
        if v not in self._stored and owned and any(owner is not NETWORK for owner, _ in owned):
            raise StateError(
                f"{v!r} is of a Program that did not run here yet, and {_listed(owned)}. Run the Program "
                "first; or say by its name which one is meant."
            )
        return self._stored.get(v, v.name)

    def expect_one(self, name: str) -> None:
        """Raise ``ArgumentError`` where several optimizers keep something that they call so."""
        owned = [pair for pair in self._owned.get(name, []) if pair[0] is not NETWORK]
        if len(owned) > 1:
            raise ArgumentError(
                f"{name!r} could be that of several optimizers: {_listed(owned)}. Say which one by "
                f"its Variable, session[program[{name!r}]] = value."
            )

    def _expect_makers(self, program: Program, new: list[Variable]) -> None:
        """Raise ``StateError`` where another layer was numbered alike, because it was traced apart."""
        makers = program.recipe.origin.makers if program.recipe else {}
        for v in new:
            if (maker := makers.get(v.name)) is None:
                continue
            known = self._makers.setdefault(v.name, maker)
            if not maker.may_be(known):
                raise StateError(_NUMBERED_ALIKE.format(name=v.name, known=known, maker=maker))

    def _name(self, name: str, owner: Owner | None, program: Program) -> str:
        """The name of what an optimizer keeps; who trains nothing reads that of the only one there is."""
        if owner is not None:
            return self._claim(name, owner)
        owned = [pair for pair in self._owned.get(name, []) if pair[0] is not NETWORK]
        if len(owned) > 1:
            owned = [pair for pair in owned if pair[0].cost == program.name] or owned
        if len(owned) > 1:
            raise StateError(
                f"{program.name!r} reads {name!r} and trains nothing itself, and {_listed(owned)}. Run it in "
                "a Session of its own, with the values that it should read."
            )
        return owned[0][1] if owned else name

    def _claim(self, name: str, owner: Owner) -> str:
        """The name under which an owner keeps what it calls so: the plain one if that is free."""
        owned = self._owned.setdefault(name, [])
        for other, stored in owned:
            if other == owner:
                return stored
        taken = {stored for pairs in self._owned.values() for _, stored in pairs}
        stored = Names(taken).new(f"{owner.cost}/{name}" if name in taken and owner.cost else name)
        owned.append((owner, stored))
        return stored

    # What a checkpoint says about it.

    def record(self) -> list[list[Any]]:
        """As JSON data, where several optimizers keep what has the same name; else nothing."""
        several = any(len(owned) > 1 for owned in self._owned.values())
        return [
            [name, stored, owner.cost, list(owner.trained), owner.shown]
            for name, owned in self._owned.items()
            for owner, stored in owned
            if several
        ]

    def restore(self, record: list[list[Any]]) -> None:
        """Let what a checkpoint recorded belong to the optimizers that it names."""
        for name, stored, cost, trained, shown in record:
            owner = Owner(cost, tuple(trained), shown, None if trained else ())
            owned = self._owned.setdefault(name, [])
            if not any(s == stored and replace(o, rules=owner.rules) == owner for o, s in owned):
                self._owned[name] = [*(pair for pair in owned if pair[1] != stored), (owner, stored)]
                self._stored.clear()

    def _same(self, owner: Owner) -> Owner:
        """The owner, having taken over what a checkpoint kept for it."""
        waiting = dict.fromkeys(other for other in self._everyone() if other.rules is None)
        if owner in self._everyone() or not waiting:
            return owner
        same = [o for o in waiting if (o.cost, o.trained) == (owner.cost, owner.trained)]
        same = [o for o in same if o.shown == owner.shown] or same
        if len(same) == 1:
            for owned in self._owned.values():
                owned[:] = [(owner if o == same[0] else o, stored) for o, stored in owned]
        elif touching := [o for o in waiting if not set(o.trained).isdisjoint(owner.trained)]:
            raise StateError(
                f"The checkpoint keeps values of {' and of '.join(map(str, touching))}, and none of them is "
                f"{owner}. Restore it for the same costs, parameters and optimizers; or give the parameters "
                "alone: session[name] = array."
            )
        return owner

    def _everyone(self) -> Iterator[Owner]:
        return (owner for owned in self._owned.values() for owner, _ in owned)


def kept_by_optimizer(program: Program) -> set[Variable]:
    """The state that the derived part of a Program keeps, but for what each device has of a parameter."""
    derived = (op for op in program.initializers if op.made_by in (Pass.UPDATE, Pass.COLLECTIVE))
    own = set(Layout.of(program).copies.values())
    return {v for op in derived for v in op.outputs if v.name not in own}


def _listed(owned: list[tuple[Owner, str]]) -> str:
    return " and ".join(f"{stored!r} is that of {owner}" for owner, stored in owned)
