"""The recipe of a Program with a step more before its backward pass, or with one less."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from onward.core.program import Program
from onward.core.transform import Recipe, Step, recipe_of
from onward.derive.backward import append_backward
from onward.derive.batch import whole_types

_PURPOSE = "with other activations kept", "Leave its ops as they were derived"


def is_replayable(program: Program) -> bool:
    """Whether the backward pass of a Program can be derived again."""
    recipe = program.recipe
    return recipe is not None and recipe.ops is program.ops and bool(recipe.steps_of(append_backward))


def with_step(program: Program, function: Callable[..., Program], *arguments: Any) -> Program:
    """The Program with this transform just before its backward pass."""
    recipe = recipe_of(program, *_PURPOSE)
    at = [step.function for step in recipe.steps].index(append_backward)
    steps = (*recipe.steps[:at], Step(function, arguments, {}), *recipe.steps[at:])
    return _replayed(program, recipe, replace(recipe, steps=steps))


def without_steps(program: Program, *functions: Callable[..., Program]) -> Program:
    """The Program as it is without these transforms."""
    recipe = less = recipe_of(program, *_PURPOSE)
    for function in functions:
        less = less.without(function)
    return _replayed(program, recipe, less)


def _replayed(program: Program, old: Recipe, recipe: Recipe) -> Program:
    found = recipe.replay(whole_types(program))
    assert found.recipe is not None
    return replace(found, recipe=replace(found.recipe, origin=old.origin))
