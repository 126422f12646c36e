"""Trainers that make steps of their own between two meetings, against separate trainings and DiLoCo."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.fleet.on_threads import alone, close, together, trained

import onward as ow

EACH, EVERY = 2, 3
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(200, 3)), RNG.normal(size=(200, 2))
FIRST = {"a": RNG.normal(size=(3, 4)), "b": RNG.normal(size=(4, 2))}
SLOTLESS = ow.SGD(0.1)

pytestmark = pytest.mark.usefixtures("graphs_made_once", "short_pauses")


@pytest.fixture(autouse=True)
def double():
    """For all threads, as none of them inherits it."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def loss(w, x, y):
    return jnp.mean((jnp.tanh(x @ w["a"]) @ w["b"] - y) ** 2)


@cache
def program_of(optimizer, rows=EACH):
    types = [jax.ShapeDtypeStruct((rows, n), "float64") for n in (3, 2)]
    return optimizer.minimize(loss, FIRST, *types)


def batches_of(count, rows=EACH):
    return [(X[i : i + rows], Y[i : i + rows]) for i in range(0, rows * count, rows)]


@pytest.mark.parametrize("servers", [1, 2])
def test_one_trainer_with_the_mean_as_outer_rule_trains_as_if_alone(servers):
    batches = batches_of(8)  # the last round is shorter
    mode = ow.cluster.Local(EVERY, ow.SGD(1.0))
    program = program_of(ow.Adam(0.05))
    run = trained(program, batches, parameters=FIRST, trainers=1, servers=servers, mode=mode)
    expected, losses = alone(program, batches, FIRST)
    close(run.model, expected, FIRST, 1e-9)
    rounds = [np.mean(losses[i : i + EVERY]) for i in range(0, 8, EVERY)]
    np.testing.assert_allclose(run.history["loss"], rounds, 1e-9)
    assert list(run.history["examples"]) == [6, 6, 4]


@pytest.mark.parametrize("trainers", [2, 3])
def test_the_mean_as_outer_rule_averages_separate_trainings(trainers):
    rounds = 3
    batches = batches_of(trainers * EVERY * rounds)
    mode = ow.cluster.Local(EVERY, ow.SGD(1.0))
    program = program_of(ow.Momentum(0.05))
    run = trained(program, batches, parameters=FIRST, trainers=trainers, servers=2, mode=mode)
    step = ow.compile(program, donate=False)
    states = [step.init(FIRST) for _ in range(trainers)]
    for r in range(rounds):
        for n in range(r * EVERY, (r + 1) * EVERY):
            found = [step(state, *batches[n * trainers + t]) for t, state in enumerate(states)]
            states = [state for state, _ in found]
        mean = {name: np.mean([np.asarray(s[name]) for s in states], 0) for name in FIRST}
        states = [state.replace(mean) for state in states]
    close(run.model, mean, FIRST, 1e-9)


@pytest.mark.parametrize(
    "outer", [ow.Momentum(0.7, 0.9, nesterov=True), ow.Adam(0.05)], ids=lambda rule: type(rule).__name__
)
def test_any_outer_rule_is_what_devices_compute(outer):
    trainers, rounds = 2, 3
    batches = batches_of(trainers * EVERY * rounds)
    mode = ow.cluster.Local(EVERY, outer)
    inner = ow.Momentum(0.05)
    program = program_of(inner)
    run = trained(program, batches, parameters=FIRST, trainers=trainers, servers=2, mode=mode)
    devices = ow.replicate(
        program_of(inner, EACH * trainers), trainers, merge=ow.merge.DiLoCo(every=EVERY, outer=outer)
    )
    expected, _ = alone(devices, together(batches, trainers), FIRST)
    close(run.model, expected, FIRST, 1e-9)


def test_trainers_count_by_the_examples_of_their_round():
    batches = [(X[:1], Y[:1]), (X[1:6], Y[1:6]), (X[6:8], Y[6:8])]
    mode = ow.cluster.Local(2, ow.SGD(1.0))
    run = trained(program_of(SLOTLESS), batches, parameters=FIRST, mode=mode)
    one, _ = alone(program_of(SLOTLESS), [batches[0], batches[2]], FIRST)
    other, _ = alone(program_of(SLOTLESS), [batches[1]], FIRST)
    mean = {name: (3 * np.asarray(one[name]) + 5 * np.asarray(other[name])) / 8 for name in FIRST}
    close(run.model, mean, FIRST, 1e-9)
    assert sorted(run.history["examples"]) == [3, 5]


def test_what_a_meeting_carries_is_one_set_of_parameters():
    run = trained(program_of(SLOTLESS), batches_of(12), parameters=FIRST, mode=ow.cluster.Local(EVERY))
    assert set(run.history["sent"]) == {sum(x.nbytes for x in FIRST.values())}
    assert len(run.history["loss"]) == 4
