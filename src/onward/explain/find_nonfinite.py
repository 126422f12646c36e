"""``find_nonfinite``: which op of a step made the first NaN or infinity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from onward.core.errors import ArgumentError, StateError
from onward.core.program import Program
from onward.core.structure import describe
from onward.execute.feeds import Feeds
from onward.execute.loop.groups import Intake
from onward.execute.lying import together
from onward.execute.nonfinite.find import find
from onward.execute.nonfinite.finding import NonFinite
from onward.execute.pipelined import PipelineStep
from onward.execute.state import SPENT, State
from onward.execute.step import Step


def find_nonfinite(
    step: Step | PipelineStep | Program, state: State | Sequence[Any], data: Any = ()
) -> NonFinite | None:
    """The first op whose result is not finite and spoils the loss, a gradient or the next state.

    One step is run on these values, with an eye on all of them; the State stays usable. What is not finite
    and spoils nothing, such as the minus infinity of a mask before a softmax, is not reported. Where data,
    parameters or other state were not finite before, these are named. In loops, branches, ``custom_vjp``
    functions and update rules it says which turn, which branch and which primitive within. On several
    devices, it says which; where these belong to several processes, all of them have to call it.

    Args:
        step: what ``compile`` made, or the Program. That of a pipeline is run on one device, by the Program
            that was cut.
        state: the State before the step; for a Program also its values in the order of ``program.state``.
        data: a batch, as one call of the step takes it: a tuple in the order in which the function takes it,
            a dict by name, or an array alone.

    Returns:
        A ``NonFinite``, which prints as a few lines; None if all that is looked at is finite.

    Raises:
        ArgumentError: no Step, or data of the wrong number, structure, shape or dtype.
        StateError: a State that was given to a step, or that lacks what the Program keeps.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.sum(jnp.log(w * x)), jnp.ones(2), jnp.ones(2))
        >>> step = ow.compile(program)
        >>> found = find_nonfinite(step, step.init(jnp.ones(2)), jnp.array([1.0, 0.0]))
        >>> found.type, found.numbers.infinite, found.made_by
        ('log', 1, <Pass.FORWARD: 'forward'>)
        >>> print(str(found).splitlines()[0])
        'log' is the first value that is not finite: 1 of 2 is infinite, the first at [1].
    """
    is_cut = isinstance(step, PipelineStep)
    if isinstance(step, PipelineStep):
        step = step.pipeline.program
    if not isinstance(step, Step | Program):
        raise ArgumentError(
            f"find_nonfinite was given {describe(step)}; expected a Step or a Program: find_nonfinite("
            "compile(program), state, data)."
        )
    program = step if isinstance(step, Program) else step.program
    feeds = Feeds(program)
    is_nothing = isinstance(data, tuple) and not data
    arguments, feed = ((), {}) if is_nothing else Intake(feeds, False).arguments(data)
    values = feeds.named(arguments, feed) if feed else arguments
    is_alone = program.replicas is None and program.partition is None and jax.process_count() == 1
    return find(program, _by_name(program, state, is_cut or is_alone), values)


def _by_name(program: Program, state: State | Sequence[Any], on_one: bool) -> Mapping[str, Any]:
    """The values of all state Variables; ``on_one`` device, if they lie apart."""
    if isinstance(state, State):
        if state.is_spent:
            raise StateError(SPENT)
        values = together(state.values) if on_one else state.values
        found = {v.name: x for v, x in zip(state.layout.variables, values, strict=True)}
        if lacking := [v.name for v in program.state if v.name not in found]:
            raise StateError(
                f"This State has no {', '.join(map(repr, lacking[:5]))}, which {program.name} keeps. Make one"
                " with the step's own init."
            )
        return found
    if not isinstance(state, tuple | list) or len(state) != len(program.state):
        what = f"{len(state)} values" if isinstance(state, tuple | list) else describe(state)
        raise ArgumentError(
            f"find_nonfinite: the second argument is {what}; expected the State before the step, or the "
            f"{len(program.state)} values of program.state."
        )
    return {v.name: x for v, x in zip(program.state, state, strict=True)}
