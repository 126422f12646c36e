"""Derivative rules of people's own (``custom_vjp``, ``custom_jvp``) in which examples see each other.

The derivative of a function that takes each example by itself does so too; a rule need not be the derivative.
One that centres the gradients of a batch needs all of them, as a statistic does.

>>> import jax, jax.numpy as jnp, onward as ow
>>> from onward.develop.over_batch.walk import follow
>>> @jax.custom_vjp
... def centred(x):
...     return x
>>> centred.defvjp(lambda x: (x, None), lambda _, g: (g - g.mean(0),))
>>> def loss(w, x):
...     return jnp.mean(centred(x @ w) ** 2)
>>> whole, part = (ow.trace(loss, jnp.ones(3), jnp.ones((rows, 3))) for rows in (8, 4))
>>> [why for op, why in follow(whole, part, 2, {"x"}).rules]
['has a derivative rule of its own that reads a statistic of the examples']
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.reading import program_of
from onward.core.program import Op, Program
from onward.develop.over_batch.known import SAME, BatchWalk, Follows, How

_backwards: WeakKeyDictionary[Body, Program] = WeakKeyDictionary()

_OWN_RULE = "has a derivative rule of its own"


def seen_by_rule(
    walk: BatchWalk, op: Op, other: Op, given: Sequence[Follows], found: Sequence[Follows]
) -> str:
    """How examples see each other in the derivative rule of an op, in words; empty if they do not.

    Args:
        walk: that over the function.
        op: of a part, which has a rule of its own.
        other: the same op of the whole.
        given: how what it reads follows.
        found: how what it gives does.
    """
    results = [f for f, v in zip(found, op.outputs, strict=True) if v.is_float]
    is_fixed = all(f.kind is How.SAME for f in (*given, *results))
    if not results or is_fixed or any(f.kind is How.OWN for f in results):
        return ""
    cotangents = [_cotangent(f) for f in results]
    try:
        part, whole = _backward(op.body), _backward(other.body)
    except Exception:  # a rule that fails is told of where gradients are made, if they are
        return ""
    following = walk.inner(whole, part, [*given, *cotangents], asks_rules=False)
    if following is None:
        return f"{_OWN_RULE}, of other ops for a part of the batch"
    near = following.reaching(part, part.outputs)
    if near.mixing:
        seeing, why = near.mixing[0]
        return f"{_OWN_RULE}, in which {seeing.type!r} {why}"
    if near.needs or near.normalizing or near.bent:
        return f"{_OWN_RULE} that reads a statistic of the examples"
    read = [f for f, v in zip(given, op.inputs, strict=True) if v.is_float]
    if any(f.kind is How.ROWS and f.power for f in (*read, *results)):
        return ""
    pairs = list(zip(read, (following.found[v] for v in part.outputs), strict=True))
    if any(of.kind is How.MEAN and gradient.kind is not How.SAME for of, gradient in pairs):
        return f"{_OWN_RULE} that reads a statistic of the examples"
    is_off = any(_is_off(of, gradient) for of, gradient in pairs)
    return f"{_OWN_RULE} that reads a number of examples" if is_off else ""


def _cotangent(result: Follows) -> Follows:
    """How the gradient for a result follows where the loss is a sum over examples."""
    if result.kind is How.ROWS:
        return replace(result, power=0)
    return replace(SAME, power=1 - result.power) if result.kind is How.MEAN else SAME


def _is_off(of: Follows, gradient: Follows) -> bool:
    """Whether a gradient for what is read counts examples otherwise than once each."""
    if gradient.kind is How.ROWS:
        return gradient.power != 0
    return gradient.kind is How.MEAN and of.kind is How.SAME and gradient.power != 1


def _backward(body: Body) -> Program:
    """From what it reads and the gradients for its results, floats all, to those for what it reads."""
    if body not in _backwards:
        _backwards[body] = _derived(body)
    return _backwards[body]


def _derived(body: Body) -> Program:
    read, made = (_floats(types) for types in (body.in_types, body.out_types))

    def gradients(*values: Any) -> list[Any]:
        given, cotangents = list(values[: len(body.in_types)]), values[len(body.in_types) :]

        def run(*floats: Any) -> list[Any]:
            for i, x in zip(read, floats, strict=True):
                given[i] = x
            found = body(*given)
            return [found[i] for i in made]

        _, pulled = jax.vjp(run, *(given[i] for i in read))
        return [*pulled([*cotangents])]

    types = [*body.in_types, *(body.out_types[i] for i in made)]
    return program_of(body_of(gradients, *types).closed, "backward")


def _floats(types: Sequence[Any]) -> list[int]:
    return [i for i, t in enumerate(types) if jnp.issubdtype(t.dtype, np.inexact)]
