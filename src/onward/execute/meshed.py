"""A partitioned Program on a mesh of devices: where its arrays lie; what runs it is JAX's partitioner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from onward.core.errors import ArgumentError
from onward.core.program import Partition, Program, Variable
from onward.core.words import Placement
from onward.execute.pinned import pinned, pinned_names

_TOO_FEW = (
    "{program} is partitioned over {mesh}, which is {count} devices, and JAX shows {found} ({platform}). "
    "Take a smaller mesh, or, to try it on the host, jax.config.update('jax_num_cpu_devices', {count}) "
    "before JAX begins."
)
_SEVERAL = (
    "{program} is partitioned, which runs in one process, and there are {count}. replicate(program) runs on "
    "several; or give a step of the Program without partition arrays that are sharded over all processes."
)


class Meshed:
    """How the arrays of a partitioned Program lie over its mesh.

    Args:
        program: whose arrays they are.
        specs: how those lie that are split, by name.
        following: what replaces the state that changes.
        wanted: what a step returns.
    """

    is_shared = False

    def __init__(
        self,
        program: Program,
        specs: Mapping[str, PartitionSpec],
        following: Sequence[Variable],
        wanted: Sequence[Variable],
    ) -> None:
        assert program.partition is not None
        self._specs = specs
        self.mesh = mesh_of(program.name, program.partition)
        self.results = [Placement.REPLICATED for _ in wanted]  # whole arrays, wherever their parts lie
        old = {new: old for old, new in program.next_state.items()}
        self._changed = [old[v] for v in following]
        self._pinned = pinned_names(program)

    def over_devices(self, run: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """The function of whole arrays that ``run`` is already."""
        return run

    def shardings(self, *groups: Sequence[Variable]) -> dict[str, Any]:
        """Where the compiled step takes its arrays from, group by group, and where it leaves them."""
        given = tuple(tuple(map(self._sharding, group)) for group in groups)
        return {"in_shardings": given, "out_shardings": (list(map(self._sharding, self._changed)), None)}

    def place(self, v: Variable, value: Any) -> Any:
        """The value of a state Variable, over the devices."""
        return jax.device_put(value, self._sharding(v))

    def feed(self, v: Variable, value: Any) -> Any:
        """Data over the devices."""
        return jax.device_put(value, self._sharding(v))

    def local(self, results: Sequence[Any]) -> list[Any]:
        """The results of this process, which is the only one."""
        return list(results)

    of_all = local

    def _sharding(self, v: Variable) -> NamedSharding:
        home = NamedSharding(self.mesh, self._specs.get(v.name, PartitionSpec()))
        lies: NamedSharding = pinned(home, v.name in self._pinned)
        return lies


def mesh_of(program: str, how: Partition) -> Mesh:
    """The mesh of devices that a Program is partitioned over.

    Raises:
        ArgumentError: JAX shows too few devices, or there are several processes.
    """
    if jax.process_count() > 1:
        raise ArgumentError(_SEVERAL.format(program=program, count=jax.process_count()))
    devices = how.devices or tuple(jax.devices()[: how.count])
    if len(devices) < how.count:
        platform = jax.devices()[0].platform
        found = len(jax.devices())
        raise ArgumentError(
            _TOO_FEW.format(program=program, mesh=how, count=how.count, found=found, platform=platform)
        )
    return Mesh(np.array(devices).reshape(tuple(how.mesh.values())), tuple(how.mesh))
