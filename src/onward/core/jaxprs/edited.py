"""One equation, edited: operands exchanged or in host memory, or another jaxpr in the place of one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax

from onward.core.jaxprs.body import Body, EquationBody, body_of
from onward.core.jaxprs.equations import close, is_jaxpr


def exchanged(body: Body) -> Body:
    """The same equation with its operands in the other order.

    >>> import jax.numpy as jnp
    >>> from onward.core.jaxprs.body import body_of
    >>> body = body_of(lambda x: [2 - x], jnp.float32(0))
    >>> exchanged(body)(3.0)[0].item()
    1.0
    """
    (eqn,) = body.equations
    return _edited(body, eqn.replace(invars=list(eqn.invars)[::-1]))


def with_inner(body: Body, name: str, inner: Body) -> Body:
    """The same equation running another jaxpr of the same types, which holds no arrays of its own.

    Args:
        body: a computation of one equation, such as a loop.
        name: that of the jaxpr, as ``programs_within`` tells it: a parameter, with a number behind it where
            the parameter holds several.
        inner: runs in place of it.
    """
    (eqn,) = body.equations
    key, _, rest = name.partition("[")
    old = eqn.params[key]
    several = list(old) if isinstance(old, tuple | list) else [old]
    at = int(rest[:-1]) if rest else next(i for i, value in enumerate(several) if is_jaxpr(value))
    several[at] = inner.closed if hasattr(several[at], "consts") else inner.closed.jaxpr
    new = type(old)(several) if isinstance(old, tuple | list) else several[0]
    return _edited(body, eqn.replace(params={**eqn.params, key: new}))


def call_with_inner(body: Body, name: str, inner: Body) -> Callable[..., list[Any]]:
    """From the inputs of a Body to the results of its equation, running another jaxpr, of any types.

    If that takes more operands, they are given apart, as a second argument.
    """
    (eqn,) = with_inner(body, name, inner).equations
    pairs = list(zip(body.operands, body.numbers, strict=True))

    def run(values: Sequence[Any], more: Sequence[Any] = ()) -> list[Any]:
        read = [values[x] if isinstance(x, int) else number for x, number in pairs]
        made: list[Any] = eqn.primitive.bind(*read, *more, **eqn.params)
        return made

    return run


def given_on_host(function: Callable[..., list[Any]], types: Sequence[Any], given: Collection[int]) -> Body:
    """The Body of a function whose inputs at these positions lie in host memory.

    >>> import jax, jax.numpy as jnp
    >>> def total(xs):
    ...     fetched = lambda carry, x: (carry + jax.device_put(x, jax.memory.Space.Device), None)
    ...     return [jax.lax.scan(fetched, 0.0, xs)[0]]
    >>> given_on_host(total, [jnp.ones(3)], [0]).text.splitlines()[0]
    '{ lambda ; a:f32<host>[3]. let'
    """

    def moved(*values: Any) -> list[Any]:
        there = jax.memory.Space.Host
        put = {i: jax.device_put(values[i], there) for i in given}  # these stand before all else
        return function(*(put.get(i, x) for i, x in enumerate(values)))

    closed = body_of(moved, *types).closed
    jaxpr = closed.jaxpr
    moves, rest = jaxpr.eqns[: len(given)], jaxpr.eqns[len(given) :]
    there = {move.invars[0]: move.outvars[0] for move in moves}
    invars = [there.get(v, v) for v in jaxpr.invars]
    return Body(close(jaxpr.replace(invars=invars, eqns=rest), closed.consts))


def _edited(body: Body, eqn: Any) -> Body:
    jaxpr = body.closed.jaxpr
    return EquationBody(eqn, list(jaxpr.invars), list(jaxpr.outvars), jaxpr.debug_info)
