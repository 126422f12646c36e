"""The ops of an update that was taken apart: one for each parameter, or one for all.

What all parameters share, such as a count, is replaced by an op of its own, which looks at no parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from onward.core.errors import GraphError
from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.equations import Type
from onward.core.marks import ADVANCE
from onward.core.program import Variable
from onward.core.words import Placement, UpdateType
from onward.derive.update.apart import Apart, Part, StateArray, cast
from onward.derive.update.groups import Route
from onward.derive.update.growing import Trained, Update


def follow(update: Update, route: Route, apart: Apart) -> None:
    """Add the ops and the state of one optimizer for the parameters that are here."""
    members = update.members(route)
    if apart.type is UpdateType.ACROSS and not members:
        return
    at = {name: i for i, name in enumerate(apart.parameters)}
    work = _OneAtWork(update, route, apart, {at[update.routing.meant(t.parameter)]: t for t in members})
    if apart.type is UpdateType.ACROSS:
        work.update_all()
        return
    if apart.advancing:
        work.advance()
    for i in work.members:
        work.update_one(i)


class _OneAtWork:
    """An update at work: the state that it reads, and what each position of its Body is here."""

    def __init__(self, update: Update, route: Route, apart: Apart, members: Mapping[int, Trained]) -> None:
        self.pass_, self.draft = update, update.draft
        self.route, self.apart, self.members = route, apart, members
        if apart.type is UpdateType.ACROSS and len(members) < len(apart.parameters):
            missing = next(name for i, name in enumerate(apart.parameters) if i not in members)
            raise GraphError(
                f"{route.optimizer.name} looks at all its parameters at once, and {missing!r} is not here. "
                "Keep all of them together."
            )
        self.env: dict[int, Variable] = {}
        for leaf in apart.shared:
            self.env[apart.at_leaf(leaf)] = self._shared(leaf)
        for i, t in members.items():
            self.env[i], self.env[apart.at_parameter(i)] = t.gradient, t.value
            self.env.update(zip(map(apart.at_leaf, apart.own(i)), self._kept(i, t), strict=True))
        known = {leaf.name: self.env[apart.at_leaf(leaf)] for leaf in apart.shared if leaf.changeable}
        update.values[route] = {**update.values[route], **known}

    def advance(self) -> None:
        """The op that replaces the state that all parameters share."""
        self._append(ADVANCE, self.apart.advances(), [], self.apart.advancing, UpdateType.BOOKKEEPING)

    def update_one(self, parameter: int) -> None:
        """The op that updates one parameter and its state."""
        t = self.members[parameter]
        part = self.apart.updates(parameter, t.place.shape)
        self._append(self.route.optimizer.name, part, [t], self.apart.own(parameter), self.apart.type)

    def update_all(self) -> None:
        """The op that updates all parameters and all of the state."""
        members = [self.members[i] for i in range(len(self.apart.parameters))]
        count = len(members)
        leaves = [*(leaf for i in range(count) for leaf in self.apart.own(i)), *self.apart.advancing]
        part = self.apart.run.restricted([*range(count), *(count + leaf.number for leaf in leaves)])
        self._append(self.route.optimizer.name, part, members, leaves, UpdateType.ACROSS)

    def _append(
        self,
        kind: str,
        part: Part,
        members: Sequence[Trained],
        leaves: Sequence[StateArray],
        update: UpdateType,
    ) -> None:
        """Add the op that updates parameters and replaces state; those that compute the same share a Body."""
        body, taken = part
        inputs = [self.env[i] for i in taken]
        wanted = [self.pass_.following(self.route.optimizer, t) for t in members]
        made = [self.draft.named(v.name, v) for v in wanted]
        old = [self.env[self.apart.at_leaf(leaf)] for leaf in leaves]
        gradients = [i for i, position in enumerate(taken) if position < len(self.apart.parameters)]
        fitted = _fitted(body, inputs, [*made, *old], gradients)
        known = self.draft.once((kind, fitted.signature), lambda: fitted)
        self.draft.add(kind, inputs, made, known, update, replaces=old)
        self.pass_.becomes(members, made)

    def _shared(self, leaf: StateArray) -> Variable:
        """A state Variable that belongs to no parameter."""
        body, taken = self.apart.begin.restricted([leaf.number])
        read = [self.members[i].parameter for i in taken]
        name = f"{self.route.name}/{leaf.name}" if self.route.name else leaf.name
        v = self.draft.carry(
            name,
            _fitted(body, read, [leaf.type], ()),
            "init" if read else "constant",
            self.pass_.placement if self.apart.type is UpdateType.ACROSS else Placement.REPLICATED,
            reads=read,
        )
        if leaf.changeable:
            self.draft.numbers.append(v)
        return v

    def _kept(self, parameter: int, t: Trained) -> list[Variable]:
        """The state Variables of one parameter."""
        own = self.apart.own(parameter)
        body, taken = self.apart.begins(parameter, self.apart.types[parameter].shape)
        whole = self.apart.types[parameter].shape

        def first(p: Any) -> list[Any]:
            laid, _ = self.apart.begins(parameter, p.shape)
            made: list[Any] = laid(*([p.astype(self.apart.types[parameter].dtype)] if taken else []))
            return made

        types = {
            leaf.name: leaf.type if leaf.type.shape != whole else leaf.type.update(shape=t.place.shape)
            for leaf in own
        }
        owner = ("apart", body.signature, tuple(types))
        return self.draft.keep(t.parameter, owner, types, first, self.pass_.place(t))


def _fitted(
    body: Body, inputs: Sequence[Variable], outputs: Sequence[Variable | Type], gradients: Sequence[int]
) -> Body:
    """The Body for Variables of other dtypes; a complex gradient is given as the direction uphill."""
    turned = [i for i in gradients if jnp.issubdtype(inputs[i].dtype, jnp.complexfloating)]
    dtypes = [v.dtype for v in inputs], [v.dtype for v in outputs]
    if not turned and dtypes == ([t.dtype for t in body.in_types], [t.dtype for t in body.out_types]):
        return body

    def run(*values: Any) -> list[Any]:
        given = [x.conj() if i in turned else x for i, x in enumerate(values)]
        return cast(body(*cast(given, body.in_types)), outputs)

    return body_of(run, *(v.aval for v in inputs))
