"""A replicated Program on the devices that are there: where its arrays lie, and what runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from onward.core.errors import ArgumentError
from onward.core.placement import equal_variables
from onward.core.program import Program, Replicas, Variable
from onward.core.words import Kind, Pass, Placement
from onward.execute.pinned import pinned, pinned_names
from onward.execute.processes import DIFFERS, first_devices, part_of, put_by_all, rows_of_all

_TOO_FEW = (
    "{program} is replicated for {count} devices, and JAX shows {found} ({platform}). Replicate it for "
    "{found}, or, to try more on the host, set XLA_FLAGS=--xla_force_host_platform_device_count={count} "
    "before JAX starts."
)
_SHARDED = (
    "{program}: {name!r} comes sharded ({sharding}), and the Program is replicated: each device would get "
    "the whole of it. To keep it sharded, compile the Program without replicate: the step runs where its "
    "arrays lie. To replicate it, give it whole: jax.device_get({name}); merge=Sharded() shards what the "
    "optimizer keeps of it."
)


class By(StrEnum):
    """The JAX transform that runs a Program on the devices; the results are equal."""

    SHARD_MAP = "shard_map"
    PMAP = "pmap"

    @classmethod
    def of(cls, word: str) -> By:
        """The member that this word names; raises ``ArgumentError`` if there is none."""
        try:
            return cls(word)
        except ValueError:
            raise ArgumentError(f"compile: by is {word!r}; expected 'shard_map' or 'pmap'.") from None


class Spread:
    """How the arrays of a replicated Program lie over the devices.

    What is replicated is one array without an axis of devices; what each device has for itself has one entry
    of a new first axis; what is sharded is laid end to end along its first axis.
    """

    def __init__(
        self, program: Program, following: Sequence[Variable], wanted: Sequence[Variable], by: By
    ) -> None:
        assert program.replicas is not None
        self.program, self.replicas, self.by = program, program.replicas, by
        self.mesh = Mesh(np.array(devices_of(program.name, program.replicas)), (self.replicas.name,))
        old = {new: old for old, new in program.next_state.items()}
        self._equal = equal_variables(program)
        # What is merged is not an array over examples, though it may happen to be as long as the batch.
        self._merged = {v for op in program.ops if op.made_by is Pass.COLLECTIVE for v in op.inputs}
        self.results = [self._of_result(v) for v in wanted]
        self._replaced = [old[v] for v in following]
        self.changed = [v.placement for v in self._replaced]
        self._pinned = pinned_names(program)
        self.is_shared = jax.process_count() > 1 and self.replicas.count > 1

    def over_devices(self, run: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        """The function of whole arrays that runs ``run`` on every device's part."""
        given = [*(v.placement for v in self.program.state), *(v.placement for v in self.program.inputs)]
        made = [*self.changed, *self.results]
        count = len(self.program.state)

        def part(values: Sequence[Any]) -> list[Any]:
            return run(values[:count], values[count:])

        spread = self._mapped(part, given, made)
        return lambda own, values: spread([*own, *values])

    def _mapped(
        self, part: Callable[..., list[Any]], given: list[Placement], made: list[Placement]
    ) -> Callable[[list[Any]], list[Any]]:
        """A function of lists of arrays, run on every device."""
        if self.by is By.PMAP:
            mapped = jax.pmap(
                lambda values, _: part(values),
                self.replicas.name,
                in_axes=([_axis(p) for p in given], 0),
                out_axes=[_axis(p) for p in made],
                devices=list(self.mesh.devices),
                axis_size=self.replicas.count,
            )

            def by_pmap(values: list[Any]) -> list[Any]:
                pairs = zip(values, given, strict=True)
                cut = [self._cut(x) if p is Placement.SHARDED else x for x, p in pairs]
                found = mapped(cut, np.arange(self.replicas.count))  # pmap needs something that it can cut
                return [_joined(x) if p is Placement.SHARDED else x for x, p in zip(found, made, strict=True)]

            return by_pmap

        def squeezed(values: Sequence[Any]) -> list[Any]:
            pairs = zip(values, given, strict=True)
            found = part([jnp.squeeze(x, 0) if p is Placement.PER_REPLICA else x for x, p in pairs])
            return [x[None] if p is Placement.PER_REPLICA else x for x, p in zip(found, made, strict=True)]

        specs = [self._spec(p) for p in given], [self._spec(p) for p in made]
        return jax.shard_map(
            squeezed, mesh=self.mesh, in_specs=(specs[0],), out_specs=specs[1], check_vma=False
        )

    def _cut(self, x: Any) -> Any:
        """An array laid end to end as one part for each device."""
        return x.reshape(self.replicas.count, x.shape[0] // self.replicas.count, *x.shape[1:])

    def shardings(self, *groups: Sequence[Variable]) -> dict[str, Any]:
        """Where the compiled step takes its arrays from, group by group, and where it leaves them."""
        out = (list(map(self._home, self._replaced)), [self._sharding(p) for p in self.results])
        given = tuple(tuple(map(self._home, group)) for group in groups)
        return {"in_shardings": given, "out_shardings": out}

    def place(self, v: Variable, value: Any) -> Any:
        """The value of a state Variable, known to every process, over the devices.

        Raises:
            ArgumentError: the processes have different values, or a parameter is sharded.
        """
        if (
            v.kind is Kind.PARAMETER
            and isinstance(value, jax.Array)
            and not isinstance(value, jax.core.Tracer)
        ):
            self._expect_whole(v, value)
        return put_by_all(value, self._home(v), DIFFERS.format(program=self.program.name, name=v.name))

    def _expect_whole(self, v: Variable, value: jax.Array) -> None:
        """Raise ``ArgumentError`` for a parameter of which each device has a part."""
        if not value.is_fully_replicated:
            raise ArgumentError(
                _SHARDED.format(program=self.program.name, name=v.name, sharding=value.sharding)
            )

    def feed(self, v: Variable, value: Any) -> Any:
        """Data of this process as its part of the data of all."""
        return part_of(value, self._sharding(v.placement))

    def local(self, results: Sequence[Any]) -> list[Any]:
        """The results of this process: its part of what differs from device to device."""
        return [
            x
            if p is Placement.REPLICATED
            else multihost_utils.global_array_to_host_local_array(x, self.mesh, self._spec(p))
            for x, p in zip(results, self.results, strict=True)
        ]

    def of_all(self, results: Sequence[Any]) -> list[Any]:
        """The results of ``local`` on every process, laid end to end in the order of the devices."""
        return [
            x if p is Placement.REPLICATED else rows_of_all(x)
            for x, p in zip(results, self.results, strict=True)
        ]

    def _home(self, v: Variable) -> NamedSharding:
        """Where a Variable lies that is given to a step."""
        home: NamedSharding = pinned(self._sharding(v.placement), v.name in self._pinned)
        return home

    def _sharding(self, placement: Placement) -> NamedSharding:
        return NamedSharding(self.mesh, self._spec(placement))

    def _spec(self, placement: Placement) -> PartitionSpec:
        return PartitionSpec() if placement is Placement.REPLICATED else PartitionSpec(self.replicas.name)

    def _of_result(self, v: Variable) -> Placement:
        """Equal results are one; arrays over examples are joined; of the rest each device gives its own."""
        if v.placement is Placement.SHARDED and self.replicas.count > 1:
            return Placement.SHARDED
        if v in self._equal:
            return Placement.REPLICATED
        rows = {x.shape[0] for x in self.program.inputs if x.placement is Placement.SHARDED}
        is_joined = bool(v.shape) and v.shape[0] in rows and v not in self._merged
        return Placement.SHARDED if is_joined else Placement.PER_REPLICA


def _axis(placement: Placement) -> int | None:
    """The axis that pmap cuts."""
    return None if placement is Placement.REPLICATED else 0


def _joined(x: Any) -> Any:
    """The parts of all devices, laid end to end."""
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def on_one_device(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arrays that every device has, as the first device of this process has them; no copy.

    Where one of them is sharded, all stay on their devices.
    """
    if not values or isinstance(getattr(values[0], "sharding", None), SingleDeviceSharding):
        return values
    if not all(x.is_fully_replicated for x in values):
        return values
    return tuple(x.addressable_data(0) for x in values)


def devices_of(program: str, replicas: Replicas) -> list[Any]:
    """The devices that a Program runs on: the first ones, equally many of each process.

    Raises:
        ArgumentError: there are too few, or the processes cannot share them evenly.
    """
    found, count = jax.devices(), replicas.count
    if len(found) < count:
        platform = found[0].platform
        raise ArgumentError(
            _TOO_FEW.format(program=program, count=count, found=len(found), platform=platform)
        )
    return [jax.local_devices()[0]] if count == 1 else first_devices(program, "is replicated for", count)
