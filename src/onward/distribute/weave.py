"""A Program as it grows by collective ops woven between the ops it has."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import jax

from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.equations import Type
from onward.core.names import Names
from onward.core.program import Op, Program, Variable
from onward.core.words import Kind, Pass, Placement


class Weave:
    """The ops so far, the state that was added, and names that are free."""

    def __init__(self, program: Program) -> None:
        self.source = program
        self.names = Names(program.variables)
        self.next_state: dict[Variable, Variable] = {}
        self._ops: list[Op] = []
        self._state: list[Variable] = []
        self._initializers: list[Op] = []
        self._made: dict[Hashable, Any] = {}

    @classmethod
    def after(cls, program: Program) -> Weave:
        """One that holds all ops of the Program already."""
        weave = cls(program)
        weave._ops.extend(program.ops)
        return weave

    def append(self, op: Op) -> None:
        """Add an op that is there already."""
        self._ops.append(op)

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What ``make`` returned the first time."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def collective(
        self, kind: str, inputs: Sequence[Variable], names: Sequence[str], body: Body
    ) -> list[Variable]:
        """Add an op that talks to the other devices; returns its outputs, named as these names say."""
        outputs = [
            Variable(self.names.new(name), tuple(t.shape), t.dtype)
            for name, t in zip(names, body.out_avals, strict=True)
        ]
        self._ops.append(Op(kind, tuple(inputs), tuple(outputs), body, Pass.COLLECTIVE))
        return outputs

    def keep(self, name: str, kind: Type, init: Callable[[Any], Any], like: Type) -> Variable:
        """Add a state Variable that each device has for itself; it begins as ``init`` of zeros says."""
        v = Variable(self.names.new(name), tuple(kind.shape), kind.dtype, Kind.STATE, Placement.PER_REPLICA)
        body, _ = body_of(lambda: [init(jax.numpy.zeros(like.shape, like.dtype))]).restricted([0])
        self._state.append(v)
        self._initializers.append(Op("init", (), (v,), body, Pass.COLLECTIVE))
        return v

    @property
    def ops(self) -> tuple[Op, ...]:
        """All ops so far."""
        return tuple(self._ops)

    def program(self, **changes: Any) -> Program:
        """The Program with these ops and this state."""
        return replace(
            self.source,
            ops=self.ops,
            state=(*self.source.state, *self._state),
            next_state={**self.source.next_state, **self.next_state},
            initializers=(*self.source.initializers, *self._initializers),
            **changes,
        )
