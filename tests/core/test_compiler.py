"""Executables of Onward where jaxlib has faults: each program in a process of its own, without any flag."""

import os
import subprocess
import sys

import jax
import pytest

from onward.core.compiler import CURE, compiled_alone, compiler_options, is_cured_by

pytestmark = pytest.mark.usefixtures("optimized")
SUMS = """
import jax, jax.numpy as jnp, numpy as np
import onward as ow
rows = 32769
x = np.zeros((rows, 3), "float32")
x[:, 0] = np.arange(rows)

def loss(w, x):
    return jnp.mean(w) + jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2))(x)[-1]

step = ow.compile(ow.SGD(0.1).minimize(loss, jnp.zeros(2), x))
state, out = step(step.init(jnp.zeros(2)), x)
assert float(out.loss) == float(rows - 1) ** 2, float(out.loss)
print("right")
"""

RANK_SEVEN = """
import jax.numpy as jnp
import onward as ow

def loss(w, x):
    sums = jnp.sum(x[..., None, None, None, None, None] * w, axis=2)
    return jnp.max(jnp.log(jnp.maximum(sums, 1e-16)))

w, x = jnp.ones((10, 4, 6, 9, 9, 9, 9, 9)), jnp.ones((10, 4, 6))
step = ow.compile(ow.trace(loss, w, x))
_, out = step(step.init(w), x)
assert abs(float(out.loss) - 1.791759) < 1e-4, float(out.loss)
print("right")
"""


@pytest.mark.parametrize("program", [SUMS, RANK_SEVEN], ids=["sums", "rank seven"])
def test_a_step_is_right_on_every_supported_version(program):
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr[-2000:]


def test_a_flag_of_the_user_is_left_alone(monkeypatch):
    monkeypatch.setattr("onward.core.compiler.AFFECTED", True)
    jax.devices()  # made under the flag of the tests, whichever file comes first
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert [f"--{k}={v}" for k, v in compiler_options().items()] == [CURE]
    assert compiled_alone(lambda x: 2 * x)(21) == 42
    monkeypatch.setenv("XLA_FLAGS", CURE.replace("INDIVIDUAL_", ""))
    assert is_cured_by(os.environ)
    assert compiler_options() == {}


def test_a_call_makes_no_array_to_ask_where_it_is(monkeypatch):
    """Such an array costs as much as a small step, and steps that people adopt are called this way."""
    monkeypatch.setattr("onward.core.compiler.AFFECTED", True)
    monkeypatch.setattr("onward.core.compiler.compiler_options", dict)
    double = compiled_alone(lambda x: 2 * x)
    with monkeypatch.context() as patched:
        patched.setattr("onward.core.jaxprs.tracing.jnp", None)
        assert double(21) == 42


def test_an_option_is_not_given_within_a_trace(monkeypatch):
    """JAX takes none there: under a transformation alone, which traces nothing, it does."""
    monkeypatch.setattr("onward.core.compiler.AFFECTED", True)
    asked = []
    monkeypatch.setattr("onward.core.compiler.compiler_options", lambda: asked.append(1) or {})
    for within, outside in ((jax.jit, 0), (jax.vmap, 1), (lambda f: jax.jit(jax.vmap(f)), 0)):
        asked.clear()
        within(compiled_alone(lambda x: 2 * x))(jax.numpy.ones(3))
        assert len(asked) == outside
