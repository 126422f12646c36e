"""Do 32 threads with an Evaluator each serve as much as 32 threads that call one jitted function?

The network is an MLP, 784-512-10. A request is a batch of NumPy numbers; its answer is waited for. Both sides
compute with the very same parameters, and before anything is timed every thread's answer must be that of the
peer. Two more rows say what else a number may hide: the peer against itself, and a single thread.

    batch 1, 32     each thread with an Evaluator of its own, against each calling the jitted function
    one thread      the same from one thread, batch 1: what a call costs

Before the table it prints how many bytes of arrays the process holds before there are Evaluators, and when
each has run: the parameters are held once; what comes on top is the answers that the Evaluators remember.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from threading import Barrier, Thread
from time import perf_counter
from typing import Any

import jax
import numpy as np

import onward as ow
from benchmarks.harness import Row, compare

_THREADS = 32
_TARGET = 1.03
_LASTING = 0.1  # seconds that one side of a round lasts at least
_PEER = "jitted"

Request = Callable[[], Any]


def run(rounds: int | None = None, quick: bool = False) -> list[Row]:
    """A row for each batch size, the peer against itself, and one thread alone."""
    rounds = rounds or (2 if quick else 60)
    sizes = (8, 4, 2) if quick else (784, 512, 10)
    model = ow.Model(partial(network, *sizes), name="mlp")
    lasting, target = (0.0, None) if quick else (_LASTING, _TARGET)
    rows: list[Row] = []
    for batch in (1, 32):
        x = np.random.default_rng(0).normal(size=(batch, sizes[0])).astype("float32")
        ours, peer = requests_of_evaluators(model, x), requests_of_jit(model, x)
        check_agreement(ours, peer)
        case = f"batch {batch}, {_THREADS} threads"
        rows.append(_compared(case, (ours, peer), rounds, lasting, target))
        if batch == 1:
            rows.append(_compared("  the peer with itself", (peer, peer[:]), rounds, lasting))
            rows.append(_compared("  one thread", (ours[:1], peer[:1]), rounds, lasting))
    before, after = held_by_evaluators(model, x)
    print(f"\n{before:,} bytes of arrays, {after:,} once {_THREADS} Evaluators have run forward")
    return rows


def network(inputs: int, hidden: int, outputs: int) -> Any:
    """Two layers with relu between them."""
    h = ow.layer.fc(ow.data("x", (None, inputs)), hidden, act="relu", name="hidden")
    return ow.layer.fc(h, outputs, name="last")


def requests_of_evaluators(model: ow.Model, x: np.ndarray) -> list[Request]:
    """A request for each thread, to an Evaluator of its own."""

    def request(evaluator: ow.Evaluator) -> Any:
        return evaluator.forward(x=x).value

    return [partial(request, ow.Evaluator(model)) for _ in range(_THREADS)]


def requests_of_jit(model: ow.Model, x: np.ndarray) -> list[Request]:
    """The same from every thread: a call of one jitted function."""

    @jax.jit
    def predict(p: Any, x: Any) -> Any:
        h = jax.nn.relu(x @ p["hidden/w"] + p["hidden/b"])
        return h @ p["last/w"] + p["last/b"]

    parameters = model.parameters
    return [lambda: predict(parameters, x)] * _THREADS


def check_agreement(ours: Sequence[Request], peer: Sequence[Request]) -> None:
    """Raise ``AssertionError`` unless all threads, at once, get the answer of the peer."""
    answers: list[Any] = [None] * len(ours)

    def work(number: int) -> None:
        answers[number] = np.asarray(ours[number]())

    in_threads([partial(work, number) for number in range(len(ours))], 1)
    for answer in answers:
        np.testing.assert_allclose(answer, peer[0](), rtol=1e-5, atol=1e-5)


def held_by_evaluators(model: ow.Model, x: np.ndarray) -> tuple[int, int]:
    """The bytes of all arrays that are alive: without Evaluators, and with those that have run."""
    ow.Evaluator(model).forward(x=x)
    gc.collect()
    before = _held()
    evaluators = [ow.Evaluator(model) for _ in range(_THREADS)]
    for evaluator in evaluators:
        evaluator.forward(x=x)
    after = _held()
    answers = sum(evaluator.forward(x=x).value.nbytes for evaluator in evaluators)
    assert after - before <= answers, f"{after - before} bytes more, {answers} of them answers"
    return before, after


def in_threads(requests: Sequence[Request], count: int) -> float:
    """How long one request takes on average, when each thread makes ``count`` of its own at once."""
    barrier = Barrier(len(requests) + 1)

    def work(request: Request) -> None:
        barrier.wait()
        for _ in range(count):
            jax.block_until_ready(request())
        barrier.wait()

    threads = [Thread(target=work, args=(request,)) for request in requests]
    for thread in threads:
        thread.start()
    barrier.wait()
    begin = perf_counter()
    barrier.wait()
    duration = perf_counter() - begin
    for thread in threads:
        thread.join()
    return duration / (count * len(requests))


def _compared(
    name: str,
    sides: tuple[Sequence[Request], Sequence[Request]],
    rounds: int,
    lasting: float,
    target: float | None = None,
) -> Row:
    for side in sides:
        in_threads(side, 3)
    quickest = min(in_threads(side, 5) for side in sides)
    count = int(lasting / (quickest * len(sides[0]))) + 1
    ours, peer = (partial(in_threads, side, count) for side in sides)
    return compare(name, _PEER, ours, peer, rounds, target)


def _held() -> int:
    return sum(x.nbytes for x in jax.live_arrays())
