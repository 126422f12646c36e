"""Patterns that are looked for: rows of a table by number, the largest of each window, one number alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from onward.core.jaxprs.body import Body
from onward.core.jaxprs.equations import called_by, has_rule_of_its_own, inputs_of, is_inlined, literal_value


@dataclass(frozen=True)
class RowLookup:
    """Whole rows of a table, by number: the first of the numbers along the last axis.

    ``fill`` is what a row outside of the table reads as; None: as the nearest row. ``clips`` tells whether
    that row then gets its gradient, which is dropped otherwise.
    """

    fill: Any = None
    clips: bool = False


def row_lookup(body: Body) -> RowLookup | None:
    """The lookup of whole rows of the first input by the numbers in the second; None if it is not one."""
    if len(body.equations) != 1 or body.equations[0].primitive.name != "gather":
        return None
    (eqn,) = body.equations
    params, n = eqn.params, eqn.params["dimension_numbers"]
    table, places = body.in_avals[:2]
    row = tuple(range(places.shape[-1]))
    batch = places.ndim - 1
    whole = (
        tuple(params["slice_sizes"]) == (1, *table.shape[1:])
        and tuple(n.start_index_map) == row
        and tuple(n.collapsed_slice_dims) in ((), (0,))
        and not n.operand_batching_dims
        and tuple(n.offset_dims) == tuple(range(batch, body.out_avals[0].ndim))
    )
    mode = params["mode"]
    fills = mode is jax.lax.GatherScatterMode.FILL_OR_DROP
    if not whole or (fills and row != (0,)) or mode is jax.lax.GatherScatterMode.ONE_HOT:
        return None
    other = np.nan if params["fill_value"] is None else params["fill_value"]
    return RowLookup(other if fills else None, mode is jax.lax.GatherScatterMode.CLIP)


@dataclass(frozen=True)
class Windows:
    """The largest number in each window of an array, or with ``backward`` the gradient of that.

    The windows touch, and none reaches over the edge: ``sizes`` are their lengths, one for each axis, and
    what no window covers lies at the end. A gradient reads the results' gradients at ``gradient`` among the
    inputs and the array at the other place.
    """

    sizes: tuple[int, ...]
    backward: bool = False
    gradient: int = 0


def only_equation(body: Body) -> Any:
    """The equation that a Body is: it reads inputs, and its results are the outputs; None of any other Body.

    >>> import jax.numpy as jnp, onward as ow
    >>> of = lambda f: only_equation(ow.graph.body_of(f, jnp.ones(2)))
    >>> of(lambda x: [jnp.sin(x)]).primitive.name
    'sin'
    >>> of(lambda x: [x, jnp.sin(x)]) is of(lambda x: [jnp.sin(x), jnp.cos(x)]) is None
    True
    """
    eqns = body.equations
    if len(eqns) != 1:
        return None
    _, _, given, _, results = body.parts
    is_all = {*inputs_of(eqns[0])} <= {*given} and list(results) == list(eqns[0].outvars)
    return eqns[0] if is_all else None


def windows_of(body: Body) -> Windows | None:
    """The windows in which a Body looks for the largest number; None if it does anything else.

    >>> import jax, jax.numpy as jnp, onward as ow
    >>> def pool(x):
    ...     return [jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (2,), (2,), "VALID")]
    >>> windows_of(ow.graph.body_of(pool, jnp.ones(6)))
    Windows(sizes=(2,), backward=False, gradient=0)
    """
    eqn = only_equation(body)
    if eqn is None:
        return None
    params, backward = eqn.params, eqn.primitive.name == "select_and_scatter_add"
    if not backward and eqn.primitive.name != "reduce_window_max":
        return None
    sizes = tuple(params["window_dimensions"])
    dilations = (*params.get("base_dilation", ()), *params.get("window_dilation", ()))
    touching = (
        tuple(params["window_strides"]) == sizes
        and all(tuple(side) == (0, 0) for side in params["padding"])
        and all(n == 1 for n in dilations)
        and params.get("select_prim", jax.lax.ge_p) is jax.lax.ge_p
    )
    if not touching or len(body.in_avals) != 1 + backward:
        return None
    return Windows(sizes, backward, body.closed.jaxpr.invars.index(eqn.invars[0]))


def primitives_in(body: Body) -> Iterator[str]:
    """The primitives of a Body, those of the functions it calls among them.

    A division by a number that the jaxpr holds counts as ``mul``, which compilers make of it.

    >>> import jax, jax.numpy as jnp, onward as ow
    >>> list(primitives_in(ow.graph.body_of(lambda x: [jax.nn.relu(x) / 2], jnp.ones(3))))
    ['max', 'mul']
    """
    return _primitives_of(body.equations)


def _primitives_of(equations: Iterable[Any]) -> Iterator[str]:
    for eqn in equations:
        name = eqn.primitive.name
        if is_inlined(eqn) or has_rule_of_its_own(eqn):
            yield from _primitives_of(e for inner in called_by(eqn) for e in inner.jaxpr.eqns)
        else:
            yield "mul" if name == "div" and isinstance(eqn.invars[1], jex.Literal) else str(name)


def filled(body: Body) -> list[np.ndarray] | None:
    """The outputs as views of NumPy, where each is one number throughout that stands there; else None.

    To run such a Body compiles a kernel for each shape.
    """
    numbers: dict[Any, Any] = {}
    for eqn in body.equations:
        if eqn.primitive.name != "broadcast_in_dim" or not all(
            isinstance(v, jex.Literal) for v in eqn.invars
        ):
            return None
        numbers[eqn.outvars[0]] = np.broadcast_to(literal_value(eqn.invars[0]), eqn.outvars[0].aval.shape)
    *_, outputs = body.parts
    if not all(isinstance(v, jex.Literal) or v in numbers for v in outputs):
        return None
    return [literal_value(v) if isinstance(v, jex.Literal) else numbers[v] for v in outputs]
