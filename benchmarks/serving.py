"""What does batching bring to a server, and does it lose or mix up an answer?

One network of wide matrices, which it standardizes before it multiplies with them (Qiao et al., 2019), so
that a batch of 32 examples costs little more than one. It answers on loopback, from processes of their own:
an Endpoint, and a plain ASGI handler that parses the same JSON and calls one jitted function per request, in
the event loop (``plain``) or in a thread (``threads``). One more process sends requests over 1, 8 and 64
connections that are kept, to each side in turn, and compares every answer with its row, which NumPy computed
in double precision. A wrong answer, or one that is missing, ends the benchmark.

    1, 8, 64 clients    seconds per request, that is 1 / throughput, against each plain handler

Above the table stand what the model takes for 1 and for 32 examples, and the speed of each side.

    python -m benchmarks.serving --soak 24000     of which 1 % is garbage of many kinds
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import onward as ow
from benchmarks.harness import Row, in_turn, ratio_row
from benchmarks.load import Address, Sent, Tally, drive, mixed, post
from onward.core.extras import require
from onward.serve.endpoint.endpoint import Endpoint
from onward.serve.endpoint.server import bound

_TARGET = 0.5  # of the time that the better plain handler takes per request, at 64 clients
_CLIENTS = (1, 8, 64)
_INPUTS, _WIDTH, _LAYERS, _OUTPUTS = 64, 1024, 3, 8
_DEADLINE = 300.0
_SPAWN = multiprocessing.get_context("spawn")


def run(rounds: int | None = None, quick: bool = False) -> list[Row]:
    """A row for each number of clients and each plain handler; none without starlette and uvicorn."""
    try:
        require("uvicorn", "serve"), require("starlette", "serve")
    except ow.MissingExtraError as error:
        print(f"\n{error}")
        return []
    width, requests = (16, 24) if quick else (_WIDTH, 640)
    with TemporaryDirectory(prefix="onward-benchmark-") as folder:
        work = Work.make(Path(folder) / "work.npz", width)
        print(f"\n{costs(work)}")
        with serving(work, "onward", "plain", "threads") as urls, Clients(work) as load:
            return _measured(load, urls, rounds or (2 if quick else 7), requests, quick)


def _measured(
    load: Clients, addresses: dict[str, Address], rounds: int, requests: int, quick: bool
) -> list[Row]:
    rows: list[Row] = []
    for clients in _CLIENTS:
        tallies: dict[str, list[Tally]] = {side: [] for side in addresses}
        count = max(clients, requests if clients > 1 else requests // 4)

        def seconds(side: str, clients: int = clients, count: int = count, into: Any = tallies) -> float:
            tally = load(addresses[side], clients, count)
            assert tally.good == count, (
                f"{side}: {tally.lost} lost, {len(tally.wrong)} wrong: {tally.wrong[:1]}"
            )
            into[side].append(tally)
            return tally.seconds / count

        for side in addresses:
            seconds(side)
        times = in_turn({side: partial(seconds, side) for side in addresses}, rounds)
        print("\n".join(_line(side, clients, found[1:], count) for side, found in tallies.items()))
        for peer in ("plain", "threads"):
            target = _TARGET if clients == max(_CLIENTS) and not quick else None
            case = f"{clients} client{'s' * (clients > 1)}"
            rows.append(ratio_row(case, peer, times["onward"], times[peer], target=target))
    return rows


def _line(side: str, clients: int, tallies: list[Tally], count: int) -> str:
    speed, p50, p99 = (
        float(np.median(numbers))
        for numbers in (
            [count / tally.seconds for tally in tallies],
            [1e3 * tally.quantile(0.5) for tally in tallies],
            [1e3 * tally.quantile(0.99) for tally in tallies],
        )
    )
    return f"{clients:2} clients, {side:8} {speed:6.0f} requests/s, p50 {p50:6.2f} ms, p99 {p99:6.2f} ms"


def soak(requests: int, clients: int = 64, width: int = _WIDTH, garbage: float = 0.01) -> Tally:
    """Send many requests, some of them garbage, to an Endpoint; every good one must be answered right."""
    with TemporaryDirectory(prefix="onward-benchmark-") as folder:
        work = Work.make(Path(folder) / "work.npz", width)
        with serving(work, "onward") as urls, Clients(work) as load:
            return load(urls["onward"], clients, requests, garbage)


# ---------------------------------------------------------------------------- the model


@dataclass(frozen=True)
class Work:
    """Parameters, examples and the rows that are to be answered, in a file that all processes read."""

    path: Path

    @classmethod
    def make(cls, path: Path, width: int) -> Work:
        """Draw them, and compute the answers by NumPy in double precision."""
        draw = np.random.default_rng(0).normal
        sizes = [_INPUTS, *[width] * _LAYERS, _OUTPUTS]
        pairs = list(pairwise(sizes))
        weights = {
            f"w{i}": (draw(size=pair) / pair[0] ** 0.5).astype("float32") for i, pair in enumerate(pairs)
        }
        x = draw(size=(256, _INPUTS)).astype("float32")
        y = x.astype(float)
        for i in range(len(weights)):
            y = (np.tanh(y) if i else y) @ standardized(weights[f"w{i}"].astype(float))
        np.savez(path, x=x, y=y, **weights)
        return cls(path)

    def examples(self) -> tuple[np.ndarray, np.ndarray]:
        """Examples, and what is to be answered."""
        with np.load(self.path) as arrays:
            return arrays["x"], arrays["y"]

    def weights(self) -> dict[str, Any]:
        """The parameters by name."""
        with np.load(self.path) as arrays:
            return {name: jnp.asarray(arrays[name]) for name in arrays if name.startswith("w")}


def forward(params: dict[str, Any], x: Any) -> Any:
    """Matrix after matrix, each standardized by column, tanh between them."""
    for i in range(len(params)):
        x = (jnp.tanh(x) if i else x) @ standardized(params[f"w{i}"])
    return x


def standardized(w: Any) -> Any:
    """A matrix whose columns have the mean 0 and the length 1, of NumPy or of JAX."""
    w = w - w.mean(0)
    return w * ((w**2).sum(0) + 1e-6) ** -0.5


def costs(work: Work) -> str:
    """What one example takes, and a batch of 32, in a process that does nothing else."""
    params, (x, _) = work.weights(), work.examples()
    function = jax.jit(forward)

    def seconds(rows: int) -> float:
        begun = perf_counter()
        function(params, x[:rows]).block_until_ready()
        return perf_counter() - begun

    for rows in (1, 32):
        seconds(rows)
    times = in_turn({"1": partial(seconds, 1), "32": partial(seconds, 32)}, 21)
    one, many = (float(np.median(times[name])) for name in ("1", "32"))
    return (
        f"forward: {1e3 * one:.2f} ms for 1 example, {1e3 * many:.2f} ms for 32: {many / one:.1f} times that"
    )


# ---------------------------------------------------------------------------- the servers


def _onward(work: Work) -> Any:
    params, (x, _) = work.weights(), work.examples()
    program = ow.trace(forward, params, x[:2])
    return Endpoint(ow.Model(program, params), name="serving")


def _plain(work: Work, threads: bool) -> Any:
    """A handler that parses the same JSON and calls one jitted function per request."""
    responses, routing = require("starlette.responses", "serve"), require("starlette.routing", "serve")
    params, function = work.weights(), jax.jit(forward)
    name = _answer_name(work)

    def answer(body: bytes) -> Any:
        x = np.asarray(json.loads(body)["x"], np.float32)
        return responses.JSONResponse({"outputs": {name: np.asarray(function(params, x)).tolist()}})

    async def predict(request: Any) -> Any:
        body = await request.body()
        return await asyncio.to_thread(answer, body) if threads else answer(body)

    function(params, np.zeros((1, _INPUTS), np.float32)).block_until_ready()
    route = routing.Route("/predict", predict, methods=["POST"])
    return require("starlette.applications", "serve").Starlette(routes=[route])


def _answer_name(work: Work) -> str:
    params, (x, _) = work.weights(), work.examples()
    return ow.trace(forward, params, x[:2]).outputs[0].name


_SIDES: dict[str, Callable[[Work], Any]] = {
    "onward": _onward,
    "plain": partial(_plain, threads=False),
    "threads": partial(_plain, threads=True),
}


def _serve(side: str, work: Work, port: Any) -> None:
    uvicorn = require("uvicorn", "serve")
    listener = bound("127.0.0.1", 0)
    application = _SIDES[side](work)
    if side == "onward":
        application.warm_up()
    port.send(listener.getsockname()[1])
    config = uvicorn.Config(application, log_level="error", access_log=False)
    uvicorn.Server(config).run(sockets=[listener])


@contextmanager
def serving(work: Work, *sides: str) -> Iterator[dict[str, Address]]:
    """The addresses of servers, each in a process of its own, that end with the block."""
    processes, ports = [], {}
    try:
        for side in sides:
            ports[side], there = _SPAWN.Pipe()
            process = _SPAWN.Process(target=_serve, args=(side, work, there), daemon=True)
            process.start()
            processes.append(process)
        for side, port in ports.items():
            assert port.poll(_DEADLINE), f"{side} did not start"
        yield {side: ("127.0.0.1", port.recv()) for side, port in ports.items()}
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(30)


# ---------------------------------------------------------------------------- the clients


class Clients:
    """The process that sends requests; a call sends some and tells what became of them."""

    def __init__(self, work: Work) -> None:
        self._pipe, there = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_send, args=(work, there), daemon=True)
        self._process.start()

    def __call__(self, address: Address, clients: int, count: int, garbage: float = 0.0) -> Tally:
        self._pipe.send((address, clients, count, garbage))
        assert self._pipe.poll(_DEADLINE + count / 50), "the clients did not come to an end"
        tally: Tally = self._pipe.recv()
        return tally

    def __enter__(self) -> Clients:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.join()


def _send(work: Work, orders: Any) -> None:
    x, y = work.examples()
    bodies = [json.dumps({"x": x[i : i + 1].tolist()}).encode() for i in range(len(x))]
    good = [Sent(post("/predict", body), y[i : i + 1]) for i, body in enumerate(bodies)]
    while True:
        address, clients, count, garbage = orders.recv()
        requests = list(mixed(lambda i: good[i % len(good)], "x", count, garbage))
        orders.send(drive(address, requests, clients))


def main() -> None:
    """Measure, or send many requests with garbage among them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving")
    parser.add_argument("--soak", type=int, default=24_000, metavar="N", help="how many requests to send")
    parser.add_argument("--clients", type=int, default=64)
    chosen = parser.parse_args()
    tally = soak(chosen.soak, chosen.clients)
    print(
        f"{chosen.soak:,} requests in {tally.seconds:.1f} s: {tally.good:,} good ones answered right, "
        f"{tally.garbage:,} refused with a sentence, {tally.lost} lost, {len(tally.wrong)} answered wrong"
    )
    for said in tally.wrong[:5]:
        print(said)


if __name__ == "__main__":
    main()
