"""What an op costs to run, in multiply-adds of a matrix product, as XLA counts its arithmetic."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import jax

from onward.core.jaxprs import Body
from onward.core.program import Op, Variable

_ELEMENTWISE = 8  # an addition that reads its numbers from memory, in multiply-adds of a matrix product
_TRANSCENDENTAL = 32  # an exponential, likewise
_PRODUCTS = ("dot_general", "conv_general_dilated")


def effort(op: Op) -> int:
    """What it costs to run an op once more; at least 1.

    >>> import jax.numpy as jnp, onward as ow
    >>> program = ow.trace(lambda w, x: jnp.exp(x @ w), jnp.ones((8, 4)), jnp.ones((2, 8)))
    >>> [(op.type, effort(op)) for op in program.ops]
    [('dot_general', 65), ('exp', 257)]
    """
    return 1 + _effort_of(_Same(op.body), op.type in _PRODUCTS) if op.inputs else 1


def size(v: Variable) -> int:
    """The bytes of a Variable; those of a random key as of the words it holds."""
    if jax.numpy.issubdtype(v.dtype, jax.dtypes.prng_key):
        return 8 * v.size
    return v.size * int(v.dtype.itemsize)


def flops(op: Op) -> int:
    """How many operations on floating point numbers an op does, as XLA counts them."""
    counted = _counted(_Same(op.body))
    return int(counted.get("flops", 0) + counted.get("transcendentals", 0))


class _Same:
    """A body, equal to those that compute the same."""

    def __init__(self, body: Body) -> None:
        self.body, self.key = body, body.signature

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and bool(self.key == other.key)

    def __hash__(self) -> int:
        return hash(self.key)


def _effort_of(same: _Same, is_product: bool) -> int:
    counted = _counted(same)
    plain = counted.get("flops", 0) * (0.5 if is_product else _ELEMENTWISE)
    return int(plain + _TRANSCENDENTAL * counted.get("transcendentals", 0))


@lru_cache(maxsize=4096)
def _counted(same: _Same) -> dict[str, Any]:
    """What XLA counts in an op that stands alone; the turns of a loop are told by its length."""
    body = same.body
    try:
        found = jax.jit(body).lower(*body.in_types).cost_analysis() or {}
    except NameError:  # it asks on which device it is
        found = {}
    turns = int(body.attributes.get("length", 1))
    return {key: turns * value for key, value in found.items()}
