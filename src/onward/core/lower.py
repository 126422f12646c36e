"""A Program as one pure function of flat arrays: one walk over the ops with an environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from onward.core.jaxprs.joining import as_one_call, joined
from onward.core.program import Code, Op, Program, Variable
from onward.core.whole import expect_whole

_ONLY_TRACED = "call_hi_primitive"  # since jax 0.11: what a trace takes apart, and what cannot be lowered


def lower(
    program: Program,
    outputs: Sequence[Variable],
    at_once: bool = False,
    scopes: Mapping[Op, str] | None = None,
) -> Callable[..., list[Any]]:
    """The function from (state values, input values) to the values of these Variables.

    It can be called with arrays, and it can be traced: ``jax.jit(lower(program, program.outputs))``.

    Args:
        program: a Program.
        outputs: the Variables whose values it returns.
        at_once: put the ops into one call, as that of a ``jax.jit``, for what is compiled and not looked
            into. Tracing that costs nothing, op by op as much as tracing the user's function.
        scopes: for each op the scope it is compiled in, in place of its own.

    Example:
        >>> import jax, jax.numpy as jnp, onward as ow
        >>> program = ow.trace(lambda w, x: jnp.sum(w * x), jnp.ones(2), jnp.ones(2))
        >>> run = jax.jit(lower(program, program.outputs, at_once=True))
        >>> float(run([jnp.ones(2)], [jnp.arange(2.0)])[0])
        1.0
    """
    if program.code is not None:
        return _by_code(program, program.code, outputs)
    if at_once and not any(_ONLY_TRACED in op.body.primitives for op in program.ops):
        return _at_once(program, outputs, scopes)
    return _op_by_op(program, outputs, scopes)


def _op_by_op(
    program: Program, outputs: Sequence[Variable], scopes: Mapping[Op, str] | None
) -> Callable[..., list[Any]]:
    def run(state: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        env: dict[Variable, Any] = dict(program.constants)
        env.update(zip(program.state, state, strict=True))
        env.update(zip(program.inputs, inputs, strict=True))
        for op in program.ops:
            scope = op.scope if scopes is None else scopes[op]
            with jax.named_scope(f"{op.made_by}/{scope}" if scope else op.made_by):
                env.update(zip(op.outputs, op.body(*(env[v] for v in op.inputs)), strict=True))
        return [env[v] for v in outputs]

    return run


def _at_once(
    program: Program, outputs: Sequence[Variable], scopes: Mapping[Op, str] | None
) -> Callable[..., list[Any]]:
    given = (*program.state, *program.inputs, *program.constants)
    body = joined(program.ops, given, outputs, scopes)
    call = as_one_call(body, program.name)
    constants = tuple(program.constants.values())

    def run(state: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        return call(*state, *inputs, *constants)

    return run


def _by_code(program: Program, code: Code, outputs: Sequence[Variable]) -> Callable[..., list[Any]]:
    """The function that runs the code of a loaded Program, and then the ops that were added behind it.

    Data and state that none of the requested values depends on may be missing.
    """
    expect_whole(program)
    added = [op for op in program.ops if op not in code.ops]

    def run(state: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        env: dict[Variable, Any] = dict(program.constants)
        env.update(zip(program.state, state, strict=True))
        env.update(zip(program.inputs, inputs, strict=True))
        named = {v.name: x for v, x in env.items()}
        found = dict(zip(code.gives, code.called([named.get(v.name) for v in code.reads]), strict=True))
        env.update((v, found[v.name]) for op in program.ops if op in code.ops for v in op.outputs)
        for op in added:
            env.update(zip(op.outputs, op.body(*(env[v] for v in op.inputs)), strict=True))
        return [env[v] for v in outputs]

    return run
