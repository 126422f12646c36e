"""Where the time of compiling goes: each phase is measured again, repeated scopes once."""

import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.core.errors import ArgumentError

LAYERS = 5
WS, X = [jnp.eye(4)] * LAYERS, jnp.ones((2, 4))
traces = []


def block(w, x):
    x = jnp.tanh(x @ w) * jnp.exp(-x)
    x = jnp.sin(x @ w) + jnp.exp(-x)
    return jnp.tanh(x @ w) * jnp.exp(-x)


def head(x):
    return jnp.mean(x**2)


def loss(ws, x):
    traces.append(len(ws))
    for w in ws:
        x = block(w, x)
    return head(x)


@jax.jit
def training(ws, x, rate):
    value, gradients = jax.value_and_grad(loss)(ws, x)
    return jax.tree.map(lambda w, g: w - rate * g, ws, gradients), value


def kept():
    return sorted(os.listdir(os.environ["JAX_COMPILATION_CACHE_DIR"]))


@pytest.fixture(scope="module")
def program():
    return ow.SGD(0.1).minimize(loss, WS, X)


def test_a_program_is_measured_anew(program):
    count, files = len(traces), kept()
    found = ow.compile_times(program, roll=False)
    assert len(traces) > count
    assert kept() == files
    assert [name for name, _ in found.phases] == ["trace", "derive", "tune", "lower", "XLA"]
    assert all(seconds > 0 for _, seconds in found.phases)
    assert found.seconds == pytest.approx(sum(seconds for _, seconds in found.phases))
    blocks = next(scope for scope in found.scopes if len(scope.scopes) > 1)
    assert set(blocks.scopes) >= {f"block_{i}" for i in range(1, LAYERS - 1)}
    assert blocks.xla > 0
    assert "times the same: ow.compile(program, roll=True)" in found.advice[0]
    assert max(map(len, str(found).split("\n"))) <= 100


def test_a_step_of_someone_else_and_where_its_arrays_lie():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.NamedSharding(mesh, jax.P("d"))
    found = ow.compile_times(training, WS, jax.device_put(X, rows), 0.1)
    assert [name for name, _ in found.phases] == ["trace", "lower", "XLA"]
    assert any(len(scope.scopes) >= LAYERS - 2 for scope in found.scopes)
    assert "jax.lax.scan over them" in found.advice[0]


def test_a_loop_of_python_is_named_by_its_line():
    def looped(w, x):
        for _ in range(20):
            x = jnp.sin(x)
        return jnp.sum(x) * w

    found = ow.compile_times(ow.trace(looped, 1.0, X))
    assert "stands 20 times in the step (sin): where a loop of Python runs it" in found.advice[0]
    assert found.advice[0].startswith("test_compile_times.py:")


def test_devices_and_constants():
    table = jnp.asarray(np.arange(2**18, dtype=np.float32))
    program = ow.SGD(0.1).minimize(
        lambda w, x: jnp.mean(x * w * jnp.sum(table)), jnp.ones(4), jnp.ones((8, 4))
    )
    found = ow.compile_times(ow.replicate(program, 2))
    assert found.seconds > 0
    assert "1.0 MiB of arrays are captured as constants" in " ".join(found.advice)


def test_what_is_no_step(program):
    with pytest.raises(ArgumentError, match="takes a Program, or a function"):
        ow.compile_times(3)
    with pytest.raises(ArgumentError, match="takes a Program alone"):
        ow.compile_times(program, X)
    with pytest.raises(ArgumentError, match="depth is 0"):
        ow.compile_times(program, depth=0)


@pytest.mark.parametrize("option", [{"tune": False}, {"roll": True}])
def test_a_function_takes_no_option_of_compile(option):
    with pytest.raises(
        ArgumentError, match=f"{min(option)} says how compile changes a Program, and a function"
    ):
        ow.compile_times(lambda w: w, 1.0, **option)
