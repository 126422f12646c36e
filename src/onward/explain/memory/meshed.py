"""The bytes that each device takes for a partitioned Program: those of the plan, and of the compiled step."""

from __future__ import annotations

from collections.abc import Mapping

from onward.core.program import Program
from onward.distribute.mesh_plan import HOST_STATE, mesh_plan
from onward.execute.memory.held import MemoryShare
from onward.explain.compiling.once import compiled_once

_KEPT = {
    "parameter": MemoryShare.PARAMETERS,
    "state": MemoryShare.STATE,
    "feed": MemoryShare.FEEDS,
}


def on_each_device(program: Program) -> Mapping[MemoryShare, int]:
    """The bytes by what they are taken for, of a Program compiled as ``compile`` does.

    >>> import jax.numpy as jnp, onward as ow
    >>> w, x = jnp.ones((8, 8)), jnp.ones((8, 8))
    >>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.mean((x @ w) ** 2), w, x)
    >>> found = on_each_device(ow.partition(program, {"data": 8}, {"*": "data"}))
    >>> found["parameters"], found["feeds"]
    (32, 32)
    """
    found = dict.fromkeys(_KEPT.values(), 0)
    for kind, _, _, part in mesh_plan(program).rows:
        if kind != HOST_STATE:
            found[_KEPT[kind]] += part
    planned = compiled_once(program).memory
    results = planned.output_size_in_bytes - planned.alias_size_in_bytes
    return found | {
        MemoryShare.RESULTS: max(results, 0),
        MemoryShare.TEMPORARIES: planned.temp_size_in_bytes,
    }
