"""The costs of a Program in memory and arithmetic, as a table.

``print`` shows it, a notebook shows it in colour and sorts it at a click, and ``rows`` are plain dataclasses,
of which pandas makes a frame.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby

from onward.core.check import expect_program
from onward.core.columns import columns
from onward.core.cost import cost
from onward.core.errors import ArgumentError, nearest
from onward.core.program import Program
from onward.core.show import headline, human_bytes, nbytes
from onward.core.structure import is_word
from onward.core.words import Pass
from onward.explain.summary.fold import folded
from onward.explain.summary.html import html_of
from onward.explain.summary.rows import Count, SummaryRow, rows_of, totals_of
from onward.explain.summary.words import HEADS, NUMBERS, lines, shown_columns

_LOOPED = "What a loop over steps or micro-batches does counts for all its turns together."


@dataclass(frozen=True)
class Summary:
    """The costs of a Program; print it, or leave it as the last line of a notebook cell.

    Attributes:
        title: what the Program is, in a line.
        rows: one for each scope and pass.
        totals: one for each pass, and the last one for the whole step.
        notes: what a reader should know of the numbers.
    """

    title: str
    rows: tuple[SummaryRow, ...]
    totals: tuple[SummaryRow, ...]
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> SummaryRow:
        """The whole step."""
        return self.totals[-1]

    def sorted(self, by: str) -> Summary:
        """The same with the scopes that take the most first.

        Args:
            by: a column: ``"flops"``, ``"saved"``, ``"live"``, ...

        Raises:
            ArgumentError: a column that does not exist; the message names the nearest.
        """
        if not is_word(by, NUMBERS):
            raise ArgumentError(f"There is no column {by!r} of numbers. {nearest(str(by), NUMBERS)}")
        together = max if by == "live" else sum
        scopes = [list(rows) for _, rows in groupby(self.rows, lambda row: row.scope)]
        scopes.sort(key=lambda rows: -together(getattr(row, by) * row.times for row in rows))
        return replace(self, rows=tuple(row for rows in scopes for row in rows))

    def __str__(self) -> str:
        names = shown_columns(self.totals)
        head = [HEADS[name] for name in names]
        table = columns(
            [head, *lines(self.rows, names), *lines(self.totals, names)],
            right=[i for i, name in enumerate(names) if name in NUMBERS],
        ).split("\n")
        rule = "─" * max(map(len, table))
        end = 1 + len(self.rows)
        parts = [self.title, "", table[0], rule, *table[1:end], rule, *table[end:]]
        return "\n".join([*parts, *self.notes])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_of(self.title, self.rows, self.totals, self.notes)


def summary(program: Program, depth: int | None = 1, sort: str | None = None) -> Summary:
    """Tabulate the costs of a Program by scope and pass.

    Each op counts in the scope in which people look for it: a gradient op in that of its forward op, an
    update in that of the first op which reads its parameter. Where nobody named a scope, the calls of the
    user's functions are it; where none was called, the containers in which the parameters lie that an op
    reads (``block_0/attn`` of ``params["block_0"]["attn"]["wq"]``). Layers that take the same are shown once.
    A loop over steps or micro-batches is looked into: what its turns do counts as often as they run, with
    what is kept in one turn at a time. Operations and bytes are those of ``cost``. What is live is counted
    over the ops as they are written, one after the other; ``memory`` counts those that ``compile`` makes of
    them, by the rules of the compiler at hand.

    Args:
        program: at any stage.
        depth: how many levels of scopes are told apart; 0: none; None: all of them.
        sort: a column; the scopes that take the most of it come first. None: in the order of the ops.

    Raises:
        ArgumentError: no Program; a negative depth; a column that does not exist.

    Example:
        >>> import jax, jax.numpy as jnp, onward as ow
        >>> def loss(w, x):
        ...     with jax.named_scope("layer"):
        ...         y = jnp.tanh(x @ w)
        ...     return jnp.mean(y)
        >>> program = ow.SGD(0.1).minimize(loss, jnp.ones((64, 32)), jnp.ones((16, 64)))
        >>> summary(program).sorted("flops").rows[0]  # doctest: +ELLIPSIS
        SummaryRow(scope='layer', made_by=<Pass.FORWARD: 'forward'>, ops=2, parameters=2048, ...
        >>> summary(program).total.flops == ow.cost(program).flops
        True
    """
    expect_program(program, "summary")
    if depth is not None and (not isinstance(depth, int) or depth < 0):
        raise ArgumentError(f"summary: depth is {depth!r}; expected a number of levels from 0 on, or None.")
    count = Count(program)
    levels = depth if depth is not None else max((one.scope.count("/") + 1 for one in count.ops), default=1)
    notes = (*_notes(program), *([_LOOPED] if count.looped else []))
    found = Summary(headline(program), tuple(folded(rows_of(count, levels))), tuple(totals_of(count)), notes)
    return found.sorted(sort) if sort is not None else found


def summary_by_pass(program: Program) -> str:
    """How many ops and how many bytes of results each pass has.

    >>> import jax.numpy as jnp, onward as ow
    >>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3))
    >>> print(ow.summary_by_pass(program))
    pass        ops    results
    forward       2       16 B
    backward      3       28 B
    update        2       16 B
    """
    expect_program(program, "summary_by_pass")
    rows = [f"{'pass':<10}{'ops':>5}{'results':>11}"]
    for made_by in Pass:
        ops = [op for op in program.ops if op.made_by is made_by]
        if ops:
            total = sum(map(nbytes, (v for op in ops for v in op.outputs)))
            rows.append(f"{made_by:<10}{len(ops):>5}{human_bytes(total):>11}")
    return "\n".join(rows)


def _notes(program: Program) -> tuple[str, ...]:
    notes = []
    if program.partition is not None:
        notes.append(f"Numbers are those of all devices together ({program.partition}).")
    if program.replicas is not None:
        notes.append(f"Numbers are those of each of {program.replicas.count} devices.")
    read = {v for op in program.ops for v in op.inputs}
    if unread := [p.name for p in program.parameters if p not in read]:
        names = f"{', '.join(unread[:3])}{' ...' * (len(unread) > 3)}"
        notes.append(f"Parameters that nothing reads are in the total alone: {names}.")
    if cost(program).endless:
        notes.append("A while loop counts as one turn: nobody knows its length before it runs.")
    return tuple(notes)
