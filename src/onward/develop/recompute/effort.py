"""How much work it is to run an op once more, in multiply-adds of a matrix product."""

from __future__ import annotations

from onward.core.cost import cost
from onward.core.program import Op

_ELEMENTWISE = 8  # an addition that reads its numbers from memory, in multiply-adds of a matrix product
_TRANSCENDENTAL = 32  # an exponential, likewise


def effort(op: Op) -> int:
    """The cost of running an op once more; at least 1.

    >>> import jax.numpy as jnp, onward as ow
    >>> program = ow.trace(lambda w, x: jnp.exp(x @ w), jnp.ones((8, 4)), jnp.ones((2, 8)))
    >>> [(op.type, effort(op)) for op in program.ops]
    [('dot_general', 65), ('exp', 257)]
    """
    if not op.inputs:
        return 1
    counted = cost(op)
    plain = (counted.flops - counted.transcendentals) * (0.5 if op.primitive.is_product else _ELEMENTWISE)
    return int(1 + plain + _TRANSCENDENTAL * counted.transcendentals)
