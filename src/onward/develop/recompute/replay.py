"""The recipe of a Program with a step more before its backward pass, or with one less."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from onward.core.program import Applied, Phase, Program
from onward.core.recipe import build, recipe_of, resumed, whole_types
from onward.derive.backward import append_backward
from onward.develop.roll.forward import forward_of

_PURPOSE = "with other activations kept", "Leave its ops as they were derived"


def is_replayable(program: Program) -> bool:
    """Whether the backward pass of a Program can be derived again."""
    recipe = program.recipe
    return recipe is not None and recipe.ops is program.ops and bool(recipe.of(append_backward))


def with_step(program: Program, function: Callable[..., Program], *arguments: Any) -> Program:
    """The Program with this transform just before its backward pass."""
    recipe = recipe_of(program, *_PURPOSE)
    step = Applied(function, arguments, {}, Phase.KEEP)
    grown = recipe.including(step)
    forward = step(forward_of(program, recipe))
    return resumed(forward, grown, len(grown.until(Phase.BACKWARD).steps), whole_types(program))


def without_steps(program: Program, *functions: Callable[..., Program]) -> Program:
    """The Program as it is without these transforms."""
    recipe = recipe_of(program, *_PURPOSE)
    for function in functions:
        recipe = recipe.without(function)
    return build(recipe, whole_types(program))
