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
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core as jex

from onward.core.jaxprs.body import Body
from onward.core.jaxprs.equations import carry_of_scan, jaxprs_in, literal_value
from onward.core.primitives.table import of
from onward.core.primitives.traits import Linear, Moves, Reduces, Runs
from onward.core.variable import limits_of

Degree = float | None
"""By which power of a factor a value grows where the operands do; None: it is 0, or without an end."""

_BENT = float("inf")  # it grows in another way
_ENDLESS = 1e30  # a number that stands for all that is larger, as in nan_to_num
_MOST_TURNS = 4  # until what a loop carries has its degree


class _Growth(NamedTuple):
    """How a value grows, and whether it depends on the operands that do."""

    degree: Degree
    depends: bool


_FIXED = _Growth(0.0, depends=False)


def grown(body: Body, degrees: Sequence[Degree]) -> tuple[list[Degree], str]:
    """The degrees of what a Body gives, from those of its operands: 1 of what grows, 0 of what does not.

    With them the primitive by which a result of what grows does not grow in proportion; empty if all do.
    """
    jaxpr, walk = body.closed.jaxpr, _Growths()
    found = walk.through(jaxpr, [_Growth(degree, depends=degree != 0.0) for degree in degrees])
    made = [growth.degree for growth in found]
    if walk.bent:
        return made, walk.bent
    makers = {v: eqn.primitive.name for eqn in jaxpr.eqns for v in eqn.outvars}
    pairs = zip(jaxpr.outvars, found, strict=True)
    wrong = (v for v, growth in pairs if growth.depends and growth.degree not in (1.0, None))
    return made, next((makers.get(v, "copy") for v in wrong), "")


class _Growths:
    """How the values of a jaxpr grow, and those within.

    Attributes:
        bent: the first primitive behind which nothing is known.
    """

    def __init__(self) -> None:
        self.bent = ""

    def through(self, jaxpr: Any, given: Sequence[_Growth]) -> list[_Growth]:
        """How its results grow."""
        known: dict[Any, _Growth] = dict(zip(jaxpr.invars, given, strict=True))

        def read(v: Any) -> _Growth:
            if isinstance(v, jex.Literal):
                value = literal_value(v)
                is_free = value.dtype.kind == "V" or _is_without_end(np.abs(value))
                return _FIXED._replace(degree=None) if is_free else _FIXED
            return known.get(v, _FIXED)

        for eqn in jaxpr.eqns:
            operands = [read(v) for v in eqn.invars]
            if all(growth == _FIXED for growth in operands):
                continue
            made = self._grown(eqn, operands)
            if any(growth.degree is _BENT for growth in made):
                self.bent = self.bent or eqn.primitive.name
                made = [_Growth(0.0, g.depends) if g.degree is _BENT else g for g in made]
            known.update(zip(eqn.outvars, made, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def _grown(self, eqn: Any, operands: Sequence[_Growth]) -> list[_Growth]:
        row = of(eqn.primitive.name)
        if row.runs is not None:
            return self._run(eqn, operands)
        made = self._made(eqn, [growth.degree for growth in operands])
        if row.moves is Moves.HOLDS:
            depends = [growth.depends for growth in operands]
        else:
            is_told = any(growth.depends for growth in operands) and not (row.compares and _is_settled(eqn))
            depends = [is_told] * len(made)
        return [*map(_Growth, made, depends)]

    @staticmethod
    def _made(eqn: Any, degrees: Sequence[Degree]) -> list[Degree]:
        """The degrees of the results of an equation that runs no jaxpr."""
        row, name = of(eqn.primitive.name), eqn.primitive.name
        count = len(eqn.outvars)
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

    def _run(self, eqn: Any, operands: Sequence[_Growth]) -> list[_Growth]:
        runs, params, count = of(eqn.primitive.name).runs, eqn.params, len(eqn.outvars)
        if runs is Runs.SCAN:
            (inner,) = jaxprs_in(params["jaxpr"])
            return self._loop(inner.jaxpr, list(operands), *carry_of_scan(eqn))
        if runs is Runs.WHILE:
            (inner,), (asked,) = jaxprs_in(params["body_jaxpr"]), jaxprs_in(params["cond_jaxpr"])
            first, begin = params["cond_nconsts"], params["body_nconsts"]
            found = self._loop(inner.jaxpr, list(operands[first:]), begin, count)
            (goes_on,) = self.through(asked.jaxpr, [*operands[:first], *found])
            if goes_on.degree not in (0.0, None):
                return [_Growth(_BENT, depends=True)] * count
            return [_Growth(growth.degree, growth.depends or goes_on.depends) for growth in found]
        if runs is Runs.BRANCH:
            if operands[0].degree not in (0.0, None):
                return [_Growth(_BENT, depends=True)] * count
            each = [self.through(b.jaxpr, operands[1:]) for b in jaxprs_in(params["branches"])]
            found = [_either(growths) for growths in zip(*each, strict=True)]
            return [_Growth(growth.degree, growth.depends or operands[0].depends) for growth in found]
        inner = [j.jaxpr for value in params.values() for j in jaxprs_in(value)]
        fitting = [j for j in inner if len(j.invars) == len(operands) and len(j.outvars) == count]
        if not fitting:  # a solver, or what calls no function
            degree = _of_those_that_grow([growth.degree for growth in operands])
            return [_Growth(degree, any(growth.depends for growth in operands))] * count
        return self.through(fitting[0], operands)

    def _loop(self, jaxpr: Any, operands: list[_Growth], begin: int, count: int) -> list[_Growth]:
        """How what a loop gives grows, which begins with zeros where sums over turns are carried."""
        for _ in range(_MOST_TURNS):
            found = self.through(jaxpr, operands)
            carried = [_either(pair) for pair in zip(operands[begin : begin + count], found, strict=False)]
            if carried == operands[begin : begin + count]:
                break
            operands[begin : begin + count] = carried
        return found


def _either(growths: Sequence[_Growth]) -> _Growth:
    """How one of several values grows."""
    return _Growth(_common([g.degree for g in growths]), any(g.depends for g in growths))


def _is_settled(eqn: Any) -> bool:
    """Whether a comparison of finite numbers always says the same: of one with itself, or with infinity."""
    ends = (v for v in eqn.invars if isinstance(v, jex.Literal) and literal_value(v).dtype.kind == "f")
    return eqn.invars[0] is eqn.invars[1] or any(np.all(np.isinf(literal_value(v))) for v in ends)


def _is_without_end(value: Any) -> bool:
    """Whether numbers are 0, or stand for all that are larger."""
    ends = min(_ENDLESS, float(limits_of(value.dtype).max)) if value.dtype.kind not in "biu" else _ENDLESS
    return bool(value.size) and bool(np.all((value == 0) | (value >= ends)))


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
