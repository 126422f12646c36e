"""The recipe of a Program with a step more before its backward pass, or with one less."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from onward.core.errors import UnreachedWarning
from onward.core.program import Program
from onward.core.transform import Recipe, recipe_of
from onward.derive.backward import append_backward
from onward.derive.batch import whole_types
from onward.derive.roll.forward import forward_of
from onward.derive.roll.roll import rolled

_PURPOSE = "with other activations kept", "Leave its ops as they were derived"


def is_replayable(program: Program) -> bool:
    """Whether the backward pass of a Program can be derived again."""
    recipe = program.recipe
    return recipe is not None and recipe.ops is program.ops and bool(recipe.steps_of(append_backward))


def with_step(program: Program, function: Callable[..., Program], *arguments: Any) -> Program:
    """The Program with this transform just before its backward pass."""
    recipe = recipe_of(program, *_PURPOSE)
    forward, rest = forward_of(program, recipe, (rolled,))
    while rest and rest[0].function is not append_backward:
        forward, rest = rest[0].function(forward, *rest[0].arguments, **rest[0].options), rest[1:]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnreachedWarning)  # minimize has told it
        found = function(forward, *arguments)
        for step in rest:
            found = step.function(found, *step.arguments, **step.options)
    return _of_origin(found, recipe)


def without_steps(program: Program, *functions: Callable[..., Program]) -> Program:
    """The Program as it is without these transforms."""
    recipe = less = recipe_of(program, *_PURPOSE)
    for function in functions:
        less = less.without(function)
    return _of_origin(less.replay(whole_types(program)), recipe)


def _of_origin(program: Program, recipe: Recipe) -> Program:
    """The Program with the origin of this recipe, which may have been traced for other data first."""
    assert program.recipe is not None
    return replace(program, recipe=replace(program.recipe, origin=recipe.origin))
