"""Trainers of several devices, moved by hand in one process, against one device with the whole batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.distribute.split.by_hand import Alone, ByHand, parts_of

import onward as ow

ROWS, STEPS = 32, 4
RNG = np.random.default_rng(0)
FIRST = {"w": RNG.normal(size=(6, 5)), "b": np.zeros(5), "v": RNG.normal(size=(5, 1))}
X, Y = RNG.normal(size=(ROWS, 6)), RNG.normal(size=(ROWS, 1))


@pytest.fixture
def double():
    with jax.enable_x64(True):
        yield


def errors(p, x, y):
    return (jnp.tanh(x @ p["w"] + p["b"]) @ p["v"] - y) ** 2


def mean(p, x, y):
    return jnp.mean(errors(p, x, y))


def total(p, x, y):
    return jnp.sum(errors(p, x, y))


def normalized(p, x, y):
    """By the statistics of the batch, with a root of a mean, and a penalty beside it."""
    h = x @ p["w"]
    h = (h - jnp.mean(h, 0)) / jnp.sqrt(jnp.var(h, 0) + 0.1) + p["b"]
    return jnp.sqrt(jnp.mean((h @ p["v"] - y) ** 2)) + 0.01 * jnp.sum(p["v"] ** 2)


CASES = {
    "8 devices each": (mean, ow.guard, ow.merge.Bucketed(64), 8, 2, 2),
    "a sum, added": (total, lambda p: ow.accumulate(p, 2), ow.Sum(), 4, 2, 1),
    "a sum, averaged": (total, ow.check_finite, ow.Average(), 4, 1, 2),
    "micro-batches": (mean, lambda p: ow.guard(ow.accumulate(p, 2)), ow.merge.Bucketed(), 8, 2, 2),
    "statistics": (normalized, lambda p: p, ow.Average(), 8, 2, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_trainers_of_several_devices_equal_one_device(case, double):
    loss, transform, merge, devices, servers, trainers = CASES[case]
    rule, rows = ow.Momentum(0.01), ROWS // trainers
    one = Alone(rule.minimize(loss, FIRST, X, Y), FIRST)
    program = transform(rule.minimize(loss, FIRST, X[:rows], Y[:rows]))
    cut = ow.split(ow.replicate(program, devices, merge), servers, trainers)
    hand = ByHand(cut, FIRST)
    batches = [dict(zip("xy", part, strict=True)) for part in parts_of((X, Y), trainers)]
    adds = loss is total
    for _ in range(STEPS):
        expected = float(one.step(X, Y).loss)
        found = hand.step(batches, np.ones(trainers) if adds else None)
        losses = [own[0] for own in found]
        np.testing.assert_allclose(np.sum(losses) if adds else np.mean(losses), expected, 1e-9)
    for name, value in hand.parameters().items():
        np.testing.assert_allclose(value, one[name], 1e-9, err_msg=name)
        assert abs(value - FIRST[name]).max() > 1e-3
    assert cut.trainer["x"].shape == (rows // devices, 6)
    assert ow.plan(cut).pushed == ow.plan(ow.split(program, servers, trainers)).pushed
    assert cut.fingerprint == ow.split(program, servers, trainers).fingerprint


def test_a_loss_that_is_scaled_and_what_is_not_finite_on_one_device():
    """In float16, as one device with micro-batches of none; all devices leave out the same step."""
    first, x, y = jax.tree.map(lambda a: np.asarray(a, np.float32), (FIRST, X[:16], Y[:16]))
    program = ow.mixed_precision(ow.Momentum(0.01).minimize(mean, first, x, y), "float16", scale=2.0**4)
    spoilt = x.copy()
    spoilt[13, 2] = np.nan
    batches = [x, spoilt, x]
    one, hand = Alone(program, first), ByHand(ow.split(ow.replicate(program, 8), 2), first)
    for batch in batches:
        one.step(batch, y)
        hand.step([{"x": batch, "y": y}])
    for name, value in hand.parameters().items():
        np.testing.assert_allclose(value, one[name], 2e-2, 2e-3, err_msg=name)
    assert [int(state["skipped"]) for state in hand.states if "skipped" in state] == [1]
    assert float(hand.states[0]["loss_scale"]) == float(one["loss_scale"]) == 2.0**3


def test_a_trainer_carries_the_statistics_of_all_its_devices():
    def network():
        x, y = ow.data("x", (None, 6)), ow.data("y", (None, 1))
        h = ow.layer.batch_norm(ow.layer.fc(x, 3))
        return ow.layer.mse(ow.layer.fc(ow.layer.dropout(h, 0.0), 1), y)

    x, y = X.astype(np.float32), Y.astype(np.float32)
    program = ow.SGD(0.1).minimize(ow.trace(network, batch_size=ROWS))
    one, hand = Alone(program), ByHand(ow.split(ow.replicate(program, 8), 2))
    for _ in range(3):
        one.step(x, y)
        hand.step([{"x": x, "y": y}])
    carried = [v.name for v in hand.cut.carried]
    assert len(carried) >= 2
    for name in carried:
        found = jax.random.key_data(hand.states[0][name]) if "key" in str(one[name].dtype) else None
        if found is None:
            np.testing.assert_allclose(hand.states[0][name], one[name], 1e-5, 1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(found, jax.random.key_data(one[name]))
    for name, value in hand.parameters().items():
        np.testing.assert_allclose(value, one[name], 1e-4, 1e-5, err_msg=name)


PLAIN = ow.SGD(0.1).minimize(mean, FIRST, X, Y)
TABLE = ow.SGD(0.1).minimize(lambda w, i: jnp.mean(w[i] ** 2), np.ones((50, 2), "float32"), np.zeros(8, int))


def over(merge):
    return lambda: ow.split(ow.replicate(PLAIN, 4, merge), 2)


REFUSED = {
    "sharded": (over(ow.Sharded()), "Sharded is about what each device updates, and here the servers update"),
    "local": (over(ow.merge.LocalSGD(4)), "a trainer makes with cluster.train(mode=cluster.Local(every))"),
    "feedback": (over(ow.merge.TopK(0.5)), "TopK keeps 'grad(v)/error' on each device from step to step"),
    "feedback in buckets": (
        over(ow.merge.Bucketed(9, ow.merge.LowPrecision())),
        "Take Average(), Sum(), or one of them in Bucketed()",
    ),
    "lazy": (
        lambda: ow.split(ow.replicate(TABLE, 2), 1, lazy=["w"]),
        "lazy updates of 'w' touch the rows that were sent, and where a trainer has several devices",
    ),
    "cut first": (
        lambda: ow.replicate(ow.split(PLAIN, 2), 4),
        "A trainer on several devices is split(replicate(program, devices), servers).",
    ),
    "cut first, its trainer": (
        lambda: ow.replicate(ow.split(PLAIN, 2).trainer, 4),
        "(a trainer's: split(replicate(program, devices), servers).trainer)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    call, text = REFUSED[case]
    with pytest.raises(ow.OnwardError) as caught:
        call()
    assert text in str(caught.value)
