"""Requests over many connections that are kept, from one event loop.

It is HTTP/1.1 by hand, for it has to be light beside what it measures.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

Address = tuple[str, int]
_PATIENCE = 60.0  # seconds for which one answer is waited


@dataclass(frozen=True)
class Sent:
    """A request and what is to be answered: a row of numbers, or any status from 400 to 499.

    Attributes:
        data: all bytes of it, its head included.
        expected: the rows; None for garbage.
    """

    data: bytes
    expected: np.ndarray | None


@dataclass(frozen=True)
class Reply:
    """What came back: status, body and how long it took; status 0 for a connection that ended first."""

    sent: Sent
    status: int
    body: bytes
    seconds: float


@dataclass
class Tally:
    """What became of many requests.

    Attributes:
        seconds: from the first request to the last answer.
        good: good requests that were answered right.
        garbage: garbage that was refused with a sentence.
        wrong: what was answered otherwise, the first of them in words.
        lost: good requests without an answer.
        latencies: seconds of each.
    """

    seconds: float
    good: int = 0
    garbage: int = 0
    lost: int = 0
    wrong: list[str] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)

    def quantile(self, q: float) -> float:
        """A quantile of the latencies."""
        return float(np.quantile(self.latencies, q))


def post(path: str, body: bytes, media_type: str = "application/json", **headers: str) -> bytes:
    """The bytes of a request."""
    more = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {media_type}\r\n{more}"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


def drive(address: Address, requests: Sequence[Sent], clients: int) -> Tally:
    """Send all, over so many connections at once, and look at every answer once all are there."""
    begun = perf_counter()
    replies = asyncio.run(_drive(address, requests, clients))
    tally = Tally(perf_counter() - begun)
    for reply in replies:
        _judge(reply, tally)
    return tally


async def _drive(address: Address, requests: Sequence[Sent], clients: int) -> list[Reply]:
    supply, replies = iter(requests), []

    async def client() -> None:
        streams = None
        for sent in supply:
            begun = perf_counter()
            status, body, streams = await _asked(address, sent, streams)
            replies.append(Reply(sent, status, body, perf_counter() - begun))
        if streams is not None:
            streams[1].close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return replies


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _asked(address: Address, sent: Sent, streams: Streams | None) -> tuple[int, bytes, Streams | None]:
    """Status and body, and the connection if it is kept."""
    try:
        async with asyncio.timeout(_PATIENCE):
            streams = streams or await asyncio.open_connection(*address)
            streams[1].write(sent.data)
            head = (await streams[0].readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0])
            body = await streams[0].readexactly(length)
    except (OSError, EOFError, TimeoutError) as error:
        if streams is not None:
            streams[1].close()
        return 0, repr(error).encode(), None
    if b"connection: close" in head:
        streams[1].close()
        streams = None
    return int(head[9:12]), body, streams


def _judge(reply: Reply, tally: Tally) -> None:
    tally.latencies.append(reply.seconds)
    said = f"{reply.status} {reply.body[:200]!r}"
    if reply.sent.expected is None:
        if 400 <= reply.status < 500 and json.loads(reply.body)["error"]:
            tally.garbage += 1
        else:
            tally.wrong.append(f"{reply.sent.data[:200]!r} was answered by {said}")
    elif reply.status == 0:
        tally.lost += 1
    elif reply.status == 200 and _is_right(reply.body, reply.sent.expected):
        tally.good += 1
    else:
        tally.wrong.append(said)


def _is_right(body: bytes, expected: np.ndarray) -> bool:
    [found] = json.loads(body)["outputs"].values()
    return np.shape(found) == expected.shape and np.allclose(found, expected, rtol=1e-3, atol=1e-3)


def mixed(
    good: Callable[[int], Sent], name: str, count: int, garbage: float, seed: int = 0
) -> Iterator[Sent]:
    """Many good requests with some garbage between them."""
    rubbish, draw = list(garbage_of(good(0), name)), random.Random(seed)
    for i in range(count):
        yield draw.choice(rubbish) if draw.random() < garbage else good(i)


def garbage_of(good: Sent, name: str) -> Iterator[Sent]:
    """Requests that are wrong in many ways, around one that is right and has one input of this name."""
    body = good.data.partition(b"\r\n\r\n")[2]
    quoted = json.dumps(name).encode()
    wrong_json = [
        b"",
        b"{",
        b"null",
        b"[[1, 2]]",
        b'"text"',
        b"\xff\xfe{}",
        body[:-3],
        body + b"}",
        b"[" * 100_000,
        b"{" + quoted + b":" + b"[" * 20_000,
        b"{" + quoted + b": [[NaN]]}",
        b"{" + quoted + b": [[Infinity]]}",
        b"{" + quoted + b": [[1e999]]}",
        b"{" + quoted + b": " + b"9" * 5000 + b"}",
        b"{" + quoted + b": [[" + b"9" * 400 + b"]]}",
        b"{" + quoted + b": [[1, 2], [3]]}",
        b"{" + quoted + b': [["a", "b"]]}',
        b"{" + quoted + b": [[null]]}",
        b"{" + quoted + b": []}",
        b"{" + quoted + b": {}}",
        b"{" + quoted + b": 1, " + quoted + b": 2}",
        b'{"nothing": 1}',
        b"{}",
    ]
    for wrong in wrong_json:
        yield Sent(post("/predict", wrong), None)
    magic = b"\x93NUMPY\x01\x00"
    huge = b"{'descr': '<f4', 'fortran_order': False, 'shape': (999999999, 999999999), }"
    pickled = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    for header in (huge, pickled, b"(" * 4000, b"{}", b"\x00"):
        npy = magic + len(header).to_bytes(2, "little") + header + b"\x00" * 16
        yield Sent(post("/predict", npy, "application/x-npy"), None)
    for media_type in ("application/x-npy", "application/x-npz"):
        yield Sent(post("/predict", b"PK\x03\x04" + b"\x00" * 100, media_type), None)
        yield Sent(post("/predict", b"", media_type), None)
    yield Sent(post("/predict", body, "text/plain"), None)
    yield Sent(post("/predict", body, accept="image/png"), None)
    yield Sent(post("/predict?fetch=nothing", body), None)
    yield Sent(post("/activation/no/such/layer", body), None)
    yield Sent(post("/nowhere", body), None)
    yield Sent(post("/reload", b"", authorization="Bearer guess"), None)
    yield Sent(b"DELETE /predict HTTP/1.1\r\nhost: localhost\r\ncontent-length: 0\r\n\r\n", None)
