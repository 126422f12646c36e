"""Equations, edited: operands exchanged or in host memory, other jaxprs in the place of those they run."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any

import jax

from onward.core.jaxprs.body import Body, EquationBody, body_of
from onward.core.jaxprs.equations import close, closed_of, inputs_of, is_jaxpr, nothing
from onward.core.primitives.table import of


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


def in_place_of(old: Body, new: Body) -> Body:
    """A Body that computes what the new one does, and tells of itself beside that what the old one told."""
    if isinstance(old, EquationBody):
        return new
    kept = {
        k: v for k, v in vars(old).items() if not isinstance(getattr(type(old), k, None), cached_property)
    }
    found = object.__new__(type(old))
    found.__dict__.update(kept, _closed=new.closed)
    return found


def rewritten(body: Body, rule: Callable[[Body], Body | None]) -> Body | None:
    """The same with what a rule gives for it and for all that it runs, however deep: turns, branches.

    Args:
        body: any.
        rule: gives an equal Body, or None where it has nothing to say. It sees each jaxpr as a whole, and
            then the equations of those that are run, and of others where there are several, one by one.

    Returns:
        The new Body; None where the rule has nowhere something to say.

    >>> import jax, jax.numpy as jnp
    >>> from onward.core.jaxprs.body import body_of
    >>> def of_sine(body):
    ...     is_sine = [e.primitive.name for e in body.equations] == ["sin"]
    ...     return body_of(lambda x: [x + 2], *body.in_types) if is_sine else None
    >>> body = body_of(lambda x: [jax.lax.fori_loop(0, 2, lambda i, x: jnp.sin(x) * 3, x)], jnp.float32(0))
    >>> rewritten(body, of_sine)(1.0)[0].item()
    33.0
    """
    found = _rewritten(body, rule)
    return None if found is body else in_place_of(body, found)


def _rewritten(body: Body, rule: Callable[[Body], Body | None], is_run: bool = False) -> Body:
    found = rule(body) or body
    old = found.equations
    new = [_equation(eqn, rule, is_run or len(old) > 1) for eqn in old]
    if all(map(operator.is_, old, new)):
        return found
    return Body(close(found.closed.jaxpr.replace(eqns=new), found.closed.consts))


def _equation(eqn: Any, rule: Callable[[Body], Body | None], is_asked: bool) -> Any:
    if of(eqn.primitive.name).runs is None:
        return _called(eqn, rule) if is_asked else eqn
    params = {key: _parameter(value, rule) for key, value in eqn.params.items()}
    return eqn if all(params[key] is eqn.params[key] for key in params) else eqn.replace(params=params)


def _parameter(value: Any, rule: Callable[[Body], Body | None]) -> Any:
    if is_jaxpr(value):
        old = Body(closed_of(value))
        new = _rewritten(old, rule, is_run=True)
        return value if new is old else new.closed if hasattr(value, "consts") else new.closed.jaxpr
    if isinstance(value, tuple | list) and any(map(is_jaxpr, value)):
        several = [_parameter(v, rule) for v in value]
        if all(map(operator.is_, value, several)):
            return value
        make = getattr(value, "_make", type(value))  # custom_linear_solve has a named tuple
        return make(several)
    return value


def _called(eqn: Any, rule: Callable[[Body], Body | None]) -> Any:
    """One equation among others, or a call of what a rule gives for it."""
    given = inputs_of(eqn)
    found = rule(EquationBody(eqn, given, list(eqn.outvars), nothing().jaxpr.debug_info))
    if found is None:
        return eqn
    (call,) = body_of(jax.jit(found.__call__), *found.in_types).equations
    return call.replace(invars=given, outvars=eqn.outvars)


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
