"""The equations that stand for a call of ``jax.grad`` in a trace, left open: what enters, and the gradients.

They have no rules for ``vmap`` nor for derivatives: within them a call is computed as it always was. In the
body of a loop they are traced, and found there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from onward.core.jaxprs.equations import is_inlined, jaxprs_in

_entered = jex.Primitive("entered")
_entered.multiple_results = True
_entered.def_abstract_eval(lambda *wanted: [jax.core.ShapedArray(x.shape, x.dtype) for x in wanted])
_differentiated = jex.Primitive("differentiated")
_differentiated.multiple_results = True
_differentiated.def_abstract_eval(
    lambda loss, *wanted, line: [jax.core.ShapedArray(x.shape, x.dtype) for x in wanted]
)


def entered(wanted: Sequence[Any]) -> list[Any] | None:
    """The arrays as the differentiated function is given them, told from those it finds elsewhere.

    Both functions return None within a ``vmap`` or a derivative.
    """
    return _bound(_entered, wanted)


def gradients_of(loss: Any, wanted: Sequence[Any], line: str) -> list[Any] | None:
    """Values that stand for the gradients of a loss for the entered arrays."""
    return _bound(_differentiated, [loss, *wanted], line=line)


def _bound(primitive: Any, values: Sequence[Any], **parameters: Any) -> list[Any] | None:
    try:
        found: list[Any] = primitive.bind(*map(jnp.asarray, values), **parameters)
    except NotImplementedError:
        return None
    return found


def is_entered(eqn: Any) -> bool:
    """Whether an equation stands for the entry of arrays into a differentiated function."""
    return bool(eqn.primitive is _entered)


def is_differentiated(eqn: Any) -> bool:
    """Whether an equation stands for such a call."""
    return bool(eqn.primitive is _differentiated)


def hidden_calls(closed: Any, within: str = "") -> Iterator[tuple[str, str]]:
    """The lines of the calls whose equations cannot stand on their own, and the primitive around each."""
    for eqn in closed.jaxpr.eqns:
        if within and is_differentiated(eqn):
            yield eqn.params["line"], f"within {within}"
        around = within or ("" if is_inlined(eqn) else eqn.primitive.name)
        for value in eqn.params.values():
            for inner in jaxprs_in(value):
                yield from hidden_calls(inner, around)
