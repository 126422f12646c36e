"""A printable table of the values that a Program keeps for its backward pass or computes again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onward.core.check import expect_program
from onward.core.columns import columns
from onward.core.cost import cost, size
from onward.core.errors import GraphError
from onward.core.program import Op, Program, Variable
from onward.core.walk import producers
from onward.core.words import Pass
from onward.develop.accumulation.accumulate import accumulation_of
from onward.develop.recompute.activations import Activations
from onward.develop.recompute.again import keeping
from onward.develop.recompute.loops import Kept, keeping_in_loops, loops_kept
from onward.develop.recompute.measure import compiled, estimated
from onward.develop.recompute.replay import without_steps


@dataclass(frozen=True)
class RecomputedRow:
    """Values of one type that ops of one type make at one line: how many are kept, how many made again."""

    made_by: str
    type: str
    line: str
    kept: int
    again: int
    bytes_kept: int
    bytes_again: int
    flops: int

    @property
    def words(self) -> tuple[str, ...]:
        """The row as text."""
        numbers = map(_mega, (self.bytes_kept, self.bytes_again, self.flops))
        return (self.made_by, self.type, self.line, str(self.kept), str(self.again), *numbers)


@dataclass(frozen=True)
class Recomputed:
    """A report of what ``recompute`` chose to keep and to compute again; print it.

    Attributes:
        rows: the values, those first that are computed again and hold the most bytes.
        flops: the operations on floating point numbers that run twice.
        estimated: the estimated peak of temporary memory in bytes, without recompute and with it.
        compiled: the same of the compiled step, if asked for.
        loops: for each loop whose turns compute something again, its first result and what each turn keeps.
    """

    rows: tuple[RecomputedRow, ...]
    flops: int
    estimated: tuple[int, int]
    compiled: tuple[int, int] | None = None
    loops: Kept = ()

    def __str__(self) -> str:
        head = "made by", "type", "at", "kept", "again", "kept MB", "freed MB", "MFLOP again"
        lines = [row.words for row in self.rows]
        total = [
            f"{word} peak of temporary memory: {_mega(before)} -> {_mega(after)} MB"
            for word, pair in (("estimated", self.estimated), ("compiled", self.compiled))
            if pair is not None
            for before, after in [pair]
        ]
        table = columns([head, *lines], right=range(3, 8))
        turns = [f"each turn of {name} keeps {', '.join(kept) or 'nothing'}" for name, kept in self.loops]
        return "\n".join([table, *turns, f"computed again: {_mega(self.flops)} MFLOP", *total])


def recomputed(program: Program, compile: bool = False) -> Recomputed:  # noqa: A002
    """Report which values of its forward pass a Program keeps, and which it computes again.

    Args:
        program: what ``recompute`` returned; of a Program that computes nothing again the table is empty.
        compile: whether to compile it with and without ``recompute``, to tell what the step really takes.

    Raises:
        GraphError: it is accumulated already.
        RecipeError: the Program was not traced, or its ops were changed by hand.

    Example:
        >>> import jax, jax.numpy as jnp, onward as ow
        >>> def loss(w, x):
        ...     with jax.named_scope("block"):
        ...         return jnp.sum(jnp.sin(x @ w))
        >>> program = ow.SGD(0.1).minimize(loss, jnp.ones((3, 3)), jnp.ones((4, 3)))
        >>> [(row.made_by, row.again) for row in recomputed(ow.recompute(program, scopes="block")).rows]
        [('dot_general', 1), ('sin', 1)]
    """
    expect_program(program, "recomputed")
    if accumulation_of(program) is not None:
        raise GraphError(
            f"Program {program.name!r} is accumulated: what its loop computes again cannot be seen. Look "
            "before: "
            "recomputed(program), then accumulate(program, steps)."
        )
    before = without_steps(program, keeping, keeping_in_loops)
    again = again_ops(program)
    rows = _rows(program, Activations(before).read, again)
    return Recomputed(
        rows=rows,
        flops=sum(cost(op).flops for op in again),
        estimated=(estimated(before).bytes, estimated(program).bytes),
        compiled=(compiled(before), compiled(program)) if compile else None,
        loops=loops_kept(program),
    )


def again_ops(program: Program) -> list[Op]:
    """The ops that compute something of the forward pass a second time."""
    types = {v: op.type for v, op in producers(program).items()}
    late = (op for op in program.ops if op.made_by is Pass.BACKWARD and op.of is not None)
    return [op for op in late if op.of is not None and types.get(op.of) == op.type]


def _rows(program: Program, read: Iterable[Variable], again: list[Op]) -> tuple[RecomputedRow, ...]:
    """The values that the backward pass reads, those of equal ops at one line together."""
    found: dict[tuple[str, str, str], list[int]] = {}
    made = producers(program)
    names = {v.name for v in read}
    twice = {op.of for op in again}
    for v, op in made.items():
        if op.made_by is not Pass.FORWARD or (v.name not in names and op.outputs[0] not in twice):
            continue
        counts = found.setdefault((op.type, v.type, str(op.source or "")), [0] * 5)
        is_again = op.outputs[0] in twice
        for k, n in ((is_again, 1), (2 + is_again, size(v)), (4, cost(op).flops * is_again)):
            counts[k] += n
    rows = (
        RecomputedRow(*key, kept=c[0], again=c[1], bytes_kept=c[2], bytes_again=c[3], flops=c[4])
        for key, c in found.items()
    )
    return tuple(sorted(rows, key=lambda r: (-r.bytes_again, -r.bytes_kept)))


def _mega(number: int) -> str:
    return f"{number / 1e6:,.2f}"
