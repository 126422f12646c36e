"""A recipe: what a Program is made of, in phases, so that it can be built again for other data.

    origin -> forward passes -> backward -> gradients -> update -> devices, micro-batches -> whole step

``build`` is the only replay. A transform declares its phase; whatever the order of calls, the steps of a
recipe stand in the order of their phases, and those of one phase in the order of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Protocol

from onward.core.check import check, expect_program
from onward.core.errors import RecipeError
from onward.core.jaxprs.equations import Type
from onward.core.placement import whole_shape
from onward.core.program import Op, Program, Variable


class Phase(IntEnum):
    """When a transform acts."""

    PRECISION = 1  # the dtype of each op of the forward pass
    FORWARD = 2
    ROLL = 3  # repeated layers become loops
    KEEP = 4  # what such loops keep for the backward pass
    BACKWARD = 5
    GRADIENT = 6
    UPDATE = 7
    LOOK = 8  # what is watched
    DEVICES = 9  # one Program for many devices
    MICRO_BATCHES = 10
    STEP = 11  # decides about a step as a whole: guards, checks


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
        """The forward Program for data of these types; parameters and model state stay as they were."""

    def for_test(self) -> Program:
        """The forward Program as it is when nothing is trained."""


@dataclass(frozen=True)
class Applied:
    """One transform with its arguments, Variables among them replaced by their names.

    ``function`` takes the Program. What lays out the batch, over devices or micro-batches, takes the recipe
    so far and the types of the data instead, for it builds the Program of a part.
    """

    function: Callable[..., Program]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    phase: Phase
    lays_out_batch: bool = False

    def __call__(self, *given: Any) -> Program:
        """The Program it makes."""
        return self.function(*given, *self.arguments, **self.options)


@dataclass(frozen=True)
class Recipe:
    """How a Program is made.

    Attributes:
        origin: the traced function.
        ops: those of the Program, as the last step left them.
        steps: the transforms, in the order in which they act.
    """

    origin: Origin
    ops: tuple[Op, ...] = ()
    steps: tuple[Applied, ...] = ()

    @property
    def phase(self) -> Phase:
        """That of the last step."""
        return self.steps[-1].phase if self.steps else Phase.PRECISION

    def including(self, step: Applied) -> Recipe:
        """The recipe with one more transform, behind those of its phase."""
        at = next((i for i, s in enumerate(self.steps) if s.phase > step.phase), len(self.steps))
        return replace(self, steps=(*self.steps[:at], step, *self.steps[at:]))

    def without(self, function: Callable[..., Program]) -> Recipe:
        """The recipe without this transform."""
        return replace(self, steps=tuple(step for step in self.steps if step.function is not function))

    def until(self, phase: Phase) -> Recipe:
        """The recipe of what is made before this phase."""
        return replace(self, steps=tuple(step for step in self.steps if step.phase < phase))

    def of(self, function: Callable[..., Program]) -> tuple[Applied, ...]:
        """Where this transform was applied."""
        return tuple(step for step in self.steps if step.function is function)


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


def with_steps(program: Program, steps: Iterable[Applied]) -> Program:
    """The Program after these transforms."""
    for step in steps:
        program = step(program)
    return program


def _of(program: Program, recipe: Recipe, count: int) -> Program:
    """A Program as the first steps of a recipe made it."""
    return replace(program, recipe=replace(recipe, ops=program.ops, steps=recipe.steps[:count]))


def recipe_of(program: Program, purpose: str, instead: str) -> Recipe:
    """The recipe of a Program, if building it would give this Program again.

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


def whole_types(program: Program) -> tuple[Any, ...]:
    """The data arguments of the traced function by their types, over all devices together."""
    assert program.signature is not None

    def kind(v: Variable) -> Type:
        return Type(whole_shape(v, program.replicas), v.dtype)

    return tuple(s.unflatten(map(kind, s.variables)) for s in program.signature.data)


def rebuilt(program: Program, data: tuple[Any, ...]) -> Program:
    """The same Program for data of other shapes."""
    return build(recipe_of(program, "for data of another shape", "Feed the shapes it shows"), data)
