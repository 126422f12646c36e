"""``adopt``: someone's existing training step as a Program that every transform takes.

>>> import jax, jax.numpy as jnp, onward as ow
>>> @jax.jit
... def step(w, x):
...     loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.sin(x @ w)))(w)
...     return w - 0.1 * grad, loss
>>> program = adopt(step, jnp.ones(3), jnp.ones((8, 3)))
>>> [op.type for op in ow.replicate(program, 4).ops if op.made_by == "collective"]
['all_mean', 'all_mean']
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TypeVar, overload

from onward.core.around import Around
from onward.core.errors import GraphError
from onward.core.jaxprs.devices import on_devices
from onward.core.program import Program
from onward.core.walk import listed
from onward.derive.backward import append_backward
from onward.derive.update.foreign import append_foreign_update
from onward.explain.adopt.decorated import called_as_before
from onward.explain.adopt.step import AdoptedStep
from onward.explain.inspect.assembly import carried_on
from onward.explain.inspect.call import call_of, expect_function
from onward.explain.inspect.tracing import traced_call

Function = TypeVar("Function", bound=Callable[..., Any])


@overload
def adopt(step: Function, /, *, carried: Sequence[str] | None = None) -> Function: ...


@overload
def adopt(
    step: Callable[..., Any], /, *args: Any, carried: Sequence[str] | None = None, **kwargs: Any
) -> Program: ...


def adopt(
    step: Callable[..., Any], /, *args: Any, carried: Sequence[str] | None = None, **kwargs: Any
) -> Any:
    """Take someone's JAX training step as a Program of one's own; as a decorator, call it as before.

    The step is traced with its gradients left open, at its call of ``jax.grad`` or ``jax.value_and_grad``,
    also in functions jitted within it: the function that it differentiates is the forward pass, from which
    the backward pass is derived here, and what the step does with the gradients is the update, whatever
    library made it. So every transform takes the Program: ``replicate``, ``accumulate``,
    ``mixed_precision``, ``roll``, ``recompute``, ``guard``, ``watch``, and data of other lengths is traced
    again. ``onward.compile`` runs it as what ``inspect`` gives: ``step.init`` takes the arguments that are
    carried on.

    Given no arguments, as a decorator above ``@jax.jit``, it returns a function that takes and returns what
    the step does, compiled from the Program, tuned as ``compile`` does, once for each type of its arguments.
    It reuses the arrays that the jitted step was told to donate.

    Args:
        step: the training step, jitted or not, with optax, flax, equinox, haiku or none of them.
        args: what it is called with: arrays, ``jax.ShapeDtypeStruct``, containers and modules of them.
        carried: as for ``inspect``: the names of the arguments that are carried on; found unless given.
        kwargs: the arguments of the step by name.

    Raises:
        ArgumentError: no function, arguments that it does not take, or a result of which nothing shows
            whether it is carried on.
        GraphError: it computes no gradients, several times, or where they cannot be left open: in a loop, a
            ``vmap`` or a condition, by a function that was differentiated outside of it, on several devices.
        TraceError: the step needs the value of an array, or has side effects.

    Example:
        >>> import jax, jax.numpy as jnp, onward as ow
        >>> def step(w, x):
        ...     loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.sin(x @ w)))(w)
        ...     return w - 0.1 * grad, loss
        >>> program = ow.accumulate(adopt(step, jnp.ones(3), jnp.ones((8, 3))), 4)
        >>> step = ow.compile(program)
        >>> state, out = step(step.init(jnp.ones(3)), jnp.ones((8, 3)))
        >>> round(float(out.loss), 3)
        0.141
    """
    told = None if carried is None else listed(carried)
    expect_function(step, "adopt")
    if not args and not kwargs:
        return called_as_before(step, lambda args, kwargs: _adopted(step, args, kwargs, told, asks=False))
    return _adopted(step, args, kwargs, told, asks=True)[1]


def _adopted(
    step: Any, args: tuple[Any, ...], kwargs: dict[str, Any], told: Sequence[str] | None, asks: bool
) -> tuple[AdoptedStep, Program]:
    """The step taken apart, and its Program; ``asks`` as of Ends."""
    call, found = traced_call(call_of(unjitted(step), args, kwargs))
    if on_devices(found.closed) is not None:
        raise GraphError(
            f"{call.title} is spread over devices by shard_map or pmap itself. Adopt the step of one device, "
            "without its exchange of gradients, and spread it with onward.replicate. ow.inspect shows it as "
            "it is."
        )
    pairs = tuple(carried_on(call, found, told, asks))
    around = Around(call.step)
    origin = AdoptedStep(call, pairs, found.treedef, tuple(found.statics), around=around)
    forward, trained = origin.trace(origin.types), origin.trained(origin.types)
    return origin, append_foreign_update(append_backward(forward, None, trained), origin)


def unjitted(step: Any) -> Any:
    """The function behind ``jax.jit``, ``nnx.jit`` or ``eqx.filter_jit``, also of a method or a partial."""
    if isinstance(step, partial):
        return partial(unjitted(step.func), *step.args, **step.keywords)
    if isinstance(step, MethodType):
        return MethodType(unjitted(step.__func__), step.__self__)
    if hasattr(step, "__wrapped__") and not isinstance(step, FunctionType):
        return unjitted(step.__wrapped__)
    return step
