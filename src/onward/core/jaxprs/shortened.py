"""One equation on arrays of which some dimensions are shorter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend import core as jex

from onward.core.jaxprs.body import Body
from onward.core.jaxprs.equations import Type, close, nothing
from onward.core.jaxprs.tracing import traced
from onward.core.primitives.table import of
from onward.core.primitives.traits import Moves

Shape = tuple[int, ...]


def shortened(body: Body, types: Sequence[Type], results: Sequence[Shape]) -> Body | None:
    """The same equation for operands of other lengths; None if it gives results of other shapes.

    Args:
        body: a computation of one equation that runs no others.
        types: those that its inputs have now.
        results: the shapes that its results should have.

    >>> import jax.numpy as jnp
    >>> from onward.core.jaxprs.body import body_of
    >>> body = body_of(lambda x: [jnp.broadcast_to(x, (6, 2))], jnp.ones(2))
    >>> shortened(body, body.in_types, [(3, 2)]).out_types[0].shape
    (3, 2)
    """
    (eqn,) = body.equations
    parts = body.parts
    lengths = {v: t.shape for v, t in zip(parts.invars, types, strict=True)}
    pairs = zip(parts.invars, types, strict=True)
    new = {v: jex.Var(jax.core.ShapedArray(t.shape, t.dtype)) for v, t in pairs}
    made = {v: jex.Var(v.aval) for v in eqn.outvars}
    first = next((v for v in eqn.invars if not isinstance(v, jex.Literal)), None)
    params = _fitted(eqn, lengths.get(first, ()) if first is not None else (), results[0])
    short = eqn.replace(
        invars=[v if isinstance(v, jex.Literal) else new[v] for v in eqn.invars],
        outvars=[made[v] for v in eqn.outvars],
        params=params,
    )
    outvars = [made[v] for v in parts.outvars]
    jaxpr = jex.Jaxpr([], list(new.values()), outvars, [short], eqn.effects, nothing().jaxpr.debug_info)
    try:
        found = Body(traced(jex.jaxpr_as_fun(close(jaxpr, [])), *types))
    except (TypeError, ValueError, NotImplementedError):
        return None
    fits = [tuple(t.shape) for t in found.out_types] == [tuple(shape) for shape in results]
    return found if fits else None


def _fitted(eqn: Any, operand: Shape, result: Shape) -> Mapping[str, Any]:
    """The parameters of an equation whose first operand and first result have these shapes."""
    params, moves = dict(eqn.params), of(eqn.primitive.name).moves
    if moves in (Moves.REPEATS, Moves.MAKES) and "shape" in params:
        params["shape"] = result
    elif moves is Moves.RESHAPES and "new_sizes" in params:
        params["new_sizes"] = result
    elif moves is Moves.CUTS and "limit_indices" in params:
        params["limit_indices"] = _short(params["limit_indices"], eqn.invars[0].aval.shape, operand)
    elif moves is Moves.LOOKS_UP and "slice_sizes" in params:
        params["slice_sizes"] = _short(params["slice_sizes"], eqn.invars[0].aval.shape, operand)
    return params


def _short(sizes: Shape, before: Shape, now: Shape) -> Shape:
    """The sizes of a part that reaches to the end of a dimension which is shorter now."""
    return tuple(m if size == n and n != m else size for size, n, m in zip(sizes, before, now, strict=True))
