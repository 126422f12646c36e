"""What is watched on trainers and servers: as on one device, or refused by its name."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from tests.fleet.on_threads import trained

import onward as ow

RNG = np.random.default_rng(0)
FIRST = {"w": RNG.normal(size=(6, 2)).astype(np.float32), "b": np.ones(2, np.float32)}
BATCHES = [(RNG.normal(size=(4, 6)).astype(np.float32),) for _ in range(8)]
SEEN = {"parameters": True, "activations": "tanh", "statistics": ["norm", "mean", "max", "histogram"]}

pytestmark = pytest.mark.usefixtures("short_pauses", "graphs_made_once")


def loss(p, x):
    return jnp.mean(jnp.tanh(x @ p["w"] + p["b"]) ** 2)


@cache
def minimized(how="plain"):
    program = ow.Adam(0.1).minimize(loss, FIRST, BATCHES[0][0])
    return ow.mixed_precision(program, "float16", scale=2.0**20) if how == "float16" else program


def on_one_device(program, batches):
    """For each step that looked, what it saw."""
    step = ow.compile(program)
    _, outs = step.run(step.init(FIRST), batches)
    return list(outs.watched)


def equal(history, expected):
    assert [m.step for m in history] == [e.step for e in expected]
    for moment, found in zip(history, expected, strict=True):
        assert list(moment.seen) == list(found)
        for label, numbers in found.items():
            for name, x in numbers.items():
                y = moment.seen[label][name]
                x, y = (np.append(h.counts, h.edges) if name == "histogram" else h for h in (x, y))
                np.testing.assert_allclose(y, x, 1e-4, 1e-5, err_msg=f"{label} {name}")


@pytest.mark.parametrize(
    ("how", "mode", "devices"),
    [
        ("plain", "sync", 2),
        ("plain", "async", 1),
        ("float16", "sync", 1),
        ("plain", "local", 1),
        ("plain", "local", 2),
    ],
)
def test_one_trainer_sees_what_one_device_sees(how, mode, devices):
    program = ow.watch(minimized(how), gradients=True, updates=mode == "local", every=3, **SEEN)
    mode = ow.cluster.Local(2, ow.SGD(1.0)) if mode == "local" else mode
    run = trained(program, BATCHES, parameters=FIRST, servers=2, trainers=1, mode=mode, devices=devices)
    expected = on_one_device(program, BATCHES)
    assert len(expected) == 3 if how == "plain" else run.skipped
    equal(run.history.watched, expected)


def test_each_trainer_sees_its_own_batch_and_all_see_the_same_parameters():
    program = ow.watch(minimized(), every=1, **SEEN)
    run = trained(program, BATCHES, parameters=FIRST, servers=2)
    first, second = run.watched
    assert first is run.history.watched
    assert [m.step for m in first] == [m.step for m in second] == [1, 2, 3, 4]
    for a, b in zip(first, second, strict=True):
        assert a.seen["w"]["norm"] == b.seen["w"]["norm"]
    for t, history in enumerate((first, second)):
        h = np.tanh(BATCHES[t][0] @ FIRST["w"] + FIRST["b"])
        np.testing.assert_allclose(history[0].seen["tanh"]["mean"], h.mean(), 1e-5)


def embedding(p, i):
    return jnp.mean(p["table"][i] @ p["w"])


def tables():
    p = {"table": np.ones((50, 3), np.float32), "w": np.ones((3, 2), np.float32)}
    return ow.SGD(0.1).minimize(embedding, p, np.zeros(4, np.int32))


@pytest.mark.parametrize(
    ("program", "trainers", "text"),
    [
        (lambda: ow.watch(minimized(), updates="w"), 1, r"'update\(w\)' is watched, and what an update adds"),
        (lambda: ow.watch(minimized(), gradients="b"), 2, r"'grad\(b\)' is .* of 2 trainers are merged"),
        (lambda: ow.watch(tables(), gradients=True), 1, "of 'table' a trainer has the rows alone"),
        (lambda: ow.watch(minimized(), "next(b)"), 1, r"'next\(b\)' is watched, and neither"),
    ],
)
def test_what_no_trainer_has_is_refused_by_its_name(program, trainers, text):
    with pytest.raises(ow.GraphError, match=text):
        ow.split(program(), 2, trainers)
