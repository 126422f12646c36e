"""One update op: what a rule does with parameters, gradients, slots and hyperparameters, as a body."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
import numpy as np

from onward.core.errors import GraphError
from onward.core.jaxprs.body import Body, Collected, body_of
from onward.core.jaxprs.equations import Type
from onward.core.program import Variable
from onward.core.structure import describe
from onward.core.words import UpdateType
from onward.derive.rule import GradientRule, Piece, Pieces, R, RuleBeside, at_step
from onward.derive.update.loss import LossFunction
from onward.derive.update.precision import KeptSlot, real_of, widened


@dataclass(frozen=True)
class Slot:
    """A slot of one parameter: how it is kept, and the state Variables that hold it."""

    how: KeptSlot
    arrays: tuple[Variable, ...]

    def read(self, env: Mapping[Variable, Any]) -> Any:
        """The slot as the rule takes it."""
        return self.how.read([env[v] for v in self.arrays])


@dataclass(frozen=True)
class Hyperparameters:
    """The hyperparameters that a rule reads: its own, ``step`` among them, and the optimizer's."""

    own: Mapping[str, Variable]
    optimizer: Mapping[str, Variable]

    @property
    def variables(self) -> tuple[Variable, ...]:
        """All of them, in the order of the inputs; one may occur twice."""
        return (*{**self.optimizer, **self.own}.values(), *self.optimizer.values())

    def seen_by(self, rule: R, env: Mapping[Variable, Any], parameters: Sequence[Variable]) -> R:
        """The rule with their values: as precise as the parameters, the step an integer."""
        real = real_of(parameters)
        cast = {
            v: x.astype(real) if jnp.issubdtype(x.dtype, np.floating) else x
            for v, x in ((v, env[v]) for v in dict.fromkeys(self.variables))
        }
        given: dict[str, Any] = {name: cast[v] for name, v in self.own.items()}
        if isinstance(rule, RuleBeside):
            given["optimizer"] = {k: cast[v] for k, v in self.optimizer.items() if k != "step"}
        return at_step(rule, given)


@dataclass(frozen=True)
class Shared:
    """Information for a rule across parameters about the parameters that are elsewhere.

    Attributes:
        pieces: for each array that it is given, what it is.
        sums: what is added up over all pieces.
    """

    pieces: tuple[Piece, ...]
    sums: tuple[Variable, ...]


@dataclass(frozen=True, eq=False)
class Act:
    """A rule at work on one parameter, or on several at once.

    Attributes:
        rule: the optimizer, gradient rule or parameter rule.
        columns: what it takes, by the names of its arguments, parameter for parameter.
        slots: for each parameter its slots by name.
        values: the hyperparameters that it reads.
        results: what it makes of each parameter, by name and type.
        loss: for a rule that evaluates the loss again.
        shared: for a rule that is given pieces of some of the parameters; None: it has all.
    """

    rule: Any
    columns: Mapping[str, Sequence[Variable]]
    slots: Sequence[Mapping[str, Slot]]
    values: Hyperparameters
    results: Sequence[Variable]
    loss: LossFunction | None
    shared: Shared | None = None

    @cached_property
    def inputs(self) -> tuple[Variable, ...]:
        """All that the op may read, each once."""
        given = [v for column in self.columns.values() for v in column]
        given += [v for slots in self.slots for slot in slots.values() for v in slot.arrays]
        again = self.loss.reads if self.loss else ()
        sums = self.shared.sums if self.shared else ()
        return tuple(dict.fromkeys((*given, *self.values.variables, *again, *sums)))

    @cached_property
    def key(self) -> Any:
        """Equal for acts that have equal bodies."""
        at = {v: i for i, v in enumerate(self.inputs)}
        columns = tuple((name, tuple(at[v] for v in column)) for name, column in self.columns.items())
        slots = tuple(
            (name, slot.how.form, tuple(at[v] for v in slot.arrays))
            for slots in self.slots
            for name, slot in slots.items()
        )
        values = (*self.values.own, *self.values.optimizer, *(at[v] for v in self.values.variables))
        types = tuple((v.shape, v.dtype) for v in (*self.inputs, *self.results))
        again = tuple(at[v] for v in self.loss.reads) if self.loss else ()
        shared = (self.shared.pieces, tuple(at[v] for v in self.shared.sums)) if self.shared else None
        return id(self.rule), columns, slots, values, types, again, shared

    def body(self) -> Body:
        """The rule as a function of the inputs: the results, then what the slots become."""
        return body_of(self._run, *(v.aval for v in self.inputs))

    def tight(self) -> tuple[Body, tuple[int, ...]]:
        """The body without the inputs that it does not read, and the positions of those it does."""
        body = self.body()
        body, taken = body.restricted(range(len(body.out_avals)))
        gradients = tuple(self.columns.get("gradient", ()))
        if (
            self.shared is None
            and self.rule.any_layout
            and tuple(self.inputs[i] for i in taken)[: len(gradients)] == gradients
        ):
            body.collected = Collected(len(gradients), self._of_other_arrays)
        return body, taken

    def _of_other_arrays(self, types: Sequence[Type]) -> Body:
        """The body for gradients of these types, which hold the same numbers."""
        parameters, gradients = ([Variable(n, t.shape, t.dtype) for t in types] for n in self.columns)
        columns = dict(zip(self.columns, (parameters, gradients), strict=True))
        act = Act(self.rule, columns, [{}] * len(types), self.values, gradients, None)
        return act.tight()[0]

    def _run(self, *inputs: Any) -> list[Any]:
        env = dict(zip(self.inputs, inputs, strict=True))
        columns = [self._column(name, column, env) for name, column in self.columns.items()]
        slots = [{name: slot.read(env) for name, slot in own.items()} for own in self.slots]
        rule = self.values.seen_by(self.rule, env, self.columns["parameter"])
        extra = (self.loss.at(env),) if self.loss else ()
        if self.rule.type is UpdateType.ACROSS:
            given = (*map(tuple, columns), tuple(slots))
            if self.shared is None:
                found = rule.update(*given, *extra)
            else:
                sums = tuple(env[v] for v in self.shared.sums)
                found = rule.update_share(*given, Pieces(self.shared.pieces, sums))
            made, following = _pair(self.rule, found, len(slots))
        else:
            found = rule.update(*(column[0] for column in columns), slots[0])
            one, kept = _pair(self.rule, found)
            made, following = (one,), (kept,)
        for own, new in zip(self.slots, following, strict=True):
            _expect_slots(self.rule, own, new)
        named = zip(made, self.results, self.columns["parameter"], strict=True)
        results = [self._result(x, v, p.name) for x, v, p in named]
        return results + [
            array
            for own, new in zip(self.slots, following, strict=True)
            for name, slot in own.items()
            for array in slot.how.write(self._fitting(new[name], slot), env[self.values.own["step"]])
        ]

    def _column(self, name: str, column: Sequence[Variable], env: Mapping[Variable, Any]) -> list[Any]:
        """The arguments that the rule takes under this name, one per parameter; a gradient points uphill."""
        found = [widened(env[v]) for v in column]
        return list(map(uphill, found)) if name == "gradient" else found

    def _result(self, value: Any, v: Variable, parameter: str) -> Any:
        """The rule's result in the required dtype; its shape must be the right one already."""
        is_gradient = isinstance(self.rule, GradientRule)
        what = "the gradient" if is_gradient else "the next value"
        _expect_shape(self.rule, value, v.shape, f"{what} of {parameter!r}")
        return jnp.asarray(uphill(value) if is_gradient else value, v.dtype)

    def _fitting(self, value: Any, slot: Slot) -> Any:
        _expect_shape(self.rule, value, slot.how.used.shape, f"the next value of {slot.arrays[0].name!r}")
        return jnp.asarray(value, slot.how.used.dtype)


def _pair(rule: Any, found: Any, parameters: int | None = None) -> tuple[Any, Any]:
    """Check and return the two results of an update, each with one entry per parameter if it looks across."""
    what = "the gradient" if isinstance(rule, GradientRule) else "the next parameter"
    many = "" if parameters is None else f", each a tuple of {parameters}, one for each parameter"
    fits = isinstance(found, tuple | list) and len(found) == 2
    if fits and parameters is not None:
        fits = all(isinstance(part, tuple | list) and len(part) == parameters for part in found)
    if not fits:
        raise GraphError(
            f"{type(rule).__name__}.update returned {describe(found)}; expected two things: {what} and the "
            f"next slots{many}. Without slots: return {what.rsplit(maxsplit=1)[-1]}, slots."
        )
    return found[0], found[1]


def _expect_slots(rule: Any, own: Mapping[str, Slot], new: Mapping[str, Any]) -> None:
    if not isinstance(new, Mapping):
        raise GraphError(
            f"{type(rule).__name__}.update returned {describe(new)} as the next slots; expected a dict by "
            f"name, with {sorted(own) or 'none'}: return them as they came, or {{'name': array}}."
        )
    if set(new) != set(own):
        raise GraphError(
            f"{type(rule).__name__} returned the slots {sorted(new)}, and its init made {sorted(own)}. "
            "Return each slot that init made, and no other."
        )


def _expect_shape(rule: Any, value: Any, shape: tuple[int, ...], what: str) -> None:
    if jnp.shape(value) != shape:
        raise GraphError(
            f"{rule.name} returned shape {jnp.shape(value)} as {what}, which is {list(shape)}. An update "
            "keeps the shape."
        )


def uphill(gradient: Any) -> Any:
    """A gradient of JAX as rules see it, a complex one as the direction uphill; the same again leads back."""
    return jnp.conj(gradient) if jnp.iscomplexobj(gradient) else gradient
