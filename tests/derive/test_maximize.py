"""What maximizes the loss does what minimizing its negative does, alone, in a group, and wherever it runs."""

import jax.numpy as jnp
import numpy as np
import pytest
from tests.distribute.split.by_hand import ByHand

import onward as ow

PARAMS = {
    "critic": np.linspace(-1, 1, 12, dtype=np.float32).reshape(6, 2),
    "net": np.linspace(0.5, -0.5, 12, dtype=np.float32).reshape(6, 2),
}
X = np.random.default_rng(0).normal(size=(8, 6)).astype("float32")


def loss(p, x):
    return jnp.mean(jnp.tanh(x @ p["net"]) * jnp.tanh(x @ p["critic"]) + x[:, :2])


def negative(p, x):
    return -loss(p, x)


def trained(program, steps=3):
    step = ow.compile(program)
    state = step.init(PARAMS)
    for _ in range(steps):
        state, _ = step(state, X)
    return {name: np.asarray(state[name]) for name in PARAMS}


def expect_equal(found, expected, **tolerance):
    for name in PARAMS:
        np.testing.assert_allclose(found[name], expected[name], err_msg=name, **tolerance)


OPTIMIZERS = {
    "SGD": lambda **more: ow.SGD(0.1, **more),
    "decayed and clipped": lambda **more: ow.AdamW(
        0.1, 0.1, rules=[ow.L2(0.1), ow.ClipByGlobalNorm(0.05), ow.EMA(0.5)], **more
    ),
    "sends vectors elsewhere": lambda **more: ow.Muon(0.1, **more),
    "Lion": lambda **more: ow.Lion(0.1, **more),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_to_maximize_is_to_minimize_the_negative(name):
    found = trained(OPTIMIZERS[name](maximize=True).minimize(loss, PARAMS, X))
    expect_equal(found, trained(OPTIMIZERS[name]().minimize(negative, PARAMS, X)), rtol=1e-6, atol=1e-7)


def adversarial():
    return ow.Momentum(0.1, rules=[ow.L2(0.1)], groups=[ow.Group("critic", maximize=True)])


def by_hand():
    """One gradient descends, the other ascends; decay draws both to zero."""
    p = {name: value.astype(np.float64) for name, value in PARAMS.items()}
    speed = dict.fromkeys(p, 0.0)
    for _ in range(3):
        net, critic = np.tanh(X @ p["net"]), np.tanh(X @ p["critic"])
        slope = {"net": X.T @ ((1 - net**2) * critic) / 16, "critic": X.T @ (net * (1 - critic**2)) / 16}
        for name, sign in (("net", 1), ("critic", -1)):
            speed[name] = 0.9 * speed[name] + sign * slope[name] + 0.1 * p[name]
            p[name] = p[name] - 0.1 * speed[name]
    return p


def test_a_group_maximizes_while_the_others_minimize():
    expect_equal(trained(adversarial().minimize(loss, PARAMS, X)), by_hand(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("change", [lambda p: ow.replicate(p, 2), lambda p: ow.accumulate(p, 2)])
def test_it_does_so_on_devices_and_in_micro_batches(change):
    found = trained(change(adversarial().minimize(loss, PARAMS, X)))
    expect_equal(found, by_hand(), rtol=1e-5, atol=1e-6)


def test_it_does_so_on_parameter_servers():
    cut = ow.split(adversarial().minimize(loss, PARAMS, X), servers=2)
    hand = ByHand(cut, PARAMS)
    for _ in range(3):
        hand.step([{"x": X}])
    expect_equal(hand.parameters(), by_hand(), rtol=1e-5, atol=1e-6)


def test_the_plan_says_who_maximizes():
    plan = adversarial().plan(ow.trace(loss, PARAMS, X))
    assert "maximizes" in plan["critic"].by
    assert "maximizes" not in plan["net"].by


def test_a_rule_that_evaluates_the_loss_is_refused():
    with pytest.raises(ow.GraphError, match="SAM evaluates the loss to make it smaller, and 'critic' is to"):
        ow.SGD(0.1, rules=[ow.SAM(0.1)], maximize=True).minimize(loss, PARAMS, X)


def test_only_true_and_false_are_taken():
    with pytest.raises(ow.ArgumentError, match="SGD: maximize is 'yes'; expected True or False"):
        ow.SGD(0.1, maximize="yes")
