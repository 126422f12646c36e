"""Functions that exchange numbers between devices themselves, against the same mathematics on one device."""

from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow

ROWS = 16
RNG = np.random.default_rng(0)
X, Y = (RNG.normal(size=(ROWS, n)).astype("float32") for n in (5, 4))
PARAMS = {
    name: RNG.normal(size=shape).astype("float32") for name, shape in {"a": (5, 3), "b": (4, 3)}.items()
}


def whole(p, x, y):
    """How well each x is told from the others' y, among all of the batch."""
    log_p = jax.nn.log_softmax(x @ p["a"] @ (y @ p["b"]).T)
    return -jnp.mean(jnp.diag(log_p))


def contrastive(p, x, y):
    """The same, of the rows of one device."""
    everyone = jax.lax.all_gather(y @ p["b"], "replicas", tiled=True)
    log_p = jax.nn.log_softmax(x @ p["a"] @ everyone.T)
    mine = jax.lax.axis_index("replicas") * len(x) + jnp.arange(len(x))
    return -jnp.mean(log_p[jnp.arange(len(x)), mine])


def trained(program, params, *data, state=None, steps=5):
    step = ow.compile(program)
    now = step.init(params, state)
    for _ in range(steps):
        now, out = step(now, *data)
    return now, out


@cache
def alone():
    return trained(ow.Momentum(0.05).minimize(whole, PARAMS, X, Y), PARAMS, X, Y)


@pytest.mark.parametrize("merge", [ow.Average(), ow.Sharded()], ids=lambda m: m.name)
@pytest.mark.parametrize("devices", [1, 4])
def test_a_contrastive_loss_gathers_from_all_devices(devices, merge):
    expected, out_1 = alone()
    program = ow.Momentum(0.05).minimize(contrastive, PARAMS, X, Y, axis_name="replicas")
    found, out = trained(ow.replicate(program, devices, merge), PARAMS, X, Y)
    np.testing.assert_allclose(out.loss, out_1.loss, 1e-5)
    for name in PARAMS:
        np.testing.assert_allclose(found[name], expected[name], 1e-4, 1e-5)


def test_until_it_is_replicated_it_runs_on_one_device():
    program = ow.Momentum(0.05).minimize(contrastive, PARAMS, X, Y, axis_name="replicas")
    assert program.replicas.count == 1
    expected, _ = alone()
    found, _ = trained(program, PARAMS, X, Y)
    np.testing.assert_allclose(found["a"], expected["a"], 1e-5, 1e-6)
    step = ow.compile(program)
    _, out = step(step.init(PARAMS), X[:6], Y[:6])
    np.testing.assert_allclose(out.loss, jax.jit(whole)(PARAMS, X[:6], Y[:6]), 1e-5)


@pytest.mark.filterwarnings("ignore:contrastive")  # each micro-batch has only its own others
def test_in_micro_batches_on_one_device():
    program = ow.SGD(0.05).minimize(contrastive, PARAMS, X, Y, axis_name="replicas")
    _, out = trained(ow.accumulate(program, 2), PARAMS, X, Y, steps=1)
    halves = [whole(PARAMS, X[i : i + ROWS // 2], Y[i : i + ROWS // 2]) for i in (0, ROWS // 2)]
    np.testing.assert_allclose(out.loss, np.mean(halves), 1e-5)


@pytest.mark.parametrize("transform", [ow.fit_memory, ow.layout, ow.partition, ow.pipeline, ow.recompute])
def test_what_is_for_the_whole_batch_refuses_an_axis_by_name(transform):
    program = ow.SGD(0.05).minimize(contrastive, PARAMS, X, Y, axis_name="replicas")
    given = {ow.partition: ({"d": 2}, {}), ow.pipeline: (2, 2), ow.layout: (2,)}.get(transform, (0.5,))
    with pytest.raises(ow.GraphError, match=r"traced with axis_name='replicas'.* Leave axis_name="):
        transform(program, *given)


class Normalized(nn.Module):
    axis: str | None = None

    @nn.compact
    def __call__(self, x):
        h = nn.BatchNorm(use_running_average=False, axis_name=self.axis)(nn.Dense(6)(x))
        return nn.Dense(4)(nn.relu(h))


def test_batch_norm_of_flax_over_all_devices():
    def loss_of(module):
        def loss(params, stats, x, y):
            variables = {"params": params, "batch_stats": stats}
            found, new = module.apply(variables, x, mutable=["batch_stats"])
            return jnp.mean((found - y) ** 2), new["batch_stats"]

        return loss

    first = jax.jit(Normalized().init)(jax.random.key(0), X)
    params, stats = first["params"], first["batch_stats"]
    alone = ow.SGD(0.1).minimize(loss_of(Normalized()), params, X, Y, state=stats)
    many = ow.SGD(0.1).minimize(loss_of(Normalized("batch")), params, X, Y, state=stats, axis_name="batch")
    many = ow.replicate(many, 4)
    assert many.replicas.name == "batch"
    expected, out_1 = trained(alone, params, X, Y, state=stats)
    found, out = trained(many, params, X, Y, state=stats)
    np.testing.assert_allclose(out.loss, out_1.loss, 1e-5)
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], 1e-4, 1e-5)


def test_an_axis_that_nobody_named():
    with pytest.raises(
        ow.TraceError, match=r"unbound axis name: replicas.*trace\(\.\.\., axis_name='replicas'\)"
    ):
        ow.trace(contrastive, PARAMS, X, Y)


def test_replicated_twice():
    program = ow.replicate(ow.Adam(0.05).minimize(contrastive, PARAMS, X, Y, axis_name="replicas"), 2)
    with pytest.raises(ow.GraphError, match="replicated already, for 2 devices"):
        ow.replicate(program, 2)
