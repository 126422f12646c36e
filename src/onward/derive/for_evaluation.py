"""The test Program that reads averages of the parameters, where the optimizer or a rule keeps some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from onward.core.check import check
from onward.core.jaxprs import Type, body_of
from onward.core.names import Names
from onward.core.program import Op, Program, Variable
from onward.core.transform import recipe_of
from onward.core.words import Pass
from onward.derive.act import Slot, numbers_of
from onward.derive.for_test import for_test
from onward.derive.precision import widened
from onward.derive.update import Trained, append_update, updated


def for_evaluation(program: Program) -> Program:
    """The forward Program as it is when nothing is trained, with the parameters that are best to evaluate.

    As ``for_test``, over the same State; and where a rule (``EMA``, ``SWA``, ``PolyakAverage``) or an
    optimizer (``ScheduleFreeSGD``) has other parameters for this than those it trains, ops at the beginning
    compute them.

    Raises:
        RecipeError: the Program was not traced, or its ops were changed by hand.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SGD(0.5, rules=[ow.EMA(0.9)]).minimize(lambda w: jnp.sum(w**2), jnp.ones(2))
        >>> test = ow.for_evaluation(program)
        >>> [v.name for v in test.state], test.ops[0]
        (['w', 'w/average'], evaluated(w) = ema(w/average))
    """
    test = for_test(program)
    recipe = recipe_of(program, "for evaluation", "Trace the network with training=False")
    trained = recipe.origin.trace(_data_types(program))
    for step in recipe.steps:
        if step.function is append_update:
            optimizer = step.arguments[0] if step.arguments else step.options["optimizer"]
            update = updated(trained, optimizer)
            return _with_evaluated(test, update.program(), update.evaluated) if update.evaluated else test
        trained = step.function(trained, *step.arguments, **step.options)
    return test


def _with_evaluated(
    test: Program,
    training: Program,
    evaluated: Sequence[tuple[Trained, Any, Mapping[str, Slot], Mapping[str, Variable]]],
) -> Program:
    """The test Program behind ops that compute what it shall read in place of parameters."""
    names = Names(test.variables)
    own = {v.name: v for v in test.state}
    mine = {v: own[v.name] for v in training.state if v.name in own}
    ops: list[Op] = []
    instead: dict[Variable, Variable] = {}
    for t, rule, slots, values in evaluated:
        if (p := mine.get(t.parameter)) is not None:
            ops.append(_evaluated(rule, p, instead.get(p, p), slots, values, names))
            instead[p] = ops[-1].outputs[0]
    read = {v for op in ops for v in op.inputs}
    schedules = [op for op in training.ops if op.type == "schedule" and not read.isdisjoint(op.outputs)]
    read |= {v for op in schedules for v in op.inputs}
    added = [v for v in training.state if v in read and v not in mine]
    made = [op for op in training.initializers if not set(added).isdisjoint(op.outputs)]
    added += [v for op in made for v in op.outputs if v not in added]
    made = [replace(op, inputs=tuple(mine.get(v, v) for v in op.inputs)) for op in made]
    forward = [replace(op, inputs=tuple(instead.get(v, v) for v in op.inputs)) for op in test.ops]
    return check(
        replace(
            test,
            state=(*test.state, *added),
            ops=(*schedules, *ops, *forward),
            outputs=tuple(instead.get(v, v) for v in test.outputs),
            initializers=(*test.initializers, *made),
        )
    )


def _evaluated(
    rule: Any,
    parameter: Variable,
    value: Variable,
    slots: Mapping[str, Slot],
    values: Mapping[str, Variable],
    names: Names,
) -> Op:
    """The op that computes what a rule has of a parameter for evaluation."""
    arrays = [v for slot in slots.values() for v in slot.arrays]
    inputs = tuple(dict.fromkeys((value, *arrays, *values.values())))

    def run(*given: Any) -> list[Any]:
        env = dict(zip(inputs, given, strict=True))
        read = {name: slot.read(env) for name, slot in slots.items()}
        made = rule.evaluated(widened(env[value]), read, numbers_of(values, env, [parameter]))
        return [made.astype(parameter.dtype)]

    body, kept = body_of(run, *(Type(v.shape, v.dtype) for v in inputs)).restricted([0])
    made = Variable(names.new(f"evaluated({parameter.name})"), parameter.shape, parameter.dtype)
    return Op(rule.name, tuple(inputs[i] for i in kept), (made,), body, Pass.FORWARD)


def _data_types(program: Program) -> tuple[Any, ...]:
    assert program.signature is not None
    return tuple(s.unflatten(Type(v.shape, v.dtype) for v in s.variables) for s in program.signature.data)
