"""From forward + backward to the whole training Program: gradient rules, update ops, parameter rules.

The hyperparameters of the optimizer become state Variables, its slots state Variables named
``parameter/slot``, its schedules ops that read the step counter. Whatever is shared (counter,
schedules, hyperparameters) is made once.
"""

from __future__ import annotations

from onward.core.errors import GraphError
from onward.core.placement import expect_one_device
from onward.core.program import Applied, Phase, Program
from onward.core.transform import transform
from onward.derive.rule import GradientRule, ParameterRule
from onward.derive.update.follow import follow
from onward.derive.update.groups import OptimizerRule, Routing
from onward.derive.update.growing import Sharing, StandIns, Update
from onward.derive.update.replaced import expect_replaced

_OF_THE_BATCH = (
    "again on the batch, and accumulate runs the loss on micro-batches alone. Take one that needs the "
    "gradient only, or leave accumulate out."
)


@transform(phase=Phase.UPDATE)
def append_update(program: Program, optimizer: OptimizerRule) -> Program:
    """Add the operators that update the parameters of ``program.gradients``.

    Adds ops and state, changes none. Every parameter keeps its dtype.

    Raises:
        ArgumentError: the Program carries randomness or statistics that no step would replace.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.trace(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3))
        >>> program = append_update(ow.append_backward(program), ow.Momentum(0.1, 0.9))
        >>> [v.name for v in program.state]
        ['w', 'learning_rate', 'momentum', 'step', 'w/velocity']
    """
    expect_one_device(program, "the update")
    expect_replaced(program)
    return with_update(program, optimizer)


def optimizer_of(step: Applied) -> OptimizerRule:
    """The optimizer that ``append_update`` was applied with."""
    found: OptimizerRule = step.arguments[0] if step.arguments else step.options["optimizer"]
    return found


def with_update(
    program: Program,
    optimizer: OptimizerRule,
    routing: Routing | None = None,
    stand_ins: StandIns | None = None,
    sharing: Sharing | None = None,
) -> Program:
    """The Program with the update pass, neither checked nor remembered; see ``append_update``.

    Args:
        program: forward and backward pass.
        optimizer: what updates.
        routing: which optimizer updates which parameter, where that is known already.
        stand_ins: what the update works on in place of the parameters; what replaces it is in ``next_state``.
        sharing: where the Program has a part of the parameters, what rules across all of them are told.
    """
    return updated(program, optimizer, routing, stand_ins, sharing).draft.program()


def updated(
    program: Program,
    optimizer: OptimizerRule,
    routing: Routing | None = None,
    stand_ins: StandIns | None = None,
    sharing: Sharing | None = None,
) -> Update:
    """The whole update pass, with what is known about it; see ``with_update``."""
    if not program.gradients:
        raise GraphError(
            f"Program {program.name!r} has no gradients to update with. Derive the backward pass first: "
            "append_backward(program), or call optimizer.minimize."
        )
    if any(p in program.next_state for p, _ in program.gradients):
        raise GraphError(f"Program {program.name!r} updates its parameters already; minimize it only once.")
    update = Update(
        program, optimizer, routing or Routing.of(optimizer, program.parameters, program), sharing
    )
    if _is_in_micro_batches(program):
        update.routing.expect_gradients_only(_OF_THE_BATCH)
    if stand_ins and not stand_ins.last:
        update.put(stand_ins)
    update.turn()
    for rule in update.routing.rules(GradientRule):
        update.change_gradients(rule)
    if stand_ins and stand_ins.last:
        update.put(stand_ins)
    update.widen()
    for route in update.routing.routes:
        if route.optimizer.apart is None:
            update.update(route)
        else:
            follow(update, route, route.optimizer.apart)
    for rule in update.routing.rules(ParameterRule):
        update.change_parameters(rule)
    update.narrow()
    return update


def _is_in_micro_batches(program: Program) -> bool:
    steps = () if program.recipe is None else program.recipe.steps
    return any(step.lays_out_batch and step.phase is Phase.MICRO_BATCHES for step in steps)
