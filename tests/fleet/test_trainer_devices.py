"""Trainings whose trainers have several devices each, against one device."""

from functools import cache

import jax.numpy as jnp
import numpy as np
import pytest
from tests.fleet.on_threads import WAIT, alone, close, running, trained

import onward as ow

RNG = np.random.default_rng(0)
X, Y = (RNG.normal(size=(72, n)).astype(np.float32) for n in (5, 2))
FIRST = {"w": RNG.normal(size=(5, 2)).astype(np.float32), "b": np.zeros(2, np.float32)}
PARTS = [slice(i, i + 12) for i in range(0, 72, 12)]

pytestmark = pytest.mark.usefixtures("short_pauses", "graphs_made_once")


def loss(p, x, y):
    return jnp.mean((jnp.tanh(x @ p["w"]) + p["b"] - y) ** 2)


@cache
def minimized():
    return ow.Adam(0.05).minimize(loss, FIRST, X[:12], Y[:12])


def weighed(p, x, y, example_weight):
    errors = jnp.mean((jnp.tanh(x @ p["w"]) + p["b"] - y) ** 2, 1)
    return jnp.sum(errors * example_weight) / jnp.sum(example_weight)


@pytest.mark.parametrize("devices", [None, 5])
def test_a_batch_that_devices_do_not_divide_is_filled_up(devices):
    batches = [(X[p], Y[p], RNG.uniform(0.5, 2.0, 12).astype(np.float32)) for p in PARTS[:3]]
    batches.append((X[60:67], Y[60:67], np.ones(7, np.float32)))
    program = ow.Adam(0.05).minimize(weighed, FIRST, *batches[0])
    run = trained(program, batches, parameters=FIRST, trainers=1, devices=devices)
    expected, losses = alone(program, batches, FIRST)
    close(run.model, expected, FIRST, 1e-5, 1e-6)
    np.testing.assert_allclose(run.history["loss"], losses, 1e-5)
    assert run.history["examples"].tolist() == [12, 12, 12, 7]


def test_what_is_not_finite_is_found_in_the_whole_batch():
    program = ow.replicate(
        ow.SGD(0.1).minimize(lambda w, x: jnp.mean(jnp.log(x @ w)), np.ones(2), X[:8, :2]), 4
    )
    x = np.abs(X[:16, :2])
    x[13] = 0.0
    with running(program, [(x[:8],), (x[8:],)], parameters=np.ones(2), trainers=1) as run:  # noqa: SIM117
        with pytest.raises(
            ow.NonFiniteError, match=r"Trainer 0, batch 1 .*The loss is -inf.*\n.*log"
        ) as caught:
            run.wait(WAIT)
    assert "[5]" in str(caught.value)


def test_a_batch_that_devices_do_not_divide_is_named():
    program = minimized()
    batches = [(X[:12], Y[:12]), (X[:9], Y[:9])]
    with running(program, batches, parameters=FIRST, trainers=1, devices=4) as run:  # noqa: SIM117
        with pytest.raises(
            ow.ClusterError, match=r"Trainer 0, batch 1 .* has 9 rows \('x'\), which 4 devices"
        ):
            run.wait(WAIT)


def test_steps_of_their_own_on_several_devices():
    program, mode = minimized(), ow.cluster.Local(2)
    batches = [(X[p], Y[p]) for p in PARTS]
    one, many = (
        trained(program, batches, parameters=FIRST, trainers=1, mode=mode, devices=devices)
        for devices in (1, 4)
    )
    close(many.model, {name: one.model[name] for name in FIRST}, FIRST, 1e-5, 1e-6)


def looked_up(p, ids, y):
    return jnp.mean((p["table"][ids] @ p["w"] - y) ** 2)


def test_an_embedding_table_travels_whole_to_a_trainer_of_several_devices():
    params = {"table": RNG.normal(size=(60, 5)).astype(np.float32), "w": FIRST["w"]}
    batches = [(RNG.integers(0, 60, 12).astype(np.int32), Y[p]) for p in PARTS[:3]]
    program = ow.Adam(0.05).minimize(looked_up, params, *batches[0])
    run = trained(program, batches, parameters=params, trainers=1, servers=2, devices=2)
    close(run.model, alone(program, batches, params)[0], params, 1e-5, 1e-6)
    with pytest.raises(ow.GraphError, match=r"'table' .* where a trainer has several devices tables travel"):
        trained(program, batches, parameters=params, trainers=1, devices=2, lazy=["table"])


def test_a_folder_goes_on_with_another_number_of_devices(tmp_path):
    program = minimized()
    batches = [(X[p], Y[p]) for p in PARTS[:4]]
    for count, devices in ((2, 3), (4, 1)):
        options = {"trainers": 1, "folder": tmp_path, "devices": devices}
        run = trained(program, batches[:count], parameters=FIRST, **options)
    assert run.versions == (4,)
    assert run.history["step"].tolist() == [3, 4]
    close(run.model, alone(program, batches, FIRST)[0], FIRST, 1e-5, 1e-6)
