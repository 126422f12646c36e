"""The bytes that a step takes from its first op to its last, and the arrays that hold them at the peak.

    memory(program)                                    # in a notebook the picture and the table
    memory(program).beside(recompute(program, 0.5))    # both on one scale

The bytes are an estimate from the ops, by the rules of ``core.liveness``, for the order in which the ops
stand; nothing is compiled. Against what XLA for CPU reports of the compiled step (jax 0.10: arguments,
results that are not written over them, temporary memory; models of ``benchmarks``, Adam unless it says SGD)::

    step                                  XLA       estimate
    MLP                                11.4 MB          + 0 %
    MLP, large batch, SGD               8.5 MB         - 14 %
    transformer, 1 layer               28.6 MB         - 13 %
    transformer, 4 layers              92.4 MB          - 7 %
    LSTM in a scan                     14.9 MB          + 0 %
    transformer, 4 layers rolled      125.4 MB          + 6 %
    small transformer                  20.0 MB          + 0 %
      recompute(0.5)                   11.2 MB          - 1 %
      rolled, then recompute(0.5)      10.2 MB          - 7 %
      replicate(8), each device         5.0 MB          + 0 %
      accumulate(4)                     8.1 MB          + 0 %
      forward pass alone                2.1 MB         - 18 %
    20 residual layers, SGD             7.0 MB         - 19 %
    residual convolutions, SGD         22.3 MB         - 29 %

It is below where XLA for CPU does what other devices need not do: bfloat16 is computed in float32 (- 32 %),
the gradient of max pooling writes the number of every pixel down (- 64 %), and the barriers of
``jax.checkpoint`` are forgotten, so that it saves nothing (- 59 %). The library's ``recompute`` is not
affected by the last. Small programs of one kind of op are further off: attention over 1,024 rows (- 28 %),
random numbers drawn in the loss (- 41 %), a scan that stacks what its turns return (+ 42 %), ``while`` and
``cond`` (+ 29 %, + 25 %; jax 0.12).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from onward.core.check import expect_program
from onward.core.homes import scoped_names
from onward.core.liveness import Array, lifetimes
from onward.core.program import Op, Program, Variable
from onward.core.show import human_bytes
from onward.core.words import Kind, Pass
from onward.develop.recompute.measure import results
from onward.explain.memory.held import Held, MemoryShare, PeakMoment
from onward.explain.memory.plot import Chart, OpPoint, Picture, picture
from onward.explain.memory.table import place, rows, side_by_side, text


class Memory:
    """The bytes that a Program takes, op by op; print it, plot it, or put it beside another."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._lives = lifetimes(program, results(program))
        self._gradients = {g for _, g in program.gradients}

    @cached_property
    def curve(self) -> tuple[PeakMoment, ...]:
        """One moment for each op, in order."""
        most: dict[int, int] = {}
        for i, step in enumerate(self._lives.steps):
            if step.op not in most or self._lives.bytes[i] > self._lives.bytes[most[step.op]]:
                most[step.op] = i
        moments, at = [], 0
        for number, op in enumerate(self.program.ops):
            at = most.get(number, at)
            shares = {share: taken[at] for share, taken in self._taken.items()}
            moments.append(PeakMoment(op, sum(shares.values()), shares))
        return tuple(moments)

    @cached_property
    def _taken(self) -> Mapping[MemoryShare, Sequence[int]]:
        """For each share its bytes at each step."""
        count = max(len(self._lives.steps), 1)
        change = {share: [0] * (count + 2) for share in MemoryShare}
        for array in self._lives.arrays:
            row = change[self._share(array)]
            row[max(array.begin, 0)] += array.bytes
            row[min(array.end, count) + 1] -= array.bytes
        taken = {share: list(accumulate(row))[:count] for share, row in change.items()}
        more = zip(taken[MemoryShare.TEMPORARIES], self._lives.within or (0,), strict=True)
        return {**taken, MemoryShare.TEMPORARIES: [own + within for own, within in more]}

    def _share(self, array: Array) -> MemoryShare:
        first = array.variables[0]
        if array.begin < 0:
            given = {
                Kind.PARAMETER: MemoryShare.PARAMETERS,
                Kind.DATA: MemoryShare.FEEDS,
                Kind.CONSTANT: MemoryShare.CONSTANTS,
            }
            return given.get(first.kind, MemoryShare.STATE)
        if not self._gradients.isdisjoint(array.variables):
            return MemoryShare.GRADIENTS
        if array.end >= len(self._lives.steps):
            return MemoryShare.RESULTS
        made, read = (self._op(step).made_by for step in (array.begin, array.end))
        if made is Pass.FORWARD:
            return MemoryShare.TEMPORARIES if read is Pass.FORWARD else MemoryShare.SAVED
        return (
            MemoryShare.GRADIENTS if made is not read and made is not Pass.UPDATE else MemoryShare.TEMPORARIES
        )

    def _op(self, step: int) -> Op:
        return self.program.ops[self._lives.steps[step].op]

    @property
    def peak(self) -> int:
        """The most bytes that are taken at once."""
        return max((moment.bytes for moment in self.curve), default=sum(self.shares.values()))

    @property
    def peak_op(self) -> Op | None:
        """The op at the peak; None if the Program has no ops."""
        return self.curve[self.peak_number].op if self.curve else None

    @cached_property
    def peak_number(self) -> int:
        """The number of the op at the peak, counted from 0."""
        return max(range(len(self.curve)), key=lambda i: self.curve[i].bytes, default=0)

    @property
    def shares(self) -> Mapping[MemoryShare, int]:
        """The bytes at the peak by what they are taken for."""
        return {share: taken[self._lives.peak] for share, taken in self._taken.items()}

    @cached_property
    def held(self) -> tuple[Held, ...]:
        """The arrays in memory at the peak, the largest first; without those inside of a loop."""
        known = set(self.program.variables.values())
        return tuple(self._held(array, known) for array in self._lives.alive(self._lives.peak))

    @cached_property
    def _names(self) -> Mapping[Variable, str]:
        """The names of what was computed in scopes that nobody named."""
        return scoped_names(self.program)

    def _held(self, array: Array, known: set[Variable]) -> Held:
        shown = next((v for v in array.variables if v in known), array.variables[0])
        maker = self._op(array.begin) if array.begin >= 0 else None
        reader = self._op(array.end) if array.end < len(self._lives.steps) else None
        return Held(shown, array.bytes, self._share(array), maker, reader)

    def beside(self, other: Memory | Program, labels: tuple[str, str] = ("before", "after")) -> Beside:
        """This and another memory on one scale.

        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3))
        >>> print(str(ow.memory(program).beside(program)).splitlines()[-1])
        all at the peak        36 B   36 B
        """
        return Beside((self, other if isinstance(other, Memory) else memory(other)), labels)

    def chart(self, title: str | None = None) -> Chart:
        """The data of the picture: a title, and the bytes at each op by what they are taken for."""
        points = [
            OpPoint(str(m.op.made_by), place(m.op), m.bytes, {str(s): n for s, n in m.shares.items()})
            for m in self.curve
        ]
        return Chart(title or f"Memory of {self.program.name}", tuple(points))

    def plot(self) -> Picture:
        """The picture: bytes over the ops of the step. ``plot().save("memory.svg")`` writes it to a file."""
        return picture([self.chart()])

    def _repr_html_(self) -> str:
        return self.plot().html(rows(self.held, self._names))

    def __repr__(self) -> str:
        return f"Memory({self.program.name!r}, {human_bytes(self.peak)} at the peak)"

    def __str__(self) -> str:
        title = f"Memory of {self.program.name}"
        return text(title, self.peak, self.curve, self.peak_number, self.shares, self.held, self._names)


@dataclass(frozen=True, eq=False)
class Beside:
    """Two memories next to each other, such as before and after ``recompute``."""

    memories: tuple[Memory, Memory]
    labels: tuple[str, str]

    def plot(self) -> Picture:
        """The pictures of both on one scale."""
        return picture([m.chart(label) for m, label in zip(self.memories, self.labels, strict=True)])

    def _repr_html_(self) -> str:
        return self.plot().html([])

    def __str__(self) -> str:
        return side_by_side([(m.shares, m.peak) for m in self.memories], self.labels)


def memory(program: Program) -> Memory:
    """How much memory a Program takes while it runs: over its ops, and what holds most at the peak.

    An estimate; how far it is from what a compiler makes of it is told in ``onward.explain.memory.memory``.
    Of a replicated Program it tells what one device takes. Nothing is compiled or run.

    Args:
        program: at any stage.

    Raises:
        ArgumentError: it is no Program.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> def loss(w, x):
        ...     return jnp.sum(jnp.exp(x @ w) * jnp.sin(x @ w))
        >>> program = ow.SGD(0.1).minimize(loss, jnp.ones((8, 8)), jnp.ones((64, 8)))
        >>> found = ow.memory(program)
        >>> found.peak, found.peak_op.type, found.shares["saved for backward"]
        (8716, 'dot_general_grad', 4096)
    """
    expect_program(program, "memory")
    return Memory(program)
