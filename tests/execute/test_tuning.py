"""What compile makes of a Program is said, can be switched off, and gives the same numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow

pytestmark = pytest.mark.usefixtures("optimized")
SIZE, DEEP = 4, 30
X = jnp.linspace(-1.0, 1.0, 2 * SIZE).reshape(2, SIZE)


def parameters(layers: int) -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {"w": jnp.asarray(rng.normal(size=(SIZE, SIZE)) / 4, jnp.float32), "b": jnp.zeros(SIZE)}
        for _ in range(layers)
    ]


def residual(layers: list[dict[str, Any]], x: jax.Array) -> jax.Array:
    for layer in layers:
        h = x - x.mean(-1, keepdims=True)
        x = x + jnp.tanh(h @ layer["w"] + layer["b"])
    return jnp.mean(x**2)


def pooled(w: jax.Array, x: jax.Array) -> jax.Array:
    largest = jax.lax.reduce_window(jnp.tanh(x * w), -jnp.inf, jax.lax.max, (1, 2), (1, 2), "VALID")
    return jnp.mean(largest**2)


@pytest.fixture(scope="module")
def deep() -> ow.Program:
    return ow.Momentum(0.01).minimize(residual, parameters(DEEP), X)


@pytest.fixture(scope="module")
def tuned(deep: ow.Program) -> ow.Step:
    return ow.compile(deep)


def test_a_deep_network_is_rolled_and_stored_in_stacks(deep: ow.Program, tuned: ow.Step) -> None:
    plan = tuned.plan()
    assert f"rolled: {DEEP} layers" in str(plan)
    assert plan.storage is not None
    assert sum(op.type == "momentum" for op in deep.ops) == 2 * DEEP
    assert sum(op.type == "momentum" for op in plan.compiled.ops) == 2
    assert not {"stack", "row", "stack_grad"} & {op.type for op in plan.compiled.ops}  # nothing is copied
    assert tuned.program is deep


def test_tuned_is_as_written(deep: ow.Program, tuned: ow.Step) -> None:
    written = ow.compile(deep, tune=False)
    assert written.storage is None
    assert written.plan().compiled is deep
    one, other = written.init(parameters(DEEP)), tuned.init(parameters(DEEP))
    for _ in range(8):
        one, expected = written(one, X)
        other, found = tuned(other, X)
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-5)
    for name in one:
        np.testing.assert_allclose(other[name], one[name], rtol=1e-4, atol=1e-6, err_msg=name)


def test_another_batch_is_rolled_too(tuned: ow.Step) -> None:
    longer = jnp.concatenate([X, X])
    state, out = tuned(tuned.init(parameters(DEEP)), longer)
    assert state.storage is tuned.storage
    np.testing.assert_allclose(out.loss, residual(parameters(DEEP), X), rtol=1e-5)


def test_what_is_fetched_decides(deep: ow.Program) -> None:
    name = next(op.outputs[0].name for op in deep.ops if op.type == "tanh")
    fetched = ow.compile(deep, fetch=[name])
    assert "rolled: " in str(fetched.plan())
    _, out = fetched(fetched.init(parameters(DEEP)), X)
    h = X - X.mean(-1, keepdims=True)
    np.testing.assert_allclose(out[name], jnp.tanh(h @ parameters(1)[0]["w"]), rtol=1e-5)

    gradient = ow.compile(deep, fetch=[f"grad({name})"], donate=False)
    assert "not rolled" in str(gradient.plan())
    _, out = gradient(gradient.init(parameters(DEEP)), X)
    assert out[f"grad({name})"].shape == (2, SIZE)


def test_forced_and_forbidden() -> None:
    few = ow.SGD(0.1).minimize(residual, parameters(4), X)
    assert "not rolled: 4 layers" in str(ow.compile(few).plan())
    assert "rolled: 4 layers" in str(ow.compile(few, roll=True).plan())
    assert "not rolled: switched off" in str(ow.compile(few, roll=False).plan())
    flat = ow.SGD(0.1).minimize(pooled, jnp.ones(SIZE), X)
    with pytest.raises(ow.GraphError, match="repeat"):
        ow.compile(flat, roll=True)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="rules for a CPU")
def test_bodies_are_exchanged() -> None:
    program = ow.SGD(0.1).minimize(pooled, jnp.ones(SIZE), X)
    step, written = ow.compile(program), ow.compile(program, tune=False)
    assert "rewritten for cpu: reduce_window_max 1, reduce_window_max_grad 1" in str(step.plan())
    state, _ = step(step.init(jnp.ones(SIZE)), X)
    expected, _ = written(written.init(jnp.ones(SIZE)), X)
    np.testing.assert_array_equal(state.parameters, expected.parameters)


def test_a_trainer_rolls(deep: ow.Program) -> None:
    trainer = ow.Trainer(ow.Model(deep, parameters(DEEP)), deep)
    losses = [float(trainer.update(X).loss) for _ in range(3)]
    assert losses[2] < losses[0]
    assert trainer.joined().storage is not None
    assert float(trainer.evaluator.forward(X).value) < losses[2]
