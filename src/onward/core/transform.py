"""What a transform is: a pure function Program -> Program that ends in ``check`` and is remembered.

A Program carries its ``Recipe``: the traced function and the transforms applied to it, so that a
batch of another shape can replay them, as ``jax.jit`` retraces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Protocol

from onward.core.check import check, expect_program
from onward.core.errors import GraphError, RecipeError
from onward.core.jaxprs.tracing import along
from onward.core.program import Op, Program, Target, Variable
from onward.core.structure import describe

Arguments = ParamSpec("Arguments")


class Origin(Protocol):
    """The traced function behind a Program."""

    @property
    def training(self) -> bool:
        """Whether it is traced as it is when it is trained."""

    @property
    def asks_training(self) -> bool:
        """Whether the function asks if it is being trained."""

    @property
    def fixed_data(self) -> frozenset[str]:
        """The data that is declared with a length of its own, not that of the batch."""

    @property
    def makers(self) -> Mapping[str, Any]:
        """The layer outside of a function that declared a Variable, by the Variable's name."""

    @property
    def assumes_batch(self) -> bool:
        """Whether nothing showed how long a batch is, so that some length was taken."""

    def trace(self, data: tuple[Any, ...]) -> Program:
        """Trace it again for data of these types; parameters and model state stay as they were."""

    def for_test(self) -> Program:
        """Trace it again as it is when nothing is trained."""


@dataclass(frozen=True)
class Step:
    """One transform with its arguments, Variables among them replaced by their names."""

    function: Callable[..., Program]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """How a Program was made.

    Attributes:
        origin: the traced function.
        ops: those of the Program, as the last step left them.
        steps: the transforms, in order.
        forward: the Program as it was traced, before any of them; None where that is not kept.
    """

    origin: Origin
    ops: tuple[Op, ...]
    steps: tuple[Step, ...] = ()
    forward: Program | None = None

    def then(self, step: Step, ops: tuple[Op, ...]) -> Recipe:
        """The recipe with one more transform, which made these ops."""
        return replace(self, steps=(*self.steps, step), ops=ops)

    def steps_of(self, function: Callable[..., Program]) -> tuple[Step, ...]:
        """Where this transform was applied."""
        return tuple(step for step in self.steps if step.function is function)

    def without(self, function: Callable[..., Program]) -> Recipe:
        """The recipe without this transform."""
        return replace(self, steps=tuple(step for step in self.steps if step.function is not function))

    def replay(self, data: tuple[Any, ...]) -> Program:
        """The Program for data of these types."""
        program = self.origin.trace(data)
        for step in self.steps:
            program = step.function(program, *step.arguments, **step.options)
        return program


def transform(
    function: Callable[Concatenate[Program, Arguments], Program],
) -> Callable[Concatenate[Program, Arguments], Program]:
    """Make a transform of a pure function Program -> Program: check its result, extend the recipe.

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

    @wraps(function)
    def applied(program: Program, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Program:
        expect_program(program, function.__name__.strip("_"))
        values, options = tuple(map(_kept, args)), {key: _kept(value) for key, value in kwargs.items()}
        with _devices_of(program):
            result = function(program, *values, **options)
            if not isinstance(result, Program):
                raise GraphError(
                    f"The transform {function.__name__!r} returned {describe(result)}; expected the "
                    "Program that it makes. Change one with dataclasses.replace(program, ...) and return it."
                )
            return remembered(program, result, applied, values, options)

    return applied


def _devices_of(program: Program) -> AbstractContextManager[None]:
    """Where a transform of a replicated Program may trace collectives."""
    return nullcontext() if program.replicas is None else along(program.replicas)


def remembered(
    program: Program,
    result: Program,
    function: Callable[..., Program],
    args: tuple[Any, ...],
    options: Mapping[str, Any],
) -> Program:
    """The checked result of ``function(program, *args, **options)``, its recipe one step longer."""
    check(result)
    if program.recipe is None:
        return result
    named = {key: _by_name(value) for key, value in options.items()}
    step = Step(function, tuple(map(_by_name, args)), named)
    return replace(result, recipe=program.recipe.then(step, result.ops))


def replayed(program: Program, data: tuple[Any, ...]) -> Program:
    """The same Program for data of other shapes."""
    return recipe_of(program, "for data of another shape", "Feed the shapes it shows").replay(data)


def recipe_of(program: Program, purpose: str, instead: str) -> Recipe:
    """The recipe of a Program, if replaying it would give this Program again.

    Raises:
        RecipeError: the Program was not traced, or its ops were changed by hand.
    """
    expect_program(program, "This transform")
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
