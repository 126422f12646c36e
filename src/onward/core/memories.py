"""The two memories of a machine with an accelerator: which results of a Body come in that of the host.

>>> import jax, jax.numpy as jnp
>>> from onward.core.jaxprs.body import body_of
>>> body = body_of(lambda x: [x + 1, jax.device_put(x, jax.memory.Space.Host)], jnp.ones(3))
>>> on_host(body), moves_memory(body)
(frozenset({1}), True)
"""

from __future__ import annotations

import jax

from onward.core.described import DescribedBody
from onward.core.jaxprs.body import Body


def on_host(body: Body | None) -> frozenset[int]:
    """The positions of the outputs that a Body puts into host memory."""
    avals = () if body is None else body.out_avals
    there = jax.memory.Space.Host
    return frozenset(i for i, aval in enumerate(avals) if getattr(aval, "memory_space", None) is there)


def moves_memory(body: Body | None) -> bool:
    """Whether one of the equations of a Body brings an array from one memory to the other."""
    if body is None or isinstance(body, DescribedBody):
        return False
    places = (place for call in body.calls for place in call.params.get("devices") or ())
    return any(isinstance(place, jax.memory.Space) for place in places)
