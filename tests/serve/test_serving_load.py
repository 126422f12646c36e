"""Many requests at once: none lost, none mixed up, be it reloaded or ended meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit
from urllib.request import urlopen

import numpy as np
import pytest
from benchmarks.load import Address, Sent, Tally, drive, mixed, post

import onward as ow
from onward.serve.endpoint.batcher import Batcher, Job, choose, patience
from onward.serve.endpoint.endpoint import Endpoint
from onward.serve.endpoint.metrics import Counters
from onward.serve.endpoint.plan import RequestPlan
from onward.serve.endpoint.probe import Joining
from onward.serve.endpoint.refusal import Refusal

X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")


def network() -> Any:
    return ow.layer.fc(ow.layer.fc(ow.data("x", (None, 4)), 8, act="tanh"), 3, name="head")


@pytest.fixture(scope="module")
def model() -> ow.Model:
    return ow.Model(network, seed=5)


@pytest.fixture(scope="module")
def good(model: ow.Model) -> Callable[[int], Sent]:
    expected = np.asarray(ow.Evaluator(model).forward(x=X).value)
    bodies = [json.dumps({"x": x.tolist()}).encode() for x in np.split(X, len(X))]
    sent = [
        Sent(post("/predict", body), row)
        for body, row in zip(bodies, np.split(expected, len(X)), strict=True)
    ]
    return lambda i: sent[i % len(sent)]


def address(url: str) -> Address:
    return urlsplit(url).hostname or "", urlsplit(url).port or 0


def test_garbage_among_many_requests(model: ow.Model, good: Callable[[int], Sent]) -> None:
    requests = list(mixed(good, "x", 600, 0.05))
    garbage = sum(sent.expected is None for sent in requests)
    with Endpoint(model, max_batch=16).running() as url:
        tally = drive(address(url), requests, clients=32)
        metrics = urlopen(f"{url}/metrics", timeout=30).read().decode()
    assert garbage > 10
    assert (tally.good, tally.garbage, tally.lost, tally.wrong) == (600 - garbage, garbage, 0, [])
    [batches] = re.findall(r"onward_batch_rows_count (\d+)", metrics)
    assert int(batches) < 600 - garbage  # some were joined


def test_a_wrong_answer_is_seen(model: ow.Model, good: Callable[[int], Sent]) -> None:
    wrong = Sent(good(0).data, good(1).expected)
    with Endpoint(model, max_batch=2).running() as url:
        tally = drive(address(url), [wrong, good(0), Sent(good(0).data, None)], clients=1)
    assert (tally.good, tally.garbage, len(tally.wrong)) == (1, 0, 2)


def test_reload_under_load_loses_nothing(model: ow.Model, good: Callable[[int], Sent]) -> None:
    endpoint = Endpoint(model, max_batch=8)
    reloads = 0
    with endpoint.running() as url:
        tallies: list[Tally] = []
        requests = [good(i) for i in range(1500)]
        load = threading.Thread(target=lambda: tallies.append(drive(address(url), requests, clients=16)))
        load.start()
        while load.is_alive() and reloads < 5:
            endpoint.reload(model.copy())
            reloads += 1
        load.join()
    assert reloads > 0
    assert (tallies[0].good, tallies[0].lost, tallies[0].wrong) == (1500, 0, [])


@pytest.fixture
def command(model: ow.Model, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    path = tmp_path / "trained.model"
    ow.save(model, path)
    environment = {**os.environ, "XLA_FLAGS": ""}
    arguments = [sys.executable, "-m", "onward", "serve", str(path), "--port", "0", "--max-batch", "8"]
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    yield process
    process.kill()
    process.communicate()


def test_the_command_reloads_and_ends_without_losing_what_it_accepted(
    command: subprocess.Popen[str], good: Callable[[int], Sent]
) -> None:
    assert command.stdout is not None
    said = command.stdout.readline()
    [url] = re.findall(r"trained answers at (http://127.0.0.1:\d+)  \(batches of up to 8\)", said)
    assert drive(address(url), [good(i) for i in range(40)], clients=8).good == 40
    tallies: list[Tally] = []
    requests = [good(i) for i in range(20_000)]
    load = threading.Thread(target=lambda: tallies.append(drive(address(url), requests, clients=16)))
    load.start()
    command.send_signal(signal.SIGHUP)
    until = monotonic() + 30
    while 'onward_reloads_total{result="done"} 1' not in _metrics(url) and monotonic() < until:
        sleep(0.1)
    looked = int(re.findall(r'route="/metrics",status="200"} (\d+)', _metrics(url))[0]) + 1
    command.send_signal(signal.SIGTERM)
    printed, logged = command.communicate(timeout=60)
    load.join()
    [tally] = tallies
    answered = int(re.findall(r"has ended; ([\d,]+) requests were answered", printed)[0].replace(",", ""))
    assert command.returncode == 0
    assert "the model was exchanged" in logged
    assert tally.wrong == []
    assert 0 < tally.lost < len(requests)  # those sent when it had ended
    assert answered == 40 + tally.good + looked


def _metrics(url: str) -> str:
    with urlopen(f"{url}/metrics", timeout=30) as answer:
        return answer.read().decode()


def test_a_file_that_is_none_ends_the_command_with_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "trained.model"
    path.write_bytes(b"no model")
    done = subprocess.run(
        [sys.executable, "-m", "onward", "serve", str(path)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert done.stderr.startswith(f"onward: {path} ")
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------------------- what is computed next


def jobs(model: ow.Model, *rows: int, alone: str = "", plans: int = 1) -> list[Job]:
    loop = asyncio.new_event_loop()
    ways = [RequestPlan.of(model, ()) for _ in range(plans)]
    joining = Joining((1, 2, 4, 8), alone)
    made = [
        Job(ways[i % plans], joining, {"x": X[:n]}, n, loop, loop.create_future(), arrived=10.0)
        for i, n in enumerate(rows)
    ]
    loop.close()
    return made


@pytest.mark.parametrize(
    ("rows", "options", "chosen"),
    [
        ([1, 1, 1], {}, [0, 1, 2]),
        ([5, 4, 3, 1], {}, [0, 2]),
        ([1] * 12, {}, list(range(8))),
        ([1, 1, 1], {"alone": "it mixes"}, [0]),
        ([1, 1, 1, 1], {"plans": 2}, [0, 2]),
    ],
)
def test_the_oldest_goes_first_with_what_fits(model: ow.Model, rows: Any, options: Any, chosen: Any) -> None:
    waiting = jobs(model, *rows, **options)
    assert [waiting.index(job) for job in choose(waiting)] == chosen


@pytest.mark.parametrize(
    ("rows", "options", "company", "now", "seconds"),
    [
        ([1], {}, 1, 10.0, 0.0),  # nobody else was there lately
        ([1], {}, 3, 10.5, 1.5),  # two others were
        ([1, 1, 1], {}, 3, 10.5, 0.0),  # they are back
        ([1], {}, 3, 13.0, 0.0),  # they took too long
        ([8], {}, 3, 10.0, 0.0),  # it is full
        ([1], {"alone": "it mixes"}, 3, 10.0, 0.0),
    ],
)
def test_how_long_company_is_waited_for(
    model: ow.Model, rows: Any, options: Any, company: int, now: float, seconds: float
) -> None:
    assert patience(jobs(model, *rows, **options), company, 2.0, now) == seconds


def test_a_batcher_that_is_closed_computes_what_waits_and_takes_no_more(model: ow.Model) -> None:
    async def put() -> list[Any]:
        batcher, loop = Batcher(0.0, 8, Counters()), asyncio.get_running_loop()
        plan, joining = RequestPlan.of(model, ()), Joining((1, 2, 4))
        made = [Job(plan, joining, {"x": X[i : i + 1]}, 1, loop, loop.create_future()) for i in range(5)]
        for job in made:
            batcher.put(job)
        await asyncio.to_thread(batcher.close)
        with pytest.raises(Refusal, match="The server is ending"):
            batcher.put(made[0])
        return [await job.answer for job in made]

    rows = [row for [row] in asyncio.run(put())]
    np.testing.assert_allclose(np.concatenate(rows), ow.Evaluator(model).forward(x=X[:5]).value, rtol=1e-5)
