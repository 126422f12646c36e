"""The test Program that reads averages of the parameters, where the optimizer or a rule keeps some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onward.core.builder import given_way
from onward.core.check import expect_program
from onward.core.errors import GraphError, RecipeError
from onward.core.jaxprs.body import body_of
from onward.core.marks import SCHEDULE
from onward.core.names import Names
from onward.core.program import Op, Phase, Program, Variable
from onward.core.recipe import build, recipe_of, whole_types
from onward.core.transform import transform
from onward.core.walk import substitute
from onward.core.words import Pass, Placement
from onward.derive.for_test import for_test
from onward.derive.update.act import Hyperparameters, Slot
from onward.derive.update.groups import OptimizerRule, Routing
from onward.derive.update.growing import Update
from onward.derive.update.precision import widened
from onward.derive.update.update import append_update, optimizer_of, updated


def for_evaluation(program: Program) -> Program:
    """The forward Program as it is when nothing is trained, with the parameters that are best to evaluate.

    As ``for_test``, over the same State; and where a rule (``EMA``, ``SWA``, ``PolyakAverage``) or an
    optimizer (``ScheduleFreeSGD``) has other parameters for this than those it trains, ops at the beginning
    compute them.

    Raises:
        RecipeError: the Program was not traced, or its ops were changed by hand.
        GraphError: it is replicated, and each device keeps a part of the averages, or its own.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SGD(0.5, rules=[ow.EMA(0.9)]).minimize(lambda w: jnp.sum(w**2), jnp.ones(2))
        >>> test = ow.for_evaluation(program)
        >>> [v.name for v in test.state], test.ops[0]
        (['w', 'w/average'], evaluated(w) = ema(w/average))
    """
    expect_program(program, "for_evaluation")
    test, averages = for_test(program), averages_of(program)
    return test if averages is None else read_averages(test, averages)


def evaluated_parameters(program: Program) -> Program:
    """The Program whose outputs are the parameters of a training Program, those to evaluate a model with.

    Raises:
        RecipeError, GraphError: see ``for_evaluation``.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SGD(0.5, rules=[ow.EMA(0.9)]).minimize(lambda w: jnp.sum(w**2), jnp.ones(2))
        >>> evaluated_parameters(program).outputs
        (Variable('evaluated(w)', float32[2], activation),)
    """
    alone = Program(program.name, state=program.parameters, outputs=program.parameters)
    averages = averages_of(program)
    return alone if averages is None else read_averages(alone, averages)


def averages_of(program: Program) -> Averages | None:
    """The averages that a training Program keeps for evaluation; None if it keeps none."""
    recipe = recipe_of(program, "for evaluation", "Trace the network with training=False")
    _expect_optimizer(program)
    optimizer = next((optimizer_of(step) for step in recipe.of(append_update)), None)
    if optimizer is None or not any(rule.has_evaluated for rule in _acting(optimizer, program)):
        return None
    averages = Averages.of(updated(build(recipe.until(Phase.UPDATE), whole_types(program)), optimizer))
    _expect_whole(program, averages)
    return averages if averages.evaluated else None


def _expect_optimizer(program: Program) -> None:
    """Refuse a step from a file, which holds the update, and not of which optimizer it is."""
    if program.code is not None and any(op.made_by is Pass.UPDATE for op in program.ops):
        raise RecipeError(
            f"{program.name!r} was loaded from {program.code.file}, the file of a training step, which does "
            "not tell whether its optimizer keeps averages. Where the code is: ow.averaged(program, state), "
            "with the Program that was saved, takes the State of load_step as well; and "
            "save(for_evaluation(program), path, state) writes a model of them. What is trained is "
            "state.parameters."
        )


def _acting(optimizer: OptimizerRule, program: Program) -> Sequence[Any]:
    """The optimizers and rules that act on any parameter; known without deriving the update again."""
    return Routing.of(optimizer, program.parameters).all_rules()


@dataclass(frozen=True, eq=False)
class Averages:
    """The averages that a training Program keeps for evaluation; the same for every batch size.

    Attributes:
        evaluated: parameter by parameter the rule that has another one to evaluate with, its slots, and its
            hyperparameters.
        state: the state Variables.
        schedules: the ops that compute hyperparameters.
        initializers: the ops that give slots and hyperparameters their first values.
    """

    evaluated: Sequence[tuple[Variable, Any, Mapping[str, Slot], Hyperparameters]]
    state: tuple[Variable, ...]
    schedules: tuple[Op, ...]
    initializers: tuple[Op, ...]

    @classmethod
    def of(cls, update: Update) -> Averages:
        """The averages that an update pass keeps."""
        return cls(
            [(t.parameter, rule, slots, values) for t, rule, slots, values in update.evaluated],
            tuple(update.draft.state),
            tuple(op for op in update.draft.ops if op.type is SCHEDULE),
            tuple(update.draft.initializers),
        )


@transform
def read_averages(program: Program, averages: Averages) -> Program:
    """The Program, preceded by ops that compute the averages that it reads in place of parameters."""
    own = {v.name: v for v in program.state}
    taken = {v.name for v in averages.state} | {v.name for op in averages.schedules for v in op.outputs}
    program = substitute(program, given_way(program, taken))
    names = Names(program.variables)
    ops: list[Op] = []
    instead: dict[Variable, Variable] = {}
    for parameter, rule, slots, values in averages.evaluated:
        if (p := own.get(parameter.name)) is not None:
            ops.append(_evaluated(rule, p, instead.get(p, p), slots, values, names))
            instead[p] = ops[-1].outputs[0]
    read = {v for op in ops for v in op.inputs}
    schedules = [op for op in averages.schedules if not read.isdisjoint(op.outputs)]
    read |= {v for op in schedules for v in op.inputs}
    made = [op for op in averages.initializers if not read.isdisjoint(op.outputs)]
    kept = {v for op in made for v in op.outputs}
    made = [replace(op, inputs=tuple(own.get(v.name, v) for v in op.inputs)) for op in made]
    forward = [replace(op, inputs=tuple(instead.get(v, v) for v in op.inputs)) for op in program.ops]
    return replace(
        program,
        state=(*program.state, *(v for v in averages.state if v in kept)),
        ops=(*schedules, *ops, *forward),
        outputs=tuple(instead.get(v, v) for v in program.outputs),
        initializers=(*program.initializers, *made),
    )


def _expect_whole(program: Program, averages: Averages) -> None:
    """Refuse averages of which every device keeps a part, or its own."""
    places = {v.name: v.placement for v in program.state}
    for _, rule, slots, _ in averages.evaluated:
        for v in (v for slot in slots.values() for v in slot.arrays):
            place = places.get(v.name, Placement.REPLICATED)
            if place is not Placement.REPLICATED:
                raise GraphError(
                    f"Program {program.name!r} keeps {v.name!r} of {type(rule).__name__} "
                    f"{place.replace('_', ' ')}, which a Program for one device cannot read. "
                    f"{_OF_PARTS * (place is Placement.SHARDED)}Merge with Average(), or evaluate the "
                    "parameters themselves: for_test(program)."
                )


_OF_PARTS = (
    "To read them, restore a checkpoint with the Program as it was before replicate: Trainer(model, "
    "optimizer).restore(folder), or compile(program).restore(checkpoints), makes them whole. "
)


def _evaluated(
    rule: Any,
    parameter: Variable,
    value: Variable,
    slots: Mapping[str, Slot],
    values: Hyperparameters,
    names: Names,
) -> Op:
    """The op that computes the value of a parameter that a rule has for evaluation."""
    arrays = [v for slot in slots.values() for v in slot.arrays]
    inputs = tuple(dict.fromkeys((value, *arrays, *values.variables)))

    def run(*given: Any) -> list[Any]:
        env = dict(zip(inputs, given, strict=True))
        read = {name: slot.read(env) for name, slot in slots.items()}
        made = values.seen_by(rule, env, [parameter]).evaluated(widened(env[value]), read)
        return [made.astype(parameter.dtype)]

    body, kept = body_of(run, *(v.aval for v in inputs)).restricted([0])
    made = Variable(names.new(f"evaluated({parameter.name})"), parameter.shape, parameter.dtype)
    return Op(rule.name, tuple(inputs[i] for i in kept), (made,), body, Pass.FORWARD)
