"""From forward + backward to the whole training Program: one update op for each gradient.

The hyperparameters of the optimizer become float32 state Variables, its slots state Variables named
``parameter/slot``, its schedules ops that read the step counter. Whatever is shared (counter,
schedules, hyperparameters) is made once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.errors import GraphError, HyperparameterError
from onward.core.jaxprs import Body, Type, body_of
from onward.core.lower import lower
from onward.core.names import Names
from onward.core.placement import expect_one_device
from onward.core.program import Op, Program, Variable
from onward.core.transform import transform
from onward.core.walk import prune, substitute
from onward.core.words import Kind, Pass, UpdateType
from onward.define.trace import explaining
from onward.derive.loss import Loss

if TYPE_CHECKING:
    from onward.derive.optimizer import Optimizer

_STEP = "step"


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


def with_update(program: Program, optimizer: Optimizer) -> Program:
    """The Program with the update pass, neither checked nor remembered; see ``append_update``."""
    if not program.gradients:
        raise GraphError(
            f"Program {program.name!r} has no gradients to update with. Derive the backward pass first: "
            "append_backward(program), or call optimizer.minimize."
        )
    pairs = [pair for pair in program.gradients if pair[0] not in program.next_state]
    if len(pairs) < len(program.gradients):
        raise GraphError(f"Program {program.name!r} updates its parameters already; minimize it only once.")
    update = _Update(program, optimizer)
    groups = [pairs] if optimizer.type is UpdateType.ACROSS else [[pair] for pair in pairs]
    for group in groups:
        update.append([p for p, _ in group], [g for _, g in group])
    return update.program()


@dataclass(frozen=True)
class _Group:
    """What one update op works on: positions in ``inputs``, so that equal groups share a body."""

    parameters: tuple[int, ...]
    gradients: tuple[int, ...]
    slots: tuple[tuple[tuple[str, int], ...], ...]
    hyperparameters: tuple[tuple[str, int], ...]
    types: tuple[tuple[tuple[int, ...], Any], ...]

    def read(
        self, values: Sequence[Any]
    ) -> tuple[list[Any], list[Any], list[dict[str, Any]], SimpleNamespace]:
        """Parameters, gradients, slots and hyperparameters among the values of the inputs."""
        return (
            [widened(values[i]) for i in self.parameters],
            [widened(_descent(values[i])) for i in self.gradients],
            [{name: values[i] for name, i in slots} for slots in self.slots],
            SimpleNamespace(**{name: self.number(values[i]) for name, i in self.hyperparameters}),
        )

    def number(self, value: Any) -> Any:
        """A hyperparameter as precise as the parameters; the step stays an integer."""
        dtypes = [self.types[i][1] for i in self.parameters]
        real = np.empty(0, jnp.result_type(np.float32, *dtypes)).real.dtype
        return value.astype(real) if jnp.issubdtype(value.dtype, np.floating) else value


def widened(value: Any) -> Any:
    """A value in the dtype in which rules compute: its own, at least float32."""
    return value.astype(jnp.promote_types(value.dtype, np.float32))


def _descent(gradient: Any) -> Any:
    """The gradient as rules take it: of a complex parameter the conjugate of JAX's, which points uphill."""
    return jnp.conj(gradient) if jnp.iscomplexobj(gradient) else gradient


class _Update:
    """The update pass as it grows: ops, new state, and what replaces what."""

    def __init__(self, program: Program, optimizer: Optimizer) -> None:
        self.source, self.optimizer = program, optimizer
        self.names = Names(v.name for v in (*program.inputs, *program.state, *program.constants))
        self.state: list[Variable] = []
        self.initializers: list[Op] = []
        self.next_state: dict[Variable, Variable] = {}
        self.ops: list[Op] = []
        self.bodies: dict[Any, tuple[Body, tuple[int, ...]]] = {}
        self.loss = _LossFunction(program) if optimizer.evaluates_loss else None
        fixed = {k: v for k, v in optimizer.hyperparameters.items() if not callable(v)}
        self.hyperparameters = {k: self.number(k, v, np.float32) for k, v in fixed.items()}
        self.values = {_STEP: self.count(), **self.hyperparameters}
        for name, schedule in optimizer.hyperparameters.items():
            if callable(schedule):
                self.values[name] = self.scheduled(name, schedule, self.values[_STEP])

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

    def append(self, parameters: Sequence[Variable], gradients: Sequence[Variable]) -> None:
        """One update op: of a single parameter, or of all for a rule across parameters."""
        slots = [self.slots(p) for p in parameters]
        flat = [v for group in slots for v in group.values()]
        again = self.loss.reads if self.loss else ()
        inputs = tuple(dict.fromkeys((*parameters, *gradients, *flat, *self.values.values(), *again)))
        at = {v: i for i, v in enumerate(inputs)}
        group = _Group(
            parameters=tuple(at[v] for v in parameters),
            gradients=tuple(at[v] for v in gradients),
            slots=tuple(tuple((name, at[v]) for name, v in group.items()) for group in slots),
            hyperparameters=tuple((name, at[v]) for name, v in self.values.items()),
            types=tuple((v.shape, v.dtype) for v in inputs),
        )
        if group not in self.bodies:
            self.bodies[group] = self.body(group, inputs)
        body, kept = self.bodies[group]
        old = (*parameters, *flat)
        new = tuple(Variable(self.names.new(f"next({v.name})"), v.shape, v.dtype) for v in old)
        self.next_state.update(zip(old, new, strict=True))
        self.ops.append(
            _op(self.optimizer.name, tuple(inputs[i] for i in kept), new, body, self.optimizer.type)
        )

    def slots(self, parameter: Variable) -> dict[str, Variable]:
        """The slots of a parameter: new state Variables, and the op that gives them their first values."""
        like = Type(parameter.shape, jnp.promote_types(parameter.dtype, np.float32))
        kinds = jax.eval_shape(lambda p: dict(self.optimizer.init(p)), like)
        made = {
            name: Variable(self.names.new(f"{parameter.name}/{name}"), kind.shape, kind.dtype, Kind.STATE)
            for name, kind in kinds.items()
        }
        if not made:
            return made
        key = (parameter.shape, parameter.dtype)
        if key not in self.bodies:
            own = Type(parameter.shape, parameter.dtype)
            self.bodies[key] = _tight(
                body_of(lambda p: [self.optimizer.init(widened(p))[name] for name in made], own)
            )
        body, kept = self.bodies[key]
        self.state.extend(made.values())
        self.initializers.append(_op("init", (parameter,) if kept else (), tuple(made.values()), body))
        return made

    def body(self, group: _Group, inputs: Sequence[Variable]) -> tuple[Body, tuple[int, ...]]:
        """The optimizer's rule as the body of one op, and the positions of the inputs it reads."""

        def update(*values: Any) -> list[Any]:
            parameters, gradients, slots, hyperparameters = group.read(values)
            extra = (self.loss.at(dict(zip(inputs, values, strict=True))),) if self.loss else ()
            if self.optimizer.type is UpdateType.ACROSS:
                new, states = self.optimizer.update(
                    tuple(parameters), tuple(gradients), tuple(slots), hyperparameters, *extra
                )
            else:
                one, state = self.optimizer.update(
                    parameters[0], gradients[0], slots[0], hyperparameters, *extra
                )
                new, states = (one,), (state,)
            flat = [(s[name], i) for s, names in zip(states, group.slots, strict=True) for name, i in names]
            results = [*zip(new, group.parameters, strict=True), *flat]
            return [self.as_before(value, inputs[i]) for value, i in results]

        types = [Type(shape, dtype) for shape, dtype in group.types]
        return _tight(explaining(f"The update of {type(self.optimizer).__name__}", body_of, update, *types))

    def as_before(self, value: Any, old: Variable) -> Any:
        """The new value of a state Variable in the dtype it has; its shape must be the same already."""
        if jnp.shape(value) != old.shape:
            raise GraphError(
                f"{self.optimizer.name} returned shape {jnp.shape(value)} as the next value of {old.name!r}, "
                f"which is {old.type}. An update keeps the shape."
            )
        return jnp.asarray(value, old.dtype)

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
            hyperparameters=(*self.source.hyperparameters, *self.hyperparameters.values()),
        )
        mine = {v.name for v in (*self.state, *(v for op in self.ops for v in op.outputs))}
        names = Names(mine | self.source.variables.keys())
        computed = (v for op in self.source.ops for v in op.outputs)
        given_way = {v: replace(v, name=names.new(v.name)) for v in computed if v.name in mine}
        return substitute(longer, given_way) if given_way else longer


class _LossFunction:
    """The forward pass as a function of the parameters, for rules that evaluate the loss again."""

    def __init__(self, program: Program) -> None:
        assert program.loss is not None
        self.trained = tuple(p for p, _ in program.gradients)
        self.part = prune(program, [program.loss])
        self.run = lower(self.part, self.part.outputs)
        self.reads = (*self.part.state, *self.part.inputs)

    def at(self, env: Mapping[Variable, Any]) -> Loss:
        """The loss of the parameters with everything else as it is in this step."""

        def loss(*parameters: Any) -> Any:
            given = (x.astype(p.dtype) for p, x in zip(self.trained, parameters, strict=True))
            values = {**env, **dict(zip(self.trained, given, strict=True))}
            state = [values[v] for v in self.part.state]
            return self.run(state, [values[v] for v in self.part.inputs])[0]

        return Loss(loss)


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
