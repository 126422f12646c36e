"""A recipe: what a Program is made of, in phases, so that it can be built again for other data.

    origin -> forward passes -> backward -> gradients -> update -> devices, micro-batches -> whole step

``build`` is the only replay. A transform declares its phase; whatever the order of calls, the steps of a
recipe stand in the order of their phases, and those of one phase in the order of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from onward.core.check import check
from onward.core.errors import RecipeError
from onward.core.jaxprs.equations import Type
from onward.core.placement import whole_shape
from onward.core.program import Applied, Program, Recipe, Variable

_CALLED = {
    "accumulated": "accumulate",
    "adapted": "low_rank",
    "adjust_scale": "mixed_precision",
    "chunked": "chunk",
    "constrained": "partition",
    "fused_attention": "fuse_attention",
    "keeping": "recompute",
    "keeping_in_loops": "recompute",
    "lowered": "mixed_precision",
    "partitioned": "partition",
    "replicated": "replicate",
    "rewritten": "rewrite",
    "rolled": "roll",
    "rolled_in_stages": "roll",
    "scale_loss": "mixed_precision",
    "state_offloaded": "offload",
    "stored": "offload",
    "watched": "watch",
}
_replays: ContextVar[bool] = ContextVar("replays", default=False)


def called(step: Applied) -> str:
    """The name by which a person asks for a transform."""
    name = step.function.__name__
    return _CALLED.get(name, name.strip("_"))


def build(recipe: Recipe, data: tuple[Any, ...]) -> Program:
    """The Program of a recipe for data of these types.

    What lays out the batch builds the part of one device, or of one micro-batch, by what comes before it; the
    function is traced for the lengths that this takes, each once.

    Args:
        recipe: its steps are in the order of their phases.
        data: for each data argument of the function the types of its arrays, over all devices together.
    """
    layouts = [i for i, step in enumerate(recipe.steps) if step.lays_out_batch]
    done = layouts[-1] + 1 if layouts else 0
    if layouts:
        before = replace(recipe, steps=recipe.steps[: layouts[-1]])
        program = check(recipe.steps[layouts[-1]](before, data))
    else:
        program = recipe.origin.trace(data)
    program = with_steps(_of(program, recipe, done), recipe.steps[done:])
    return _of(program, recipe, len(recipe.steps))


def resumed(program: Program, recipe: Recipe, count: int, data: tuple[Any, ...]) -> Program:
    """The Program of a recipe whose first steps, so many, made ``program`` of data of these types."""
    rest = recipe.steps[count:]
    if any(step.lays_out_batch for step in rest):
        return build(recipe, data)
    return _of(with_steps(_of(program, recipe, count), rest), recipe, len(recipe.steps))


def laid_out(
    recipe: Recipe, step: Applied, data: tuple[Any, ...], now: Callable[[], Program] | None
) -> Program:
    """The Program of a recipe with a step that lays out the batch of data of these types.

    Args:
        recipe: that of the Program which is laid out.
        step: lays out the batch.
        data: for each data argument of the function the types of its arrays, over all devices together.
        now: lays out the Program itself, where it was made of data of these types; None where it was not.
    """
    grown = recipe.including(step)
    if now is None or grown.phase > step.phase:
        return build(grown, data)
    return resumed(now(), grown, len(grown.steps), data)


def with_steps(program: Program, steps: Iterable[Applied]) -> Program:
    """The Program after these transforms, which were applied before: see ``is_replay``."""
    token = _replays.set(True)
    try:
        for step in steps:
            program = step(program)
        return program
    finally:
        _replays.reset(token)


def is_replay() -> bool:
    """Whether a transform is applied once more, so that what it warns of is told already."""
    return _replays.get()


def _of(program: Program, recipe: Recipe, count: int) -> Program:
    """A Program as the first steps of a recipe made it."""
    return replace(program, recipe=replace(recipe, ops=program.ops, steps=recipe.steps[:count]))


def recipe_of(program: Program, purpose: str, instead: str) -> Recipe:
    """The recipe of a Program, if building it would give this Program again.

    Raises:
        RecipeError: the Program was not traced, or its ops were changed by hand.
    """
    if program.recipe is None:
        raise RecipeError(
            f"Program {program.name!r} was not made by trace, so it cannot be traced again {purpose}. "
            f"{instead}, or build it with onward.trace."
        )
    if program.ops is not program.recipe.ops:
        raise RecipeError(
            f"The ops of Program {program.name!r} were changed by hand, which its recipe does not know, so "
            f"it cannot be traced again {purpose}. Make the change in a function decorated "
            "with onward.transform."
        )
    return program.recipe


def whole_types(program: Program) -> tuple[Any, ...]:
    """The data arguments of the traced function by their types, over all devices together."""
    assert program.signature is not None

    def kind(v: Variable) -> Type:
        return Type(whole_shape(v, program.replicas), v.dtype)

    return tuple(s.unflatten(map(kind, s.variables)) for s in program.signature.data)


def rebuilt(program: Program, data: tuple[Any, ...]) -> Program:
    """The same Program for data of other shapes."""
    return build(recipe_of(program, "for data of another shape", "Feed the shapes it shows"), data)


def undone(program: Program, layout: Callable[..., Program]) -> Program:
    """The Program without what laid out its batch, with the transforms that came after it.

    Args:
        program: a Program whose batch is laid out.
        layout: what lays it out, as it stands in the recipe.

    Raises:
        RecipeError: the Program was not traced, or its ops were changed by hand.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> from onward.develop.accumulation.accumulate import accumulated
        >>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.sum(x @ w), jnp.ones(3), jnp.ones((6, 3)))
        >>> str(undone(ow.accumulate(program, 3), accumulated)) == str(program)
        True
    """
    recipe = recipe_of(program, "with its batch as one", "Take the Program whose batch was not laid out yet")
    return build(recipe.without(layout), whole_types(program))
