"""Compiling a step once more from the beginning, with a clock: each phase in seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from time import perf_counter
from typing import Any

import jax

from onward.core.compiler import compiler_options
from onward.core.jaxprs.reading import program_of
from onward.core.jaxprs.tracing import fresh
from onward.core.program import Origin, Program
from onward.core.recipe import build, whole_types
from onward.define.arguments import Leaf
from onward.execute.executable import Executable
from onward.execute.tuning import Tuning
from onward.explain.adopt.adopt import unjitted
from onward.explain.inspect.call import CalledStep, call_of, is_array
from onward.explain.inspect.tracing import traced_call

_numbers = count(1)
_NEVER_WRITTEN = float("inf")


@dataclass(frozen=True)
class MeasuredCompile:
    """The phases of compiling a step, and the Program that was compiled.

    Attributes:
        phases: names, and how many seconds each took.
        program: its ops are those that were lowered.
        notes: what was done to it before.
    """

    phases: tuple[tuple[str, float], ...]
    program: Program
    notes: tuple[str, ...] = ()

    @property
    def lowering(self) -> float:
        """The seconds of lowering and of XLA: those after the jaxpr is there."""
        return sum(seconds for name, seconds in self.phases if name in (LOWER, XLA))


TRACE, DERIVE, TUNE, LOWER, XLA = "trace", "derive", "tune", "lower", "XLA"


def of_program(program: Program, tuning: Tuning) -> MeasuredCompile:
    """Measure how long a Program takes from its function to its executable."""
    phases: dict[str, float] = {}
    if program.recipe is not None and program.ops is program.recipe.ops:
        origin = TimedOrigin(program.recipe.origin, [])
        begin = perf_counter()
        with fresh():
            build(replace(program.recipe, origin=origin), whole_types(program))
        whole = perf_counter() - begin
        phases = {TRACE: sum(origin.seconds), DERIVE: whole - sum(origin.seconds)}
    tuned, phases[TUNE] = timed(partial(tuning, program, ()))
    named = replace(tuned.program, name=fresh_name(program.name))
    executable, begun = timed(partial(Executable, named, (), {v.name for v in named.next_state}))
    lowered, phases[LOWER] = timed(executable.lowered)
    phases[LOWER] += begun
    _, phases[XLA] = timed_compile(lowered)
    return MeasuredCompile(tuple(phases.items()), tuned.program, tuned.notes)


def of_function(step: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> MeasuredCompile:
    """Measure how long a function takes from its call to its executable, as ``jax.jit`` makes it."""
    function = unjitted(step)
    with fresh():
        (call, found), trace = timed(lambda: traced_call(call_of(function, args, kwargs)))
    values = _values(call, (*args, *kwargs.values()))

    def flat(*leaves: Any) -> list[Any]:
        returned, modules = call.run(leaves)
        return [*filter(is_array, jax.tree.leaves(returned)), *(v for v in modules if v is not None)]

    flat.__name__ = fresh_name(call.title)
    lowered, lower = timed(partial(jax.jit(flat).trace(*values).lower))
    _, xla = timed_compile(lowered, options={})
    phases = ((TRACE, trace), (LOWER, lower), (XLA, xla))
    return MeasuredCompile(phases, program_of(found.closed, call.title))


def timed(function: Any) -> tuple[Any, float]:
    """The result of a function, and the seconds that it took."""
    begin = perf_counter()
    result = function()
    return result, perf_counter() - begin


def timed_compile(lowered: jax.stages.Lowered, options: Any = None) -> tuple[jax.stages.Compiled, float]:
    """The executable that XLA makes, and its seconds; nothing of it is kept on disk."""
    with _nothing_written():
        return timed(partial(lowered.compile, compiler_options() if options is None else options))


def fresh_name(name: str) -> str:
    """A name that JAX's cache on disk has not seen: what is compiled under it is compiled again."""
    stem = name if name.isidentifier() else "step"
    return f"{stem}_measured_{next(_numbers)}_{int(1e6 * perf_counter())}"


@contextmanager
def _nothing_written() -> Iterator[None]:
    option = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, option)
    jax.config.update(option, _NEVER_WRITTEN)
    try:
        yield
    finally:
        jax.config.update(option, before)


@dataclass(frozen=True, eq=False)
class TimedOrigin:
    """The traced function behind a Program, with a clock around each trace."""

    origin: Origin
    seconds: list[float]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.origin, name)

    def trace(self, data: tuple[Any, ...]) -> Program:
        """The forward Program, timed."""
        begin = perf_counter()
        program = self.origin.trace(data)
        self.seconds.append(perf_counter() - begin)
        return program


def _values(call: CalledStep, arguments: Sequence[Any]) -> list[Any]:
    """The arguments that the step is lowered for: arrays where they lie, all else by its type."""
    found: list[Any] = []
    for i, specification in call.plain.items():
        pairs = zip(specification.leaves, jax.tree.leaves(arguments[i]), strict=True)
        found += [_placed(leaf, value) for leaf, value in pairs if isinstance(leaf, Leaf)]
    return [*found, *(leaf.type for _, leaf in call.leaves[len(found) :])]


def _placed(leaf: Leaf, value: Any) -> Any:
    return value if isinstance(value, jax.Array | jax.ShapeDtypeStruct) else leaf.type
