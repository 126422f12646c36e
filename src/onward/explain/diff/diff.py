"""The changes that a transform makes: ops added, removed, changed and re-wired; state and results.

    diff(program, replicate(program, 8))

Every op of both Programs is told exactly once: it is removed, or added, or it is one pair with its partner,
the same, re-wired (it computes the same from something else) or changed.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from onward.core.check import expect_program
from onward.core.program import Program
from onward.explain.diff.changes import Changes
from onward.explain.diff.compare import compared, facts
from onward.explain.diff.lines import headline
from onward.explain.diff.match import Matching, match
from onward.explain.diff.page import html, text


@dataclass(frozen=True, eq=False, repr=False)
class Diff(Changes):
    """The differences from one Program to another; print it. It is false if nothing differs.

    Attributes:
        before: the first Program.
        after: the second.
        added: ops of the second that the first has not.
        removed: ops of the first that the second has not.
        rewired: ops that compute the same as before from something else.
        changed: ops that compute something else, or something of another type, in the same place.
        same: ops that are as they were.
        moved: how many of the paired ops stand in another order.
        facts: differences in feeds, state, what is returned, gradients and next state.
    """

    @property
    def headline(self) -> str:
        """All of it in one line."""
        return headline(self)

    def __str__(self) -> str:
        return text(self)

    def __repr__(self) -> str:
        return f"Diff({self.headline!r})"

    def _repr_html_(self) -> str:
        return html(self)


def diff(a: Program, b: Program) -> Diff:
    """List the changes from one Program to another.

    Ops that a transform shares are known as objects; what it built again is recognized by what it computes,
    so that a Program in another precision, or traced again, does not look all new. Equal changes in many
    layers are one line.

    Args:
        a: the Program before, such as what went into a transform.
        b: the Program after.

    Raises:
        ArgumentError: one of them is not a Program.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.mean(w * x), jnp.ones(3), jnp.ones((8, 3)))
        >>> changes = ow.diff(program, ow.guard(program))
        >>> [op.type for op in changes.added], len(changes.removed), bool(ow.diff(program, program))
        (['finite', 'count_skipped', 'keep', 'keep'], 0, False)
    """
    expect_program(a, "diff")
    expect_program(b, "diff")
    matching = match(a, b)
    pairs = [compared(old, new, matching.variables) for old, new in matching.ops.items()]
    partners = set(matching.ops.values())
    return Diff(
        before=a,
        after=b,
        added=tuple(op for op in b.ops if op not in partners),
        removed=tuple(op for op in a.ops if op not in matching.ops),
        rewired=tuple(p for p in pairs if p.replaced and not p.differences),
        changed=tuple(p for p in pairs if p.differences),
        same=tuple(p for p in pairs if not p.replaced and not p.differences),
        moved=_moved(a, b, matching),
        facts=tuple(facts(a, b, matching)),
        matching=matching,
    )


def _moved(a: Program, b: Program, matching: Matching) -> int:
    """The least number of ops that have to be moved so that all pairs stand in one order."""
    position = {op: i for i, op in enumerate(b.ops)}
    ends: list[int] = []
    for op in a.ops:
        if op in matching.ops:
            i = position[matching.ops[op]]
            k = bisect_left(ends, i)
            ends[k : k + 1] = [i]
    return len(matching.ops) - len(ends)
