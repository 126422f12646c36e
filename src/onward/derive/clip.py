"""Clipping: gradients that are too long together are shortened together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from onward.core.builder import Builder
from onward.core.errors import GraphError, HyperparameterError
from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.collected import body_over
from onward.core.placement import expect_one_device
from onward.core.program import Phase, Program, Variable
from onward.core.transform import transform
from onward.core.words import Kind, Pass, UpdateType
from onward.derive.lengths import Length, length, shortened


@transform(phase=Phase.GRADIENT)
def clip_by_global_norm(program: Program, max_norm: float) -> Program:
    """Shorten all gradients by one factor, so that their norm together is at most ``max_norm``.

    ``g <- g min(1, max_norm / norm)``, where ``norm`` is the root of the sum of all squares. It stands
    between the backward pass and the update: ``optimizer.create_backward_pass``, this,
    ``optimizer.create_optimization_pass``.

    Source: Pascanu, Mikolov and Bengio, On the Difficulty of Training Recurrent Neural Networks, 2013,
    algorithm 1.

    Raises:
        GraphError: there are no gradients yet, or they are used up by an update already.
        HyperparameterError: ``max_norm`` is not a finite number above 0.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.append_backward(ow.trace(lambda w, x: jnp.sum(w * x), jnp.ones(2), jnp.ones(2)))
        >>> program = ow.append_update(ow.clip_by_global_norm(program, 1.0), ow.SGD(1.0))
        >>> step = ow.compile(program, fetch=["global_norm"])
        >>> state, out = step(step.init(jnp.zeros(2)), jnp.array([3.0, 4.0]))
        >>> float(out["global_norm"]), state.parameters.round(3).tolist()
        (5.0, [-0.6000000238418579, -0.800000011920929])
    """
    if not (isinstance(max_norm, int | float) and math.isfinite(max_norm) and max_norm > 0):
        raise HyperparameterError(
            f"clip_by_global_norm: max_norm is {max_norm!r}; expected a number above 0."
        )
    expect_one_device(program, "a clip")
    if not program.gradients or any(p in program.next_state for p, _ in program.gradients):
        raise GraphError(
            f"Program {program.name!r} has no gradients that wait for an update. Clip between the passes: "
            "append_backward, clip_by_global_norm, append_update."
        )
    builder = Builder(program, program.ops, made_by=Pass.UPDATE)
    gradients = tuple(dict.fromkeys(g for _, g in program.gradients))
    dtype = np.dtype(jnp.result_type(np.float32, *(np.abs(np.empty(0, g.dtype)).dtype for g in gradients)))
    body = body_over(partial(_norm, dtype), [v.aval for v in gradients])
    (norm,) = builder.add("global_norm", gradients, ["global_norm"], body, UpdateType.ACROSS)
    clipped: dict[Variable, Variable] = {}
    bodies: dict[tuple[Any, ...], Body] = {}
    for g in gradients:
        kind = (g.shape, g.dtype)
        if kind not in bodies:
            bodies[kind] = body_of(lambda x, n: [_clipped(x, n, max_norm)], g.aval, norm.aval)
        clipped[g] = builder.named(f"clip({g.name})", g, Kind.GRADIENT)
        builder.add("clip", [g, norm], [clipped[g]], bodies[kind], UpdateType.ACROSS)
    return builder.program(gradients=tuple((p, clipped[g]) for p, g in program.gradients))


def _norm(dtype: Any, gradients: Sequence[Any]) -> list[Any]:
    return [length([jnp.abs(g).astype(dtype) for g in gradients]).norm]


def _clipped(gradient: Any, norm: Any, max_norm: float) -> Any:
    half = 2.0 ** (np.finfo(norm.dtype).maxexp // 2)
    down = jnp.where(norm > half, 1 / half, 1).astype(norm.dtype)
    wide = gradient.astype(jnp.promote_types(gradient.dtype, np.float32))
    return shortened(wide, Length(norm * down, down), max_norm).astype(gradient.dtype)
