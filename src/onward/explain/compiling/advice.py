"""Advice for a step that takes long to compile: of what makes it faster, what fits this one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import jax

from onward.core.program import Op, Program
from onward.core.show import human_bytes, nbytes
from onward.explain.compiling.measured import TRACE, XLA, MeasuredCompile
from onward.explain.compiling.parts import CompiledScope

_MANY_LAYERS = 3
_UNROLLED = 16
_LARGE = 2**20
_SECONDS = 1.0


def faster(measured: MeasuredCompile, scopes: Sequence[CompiledScope], is_program: bool) -> tuple[str, ...]:
    """The sentences that fit, those of most effect first.

    Args:
        measured: the phases, and the Program that was compiled.
        scopes: each compiled by itself.
        is_program: whether it is a Program, which transforms change, or a function of someone else.
    """
    return tuple(_fitting(measured, scopes, is_program))


def _fitting(measured: MeasuredCompile, scopes: Sequence[CompiledScope], is_program: bool) -> Iterator[str]:
    seconds = dict(measured.phases)
    whole, parts = sum(seconds.values()), sum(scope.seconds for scope in scopes)
    repeated = next((scope for scope in scopes if len(scope.scopes) >= _MANY_LAYERS), None)
    if repeated is not None and 3 * repeated.seconds > parts:
        yield _rolled(measured, repeated, is_program)
    elif unrolled := _unrolled(measured.program):
        yield unrolled
    large = sum(nbytes(v) for v in measured.program.constants if nbytes(v) >= _LARGE)
    if large:
        names = [v.name for v in measured.program.constants if nbytes(v) >= _LARGE]
        yield (
            f"{human_bytes(large)} of arrays are captured as constants ({', '.join(names[:3])}), which XLA "
            "takes along and may compute with: give them as arguments"
        )
    if 2 * seconds.get(TRACE, 0.0) > whole:
        yield (
            "most of it is the trace of your function, operator by operator: jax.jit around a function that "
            "is called again and again traces it once"
        )
    is_cached = getattr(jax.config, "jax_compilation_cache_dir", None)
    if seconds.get(XLA, 0.0) > _SECONDS and not is_cached:
        yield (
            'every process compiles it again: jax.config.update("jax_compilation_cache_dir", folder) keeps '
            "on disk what XLA compiled"
        )


def _rolled(measured: MeasuredCompile, repeated: CompiledScope, is_program: bool) -> str:
    times = len(repeated.scopes)
    why = next((f" ({note})" for note in measured.notes if note.startswith("not rolled: ")), "")
    how = (
        "ow.compile(program, roll=True) compiles one, in a loop; ow.compile_times(program, roll=True) tells "
        f"how long that takes{why}"
        if is_program
        else "stack their parameters and jax.lax.scan over them, or ow.adopt the step and compile that with "
        "roll=True, which compiles one"
    )
    return f"{repeated.name} are {times} times the same: {how}"


def _unrolled(program: Program) -> str:
    """A line whose ops are repeated, as a loop of Python leaves them; empty where there is none."""
    counts = Counter(key for op in program.ops if (key := _line(op)))
    if not counts:
        return ""
    (kind, line), times = counts.most_common(1)[0]
    if times < _UNROLLED or 4 * sum(1 for op in program.ops if str(op.source) == line) < len(program.ops):
        return ""
    return (
        f"{line} stands {times} times in the step ({kind}): where a loop of Python runs it, jax.lax.scan or "
        "jax.lax.fori_loop compiles one turn"
    )


def _line(op: Op) -> tuple[str, str] | None:
    line = str(op.source) if op.source is not None else ""
    return (op.type, line) if line else None
