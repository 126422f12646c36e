"""A table of what a Program does to take less memory: how much each choice saves, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from onward.core.columns import columns
from onward.core.program import Program
from onward.core.recipe import recipe_of
from onward.core.show import human_bytes, nbytes
from onward.core.words import some
from onward.develop.chunk.chunk import chunked, chunks_of
from onward.develop.offload import offloaded, state_offloaded
from onward.develop.recompute.again import keeping
from onward.develop.recompute.loops import keeping_in_loops
from onward.develop.recompute.replay import without_steps
from onward.develop.recompute.report import recomputed
from onward.develop.stored import stored, stored_values
from onward.distribute.layout.accelerators import Accelerator, known
from onward.execute.tuning import Tuning
from onward.explain.budget.bases import expect_one_device, seconds_of
from onward.explain.budget.search import bytes_taken

_CHUNKS, _AGAIN, _HOST = "chunks", "computed again", "host memory"
_WAYS: Mapping[str, tuple[Callable[..., Program], ...]] = {
    _CHUNKS: (chunked,),
    _AGAIN: (keeping, keeping_in_loops),
    _HOST: (state_offloaded, stored),
}
_SHOWN = 6


@dataclass(frozen=True)
class MemorySaving:
    """A way in which a Program takes less memory than without it.

    Attributes:
        way: its name.
        what: that which it is done to, a line each.
        bytes: those of a device that the compiled step takes with it, and with the ways before it.
        saved: how many fewer than without it.
        seconds: those of a step, foretold.
        lost: how many more than without it.
    """

    way: str
    what: tuple[str, ...]
    bytes: int
    saved: int
    seconds: float
    lost: float


@dataclass(frozen=True)
class MemorySavings:
    """The ways in which a Program takes less memory, the first beside the Program without any; print it.

    Attributes:
        program: its name.
        device: for which the seconds are foretold.
        plain: the bytes and the seconds of a step without any of them.
        rows: the ways, each on top of those before.
    """

    program: str
    device: str
    plain: tuple[int, float]
    rows: tuple[MemorySaving, ...]

    def __str__(self) -> str:
        taken, seconds = self.plain
        table = [("", "takes", "saved", "a step", "more"), _row("without", taken, 0, seconds, 0.0)]
        table += [_row(r.way, r.bytes, r.saved, r.seconds, r.lost) for r in self.rows]
        head = f"{self.program}: bytes of the compiled step, and its time at the peaks of {self.device}"
        details = [f"{row.way}: {line}" for row in self.rows for line in row.what]
        return "\n".join([head, "", columns(table, right=range(1, 5)), *([""] if details else []), *details])

    __repr__ = __str__


def memory_savings(program: Program, device: str | Accelerator = "H100") -> MemorySavings:
    """Tell what a Program does to take less memory: what each choice saves, and the time it is foretold.

    The choices are those of ``fit_memory``, or of ``chunk``, ``recompute`` and ``offload``. The Program is
    compiled without them, and again with each on top of those before it. Time is at the published peaks of a
    kind of device, to compare choices; nothing is run.

    Args:
        program: a Program that was traced, not accumulated, replicated or partitioned.
        device: ``"A100"``, ``"H100"``, ``"H200"``, ``"TPU v5p"``, or an ``ow.typing.Accelerator``.

    Raises:
        RecipeError: the Program was not traced, or its ops were changed by hand.
        UnknownNameError: a kind of device that is not known.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.Adam(1e-3).minimize(lambda w: jnp.sum(w**2), jnp.ones((512, 512)))
        >>> [row] = ow.memory_savings(ow.offload(program)).rows
        >>> row.way, row.what
        ('host memory', ('w/mean, w/variance, 2.0 MiB',))
    """
    expect_one_device(program, "memory_savings")
    recipe = recipe_of(program, "without its savings", "Give memory_savings a Program that was traced")
    kind = known(device, "memory_savings")
    used = {way: fs for way, fs in _WAYS.items() if any(recipe.of(f) for f in fs)}
    names = list(used)
    stages = [_without(program, [f for name in names[i:] for f in used[name]]) for i in range(len(used) + 1)]
    figures = [_figures(stage, kind) for stage in stages]
    rows = (
        MemorySaving(name, tuple(_what(name, stage)), bytes_, before - bytes_, seconds, seconds - earlier)
        for name, stage, (before, earlier), (bytes_, seconds) in zip(
            names, stages[1:], figures, figures[1:], strict=False
        )
    )
    return MemorySavings(program.name, kind.name, figures[0], tuple(rows))


def _without(program: Program, functions: Sequence[Callable[..., Program]]) -> Program:
    return without_steps(program, *functions) if functions else program


def _figures(program: Program, device: Accelerator) -> tuple[int, float]:
    """The bytes of the compiled step, and the seconds that it is foretold."""
    moved = 2 * sum(map(nbytes, (*offloaded(program), *stored_values(program))))
    tuned = Tuning()(program, ()).program
    return bytes_taken(program), seconds_of(tuned, device) + moved / device.host


def _what(way: str, program: Program) -> Iterator[str]:
    """The lines that tell what a way was done to."""
    if way == _CHUNKS:
        yield from map(str, chunks_of(program))
    elif way == _HOST:
        for there, until in ((offloaded(program), ""), (stored_values(program), " until the backward pass")):
            if there:
                size = human_bytes(sum(map(nbytes, there)))
                yield f"{some([v.name for v in there], 3)}, {size}{until}"
    else:
        report = recomputed(program)
        again = [row for row in report.rows if row.again]
        for row in again[:_SHOWN]:
            freed = human_bytes(row.bytes_again)
            yield f"{row.again} x {row.made_by} {row.type} at {row.line}, {freed} not kept"
        if rest := again[_SHOWN:]:
            yield f"{sum(row.again for row in rest)} more, {human_bytes(sum(r.bytes_again for r in rest))}"
        for name, kept in report.loops:
            yield f"in the turns that make {name}; each keeps {some(kept, 3) or 'nothing'}"


def _row(name: str, taken: int, saved: int, seconds: float, lost: float) -> tuple[str, ...]:
    return name, human_bytes(taken), human_bytes(saved), _time(seconds), _time(lost)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.3f} ms"
