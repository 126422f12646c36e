"""How the arrays of a Program lie over a mesh of devices: the axes of it that split their dimensions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from onward.core.errors import ArgumentError, GraphError
from onward.core.graph import Op, Program
from onward.core.variable import Variable
from onward.core.words import Kind, Pass

_SHORT = (
    "leave a short last batch out (ow.batches(..., drop_last=True)), let the loss take example_weight, an "
    "array [batch] that weighs its mean, so that batches are filled up with examples of weight 0"
)


def axes_of(spec: PartitionSpec) -> tuple[tuple[str, ...], ...]:
    """For each dimension the axes of the mesh that split it; none of one that is left to the partitioner.

    >>> axes_of(PartitionSpec(None, "model", ("data", "model"), PartitionSpec.UNCONSTRAINED))
    ((), ('model',), ('data', 'model'), ())
    """
    free = PartitionSpec.UNCONSTRAINED
    return tuple((a,) if isinstance(a, str) else () if a is free else tuple(a or ()) for a in spec)


def parts(spec: PartitionSpec, mesh: Mapping[str, int]) -> tuple[int, ...]:
    """For each dimension that a spec speaks of, into how many parts it is split."""
    return tuple(prod(mesh[a] for a in axes) for axes in axes_of(spec))


def part_size(v: Variable, spec: PartitionSpec | None, mesh: Mapping[str, int]) -> int:
    """How many numbers of a Variable each device holds."""
    return v.size if spec is None else v.size // prod(parts(spec, mesh))


def does_fit(v: Variable, spec: PartitionSpec, mesh: Mapping[str, int]) -> bool:
    """Whether a Variable has these dimensions, and their axes divide them."""
    counts = parts(spec, mesh)
    return len(counts) <= v.ndim and not any(n % count for n, count in zip(v.shape, counts, strict=False))


def expect_fit(v: Variable, spec: PartitionSpec, mesh: Mapping[str, int]) -> None:
    """Raise ``ArgumentError`` for a dimension or an axis that is not there, or does not divide."""
    named = [a for axes in axes_of(spec) for a in axes]
    expect_axes(v, named, mesh)
    if len(set(named)) < len(named):
        raise ArgumentError(f"partition: {v.name!r}: {spec} splits two dimensions over one axis.")
    if len(spec) > v.ndim:
        raise ArgumentError(
            f"partition: {v.name!r} is {v.type}, with {v.ndim} dimensions, and {spec} speaks of {len(spec)}."
        )
    for i, (count, axes) in enumerate(zip(parts(spec, mesh), axes_of(spec), strict=True)):
        if v.shape[i] % count:
            below = v.shape[i] // count * count
            sizes = f"{below} or {below + count}" if below else f"{count}"
            rest = _SHORT if v.kind is Kind.DATA and not i else "split another dimension"
            raise ArgumentError(
                f"partition: {v.name!r} is {v.type}, and {' x '.join(axes)} ({count} parts) does not divide "
                f"its dimension {i}. Make it {sizes}, {rest}, or leave it whole: where={{{v.name!r}: None}}."
            )


def expect_axes(v: Variable, axes: Iterable[str], mesh: Mapping[str, int]) -> None:
    """Raise ``ArgumentError`` for an axis that the mesh does not have."""
    if unknown := [a for a in axes if a not in mesh]:
        raise ArgumentError(
            f"partition: {v.name!r} is to be split over {unknown[0]!r}, and the mesh has the axes "
            f"{', '.join(map(repr, mesh))}."
        )


def check_partition(program: Program) -> None:
    """Raise ``ArgumentError`` if an array of a Program does not fit the way in which its mesh splits it."""
    if (how := program.partition) is not None:
        for name, spec in how.specs.items():
            if v := program.variables.get(name):
                expect_fit(v, spec, how.mesh)


def abstract_mesh(mesh: Mapping[str, int]) -> AbstractMesh:
    """A mesh without devices, whose axes JAX's partitioner splits arrays over."""
    return AbstractMesh(tuple(mesh.values()), tuple(mesh), axis_types=(AxisType.Auto,) * len(mesh))


def specs_of(program: Program) -> dict[str, PartitionSpec]:
    """How the state and the data of a Program are split, by name; what is whole is not among them.

    What the optimizer keeps of a parameter, in its shape, is split as the parameter is.
    """
    if program.partition is None:
        return {}
    told, like = program.partition.specs, parameters_of(program)
    found = {v.name: told.get(v.name, told.get(like.get(v, v).name)) for v in program.state}
    found |= {v.name: told.get(v.name) for v in program.inputs}
    return {name: spec for name, spec in found.items() if spec is not None and any(axes_of(spec))}


def parameters_of(program: Program) -> Mapping[Variable, Variable]:
    """For state of the shape of a parameter, of which it is updated, that parameter.

    >>> import jax.numpy as jnp, onward as ow
    >>> program = ow.Momentum(0.1).minimize(lambda w: w @ w, jnp.ones(3))
    >>> {v.name: w.name for v, w in parameters_of(program).items()}
    {'w/velocity': 'w'}
    """
    of = {v: v for v in program.state if v.kind is Kind.PARAMETER}
    kept = [v for v in program.state if v not in of]
    of |= {gradient: parameter for parameter, gradient in program.gradients}
    updates = [op for op in program.ops if op.made_by is Pass.UPDATE]
    known = 0
    while known < len(of):  # an update of someone else is many ops, of which the first reads a slot alone
        known = len(of)
        for op in (*updates, *reversed(updates)):
            _follow(op, of)
    return {v: of[v] for v in kept if v in of}


def _follow(op: Op, of: dict[Variable, Variable]) -> None:
    """Note that all that an op reads and makes in the shape of one parameter is of that parameter."""
    values = (*op.inputs, *op.outputs)
    for v in values:
        if v not in of:
            alike = {of[x] for x in values if x in of and of[x].shape == v.shape}
            if len(alike) == 1:
                of[v] = alike.pop()


def expect_no_partition(program: Program, what: str, instead: str) -> None:
    """Raise ``GraphError`` if a Program is partitioned, with which this does not go together."""
    if program.partition is not None:
        raise GraphError(
            f"{what}: {program.name!r} is partitioned over a mesh ({program.partition}). {instead}"
        )
