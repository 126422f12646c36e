"""How much memory all requests in flight may take together: what bodies hold, and what they are read into.

>>> room = Room(100)
>>> with room.part() as first, room.part() as second:
...     first.need(60)
...     try:
...         second.need(50)
...     except Refusal as refusal:
...         print(refusal.status, refusal.headers)
503 {'retry-after': '1'}
>>> room.taken
0
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from onward.core.show import human_bytes
from onward.serve.endpoint.bodies import JSON
from onward.serve.endpoint.pieces import LARGE
from onward.serve.endpoint.refusal import Refusal, later

_SMALL, _LARGE, _BYTES = 32, 10, 4
"""The most memory that was measured for each byte of a body, itself among them.

Small bodies of JSON become objects of Python, of which empty lists take most; of large ones it is digits with
a comma each, for float64 (for float32 it is 6). Of npy it is 3, of npz 4.
"""


def need_of(size: int, media_type: str) -> int:
    """The bytes that a body takes until it is arrays, itself among them."""
    if media_type.partition(";")[0].strip().lower() != JSON:
        return size * _BYTES
    return _SMALL * min(size, LARGE) + _LARGE * max(0, size - LARGE)


class Room:
    """The memory that all requests may take, and how much of it is taken; used by one event loop."""

    def __init__(self, most: int) -> None:
        self.most, self.taken = most, 0

    @contextmanager
    def part(self) -> Iterator[RoomShare]:
        """The part of one request, given back at the end of the block."""
        part = RoomShare(self)
        try:
            yield part
        finally:
            part.need(0)


class RoomShare:
    """The share of one request in the memory of a Room."""

    def __init__(self, room: Room) -> None:
        self._room, self._size = room, 0

    def need(self, size: int) -> None:
        """Have this many bytes from now on, more or fewer than before.

        Raises:
            Refusal: there are not as many; now, or at all.
        """
        most, more = self._room.most, size - self._size
        if more > 0 and size > most:
            raise Refusal(413, _NEVER.format(size=human_bytes(size), most=human_bytes(most)))
        if more > 0 and self._room.taken + more > most:
            raise later(503, _NOW.format(most=human_bytes(most)))
        self._room.taken += more
        self._size = size


_NEVER = (
    "Reading this body takes {size} of memory, and all requests together may take {most}. Send fewer "
    "examples at once, or npy instead of JSON, which takes less."
)
_NOW = "The requests in flight take all of the {most} of memory that they may take together; ask again."
