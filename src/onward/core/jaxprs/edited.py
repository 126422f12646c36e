"""One equation, edited: its two operands exchanged, or another jaxpr in the place of one that it runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onward.core.jaxprs.body import Body, EquationBody
from onward.core.jaxprs.equations import is_jaxpr


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


def _edited(body: Body, eqn: Any) -> Body:
    jaxpr = body.closed.jaxpr
    return EquationBody(eqn, list(jaxpr.invars), list(jaxpr.outvars), jaxpr.debug_info)
