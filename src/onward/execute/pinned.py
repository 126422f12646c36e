"""State that lies in host memory between two steps, as ``offload`` says: its arrays, and how they get there.

The memory is pinned, so that a device reads it by itself while it computes. JAX calls that a memory kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from onward.core.errors import ArgumentError
from onward.core.marks import FETCH, STORE
from onward.core.program import Program, Variable
from onward.develop.offload import offloaded
from onward.develop.stored import HERE, stored_values

PINNED = "pinned_host"

_LACKS = (
    "{program} keeps {name!r} in host memory (offload), and {device} has no memory kind {kind!r}, only "
    "{found}. Compile the Program as it was before offload."
)


def pinned_names(program: Program) -> frozenset[str]:
    """The names of the state of a Program that lies in host memory.

    Raises:
        ArgumentError: the devices have no host memory that they can read.
    """
    found = offloaded(program)
    if needed := (*found, *stored_values(program)):
        device = _default_device()
        kinds = [memory.kind for memory in device.addressable_memories()]
        if PINNED not in kinds:
            told = {"program": program.name, "name": needed[0].name, "device": device, "kind": PINNED}
            raise ArgumentError(_LACKS.format(found=", ".join(map(repr, kinds)), **told))
    return frozenset(v.name for v in found)


def pinned_home() -> Sharding:
    """The host memory of the device that JAX computes on by default."""
    return SingleDeviceSharding(_default_device(), memory_kind=PINNED)


def is_pinned(value: Any) -> bool:
    """Whether an array lies in host memory that a device reads."""
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return False
    return value.sharding.memory_kind == PINNED


def pinned(sharding: Any, is_there: bool = True) -> Any:
    """The same place in host memory, or as it is."""
    return sharding.with_memory_kind(PINNED) if is_there else sharding


def in_memory(value: Any, is_there: bool) -> Any:
    """The value in host memory, or on its devices; the same one if it lies so, or is only traced."""
    if isinstance(value, jax.core.Tracer) or is_pinned(value) == is_there:
        return value
    if is_there:
        return jax.device_put(
            value, pinned(value.sharding) if isinstance(value, jax.Array) else pinned_home()
        )
    devices = value.devices()
    if devices == {_default_device()}:
        return jax.device_put(np.array(value))  # not bound to that device, as what was never offloaded
    return jax.device_put(value, value.sharding.with_memory_kind(next(iter(devices)).default_memory().kind))


def on_the_device(program: Program, results: Sequence[Variable]) -> list[Variable]:
    """Results of a Program, each as the device has it where it is kept in host memory as well."""
    there = {op.inputs[0]: op.outputs[0] for op in program.ops if op.type is FETCH}
    there |= {op.outputs[0]: op.inputs[0] for op in program.ops if op.type is STORE}
    return [there.get(v, v) for v in results]


def bringing(
    run: Callable[..., list[Any]], program: Program, results: Sequence[Variable]
) -> Callable[..., list[Any]]:
    """The function that computes results, with what a loop puts into host memory brought to the device."""
    there = {*stored_values(program)}.intersection(results)
    if not there:
        return run

    def brought(*arguments: Any) -> list[Any]:
        found = zip(results, run(*arguments), strict=True)
        return [jax.device_put(x, HERE) if v in there else x for v, x in found]

    return brought


def shardings(groups: Any, names: frozenset[str]) -> Mapping[str, Any]:
    """Where a step on one device takes its arrays from, group by group; nothing if it offloads none."""
    if not names:
        return {}
    home = pinned_home()
    return {
        "in_shardings": tuple(tuple(home if v.name in names else None for v in group) for group in groups)
    }


def _default_device() -> Any:
    (device,) = jnp.zeros(()).devices()
    return device
