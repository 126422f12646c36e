"""A function with a derivative of its own that looks at each number by itself, on arrays of another shape."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.equations import Type
from onward.core.jaxprs.layout import inlined, laid_out

Shape = tuple[int, ...]


def by_number(body: Body, shape: Shape) -> Body | None:
    """Such a function for arrays of this shape; None if it looks at more than one number at a time.

    Its derivative is what its rule is traced to; one for reverse mode alone (``custom_vjp``) is not traced.

    >>> import jax, jax.numpy as jnp
    >>> body = body_of(lambda x: [jax.nn.relu(x)], jnp.ones((4, 2)))
    >>> short = by_number(body, (1, 2))
    >>> jax.grad(lambda x: short(x)[0].sum())(jnp.zeros((1, 2))).tolist()
    [[0.0, 0.0]]
    """
    before = tuple(body.out_types[0].shape)
    arrays = [i for i, t in enumerate(body.in_types) if t.shape == before]
    floats = [i for i, t in enumerate(body.in_types) if jnp.issubdtype(t.dtype, np.inexact)]
    if len(body.out_types) != 1 or len(before) != len(shape):
        return None
    rule = _rule(body, floats)
    moved = [len(body.in_types) + k for k, i in enumerate(floats) if i in arrays]
    value = laid_out(inlined(body), arrays, before, shape)
    slope = None if rule is None else laid_out(inlined(rule), [*arrays, *moved], before, shape)
    if value is None or slope is None:
        return None
    types = [Type(shape, t.dtype) if i in arrays else t for i, t in enumerate(body.in_types)]
    return body_of(_with_rule(value, slope, floats), *types)


def _rule(body: Body, floats: list[int]) -> Body | None:
    """From the inputs and the tangents of its floats to the tangent of its result; None if there is none."""
    count = len(body.in_types)

    def tangent(*values: Any) -> list[Any]:
        def of_floats(*given: Any) -> Any:
            inputs = dict(enumerate(values[:count])) | dict(zip(floats, given, strict=True))
            return body(*inputs.values())[0]

        return [jax.jvp(of_floats, [values[i] for i in floats], list(values[count:]))[1]]

    try:
        return body_of(tangent, *body.in_types, *(body.in_types[i] for i in floats))
    except (TypeError, ValueError, NotImplementedError):
        return None


def _with_rule(value: Body, slope: Body, floats: list[int]) -> Any:
    """The function that computes a value, and its tangent by another Body."""

    @jax.custom_jvp
    def compute(*given: Any) -> Any:
        return value(*given)[0]

    @compute.defjvp
    def move(given: Any, tangents: Any) -> Any:
        return compute(*given), slope(*given, *(tangents[i] for i in floats))[0]

    return lambda *given: [compute(*given)]
