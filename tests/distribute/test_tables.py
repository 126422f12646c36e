"""Sums over examples that are added by index into a table of the state, on several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow

DEVICES, CLASSES = 4, 3
RNG = np.random.default_rng(0)
W = RNG.normal(size=(4, CLASSES)).astype("float32")
TABLE = jnp.ones((CLASSES, CLASSES))
BATCHES = [
    (
        RNG.normal(size=(8, 4)).astype("float32"),
        RNG.integers(0, CLASSES, 8),
        RNG.integers(0, 3, 8).astype("float32"),
    )
    for _ in range(2)
]


def entropy(w, x, y, weight):
    return -jnp.mean(jnp.sum(jax.nn.log_softmax(x @ w) * jax.nn.one_hot(y, CLASSES), 1))


def of_table(w, x, y, weight):
    """A loss that is not linear in what examples add into parameters."""
    return jnp.sqrt(jnp.sum(w[:, 0].at[y].add(x[:, 0] * weight * w[0, 1]) ** 2)) / 4


def shared(table):
    return table / table.sum()


KEPT = {
    "added": (entropy, lambda table, y, p, weight: table.at[y, p].add(weight)),
    "added twice": (entropy, lambda table, y, p, weight: table.at[y, p].add(weight).at[p, y].add(1.0)),
    "decayed": (entropy, lambda table, y, p, weight: (0.9 * table).at[y, p].add(weight)),
    "shares": (entropy, lambda table, y, p, weight: shared(table.at[y, p].add(weight))),
    "a mean": (entropy, lambda table, y, p, weight: table.at[y, p].add(weight / len(y))),
    "a root": (entropy, lambda table, y, p, weight: jnp.sqrt(table.at[y, p].add(weight))),
    "a table of its own": (
        entropy,
        lambda table, y, p, weight: table + jnp.eye(CLASSES).at[y, p].add(weight),
    ),
    "in the loss": (of_table, lambda table, y, p, weight: table + 1),
}


def step_of(loss, keep):
    def step(w, table, x, y, weight):
        value, gradient = jax.value_and_grad(loss)(w, x, y, weight)
        return w - 0.1 * gradient, keep(table, y, (x @ w).argmax(1), weight), value

    return step


def trained(step, first):
    program = ow.adopt(step, W, first, *BATCHES[0], carried=["w", "table"])
    compiled = ow.compile(ow.replicate(program, DEVICES))
    state = compiled.init((W, first))
    for batch in BATCHES:
        state, _ = compiled(state, *batch)
    return state.parameters


def in_jax(step, first):
    carried = (W, first)
    for batch in BATCHES:
        *carried, _ = jax.jit(step)(*carried, *batch)
    return tuple(carried)


@pytest.mark.parametrize(("loss", "keep"), KEPT.values(), ids=KEPT)
def test_a_table_is_that_of_the_whole_batch(loss, keep):
    step = step_of(loss, keep)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, 2e-5), trained(step, TABLE), in_jax(step, TABLE)
    )


def test_a_table_of_whole_numbers():
    step = step_of(entropy, lambda table, y, p, weight: table.at[y, p].add(1))
    first = jnp.zeros((CLASSES, CLASSES), int)
    np.testing.assert_array_equal(trained(step, first)[1], in_jax(step, first)[1])


def test_a_place_that_counts_the_examples_of_one_device_is_warned_of():
    def loss(w, x):
        return jnp.sum(w.at[jnp.arange(len(x))].add(x[:, 0]) ** 2)

    program = ow.SGD(0.1).minimize(loss, jnp.ones(8), BATCHES[0][0])
    with pytest.warns(UserWarning, match="'scatter-add' at .* each of 4 devices sees only its own"):
        ow.replicate(program, DEVICES)
