"""A replicated Program against the same Program on one device with the whole batch, and in what it shows."""

from collections import Counter
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow

ROWS = 16


@pytest.fixture(scope="module", autouse=True)
def hasty_compiler():
    """XLA without most of its optimizations: compiling is most of the time here."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


# ---------------------------------------------------------------- the networks


def inputs(shape, dtype):
    return ow.data("x", (None, *shape), dtype), ow.data("y", (None,), "int32")


def mlp(dtype):
    x, y = inputs((6,), dtype)
    return ow.layer.fc(ow.layer.fc(x, 5, act="tanh"), 3), y


def cnn(dtype):
    x, y = inputs((4, 4, 2), dtype)
    h = ow.layer.relu(ow.layer.batch_norm(ow.layer.conv(x, 3, 3, b=False)))
    return ow.layer.fc(ow.layer.pool(h, "global", kind="average"), 3), y


def transformer(dtype):
    x, y = inputs((4, 6), dtype)
    h = ow.layer.fc(x, 4)
    attend = ow.layer.attention if dtype == "float32" else in_double
    h = h + attend(ow.layer.layer_norm(h), heads=2, causal=True, b={"key": False})
    return ow.layer.fc(jnp.mean(h, axis=1), 3), y


def in_double(x, heads, causal, b):
    """Attention in the precision of x; that of JAX takes its softmax in float32."""
    q, k, v = (
        ow.layer.fc(x, x.shape[-1], b=False).reshape(*x.shape[:2], heads, -1) for _ in ("query", "key", "value")
    )
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e30) if causal else scores
    seen = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
    return ow.layer.fc(seen.reshape(x.shape), x.shape[-1])


def lstm(dtype):
    x, y = inputs((4, 6), dtype)
    _, (h, _) = ow.layer.lstm(x, 4)
    return ow.layer.fc(h, 3), y


NETWORKS = {"mlp": mlp, "cnn": cnn, "transformer": transformer, "lstm": lstm}
SHAPES = {"mlp": (6,), "cnn": (4, 4, 2), "transformer": (4, 6), "lstm": (4, 6)}
OPTIMIZERS = {
    "sgd": lambda: ow.SGD(0.05),
    "momentum": lambda: ow.Momentum(0.02),
    "adam": lambda: ow.Adam(0.01),
    "adamw": lambda: ow.AdamW(0.01),
}
MERGES = {
    "average": ow.Average(),
    "sum": ow.Sum(),
    "bucketed": ow.Bucketed(100),
    "sharded": ow.Sharded(),
}


def program_of(network, optimizer, dtype="float32", total=False):
    """The training Program: the mean of the costs, or their sum, made small so that rates stay what they are."""

    def loss():
        logits, y = NETWORKS[network](dtype)
        cost = ow.layer.cross_entropy(logits, y)
        aux = {"accuracy": ow.layer.accuracy(logits, y), "logits": logits}
        return cost * (logits.shape[0] / ROWS if total else 1), aux

    return optimizer.minimize(ow.trace(loss, has_aux=True, batch_size=ROWS))


def data_of(network, dtype="float32", rows=ROWS):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(rows, *SHAPES[network])).astype(dtype)
    return x, rng.integers(0, 3, rows).astype(np.int32)


def first_parameters(program):
    rng = np.random.default_rng(2)
    return {v.name: rng.normal(0, 0.5, v.shape).astype(v.dtype) for v in program.parameters}


def trained(program, data, steps):
    """All state and the last results, as NumPy."""
    step = ow.compile(program)
    state = step.init(first_parameters(program))
    for _ in range(steps):
        state, out = step(state, *data)
    return {name: np.asarray(state[name]) for name in state}, jax.tree.map(np.asarray, out.value)


@cache
def alone(network, optimizer, dtype, total, steps):
    """What one device makes of the whole batch."""
    program = program_of(network, OPTIMIZERS[optimizer](), dtype, total)
    return trained(program, data_of(network, dtype), steps)


# ---------------------------------------------------------------- equal to one device


def every_pair():
    """Network, optimizer, merge and number of devices such that every pair occurs: an orthogonal array."""
    product = [[0, 0, 0, 0], [0, 1, 2, 3], [0, 2, 3, 1], [0, 3, 1, 2]]  # of the field of four elements
    for a, network in enumerate(NETWORKS):
        for b, optimizer in enumerate(OPTIMIZERS):
            merge = list(MERGES)[a ^ b]
            yield network, optimizer, merge, (2, 4, 8, 8)[a ^ product[2][b]]


def test_the_table_covers_every_pair():
    rows = list(every_pair())
    columns = [NETWORKS, OPTIMIZERS, MERGES, (2, 4, 8)]
    for i, one in enumerate(columns):
        for j, other in enumerate(columns[:i]):
            assert len({(row[i], row[j]) for row in rows}) == len(one) * len(other)


@pytest.mark.parametrize(("network", "optimizer", "merge", "devices"), every_pair())
def test_fifty_steps_equal_those_of_one_device(network, optimizer, merge, devices):
    with jax.enable_x64(True):
        total = merge == "sum"
        expected, value = alone(network, optimizer, "float64", total, 50)
        program = program_of(network, OPTIMIZERS[optimizer](), "float64", total)
        data = data_of(network, "float64")
        found, results = trained(ow.replicate(program, devices, MERGES[merge]), data, 50)
        for v in program.state:
            if found[v.name].shape == expected[v.name].shape:
                np.testing.assert_allclose(found[v.name], expected[v.name], 1e-9, 1e-10, err_msg=v.name)
            else:
                assert merge == "sharded"
                assert v not in program.parameters
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-9, 1e-10), results, value)


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("network", NETWORKS)
def test_gradients_of_one_step_in_single_precision(network, merge):
    """With a rate of 1 the gradient is the way that the parameters went."""
    total, devices = merge == "sum", {"average": 8, "sum": 4, "bucketed": 2, "sharded": 8}[merge]
    program = program_of(network, ow.SGD(1.0), total=total)
    found, _ = trained(ow.replicate(program, devices, MERGES[merge]), data_of(network), 1)
    expected = gradients(network, total)
    for name, before in first_parameters(program).items():
        np.testing.assert_allclose(before - found[name], expected[name], 1e-5, 1e-6, err_msg=name)


@cache
def gradients(network, total):
    program = ow.append_backward(program_of(network, ow.SGD(1.0), total=total).recipe.origin.trace(None))
    return program


# ---------------------------------------------------------------- equal to itself
