"""An update pass as it grows: its ops, the state that it adds, and names that are free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from onward.core.builder import given_way
from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.equations import Type
from onward.core.names import Names
from onward.core.program import Op, Program, Variable
from onward.core.walk import substitute
from onward.core.words import Kind, Pass, Placement, UpdateType
from onward.derive.rule import expect_held
from onward.derive.update.precision import widened


@dataclass(frozen=True)
class SlotPlace:
    """The placement of the state of a parameter; if sharded, its length over all parts end to end."""

    placement: Placement = Placement.REPLICATED
    length: int | None = None


class UpdateDraft:
    """The ops so far, the new state and its first values, and what replaces what."""

    def __init__(self, program: Program) -> None:
        self.source = program
        self.names = Names(v.name for v in (*program.inputs, *program.state, *program.constants))
        self.state: list[Variable] = []
        self.initializers: list[Op] = []
        self.next_state: dict[Variable, Variable] = {}
        self.ops: list[Op] = []
        self.bodies: dict[Any, tuple[Body, tuple[int, ...]]] = {}
        self.numbers: list[Variable] = []
        self.limits: dict[Variable, float] = {}

    def hyperparameter(self, name: str, value: Any, dtype: Any, limit: float | None) -> Variable:
        """A state Variable that people may change, below a limit if there is one.

        Raises:
            HyperparameterError: a number that the dtype cannot hold.
        """
        expect_held(name, value, dtype, limit)
        v = self.number(name, value, dtype)
        self.numbers.append(v)
        if limit is not None:
            self.limits[v] = limit
        return v

    def number(self, name: str, value: float, dtype: Any) -> Variable:
        """A state Variable that begins with this number."""
        v = Variable(self.names.new(name), (), np.dtype(dtype), Kind.STATE)
        self.state.append(v)
        body = body_of(lambda: [jnp.asarray(value, dtype)])
        self.initializers.append(update_op("constant", (), (v,), body))
        return v

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
            body = body_of(lambda *xs: list(function(*xs)), *(v.aval for v in inputs))
            self.bodies[key] = (body, ())
        outputs = [Variable(self.names.new(name), like.shape, like.dtype) for name, like in results]
        op = update_op(kind, inputs, tuple(outputs), self.bodies[key][0], UpdateType.ELEMENTWISE)
        self.ops.append(op)
        return outputs

    def keep(
        self,
        parameter: Variable,
        owner: Any,
        types: Mapping[str, Type],
        first: Callable[[Any], list[Any]],
        place: SlotPlace,
    ) -> list[Variable]:
        """State Variables that belong to a parameter, and the op that gives them their first values.

        Args:
            parameter: whose they are; their names begin with its name.
            owner: equal for what has equal first values.
            types: what they are, by the rest of their names.
            first: from the parameter to their first values.
            place: where they lie.
        """
        sharded = place.placement is Placement.SHARDED
        made = [
            Variable(
                self.names.new(f"{parameter.name}/{name}"),
                kind.shape,
                kind.dtype,
                Kind.STATE,
                Placement.REPLICATED if sharded and not kind.shape else place.placement,
            )
            for name, kind in types.items()
        ]
        if not made:
            return []
        whole = parameter.aval
        length = place.length if sharded else None
        key = (owner, whole.shape, whole.dtype, length)
        if key not in self.bodies:
            self.bodies[key] = tight(body_of(_begin(first, length), whole))
        body, read = self.bodies[key]
        self.state.extend(made)
        self.initializers.append(update_op("init", (parameter,) if read else (), tuple(made), body))
        return made

    @property
    def so_far(self) -> Program:
        """The Program with the ops so far, and nothing that replaces state."""
        return replace(
            self.source,
            state=(*self.source.state, *self.state),
            ops=(*self.source.ops, *self.ops),
        )

    def program(self) -> Program:
        """The Program with the update pass at its end.

        State keeps its name whatever the network computes: an activation of the same name gives way.
        """
        longer = replace(
            self.so_far,
            next_state={**self.source.next_state, **self.next_state},
            initializers=(*self.source.initializers, *self.initializers),
            hyperparameters=(*self.source.hyperparameters, *self.numbers),
            limits={**self.source.limits, **self.limits},
        )
        mine = {v.name for v in (*self.state, *(v for op in self.ops for v in op.outputs))}
        renamed = given_way(self.source, mine)
        return substitute(longer, renamed) if renamed else longer


def _begin(first: Callable[[Any], list[Any]], length: int | None) -> Callable[[Any], list[Any]]:
    """The first values from a parameter; of all parts of it end to end, where a length is given."""

    def begin(p: Any) -> list[Any]:
        p = widened(p)
        return first(p if length is None else jnp.pad(p.ravel(), (0, length - p.size)))

    return begin


def tight(body: Body) -> tuple[Body, tuple[int, ...]]:
    """The body without the inputs it does not read, and the positions of those it does."""
    return body.restricted(range(len(body.out_avals)))


def update_op(
    kind: str,
    inputs: tuple[Variable, ...],
    outputs: tuple[Variable, ...],
    body: Body,
    update: UpdateType | None = None,
) -> Op:
    """An op of the update pass."""
    return Op(kind, inputs, outputs, body, Pass.UPDATE, update=update)
