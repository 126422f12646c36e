"""The answer of ``compare``: where two Programs part, as a page and to be asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from onward.core.columns import columns
from onward.core.program import Op, Program, Variable
from onward.core.show import sentence, short_type
from onward.explain.compare.disagreement import Disagreement
from onward.explain.compare.search import Parting
from onward.explain.compare.twins import is_key, widened
from onward.explain.compare.values import count_of
from onward.explain.diff.compare import compared
from onward.explain.diff.diff import diff
from onward.explain.diff.match import Matching

_FEW = 6


@dataclass(frozen=True, eq=False)
class Comparison:
    """Where two Programs part; true if they do not. Print it.

    Attributes:
        a: the first Program.
        b: the second.
        verdict: what the search found.
        is_swapped: whether the ops of b were run on what a read, and not those of a on what b read.
        step: which of several steps, counted from 0; None for a step alone.
        rounding: the coarsest dtype whose rounding was admitted, where that is coarser than float32.
    """

    a: Program
    b: Program
    verdict: Parting
    is_swapped: bool = False
    step: int | None = None
    rounding: str = ""

    def __bool__(self) -> bool:
        return self.equal

    @property
    def equal(self) -> bool:
        """Whether all that must agree does, within what rounding explains."""
        return self.verdict.first is None and self.is_matched

    @property
    def is_matched(self) -> bool:
        """Whether anything was found that must agree."""
        return bool(self.verdict.largest[1])

    @cached_property
    def before(self) -> Op | None:
        """The op of a from which on they differ; None where only b has one."""
        return self._chosen[self.is_swapped]

    @cached_property
    def after(self) -> Op | None:
        """The op of b from which on they differ; None where only a has one."""
        return self._chosen[not self.is_swapped]

    @property
    def op(self) -> Op | None:
        """The first op whose inputs agree and whose outputs do not: that of b, or one that b lacks."""
        mine, theirs = self.ops
        of_a, of_b = self.before, self.after
        return of_a if len(mine) > len(theirs) else of_b or of_a

    @property
    def ops(self) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
        """The ops of a and those of b between the last values that agree and the first that do not."""
        mine, theirs = self.verdict.region
        return (theirs, mine) if self.is_swapped else (mine, theirs)

    @cached_property
    def inside(self) -> tuple[Op, ...]:
        """Of a loop or a branch, the first ops within it whose code is another: that of a, that of b."""
        if self.before is None or self.after is None:
            return ()
        both = self.before.subprograms, self.after.subprograms
        found = (diff(both[0][name], both[1][name]) for name in both[0] if name in both[1])
        pairs = (pair for apart in found for pair in apart.changed if not pair.is_resized)
        return next(((pair.before, pair.after) for pair in pairs), ())

    @property
    def variable(self) -> str:
        """The name of the first value that differs, in b if it has one."""
        first = self.verdict.first
        if first is None:
            return ""
        return (first.mine if self.is_swapped or first.theirs is None else first.theirs).name

    @property
    def file(self) -> str:
        """The user's file; empty where none is known."""
        return next((op.source.file for op in self._told if op.source is not None and op.source.file), "")

    @property
    def line(self) -> int:
        """The line in it; 0 where none is known."""
        return next((op.source.line for op in self._told if op.source is not None and op.source.file), 0)

    @property
    def at(self) -> tuple[int, ...]:
        """Where the first value that differs does so most."""
        return self._worst[0]

    @property
    def difference(self) -> float:
        """The largest difference there; 0 if they are equal."""
        return self._worst[1]

    @property
    def bound(self) -> float:
        """How far rounding can lead at that place."""
        return self._worst[2]

    @property
    def values(self) -> tuple[Any, Any]:
        """The numbers that a and b give there, of the same inputs."""
        return self._worst[3]

    @property
    def reaches(self) -> tuple[str, ...]:
        """The names of all that must agree and does not."""
        return tuple(anchor.what for anchor in self.verdict.reaches)

    @property
    def largest(self) -> float:
        """The largest difference of what must agree, as a part of its largest number."""
        return self.verdict.largest[0]

    @property
    def _told(self) -> list[Op]:
        return [op for op in (self.op, self.after, self.before) if op is not None]

    @cached_property
    def _chosen(self) -> tuple[Op | None, Op | None]:
        """Of both regions the first op that is alone or computes otherwise, else the last."""
        matching = self.verdict.matching
        mine, theirs = self.verdict.region
        other = {op for op in mine if not _has_like(op, matching.ops.get(op), matching)}
        others = {op for op in theirs if not _has_like(matching.mirrored().ops.get(op), op, matching)}
        if count_of(self.a) != count_of(self.b):  # there numbers differ with the length of a part
            alone = [op for op in theirs if op not in matching.ops.values()]
            others = set(alone) or others
        return (
            next((op for op in mine if op in other), mine[-1] if mine else None),
            next((op for op in theirs if op in others), theirs[-1] if theirs else None),
        )

    @cached_property
    def _worst(self) -> tuple[tuple[int, ...], float, float, tuple[Any, Any]]:
        first = self.verdict.first
        if first is None:
            return (), 0.0, 0.0, (None, None)
        excess = first.excess
        at = tuple(map(int, np.unravel_index(int(np.argmax(excess)), excess.shape)))
        bound = np.broadcast_to(
            np.asarray(0.0 if first.expected.bound is None else first.expected.bound), excess.shape
        )
        pair = (_number(first.expected.value, at), _number(first.found, at))
        return at, float(excess[at]), float(bound[at]), pair[::-1] if self.is_swapped else pair

    def __str__(self) -> str:
        return "\n".join(_page(self))

    def __repr__(self) -> str:
        return f"Comparison({self._title!r})"

    @property
    def _title(self) -> str:
        both = f"{self.a.name} and {self.b.name}"
        when = "" if self.step is None else f" at step {self.step}"
        if not self.is_matched:
            return f"{both} cannot be matched{when}: nothing in them must agree."
        if self.verdict.first is None:
            within = f" within rounding of {self.rounding}" if self.rounding else ""
            return f"{both} are equal{when}{within}."
        op = self.op
        if op is None:
            return f"{both} part{when} before anything is computed, in {self.variable!r}."
        return f"{both} part{when} at {op.type!r}, which gives {self.variable!r}."


def _has_like(mine: Op | None, theirs: Op | None, matching: Matching) -> bool:
    """Whether two ops are partners that compute the same, for a batch of another length too."""
    if mine is None or theirs is None:
        return False
    pair = compared(mine, theirs, matching.variables)
    return not pair.differences or pair.is_resized


def _page(found: Comparison) -> Iterator[str]:
    yield found._title
    rows = [row for row in _rows(found) if row[1]]
    yield from (f"  {line}" for line in columns(rows).splitlines())


def _rows(found: Comparison) -> Iterator[tuple[str, str]]:
    first = found.verdict.first
    if first is not None:
        both = zip("ab", found.ops, (found.before, found.after), strict=True)
        for name, ops, op in both if any(found.ops) else ():
            yield from _of_program(name, ops, op)
        for name, op in zip("ab", found.inside, strict=False):
            yield f"inside {name}", f"{sentence(op)}{_place(op)}"
        yield "values", _values(found, first)
        yield "bound", f"rounding explains {found.bound:.3g}"
        yield "reaches", _several(found.reaches)
    else:
        number, what = found.verdict.largest
        yield "largest", f"difference {number:.3g} of the largest number, in {what}" if what else ""
    (of_a, of_b), note = _counts(found), _forgiven(found.verdict.forgiven)
    yield "compared", f"{of_a} of {len(found.a.ops)} ops of a, {of_b} of {len(found.b.ops)} of b"
    yield "besides", note


def _of_program(name: str, ops: Sequence[Op], chosen: Op | None) -> Iterator[tuple[str, str]]:
    """The ops of one Program, that which is named marked, with its line."""
    if not ops:
        yield name, "has no such op: it leaves the value as it was"
        return
    shown = [op for op in ops if op is chosen] + [op for op in ops if op is not chosen]
    for op in shown[:_FEW]:
        types = " ".join(dict.fromkeys(map(short_type, op.outputs)))
        yield name, f"{op.made_by}  {types}  {sentence(op)}{_place(op)}"
        name = ""
    if len(ops) > _FEW:
        yield "", f"... and {len(ops) - _FEW} more ops before the last values that agree"


def _place(op: Op) -> str:
    """The user's line behind an op, as a comment."""
    return f"  # {op.source} in {op.source.function}" if op.source is not None and op.source.file else ""


def _values(found: Comparison, first: Disagreement) -> str:
    at = f" at {list(found.at)}" if found.at else ""
    if is_key(first.found):
        return f"other random keys{at}"
    of_a, of_b = found.values
    count, size = int((first.excess > 0).sum()), first.excess.size
    return f"a {of_a:.9g}, b {of_b:.9g}{at}, difference {found.difference:.3g}; {count} of {size} differ"


def _number(values: Any, at: tuple[int, ...]) -> Any:
    number = widened(values)[at] if not is_key(values) else 0
    return complex(number) if np.iscomplexobj(number) else float(number)


def _counts(found: Comparison) -> tuple[int, int]:
    mine, theirs = found.verdict.compared
    return (theirs, mine) if found.is_swapped else (mine, theirs)


def _forgiven(values: Sequence[Disagreement]) -> str:
    if not values:
        return ""
    names = ", ".join(_name(d.mine) for d in values[:3])
    return f"{len(values)} values on the way are others, without effect: {names}"


def _name(v: Variable) -> str:
    return v.name


def _several(names: Sequence[str]) -> str:
    shown = ", ".join(names[:4])
    return f"{shown} and {len(names) - 4} more" if len(names) > 4 else shown
