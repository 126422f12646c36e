"""Arrays over several processes of one computation: how each gives its part, and how all read the whole.

Each process runs the same script, and computes on its own devices. An array over devices of several is made
of what each of them gives (``part_of``), and nobody can read it alone (``gathered``). In one process all of
this is what JAX does by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from hashlib import blake2b
from itertools import compress
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from onward.core.errors import ArgumentError, PeerError
from onward.core.variable import holds_keys
from onward.execute.peers.deadline import deadline_of
from onward.execute.peers.peers import Peers
from onward.execute.peers.rendezvous import summary
from onward.execute.peers.verdict import calling

T = TypeVar("T")
STAGE = "devices of a stage"
"""The axis of the mesh of devices that a stage of a pipeline over several processes has."""

_UNEVEN = (
    "{program} {wants} {count} devices, which {processes} processes cannot share evenly. Take all {found}, "
    "or a multiple of {processes}."
)

DIFFERS = (
    "{program}: {name!r} differs from process to process. All must begin with the same values: draw them "
    "from the same seed, or load the same checkpoint."
)


def place_among_processes() -> tuple[int, int]:
    """Which process this is, and of how many; asks no device, so that JAX need not have begun."""
    if not jax.distributed.is_initialized():
        return 0, 1
    return jax.process_index(), jax.process_count()


def first_devices(program: str, wants: str, count: int) -> list[Any]:
    """So many of the first devices, equally many of each process, in the order of the processes.

    Raises:
        ArgumentError: the processes cannot share them evenly.
    """
    found, processes = jax.devices(), jax.process_count()
    each, rest = divmod(count, processes)
    if rest:
        told = {"program": program, "wants": wants, "found": len(found)}
        raise ArgumentError(_UNEVEN.format(count=count, processes=processes, **told))
    return [device for process in range(processes) for device in _of(found, process)[:each]]


def expect_all_stages(asked: str) -> None:
    """Raise ``ArgumentError`` where this process does not have the devices of all stages of a pipeline."""
    if jax.process_count() > 1:
        raise ArgumentError(
            f"{asked} compiles all stages of a pipeline, and this process has some of the devices. Ask for "
            "it in one process with as many devices; nothing is run there."
        )


def _of(devices: Iterable[Any], process: int) -> list[Any]:
    return [device for device in devices if device.process_index == process]


def part_of(value: Any, sharding: Sharding) -> Any:
    """The array of all processes, of which this one feeds its part; the same array if it is that already."""
    if isinstance(value, jax.core.Tracer) or not getattr(value, "is_fully_addressable", True):
        return value
    is_key = isinstance(value, jax.Array) and holds_keys(value.dtype)
    return jax.make_array_from_process_local_data(sharding, value if is_key else np.asarray(value))


def step_label(fingerprint: str, data: Mapping[str, Any], is_whole: Callable[[str], bool]) -> str:
    """A step in words that have to be the same in all processes: its Program, and the data that it is fed."""
    told = (f"{name} {label_of(x, is_whole(name))}" for name, x in data.items())
    return ", ".join((f"Program {fingerprint}", *told))


def label_of(value: Any, is_whole: bool) -> str:
    """The shape of data, and its numbers where each process has all of them: alike in all processes.

    >>> label_of(np.float32(0.5), True), label_of(np.arange(3), False)
    ('[] = 0.5', '[3]')
    """
    shape = str(list(value.shape))
    if not is_whole:
        return shape
    own = _numbers(value)
    return f"{shape} = {own if own.shape == value.shape == () else _digest(own, 4).hex()}"


@lru_cache(maxsize=1024)
def processes_of_a_part(sharding: Sharding, shape: tuple[int, ...]) -> set[int]:
    """How many processes have each part of an array: one number, or several where parts differ in that."""
    of: dict[str, set[int]] = {}
    device: Any
    for device, index in sharding.devices_indices_map(shape).items():
        of.setdefault(str(index), set()).add(device.process_index)
    return set(map(len, of.values()))


def is_in_all(sharding: Sharding, shape: tuple[int, ...]) -> bool:
    """Whether every process has the whole of an array."""
    return processes_of_a_part(sharding, shape) == {jax.process_count()}


def _numbers(value: Any) -> np.ndarray:
    """The numbers of an array that this process has the whole of; in a row if they lie in parts."""
    if not isinstance(value, jax.Array):
        return np.asarray(value)
    if not value.is_fully_addressable:
        parts = {str(shard.index): shard.data for shard in value.addressable_shards}
        if len(parts) > 1:
            return np.concatenate([_numbers(parts[index]).ravel() for index in sorted(parts)])
        (value,) = parts.values()
    return np.asarray(jax.random.key_data(value) if holds_keys(value.dtype) else value)


def _digest(numbers: np.ndarray, size: int) -> bytes:
    return blake2b(numbers.tobytes(), digest_size=size).digest()


def expect_alike(program: str, name: str, value: Any) -> None:
    """Raise ``ArgumentError`` for a value that processes have otherwise; all of them call this together."""
    digest = np.frombuffer(_digest(_numbers(value), 8), np.uint32)
    if np.ptp(all_call(f"the first values of {program}", lambda: _together(digest)), axis=0).any():
        raise ArgumentError(DIFFERS.format(program=program, name=name))


def put_by_all(value: Any, sharding: Sharding, differs: str) -> Any:
    """A value that all processes have alike, over their devices; where not, ``ArgumentError`` says so."""
    try:
        return jax.device_put(value, sharding)
    except AssertionError:
        raise ArgumentError(differs) from None


def lies_in_a_stage(value: Any) -> bool:
    """Whether it is of a stage of a pipeline over several processes, some of which may have none of it."""
    sharding = getattr(value, "sharding", None)
    return isinstance(sharding, NamedSharding) and STAGE in sharding.mesh.axis_names


def lies_over_processes(value: Any) -> bool:
    """Whether it is an array on devices of several processes."""
    is_array = isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    return is_array and not value.is_fully_addressable


def is_split_over_processes(value: Any) -> bool:
    """Whether no process has the whole of an array."""
    return lies_over_processes(value) and not value.is_fully_replicated


def _together(value: np.ndarray, is_sum: bool = False) -> np.ndarray:
    """The arrays of all processes, ``[processes, ...]``, or their sum, computed on one device of each.

    It has ended when it returns. ``process_allgather`` of JAX may go on with the other devices of a process,
    and a CPU mixes its data with that of the next computation over these.
    """
    mesh, run = _over_processes(is_sum)
    own = jax.device_put(value[None], mesh.devices[jax.process_index()])
    shape, apart = (mesh.size, *value.shape), NamedSharding(mesh, PartitionSpec("processes"))
    found = run(jax.make_array_from_single_device_arrays(shape, apart, [own]))
    return np.asarray(found.addressable_data(0))


@lru_cache(maxsize=2)
def _over_processes(is_sum: bool) -> tuple[Mesh, Any]:
    """The first device of each process, and what gives every one of them all arrays, or their sum."""
    mesh = Mesh([_of(jax.devices(), process)[0] for process in range(jax.process_count())], ("processes",))

    def combined(each: Any) -> Any:
        return jnp.sum(each, 0, each.dtype) if is_sum else each

    return mesh, jax.jit(combined, out_shardings=NamedSharding(mesh, PartitionSpec()))


def gathered(value: Any) -> Any:
    """The whole of an array that lies over several processes, all of which call this together."""
    if lies_in_a_stage(value):
        return _from_a_stage(value)
    if not isinstance(value, jax.Array) or value.is_fully_addressable:
        return value
    if value.is_fully_replicated:
        return value.addressable_data(0)
    sharding: Any = value.sharding
    whole = jax.device_put(value, NamedSharding(sharding.mesh, PartitionSpec()))
    return np.asarray(jax.block_until_ready(whole).addressable_data(0))


def all_call(what: str, work: Callable[[], T]) -> T:
    """Run what needs all processes, none of which waits for another longer than until the deadline.

    Args:
        what: the call in words that are the same in all processes, such as "the test of loss".
        work: what to run, as in ``Peers.run``; it makes no such call itself.

    Raises:
        PeerError: another process did not come, or is in another call or in a step.

    >>> all_call("the test of loss", lambda: 6 * 7)  # alone it only calls
    42
    """
    if jax.process_count() == 1:
        return work()
    deadline = deadline_of(None)
    try:
        peers = Peers.meet(deadline)
    except PeerError as error:
        raise PeerError(f"{error} This one waited in {what}, which needs all.") from error
    return peers.run(work, deadline, calling(what))


def reading_whole(what: str, values: Iterable[Any], work: Callable[[], T]) -> T:
    """Run what gathers arrays: all call this together, by the deadline, where one lies over the processes.

    Args:
        what: the call in words that are the same in all processes, such as "the checkpoint of step 8".
        values: the arrays.
        work: what to run.

    Raises:
        PeerError: another process did not come.
    """
    if any(is_split_over_processes(x) or lies_in_a_stage(x) for x in values):
        return all_call(what, work)
    return work()


def rows_of_all(value: Any) -> Any:
    """The rows that every process feeds, in the order of the processes; all of them call this together."""
    if not getattr(value, "is_fully_addressable", True):
        return gathered(value)
    if isinstance(value, jax.Array) and holds_keys(value.dtype):
        rows = rows_of_all(jax.random.key_data(value))
        return jax.random.wrap_key_data(rows, impl=jax.random.key_impl(value))
    own = np.asarray(value)
    return _together(own).reshape(-1, *own.shape[1:])


def _from_a_stage(value: Any) -> Any:
    """A value that all devices of a stage have, from the first process with one of them."""
    is_key = holds_keys(value.dtype)
    whole = NamedSharding(value.sharding.mesh, PartitionSpec())
    if not value.is_fully_replicated and whole.addressable_devices:
        value = jax.block_until_ready(jax.device_put(value, whole))
    owner = min(device.process_index for device in value.sharding.device_set)
    kind = jax.eval_shape(jax.random.key_data, value) if is_key else value
    is_mine = owner == jax.process_index()
    own = _numbers(value) if is_mine else np.zeros(kind.shape, kind.dtype)
    if not own.size:
        return own
    sent = own.reshape(-1).view(np.uint8)  # the very bits
    found: Any = _together(sent, is_sum=True).view(own.dtype).reshape(own.shape)
    return jax.random.wrap_key_data(found, impl=jax.random.key_impl(value)) if is_key else found


def told_by_all(what: str, work: Callable[[], bytes]) -> list[bytes]:
    """The bytes that each process makes, in the order of the processes; all of them call this together.

    One in which ``work`` raises an error tells the others, so that all are at the same place after it.

    Args:
        what: the call in words, such as "the test of loss".
        work: what to run; it may wait for no other process.

    Raises:
        PeerError: ``work`` raised an error in another process, or that does not come within the deadline.
        Exception: ``work`` raised it here.
    """
    if jax.process_count() == 1:
        return [work()]
    try:
        said = work()
    except Exception as error:
        with suppress(Exception):  # nobody hears it any more
            all_call(what, partial(_bytes_of_all, _ENDED + summary(error).encode(errors="replace")))
        raise
    found = all_call(what, partial(_bytes_of_all, _GIVEN + said))
    for process, words in enumerate(found):
        if words.startswith(_ENDED):
            raise PeerError(_ENDED_BY.format(what=what, process=process, why=words[1:].decode().rstrip(".")))
    return [words.removeprefix(_GIVEN) for words in found]


_GIVEN, _ENDED = b"+", b"-"
_ENDED_BY = (
    "An error in process {process} ended {what}, which needs all of them: {why}. Mend it there. All have "
    "left that call, and can go on together."
)


def _bytes_of_all(own: bytes) -> list[bytes]:
    """The bytes of all processes, however many each has; they travel in a length that is a power of 2."""
    lengths = _together(np.array([len(own)], np.int32)).ravel()
    size = 1 << int(lengths.max()).bit_length()
    rows = _together(np.frombuffer(own.ljust(size), np.uint8))
    return [row[:length].tobytes() for row, length in zip(rows, lengths, strict=True)]


def on_this_process(values: Sequence[Any]) -> list[Any]:
    """Arrays that every device of several processes has, as the first device of this process has them.

    Where one of them is split over the processes, all stay where they are.
    """
    shared = [isinstance(x, jax.Array) and not x.is_fully_addressable for x in values]
    if any(is_split_over_processes(x) or not x.addressable_shards for x in compress(values, shared)):
        return list(values)
    return [x.addressable_data(0) if is_shared else x for x, is_shared in zip(values, shared, strict=True)]
