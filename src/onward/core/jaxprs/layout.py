"""Bodies whose calls are written out, and the same computation on numbers that are laid out otherwise."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core as jex

from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.equations import Type, called_by, close, literal_value, nothing
from onward.core.primitives.table import of
from onward.core.primitives.traits import Moves

Shape = tuple[int, ...]


def inlined(body: Body) -> Body:
    """The same computation without calls of functions: their equations stand in their place.

    >>> import jax, jax.numpy as jnp, onward as ow
    >>> body = ow.graph.body_of(lambda x: [jax.jit(jnp.sin)(x)], jnp.ones(3))
    >>> [call.primitive for call in body.calls], [call.primitive for call in inlined(body).calls]
    (['jit'], ['sin'])
    """
    return body_of(lambda *values: _run(body.closed, values, _computed), *body.in_types)


def read_by(body: Body) -> list[int]:
    """For each output the inputs that it is computed of, as the bits of a number.

    >>> import jax.numpy as jnp, onward as ow
    >>> body = ow.graph.body_of(lambda x, y: [x + 1, x * y], jnp.ones(3), jnp.ones(3))
    >>> list(map(bin, read_by(body)))
    ['0b1', '0b11']
    """
    jaxpr = body.closed.jaxpr
    bits = {v: 1 << i for i, v in enumerate(jaxpr.invars)}

    def read(variables: Sequence[Any]) -> int:
        found = 0
        for v in variables:
            found |= 0 if isinstance(v, jex.Literal) else bits.get(v, 0)
        return found

    for eqn in jaxpr.eqns:
        bits.update(dict.fromkeys(eqn.outvars, read(eqn.invars)))
    return [read([v]) for v in jaxpr.outvars]


def laid_out(body: Body, arrays: Collection[int], shape: Shape, other: Shape) -> Body | None:
    """The Body for arrays of another shape, if it looks at each number by itself; None if it looks further.

    Args:
        body: a computation without calls.
        arrays: the inputs that are laid out otherwise, and have this shape; all outputs have.
        shape: that of the arrays now.
        other: the shape that they should have: parts of them, or all in a row.

    >>> import jax.numpy as jnp, onward as ow
    >>> x = jnp.ones((2, 3))
    >>> body = laid_out(ow.graph.body_of(lambda x, n: [x * n + 1], x, x[0, 0]), [0], (2, 3), (6,))
    >>> [t.shape for t in body.in_types], [t.shape for t in body.out_types]
    ([(6,), ()], [(6,)])
    >>> laid_out(ow.graph.body_of(lambda x: [x / x.sum()], x), [0], (2, 3), (6,)) is None
    True
    """

    def run(*values: Any) -> list[Any]:
        given = [_Placed(x, i in arrays) for i, x in enumerate(values)]
        rule = _ByNumber(shape, other)
        return [rule.whole(x) for x in _run(body.closed, given, rule)]

    types = [_with_shape(t, other) if i in arrays else t for i, t in enumerate(body.in_types)]
    try:
        return body_of(run, *types)
    except _LooksFurtherError:
        return None


class _LooksFurtherError(Exception):
    """A computation that looks at more than one number of an array at a time, or at its place."""


class _Placed:
    """A value, and whether it is an array that is laid out otherwise."""

    def __init__(self, value: Any, is_array: bool = False) -> None:
        self.value, self.is_array = value, is_array

    @property
    def fits(self) -> bool:
        """Whether it is such an array, or one number for all places."""
        return self.is_array or not jnp.shape(self.value)


class _ByNumber:
    """How an equation is computed on arrays of another shape."""

    def __init__(self, shape: Shape, other: Shape) -> None:
        self.shape, self.other = shape, other

    def __call__(self, eqn: Any, given: Sequence[Any]) -> list[_Placed]:
        """The results of an equation, number by number."""
        placed = [x if isinstance(x, _Placed) else _Placed(x) for x in given]
        values = [x.value for x in placed]
        if not any(x.is_array for x in placed):
            return self._of_numbers(eqn, values)
        row = of(eqn.primitive.name)
        if all(x.fits for x in placed) and (row.is_elementwise or row.keeps_places):
            alike = [True] if len(eqn.outvars) == 1 else [x.is_array for x in placed]
            return list(map(_Placed, _computed(eqn, self._spread(values)), alike))
        if self._changes_nothing(eqn, row.moves):
            return [placed[0]]
        raise _LooksFurtherError

    def _spread(self, values: Sequence[Any]) -> Sequence[Any]:
        """Operands that are of one shape again, where an array was a number and is one no more."""
        return values if self.shape else [jnp.broadcast_to(x, self.other) for x in values]

    def whole(self, value: Any) -> Any:
        """A result, which has the new shape; a number that is read of nothing stands in all places."""
        placed = value if isinstance(value, _Placed) else _Placed(value)
        if placed.is_array:
            return placed.value
        if self.shape or jnp.shape(placed.value):
            raise _LooksFurtherError
        return jnp.broadcast_to(placed.value, self.other)

    def _of_numbers(self, eqn: Any, values: Sequence[Any]) -> list[_Placed]:
        """The results of an equation that reads none of the arrays: one number for all of their places."""
        spreads = self.shape and eqn.outvars[0].aval.shape == self.shape
        if spreads and of(eqn.primitive.name).moves is Moves.REPEATS and not jnp.shape(values[0]):
            return [_Placed(jnp.broadcast_to(values[0], self.other), True)]
        return list(map(_Placed, _computed(eqn, values)))

    def _changes_nothing(self, eqn: Any, moves: Moves | None) -> bool:
        """Whether numbers stay where they stand in an equation that might move them."""
        if moves is Moves.REPEATS:
            kept = tuple(eqn.params["broadcast_dimensions"]) == tuple(range(len(self.shape)))
            return kept and eqn.outvars[0].aval.shape == self.shape
        return moves is Moves.RESHAPES and eqn.outvars[0].aval.shape == self.shape


def _run(closed: Any, given: Sequence[Any], compute: Callable[[Any, Sequence[Any]], Sequence[Any]]) -> Any:
    """The outputs of a jaxpr, equation by equation, those of the functions that it calls among them."""
    jaxpr = closed.jaxpr
    env = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    env.update(zip(jaxpr.invars, given, strict=True))

    def read(v: Any) -> Any:
        return literal_value(v)[()] if isinstance(v, jex.Literal) else env[v]

    for eqn in jaxpr.eqns:
        values = list(map(read, eqn.invars))
        if of(eqn.primitive.name).calls_once:
            (inner,) = called_by(eqn)
            made = _run(inner, values, compute)
        else:
            made = compute(eqn, values)
        env.update(zip(eqn.outvars, made, strict=True))
    return list(map(read, jaxpr.outvars))


def _computed(eqn: Any, values: Sequence[Any]) -> Sequence[Any]:
    """The results of one equation for operands of any shapes that its primitive takes."""
    given, made = ([jex.Var(v.aval) for v in side] for side in (eqn.invars, eqn.outvars))
    alone = [eqn.replace(invars=given, outvars=made)]
    jaxpr = jex.Jaxpr([], given, made, alone, eqn.effects, nothing().jaxpr.debug_info)
    found: Sequence[Any] = jex.jaxpr_as_fun(close(jaxpr, []))(*values)
    return found


def _with_shape(t: Type, shape: Shape) -> Type:
    return Type(shape, t.dtype, weak_type=t.weak_type)
