"""The transform that lets a Program be split over a mesh, which a test Program takes over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from jax.sharding import PartitionSpec

from onward.core.errors import ArgumentError
from onward.core.meshes import axes_of, parts
from onward.core.program import Op, Partition, Phase, Program, Variable
from onward.core.transform import transform
from onward.core.words import Kind


@transform(phase=Phase.STEP)
def partitioned(program: Program, how: Partition) -> Program:
    """The Program over a mesh; see ``partition``."""
    for name, spec in how.specs.items():
        if name in program.variables:
            expect_fit(program.variables[name], spec, how.mesh)
    ops = tuple(_over(op, how) for op in program.ops)
    return replace(program, ops=ops, partition=how)


def _over(op: Op, how: Partition) -> Op:
    body = op.body.over_mesh(how)
    return op if body is op.body else replace(op, body=body)


def does_fit(v: Variable, spec: PartitionSpec, mesh: Mapping[str, int]) -> bool:
    """Whether a Variable has these dimensions, and their axes divide them."""
    counts = parts(spec, mesh)
    return len(counts) <= v.ndim and not any(n % count for n, count in zip(v.shape, counts, strict=False))


def expect_fit(v: Variable, spec: PartitionSpec, mesh: Mapping[str, int]) -> None:
    """Raise ``ArgumentError`` for a dimension that is not there, or that its axes do not divide."""
    if len(spec) > v.ndim:
        raise ArgumentError(
            f"partition: {v.name!r} is {v.type}, with {v.ndim} dimensions, and {spec} speaks of {len(spec)}."
        )
    for i, (count, axes) in enumerate(zip(parts(spec, mesh), axes_of(spec), strict=True)):
        if v.shape[i] % count:
            below = v.shape[i] // count * count
            sizes = f"{below} or {below + count}" if below else f"{count}"
            rest = "leave a short last batch out" if v.kind is Kind.DATA else "split another dimension"
            advice = f"Make it {sizes}, {rest}, or leave it whole."
            raise ArgumentError(
                f"partition: {v.name!r} is {v.type}, and {' x '.join(axes)} ({count} parts) does not divide "
                f"its dimension {i}. {advice}"
            )
