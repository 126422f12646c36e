"""Gradients of activations that are kept in range on their way back, one activation at a time.

``layer.clip_error`` stands in a network; ``error_clip`` puts it behind activations of a Program by name.
What changes gradients of parameters after the backward pass are gradient rules, such as ``ClipByValue``.
"""

from __future__ import annotations

from collections.abc import Iterable

from onward.core.builder import with_behind
from onward.core.errors import GraphError
from onward.core.jaxprs.body import Body, body_of
from onward.core.placement import expect_one_device
from onward.core.program import Phase, Program, Variable
from onward.core.transform import transform
from onward.core.walk import Where, listed, select
from onward.core.words import Pass
from onward.define.layer.error import back_in_range, checked_bound


@transform(phase=Phase.FORWARD)
def error_clip(program: Program, where: Where | Iterable[Where], max_value: float) -> Program:
    """Move the gradients of some activations into ``[-max_value, max_value]`` on their way back.

    Adds an op ``error_clip`` behind each of them, which later ops read in place of it; the activation keeps
    its name, and its gradient is the one in range. It comes before the backward pass. A Program that trains
    nothing stays as it is. Of a loss that is a mean, micro-batches and devices have larger gradients than the
    whole batch, and a scaled one has, so that others are clipped: ``accumulate``, ``replicate`` and float16
    warn of it.

    Source: Graves, Generating Sequences With Recurrent Neural Networks, 2013, section 2.1; early Paddle has
    it as ``ErrorClipByValue`` of a variable.

    Args:
        program: a forward Program.
        where: the activations, by name, pattern or predicate.
        max_value: a number, at least 0.

    Raises:
        UnknownNameError: a choice that picks no activation of floats.
        HyperparameterError: ``max_value`` is negative or not finite.
        GraphError: there is a backward pass already, or the loss is picked.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.trace(lambda w, x: jnp.sum(jnp.tanh(w * x) * 3), jnp.ones(2), jnp.ones(2))
        >>> program = error_clip(program, "tanh", 0.5)
        >>> [op.type for op in program.ops]
        ['mul', 'tanh', 'error_clip', 'mul', 'reduce_sum']
        >>> step = ow.compile(ow.SGD(0.1).minimize(program), fetch=["grad(tanh)"])
        >>> step(step.init(jnp.ones(2)), jnp.ones(2))[1]["grad(tanh)"].tolist()
        [0.5, 0.5]
    """
    limit = checked_bound(max_value)
    expect_one_device(program, "an error clip")
    if any(op.made_by is not Pass.FORWARD for op in program.ops):
        raise GraphError(
            f"Program {program.name!r} has a backward pass already. Clip errors before it: "
            "optimizer.minimize(error_clip(trace(loss, params, *data), where, max_value))."
        )
    if program.recipe is not None and not program.recipe.origin.training:
        return program
    made = [v for op in program.ops for v in op.outputs if v.is_float]
    picked = select(made, listed(where), "error_clip")
    if program.loss is not None and program.loss in picked:
        raise GraphError(
            f"error_clip picks {program.loss.name!r}, the loss, whose gradient is 1. Leave it out."
        )

    def clipped(v: Variable) -> Body:
        return body_of(lambda x: [back_in_range(x, limit)], v.aval)

    return with_behind(program, set(picked), "error_clip", "error_clip", clipped)
