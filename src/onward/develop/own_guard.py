"""Updates that tell by themselves whether a step is finite: with a loss scale of their own, or a count.

>>> import jax, jax.numpy as jnp, onward as ow
>>> def step(w, scale, x):
...     gradient = jax.grad(lambda w: scale * jnp.sum(w * x))(w) / scale
...     finite = jnp.isfinite(gradient).all()
...     following = jnp.where(finite, w - gradient, w)
...     return following, jnp.where(finite, scale, scale / 2), jnp.sum(gradient)
>>> program = ow.adopt(step, jnp.ones(2), jnp.float32(1.0), jnp.ones(2), carried=["w", "scale"])
>>> [v.name for v in own_guard(program).state]
['scale']
"""

from __future__ import annotations

import warnings
from collections.abc import Collection
from typing import NamedTuple

from onward.core.jaxprs.body import Body
from onward.core.jaxprs.equations import jaxprs_in
from onward.core.primitives.table import of
from onward.core.primitives.traits import Runs
from onward.core.program import Op, Program, Variable
from onward.core.source import user_level
from onward.core.words import Pass, some


class OwnGuard(NamedTuple):
    """The first op of an update that asks whether a step is finite, and the state that follows from it."""

    op: Op
    state: tuple[Variable, ...]


def own_guard(program: Program) -> OwnGuard | None:
    """The first op by which an update asks that, if state follows from the answer and not from the numbers.

    The answer has to choose parameters too: a count of such steps guards nothing. Slots that follow from the
    numbers of a gradient stay as they are in such a step, guarded or not.
    """
    loss = [] if program.loss is None else [program.loss]
    numbers = {*program.inputs, *loss, *(g for _, g in program.gradients)}
    answers: dict[Variable, Op] = {}
    for op in program.ops:
        read = [i for i, v in enumerate(op.inputs) if v in numbers]
        if read and op.made_by is Pass.UPDATE and _asks(op):
            answers.update(dict.fromkeys(op.outputs, op))
            continue
        numbers.update(op.outputs[i] for i in _depending(op, read))
        asked = next((answers[v] for v in op.inputs if v in answers), None)
        answers.update({} if asked is None else dict.fromkeys(op.outputs, asked))
    if not any(program.next_state.get(p) in answers for p, _ in program.gradients):
        return None
    state = {
        v: answers[new] for v, new in program.next_state.items() if new in answers and new not in numbers
    }
    first = next(iter(state.values()), None)
    return None if first is None else OwnGuard(first, tuple(v for v, op in state.items() if op is first))


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


def _asks(op: Op) -> bool:
    """Whether an op tells of each number whether it is finite, and nothing else."""
    calls = list(op.body.calls)
    return len(calls) == 1 and of(calls[0].primitive).tells_finite


def _depending(op: Op, read: Collection[int]) -> set[int]:
    """The outputs that depend on these inputs; those of a branch, by what each of them computes."""
    eqns = op.body.equations
    if 0 in read or len(eqns) != 1 or of(eqns[0].primitive.name).runs is not Runs.BRANCH:
        return op.body.depending_on(read)
    given = [i for i, v in enumerate(eqns[0].invars[1:]) if v in {op.body.parts.invars[j] for j in read}]
    branches = jaxprs_in(eqns[0].params["branches"])
    return {j for branch in branches for j in Body(branch).depending_on(given)}
