"""The transform that lets a Program be split over a mesh, which a test Program takes over."""

from __future__ import annotations

from dataclasses import replace

from onward.core.program import Op, Partition, Phase, Program
from onward.core.transform import transform


@transform(phase=Phase.STEP)
def partitioned(program: Program, how: Partition) -> Program:
    """The Program over a mesh; see ``partition``."""
    ops = tuple(_over(op, how) for op in program.ops)
    return replace(program, ops=ops, partition=how)


def _over(op: Op, how: Partition) -> Op:
    body = op.body.over_mesh(how)
    return op if body is op.body else replace(op, body=body)
