"""Whether results grow in proportion to some operands, as gradients do to those that they are made of.

A backward pass that JAX derives is linear in them. A rule of a user's own need not be: a clip of the gradient
is not, and computes something else where a loss, or its scale, is another one; a sign of it may be chosen.

>>> import jax.numpy as jnp, onward as ow
>>> def found(rule):
...     return grown(ow.graph.body_of(lambda g, x: [rule(g, x)], jnp.ones(3), jnp.ones(3)), [1.0, 0.0])
>>> found(lambda g, x: jnp.where(g > 0, g * jnp.tanh(x), 0)), found(lambda g, x: jnp.clip(g, -1, 1))
(([1.0], ''), ([0.0], 'max'))
>>> found(lambda g, x: g / jnp.linalg.norm(g))
([0.0], 'div')
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core as jex

from onward.core.jaxprs.body import Body
from onward.core.jaxprs.equations import carry_of_scan, jaxprs_in, literal_value
from onward.core.primitives.table import of
from onward.core.primitives.traits import Linear, Moves, Reduces, Runs

Degree = float | None
"""By which power of a factor a value grows where the operands do; None: it is 0, or without an end."""

_BENT = float("inf")  # it grows in another way
_ENDLESS = 1e30  # a number that stands for all that is larger, as in nan_to_num
_MOST_TURNS = 4  # until what a loop carries has its degree


def grown(body: Body, degrees: Sequence[Degree]) -> tuple[list[Degree], str]:
    """The degrees of what a Body gives, from those of its operands: 1 of what grows, 0 of what does not.

    With them the primitive by which a result of what grows does not grow in proportion; empty if all do.
    """
    jaxpr, walk = body.closed.jaxpr, _Degrees()
    found = walk.through(jaxpr, degrees)
    if walk.bent:
        return found, walk.bent
    makers = {v: eqn.primitive.name for eqn in jaxpr.eqns for v in eqn.outvars}
    pairs = zip(jaxpr.outvars, found, strict=True)
    wrong = (v for v, degree in pairs if v in walk.depending and degree not in (1.0, None))
    return found, next((makers.get(v, "copy") for v in wrong), "")


class _Degrees:
    """The degrees of the values of a jaxpr, and of those within.

    Attributes:
        bent: the first primitive behind which nothing is known.
        depending: the values that depend on the operands.
    """

    def __init__(self) -> None:
        self.bent = ""
        self.depending: set[Any] = set()

    def through(self, jaxpr: Any, given: Sequence[Degree]) -> list[Degree]:
        """The degrees of its results."""
        known: dict[Any, Degree] = dict(zip(jaxpr.invars, given, strict=True))
        self.depending.update(v for v, degree in known.items() if degree != 0.0)

        def read(v: Any) -> Degree:
            if isinstance(v, jex.Literal):
                value = literal_value(v)
                return None if value.dtype.kind == "V" or _is_without_end(np.abs(value)) else 0.0
            return known.get(v, 0.0)

        for eqn in jaxpr.eqns:
            degrees = [read(v) for v in eqn.invars]
            if all(d == 0.0 for d in degrees):
                continue
            made = self._made(eqn, degrees)
            if _BENT in made:
                self.bent = self.bent or eqn.primitive.name
                made = [0.0 if d is _BENT else d for d in made]
            known.update(zip(eqn.outvars, made, strict=True))
            self.depending.update(self._depending(eqn))
        return [read(v) for v in jaxpr.outvars]

    def _depending(self, eqn: Any) -> list[Any]:
        """The results of an equation that depend on the operands."""
        read = [not isinstance(v, jex.Literal) and v in self.depending for v in eqn.invars]
        if of(eqn.primitive.name).moves is Moves.HOLDS:
            return [v for v, depends in zip(eqn.outvars, read, strict=True) if depends]
        asks_for_nan = of(eqn.primitive.name).compares and eqn.invars[0] is eqn.invars[1]
        return eqn.outvars if any(read) and not asks_for_nan else []

    def _made(self, eqn: Any, degrees: Sequence[Degree]) -> list[Degree]:
        row, name = of(eqn.primitive.name), eqn.primitive.name
        count = len(eqn.outvars)
        if row.runs is not None:
            return self._run(eqn, degrees)
        if row.compares:
            return [_BENT if _common(degrees) is _BENT else 0.0]
        power = eqn.params["y"] if name == "integer_pow" else row.power
        if power is not None:
            return [None if degrees[0] is None else degrees[0] * power]
        if row.linear is Linear.EACH:
            one, other = degrees
            return [None if one is None or other is None else one + other]
        if row.divides:
            one, other = degrees
            return [None if one is None else one - (other or 0.0)]
        if row.linear is Linear.FIRST and row.moves is not Moves.LOOKS_UP:
            return [degrees[0]] * count
        if row.moves is Moves.HOLDS:
            return [*degrees]
        if row.chooses and row.linear is Linear.TOGETHER:
            return [_common(degrees[1:]) if degrees[0] in (0.0, None) else _BENT]
        if row.reduces is Reduces.PLACE:
            return [0.0] * count
        if row.is_elementwise:
            found = _common(degrees)
            is_alike = row.linear is Linear.TOGETHER or row.chooses or name == "complex"
            return [found if is_alike or found in (0.0, None) else _BENT] * count
        return [_of_those_that_grow(degrees)] * count

    def _run(self, eqn: Any, degrees: Sequence[Degree]) -> list[Degree]:
        runs, params = of(eqn.primitive.name).runs, eqn.params
        if runs is Runs.SCAN:
            (inner,) = jaxprs_in(params["jaxpr"])
            return self._loop(inner.jaxpr, list(degrees), *carry_of_scan(eqn))
        if runs is Runs.WHILE:
            (inner,), (asked,) = jaxprs_in(params["body_jaxpr"]), jaxprs_in(params["cond_jaxpr"])
            first, begin = params["cond_nconsts"], params["body_nconsts"]
            found = self._loop(inner.jaxpr, list(degrees[first:]), begin, len(eqn.outvars))
            (goes_on,) = self.through(asked.jaxpr, [*degrees[:first], *found])
            return found if goes_on in (0.0, None) else [_BENT] * len(found)
        if runs is Runs.BRANCH:
            if degrees[0] not in (0.0, None):
                return [_BENT] * len(eqn.outvars)
            each = [self.through(b.jaxpr, degrees[1:]) for b in jaxprs_in(params["branches"])]
            return [_common(found) for found in zip(*each, strict=True)]
        inner = [j.jaxpr for value in params.values() for j in jaxprs_in(value)]
        fitting = [j for j in inner if len(j.invars) == len(degrees) and len(j.outvars) == len(eqn.outvars)]
        if not fitting:  # a solver, or what calls no function
            return [_of_those_that_grow(degrees)] * len(eqn.outvars)
        return self.through(fitting[0], degrees)

    def _loop(self, jaxpr: Any, degrees: list[Degree], begin: int, count: int) -> list[Degree]:
        """The degrees of what a loop gives, which begins with zeros where sums over turns are carried."""
        for _ in range(_MOST_TURNS):
            found = self.through(jaxpr, degrees)
            carried = [_common(pair) for pair in zip(degrees[begin : begin + count], found, strict=False)]
            if carried == degrees[begin : begin + count]:
                break
            degrees[begin : begin + count] = carried
        return found


def _is_without_end(value: Any) -> bool:
    """Whether numbers are 0, or stand for all that are larger."""
    return bool(value.size) and bool(np.all((value == 0) | (value >= _ENDLESS)))


def _common(degrees: Sequence[Degree]) -> Degree:
    """The degree of values that are added or chosen among; zeros have any."""
    told = {d for d in degrees if d is not None}
    return None if not told else told.pop() if len(told) == 1 else _BENT


def _of_those_that_grow(degrees: Sequence[Degree]) -> Degree:
    """The degree of what is put together of values, whatever it is put into."""
    told = {d for d in degrees if d is not None and d != 0.0}
    if len(told) > 1:
        return _BENT
    return told.pop() if told else _common(degrees)
