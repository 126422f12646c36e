"""Processes on Ray against one device, and that none of them outlives a training that failed."""

import os
import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.fleet.on_threads import WAIT, alone, arrays, close, together

import onward as ow

STEPS, ROWS = 50, 12
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(2 * STEPS * ROWS, 5)), RNG.normal(size=(2 * STEPS * ROWS, 2))
FIRST = {"w": RNG.normal(size=(5, 3)), "v": RNG.normal(size=(3, 2)), "b": np.zeros(2)}
BATCHES = [(X[i : i + ROWS], Y[i : i + ROWS]) for i in range(0, 2 * STEPS * ROWS, ROWS)]

pytestmark = [pytest.mark.usefixtures("ray_here")]


@pytest.fixture(autouse=True)
def double():
    """For this thread alone: servers and trainers are told."""
    with jax.enable_x64(True):
        yield


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] + params["b"] - y) ** 2)


def minimized(rows=ROWS):
    types = [jax.ShapeDtypeStruct((rows, n), np.float64) for n in (5, 2)]
    return ow.Adam(0.01).minimize(loss, FIRST, *types)


def clipped(trainers):
    rule = ow.Adam(0.01, rules=[ow.ClipByGlobalNorm(0.05)])
    return rule.minimize(loss, FIRST, X[: trainers * ROWS], Y[: trainers * ROWS])


def test_fifty_rounds_equal_fifty_steps_of_one_device():
    """With a norm of two servers, what is watched, and twelve devices each, where the tests have eight."""
    program = ow.watch(clipped(1), parameters="w", statistics="norm", every=2)
    run = ow.cluster.start(program, BATCHES, parameters=FIRST, trainers=2, servers=2, devices=12)
    assert run.snapshot()["w"].dtype == np.float64
    run.wait(WAIT)
    expected, _ = alone(clipped(2), together(BATCHES, 2), FIRST)
    close(run.model, expected, FIRST, 1e-9)
    traffic = ow.plan(ow.split(program, 2, 2))
    assert set(run.history["sent"]) == {traffic.pushed}
    assert set(run.history["received"]) == {traffic.pulled}
    assert len(run.history["loss"]) == len(BATCHES)
    assert [event for event in run.events if "has been starting" not in event] == []
    assert gone({s.pid for s in run.servers}, 2)
    steps, norms = run.history.watched.of("w", "norm")
    assert steps.tolist() == list(range(1, STEPS, 2))
    np.testing.assert_allclose(norms[0], np.linalg.norm(FIRST["w"]), 1e-12)
    np.testing.assert_array_equal(run.watched[1].of("w", "norm")[1], norms)


def test_an_update_of_optax_is_traced_by_each_server():
    program = ow.from_optax(optax.adamw(0.01)).minimize(loss, FIRST, X[:ROWS], Y[:ROWS])
    run = ow.cluster.train(program, BATCHES[:5], parameters=FIRST, trainers=1, servers=2, progress=False)
    close(run.model, alone(program, BATCHES[:5], FIRST)[0], FIRST, 1e-9)


def gone(pids, count):
    """Whether so many processes were there, and are no longer."""
    end = time.monotonic() + 20.0
    while any(os.path.exists(f"/proc/{pid}") for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    return len(pids - {os.getpid()}) == count and not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def raising():
    """Says which process it is, and goes wrong."""
    yield BATCHES[0]
    yield BATCHES[1]
    raise RuntimeError(f"the disk of {os.getpid()} is gone")


def test_a_reader_that_raises_ends_all_processes():
    run = ow.cluster.start(minimized(), raising, parameters=FIRST, trainers=1, mode=ow.cluster.Bounded(2))
    with pytest.raises(
        ow.ClusterError, match="reader of trainer 0 raised RuntimeError: the disk of"
    ) as raised:
        run.wait(WAIT)
    trainer = int(re.search(r"the disk of (\d+)", str(raised.value))[1])
    assert "in raising" in raised.value.__notes__[-1]
    assert gone({trainer, *(s.pid for s in run.servers)}, 2)
    assert arrays(run.model, FIRST)["w"].tobytes() == FIRST["w"].tobytes()


def holding(lock):
    return lambda: [lock] and BATCHES


def test_what_cannot_be_sent_is_named():
    expected = (
        r"trainer 0 .* cannot be sent .*: reader \(holding.*\): cannot pickle '_thread.lock' object.*open"
    )
    with pytest.raises(ow.ArgumentError, match=expected):
        ow.cluster.start(minimized(), holding(threading.Lock()), parameters=FIRST)
    open_loss = threading.Lock()

    def function(params, x, y):
        return loss(params, x, y) if open_loss else None

    program = ow.SGD(0.1).minimize(function, FIRST, *BATCHES[0])
    with pytest.raises(ow.ArgumentError, match=r"server 0 .* cannot be sent .*: function \(.*function\)"):
        ow.cluster.start(program, BATCHES, parameters=FIRST)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"trainer_options": {"num_gpu": 1}}, ow.ArgumentError, "trainer 0: Invalid option keyword num_gpu"),
        ({"server_options": {"resources": {"unicorn": 1}}}, ow.ClusterError, "server 0 asks for unicorn 1"),
    ],
)
def test_options_that_no_machine_has(options, kind, text):
    with pytest.raises(kind, match=text):
        ow.cluster.start(minimized(), BATCHES, parameters=FIRST, **options)
    with pytest.raises(ow.StateError):
        ow.cluster.snapshot()
