"""The loss of a Program, and the Variables that can be differentiated: of others an error says why not."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import numpy as np

from onward.core.errors import ArgumentError, LossError
from onward.core.program import Program, Variable
from onward.core.walk import Where, find, name_of


def loss_of(program: Program, loss: str | Variable | None) -> Variable:
    """The Variable to differentiate: the one that is named, or the function's loss; a real scalar."""
    if loss is not None:
        target = find(program, loss)
    elif program.loss is not None:
        target = program.loss
    elif not program.outputs:
        raise LossError(f"{program.name} returns None or nothing that is an array. Is its `return` missing?")
    else:
        raise LossError(
            f"{program.name} returns {len(program.outputs)} arrays; which one is the loss? Return "
            "(loss, aux) and say so, minimize(loss, params, x, has_aux=True) or trace(..., has_aux=True); or "
            "name it: append_backward(program, loss=...)."
        )
    if target.shape:
        raise LossError(
            f"The loss {target.name!r} of {program.name} is {target.type}{_made_at(program, target)}; it "
            "must be a scalar. Reduce it over the batch: jnp.mean(loss)."
        )
    if not target.is_float:
        raise LossError(
            f"The loss {target.name!r} of {program.name} is {target.type}{_made_at(program, target)}; it "
            "must be a floating point number. Is a count or an accuracy returned in place of the loss?"
        )
    _expect_real(target, f"The loss {target.name!r} of {program.name}", _made_at(program, target))
    return target


def _expect_real(target: Variable, what: str, place: str = "") -> None:
    """Raise ``LossError`` for a complex number, which has no direction of descent."""
    if jnp.issubdtype(target.dtype, np.complexfloating):
        raise LossError(
            f"{what} is {target.type}{place}, a complex number, of which none is less than another. Make a "
            "real number of it, such as jnp.abs(loss) or loss.real."
        )


def expect_floats(program: Program, chosen: Iterable[Where]) -> None:
    """Raise ``LossError`` for an integer that should be trained."""
    counting = {v.name: v for v in program.state if not v.is_float}
    for where in chosen:
        if (v := counting.get(name_of(where) or "")) is not None:
            raise LossError(
                f"parameter_list: {v.name!r} is {v.type}, which is never trained. Make it an array of "
                "floats, or leave it out of the list: it is read as it is."
            )


def _made_at(program: Program, v: Variable) -> str:
    return next((f" ({op.type}{op.at})" for op in program.ops if v in op.outputs and op.at), "")


def check_targets(
    targets: Sequence[Variable], inputs: Sequence[Variable], seeds: Sequence[Variable | None]
) -> None:
    """Raise unless these are floats, with a gradient of its type for each target that is given one."""
    if len(seeds) != len(targets):
        raise ArgumentError(f"{len(targets)} targets and {len(seeds)} target_gradients; give one for each.")
    for v in (*targets, *inputs):
        if not v.is_float:
            raise LossError(f"{v.name!r} is {v.type}: only floating point Variables have gradients.")
    for target, seed in zip(targets, seeds, strict=True):
        if seed is None:
            _expect_real(target, f"The target {target.name!r}")
        if seed is not None and (seed.shape, seed.dtype) != (target.shape, target.dtype):
            raise ArgumentError(
                f"The target {target.name!r} is {target.type} and its gradient {seed.name!r} is {seed.type}; "
                "the types must be equal."
            )
