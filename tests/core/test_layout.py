"""Which computations look at each number by itself, and the same for numbers that are laid out otherwise."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from onward.core.jaxprs.body import body_of
from onward.core.jaxprs.layout import inlined, laid_out, read_by

X = np.arange(6, dtype="float32").reshape(2, 3) - 2
TABLE = np.ones((2, 3), "float32")


def choose(x, n):
    return [jnp.where(x > 0, jax.jit(jnp.tanh)(x) / n, 0.0), jnp.zeros_like(x) + n]


BY_NUMBER = {
    "a choice": choose,
    "a rule of its own": lambda x, n: [jax.nn.relu(x) * jax.lax.rsqrt(n)],
    "fixed": lambda x, n: [jnp.full_like(x, 3)],
    "as it is": lambda x, n: [x, jnp.clip(x, -n, n)],
}
FURTHER = {
    "a sum": lambda x, n: [x - x.sum()],
    "a place": lambda x, n: [x * jnp.arange(3.0)],
    "a table": lambda x, n: [x * TABLE],
    "in another order": lambda x, n: [x[::-1]],
    "a product": lambda x, n: [x @ x.T @ x],
    "drawn": lambda x, n: [x + jax.random.normal(jax.random.key(0), x.shape)],
    "a branch": lambda x, n: [jax.lax.cond(n > 0, jnp.sin, jnp.cos, x)],
    "one number": lambda x, n: [n],
}


@pytest.mark.parametrize("name", BY_NUMBER)
def test_what_looks_at_each_number_is_the_same_in_a_row(name):
    function, n = BY_NUMBER[name], jnp.float32(2)
    row = laid_out(inlined(body_of(function, X, n)), [0], X.shape, (6,))
    for found, expected in zip(row(X.ravel(), n), function(X, n), strict=True):
        np.testing.assert_array_equal(found, np.ravel(expected))


@pytest.mark.parametrize("name", FURTHER)
def test_what_looks_further_is_told(name):
    body = inlined(body_of(FURTHER[name], X, jnp.float32(2)))
    assert laid_out(body, [0], X.shape, (6,)) is None


def test_a_number_may_become_an_array():
    body = inlined(body_of(choose, jnp.float32(1), jnp.float32(2)))
    found = laid_out(body, [0], (), (4,))(X.ravel()[:4], jnp.float32(2))
    np.testing.assert_array_equal(found[0], choose(X.ravel()[:4], jnp.float32(2))[0])
    assert found[1].tolist() == [2.0] * 4


def test_what_a_result_is_computed_of():
    body = body_of(lambda x, y, z: [x, jax.jit(jnp.multiply)(y, z), jnp.ones(2)], *[X] * 3)
    assert read_by(inlined(body)) == [0b001, 0b110, 0]
