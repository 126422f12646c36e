"""A Program as one pure function of flat arrays: one walk over the ops with an environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from onward.core.program import Program, Variable


def lower(program: Program, outputs: Sequence[Variable]) -> Callable[..., list[Any]]:
    """The function from (state values, input values) to the values of these Variables.

    It can be called with arrays, and it can be traced: ``jax.jit(lower(program, program.outputs))``.
    """

    def run(state: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        env: dict[Variable, Any] = dict(program.constants)
        env.update(zip(program.state, state, strict=True))
        env.update(zip(program.inputs, inputs, strict=True))
        for op in program.ops:
            with jax.named_scope(f"{op.made_by}/{op.scope}" if op.scope else op.made_by):
                env.update(zip(op.outputs, op.body(*(env[v] for v in op.inputs)), strict=True))
        return [env[v] for v in outputs]

    return run
