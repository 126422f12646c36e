"""The seconds that compiling a step takes, by phase and by scope, and what would make them fewer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from textwrap import fill
from typing import Any

from onward.core.check import expect_switches
from onward.core.columns import columns
from onward.core.errors import ArgumentError
from onward.core.program import Program
from onward.core.structure import describe
from onward.execute.tuning import Tuning
from onward.explain.compiling.advice import faster
from onward.explain.compiling.measured import LOWER, TRACE, XLA, MeasuredCompile, of_function, of_program
from onward.explain.compiling.parts import CompiledScope, compiled_scopes

_PARTS_AT_MOST, _ANYWAY = 1.5, 2.0  # of the seconds of the whole; seconds
_SHOWN = 12
_WIDTH = 100
_NAME = 46
_WORDS = {
    TRACE: "your function, to a jaxpr",
    "derive": "backward, update and other transforms, with their checks",
    "tune": "what compile changes: rolled loops, rewritten ops",
    LOWER: "to StableHLO",
    XLA: "to instructions of the device",
}
_NOTE = (
    "Seconds of one scope that is lowered and compiled by itself, and its share as often as it stands in\n"
    "the step. XLA compiles the step at once, and what is alike in it faster: shares hold, sums do not."
)
_UNMEASURED = "-: not measured, as it would have taken too long, or devices exchange numbers in it."


@dataclass(frozen=True)
class CompileTimes:
    """The seconds that compiling a step takes; print it.

    Attributes:
        name: of the step.
        phases: the name and the seconds of each, in order.
        scopes: those of the step, each compiled by itself, the longest first.
        advice: what would make it faster, where something fits.
    """

    name: str
    phases: tuple[tuple[str, float], ...]
    scopes: tuple[CompiledScope, ...]
    advice: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """All phases together."""
        return sum(seconds for _, seconds in self.phases)

    @property
    def parts(self) -> float:
        """The seconds of all scopes, each by itself, as often as it stands in the step."""
        return sum(scope.seconds for scope in self.scopes)

    def __str__(self) -> str:
        whole = max(self.seconds, 1e-9)
        head = f"Compiling {self.name} takes {self.seconds:.2f} s"
        rows = [("phase", "seconds", "share", "")]
        rows += [(name, f"{t:.2f}", f"{100 * t / whole:.0f} %", _WORDS[name]) for name, t in self.phases]
        return "\n".join([head, "", columns(rows, right=(1, 2)), "", *self._by_scope(), *self._advised()])

    def _by_scope(self) -> list[str]:
        rows: list[tuple[str, ...]] = [("scope", "times", "ops", "lower", "XLA", "share")]
        rows += [_row(scope, max(self.parts, 1e-9)) for scope in self.scopes[:_SHOWN]]
        if rest := self.scopes[_SHOWN:]:
            share = sum(scope.seconds for scope in rest) / max(self.parts, 1e-9)
            rows.append((f"{len(rest)} more", "", "", "", "", f"{100 * share:.0f} %"))
        unmeasured = any(scope.xla is None for scope in self.scopes)
        more = [_UNMEASURED] if unmeasured else []
        return [columns(rows, right=range(1, 6)), _NOTE, *more]

    def _advised(self) -> list[str]:
        lines = (
            fill(sentence, _WIDTH, initial_indent="* ", subsequent_indent="  ") for sentence in self.advice
        )
        return ["", *lines] if self.advice else []

    __repr__ = __str__


def _row(scope: CompiledScope, whole: float) -> tuple[str, ...]:
    name = scope.name if len(scope.name) <= _NAME else f"{scope.name[: _NAME - 3]}..."
    counts = (str(len(scope.scopes)), f"{scope.ops:,}")
    if scope.xla is None or scope.lower is None:
        return name, *counts, "-", "-", "-"
    return name, *counts, f"{scope.lower:.2f}", f"{scope.xla:.2f}", f"{100 * scope.seconds / whole:.0f} %"


def compile_times(
    step: Program | Callable[..., Any],
    /,
    *args: Any,
    depth: int = 1,
    roll: bool | None = None,
    tune: bool = True,
    **kwargs: Any,
) -> CompileTimes:
    """Measure why compiling takes long: seconds by phase and by scope, with advice that fits.

    The step is traced, derived, lowered and compiled once more, as if nothing were known of it: neither from
    this process, nor from JAX's cache on disk, in which nothing is written. Then each of its scopes is
    compiled by itself, one of those that are alike, those of most ops first, for as long as one and a half
    times the whole took. XLA compiles a step at once, so that shares tell more than sums. Where nobody named
    a scope, the calls of the user's functions are it. Nothing is run.

    Args:
        step: a Program, measured as ``compile`` makes a step of it; or a function of someone else, such as a
            training step under ``jax.jit``, measured as JAX compiles it.
        args: what the function is called with: arrays, where they lie on devices, or
            ``jax.ShapeDtypeStruct``. None for a Program.
        depth: how many levels of scopes are told apart; more in a scope that has most of the ops.
        roll: as for ``compile``, for a Program alone.
        tune: as for ``compile``, for a Program alone.
        kwargs: the arguments of the function by name.

    Raises:
        ArgumentError: neither a Program nor a function; arguments beside a Program, or that the function does
            not take; ``tune`` or ``roll`` beside a function; a depth that is not a number of at least 1.
        TraceError: the function cannot be traced.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.mean(x @ w), jnp.ones(3), jnp.ones((8, 3)))
        >>> found = ow.compile_times(program)
        >>> [name for name, seconds in found.phases], [scope.name for scope in found.scopes]
        (['trace', 'derive', 'tune', 'lower', 'XLA'], ['(no scope)'])
    """
    if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
        raise ArgumentError(f"compile_times: depth is {depth!r}; expected a whole number, at least 1.")
    expect_switches("compile_times", tune=tune)
    expect_switches("compile_times", (True, False, None), roll=roll)
    measured = _measured(step, args, kwargs, Tuning(tune, roll))
    scopes = compiled_scopes(measured.program, depth, max(_PARTS_AT_MOST * measured.lowering, _ANYWAY))
    return CompileTimes(
        measured.program.name, measured.phases, scopes, faster(measured, scopes, isinstance(step, Program))
    )


def _measured(step: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tuning: Tuning) -> MeasuredCompile:
    if not isinstance(step, Program):
        if not callable(step):
            raise ArgumentError(
                f"compile_times takes a Program, or a function and its arguments, not {describe(step)}. "
                "Write compile_times(program), or compile_times(train_step, *args)."
            )
        if tuning != Tuning():
            word = "roll" if tuning.is_on else "tune"
            raise ArgumentError(
                f"compile_times: {word} says how compile changes a Program, and {describe(step)} is measured "
                "as JAX compiles it. Leave it out; pass an argument of its own of this name by place."
            )
        return of_function(step, args, kwargs)
    if args or kwargs:
        raise ArgumentError(
            "compile_times takes a Program alone: it was traced for its data already. Write "
            "compile_times(program)."
        )
    return of_program(step, tuning)
