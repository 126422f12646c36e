"""ScheduleFreeSGD and ScheduleFreeAdamW against the paper's equations and against optax."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.derive.optimizers.reference_b import (
    PRECISIONS,
    check,
    compare_with_peer,
    float32s,
    given,
    hundred_steps,
    run,
)

import onward as ow
from onward.derive.optimizers.schedule_free import ScheduleFreeAdamW, ScheduleFreeSGD

RATE, BETA2, EPSILON, DECAY = float32s(0.05, 0.99, 1e-6, 0.1)


def warm(step):
    """Up for ten steps, then down a little, for a rate that never changes hides how averages are weighed."""
    return jnp.where(step < 10, 0.05 * (step + 1) / 10, 0.05 - 0.0002 * (step - 10))


def rate(t):
    return float(np.float32(warm(np.int32(t - 1))))


def sequences(beta, adam, precision):
    """The points y where gradients are taken, and the averages x, both kept as the paper has them."""
    points, averages = [], []
    for w, gs in zip(*given(precision), strict=True):
        x, z, y, v, squares = w, w, w, 0.0, 0.0
        path, best = [], []
        for t, g in enumerate(gs, 1):
            v = BETA2 * v + (1 - BETA2) * g**2
            direction = g / (np.sqrt(v / (1 - BETA2**t)) + EPSILON) + DECAY * y if adam else g
            z = z - rate(t) * direction
            squares += rate(t) ** 2
            c = rate(t) ** 2 / squares
            x = (1 - c) * x + c * z
            y = (1 - beta) * z + beta * x
            path.append(y)
            best.append(x)
        points.append(path)
        averages.append(best)
    return points, averages


BETAS = [0.9, 0.5, 1.0]
HUNDRED = hundred_steps(
    {f"SGD, {beta}": ScheduleFreeSGD(warm, beta) for beta in BETAS}
    | {"AdamW": ScheduleFreeAdamW(warm, 0.9, 0.99, 1e-6, 0.1)}
)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("beta", BETAS)
def test_a_hundred_steps_of_schedule_free_sgd(beta, precision):
    points, averages = sequences(beta, False, precision)
    check(HUNDRED(precision)[f"SGD, {beta}"], points, precision, averages)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_hundred_steps_of_schedule_free_adamw(precision):
    points, averages = sequences(0.9, True, precision)
    check(HUNDRED(precision)["AdamW"], points, precision, averages)


PEERS = {
    "ScheduleFreeSGD": (ScheduleFreeSGD(0.05), optax.contrib.schedule_free_sgd(0.05)),
    "ScheduleFreeAdamW": (
        ScheduleFreeAdamW(0.05, 0.9, 0.99, 1e-6, 0.1),
        optax.contrib.schedule_free_adamw(0.05, b2=0.99, eps=1e-6, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("name", PEERS)
def test_the_same_as_optax(name):
    best, path, slots = compare_with_peer(*PEERS[name])
    average = optax.contrib.schedule_free_eval_params(slots, [w[-1] for w in path])
    for mine, theirs in zip(best, average, strict=True):
        np.testing.assert_allclose(mine[-1], theirs, rtol=2e-5, atol=2e-5)


def test_with_one_rate_the_average_is_the_mean_of_the_steps():
    """``x`` is the mean of ``z``, and ``z`` with given gradients is plain gradient descent."""
    g = np.random.default_rng(0).normal(size=(20, 3))
    _, (best,) = run(ScheduleFreeSGD(0.1), [jnp.ones(3)], [jnp.asarray(g)])
    z = 1 - 0.1 * np.cumsum(g, axis=0)
    np.testing.assert_allclose(best[-1], z.mean(axis=0), rtol=1e-5, atol=1e-6)


def test_a_rate_of_zero_moves_nothing_and_weighs_nothing():
    rates = jnp.array([0.0, 0.0, 0.5])
    w, g = jnp.array([1.0, -2.0]), jnp.ones((3, 2))
    (moved,), (best,) = run(ScheduleFreeSGD(lambda step: rates[step]), [w], [g])
    np.testing.assert_allclose(moved, [w, w, w - 0.5], rtol=1e-6)
    np.testing.assert_allclose(best, [w, w, w - 0.5], rtol=1e-6)


def test_before_the_first_step_the_weights_are_the_first():
    optimizer, w = ScheduleFreeAdamW(), jnp.array([1.0, 2 - 1j])
    np.testing.assert_allclose(optimizer.evaluated(w, optimizer.init(w)), w, rtol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 1.5, -0.1])
def test_a_share_out_of_range(beta):
    with pytest.raises(ow.HyperparameterError, match="ScheduleFreeSGD: beta is"):
        ScheduleFreeSGD(beta=beta)
    with pytest.raises(ow.HyperparameterError, match="ScheduleFreeAdamW: beta1 is"):
        ScheduleFreeAdamW(beta1=beta)
