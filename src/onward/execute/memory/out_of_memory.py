"""The error of a step that needs more memory than there is: what the allocator says, what the step holds.

XLA says how many bytes it could not get, and no more. Beside that stand the arrays that are in memory at
the peak of the step, with the user's lines, and what XLA itself plans to take. On a device that tells how
much it has and has given out, so does the error.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import jax

from onward.core.columns import columns
from onward.core.errors import OutOfMemoryError
from onward.core.program import Program
from onward.core.show import human_bytes, nbytes
from onward.develop.offload import offloaded
from onward.execute.host_memory import bytes_of_machine
from onward.execute.memory.advice import Shortage, advice
from onward.execute.memory.exhausted import EXHAUSTED
from onward.execute.memory.table import place, rows
from onward.execute.memory.use import MemoryUse

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"(?P<count>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]?)(?:i?B|\s*bytes)?\b"
_ASKED = (
    re.compile(rf"(?:allocat(?:e|ing)|reserve)(?: request for)? {_SIZE}"),
    re.compile(rf"[Uu]sed {_SIZE} of"),  # a TPU's compiler: used 21.95G of 15.48G hbm
)
_FREE = (re.compile(rf"There are {_SIZE} free"),)
_LIMIT = (re.compile(rf"[Uu]sed \S+ of {_SIZE}"),)
_SHOWN = 8
_WORTH_TELLING = 2**20


def said(text: str, patterns: Iterable[re.Pattern[str]] = _ASKED) -> int | None:
    """The bytes that the message of an allocator names, by default those it was asked for.

    >>> said("RESOURCE_EXHAUSTED: Out of memory allocating 2048 bytes.")
    2048
    >>> said("Attempting to reserve 1.50G at the bottom of memory. That was not possible.") == 1.5 * 2**30
    True
    """
    found = next((m for pattern in patterns if (m := pattern.search(text))), None)
    return None if found is None else int(float(found["count"]) * _UNITS[found["unit"]])


def out_of_memory(
    error: BaseException,
    program: Program,
    compiled: Any = None,
    donated: Collection[str] | None = None,
    arrays: Sequence[Any] = (),
) -> OutOfMemoryError:
    """The error to raise in place of JAX's.

    Args:
        error: what JAX raised.
        program: as it was compiled.
        compiled: the executable of JAX, if it came so far.
        donated: the names of the state whose buffers are reused; None: of all that changes.
        arrays: what the step was given.
    """
    message, device = str(error), _device_of(arrays)
    asked, free, limit = (said(message, patterns) for patterns in (_ASKED, _FREE, _LIMIT))
    told = _statistics(device)
    limit = told.get("bytes_limit") if limit is None else limit
    if free is None and limit is not None and "bytes_in_use" in told:
        free = limit - told["bytes_in_use"]
    if limit is None and device.platform == "cpu":
        limit = bytes_of_machine()
    others, told_others = _others(arrays, device)
    there = set(offloaded(program))
    beside = (
        () if donated is None else (v for v in program.next_state if v.name not in donated and v not in there)
    )
    is_whole = program.partition is None  # of parts nothing is known before the compiler splits them
    room = max(limit - others, 0) if limit is not None and is_whole else None
    shortage = Shortage(MemoryUse(program, tune=False), sum(map(nbytes, beside)), device.platform, room)
    parts = [
        _first(program, device, asked, free, limit),
        _held(shortage, compiled),
        told_others,
        _lost(arrays),
    ]
    found = OutOfMemoryError("\n\n".join(filter(None, parts)))
    found.program, found.asked, found.free, found.limit = program, asked, free, limit
    return found


def _first(program: Program, device: Any, asked: int | None, free: int | None, limit: int | None) -> str:
    wanted = "memory" if asked is None else human_bytes(asked)
    whose = "this machine" if device.platform == "cpu" else f"{device.device_kind}"
    has = []
    if free is not None:
        has.append(f"{human_bytes(max(free, 0))} are free")
    if limit is not None:
        has.append(f"{whose} has {human_bytes(limit)}")
    there = f"; {', '.join(has)}" if has else ""
    return f"{program.name} does not fit in memory ({EXHAUSTED}): XLA asked for {wanted} on {device}{there}."


def _held(found: Shortage, compiled: Any) -> str:
    """The peak of the Program, the arrays that are there, and what to write instead."""
    use, op = found.use, found.use.peak_op
    shares = ", ".join(f"{share} {human_bytes(n)}" for share, n in use.shares.items() if n)
    replicas, mesh = use.program.replicas, use.program.partition
    holder = "it" if replicas is None or replicas.count == 1 else "each device"
    holder = holder if mesh is None else "a single device, without the mesh,"
    at = (
        ""
        if op is None
        else f", at op {use.peak_number + 1:,} of {len(use.curve):,}: {op.made_by}  {place(op)}"
    )
    lines = [f"By ow.memory {holder} holds {human_bytes(use.peak)} at the peak{at}", shares]
    table = columns(rows(use.held, use.names, _SHOWN), right=(0,))
    helps = [f"* {sentence}" for sentence in advice(found)]
    heading = ["", "To write instead:"] if helps else []
    return "\n".join([*lines, *filter(None, [_planned(compiled)]), "", table, *heading, *helps])


def _planned(compiled: Any) -> str:
    """The bytes that XLA plans to take, as it says of the compiled step."""
    plan = None if compiled is None else compiled.memory_analysis()
    if plan is None:
        return ""
    results = plan.output_size_in_bytes - plan.alias_size_in_bytes
    return (
        f"XLA's own plan: arguments {human_bytes(plan.argument_size_in_bytes)}, results beside them "
        f"{human_bytes(max(results, 0))}, temporaries {human_bytes(plan.temp_size_in_bytes)}"
    )


def _others(arrays: Sequence[Any], device: Any) -> tuple[int, str]:
    """The bytes that other arrays of this process take of the device, and a sentence about them."""
    own = {id(x) for x in arrays}
    there = [
        (_on_one(x), x)
        for x in jax.live_arrays()
        if id(x) not in own and not x.is_deleted() and device in x.sharding.device_set
    ]
    whole = sum(size for size, _ in there)
    if whole < _WORTH_TELLING:
        return whole, ""
    size, largest = max(there, key=lambda pair: pair[0])
    return whole, (
        f"Beside what the step was given, {len(there):,} arrays of this process take {human_bytes(whole)} of "
        f"{device}, the largest {human_bytes(size)} ({largest.dtype}{list(largest.shape)}).\n"
        "jax.live_arrays() lists them; del frees those that are not needed."
    )


def _lost(arrays: Sequence[Any]) -> str:
    if any(isinstance(x, jax.Array) and x.is_deleted() for x in arrays):
        return (
            "The State was given to this step and is spent. Go on from step.restore(folder), or from "
            "step.init."
        )
    return ""


def _on_one(x: jax.Array) -> int:
    """The bytes of an array on one of its devices."""
    return prod(x.sharding.shard_shape(x.shape)) * int(x.dtype.itemsize)


def _device_of(arrays: Sequence[Any]) -> Any:
    """A device of this process that the arrays lie on, or the first one."""
    here = jax.local_devices()
    for x in arrays:
        if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
            found = [device for device in here if device in x.sharding.device_set]
            if found:
                return found[0]
    return here[0]


def _statistics(device: Any) -> Mapping[str, int]:
    """The counts of the allocator of a device; empty where it keeps none."""
    try:
        return device.memory_stats() or {}
    except (AttributeError, NotImplementedError, RuntimeError):
        return {}
