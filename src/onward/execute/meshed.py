"""A partitioned Program on a mesh of devices: where its arrays lie; what runs it is JAX's partitioner."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from onward.core.errors import ArgumentError
from onward.core.meshes import parts
from onward.core.program import Partition, Program, Variable
from onward.core.words import Placement
from onward.execute.pinned import pinned, pinned_names
from onward.execute.processes import DIFFERS, first_devices, part_of, processes_of_a_part, put_by_all

_TOO_FEW = (
    "{program} is partitioned over {mesh}, which is {count} devices, and JAX shows {found} ({platform}). "
    "Take a smaller mesh, or, to try it on the host, jax.config.update('jax_num_cpu_devices', {count}) "
    "before JAX begins."
)
_NOT_ALL = (
    "{program} is partitioned over {mesh}, and the mesh has no device of process {process}. Of {processes} "
    "processes each takes part in every step: make the mesh of devices of all of them, jax.make_mesh(...)."
)
_IN_PART = (
    "{program}: {name!r} is split {spec} over {mesh}, so that processes have some of its rows together and "
    "others not. Let the axis of the batch come first in the mesh, of a length that the number of processes "
    "divides; or feed arrays over all devices, jax.make_array_from_callback(shape, sharding, ...)."
)

_UNDIVIDED = (
    "{program}: {name!r} is {shape} in this process, split {spec}, and its devices take {count} parts, which "
    "do not divide dimension {axis}. Feed a multiple of {count}, and leave a short last batch out."
)


class Meshed:
    """How the arrays of a partitioned Program lie over its mesh.

    Args:
        program: whose arrays they are.
        specs: how those lie that are split, by name.
        following: what replaces the state that changes.
        wanted: what a step returns.
    """

    def __init__(
        self,
        program: Program,
        specs: Mapping[str, PartitionSpec],
        following: Sequence[Variable],
        wanted: Sequence[Variable],
    ) -> None:
        assert program.partition is not None
        self._specs = specs
        self.name = program.name
        self.mesh = mesh_of(program.name, program.partition)
        self.is_shared = jax.process_count() > 1
        self.results = [Placement.REPLICATED for _ in wanted]  # whole arrays, wherever their parts lie
        of = {g: p.name for p, g in program.gradients}
        self._wanted = [self._specs.get(of.get(v, v.name), PartitionSpec()) for v in wanted]
        old = {new: old for old, new in program.next_state.items()}
        self._changed = [old[v] for v in following]
        self._pinned = pinned_names(program)

    def over_devices(self, run: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """The function of whole arrays that ``run`` is already."""
        return run

    def shardings(self, *groups: Sequence[Variable]) -> dict[str, Any]:
        """Where the compiled step takes its arrays from, group by group, and where it leaves them."""
        given = tuple(tuple(map(self._sharding, group)) for group in groups)
        results = [NamedSharding(self.mesh, spec) for spec in self._wanted] if self.is_shared else None
        return {"in_shardings": given, "out_shardings": (list(map(self._sharding, self._changed)), results)}

    def place(self, v: Variable, value: Any) -> Any:
        """The value of a state Variable, known to every process, over the devices.

        Raises:
            ArgumentError: the processes have different values.
        """
        return put_by_all(value, self._sharding(v), DIFFERS.format(program=self.name, name=v.name))

    def feed(self, v: Variable, value: Any) -> Any:
        """Data over the devices: of several processes each feeds the rows of its own devices.

        Raises:
            ArgumentError: some processes have rows together, and others have other ones.
        """
        sharding = self._sharding(v)
        if isinstance(value, jax.core.Tracer) or not getattr(value, "is_fully_addressable", True):
            return value
        self._expect_shared_out(v, value.shape, sharding)
        return part_of(value, sharding)

    def _expect_shared_out(self, v: Variable, shape: tuple[int, ...], sharding: NamedSharding) -> None:
        """Raise ``ArgumentError`` for data that the devices of this process cannot share out."""
        told, mesh = {"program": self.name, "name": v.name, "spec": sharding.spec}, dict(self.mesh.shape)
        one_each = parts(sharding.spec, mesh)
        if processes_of_a_part(sharding, one_each) not in ({1}, {jax.process_count()}):
            raise ArgumentError(_IN_PART.format(mesh=mesh, **told))
        own = sharding.addressable_devices_indices_map(one_each).values()
        for axis, length in enumerate(shape[: len(one_each)]):
            count = len({str(index[axis]) for index in own if index is not None})
            if length % count:
                raise ArgumentError(_UNDIVIDED.format(shape=list(shape), axis=axis, count=count, **told))

    def local(self, results: Sequence[Any]) -> list[Any]:
        """The results of this process: every one has the whole of all but what is split as a parameter is."""
        return list(results)

    of_all = local

    def _sharding(self, v: Variable) -> NamedSharding:
        home = NamedSharding(self.mesh, self._specs.get(v.name, PartitionSpec()))
        lies: NamedSharding = pinned(home, v.name in self._pinned)
        return lies


def mesh_of(program: str, how: Partition) -> Mesh:
    """The mesh of devices that a Program is partitioned over.

    Raises:
        ArgumentError: JAX shows too few devices, or the mesh leaves a process out.
    """
    found = jax.devices()
    if len(how.devices or found) < how.count:
        told = {"program": program, "mesh": how, "count": how.count}
        raise ArgumentError(_TOO_FEW.format(found=len(found), platform=found[0].platform, **told))
    devices = how.devices or first_devices(program, f"is partitioned over {how}, which is", how.count)
    takes_part = {device.process_index for device in devices}
    for process in range(jax.process_count()):
        if process not in takes_part:
            told = {"program": program, "mesh": how, "process": process}
            raise ArgumentError(_NOT_ALL.format(processes=jax.process_count(), **told))
    return Mesh(np.array(devices).reshape(tuple(how.mesh.values())), tuple(how.mesh))
