"""The ops beside a product: the same product with two thin factors, as ops of JAX's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from onward.core.jaxprs.reading import read_jaxpr
from onward.core.jaxprs.scopes import outermost_scope
from onward.core.jaxprs.tracing import traced
from onward.core.names import Names
from onward.core.program import Op
from onward.derive.low_rank.adapters import Adapter
from onward.derive.low_rank.readers import Product
from onward.derive.low_rank.view import laid


def beside(product: Product, adapter: Adapter, scale: float, names: Names) -> list[Op]:
    """The product under another name, and the ops that add the factors' to it under the name it had.

    Args:
        product: reads the weight.
        adapter: its weight and factors.
        scale: by which the factors' product is multiplied.
        names: the names that are taken.
    """
    op = product.op
    (result,) = op.outputs
    plain = replace(result, name=names.new(f"base({result.name})"))
    inputs = [product.other, adapter.a, adapter.b, plain]
    scope = f"{op.scope}/low_rank" if op.scope else "low_rank"
    function = partial(_adapted, product=product, adapter=adapter, scale=scale, scope=scope)
    with outermost_scope():
        closed = traced(function, *(v.aval for v in inputs))
    read = read_jaxpr(closed, inputs, names)
    found = [replace(op, outputs=(plain,))]
    for made in read.ops:
        outputs = tuple(result if v is read.outputs[0] else v for v in made.outputs)
        found.append(replace(made, outputs=outputs, scope=scope, source=op.source))
    return found


def _adapted(
    x: Any, a: Any, b: Any, plain: Any, *, product: Product, adapter: Adapter, scale: float, scope: str
) -> list[Any]:
    """The product with the weight and its factors, of that with the weight alone."""
    with jax.named_scope(scope):
        low = _low(x, *_factors(a, b, product, adapter), product, scale)
        if product.side == 0:
            low = jnp.transpose(low, _weight_first(product))
        return [plain + low.astype(plain.dtype)]


def _low(x: Any, down: Factor, up: Factor, product: Product, scale: float) -> Any:
    """First into the few dimensions of the rank, then out of them."""
    contracted, batch = product.dimensions(1 - product.side)
    many = tuple(range(len(batch)))
    told = _told(product)
    thin = lax.dot_general(x, down.laid, ((contracted, down.others), (batch, many)), **told)
    thin = (thin if scale == 1 else thin * scale).astype(up.laid.dtype)
    return lax.dot_general(thin, up.laid, (((thin.ndim - 1,), (up.rank,)), (many, many)), **told)


@dataclass(frozen=True)
class Factor:
    """A factor as a product reads it: axes of many products, the rank, and the rest.

    Attributes:
        laid: the array.
        rank: the axis of the rank.
        others: the axes of the rest.
    """

    laid: Any
    rank: int
    others: tuple[int, ...]


def _factors(a: Any, b: Any, product: Product, adapter: Adapter) -> tuple[Factor, Factor]:
    """The factor that the product sums over, and the other one."""
    axes = adapter.axes
    contracted, batch = product.dimensions(product.side)
    turned = {atom.axis for atom in product.view.atoms(contracted)} != set(axes.inputs)
    first, last = (product.free, contracted) if turned else (contracted, product.free)
    many, count = axes.batch, len(batch)
    inner = laid(_cast(a, product), ((*many, *axes.inputs), ()), product.view, ((*batch, *first), ()))
    outer = laid(_cast(b, product), (many, axes.outputs), product.view, (batch, last))
    found = (
        Factor(inner, count + len(first), tuple(range(count, count + len(first)))),
        Factor(outer, count, tuple(range(count + 1, count + 1 + len(last)))),
    )
    return found[::-1] if turned else found


def _cast(factor: Any, product: Product) -> Any:
    """A factor in the dtype in which the product reads the weight."""
    return factor.astype(product.weight.dtype)


def _told(product: Product) -> dict[str, Any]:
    """How precisely a product computes, told of what was its first operand first."""
    precision = product.call.params["precision"]
    if isinstance(precision, tuple) and product.side == 0:
        precision = precision[::-1]
    return {
        "precision": precision,
        "preferred_element_type": product.call.params["preferred_element_type"],
    }


def _weight_first(product: Product) -> Sequence[int]:
    """The order of axes in which the result of a product has those of the weight before those of the rest."""
    _, batch = product.dimensions(0)
    count, free = product.op.outputs[0].ndim, len(product.free)
    return [*range(len(batch)), *range(count - free, count), *range(len(batch), count - free)]
