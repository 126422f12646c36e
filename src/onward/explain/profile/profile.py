"""Where the time of a step goes, by pass and scope, as measured, beside what the ops say.

``summary`` counts what a Program asks for; this runs it, and asks JAX's profiler how long each instruction of
the compiled step took.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp

from onward.core.columns import columns
from onward.core.cost import Cost, cost
from onward.core.errors import ArgumentError
from onward.core.program import Op, Program
from onward.core.show import human_number
from onward.core.structure import describe
from onward.core.words import Pass
from onward.execute.loop.groups import Intake
from onward.execute.state import State
from onward.execute.step import Step
from onward.explain.profile.hlo import InstructionOrigin, module_of, places
from onward.explain.profile.trace import recorded

_HEAD = ("scope", "pass", "ms", "share", "FLOP", "share", "GFLOP/s", "GB/s")
_NOTE = (
    "ms: time of the instructions of the compiled step, all threads together, by JAX's profiler; one that\n"
    "fuses several counts where its last one stands. FLOP and bytes are counted from the ops."
)


@dataclass(frozen=True)
class ProfileRow:
    """The time, operations and bytes of one scope in one pass.

    Attributes:
        scope: empty for ops outside of any scope; ``"total"`` in totals.
        made_by: the pass; None for what the compiler put in by itself, and for the whole step.
        seconds: of one step, all threads together.
        share: of the time of the step.
        flops: operations of the ops, as ``cost`` counts them.
        flops_share: of all operations.
        bytes: read and written, as ``cost`` counts them.
    """

    scope: str
    made_by: Pass | None
    seconds: float
    share: float
    flops: int
    flops_share: float
    bytes: int

    @property
    def words(self) -> tuple[str, ...]:
        """The row as text."""
        rates = (f"{n / self.seconds / 1e9:.2f}" if self.seconds else "-" for n in (self.flops, self.bytes))
        made_by = self.made_by or ("all" if self.scope == "total" else "compiler")
        shares = (f"{100 * share:.1f} %" for share in (self.share, self.flops_share))
        spent, counted = shares
        name = self.scope or "(no scope)"
        return name, made_by, f"{1e3 * self.seconds:.3f}", spent, human_number(self.flops), counted, *rates


@dataclass(frozen=True)
class Profile:
    """Where the time of a step goes; print it.

    Attributes:
        rows: one for each scope and pass, those first that take the most time.
        totals: one for each pass, and the last one for the whole step.
        seconds: how long a step takes by the clock, the median of those that were measured.
        steps: how many were measured.
    """

    rows: tuple[ProfileRow, ...]
    totals: tuple[ProfileRow, ...]
    seconds: float
    steps: int

    def __str__(self) -> str:
        table = columns([_HEAD, *(r.words for r in (*self.rows, *self.totals))], range(2, 8)).split("\n")
        rule = "─" * max(map(len, table))
        end = 1 + len(self.rows)
        head = f"{1e3 * self.seconds:.3f} ms a step by the clock (median of {self.steps})"
        return "\n".join([head, "", table[0], rule, *table[1:end], rule, *table[end:], "", _NOTE])

    __repr__ = __str__


def profile(step: Step, state: State, data: Any, steps: int = 10, depth: int = 1) -> Profile:
    """Measure where the time of a step goes.

    The step runs as it is compiled, repeated layers as a loop where ``compile`` makes one; what is measured
    there counts in the scope of an op within, what is counted from the ops in that of the loop. Where nobody
    named a scope, the calls of the user's functions are it. An update counts outside of scopes, as one
    instruction may update parameters of many. On several devices all numbers are those of all devices
    together. It runs on copies: the State is not spent.

    Args:
        step: what ``compile`` returned.
        state: what it runs on.
        data: one batch, as a call takes it: an array, a tuple, or a dict by name.
        steps: how many steps are measured, after one to warm up.
        depth: how many levels of scopes are told apart.

    Raises:
        ArgumentError: no Step; data it does not take; less than one step.
        StateError: a State that was given to a step before.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> step = ow.compile(ow.SGD(0.1).minimize(lambda w, x: jnp.sum(x @ w), jnp.eye(8), jnp.ones((4, 8))))
        >>> found = profile(step, step.init(jnp.eye(8)), jnp.ones((4, 8)), steps=2)
        >>> sorted({str(row.made_by) for row in found.totals if row.flops})
        ['None', 'backward', 'forward', 'update']
    """
    if not isinstance(step, Step):
        raise ArgumentError(
            f"profile takes a step, not {describe(step)}. Make one: step = onward.compile(program)."
        )
    if not isinstance(steps, int) or steps < 1:
        raise ArgumentError(
            f"profile: steps is {describe(steps)}; expected a whole number, at least 1. The data of a step "
            "is one argument: profile(step, state, (x, y))."
        )
    arguments, named = Intake(step.feeds, False).arguments(data)
    state, out = step(jax.tree.map(jnp.copy, state), *arguments, **named)
    executable = step.executable(state, *arguments, **named)
    jax.block_until_ready((jax.tree.leaves(state), jax.tree.leaves(out)))
    clock = []
    with recorded(module_of(executable.text)) as spent:
        for _ in range(steps):
            begin = perf_counter()
            state, out = step(state, *arguments, **named)
            jax.block_until_ready((jax.tree.leaves(state), jax.tree.leaves(out)))
            clock.append(perf_counter() - begin)
    at = places(executable.text, executable.program, executable.scopes)
    by_place = _by_place(spent, at, steps, depth)
    return _table(by_place, _costs(executable.program, executable.scopes, depth), median(clock), steps)


def _by_place(
    spent: Mapping[str, float], at: Mapping[str, InstructionOrigin], steps: int, depth: int
) -> Mapping[InstructionOrigin, float]:
    """The seconds of one step by pass and scope."""
    seconds: dict[InstructionOrigin, float] = {}
    for name, nanoseconds in spent.items():
        if name in at:
            place = _cut(at[name], depth)
            seconds[place] = seconds.get(place, 0.0) + nanoseconds / 1e9 / steps
    return seconds


def _cut(place: InstructionOrigin, depth: int) -> InstructionOrigin:
    return InstructionOrigin(place.made_by, "/".join(place.scope.split("/")[:depth]))


def _costs(program: Program, scopes: Mapping[Op, str], depth: int) -> Mapping[InstructionOrigin, Cost]:
    """The costs of the ops by pass and scope on all devices; ops in a loop count where the loop stands."""
    devices = program.replicas.count if program.replicas is not None else 1
    found: dict[InstructionOrigin, Cost] = {}
    for op in program.ops:
        place = _cut(InstructionOrigin(op.made_by, scopes[op]), depth)
        found[place] = found.get(place, Cost()) + cost(op) * devices
    return found


def _table(
    seconds: Mapping[InstructionOrigin, float],
    costs: Mapping[InstructionOrigin, Cost],
    clock: float,
    steps: int,
) -> Profile:
    spent = sum(seconds.values())
    flops = sum(c.flops for c in costs.values())

    def row(scope: str, made_by: Pass | None, chosen: Iterable[InstructionOrigin]) -> ProfileRow:
        own = list(chosen)
        time = sum(seconds.get(p, 0.0) for p in own)
        total = sum((costs.get(p, Cost()) for p in own), Cost())
        part = time / spent if spent else 0.0
        return ProfileRow(scope, made_by, time, part, total.flops, total.flops / max(flops, 1), total.bytes)

    every = list(dict.fromkeys((*costs, *seconds)))
    rows = sorted((row(p.scope, p.made_by, [p]) for p in every), key=lambda r: -r.seconds)
    passes = [made_by for made_by in (*Pass, None) if any(p.made_by is made_by for p in every)]
    totals = [row("total", p, (x for x in every if x.made_by is p)) for p in passes if p is not None]
    return Profile(tuple(rows), (*totals, row("total", None, every)), clock, steps)
