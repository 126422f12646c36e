"""The costs of a Program by scope and pass: the numbers of a summary, before they are laid out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from onward.core.cost import Cost, cost, size
from onward.core.homes import scopes
from onward.core.liveness import lifetimes
from onward.core.program import Op, Program, Variable
from onward.core.show import short_type
from onward.core.words import Pass


@dataclass(frozen=True)
class SummaryRow:
    """The total cost of the ops of one scope and one pass.

    Attributes:
        scope: where the ops belong; empty for those outside of any scope. ``"total"`` in totals.
        made_by: the pass; None for all of them together.
        ops: how many.
        parameters: numbers that are trained and first read here.
        output: the type of what the scope gives in this pass, as the listing shows it.
        flops: operations on numbers.
        read: bytes read.
        written: bytes written.
        saved: bytes that the forward pass keeps for the backward pass.
        live: the most bytes in memory while one of these ops runs, those of the whole step.
        exchanged: bytes that each device puts into collectives.
        times: how many scopes in a row are just like this one; 1 for one alone.
    """

    scope: str
    made_by: Pass | None
    ops: int
    parameters: int
    output: str
    flops: int
    read: int
    written: int
    saved: int
    live: int
    exchanged: int
    times: int = 1


class Count:
    """Counts the ops of a Program, whichever of them are asked for."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.scopes: Mapping[Op, str] = scopes(program)
        self.place = {op: i for i, op in enumerate(program.ops)}

    def row(self, scope: str, made_by: Pass | None, ops: Iterable[Op]) -> SummaryRow:
        """The total cost of these ops as a row."""
        chosen = list(ops)
        spent = sum(map(cost, chosen), Cost())
        return SummaryRow(
            scope=scope,
            made_by=made_by,
            ops=len(chosen),
            parameters=sum(p.size for op in chosen for p in self._first_read.get(op, ())),
            output=self._output(chosen) if made_by is not None else "",
            flops=spent.flops,
            read=spent.read,
            written=spent.written,
            saved=sum(size(v) for op in chosen for v in op.outputs if v in self._saved),
            live=max((self._live.get(self.place[op], 0) for op in chosen), default=0),
            exchanged=spent.exchanged,
        )

    @cached_property
    def _first_read(self) -> Mapping[Op, list[Variable]]:
        """The parameters, with the op that reads each of them first."""
        unread = set(self.program.parameters)
        found: dict[Op, list[Variable]] = {}
        for op in self.program.ops:
            if here := [v for v in dict.fromkeys(op.inputs) if v in unread]:
                found[op] = here
                unread.difference_update(here)
        return found

    @cached_property
    def _saved(self) -> frozenset[Variable]:
        """The Variables that the forward pass computes and the backward pass reads."""
        late = (op for op in self.program.ops if op.made_by is Pass.BACKWARD)
        made = {v for op in self.program.ops if op.made_by is Pass.FORWARD for v in op.outputs}
        return frozenset(v for op in late for v in op.inputs if v in made)

    @cached_property
    def _live(self) -> Mapping[int, int]:
        """The bytes in memory while each op runs, by its number."""
        lives = lifetimes(self.program)
        most: dict[int, int] = {}
        for step, taken in zip(lives.steps, lives.bytes, strict=False):
            most[step.op] = max(most.get(step.op, 0), taken)
        return most

    def _output(self, ops: list[Op]) -> str:
        """The type of what the last of these ops with a result gives first."""
        given = [op.outputs[0] for op in ops if op.outputs]
        return short_type(given[-1]) if given else ""


def rows_of(count: Count, depth: int) -> list[SummaryRow]:
    """A row for each scope and pass, scopes in the order of their first op."""
    groups: dict[str, dict[Pass, list[Op]]] = {}
    for op in count.program.ops:
        scope = "/".join(count.scopes[op].split("/")[:depth])
        groups.setdefault(scope, {}).setdefault(op.made_by, []).append(op)
    return [
        count.row(scope, made_by, passes[made_by])
        for scope, passes in groups.items()
        for made_by in Pass
        if made_by in passes
    ]


def totals_of(count: Count) -> list[SummaryRow]:
    """A row for each pass, and one for the whole step."""
    ops = count.program.ops
    by_pass = [(p, [op for op in ops if op.made_by is p]) for p in Pass]
    rows = [count.row("total", made_by, mine) for made_by, mine in by_pass if mine]
    every = sum(p.size for p in count.program.parameters)
    return [*rows, replace(count.row("total", None, ops), parameters=every)]
