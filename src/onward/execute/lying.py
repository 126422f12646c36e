"""Where the arrays of a step lie: on the devices that they were put on, as under ``jax.jit``.

A step runs where its arrays lie. Arrays that were not put on a device follow the others: the optimizer state
of a parameter lies as the parameter does, all else is on every device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from onward.core.errors import ArgumentError
from onward.core.meshes import parameters_of
from onward.core.program import Program, Variable
from onward.core.words import some
from onward.execute.pinned import is_pinned, pinned, pinned_names
from onward.execute.processes import (
    gathered,
    is_split_over_processes,
    lies_in_a_stage,
    put_by_all,
    reading_whole,
)

Lying = tuple[Sharding | None, ...]

_APART = (
    "{program}: its arrays lie on different devices: {found}. One step runs on one set of devices, in one "
    "order. Put them together, jax.device_put(array, sharding), or leave out the device_put: what is not put "
    "anywhere goes along with the rest."
)
_ALONE = (
    "{program}: {name!r} differs from process to process, and the state lies over all of them. Let each feed "
    "the same, or its part of an array over all: jax.make_array_from_process_local_data(sharding, {name})."
)


def lying(values: Sequence[Any]) -> Lying:
    """The sharding with which each array was put on devices; None for an array that may lie anywhere.

    >>> import numpy as np
    >>> lying([np.zeros(2), jnp.zeros(2)])
    (None, None)
    """
    return tuple(x.sharding if _is_put(x) else None for x in values)


def lies_elsewhere(values: Sequence[Any]) -> bool:
    """Whether an array was put on devices other than the default one."""
    found = {frozenset(s.device_set) for s in lying(values) if s is not None}
    return bool(found) and found != {frozenset(jnp.zeros(()).devices())}


def homes_of(program: Program, variables: Sequence[Variable], values: Sequence[Any]) -> Lying:
    """Where each array is to lie for a step: where it was put, or along with others. None: anywhere.

    Raises:
        ArgumentError: they were put on different devices.
    """
    found = lying(values)
    put = {v: s for v, s in zip(variables, found, strict=True) if s is not None}
    if not put:
        return found
    _expect_together(program.name, put)
    everywhere, like, there = _everywhere(put), parameters_of(program), pinned_names(program)
    homes = ((v, put.get(v) or put.get(like.get(v, v)) or everywhere) for v in variables)
    return tuple(pinned(home, v.name in there) for v, home in homes)


def together(values: Sequence[Any]) -> Sequence[Any]:
    """The values where one computation reads all of them: copies on one device of what lies on several sets.

    The stages of a pipeline have theirs apart; processes that share an array out, which call this together,
    each compute for themselves. What lies on one set of devices, or anywhere, stays as it is.

    >>> values = [jax.device_put(jnp.zeros(2), device) for device in jax.devices()[:2]]
    >>> [x.devices() == {jax.devices()[0]} for x in together(values)]
    [True, True]
    """
    apart = len({frozenset(s.device_set) for s in lying(values) if s is not None}) > 1
    if not apart and not any(map(is_split_over_processes, values)):
        return values
    whole = reading_whole("the copy of the whole state", values, lambda: list(map(gathered, values)))
    moved: list[Any] = jax.device_put(whole, jax.local_devices()[0])
    return moved


def laid(program: Program, variables: Sequence[Variable], values: Sequence[Any]) -> list[Any]:
    """The values where they are to lie; the same arrays if they lie there."""
    homes = homes_of(program, variables, values)
    return [
        x if s is None or _is_put(x) else jax.device_put(x, s) for x, s in zip(values, homes, strict=True)
    ]


def fed_by_all(program: Program, data: Sequence[Any], homes: Lying) -> Sequence[Any]:
    """Data for a step whose arrays lie over several processes, which all feed the same.

    Raises:
        ArgumentError: they feed different numbers.
    """
    if all(home is None or home.is_fully_addressable for home in homes):
        return data
    return [
        x
        if home is None or _is_put(x)
        else put_by_all(x, home, _ALONE.format(program=program.name, name=v.name))
        for v, x, home in zip(program.inputs, data, homes, strict=True)
    ]


def beside(known: Any, value: Any) -> Any:
    """A new value of a Variable where its old one was put, if every process can say so."""
    is_put = _is_put(known) and known.is_fully_addressable and known.ndim == value.ndim
    if is_put and lies_in_a_stage(known):  # one process has all of its devices, the others none
        return value
    return jax.device_put(value, known.sharding) if is_put else value


def within(sharding: Sharding) -> Sharding:
    """The same place for the inside of a step, where XLA propagates: no axis of the mesh is part of types."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def _is_put(x: Any) -> bool:
    """Whether someone put it on a device; what lies in host memory follows what is on devices."""
    is_array = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    return is_array and x.committed and not is_pinned(x)


def _everywhere(put: Mapping[Variable, Sharding]) -> Sharding:
    """On every one of the devices."""
    one = next(iter(put.values()))
    named = next((s for s in put.values() if isinstance(s, NamedSharding)), None)
    if named is not None:
        return NamedSharding(named.mesh, PartitionSpec())
    if isinstance(one, SingleDeviceSharding):
        return one
    devices = sorted(one.device_set, key=_number)
    return NamedSharding(jax.make_mesh((len(devices),), ("devices",), devices=devices), PartitionSpec())


def _expect_together(program: str, put: Mapping[Variable, Sharding]) -> None:
    groups: dict[tuple[int, ...], list[str]] = {}
    for v, sharding in put.items():
        groups.setdefault(_devices(sharding), []).append(v.name)
    if len(groups) > 1:
        told = ((some([*map(repr, names)], 2), _words(devices)) for devices, names in groups.items())
        found = (f"{names} on {devices}" for names, devices in islice(told, 3))
        raise ArgumentError(_APART.format(program=program, found="; ".join(found)))


def _devices(sharding: Sharding) -> tuple[int, ...]:
    """The numbers of the devices, in the order in which they are given parts."""
    if isinstance(sharding, NamedSharding):
        return tuple(device.id for device in sharding.mesh.devices.flat)
    return tuple(sorted(map(_number, sharding.device_set)))


def _number(device: Any) -> int:
    return int(device.id)


def _words(devices: tuple[int, ...]) -> str:
    some = ", ".join(map(str, devices[:8])) + ", ..." * (len(devices) > 8)
    return f"device{'s' if len(devices) > 1 else ''} {some}"
