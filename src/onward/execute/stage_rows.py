"""Where the stages of a pipeline lie, a row of devices each, and how values get from one to another.

In one process ``jax.device_put`` does all of it. Of several processes each calls the same functions in the
same order, for every value of the pipeline: of one that lies on devices of others it has an array without
data, and what computes there it leaves out. A value is copied where the devices of both rows belong to the
same processes, position by position; otherwise both rows exchange it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from onward.core.errors import ArgumentError
from onward.core.variable import holds_keys
from onward.distribute.pipeline.cut import Pipeline
from onward.distribute.pipeline.stage_specs import STAGES
from onward.execute.processes import STAGE, first_devices, gathered, lies_in_a_stage

StagePlace = Any  # a sharding, or where there is one a device: to send there takes less time

_TOO_FEW = (
    "{name} is cut into {stages} stages, each on {own}, and JAX shows {found} ({platform}). Take fewer, or, "
    "to try more on the host, set XLA_FLAGS=--xla_force_host_platform_device_count={count} before JAX starts."
)

_UNEVEN = (
    "{name} is cut into {stages} stages (data={each}), and there are {processes} processes. Let each have as "
    "many whole stages as the others ({processes} stages, or a multiple), or as many devices of every stage "
    "(pipeline(..., data={processes}), or a multiple), or let each stage have as many whole processes."
)


class StageRows:
    """The devices of the stages.

    Attributes:
        whole: for each stage how a value lies that all of its devices have, and last that of all stages.
        is_shared: whether they belong to several processes.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.name = pipeline.program.name
        self.is_shared: bool = jax.process_count() > 1
        self.whole = _rows(pipeline)
        self._exchanges: dict[Any, Callable[[Any], Any]] = {}

    def put(self, value: Any, place: StagePlace) -> Any:
        """A value to a place: what a stage has from there, anything else as all processes know it."""
        if not self.is_shared:
            return jax.device_put(value, place)
        if isinstance(value, list):
            return [self.put(x, place) for x in value]
        if getattr(value, "sharding", None) == place:
            return value
        if not (lies_in_a_stage(value) and place.mesh.axis_names == value.sharding.mesh.axis_names):
            value = self._known_to_all(value)
            parts = place.addressable_devices_indices_map(np.shape(value))
            arrays = [jax.device_put(value[index], device) for device, index in parts.items()]
            return _array(np.shape(value), value.dtype, place, arrays)
        here, there = value.sharding.mesh.devices.flat, place.mesh.devices.flat
        alike = NamedSharding(place.mesh, value.sharding.spec).is_equivalent_to(place, value.ndim)
        assert alike, "a value is split alike in all stages"
        if all(a.process_index == b.process_index for a, b in zip(here, there, strict=True)):
            return self._copied(value, place)
        return self._exchanged(value, place)

    def for_all(self, value: Any) -> Any:
        """A value of a stage where every process has the whole of it: in its first stage."""
        if not self.is_shared:
            return value
        value = self._joined(value) if lies_in_a_stage(value) else self._known_to_all(value)
        mine = None
        for stage in dict.fromkeys(map(self._first_stage, range(jax.process_count()))):
            found = self.put(value, self.whole[stage])
            if stage == self._first_stage(jax.process_index()):
                mine = found
        return mine

    def _known_to_all(self, value: Any) -> Any:
        """A value of one stage, or over all of them, as each process has it."""
        return self.for_all(value).addressable_data(0) if lies_in_a_stage(value) else gathered(value)

    def joined(self, pieces: Sequence[Any], shape: tuple[int, ...], place: NamedSharding) -> Any:
        """A stack over all stages of the piece that each has."""
        arrays = [shard.data for piece in pieces for shard in piece.addressable_shards]
        return _array(shape, pieces[0].dtype, place, arrays)

    def piece(self, stack: Any, shape: tuple[int, ...], place: StagePlace) -> Any:
        """The piece that a stage has of a stack over all stages."""
        here = {shard.device: shard.data for shard in stack.addressable_shards}
        place = sharding_of(place)
        devices = place.addressable_devices_indices_map(shape)
        return _array(shape, stack.dtype, place, [here[device] for device in devices])

    def _first_stage(self, process: int) -> int:
        """The first stage that has a device of a process."""
        has = (any(d.process_index == process for d in row.mesh.devices.flat) for row in self.whole[:-1])
        return next(i for i, found in enumerate(has) if found)

    def compiled(self, jitted: Any, stage: int, types: Sequence[Any], laid: Any, options: Any) -> Any:
        """A function compiled for the devices of a stage, and how its results lie.

        In a process without any of them it is left out.
        """
        lowered = jitted.lower(*types)
        place = self.whole[stage]
        if not self.is_shared or place.addressable_devices:
            compiled = lowered.compile(options)
            is_alone = not self.is_shared or place.is_fully_addressable
            return compiled if is_alone else _in_order(compiled), compiled.output_shardings

        def absent(sharding: Sharding, outs: Any) -> Any:
            return jax.tree.map(lambda x: _array(x.shape, x.dtype, sharding, []), outs)

        laid = jax.tree.map(lambda x: place if x is None else x, laid, is_leaf=lambda x: x is None)
        return lambda *_: jax.tree.map(absent, laid, lowered.out_info), laid

    def _joined(self, value: Any) -> Any:
        """A value that the devices of a stage may have shared out, whole on each of them."""
        whole = NamedSharding(value.sharding.mesh, PartitionSpec())
        if not whole.addressable_devices:
            return _array(value.shape, value.dtype, whole, [])
        return _in_order(jax.device_put)(value, whole)

    def _copied(self, value: Any, place: NamedSharding) -> Any:
        to = dict(zip(value.sharding.mesh.devices.flat, place.mesh.devices.flat, strict=True))
        arrays = [jax.device_put(shard.data, to[shard.device]) for shard in value.addressable_shards]
        return _array(value.shape, value.dtype, place, arrays)

    def _exchanged(self, value: Any, place: NamedSharding) -> Any:
        """A value sent from process to process: both rows compute a step of it together."""
        rows = np.stack([value.sharding.mesh.devices, place.mesh.devices])
        both = NamedSharding(Mesh(rows, ("from_to", *place.mesh.axis_names)), place.spec)
        if not both.addressable_devices:
            return _array(value.shape, value.dtype, place, [])
        key = both, value.shape, value.dtype
        if key not in self._exchanges:
            self._exchanges[key] = _exchange(both, value)
        found = self._exchanges[key](value)
        there = place.addressable_devices
        arrays = [shard.data for shard in found.addressable_shards if shard.device in there]
        return _array(value.shape, value.dtype, place, arrays)


def _exchange(both: NamedSharding, like: Any) -> Callable[[Any], Any]:
    """From what the first of two rows has to an array over both, which the second one has then."""
    shape, dtype = like.shape, like.dtype
    impl = jax.random.key_impl(like) if holds_keys(dtype) else None

    def move(x: Any) -> Any:
        numbers = x if impl is None else jax.random.key_data(x)
        sent = jax.lax.ppermute(numbers, "from_to", [(0, 1)])
        return sent if impl is None else jax.random.wrap_key_data(sent, impl=impl)

    moved = jax.shard_map(move, mesh=both.mesh, in_specs=both.spec, out_specs=both.spec, check_vma=False)
    run = _in_order(jax.jit(moved))
    # What the second row gives is not read: it has the right type, and stays for the next call.
    part = both.shard_shape(shape)
    unread = jnp.broadcast_to(jnp.zeros((), dtype) if impl is None else jax.random.key(0, impl=impl), part)
    there = {
        device: jax.device_put(unread, device) for device in both.mesh.devices[1].flat if _is_mine(device)
    }

    def exchange(value: Any) -> Any:
        here = {shard.device: shard.data for shard in value.addressable_shards}
        arrays = [{**here, **there}[d] for d in both.addressable_devices_indices_map(shape)]
        return run(_array(shape, dtype, both, arrays))

    return exchange


def _in_order(run: Callable[..., Any]) -> Callable[..., Any]:
    """A computation over several processes, which on a CPU ends before the next one begins.

    There two of them may run at once, and the data that processes exchange for one can end up in the other.
    """
    if jax.default_backend() != "cpu":
        return run
    return lambda *values: jax.block_until_ready(run(*values))


def _is_mine(device: Any) -> bool:
    return bool(device.process_index == jax.process_index())


def _array(shape: tuple[int, ...], dtype: Any, sharding: Sharding, arrays: list[Any]) -> Any:
    """An array over devices of which this process has these parts, maybe none."""
    return jax.make_array_from_single_device_arrays(shape, sharding, arrays, dtype=dtype)


def sharding_of(place: StagePlace) -> Sharding:
    """A place as a sharding."""
    return place if isinstance(place, Sharding) else SingleDeviceSharding(place)


def _rows(pipeline: Pipeline) -> Sequence[StagePlace]:
    """How a value lies that all devices of a stage have, for each stage, and then for all together."""
    how, stages, processes = pipeline.partition, pipeline.schedule.stages, jax.process_count()
    axes = {} if how is None else dict(how.mesh)
    each = prod(axes.values())
    found, count, name = jax.devices(), stages * each, pipeline.program.name
    if len(found) < count:
        own = "a device of its own" if each == 1 else f"{each} devices of its own"
        told = {"name": name, "stages": stages, "own": own, "found": len(found), "count": count}
        raise ArgumentError(_TOO_FEW.format(platform=found[0].platform, **told))
    if how is None and processes == 1:
        return [*found[:stages], _whole_on(np.array(found[:stages]), [STAGES])]
    if stages % processes and each % processes and processes % stages:
        raise ArgumentError(_UNEVEN.format(name=name, stages=stages, each=each, processes=processes))
    devices = np.array(first_devices(name, "is a pipeline on", count))
    if stages % processes and not each % processes:  # every process has a part of each stage
        rows = devices.reshape(processes, stages, -1).swapaxes(0, 1).reshape(stages, each)
    else:
        rows = devices.reshape(stages, each)
    together = _whole_on(rows.reshape(stages, *axes.values()), (STAGES, *axes))
    if processes > 1:
        axes = {STAGE: 1, **axes}
    return [*(_whole_on(row.reshape(tuple(axes.values())), axes) for row in rows), together]


def _whole_on(devices: np.ndarray, axes: Iterable[str]) -> NamedSharding:
    return NamedSharding(Mesh(devices, tuple(axes)), PartitionSpec())
