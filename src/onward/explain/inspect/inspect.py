"""``inspect``: someone's existing JAX training step as a Program, without a rewrite.

>>> import jax, jax.numpy as jnp, onward as ow
>>> def step(w, x):
...     loss, grad = jax.value_and_grad(lambda w: jnp.sum(jnp.sin(w * x)))(w)
...     return w - 0.1 * grad, loss
>>> print(inspect(step, jnp.ones(3), jnp.ones(3)))
Program step: 1 feed, 1 parameter (3 numbers), 9 ops
<BLANKLINE>
feed      │ f32[3]   x
parameter │ f32[3]   w
──────────┼──────────────────────────────────────────────────────────────────────
forward   │ f32[3]   mul = mul(w, x)
          │ f32[3]   sin = sin(mul)
          │ f32[3]   cos = cos(mul)
          │ f32[]    reduce_sum = reduce_sum(sin, axes=(0,))
backward  │ f32[3]   broadcast_in_dim = broadcast_in_dim(1.0)
          │ f32[3]   mul_1 = mul(broadcast_in_dim, cos)
          │ f32[3]   grad(w) = mul(mul_1, x)
update    │ f32[3]   mul_3 = mul(0.1, grad(w))
          │ f32[3]   next(w) = sub(w, mul_3)
──────────┼──────────────────────────────────────────────────────────────────────
return    │ f32[]    reduce_sum  (the loss)
next step │ 1 array  each state Variable x takes the value of next(x)
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

from onward.core.check import check
from onward.core.errors import GraphError
from onward.core.jaxprs.devices import on_devices
from onward.core.program import Program
from onward.core.source import user_level
from onward.core.walk import listed
from onward.core.words import Pass
from onward.explain.inspect.assembly import SpreadStep, assemble
from onward.explain.inspect.call import CalledStep, call_of, placed
from onward.explain.inspect.opened import OpenedBody
from onward.explain.inspect.tracing import TracedStep, traced_call

_STATELESS = (
    "{name} returns nothing that replaces one of its arguments, so its Program has data alone, no parameters "
    "and no state. Inspect the function that returns the updated parameters."
)

_WITHIN = (
    "{name} returns nothing that replaces one of its arguments, but trains within: {op} carries {count} "
    "parameters, {first!r} and others, from turn to turn. print(program) shows its turn, "
    "program.ops[{place}].subprograms holds it. To train on with onward.compile, let {name} take the "
    "parameters it begins with, and return them."
)
_APART = (
    "{name} is spread over devices, which may drift apart. {error} So it stands as the one op {op!r} that "
    "all devices run, opened within. Where state is to stay equal, exchange the gradients before the update: "
    "jax.lax.pmean(gradients, axis)."
)


def inspect(
    step: Callable[..., Any], /, *args: Any, carried: Sequence[str] | None = None, **kwargs: Any
) -> Program:
    """Show someone's JAX training step as a Program: forward, backward and update, found without a rewrite.

    The passes are read off the marks that JAX leaves on what it differentiates. Results that are built as an
    argument is, and computed from it by the update, are the next value of that argument: it is state then,
    and a parameter if it has a gradient. All other arguments are data. A number alone is state if it is
    counted on (a step, a loss scale), not if it scales a result (a learning rate beside a norm). Where one
    container comes back with the same keys or fields, each part replaces the part of the same path. What the
    forward pass makes of an argument that the loss looks at, as long as the batch, may be a hidden state or a
    reconstruction: then ``carried`` has to say, as it has where a result stands in the place of one argument
    and is computed from another. Nothing is run.

    A loop over steps, epochs or micro-batches is one op, and is opened: one turn of it is a Program of its
    own in ``subprograms``, with parameters, gradients, loss and passes, which the listing shows below it and
    ``summary`` counts. The branches of a ``cond`` that compute gradients are opened alike. What ``shard_map``
    or ``pmap`` spreads over devices is shown as what one of them does; over several axes, or in a part of the
    step, it is one op that is opened alike. The loss is known though it is not returned; of several losses,
    as a GAN has them, ``program.losses`` holds each with the parameters that it trains, and there is no
    ``program.loss``.

    ``onward.compile`` runs the Program: ``step.init`` takes the arguments
    that are state, a tuple of them if they are several, and for modules of flax.nnx the
    ``nnx.split((model, optimizer))[1]`` of them.

    Args:
        step: the training step: any function that JAX can trace, jitted or not, with optax, flax.nnx, flax
            linen, equinox, haiku or none of them.
        args: what it is called with: arrays, ``jax.ShapeDtypeStruct``, containers and modules of them. Python
            numbers are data, unless the step needs their values: then they stay as they are.
        carried: the names of the arguments that are carried on from step to step, or of places in them
            (``"state/params"``); found unless given. One that is named is replaced by the result in its
            place, or of its name, that is built alike, even if that is computed from another, or from none,
            as the gradient of the step before is. Modules of flax.nnx are carried on always.
        kwargs: the same by name.

    Raises:
        ArgumentError: no function, arguments that it does not take, or a result of which nothing shows
            whether it is carried on.
        TraceError: the step needs the value of an array, as ``float(loss)`` does, or has side effects.

    Example:
        >>> import jax, jax.numpy as jnp, onward as ow
        >>> def step(w, x):
        ...     loss, grad = jax.value_and_grad(lambda w: jnp.sum(jnp.sin(w * x)))(w)
        ...     return w - 0.1 * grad, loss
        >>> program = inspect(step, jnp.ones(3), jnp.ones(3))
        >>> [op.type for op in program.ops if op.made_by is ow.Pass.UPDATE]
        ['mul', 'sub']
        >>> [(p.name, g.name) for p, g in program.gradients]
        [('w', 'grad(w)')]

    Source: passes by the names of transformations that JAX keeps for each operation
        (Bradbury et al. 2018, JAX).
    """
    call, found = traced_call(placed(call_of(step, args, kwargs), args, kwargs))
    program = _assembled(call, found, None if carried is None else listed(carried))
    if not program.next_state and any(op.made_by in _TRAINS for op in program.ops):
        warnings.warn(_stateless(program), stacklevel=user_level())
    return program


_TRAINS = (Pass.BACKWARD, Pass.UPDATE)


def _stateless(program: Program) -> str:
    """The advice for a step that carries nothing on."""
    for place, op in enumerate(program.ops):
        if isinstance(op.body, OpenedBody) and op.body.trains:
            trained = op.body.first.turn.parameters
            first, count = trained[0].name, len(trained)
            return _WITHIN.format(name=program.name, op=op.type, count=count, first=first, place=place)
    return _STATELESS.format(name=program.name)


def _assembled(call: CalledStep, found: TracedStep, told: Sequence[str] | None) -> Program:
    """The checked Program: of one device, if state that is the same on all can be shown to stay so."""
    if on_devices(found.closed) is None:
        return check(assemble(call, found, SpreadStep.WHOLE, told))
    errors = []
    for devices in (SpreadStep.COPIES, SpreadStep.APART):
        try:
            return check(assemble(call, found, devices, told))
        except GraphError as error:
            errors.append(error)
    program = check(assemble(call, found, SpreadStep.WHOLE, told))
    said = _APART.format(name=call.title, error=errors[-1], op=program.ops[0].type)
    warnings.warn(said, stacklevel=user_level())
    return program
