"""Signatures of computations: one object for all that are equal, however deep the jaxprs in them."""

from __future__ import annotations

import inspect
import os
import sys
from contextvars import ContextVar
from functools import cache
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import jax
import numpy as np
from jax.extend import core as jex

from onward.core.jaxprs.equations import (
    close,
    closed_of,
    equations_within,
    has_rule_of_its_own,
    is_jaxpr,
    nothing,
    nowhere,
    type_of,
)
from onward.core.jaxprs.tracing import traced
from onward.core.keys import Same, key_of


class BodySignature:
    """The identity of a computation: one object for all that are equal, while anything holds it."""

    __slots__ = ("__weakref__",)


_signatures: WeakValueDictionary[Any, BodySignature] = WeakValueDictionary()
_RULES_WITHIN_RULES = 2  # the rule of a function is traced, and of those that its rule calls, to this depth
_of_jaxprs = tuple(WeakKeyDictionary[Any, BodySignature]() for _ in range(_RULES_WITHIN_RULES + 1))
_within: ContextVar[int] = ContextVar("within", default=0)
_interning = Lock()
_JAX = os.path.dirname(jax.__file__) + os.sep


def interned(key: Any) -> BodySignature:
    """The one Signature of everything that has this key."""
    with _interning:
        return _signatures.setdefault(key, BodySignature())


def signature_of(jaxpr: Any) -> BodySignature:
    """The signature of a jaxpr, closed or not; looked at once, as ``jit`` calls one jaxpr in many places."""
    met = _of_jaxprs[_within.get()]
    known = met.get(jaxpr)
    if known is None:
        closed = closed_of(jaxpr)
        inner = closed.jaxpr
        key = key_of_parts(inner.constvars, closed.consts, inner.invars, inner.eqns, inner.outvars)
        known = met[jaxpr] = interned(key)
    return known


def key_of_parts(constvars: Any, consts: Any, invars: Any, eqns: Any, outvars: Any) -> Any:
    """A jaxpr with its variables replaced by the number of the place where each gets its value."""
    numbers: dict[Any, int] = {}

    def read(v: Any) -> Any:
        return _literal_key(v) if isinstance(v, jex.Literal) else numbers[v]

    def write(v: Any) -> Any:
        if isinstance(v, jex.DropVar):
            return v.aval
        numbers[v] = len(numbers)
        return v.aval

    given = tuple(map(write, invars)), tuple(map(write, constvars)), tuple(map(_value_key, consts))
    steps = tuple(
        (
            eqn.primitive,
            _params_key(eqn),
            tuple(map(read, eqn.invars)),
            tuple(map(write, eqn.outvars)),
            eqn.ctx,
            frozenset(map(Same, eqn.effects)) if eqn.effects else None,
        )
        for eqn in eqns
    )
    return given, steps, tuple(map(read, outvars))


def _params_key(eqn: Any) -> Any:
    if has_rule_of_its_own(eqn):
        return _rule_key(eqn)
    return tuple((name, _value_key(value)) for name, value in eqn.params.items())


def _rule_key(eqn: Any) -> Any:
    """A call of a function with a rule of its own: what it computes, and what its rule traces to.

    Nothing else tells two rules apart: a rule may read whatever Python can reach, but for the functions that
    JAX itself has, each of which has one. One that cannot be traced in reverse, or asks which inputs have a
    tangent, is only equal to itself.
    """
    forward, depth = signature_of(eqn.params["call_jaxpr"]), _within.get()
    if depth == _RULES_WITHIN_RULES:
        return forward
    if (known := _of_jax_itself(eqn)) is not None:
        return forward, Same(known)
    if eqn.params["symbolic_zeros"]:
        return Same(object())
    token = _within.set(depth + 1)
    try:
        return forward, signature_of(_gradient_of(eqn))
    except Exception:
        return Same(object())
    finally:
        _within.reset(token)


def calls_rule_of_users(eqn: Any) -> bool:
    """Whether a function is called in it, however deep, that has a rule of its own and is not one of JAX."""
    mine = has_rule_of_its_own(eqn) and _of_jax_itself(eqn) is None
    return mine or any(map(calls_rule_of_users, equations_within(eqn)))


def _of_jax_itself(eqn: Any) -> Any | None:
    """The function that JAX's modules have at their top, such as ``relu``, which an equation calls."""
    told = closed_of(eqn.params["call_jaxpr"]).jaxpr.debug_info
    return _at_top(told.func_name, told.func_filename or "", told.func_lineno)


@cache
def _at_top(name: str, file: str, line: int) -> Any | None:
    """The function with a rule that a module of JAX has under this name, if it begins at this line.

    None where its rule knows more than arrays: what is not an array may differ from call to call.
    """
    if not file.startswith(_JAX):
        return None
    module = next((m for m in [*sys.modules.values()] if getattr(m, "__file__", None) == file), None)
    found = getattr(module, name, None)
    while found is not None and not isinstance(found, jax.custom_jvp | jax.custom_vjp):
        found = getattr(found, "__wrapped__", None)
    code = getattr(inspect.unwrap(found), "__code__", None) if callable(found) else None
    is_it = code is not None and code.co_firstlineno == line
    return found if is_it and getattr(found, "nondiff_argnums", None) == () else None


def _gradient_of(eqn: Any) -> Any:
    """The jaxpr of a call together with the gradients of its inputs."""
    types = [type_of(v.aval) for v in eqn.invars]
    given = [jex.Var(v.aval) for v in eqn.invars]
    made = [jex.Var(v.aval) for v in eqn.outvars]
    alone = eqn.replace(invars=given, outvars=made, source_info=nowhere())
    call = jex.jaxpr_as_fun(
        close(jex.Jaxpr([], given, made, [alone], eqn.effects, nothing().jaxpr.debug_info), [])
    )
    chosen, counted = ([i for i, v in enumerate(g) if _is_real(v.aval)] for g in (given, made))

    def gradient(inputs: Any, cotangents: Any) -> Any:
        def of(*values: Any) -> Any:
            found = dict(zip(chosen, values, strict=True))
            outputs = call(*(found.get(i, x) for i, x in enumerate(inputs)))
            return [outputs[j] for j in counted]

        return jax.vjp(of, *(inputs[i] for i in chosen))[1](cotangents)

    return traced(gradient, types, [type_of(made[j].aval) for j in counted])


def _is_real(aval: Any) -> bool:
    """Whether numbers of this type have a gradient."""
    return bool(jax.numpy.issubdtype(aval.dtype, np.inexact))


def _value_key(value: Any) -> Any:
    return key_of(value, _jaxpr_key)


def _jaxpr_key(value: Any) -> BodySignature | None:
    return signature_of(value) if is_jaxpr(value) else None


def _literal_key(literal: Any) -> Any:
    value = np.asarray(literal.val)
    return (value.dtype, value.tobytes(), literal.aval)
