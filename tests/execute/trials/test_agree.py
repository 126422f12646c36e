"""Equal but for rounding: what rounding makes of a result is measured, not guessed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.execute.trials.agree import agree, rounding_of

EPS = 2.0**-23
BASE = np.linspace(1, 2, 1000, dtype="float32")
MOVED = BASE + 1e-6 * (-1) ** np.arange(1000).astype("float32")
CASES = {
    "the same": (BASE, True),
    "the last bit": (np.nextafter(BASE, 9, dtype="float32"), True),
    "as far as rounding": (BASE + np.float32(3e-6), True),
    "one number": (np.where(np.arange(1000) == 7, 0, BASE).astype("float32"), False),
    "all a little": (BASE * np.float32(1.001), False),
    "not finite": (np.where(np.arange(1000) == 7, np.nan, BASE).astype("float32"), False),
    "another shape": (BASE[:999], False),
    "another dtype": (BASE.astype("float16"), False),
}


@pytest.mark.parametrize("case", CASES)
def test_arrays(case):
    found, expected = CASES[case]
    assert agree([found], [BASE], [[MOVED]], EPS) is expected


def test_whole_numbers_and_keys_are_exact():
    assert agree([np.int32(3)], [np.int32(3)], [[np.int32(3)]], EPS)
    assert not agree([np.int32(3)], [np.int32(4)], [[np.int32(4)]], EPS)
    keys = [jax.random.key(seed) for seed in (0, 1)]
    assert agree([keys[0]], [keys[0]], [], EPS)
    assert not agree([keys[0]], [keys[1]], [], EPS)
    assert not agree([], [BASE], [[]], EPS)


def test_infinities_have_their_signs():
    both = np.array([np.inf, -np.inf, np.nan, 1.0])
    assert agree([both], [both], [[both]], EPS)
    assert not agree([-both], [both], [[both]], EPS)


def test_the_least_precise_dtype_counts():
    def loss(w, x):
        return jnp.mean((x.astype("bfloat16") @ w.astype("bfloat16")).astype("float32"))

    assert rounding_of(ow.trace(loss, jnp.ones((2, 2)), jnp.ones((2, 2)))) == 2.0**-7
    assert rounding_of(ow.trace(lambda w: w * 2, jnp.ones(2))) == EPS
    assert rounding_of(ow.trace(lambda w: w * 2, jnp.ones(2, "int32"))) == 0
