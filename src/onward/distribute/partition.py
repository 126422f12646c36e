"""One Program over a mesh of devices, none of which need hold the whole of it: shardings by name.

    partition(program, {"data": 2, "model": 4}, {"*/w1": P(None, "model"), "*/w2": P("model")})

The Program says how its arrays are split; JAX's own partitioner makes of that what each device computes, and
puts in the collectives. So what is split has no influence on the numbers but for rounding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from onward.core.builder import with_behind
from onward.core.check import expect_program
from onward.core.errors import ArgumentError, GraphError, UnknownNameError
from onward.core.jaxprs.body import Body, body_of
from onward.core.meshes import abstract_mesh, axes_of, does_fit, expect_axes, expect_fit
from onward.core.partitioned import partitioned
from onward.core.placement import expect_no_axis
from onward.core.program import Applied, Partition, Phase, Program, Recipe, Variable
from onward.core.recipe import build, recipe_of, whole_types
from onward.core.structure import describe, is_count
from onward.core.transform import transform
from onward.core.walk import Where, listed, select
from onward.core.words import Kind
from onward.develop.accumulation.accumulate import weighed_batch
from onward.develop.batch import data_types

Split = PartitionSpec | Sequence[Any] | str | None
_Specs = tuple[tuple[str, PartitionSpec], ...]
_KIND = "sharding_constraint"  # the primitive that stands behind what is split


_PURPOSE = "over a mesh", "Compile it as it is and give it sharded arrays"
_DIVIDES_NONE = (
    "partition: {v.name!r} is {v.type}, and {axis!r} ({n} parts) divides none of its dimensions. Make one a "
    "multiple of {n}, split it over another axis, or leave it out: then it is whole on every device."
)


def partition(
    program: Program,
    mesh: Mapping[str, int] | Mesh | AbstractMesh,
    where: Mapping[Where, Split] | Mapping[str, Split],
    batch: str | tuple[str, ...] | None = None,
) -> Program:
    """The Program for a mesh of devices, with its arrays split over the axes of the mesh.

    A parameter is split as ``where`` says, its gradient follows, and what an optimizer keeps of it in its
    shape is split in the same way: so a model may be larger than the memory of one device. All else is whole
    on every device, or lies as JAX's partitioner finds best. The numbers are those of one device, but for
    rounding. ``collectives(program)`` compiles it and tells each exchange between devices with the line that
    needs it; ``plan(program)`` what each device keeps.

    Splitting every parameter over the axis that splits the batch is known as FSDP or ZeRO-3: parameters are
    gathered where they are read, and the batch stays split. Splitting the first matrix of a block by columns
    and the second by rows is known as tensor parallelism.

    Args:
        program: a Program that was traced, for one device.
        mesh: the names of its axes with their lengths, on the first devices that JAX shows; or a mesh of JAX.
        where: for names, patterns (``"*/w1"``), or predicates how what they meet is split: a
            ``PartitionSpec``; the name of one axis, which then splits the longest dimension that it divides;
            or None, which leaves it whole. The first entry that meets an array counts. An entry that meets
            parameters is about these; otherwise about data and other state; otherwise about activations, with
            their gradients; otherwise about gradients.
        batch: the axes that split the first dimension of the batch; ``"data"`` unless given, if the mesh has
            such an axis.

    Raises:
        ArgumentError: an axis that the mesh does not have, or that does not divide a dimension; the name of
            an axis for one array by its name, of which it divides none.
        UnknownNameError: an entry that meets nothing.
        GraphError: the Program is replicated or partitioned already.
        RecipeError: the Program was not traced, or its ops were changed by hand.

    Source: Shoeybi et al., Megatron-LM, 2019, section 3, for tensor parallelism; Rajbhandari et al., ZeRO,
    2020, section 5, for splitting all state over the axis of the batch.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> from jax.sharding import PartitionSpec as P
        >>> def loss(params, x):
        ...     return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"]) ** 2)
        >>> params = {"w1": jnp.ones((4, 8)), "w2": jnp.ones((8, 2))}
        >>> program = ow.Adam(1e-3).minimize(loss, params, jnp.ones((6, 4)))
        >>> mesh = {"data": 2, "model": 4}
        >>> program = ow.partition(program, mesh, {"w1": P(None, "model"), "w2": P("model")})
        >>> step = ow.compile(program)
        >>> state, out = step(step.init(params), jnp.ones((6, 4)))
        >>> state["w1"].sharding.spec, state["w1/mean"].addressable_shards[0].data.shape
        (P(None, 'model'), (4, 2))
    """
    expect_program(program, "partition")
    _expect_whole(program)
    if not isinstance(where, Mapping):
        raise ArgumentError(f"partition: where is {describe(where)}; expected a dict, {{'*/w1': 'model'}}.")
    recipe = recipe_of(program, *_PURPOSE)
    lengths, devices = _mesh(mesh)
    axes = batch or ("data" if "data" in lengths else ())
    names, weight = weighed_batch(program)
    if weight is not None:
        program = _divided(program, recipe, names, prod(lengths.get(a, 1) for a in listed(axes)))
        recipe = recipe_of(program, *_PURPOSE)
    found = _Found(program, lengths)
    forward = build(Recipe(recipe.origin, steps=recipe.until(Phase.ROLL).steps), whole_types(program))
    found.search(where, forward)
    found.split_batch(axes, names)
    grown = recipe
    for specs, phase, must in (
        (found.activations, Phase.FORWARD, True),
        (found.rows_of(forward), Phase.FORWARD, False),
        (found.gradients, Phase.GRADIENT, True),
    ):
        if specs:
            grown = grown.including(Applied(constrained, (lengths, specs, must), {}, phase))
    program = program if grown is recipe else build(grown, whole_types(program))
    return partitioned(program, Partition(lengths, found.placed, devices))


@transform(phase=Phase.FORWARD)
def constrained(program: Program, mesh: Mapping[str, int], specs: _Specs, must: bool) -> Program:
    """The Program with an op behind each of these values, which lets it be split so.

    Some may not be there: a test Program has no gradients, and a loop hands out none of its own. Unless they
    ``must``, those that the axes do not divide, such as the rows of a small micro-batch, stay as they are.
    """
    how = {program.variables[name]: spec for name, spec in specs if name in program.variables}
    for v, spec in how.items() if must else ():
        expect_fit(v, spec, mesh)
    how = {v: spec for v, spec in how.items() if does_fit(v, spec, mesh)}

    def body(v: Variable) -> Body:
        sharding = NamedSharding(abstract_mesh(mesh), how[v])
        return body_of(lambda x: [jax.lax.with_sharding_constraint(x, sharding)], v.aval)

    result = with_behind(program, how, _KIND, "split", body)
    made = {op.inputs[0]: op.outputs[0] for op in result.ops if op.inputs[:1] and op.inputs[0] in how}
    pairs = tuple((p, made.get(g, g)) for p, g in result.gradients)
    return replace(result, gradients=pairs)


class _Found:
    """A search for what the entries of a table meet, in the order of the table.

    Attributes:
        placed: how state and data are split, by name.
        values: how activations and gradients are.
    """

    def __init__(self, program: Program, mesh: Mapping[str, int]) -> None:
        self.program, self.mesh = program, mesh
        self.placed: dict[str, PartitionSpec] = {}
        self._batch: tuple[str, tuple[str, ...]] = "", ()
        self._activations: dict[str, PartitionSpec] = {}
        self._gradients: dict[str, PartitionSpec] = {}

    def search(self, where: Mapping[Any, Split], forward: Program) -> None:
        """Find what each entry meets first: parameters, what else is given, activations, gradients."""
        others = [v for v in (*self.program.inputs, *self.program.state) if v not in self.program.parameters]
        computed = [v for op in forward.ops for v in op.outputs]
        gradients = [v for v in self.program.variables.values() if v.kind is Kind.GRADIENT]
        places = (
            (self.program.parameters, self.placed),
            (others, self.placed),
            (computed, self._activations),
            (gradients, self._gradients),
        )
        for choice, split in where.items():
            for variables, table in places:
                if met := _met(variables, choice):
                    for v in met:
                        spec = _spec(v, split, self.mesh)
                        if isinstance(split, str) and not spec and choice == v.name and self.mesh[split] > 1:
                            raise ArgumentError(_DIVIDES_NONE.format(v=v, axis=split, n=self.mesh[split]))
                        table.setdefault(v.name, spec)
                    break
            else:
                select((*self.program.variables.values(), *computed), [choice], "partition")

    def split_batch(self, axes: str | tuple[str, ...], names: Sequence[str]) -> None:
        """Split the first dimension of the data of these names."""
        if not axes:
            return
        self._batch = next(iter(names), ""), axes_of(PartitionSpec(axes))[0]
        for name in names:
            v = self.program.variables[name]
            self.placed.setdefault(name, _spec(v, PartitionSpec(axes), self.mesh))

    def rows_of(self, forward: Program) -> _Specs:
        """Rows of the batch that are made of a matrix which an axis of the batch splits too.

        There the partitioner has to gather either of them, and may choose the rows. With FSDP it is the
        matrix that is to be whole for a moment, while the batch stays split.
        """
        name, axes = self._batch
        if not name:
            return ()
        length, fed = max(1, self.program.variables[name].shape[0]), set(forward.inputs)
        split = {v for v in forward.parameters if set(axes) & set(sum(axes_of(self._of(v)), ()))}
        found = {}
        for op in forward.ops:
            is_fed = not fed.isdisjoint(op.inputs)
            is_split = any(v in split and v.ndim > 1 for v in op.inputs)
            (fed if is_fed else split if is_split else set()).update(op.outputs)
            for v in op.outputs if is_fed and is_split else ():
                if v.ndim and v.shape[0] % length == 0 and v.name not in self._activations:
                    found[v.name] = PartitionSpec(axes, *[PartitionSpec.UNCONSTRAINED] * (v.ndim - 1))
        return tuple(found.items())

    def _of(self, v: Variable) -> PartitionSpec:
        return self.placed.get(v.name, PartitionSpec())

    @property
    def activations(self) -> _Specs:
        """Those of the forward pass."""
        return tuple(self._activations.items())

    @property
    def gradients(self) -> _Specs:
        """Those of the backward pass."""
        return tuple(self._gradients.items())


def _met(variables: Sequence[Variable], choice: Where) -> Sequence[Variable]:
    try:
        return select(variables, [choice], "partition")
    except UnknownNameError:
        return ()


def _spec(v: Variable, split: Split, mesh: Mapping[str, int]) -> PartitionSpec:
    """How a Variable is split, of the words of a person."""
    if isinstance(split, str):
        expect_axes(v, (split,), mesh)
        dividing = [(n, -i) for i, n in enumerate(v.shape) if n and n % mesh[split] == 0]
        at = -max(dividing)[1] if dividing else None
        return PartitionSpec() if at is None else PartitionSpec(*[None] * at, split)
    if split is not None and not isinstance(split, PartitionSpec | tuple | list):
        raise ArgumentError(
            f"partition: {v.name!r} is to be split by {describe(split)}; expected a PartitionSpec, the name "
            "of an axis of the mesh, or None."
        )
    spec = split if isinstance(split, PartitionSpec) else PartitionSpec(*(split or ()))
    if odd := [a for a in spec if not isinstance(a, str | tuple | None)]:
        raise ArgumentError(
            f"partition: {v.name!r}: {spec} splits a dimension by {describe(odd[0])}; expected axes of the "
            "mesh by name, or None."
        )
    expect_fit(v, spec, mesh)
    return spec


def _divided(program: Program, recipe: Recipe, names: Sequence[str], parts: int) -> Program:
    """The Program for a batch that so many parts divide, to which steps fill up what they are fed."""
    rows = program[names[0]].shape[0]
    if not rows % parts:
        return program
    return build(recipe, data_types(program, names, -(-rows // parts) * parts))


def _expect_whole(program: Program) -> None:
    expect_no_axis(program, "partition")
    if program.replicas is not None:
        raise GraphError(
            f"partition: {program.name!r} is replicated already. Leave out replicate: an axis of the mesh "
            "that splits the batch does the same, partition(program, {'data': 4, 'model': 2}, ...)."
        )
    if program.partition is not None:
        raise GraphError(
            f"partition: {program.name!r} is partitioned already, over {program.partition}. Say all in one "
            "call: of its entries the first that meets an array counts."
        )


def _mesh(mesh: Any) -> tuple[dict[str, int], tuple[Any, ...]]:
    """The lengths of the axes, and the devices if the mesh has some."""
    if isinstance(mesh, Mesh):
        return dict(mesh.shape), tuple(mesh.devices.flat)
    lengths = dict(mesh.shape) if isinstance(mesh, AbstractMesh) else mesh
    is_table = isinstance(lengths, Mapping) and lengths
    odd = [f" with {a!r}: {n!r}" for a, n in lengths.items() if not is_count(n)] if is_table else []
    if not is_table or odd or not all(isinstance(a, str) for a in lengths):
        raise ArgumentError(
            f"partition: the mesh is {describe(mesh)}{''.join(odd[:1])}; expected the lengths of its axes by "
            "name, such as {'data': 2, 'model': 4}, or a mesh that jax.make_mesh made."
        )
    return dict(lengths), ()
