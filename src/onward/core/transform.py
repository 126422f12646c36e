"""Transforms: pure functions Program -> Program that end in ``check`` and are remembered.

A Program carries its ``Recipe``: the traced function and the transforms applied to it, so that it can be
built for a batch of another shape, as ``jax.jit`` retraces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, overload

from onward.core.check import check, expect_program
from onward.core.errors import GraphError
from onward.core.jaxprs.tracing import along
from onward.core.program import Applied, Phase, Program, Recipe, Target, Variable
from onward.core.recipe import build, recipe_of, whole_types
from onward.core.structure import describe

Arguments = ParamSpec("Arguments")
Transform = Callable[Concatenate[Program, Arguments], Program]


@overload
def transform(function: Transform[Arguments]) -> Transform[Arguments]: ...


@overload
def transform(*, phase: Phase) -> Callable[[Transform[Arguments]], Transform[Arguments]]: ...


def transform(function: Any = None, *, phase: Phase | None = None) -> Any:
    """Make a transform of a pure function Program -> Program: check its result, extend the recipe.

    Args:
        function: takes a Program, and what else it needs.
        phase: when it acts; of one without a phase, and of one that comes late, that of what came before it.

    Example:
        >>> from dataclasses import replace
        >>> import jax.numpy as jnp, onward as ow
        >>> @ow.transform
        ... def renamed(program, name):
        ...     return replace(program, name=name)
        >>> program = ow.trace(lambda w: jnp.sum(w), jnp.ones(3))
        >>> renamed(program, "total").name
        'total'
    """
    return partial(_transform, phase=phase) if function is None else _transform(function, phase)


def _transform(function: Callable[..., Program], phase: Phase | None) -> Callable[..., Program]:
    @wraps(function)
    def applied(program: Program, /, *args: Any, **kwargs: Any) -> Program:
        expect_program(program, function.__name__.strip("_"))
        values, options = tuple(map(_kept, args)), {key: _kept(value) for key, value in kwargs.items()}
        step = _step(applied, values, options, phase or Phase.FORWARD)
        if phase is not None and _moves(step, program.recipe):
            recipe = recipe_of(program, f"with {function.__name__} before it is laid out", _ORDER)
            return build(recipe.including(step), whole_types(program))
        with _devices_of(program):
            result = function(program, *values, **options)
        if not isinstance(result, Program):
            raise GraphError(
                f"The transform {function.__name__!r} returned {describe(result)}; expected the "
                "Program that it makes. Change one with dataclasses.replace(program, ...) and return it."
            )
        return _remembered(program, check(result), step)

    return applied


_ORDER = "Apply it before replicate, accumulate and offload"


def _moves(step: Applied, recipe: Recipe | None) -> bool:
    """Whether a transform belongs before what laid out the batch of a Program, and can be moved there.

    Where state lies between two steps is decided last: it finds all that reads it.
    What derives a Program further is not: the merge of devices was chosen for what there was to merge.
    """
    steps = () if recipe is None else recipe.steps
    if step.phase < Phase.MEMORY and any(s.phase is Phase.MEMORY for s in steps):
        return True
    later = [s for s in steps if s.lays_out_batch and s.phase > step.phase]
    return bool(later) and (step.phase is Phase.LOOK or later[0].phase is not Phase.DEVICES)


def remembered(
    program: Program, result: Program, function: Callable[..., Program], args: tuple[Any, ...], phase: Phase
) -> Program:
    """The checked result of ``function(program, *args)``, its recipe one step longer."""
    return _remembered(program, check(result), _step(function, args, {}, phase))


def _step(
    function: Callable[..., Program], args: tuple[Any, ...], options: Mapping[str, Any], phase: Phase
) -> Applied:
    named = {key: _by_name(value) for key, value in options.items()}
    return Applied(function, tuple(map(_by_name, args)), named, phase)


def _remembered(program: Program, result: Program, step: Applied) -> Program:
    """The result with its recipe; that of a Program whose ops were changed by hand still tells it."""
    if (recipe := program.recipe) is None:
        return result
    ops = result.ops if program.ops is recipe.ops else recipe.ops
    late = replace(step, phase=max(step.phase, recipe.phase))
    return replace(result, recipe=replace(recipe, ops=ops, steps=(*recipe.steps, late)))


def _devices_of(program: Program) -> AbstractContextManager[None]:
    """The context in which a transform of a replicated Program may trace collectives."""
    return nullcontext() if program.replicas is None else along(program.replicas)


def _by_name(value: Any) -> Any:
    if isinstance(value, Variable):
        return value.name
    if isinstance(value, Target):
        return value.op.outputs[0].name
    if isinstance(value, list | tuple):
        return tuple(map(_by_name, value))
    return value


def _kept(value: Any) -> Any:
    """An argument that can be read again: what an iterator yields, as a tuple."""
    return tuple(value) if isinstance(value, Iterator) else value
