"""Products as XLA's CPU compiler is fast at them: gradients of weights, which add up over the first axes.

Such a product comes out of JAX transposed. Where it adds up over two axes, such as examples and tokens, it
takes on a CPU 1.4 to 2.5 times as long as in the other order, which needs no transpose. And where one side of
the weight is much longer than the other, it takes up to twice as long as with that side turned before.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

import numpy as np
from jax import lax
from jax.extend import core as jex

from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.equations import close
from onward.core.jaxprs.patterns import only_equation

_WORTH = 2**23  # multiplications


def in_other_order(body: Body) -> Body | None:
    """The same with the operands of such products exchanged; None where there is none.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from onward.core.jaxprs.body import body_of
        >>> x, w, g = jnp.ones((2, 3, 4)), jnp.ones((4, 5)), jnp.ones((2, 3, 5))
        >>> body = body_of(lambda x, w, g: jax.vjp(lambda w: x @ w, w)[1](g), x, w, g)
        >>> [eqn.primitive.name for eqn in in_other_order(body).equations][-1]
        'dot_general'
    """
    makers = {e.outvars[0]: e for e in body.equations if e.primitive.name == "dot_general"}
    if not makers:
        return None
    reads = Counter(v for e in body.equations for v in e.invars if not isinstance(v, jex.Literal))
    reads.update(v for v in body.parts.outvars if not isinstance(v, jex.Literal))
    found: dict[Any, Any] = {}
    for eqn in body.equations:
        product = makers.get(eqn.invars[0]) if eqn.primitive.name == "transpose" else None
        if product is not None and reads[eqn.invars[0]] == 1 and _exchanges(product, eqn):
            found[product.outvars[0]] = _exchanged(product, eqn)
    if not found:
        return None
    kept = (e for e in body.equations if e.primitive.name != "transpose" or e.invars[0] not in found)
    jaxpr = body.closed.jaxpr.replace(eqns=[found.get(e.outvars[0], e) if e.outvars else e for e in kept])
    return Body(close(jaxpr, body.closed.consts))


def turned_first(body: Body) -> Body | None:
    """A product that adds up over the first axes, its longer side transposed before; None for anything else.

    It is for float32, the one side at least four times as long as the other. With jaxlib 0.12 and two cores
    it took 0.6 to 0.85 of the time for sides of 256 to 1,024, 0.85 to 1.0 for 2,048 and 3,072; products of
    fewer than 2 ** 23 multiplications, 1.1 of it, stay as they are.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from onward.core.jaxprs.body import body_of
        >>> x, g = jnp.ones((512, 512)), jnp.ones((512, 64))
        >>> body = body_of(lambda x, g: [jax.lax.dot_general(x, g, (((0,), (0,)), ((), ())))], x, g)
        >>> [eqn.primitive.name for eqn in turned_first(body).equations]
        ['transpose', 'optimization_barrier', 'dot_general']
    """
    eqn = only_equation(body)
    if eqn is None or eqn.primitive.name != "dot_general" or not _is_over_first(eqn):
        return None
    order = list(map(body.parts.invars.index, eqn.invars))
    types = [body.in_types[i] for i in order]
    rows = prod(types[0].shape[:-1])
    short, long = sorted(t.shape[-1] for t in types)
    if any(t.dtype != np.float32 for t in types) or long < 4 * short or rows * short * long < _WORTH:
        return None
    swaps = types[1].shape[-1] == long
    precision = eqn.params["precision"]
    rest = {
        "precision": precision[::-1] if swaps and isinstance(precision, tuple) else precision,
        "preferred_element_type": eqn.params["preferred_element_type"],
    }

    def run(*values: Any) -> list[Any]:
        operands = (values[i] for i in (order[::-1] if swaps else order))
        left, right = (x.reshape(rows, x.shape[-1]) for x in operands)
        product = lax.dot_general(lax.optimization_barrier(left.T), right, (((1,), (0,)), ((), ())), **rest)
        return [product.T if swaps else product]

    return body_of(run, *body.in_types)


def reading_before(product: Body, place: int, transpose: Body) -> Body | None:
    """A product of what stands before a transpose of one of its operands; None where there is none.

    Args:
        product: of two inputs.
        place: the input that is transposed.
        transpose: how it is.

    Example:
        >>> import jax.numpy as jnp
        >>> from onward.core.jaxprs.body import body_of
        >>> x, w = jnp.ones((2, 4)), jnp.ones((5, 4))
        >>> transpose = body_of(lambda w: w.T, w)
        >>> body = reading_before(body_of(lambda x, w: x @ w, x, w.T), 1, transpose)
        >>> [v.shape for v in body.in_types], [v.shape for v in body.out_types]
        ([(2, 4), (5, 4)], [(2, 5)])
    """
    call, (turned,) = next(product.calls), transpose.calls
    is_plain = len(product.equations) == 1 and call.primitive == "dot_general" and len(product.in_types) == 2
    if not is_plain or call.params.get("out_sharding") is not None:
        return None
    order, places = turned.params["permutation"], [int(x) for x in product.operands]
    side = places.index(place)
    sums, batch = ([list(axes) for axes in pair] for pair in call.params["dimension_numbers"])
    used = {*sums[side], *batch[side]}
    free = [order[i] for i in range(len(order)) if i not in used]
    if free != sorted(free):
        return None
    sums[side], batch[side] = ([order[i] for i in axes[side]] for axes in (sums, batch))
    rest = {name: call.params[name] for name in ("precision", "preferred_element_type")}

    def run(*values: Any) -> list[Any]:
        left, right = (values[i] for i in places)
        axes = (sums[0], sums[1]), (batch[0], batch[1])
        return [lax.dot_general(left, right, axes, **rest)]

    types = list(product.in_types)
    types[place] = transpose.in_types[0]
    return body_of(run, *types)


def _is_over_first(product: Any) -> bool:
    """Whether a product adds up over all axes of both operands but the last of each."""
    sums, batch = product.params["dimension_numbers"]
    first = [tuple(range(v.aval.ndim - 1)) for v in product.invars]
    is_so = not any(batch) and () not in first and [*map(tuple, sums)] == first
    return is_so and product.params.get("out_sharding") is None


def _exchanges(product: Any, transposed: Any) -> bool:
    """Whether a transpose only puts the axes of the right operand before those of the left one."""
    (left, _), batch = product.params["dimension_numbers"]
    if any(batch) or len(left) < 2 or product.params.get("out_sharding") is not None:
        return False
    count, own = product.outvars[0].aval.ndim, product.invars[0].aval.ndim - len(left)
    return tuple(transposed.params["permutation"]) == (*range(own, count), *range(own))


def _exchanged(product: Any, transposed: Any) -> Any:
    (left, right), batch = product.params["dimension_numbers"]
    precision = product.params["precision"]
    params = {
        **product.params,
        "dimension_numbers": ((right, left), batch),
        "precision": precision[::-1] if isinstance(precision, tuple) else precision,
    }
    return product.replace(invars=product.invars[::-1], outvars=transposed.outvars, params=params)
