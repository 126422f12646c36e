"""The forward pass behind a Program, and the transforms that made the rest of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from onward.core.program import Op, Phase, Program, Recipe
from onward.core.recipe import build, whole_types
from onward.core.words import Pass
from onward.derive.backward import append_backward
from onward.derive.update.update import append_update

Made = Callable[..., Program]
_separable: set[Made] = set()


def separable(function: Made) -> Made:
    """Say of a transform of the forward pass that what is derived of it can be taken away again."""
    _separable.add(function)
    return function


def forward_of(program: Program, recipe: Recipe) -> Program:
    """The forward pass as the recipe makes it, before backward pass and update.

    What only adds ops to it is taken away again, if before that come but transforms that are ``separable``;
    otherwise it is built once more.
    """
    before = recipe.until(Phase.BACKWARD)
    made = [step.function for step in recipe.steps[len(before.steps) :]]
    is_known = all(step.function in _separable for step in before.steps)
    if program.replicas is None and is_known and made == [append_backward, append_update][: len(made)]:
        return without_derived(program, before)
    return build(before, whole_types(program))


def unrolled(program: Program, recipe: Recipe) -> Program:
    """The forward pass before layers become loops."""
    before = recipe.until(Phase.ROLL)
    is_whole = len(before.steps) == len(recipe.until(Phase.BACKWARD).steps)
    return forward_of(program, recipe) if is_whole else build(before, whole_types(program))


def forward_ops(program: Program) -> tuple[Op, ...]:
    """The forward ops as they were before they saved anything for the backward pass."""
    return tuple(_first_form(op) for op in program.ops if op.made_by is Pass.FORWARD)


def without_derived(program: Program, recipe: Recipe) -> Program:
    """The Program without the backward and update pass that was added to it."""
    ops = forward_ops(program)
    initializers = tuple(op for op in program.initializers if op.made_by is Pass.FORWARD)
    derived = {v for op in program.initializers if op.made_by is not Pass.FORWARD for v in op.outputs}
    state = tuple(v for v in program.state if v not in derived)
    known = {*program.inputs, *state, *program.constants, *(v for op in ops for v in op.outputs)}
    following = {old: new for old, new in program.next_state.items() if old not in derived and new in known}
    return replace(
        program,
        state=state,
        ops=ops,
        next_state=following,
        gradients=(),
        initializers=initializers,
        hyperparameters=(),
        limits={},
        recipe=replace(recipe, ops=ops),
    )


def _first_form(op: Op) -> Op:
    if op.primal is None:
        return op
    return replace(op, outputs=op.outputs[: len(op.primal.out_avals)], body=op.primal, primal=None)
