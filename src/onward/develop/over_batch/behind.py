"""The ops behind the statistics of a batch: they need no example, and run once, on those of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet

from onward.core.program import Op, Program, Variable
from onward.core.walk import ancestors
from onward.develop.over_batch.known import Following, Follows, How


def computed(program: Program) -> list[Variable]:
    """The Variables that ops make, in order: at another length of the batch, those of the same ops."""
    return [v for op in program.ops for v in op.outputs]


def behind(
    whole: Program,
    part: Program,
    following: Following,
    stays: Iterable[Variable],
    is_known: Callable[[Follows], bool],
) -> set[Op]:
    """The ops of the part that can run on values of the whole, as many as there are.

    Args:
        whole: the Program of the whole batch.
        part: that of a part, with the same ops.
        following: how its values follow.
        stays: what every part computes by itself, and all that it is made of.
        is_known: whether a value of the whole is known that follows so.
    """
    like = dict(zip(computed(part), computed(whole), strict=True))
    kept = ancestors(part, list(stays))

    def can_come(op: Op, held: AbstractSet[Variable]) -> bool:
        reads = [v for v in op.inputs if v not in held]
        has_rows = any(v.shape != like.get(v, v).shape for v in (*op.inputs, *op.outputs))
        has_rows |= any(following.found[v].kind is How.ROWS for v in reads)
        of_part = (v for v in reads if v in like)
        return not has_rows and not op.body.has_effects and all(is_known(following.found[v]) for v in of_part)

    while True:
        held, after = set[Variable](), set[Op]()
        for op in part.ops:
            if op.outputs and kept.isdisjoint(op.outputs) and can_come(op, held):
                after.add(op)
                held.update(op.outputs)
        read = {v for op in part.ops if op not in after for v in op.inputs}
        if held.isdisjoint(read):
            return after
        kept |= held & read  # what gives examples a statistic stays with them
