"""One equation in another floating dtype."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from onward.core.jaxprs.body import Body, EquationBody
from onward.core.jaxprs.equations import Type, close, literal_value
from onward.core.jaxprs.tracing import traced


def retyped(body: Body, dtype: Any) -> Body | None:
    """The same equation with every float32 in it of another floating dtype, literal numbers as well.

    None if it calls functions, if a number in it is none in that dtype or becomes 0, or if the primitive
    does not take it or gives results of other types. What it accumulates in it chooses itself.
    """
    if len(body.equations) != 1 or body.has_effects or body.holds_functions:
        return None
    eqn = _retyped(body.closed.jaxpr.eqns[0], np.dtype(dtype))
    if eqn is None:
        return None
    types, wanted = ([_in_place_of_float32(t, dtype) for t in g] for g in (body.in_types, body.out_types))
    old = close(body.closed.jaxpr.replace(eqns=[eqn]), body.closed.consts)
    try:
        closed = traced(jex.jaxpr_as_fun(old), *types)
    except (TypeError, ValueError, NotImplementedError):
        return None
    jaxpr = closed.jaxpr
    found = [(v.aval.shape, v.aval.dtype) for v in jaxpr.outvars]
    if found != [(t.shape, t.dtype) for t in wanted]:
        return None
    if len(jaxpr.eqns) != 1:  # a conversion that is none now
        return Body(closed)
    return EquationBody(jaxpr.eqns[0], jaxpr.invars, jaxpr.outvars, jaxpr.debug_info.with_unknown_names())


def _retyped(eqn: Any, dtype: np.dtype[Any]) -> Any:
    """The equation with its float32 literals and parameters of that dtype; None if a number does not fit."""
    invars = [_retyped_literal(v, dtype) if isinstance(v, jex.Literal) else v for v in eqn.invars]
    if any(v is None for v in invars):
        return None
    params = {k: dtype if _is_float32(value) else value for k, value in eqn.params.items()}
    return eqn.replace(invars=invars, params=params)


def _retyped_literal(literal: Any, dtype: np.dtype[Any]) -> Any:
    """The literal in another floating dtype; None if it is too large or too small for that."""
    if literal.aval.dtype != np.float32:
        return literal
    value = literal_value(literal)
    with np.errstate(over="ignore", under="ignore"):
        cast = value.astype(dtype)
    same = np.isfinite(cast) == np.isfinite(value) and (cast == 0) == (value == 0)
    return jex.Literal(cast, jax.typeof(cast)) if same else None


def _is_float32(value: Any) -> bool:
    """Whether a parameter of a primitive is that dtype, also if given as a NumPy class."""
    return isinstance(value, np.dtype | type) and value == np.float32


def _in_place_of_float32(t: Type, dtype: Any) -> Type:
    return Type(t.shape, dtype) if t.dtype == np.float32 else t
