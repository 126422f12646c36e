"""A State that lies in few buffers is for people the same State."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compiled import compilations

import onward as ow
from onward.execute.state import copied
from onward.execute.storage import plan as planning

COUNT, SIZE = 12, 3
X = jnp.linspace(0.1, 1.0, SIZE)


@pytest.fixture(autouse=True)
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small models are packed as well here."""
    monkeypatch.setattr(planning, "LEAST", 8)
    monkeypatch.setattr(planning, "_MANY", 8)


def parameters() -> dict[str, Any]:
    return {f"w{i}": jnp.full(SIZE, 1.0 + i) for i in range(COUNT)}


def loss(ws: dict[str, Any], x: jax.Array) -> jax.Array:
    return sum((jnp.sum(w * x) ** 2 for w in ws.values()), jnp.float32(0))


@pytest.fixture(scope="module")
def step() -> ow.Step:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "LEAST", 8)
        return ow.compile(ow.Adam(0.1).minimize(loss, parameters(), X))


def test_it_is_read_as_any_other(step: ow.Step) -> None:
    state = step.init(parameters())
    assert state.storage is step.storage is not None
    assert len(state.buffers) < COUNT < len(list(state))
    np.testing.assert_array_equal(state["w7"], np.full(SIZE, 8.0))
    assert jax.tree.structure(state.parameters) == jax.tree.structure(parameters())
    np.testing.assert_array_equal(state.parameters["w3"], np.full(SIZE, 4.0))
    assert len(jax.tree.leaves(state)) == len(state.buffers)
    with pytest.raises(ow.UnknownNameError, match="w7"):
        state["w77"]


def test_a_spent_one_says_so(step: ow.Step) -> None:
    state = step.init(parameters())
    kept = state.copy()
    step(state, X)
    with pytest.raises(ow.StateError, match="step"):
        state["w1"]
    with pytest.raises(ow.StateError, match="step"):
        step(state, X)
    np.testing.assert_array_equal(kept["w1"], np.full(SIZE, 2.0))


def test_values_that_are_replaced(step: ow.Step) -> None:
    state = step.init(parameters()).replace({"learning_rate": 0.5})
    assert state.storage is step.storage
    state = state.replace({"w2": jnp.zeros(SIZE), "w2/mean": jnp.ones(SIZE)})
    np.testing.assert_array_equal(state["w2"], np.zeros(SIZE))
    compilations = step.compilations
    state, _ = step(state, X)
    assert state.storage is step.storage
    assert step.compilations == compilations
    assert float(state["w2/mean"][0]) == pytest.approx(0.9)


def test_another_step_reads_the_same_buffers(step: ow.Step) -> None:
    test = ow.compile(ow.trace(loss, parameters(), X))
    state, _ = step(step.init(parameters()), X)
    expected = sum(float(jnp.sum(w * X)) ** 2 for w in state.parameters.values())
    after, out = test(state, X)
    assert float(out.loss) == pytest.approx(expected, rel=1e-5)
    assert all(a is b for a, b in zip(after.buffers, state.buffers, strict=True))
    assert test.compilations == 2  # for what its own init returns, and for these buffers
    test(step(after, X)[0], X)
    assert test.compilations == 2


def test_part_of_it_is_changed_by_another_step(step: ow.Step) -> None:
    names = [f"w{i}" for i in range(5)]
    frozen = ow.compile(ow.SGD(0.5).minimize(loss, parameters(), X, parameter_list=names), donate=False)
    after, _ = frozen(step.init(parameters()), X)
    assert after.storage is step.storage
    for i in range(COUNT):
        w = np.full(SIZE, 1.0 + i)
        moved = w - 0.1 * 2 * np.sum(w * np.asarray(X)) * np.asarray(X) if i < 5 else w
        np.testing.assert_allclose(after[f"w{i}"], moved, rtol=1e-5)
    np.testing.assert_array_equal(after["w1/mean"], np.zeros(SIZE))


def test_transformations_of_jax(step: ow.Step) -> None:
    state, _ = jax.jit(step)(step.init(parameters()), X)
    expected, _ = step(step.init(parameters()), X)
    np.testing.assert_allclose(state["w5"], expected["w5"], rtol=1e-6)

    many = jax.tree.map(lambda x: jnp.stack([x, x]), step.init(parameters()))
    assert many["w5"].shape == (2, SIZE)
    many, _ = jax.vmap(step, (0, None))(many, X)
    np.testing.assert_allclose(many["w5"][1], expected["w5"], rtol=1e-6)

    swept = step.init(parameters()).sweep({"learning_rate": [0.1, 0.2]})
    swept, _ = jax.jit(jax.vmap(step, (0, None)))(swept, X)
    np.testing.assert_allclose(swept["w5"][0], expected["w5"], rtol=1e-6)
    assert not np.allclose(swept["w5"][1], expected["w5"])

    state, outs = jax.lax.scan(step, step.init(parameters()), jnp.stack([X, X]))
    assert outs.loss.shape == (2,)
    assert int(state["step"]) == 2


def test_a_trainer_keeps_it_and_shares_it_with_its_model(tmp_path: Path) -> None:
    def trainer() -> ow.Trainer:
        model = ow.Model(ow.trace(loss, parameters(), X), parameters())
        return ow.Trainer(model, ow.Adam(0.1), checkpoints=tmp_path)

    one = trainer()
    evaluator = ow.Evaluator(one.model)
    for _ in range(3):
        one.update(X)
    assert one.joined().storage is not None
    np.testing.assert_array_equal(one.model["w4"], one.joined()["w4"])
    before = float(evaluator.forward(X).value)
    assert before == pytest.approx(float(loss(one.model.parameters, X)), rel=1e-5)
    one.model.replace({"w4": np.zeros(SIZE, "float32")})
    assert float(one.update(X).loss) < before
    one.replace({"w4/mean": np.ones(SIZE, "float32")})
    np.testing.assert_array_equal(one["w4/mean"], np.ones(SIZE))
    one.checkpoint()

    other = trainer()
    other.restore()
    np.testing.assert_array_equal(other["w7"], one["w7"])
    np.testing.assert_array_equal(other["w7/variance"], one["w7/variance"])
    assert float(other.update(X).loss) == float(one.update(X).loss)


def test_plan_is_printed(step: ow.Step) -> None:
    text = str(step.plan())
    assert "w*/mean" in text
    assert f"float32[{COUNT},{SIZE}]" in text
    assert "loss: " in text


@pytest.mark.parametrize("donate", [False, True])
def test_state_that_the_model_returns_as_it_got_it(donate: bool) -> None:
    """What changes for some lengths of the batch only keeps its place among the buffers."""

    def carried(ws: dict[str, Any], state: dict[str, Any], x: jax.Array) -> Any:
        table = state["a_table"] * 2 if x.shape[0] == 2 else state["a_table"]
        return loss(ws, X) * jnp.mean(x), {"a_table": table, "b_count": state["b_count"] + 1}

    state = {"a_table": jnp.full(5000, 7.0), "b_count": jnp.arange(5000.0)}
    for first, second, expected in ((2, 4, 14.0), (4, 2, 14.0), (4, 4, 7.0)):
        program = ow.trace(carried, parameters(), jnp.ones(first), state=state)
        step = ow.compile(program, donate=donate)
        assert step.storage is not None
        after = step.init(parameters(), state)
        after, _ = step(after, jnp.ones(first))
        after, _ = step(after, jnp.ones(second))
        assert float(after.model_state["a_table"][1]) == expected
        assert float(after.model_state["b_count"][1]) == 3.0


def test_a_spent_one_gives_no_values(step: ow.Step) -> None:
    state = step.init(parameters())
    step(state, X)
    with pytest.raises(ow.StateError, match="step"):
        state.values  # noqa: B018


def test_a_copy_shares_no_memory_and_compiles_nothing() -> None:
    ones = np.ones((5, 13), np.float32)
    device, host, copies = jax.device_put(ones.copy()), ones.copy(), []
    assert compilations(lambda: copies.append(copied(device, device.dtype))) == 0
    assert compilations(lambda: copies.append(copied(host, np.float32))) == 0
    assert compilations(lambda: copies.append(copied(host.T, np.float32))) == 0
    device.delete()
    host[:] = 0
    assert all(np.array_equal(copy, like) for copy, like in zip(copies, (ones, ones, ones.T), strict=True))


@pytest.mark.parametrize(
    ("optimizer", "most"), [(ow.Adam(0.1, slot_dtype="bfloat16"), 1), (ow.optimizer.Shampoo(0.1), 1)], ids=str
)
def test_first_values_that_are_computed_are_one_program(optimizer: ow.Optimizer, most: int) -> None:
    """Of all parameters of one shape, and of every other Program that keeps the same."""
    params = {name: np.ones((72, 61), np.float32) for name in "abc"}
    for _ in range(2):
        program = optimizer.minimize(lambda p: sum(jnp.sum(p[n]) for n in "abc"), params)
        step = ow.compile(program)
        assert compilations(lambda step=step: step.init(params)) <= most
        most = 0


@pytest.mark.parametrize("replicas", [1, 2])
def test_first_values_of_one_number_compile_nothing(replicas: int) -> None:
    """Zeros, an initial accumulator, scalars; of a parameter in another order of its axes too."""
    given = np.arange(3 * 17, dtype=np.float32).reshape(17, 3).T
    x = np.ones((2, 3), "float32")
    program = ow.optimizer.Yogi(0.1).minimize(lambda w, x: jnp.mean(x @ w), given, x)
    step, states = ow.compile(ow.replicate(program, replicas)), []
    before = step.compilations
    found = compilations(lambda: states.append(step.init(given)))
    assert found == step.compilations - before  # the step itself, if that
    values = {name: np.asarray(states[0][name]) for name in states[0]}
    np.testing.assert_array_equal(values.pop("w"), given)
    found = {name: (str(x.dtype), x.shape, *np.unique(x).tolist()) for name, x in values.items()}
    assert {name: found[name] for name in ("step", "w/mean", "w/variance")} == {
        "step": ("int32", (), 0),
        "w/mean": ("float32", (3, 17), 0.0),
        "w/variance": ("float32", (3, 17), float(np.float32(1e-6))),
    }
