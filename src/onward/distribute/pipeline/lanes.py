"""The lanes of a stage: devices, or groups of them, that each have micro-batches of their own.

Along an axis of the mesh that splits examples and nothing else, the devices of a stage need nothing of each
other until the update: each adds up what its own micro-batches make, and these sums are added once a step.
So a pipeline with ``data=2`` takes its batch in twice as many micro-batches, two at a time.

>>> how = Partition({"data": 2, "model": 4}, {"w": PartitionSpec(None, "model"), "x": PartitionSpec("data")})
>>> lanes = lanes_of(how, (), ["x"])
>>> lanes.axes, lanes.count, lanes.within.mesh
(('data',), 2, {'model': 4})
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from jax.sharding import PartitionSpec

from onward.core.meshes import axes_of
from onward.core.program import Applied, Partition, Phase, Recipe
from onward.distribute.partition import constrained
from onward.distribute.pipeline.stage_specs import batch_axes, without_axes


@dataclass(frozen=True)
class Lanes:
    """How the devices of a stage make up lanes.

    Attributes:
        mesh: all devices of a stage, and what they share; None: one device.
        axes: those of the mesh along which each has micro-batches of its own.
    """

    mesh: Partition | None = None
    axes: tuple[str, ...] = ()

    @cached_property
    def count(self) -> int:
        """How many micro-batches a stage works on at once."""
        return 1 if self.mesh is None else prod(self.mesh.mesh[axis] for axis in self.axes)

    @cached_property
    def within(self) -> Partition | None:
        """The mesh that the devices of one lane share; None where it is one device."""
        how = self.mesh
        mesh = {} if how is None else {axis: n for axis, n in how.mesh.items() if axis not in self.axes}
        if how is None or not mesh:
            return None
        return Partition(mesh, {name: without_axes(spec, self.axes) for name, spec in how.specs.items()})

    def turn(self, number: int) -> int | slice:
        """Where the micro-batches that a stage works on at once stand among all."""
        first = number * self.count
        return slice(first, first + self.count) if self.axes else first


def lanes_of(how: Partition | None, constraints: Collection[Applied], names: Collection[str]) -> Lanes:
    """The lanes of a stage: along the axes of its mesh that split examples and nothing else.

    Args:
        how: what the devices of a stage share.
        constraints: on activations and gradients.
        names: the data that is cut into micro-batches.
    """
    if how is None:
        return Lanes()
    others = {axis for spec in _otherwise(how, constraints, names) for axes in axes_of(spec) for axis in axes}
    return Lanes(how, tuple(axis for axis in batch_axes(how, names) if axis not in others))


def _otherwise(
    how: Partition, constraints: Collection[Applied], names: Collection[str]
) -> Iterator[PartitionSpec]:
    """How all but examples is split."""
    yield from (spec[1:] if name in names else spec for name, spec in how.specs.items())
    for step in constraints:
        _, specs, _ = step.arguments
        yield from (spec[1:] if step.phase is Phase.FORWARD else spec for _, spec in specs)


def in_lane(recipe: Recipe, lanes: Lanes) -> Recipe:
    """The recipe of a Program whose constraints speak of no axis of the lanes."""
    return replace(recipe, steps=tuple(_in_lane(step, lanes.axes) for step in recipe.steps))


def _in_lane(step: Applied, axes: Collection[str]) -> Applied:
    if step.function is not constrained:
        return step
    mesh, specs, must = step.arguments
    left = tuple((name, without_axes(spec, axes)) for name, spec in specs)
    return replace(step, arguments=(mesh, left, must))
