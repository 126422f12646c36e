"""What is watched on trainers and servers: as on one device, or refused by its name."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from tests.fleet.on_threads import together, trained

import onward as ow

RNG = np.random.default_rng(0)
FIRST = {"w": RNG.normal(size=(6, 2)).astype(np.float32), "b": np.ones(2, np.float32)}
BATCHES = [(RNG.normal(size=(4, 6)).astype(np.float32),) for _ in range(8)]
SEEN = {"parameters": True, "activations": "tanh", "statistics": ["norm", "mean", "max", "histogram"]}

pytestmark = pytest.mark.usefixtures("short_pauses", "graphs_made_once")


def loss(p, x):
    return jnp.mean(jnp.tanh(x @ p["w"] + p["b"]) ** 2)


@cache
def minimized(how="plain", rows=4):
    program = ow.Momentum(0.1).minimize(loss, FIRST, np.concatenate([BATCHES[0][0]] * (rows // 4)))
    return ow.mixed_precision(program, "float16", scale=2.0**20) if how == "float16" else program


def on_one_device(program, batches, first=FIRST):
    """For each step that looked, what it saw."""
    step = ow.compile(program)
    _, outs = step.run(step.init(first), batches)
    return list(outs.watched)


@cache
def looking(how):
    return ow.watch(minimized(how), gradients=True, updates=True, every=3, **SEEN)


@cache
def seen_by_one_device(how):
    return on_one_device(looking(how), BATCHES)


def equal(history, expected, rtol=1e-4, atol=1e-5):
    assert [m.step for m in history] == [e.step for e in expected]
    for moment, found in zip(history, expected, strict=True):
        assert sorted(moment.seen) == sorted(found)
        for label, numbers in found.items():
            assert list(moment.seen[label]) == list(numbers)
            for name, x in numbers.items():
                y = moment.seen[label][name]
                x, y = (np.append(h.counts, h.edges) if name == "histogram" else h for h in (x, y))
                np.testing.assert_allclose(y, x, rtol, atol, err_msg=f"{label} {name}")


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
    program = looking(how)
    mode = ow.cluster.Local(2, ow.SGD(1.0)) if mode == "local" else mode
    run = trained(program, BATCHES, parameters=FIRST, servers=2, trainers=1, mode=mode, devices=devices)
    expected = seen_by_one_device(how)
    assert len(expected) == 3 if how == "plain" else run.skipped
    equal(run.history.watched, expected)


@pytest.mark.parametrize("servers", [1, 2])
def test_several_trainers_see_updates_and_merged_gradients_as_one_device_does(servers):
    """Also of the last update, after which nobody asks for parameters."""
    how = {"gradients": True, "updates": True, "statistics": ["norm", "std", "ratio"], "every": 1}
    run = trained(ow.watch(minimized(), **how), BATCHES, parameters=FIRST, servers=servers)
    expected = on_one_device(ow.watch(minimized(rows=8), **how), together(BATCHES, 2))
    assert len(expected) == 4
    for history in run.watched:
        equal(history, expected)


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
    return jnp.mean(jnp.tanh(p["table"][i]) @ p["w"])


TABLES = {"table": RNG.normal(size=(50, 3)).astype(np.float32), "w": np.ones((3, 2), np.float32)}


def tables():
    return ow.SGD(0.1).minimize(embedding, TABLES, np.zeros(4, np.int32))


def test_tables_by_rows_are_watched_on_the_servers():
    program = ow.watch(tables(), gradients=True, updates=True, parameters=True, every=1)
    batches = [(RNG.integers(0, 50, 4, dtype=np.int32),) for _ in range(3)]
    run = trained(program, batches, parameters=TABLES, servers=2, trainers=1)
    equal(run.history.watched, on_one_device(program, batches, TABLES))


def test_a_trainer_at_its_own_pace_sees_the_updates_of_its_gradients():
    """On one server; several make each other's updates in another order, so there it is refused."""
    program = ow.watch(minimized(), updates=True, every=1)
    run = trained(program, BATCHES, parameters=FIRST, servers=1, mode="async")
    steps = sorted(m.step for history in run.watched for m in history)
    assert steps == list(range(1, 9))
    assert all(m.seen["update(w)"]["norm"] > 0 for history in run.watched for m in history)
    with pytest.raises(ow.GraphError, match=r"'update\(b\)' is watched on 2 servers.*mode='sync'"):
        ow.cluster.start(program, BATCHES, parameters=FIRST, servers=2, mode="async")
