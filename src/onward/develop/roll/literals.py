"""Numbers that stand in the equation of an op, such as the rate of a dropout: compared apart, made inputs.

Two ops that differ in such a number only belong to equal layers; in the loop over these the number is data.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any

import numpy as np

from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.equations import Type


def pattern(body: Body) -> Hashable:
    """Equal for bodies that compute the same but for the values of numbers in their equation."""
    if not numbers(body) or body.has_custom_rule:
        return body.signature
    (eqn,) = body.equations
    places = {id(v): i for i, v in enumerate(body.closed.jaxpr.invars)}
    reads = tuple((places.get(id(v)), v.aval) for v in eqn.invars)
    key = (eqn.primitive, tuple(eqn.params.items()), reads, len(body.out_avals))
    try:
        hash(key)
    except TypeError:
        return body.signature
    return key


def numbers(body: Body) -> tuple[np.ndarray[Any, Any], ...]:
    """The numbers in the equation of a body, in order."""
    if len(body.equations) != 1:
        return ()
    return tuple(np.asarray(v.val, v.aval.dtype) for v in body.equations[0].invars if hasattr(v, "val"))


@lru_cache(maxsize=256)
def with_numbers(body: Body) -> Body:
    """The body that is given its numbers as further inputs."""
    (eqn,) = body.equations
    inputs = body.closed.jaxpr.invars
    written = [eqn.outvars.index(v) for v in body.closed.jaxpr.outvars]

    def run(*values: Any) -> list[Any]:
        env = dict(zip(map(id, inputs), values, strict=False))
        lifted = iter(values[len(inputs) :])
        operands = [next(lifted) if hasattr(v, "val") else env[id(v)] for v in eqn.invars]
        found = eqn.primitive.bind(*operands, **eqn.params)
        results = found if eqn.primitive.multiple_results else [found]
        return [results[j] for j in written]

    return body_of(run, *body.in_types, *(Type(x.shape, x.dtype) for x in numbers(body)))
