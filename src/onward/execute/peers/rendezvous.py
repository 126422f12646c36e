"""How the processes of ``jax.distributed`` find each other: each one's card goes to all, over all devices."""

from __future__ import annotations

import json
import os
import re
import socket
from dataclasses import dataclass
from secrets import token_hex
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from onward.core.errors import PeerError
from onward.execute.peers.background import TaskThread
from onward.execute.peers.heartbeat import Member, own_host

OF_THE_EXCHANGE = re.compile(
    "gloo|nccl|coordination ?service|connection (closed|reset|refused)|socket closed|broken pipe",
    re.IGNORECASE,
)
_NOT_MET = (
    "The {count} processes did not meet: {why}. All wait here for each other before the first step; one of "
    "them died, was stopped, or is busy for longer, such as with preparing data. Start all again; if one "
    "needs more time, set a longer deadline: onward launch --deadline 1800, or ONWARD_DEADLINE=1800."
)
_SIZE = 512  # bytes of a card


@dataclass(frozen=True)
class Meeting:
    """The members of a computation and the mailbox of one of them, after all have met.

    Args:
        index: which of the members it is.
        members: all processes, in the order of their indices.
        mailbox: its UDP socket, or None for a process alone.
        token: what only these processes know.
    """

    index: int
    members: tuple[Member, ...]
    mailbox: socket.socket | None
    token: bytes


def meet(deadline: float | None) -> Meeting:
    """Find the other processes; all call it together.

    Raises:
        PeerError: they did not come.
    """
    if jax.process_count() == 1:
        alone = Member(("127.0.0.1", 0), own_host(), os.getpid())
        return Meeting(0, (alone,), None, b"")
    near, far = _mailbox("127.0.0.1"), _mailbox(_own_address())
    cards = _exchange(_card(near, far), deadline)
    is_one_host = len({(card["host"], card["far"][0]) for card in cards}) == 1
    kept, spare, which = (near, far, "near") if is_one_host else (far, near, "far")
    spare.close()
    members = tuple(Member(tuple(card[which]), card["host"], card["pid"]) for card in cards)
    return Meeting(jax.process_index(), members, kept, cards[0]["token"].encode())


def summary(error: BaseException) -> str:
    """An error in one line."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _card(near: socket.socket, far: socket.socket) -> dict[str, Any]:
    """The card of this process: its index, host, pid, both addresses, and a token."""
    return {
        "index": jax.process_index(),
        "host": own_host(),
        "pid": os.getpid(),
        "near": near.getsockname(),
        "far": far.getsockname(),
        "token": token_hex(16),
    }


def _exchange(card: dict[str, Any], deadline: float | None) -> list[dict[str, Any]]:
    """The cards of all processes, in the order of their indices."""
    background = TaskThread("onward-meeting")
    background.begin(lambda: _gathered(json.dumps(card).encode().ljust(_SIZE)))
    done = background.result(deadline)
    if done is None:
        raise PeerError(_not_met(f"{deadline:g} s went by"))
    rows, error = done
    if error is not None and OF_THE_EXCHANGE.search(str(error)):
        raise PeerError(_not_met(summary(error))) from error
    if error is not None:
        raise error
    found = {card["index"]: card for card in (json.loads(row.tobytes()) for row in rows)}
    return [found[i] for i in range(jax.process_count())]


def _gathered(data: bytes) -> np.ndarray:
    """Gather the bytes that each device was given by its process, uint8 [devices, len(data)].

    The first collective over all devices opens their connections, for which gloo waits 30 s and no longer.
    ``live_devices`` waits as long as it takes, and here does nothing else.
    """
    with multihost_utils.live_devices(jax.devices()):
        pass
    mesh = Mesh(np.array(jax.devices()), ("devices",))
    split = PartitionSpec("devices")
    rows = np.tile(np.frombuffer(data, np.uint8), (jax.local_device_count(), 1))
    gather = jax.shard_map(
        lambda x: jax.lax.all_gather(x, "devices", tiled=True),
        mesh=mesh,
        in_specs=split,
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return np.asarray(
        jax.jit(gather)(jax.make_array_from_process_local_data(NamedSharding(mesh, split), rows))
    )


def _not_met(why: str) -> str:
    return _NOT_MET.format(count=jax.process_count(), why=why.rstrip("."))


def _mailbox(address: str) -> socket.socket:
    box = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    box.bind((address, 0))
    return box


def _own_address() -> str:
    """Where other hosts reach this one: the address that it would send from. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address that is reserved for examples
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
