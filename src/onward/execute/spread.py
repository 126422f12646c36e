"""A Program that was replicated, on the devices that are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from onward.core.errors import ArgumentError
from onward.core.placement import equal_variables
from onward.core.program import Program, Variable
from onward.core.words import Pass, Placement

_TOO_FEW = (
    "{program} is replicated for {count} devices, and JAX shows {found} ({platform}). Replicate it for "
    "{found}, or, to try more on the host, set XLA_FLAGS=--xla_force_host_platform_device_count={count} "
    "before JAX starts."
)


class Spread:
    """How the arrays of a replicated Program lie over the devices."""

    def __init__(self, program: Program, following: Sequence[Variable], wanted: Sequence[Variable]) -> None:
        assert program.replicas is not None
        self.program, self.axis = program, program.replicas.axis
        self.mesh = Mesh(np.array(_devices(program)), (self.axis,))
        self.old = {new: old for old, new in program.next_state.items()}
        changed = [self._of_state(self.old[v]) for v in following]
        equal = equal_variables(program)
        # What is merged is no array over examples, though it may happen to be as long as the batch.
        self._merged = {v for op in program.ops if op.made_by is Pass.COLLECTIVE for v in op.inputs}
        self._results = [self._of_result(v, equal) for v in wanted]
        self.out_specs = [*(spec for spec, _ in changed), *(spec for spec, _ in self._results)]
        self._expanded = [*(alone for _, alone in changed), *(alone for _, alone in self._results)]

    def over_devices(self, run: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """The function of whole arrays that runs ``run`` on every device's part."""
        program = self.program
        state = [self._of_state(v) for v in program.state]

        def part(own: Sequence[Any], values: Sequence[Any]) -> list[Any]:
            mine = [jnp.squeeze(x, 0) if alone else x for x, (_, alone) in zip(own, state, strict=True)]
            found = run(mine, values)
            return [x[None] if alone else x for x, alone in zip(found, self._expanded, strict=True)]

        specs = ([spec for spec, _ in state], [self._of_data(v) for v in program.inputs])
        spread = jax.shard_map(
            part, mesh=self.mesh, in_specs=specs, out_specs=self.out_specs, check_vma=False
        )
        return lambda own, values: spread(list(own), list(values))

    def shardings(
        self, reused: Sequence[Variable], lent: Sequence[Variable], inputs: Sequence[Variable]
    ) -> dict[str, Any]:
        """Where the compiled step takes its arrays from, and where it leaves them."""
        count = len(self.old)
        own = [tuple(self.sharding(v) for v in group) for group in (reused, lent)]
        data = tuple(NamedSharding(self.mesh, self._of_data(v)) for v in inputs)
        out = [NamedSharding(self.mesh, spec) for spec in self.out_specs]
        return {"in_shardings": (*own, data), "out_shardings": (out[:count], out[count:])}

    def sharding(self, v: Variable) -> NamedSharding:
        """Where a state Variable lies."""
        return NamedSharding(self.mesh, self._of_state(v)[0])

    def _of_state(self, v: Variable) -> tuple[PartitionSpec, bool]:
        """How state is cut, and whether each device has one entry of a new first axis."""
        if v.placement is Placement.REPLICATED:
            return PartitionSpec(), False
        return PartitionSpec(self.axis), v.placement is Placement.PER_REPLICA

    def _of_data(self, v: Variable) -> PartitionSpec:
        return PartitionSpec(self.axis) if v.placement is Placement.SHARDED else PartitionSpec()

    def _of_result(self, v: Variable, equal: set[Variable]) -> tuple[PartitionSpec, bool]:
        """Equal results are one; arrays over examples are joined; of the rest each device gives its own."""
        if v in equal:
            return PartitionSpec(), False
        rows = {x.shape[0] for x in self.program.inputs if x.placement is Placement.SHARDED}
        is_joined = bool(v.shape) and v.shape[0] in rows and v not in self._merged
        return PartitionSpec(self.axis), not is_joined


def _devices(program: Program) -> list[Any]:
    assert program.replicas is not None
    found, count = jax.devices(), program.replicas.count
    if len(found) < count:
        raise ArgumentError(
            _TOO_FEW.format(program=program.name, count=count, found=len(found), platform=found[0].platform)
        )
    return found[:count]
