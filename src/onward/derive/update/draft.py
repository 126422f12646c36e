"""An update pass as it grows: its ops, the state that it adds, and names that are free."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from onward.core.builder import Builder, given_way
from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.equations import Type
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


class UpdateDraft(Builder):
    """The ops and the state of an update pass, behind those of the source, and what replaces what."""

    def __init__(self, program: Program) -> None:
        taken = (v.name for v in (*program.inputs, *program.state, *program.constants))
        super().__init__(program, taken=taken, made_by=Pass.UPDATE)
        self.numbers: list[Variable] = []
        self.limits: dict[Variable, float] = {}

    def hyperparameter(self, name: str, value: Any, dtype: Any, limit: float | None) -> Variable:
        """A state Variable that people may change, below a limit if there is one.

        Raises:
            HyperparameterError: a number that the dtype cannot hold.
        """
        expect_held(name, value, dtype, limit)
        v = self.carry(name, lambda: jnp.asarray(value, dtype))
        self.numbers.append(v)
        if limit is not None:
            self.limits[v] = limit
        return v

    def made(
        self,
        kind: str,
        inputs: tuple[Variable, ...],
        results: Sequence[tuple[str, Variable]],
        function: Callable[..., Any],
    ) -> tuple[Variable, ...]:
        """An op that is not a rule's; the results are named so, and typed as these Variables are."""
        key = (kind, tuple((v.shape, v.dtype) for v in (*inputs, *(like for _, like in results))))
        body = self.once(key, lambda: body_of(lambda *xs: list(function(*xs)), *(v.aval for v in inputs)))
        return self.add(kind, inputs, [name for name, _ in results], body, UpdateType.ELEMENTWISE)

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
            replace(
                self.named(f"{parameter.name}/{name}", kind, Kind.STATE),
                placement=Placement.REPLICATED if sharded and not kind.shape else place.placement,
            )
            for name, kind in types.items()
        ]
        if not made:
            return []
        whole = parameter.aval
        length = place.length if sharded else None
        key = (owner, whole.shape, whole.dtype, length)
        body, read = self.once(key, lambda: tight(body_of(_begin(first, length), whole)))
        self.state.extend(made)
        self.initializers.append(Op("init", (parameter,) if read else (), tuple(made), body, Pass.UPDATE))
        return made

    @property
    def so_far(self) -> Program:
        """The Program with the ops so far, and nothing that replaces state."""
        return replace(
            self.source,
            state=(*self.source.state, *self.state),
            ops=(*self.source.ops, *self.ops),
        )

    def program(self, **changes: Any) -> Program:
        """The Program with the update pass at its end.

        State keeps its name whatever the network computes: an activation of the same name gives way.
        """
        longer = replace(
            self.so_far,
            next_state={**self.source.next_state, **self.next_state},
            initializers=(*self.source.initializers, *self.initializers),
            hyperparameters=(*self.source.hyperparameters, *self.numbers),
            limits={**self.source.limits, **self.limits},
            **changes,
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
