"""The parameters to evaluate, of a State: averages, where a rule or the optimizer keeps some."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from onward.core.check import expect_program
from onward.core.errors import ArgumentError
from onward.core.lower import lower
from onward.core.program import Program
from onward.core.structure import describe
from onward.derive.for_evaluation import evaluated_parameters
from onward.execute.layout import Layout
from onward.execute.lying import together
from onward.execute.merged import multiplied_out
from onward.execute.state import State


def averaged(program: Program, state: State) -> Any:
    """The parameters to evaluate, in the containers in which they were passed to ``step.init``.

    They are the averages that ``EMA``, ``SWA``, ``PolyakAverage`` or a schedule-free optimizer keep, and
    copies of the trained parameters where there are none; where ``low_rank`` adapted weights,
    those with the averaged factors multiplied out. ``for_evaluation`` computes the loss with them; this is
    for other functions of the model, such as one that generates.

    Args:
        program: the training Program.
        state: a State of its step.

    Raises:
        ArgumentError: something else than a training Program and a State.
        GraphError: every device keeps a part of the averages, or its own.
        RecipeError: the Program was not traced, its ops were changed by hand, or it is from a file.
        StateError: a State that was given to a step before, or of a step that keeps its averages otherwise,
            such as a part on each device.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SGD(0.5, rules=[ow.EMA(0.9)]).minimize(lambda w: w**2, jnp.float32(1.0))
        >>> step = ow.compile(program)
        >>> state, _ = step(step.init(jnp.float32(1.0)))
        >>> f"{ow.averaged(program, state):.1f}, {state.parameters:.1f}"
        '0.9, 0.0'
    """
    expect_program(program, "averaged")
    if not isinstance(state, State):
        raise ArgumentError(
            f"averaged: the second argument is a State of the Program's step, not {describe(state)}: "
            "ow.averaged(program, state)."
        )
    if not program.updates:
        raise ArgumentError(
            f"averaged: {program.name!r} trains nothing, so it tells of no averages; expected the training "
            "Program, of which for_test and for_evaluation made theirs."
        )
    values = dict(zip(program.parameters, averages(program, state), strict=True))
    named = {v.name: x for v, x in values.items()}
    if (merged := multiplied_out(program, state, named)) is not None:
        return merged
    signature = program.signature
    if signature is None:
        return {v.name: jnp.copy(x) for v, x in values.items()}
    given = signature.parameters
    return given.unflatten(jnp.copy(values[v] if v in values else state[v]) for v in given.variables)


def averages(program: Program, state: State) -> list[Any]:
    """The values of all parameters to evaluate, in their order; some may be the State's own arrays."""
    state.expect_whole()
    evaluated = evaluated_parameters(program)
    instead = "Pass the Program whose step made it."
    Layout.of(evaluated).expect_all(state.layout, program.name, instead=instead)
    return lower(evaluated, evaluated.outputs)(together([state[v] for v in evaluated.state]), ())
