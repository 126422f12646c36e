"""Updates that tell by themselves whether a step is finite: with a loss scale of their own, or a count.

>>> import jax, jax.numpy as jnp, onward as ow
>>> def step(w, scale, x):
...     gradient = jax.grad(lambda w: scale * jnp.sum(w * x))(w) / scale
...     scale = jnp.where(jnp.isfinite(gradient).all(), scale, scale / 2)
...     return w - gradient, scale, jnp.sum(gradient)
>>> program = ow.adopt(step, jnp.ones(2), jnp.float32(1.0), jnp.ones(2), carried=["w", "scale"])
>>> [v.name for v in own_guard(program).state]
['scale']
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

from onward.core.primitives.table import of
from onward.core.program import Op, Program, Variable
from onward.core.source import user_level
from onward.core.walk import descendants
from onward.core.words import Pass, some


class OwnGuard(NamedTuple):
    """The first op of an update that asks whether a step is finite, and the state that follows from it."""

    op: Op
    state: tuple[Variable, ...]


def own_guard(program: Program) -> OwnGuard | None:
    """The op by which an update asks that of loss or gradients, if more than parameters follow from it."""
    trained = {p for p, _ in program.gradients}
    loss = [] if program.loss is None else [program.loss]
    told = descendants(program, [*loss, *(g for _, g in program.gradients)])
    for op in program.ops:
        if op.made_by is Pass.UPDATE and _tells_finite(op) and not told.isdisjoint(op.inputs):
            after = descendants(program, op.outputs)
            state = tuple(v for v, new in program.next_state.items() if new in after and v not in trained)
            if state:
                return OwnGuard(op, state)
    return None


def warn_of_own_guard(program: Program) -> None:
    """Warn of an update that would be kept from what it does itself in a step that is not finite."""
    if (found := own_guard(program)) is None:
        return
    names = some([repr(v.name) for v in found.state], 3)
    warnings.warn(
        f"guard: the update of {program.name} tells by itself whether a step is finite ({found.op.type}"
        f"{found.op.at}), and makes {names} of that. In such a step guard keeps all state as it was, this "
        "too: a loss scale that should fall never does, and no step is made from then on. Leave out "
        "ow.guard: the step guards itself.",
        stacklevel=user_level(),
    )


def _tells_finite(op: Op) -> bool:
    return any(of(name).tells_finite for name in op.body.primitives)
