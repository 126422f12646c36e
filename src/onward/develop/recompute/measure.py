"""The temporary memory of a step: estimated from its ops, and of what XLA makes of them.

Both are of the ops that ``compile`` would run: what a device is slow at has another body there, which may
take a fraction of the memory.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax

from onward.core.compiler import compiler_options
from onward.core.liveness import lifetimes
from onward.core.lower import lower
from onward.core.program import Op, Program, Variable
from onward.core.words import Pass
from onward.develop.tuned import reformed


@dataclass(frozen=True)
class Peak:
    """The moment of most memory: how many bytes, at which op, held by which Variables."""

    bytes: int
    op: Op | None
    holders: tuple[Variable, ...]


def estimated(program: Program) -> Peak:
    """Estimate the peak of live memory when ops run in order, not counting the step's inputs and results."""
    program = reformed(program).program
    lives = lifetimes(program, results(program))
    end = len(lives.steps)
    lives = replace(lives, arrays=tuple(a for a in lives.arrays if a.begin >= 0 and a.end < end))
    if not end:
        return Peak(0, None, ())
    holders = tuple(array.variables[0] for array in lives.alive(lives.peak))
    return Peak(lives.bytes[lives.peak], program.ops[lives.steps[lives.peak].op], holders)


def results(program: Program) -> tuple[Variable, ...]:
    """The values that the step returns; without an update, also the final values of the backward pass."""
    wanted = (*program.next_state.values(), *program.outputs)
    if any(op.made_by is Pass.UPDATE for op in program.ops):
        return tuple(dict.fromkeys(wanted))
    read = {v for op in program.ops for v in op.inputs}
    ends = (v for op in program.ops if op.made_by is Pass.BACKWARD for v in op.outputs if v not in read)
    return tuple(dict.fromkeys((*wanted, *(g for _, g in program.gradients), *ends)))


def compiled(program: Program) -> int:
    """The bytes of temporary memory of the compiled step, its changing state donated."""
    program = reformed(program).program
    changed = [v for v in program.state if v in program.next_state]
    lent = [v for v in program.state if v not in program.next_state]
    run = lower(program, results(program))

    def step(changing: Any, lasting: Any, data: Any) -> list[Any]:
        own = dict(zip((*changed, *lent), (*changing, *lasting), strict=True))
        return run([own[v] for v in program.state], data)

    groups = (changed, lent, program.inputs)
    types = ([v.aval for v in group] for group in groups)
    memory = jax.jit(step, donate_argnums=0).lower(*types).compile(compiler_options()).memory_analysis()
    assert memory is not None, "the device at hand tells what a compiled step takes"
    return int(memory.temp_size_in_bytes)
