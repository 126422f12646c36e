"""A saved model answers as the model does: same numbers, same names, any batch, without its code."""

import collections
import dataclasses
import os
import stat
import subprocess
import sys
import textwrap
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compiled import counted

import onward as ow
from onward.core.described import DescribedBody
from onward.core.jaxprs.body import body_of
from onward.core.recipe import build
from onward.execute.step import Step
from onward.serve.export import graph
from onward.serve.export.replay import Replay


def images(n, seed=0):
    return np.random.default_rng(seed).normal(size=(n, 6, 6, 1)).astype("float32")


def classifier():
    h = ow.layer.conv(ow.data("images", (None, 6, 6, 1)), 4, 3, act="relu")
    h = ow.layer.dropout(ow.layer.batch_norm(h).reshape(h.shape[0], -1), 0.5)
    return ow.layer.cross_entropy(ow.layer.fc(h, 3, name="output"), ow.data("labels", (None,), "int32"))


@pytest.fixture(scope="module")
def trained():
    model = ow.Model(classifier, seed=3, batch_size=8)
    trainer = ow.Trainer(model, ow.SGD(0.1))
    for seed in range(3):
        trainer.update(images(8, seed), np.arange(8) % 3)
    return model


@pytest.fixture(scope="module")
def saved(trained, tmp_path_factory):
    return ow.save(trained, tmp_path_factory.mktemp("model") / "trained.model", license="MIT")


@pytest.fixture(scope="module")
def loaded(saved):
    return ow.load(saved)


@pytest.fixture(scope="module")
def small():
    """One multiplication: for what is asked of files, whatever is in them."""
    return ow.Model(ow.trace(lambda w, x: w * x, jnp.float32(2), jnp.ones(2)), jnp.float32(2))


def answers(model, n):
    evaluator = ow.Evaluator(model)
    loss = evaluator.forward(images(n), np.arange(n) % 3).loss
    return np.asarray(loss), np.asarray(evaluator.activation("output"))


def test_at_the_traced_shape_answers_are_equal_to_the_bit(trained, loaded):
    for expected, found in zip(answers(trained, 8), answers(loaded, 8), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("n", [1, 5, 33])
def test_at_another_batch_size_answers_are_equal(trained, loaded, n):
    for expected, found in zip(answers(trained, n), answers(loaded, n), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_in_another_process_without_the_source(trained, saved, tmp_path):
    """No class, function or file of this test is there, nor any library but Onward's own."""
    code = f"""
        import sys
        import numpy as np, onward as ow
        model = ow.load({str(saved)!r})
        evaluator = ow.Evaluator(model)
        x = np.load("x.npy")
        evaluator.forward(images=x)
        np.save("at_8.npy", evaluator.activation("output"))
        evaluator.forward(images=x[:3])
        np.save("at_3.npy", evaluator.activation("output"))
        assert "dropout_0" in str(model.topology)
        print([m for m in ("flax", "equinox", "optax", "haiku", "sklearn", "ray") if m in sys.modules])
    """
    np.save(tmp_path / "x.npy", images(8))
    command = [sys.executable, "-I", "-c", textwrap.dedent(code)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "at_8.npy"), answers(trained, 8)[1])
    np.testing.assert_allclose(np.load(tmp_path / "at_3.npy"), answers(trained, 8)[1][:3], atol=1e-6)


def test_parameters_and_statistics_are_those_that_were_saved(trained, loaded):
    assert set(loaded.state) == {v.name for v in trained.test_program.state}
    for name in loaded.state:
        np.testing.assert_array_equal(loaded[name], trained[name])


def test_the_graph_can_be_printed_checked_costed_and_drawn(trained, loaded):
    graph = loaded.topology
    assert ow.check(graph) is graph
    assert all(isinstance(op.body, DescribedBody) for op in graph.ops)
    assert {op.scope for op in graph.ops} == {op.scope for op in trained.test_program.ops}
    expected = {op.outputs[0].name: ow.cost(op) for op in trained.test_program.ops}
    costs = {op.outputs[0].name: ow.cost(op) for op in graph.ops if op.outputs[0].name in expected}
    named = {n for n in costs if expected[n].flops and expected[n] == costs[n]}
    assert {"output/dot_general", "conv_0/conv_general_dilated"} <= named
    line = next(op.source for op in graph.ops if op.type == "conv_general_dilated")
    assert str(line).startswith("test_model_file.py:")
    assert "output" in ow.draw(graph).svg
    assert "conv_0" in str(ow.summary(graph))
    assert ow.memory(graph).peak > 0


def test_a_diff_with_what_was_traced_shows_what_free_lengths_change(trained, loaded):
    difference = str(ow.diff(trained.test_program, loaded.topology))
    assert "dim_as_value" in difference
    assert "otherwise" not in difference


def test_shapes_that_the_graph_shows_follow_the_batch(loaded):
    recipe = loaded.topology.recipe
    assert recipe is not None
    types = jax.ShapeDtypeStruct((21, 6, 6, 1), "float32"), jax.ShapeDtypeStruct((21,), "int32")
    assert build(recipe, types)["dropout_0"].shape == (21, 144)


def test_what_the_file_says_of_itself(saved, loaded):
    assert loaded.about["license"] == "MIT"
    assert loaded.about["inputs"] == ["images f32[b,6,6,1]", "labels i32[b]"]
    assert ow.load(saved, sha256=loaded.about["sha256"].upper())
    with pytest.raises(ow.ModelFileError, match="not the file that was asked for"):
        ow.load(saved, sha256="0" * 64)


def test_a_loaded_model_takes_a_checkpoint_and_other_parameters(trained, saved, tmp_path):
    model = ow.load(saved)
    model.replace({"output/b": jnp.ones(3)})
    assert not np.array_equal(answers(model, 8)[1], answers(trained, 8)[1])
    trained.save(tmp_path)
    model.restore(tmp_path)
    np.testing.assert_array_equal(answers(model, 8)[1], answers(trained, 8)[1])


def test_a_loaded_model_is_saved_again(trained, loaded, tmp_path):
    again = ow.load(ow.save(loaded, tmp_path / "again.model"))
    np.testing.assert_array_equal(answers(again, 8)[1], answers(trained, 8)[1])
    np.testing.assert_allclose(answers(again, 5)[1], answers(trained, 5)[1], atol=1e-6)


def test_what_needs_the_code_says_so(loaded):
    with pytest.raises(ow.OnwardError, match="saved without trainable=True"):
        ow.Trainer(loaded, ow.SGD(0.1))


def test_wrong_data_is_named(loaded):
    evaluator = ow.Evaluator(loaded, ["output"])
    with pytest.raises(ow.ArgumentError, match=r"takes images\[b, 6, 6, 1\]"):
        evaluator.forward(images=np.zeros((2, 5, 6, 1), "float32"))
    with pytest.raises(ow.ArgumentError, match="picture"):
        evaluator.forward(picture=images(2))


# Networks of other kinds.


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Affine:
    w: jax.Array
    b: jax.Array


def test_parameters_in_classes_of_the_user_become_dicts(tmp_path):
    def network(layers, x, scale):
        for layer in layers:
            x = jnp.tanh(x @ layer.w + layer.b)
        return {"out": x * scale["by"], "pair": (x.sum(1), None)}

    layers = [Affine(jnp.full((4, 4), 0.1), jnp.zeros(4)), Affine(jnp.eye(4), jnp.ones(4))]
    x, scale = np.ones((3, 4), "float32"), {"by": np.float32(2.0)}
    program = ow.trace(network, layers, x, scale)
    model = ow.load(ow.save(ow.Model(program, layers), tmp_path / "m"))
    assert model.parameters[1].keys() == {"b", "w"}
    found = ow.Evaluator(model).forward(x[:2], scale).value
    expected = network(layers, x[:2], scale)
    np.testing.assert_allclose(found["out"], expected["out"], atol=1e-6)
    np.testing.assert_allclose(found["pair"][0], expected["pair"][0], atol=1e-6)


def test_model_state_comes_along(tmp_path):
    def loss(w, stats, x):
        return jnp.mean((x - stats["mean"]) @ w), {"mean": stats["mean"] + 1}

    w, stats, x = jnp.ones((3, 1)), {"mean": jnp.full(3, 5.0)}, np.ones((4, 3), "float32")
    program = ow.trace(loss, w, x, state=stats)
    model = ow.load(ow.save(ow.Model(program, w, stats), tmp_path / "m"))
    assert model.state.model_state["mean"].tolist() == [5, 5, 5]
    assert float(ow.Evaluator(model).forward(x).loss) == -12


def test_loops_of_free_length(tmp_path):
    """A recurrence, free in the batch and in the time."""

    def network(w, x):
        def turn(h, now):
            h = jnp.tanh(now + h @ w)
            return h, h

        return jax.lax.scan(turn, jnp.zeros((x.shape[0], 4)), x.swapaxes(0, 1))[1].swapaxes(0, 1)

    w = jax.random.normal(jax.random.key(0), (4, 4))
    x = np.random.default_rng(0).normal(size=(3, 11, 4)).astype("float32")
    model = ow.Model(ow.trace(network, w, x[:2, :7]), w)
    found = ow.load(ow.save(model, tmp_path / "m", shapes={"x": ("b", "t", 4)}))
    assert any(op.subprograms for op in found.topology.ops)
    np.testing.assert_allclose(ow.Evaluator(found).forward(x).value, network(w, x), atol=1e-6)


def test_rare_dtypes_and_constants(tmp_path):
    table = jnp.arange(6.0).reshape(3, 2)

    def network(w, i):
        return table[i].astype(jnp.bfloat16) * w

    w = jnp.asarray([1.5, -2.0], jnp.bfloat16)
    i = np.array([2, 0], "int32")
    model = ow.load(ow.save(ow.Model(ow.trace(network, w, i), w), tmp_path / "m"))
    value = ow.Evaluator(model).forward(i).value
    assert (value.dtype, value.tolist()) == (jnp.bfloat16, [[6, -10], [0, -2]])


def needs_the_length(w, x):
    return w * x.reshape(2 if x.shape[0] % 2 == 0 else 1, -1).sum(1)


def test_a_network_that_needs_the_length_takes_those_that_are_saved(tmp_path):
    x = np.arange(4, dtype="float32")
    model = ow.Model(ow.trace(needs_the_length, jnp.float32(2), x), jnp.float32(2))
    with pytest.warns(UserWarning, match="takes batches of 4 or 1"):
        found = ow.load(ow.save(model, tmp_path / "m"))
    evaluator = ow.Evaluator(found)
    assert evaluator.forward(x).value.tolist() == [2, 10]
    assert evaluator.forward(x[3:]).value.tolist() == [6]
    with pytest.raises(ow.ArgumentError, match=r"takes x\[4\]; or x\[1\]"):
        evaluator.forward(x[:2])
    several = ow.load(ow.save(model, tmp_path / "m", batch=(2, 3)))
    assert ow.Evaluator(several).forward(x[:3]).value.tolist() == [6]


def test_a_step_that_needs_the_length_takes_the_one_it_was_trained_with(tmp_path):
    x = np.arange(4, dtype="float32")
    loss = ow.SGD(0.5).minimize(lambda w, x: needs_the_length(w, x).mean(), jnp.float32(2), x)
    step = ow.compile(loss)
    with pytest.warns(UserWarning, match=r"takes batches of 4\. "):
        loaded, state = ow.load_step(ow.save(step, tmp_path / "s", step.init(jnp.float32(2))))
    with pytest.raises(ow.ArgumentError, match=r"takes x\[4\]\. It was given x\[1\]\."):
        loaded(state, x[:1])
    state, out = loaded(state, x)
    assert (float(out.loss), float(state.parameters)) == (6, 0.5)


# A training step.


def regression(params, x, y):
    h = ow.layer.dropout(jnp.tanh(x @ params["w1"]), 0.25)
    return jnp.mean((h @ params["w2"] - y) ** 2)


@pytest.fixture(scope="module")
def stepping():
    params = {"w1": jnp.full((3, 8), 0.3), "w2": jnp.ones((8, 1))}
    x = np.random.default_rng(1).normal(size=(6, 3)).astype("float32")
    y = x.sum(1, keepdims=True)
    program = ow.Momentum(0.05, 0.9).minimize(regression, params, x, y)
    step = ow.compile(program, fetch=["grad(w1)"], tune=False)
    state, _ = step(step.init(params), x, y)
    return step, state, x, y


@pytest.fixture(scope="module")
def half(stepping, tmp_path_factory):
    """The file of the step."""
    step, state, _, _ = stepping
    return ow.save(step, tmp_path_factory.mktemp("step") / "half.model", state)


@pytest.fixture(scope="module")
def loaded_step(half):
    """The step of the file, and a State of which every test takes a copy."""
    return ow.load_step(half)


def continued(step, state, x, y):
    losses = []
    state = state.copy()
    for _ in range(4):
        state, out = step(state, x, y)
        losses.append(float(out.loss))
    return losses, state, out


def test_training_goes_on_as_if_it_had_not_been_interrupted(stepping, loaded_step):
    expected, final, last = continued(*stepping)
    other, begun = loaded_step
    losses, found, out = continued(other, begun, *stepping[2:])
    np.testing.assert_allclose(losses, expected, rtol=1e-6)
    np.testing.assert_allclose(found["w1"], final["w1"], rtol=1e-5)
    np.testing.assert_allclose(out["grad(w1)"], last["grad(w1)"], rtol=1e-4, atol=1e-7)
    assert found.parameters.keys() == {"w1", "w2"}
    assert [op.made_by for op in other.program.ops][-1] is ow.Pass.UPDATE


def test_fine_tuning_on_other_batches_with_another_learning_rate(stepping, loaded_step):
    _, _, x, y = stepping
    other, begun = loaded_step
    begun = begun.copy().replace({"learning_rate": 0.0})
    state, out = other(begun.copy(), x[:4], y[:4])
    assert np.array_equal(state["w2"], begun["w2"])
    fetching = ow.compile(other.program, fetch=["grad(w2)"])
    _, out = fetching(begun, x, y)
    assert out["grad(w2)"].shape == (8, 1)


def test_what_is_not_in_the_file_of_a_step_is_said(half, loaded_step):
    with pytest.raises(ow.ModelFileError, match=r"load_step\(path\)"):
        ow.load(half)
    other, _ = loaded_step
    with pytest.raises(ow.OnwardError, match="State"):
        other.init({"w1": jnp.zeros((3, 8)), "w2": jnp.zeros((8, 1))})


def test_micro_batches_are_a_file_for_their_batch(tmp_path):
    params, x = {"w": jnp.ones((4, 3))}, np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    program = ow.Adam(0.1).minimize(lambda p, x: jnp.mean((x @ p["w"]) ** 2), params, x)
    step = ow.compile(ow.accumulate(program, 4))
    other, state = ow.load_step(ow.save(step, tmp_path / "m", step.init(params), batch=8))
    state, _ = other(state, x)
    expected, _ = step(step.init(params), x)
    np.testing.assert_allclose(state["w"], expected["w"], atol=1e-6)


def _of_scores(w, x):
    return jnp.mean((jax.nn.softmax(jnp.sin(x @ w) @ x.T) @ x) ** 2)


def _longer_than_three(w, x):
    return jnp.mean((x @ w) ** 2) if x.shape[0] > 3 else jnp.sum(w)


@pytest.mark.parametrize(
    ("loss", "said", "of_scores"),
    [
        (lambda w, x: jnp.mean(jax.nn.logsumexp(x @ w, 1)), "has rows of any number", False),
        (_of_scores, "has rows of any number", True),
        (_longer_than_three, "inconclusive", None),
    ],
    ids=["loss head in chunks", "attention in chunks", "a comparison"],
)
def test_a_step_that_knows_its_number_of_rows_is_a_file_for_that_one(loss, said, of_scores, tmp_path):
    w = np.tile(np.eye(16, dtype="float32"), 1 if of_scores else 16)
    x = np.random.default_rng(0).normal(size=(64, 16)).astype("float32")
    program = ow.Adam(0.1).minimize(loss, w, x)
    if of_scores is not None:
        program = ow.chunk(program, 4, where=ow.graph.attention_scores(program) if of_scores else None)
    step = ow.compile(program)
    with pytest.warns(UserWarning, match=said):
        other, state = ow.load_step(ow.save(step, tmp_path / "m", step.init(w)))
    state, _ = other(state, x)
    expected, _ = step(step.init(w), x)
    np.testing.assert_allclose(state.parameters, expected.parameters, atol=1e-6)


def test_a_loaded_step_names_the_op_and_line_of_a_fault(tmp_path):
    params, x = {"w": jnp.ones((4, 3))}, np.ones((8, 4), "float32")
    program = ow.SGD(0.1).minimize(lambda p, x: jnp.mean((x @ p["w"]) ** 2), params, x)
    step = ow.compile(program, check_finite=True)
    path = ow.save(step, tmp_path / "m", step.init(params))
    other, state = ow.load_step(path)
    with pytest.raises(ow.NonFiniteError) as found:  # noqa: PT012
        state, _ = other(state, x * 1e30)
        other.expect_going(state)
    assert found.value.finding.type == "integer_pow"
    assert str(found.value.finding.source).startswith("test_model_file.py:")
    np.testing.assert_array_equal(found.value.state["w"], params["w"])


@pytest.mark.parametrize("optimizer", [ow.SGD(0.1), ow.Adam(0.1, rules=[ow.EMA(0.5)])], ids=["SGD", "Adam"])
def test_a_loaded_step_is_checked_that_was_not_before(optimizer, tmp_path):
    params, x = {"w": jnp.ones((4, 3))}, np.ones((8, 4), "float32")
    step = ow.compile(optimizer.minimize(lambda p, x: jnp.mean((x @ p["w"]) ** 2), params, x), donate=False)
    other, state = ow.load_step(ow.save(step, tmp_path / "m", step.init(params)))
    checked = ow.compile(other.program, check_finite=True, donate=False)
    moved, _ = checked(state, x)
    expected, _ = step(step.init(params), x)
    for name in expected:
        np.testing.assert_allclose(moved[name], expected[name], rtol=1e-6)
    with pytest.raises(ow.NonFiniteError) as found:  # noqa: PT012
        spoilt, _ = checked(moved, x * 1e30)
        checked.expect_going(spoilt)
    assert found.value.finding.type == "integer_pow"
    for name in expected:
        np.testing.assert_array_equal(found.value.state[name], moved[name])


@pytest.mark.parametrize(
    "optimizer",
    [ow.SGD(0.1, rules=[ow.EMA(0.9)]), ow.SGD(0.1, rules=[ow.SWA()]), ow.optimizer.ScheduleFreeSGD(0.1)],
    ids=["EMA", "SWA", "ScheduleFreeSGD"],
)
def test_averages_of_a_file_are_read_by_the_program_that_was_saved(optimizer, tmp_path):
    params, x = {"w": jnp.ones(3)}, np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    program = optimizer.minimize(lambda p, x: jnp.mean((x @ p["w"] - 1) ** 2), params, x)
    step = ow.compile(program, donate=False)
    state = step.init(params)
    for _ in range(3):
        state, _ = step(state, x)
    other, same = ow.load_step(ow.save(step, tmp_path / "m", state))
    with pytest.raises(ow.RecipeError, match=r"averaged\(program, state\), with the Program that was saved"):
        ow.averaged(other.program, same)
    own = ow.averaged(program, state)["w"]
    assert not np.allclose(own, state["w"])
    np.testing.assert_array_equal(ow.averaged(program, same)["w"], own)
    model = ow.load(ow.save(ow.for_evaluation(program), tmp_path / "e", state))
    loss = ow.Evaluator(model).forward(x).loss
    np.testing.assert_allclose(loss, np.mean((x @ np.asarray(own) - 1) ** 2), rtol=1e-5)


@pytest.mark.parametrize("base", [None, "int8"])
def test_factors_of_a_file_are_multiplied_out_by_the_program_that_was_saved(base, tmp_path):
    def loss(p, x):
        return jnp.mean((x @ p["w"] - 1) ** 2)

    params, x = {"w": jnp.ones((4, 3))}, np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
    program = ow.SGD(0.1).minimize(ow.low_rank(loss, params, x, rank=2, base=base))
    step = ow.compile(program, donate=False)
    state, _ = step(step.init(params), x)
    other, same = ow.load_step(ow.save(step, tmp_path / "m", state))
    model = ow.load(ow.save(ow.for_test(program), tmp_path / "t", state))
    for refused, text in [
        (lambda: ow.merge_low_rank(other.program, same), "holds the factors of low_rank"),
        (lambda: ow.averaged(other.program, same), "training step"),
        (lambda: ow.merge_low_rank(model.topology, same), "holds the factors of low_rank"),
    ]:
        with pytest.raises(ow.RecipeError, match=text):
            refused()
    plain = ow.merge_low_rank(program, state)
    assert not np.allclose(plain["w"], params["w"], atol=1e-3)
    np.testing.assert_array_equal(ow.merge_low_rank(program, same)["w"], plain["w"])


def test_what_is_added_behind_a_loaded_program_computes_nothing_again(loaded_step):
    other, _ = loaded_step
    (made,) = (op for op in other.program.ops if other.program.loss in op.outputs)
    body = body_of(lambda: [jnp.zeros(v.shape, v.dtype) for v in made.outputs])
    again = dataclasses.replace(made, inputs=(), body=body)
    ops = tuple(again if op is made else op for op in other.program.ops)
    with pytest.raises(ow.GraphError, match="cannot compute what it computes"):
        ow.check(dataclasses.replace(other.program, ops=ops))


def test_what_is_added_behind_a_loaded_program_runs(stepping, loaded_step):
    _, _, x, y = stepping
    other, begun = loaded_step
    watching = ow.compile(ow.watch(other.program, gradients=True, every=1))
    _, out = watching(begun.copy(), x, y)
    assert "grad(w1)" in str(out.watched)
    for transform in (
        lambda p: ow.accumulate(p, 2),
        lambda p: ow.mixed_precision(p, "bfloat16"),
        lambda p: ow.compile(ow.roll(p)),
        lambda p: ow.compile(ow.recompute(p, budget=0.5)),
        lambda p: ow.compile(ow.replicate(p, devices=2)),
    ):
        with pytest.raises(ow.OnwardError):
            transform(other.program)


# What cannot be saved.


def test_a_callback_is_named_with_its_line(tmp_path):
    def network(w, x):
        jax.debug.print("{}", x.sum())
        return w * x

    model = ow.Model(ow.trace(network, jnp.float32(1), jnp.ones(2)), jnp.float32(1))
    with pytest.raises(ow.ArgumentError, match=r"at test_model_file\.py:\d+ calls Python"):
        ow.save(model, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(jnp, "int2"), reason="JAX has no int2")
def test_a_dtype_that_jax_does_not_export_is_named(tmp_path):
    def loss(w, state, x):
        return jnp.mean((x * w * state.astype("float32")) ** 2), state

    w, x, few = jnp.ones(3), jnp.ones((4, 3)), jnp.ones(3, "int2")
    step = ow.compile(ow.SGD(0.1).minimize(loss, w, x, state=few))
    with pytest.raises(ow.ArgumentError, match=r"' is int2, which jax\.export of JAX .* such as int8"):
        ow.save(step, tmp_path / "m", step.init(w, few))


def test_wrong_calls_teach(trained, stepping, tmp_path):
    step, state, _, _ = stepping
    path = tmp_path / "m"
    for wrong, text in [
        (lambda: ow.save(classifier, path), r"save\(model, path\)"),
        (lambda: ow.save(step, path), r"save\(step, path, state\)"),
        (lambda: ow.save(trained, path, state), "has its own"),
        (lambda: ow.save(trained, path, batch=0), "batch=0"),
        (lambda: ow.save(trained, path, shapes={"pixels": ("b",)}), "'pixels'"),
        (lambda: ow.save(trained, path, shapes={"images": ("b", 6)}), "float32"),
        (lambda: ow.save(trained, path, about={"n": 1}), "about"),
        (lambda: ow.save(trained, path, license=3), "license"),
        (lambda: ow.save(trained, path, shapes={"images": ("n", "n", "m", 1)}), "its own name"),
    ]:
        with pytest.raises(ow.ArgumentError, match=text):
            wrong()
    replicated = ow.compile(ow.replicate(step.program, devices=2))
    with pytest.raises(ow.ArgumentError, match="before replicate"):
        ow.save(replicated, path, state)
    assert not path.exists()


def test_only_files_are_written_over(small, tmp_path):
    (tmp_path / "kept.model").write_text("before")
    (tmp_path / "link.model").symlink_to(tmp_path / "kept.model")
    ow.save(small, tmp_path / "link.model")
    assert (tmp_path / "link.model").is_symlink()
    assert ow.load(tmp_path / "kept.model")
    os.mkfifo(tmp_path / "pipe")
    for path, text in ((tmp_path / "pipe", "a pipe"), (tmp_path, "a folder")):
        with pytest.raises(ow.ModelFileError, match=text):
            ow.save(small, path)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_checkpoints_and_model_files_are_told_apart(trained, saved, tmp_path):
    with pytest.raises(ow.CheckpointError, match=r"onward\.load\(path\)"):
        trained.restore(saved)
    trained.save(tmp_path / "folder")
    with pytest.raises(ow.ModelFileError, match=r"model\.restore\(folder\)"):
        ow.load(tmp_path / "folder")
    with pytest.raises(ow.ArgumentError, match=r"load\(path\)"):
        ow.Evaluator(str(saved))


def test_a_folder_that_cannot_be_written_leaves_nothing(small, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ow.ModelFileError, match="cannot be written"):
        ow.save(small, tmp_path / "file" / "m")


def test_a_model_that_is_trained_on_two_devices(tmp_path):
    model = ow.Model(classifier, seed=3, batch_size=8)
    ow.Trainer(model, ow.SGD(0.1), devices=2).update(images(8), np.arange(8) % 3)
    found = ow.load(ow.save(model, tmp_path / "m"))
    np.testing.assert_allclose(answers(found, 8)[1], answers(model, 8)[1], atol=1e-6)


class Pair(NamedTuple):
    mean: jax.Array
    last: jax.Array


def test_slices_from_the_end_and_namedtuples(tmp_path):
    """A slice from the end is another op where the length is free: the numbers are compared then."""

    def network(w, x):
        y = x @ w
        return Pair(y.mean(1), y[:, -1])

    w = jnp.ones((4, 3))
    x = np.random.default_rng(0).normal(size=(5, 6, 4)).astype("float32")
    model = ow.Model(ow.trace(network, w, x[:2]), w)
    found = ow.load(ow.save(model, tmp_path / "m", shapes={"x": ("b", "t", 4)}))
    mean, last = ow.Evaluator(found).forward(x).value
    np.testing.assert_allclose(last, network(w, x).last, atol=1e-6)
    np.testing.assert_allclose(mean, network(w, x).mean, atol=1e-6)
    assert ow.Evaluator(found).forward(x[:, :4]).value._fields == ("mean", "last")


def test_a_length_that_python_counts_is_told(tmp_path):
    x, w = np.ones((8, 3), "float32"), np.ones((3, 1), "float32")
    model = ow.Model(ow.trace(lambda w, x: jnp.sum(x @ w) / len(x), w, x), w)
    with pytest.warns(UserWarning, match=r"batches of 8 or 1.* Write x\.shape\[0\] in place of len\(x\)"):
        ow.save(model, tmp_path / "m")


def test_a_raw_key_before_the_examples_is_no_batch(tmp_path):
    def loss(w, key, x):
        return jnp.mean(jnp.square(x @ w + jax.random.normal(key, (x.shape[0], 1))))

    x, w, key = np.ones((8, 3), "float32"), np.ones((3, 1), "float32"), jax.random.PRNGKey(0)
    step = ow.compile(ow.SGD(0.1).minimize(loss, w, key, x))
    state = step.init(w)
    ow.save(step, tmp_path / "m", state)
    found, kept = ow.load_step(tmp_path / "m")
    for rows in (8, 3):
        state, expected = step(state, key, x[:rows])
        kept, out = found(kept, key, x[:rows])
        np.testing.assert_allclose(out.loss, expected.loss, 1e-6)


def test_a_namedtuple_is_known_by_its_name_and_fields(tmp_path):
    """The class of a file is another one, as that of a cell of a notebook which was run again."""

    def loss(w, pair):
        return jnp.mean(jnp.square(pair.mean @ w - pair.last))

    x, y, w = np.ones((4, 3), "float32"), np.ones((4, 1), "float32"), np.ones((3, 1), "float32")
    step = ow.compile(ow.SGD(0.1).minimize(loss, w, Pair(x, y)))
    expected = step(step.init(w), Pair(x, y))[1].loss
    ow.save(step, tmp_path / "m", step.init(w))
    found, state = ow.load_step(tmp_path / "m")
    assert found(state, Pair(x, y))[1].loss == expected
    again = collections.namedtuple("Pair", ["mean", "last"])
    assert step(step.init(w), again(x, y))[1].loss == expected
    others = {
        "containers are last, mean, expected mean, last": ("Pair", ["last", "mean"]),
        r"namedtuple\[Other\].* expected .*namedtuple\[Pair\]": ("Other", ["mean", "last"]),
    }
    for words, named in others.items():
        with pytest.raises(ow.ArgumentError, match=words):
            step(step.init(w), collections.namedtuple(*named)(x, y))


@pytest.mark.parametrize(
    "network",
    [
        lambda w, x: w * x * (2.0 if x.shape[0] == 4 else 3.0),
        lambda w, x: w * x * {4: 2.0}.get(x.shape[0], 1.0),
        lambda w, x: jnp.exp(w * x) if x.shape[0] == 1 else w * x,
        lambda w, x: jnp.sum(w * x, 1 if x.shape[0] == 5 else 0, keepdims=True)[:1] * x,
        lambda w, x: jax.lax.scan(lambda c, row: (c * 1.5 if x.shape[0] == 5 else c, row * c), w, x)[1],
    ],
    ids=["a number", "a table", "one alone", "an axis of the next", "in a loop"],
)
def test_a_network_that_treats_some_lengths_otherwise_is_noticed(network, tmp_path):
    x = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")
    model = ow.Model(ow.trace(network, jnp.float32(2), x), jnp.float32(2))
    with pytest.warns(UserWarning, match="asks how long its batch is"):
        found = ow.load(ow.save(model, tmp_path / "m"))
    np.testing.assert_allclose(ow.Evaluator(found).forward(x).value, network(2, x), rtol=1e-6)


def test_what_is_told_alike_is_not_compiled_to_be_compared(tmp_path):
    """A mean over the batch, and labels, of which one is picked otherwise in a batch of one."""

    def loss(params, x, labels):
        for w in params:
            x = jnp.tanh(x @ w)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x), labels[:, None], 1))

    params, data = [jnp.eye(3)] * 3, (np.ones((4, 3), "float32"), np.arange(4, dtype="int32") % 3)
    program = ow.Adam(0.1).minimize(loss, params, *data)
    state = Step(program, (), True, ahead=False).init(params)
    with counted() as compiled, warnings.catch_warnings():
        warnings.simplefilter("error")
        path = ow.save(program, tmp_path / "m", state)
    assert len(compiled) <= 8  # single numbers of lengths, and both forms of the pick
    step, state = ow.load_step(path)
    alone = [x[1:2] for x in data]
    np.testing.assert_allclose(step(state, *alone)[1].loss, jax.jit(loss)(params, *alone), rtol=1e-5)


@jax.custom_vjp
def scaled_backward(x):
    return jnp.sin(x)


scaled_backward.defvjp(
    lambda x: (jnp.sin(x), x), lambda x, g: (g * jnp.cos(x) * (2.0 if x.shape[0] == 5 else 1.0),)
)


@pytest.mark.parametrize(
    "layer",
    [
        lambda x: jax.lax.stop_gradient(x) * 1.0 if x.shape[0] == 1 else x,
        lambda x: jnp.abs(x) * jnp.sign(x) if x.shape[0] == 5 else x,
        lambda x: x + (jax.lax.stop_gradient(x) - x) * 0.5 if x.shape[0] == 5 else x,
        scaled_backward,
    ],
    ids=["stopped alone", "another form", "half of it stopped", "a rule that asks"],
)
def test_a_step_whose_gradient_alone_asks_how_long_its_batch_is_is_told(layer, tmp_path):
    """The values are the same of any length, up to rounding; how they are derived is not."""

    def loss(w, x):
        return jnp.mean(layer(jnp.tanh(w * x)) ** 2 + w)

    program = ow.SGD(0.1).minimize(loss, jnp.ones(3), jnp.ones((4, 3)))
    state = Step(program, (), True, ahead=False).init(jnp.ones(3))
    is_sound = "another form" in os.environ["PYTEST_CURRENT_TEST"]  # the derivative of |x| sign(x) is 1
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        step, state = ow.load_step(ow.save(program, tmp_path / "m", state))
    assert is_sound == (not any("any length" in str(w.message) for w in said))
    data = 0.1 * np.arange(12, dtype="float32").reshape(4, 3)
    expected = 1 - 0.1 * np.asarray(jax.jit(jax.grad(loss))(jnp.ones(3), data))
    np.testing.assert_allclose(step(state, data)[0].parameters, expected, rtol=1e-5)


def test_a_step_is_derived_again_for_symbols_alone(tmp_path, monkeypatch):
    whole = []
    real = Replay.whole
    monkeypatch.setattr(Replay, "whole", lambda self, lengths: whole.append(lengths) or real(self, lengths))

    def loss(w, x, labels):
        logs = jax.nn.log_softmax(jax.nn.relu(x @ w))
        return -jnp.mean(jnp.take_along_axis(logs, labels[:, None], 1))

    program = ow.Adam(0.1).minimize(loss, jnp.eye(3), jnp.ones((4, 3)), jnp.zeros(4, int))
    ow.save(program, tmp_path / "m", Step(program, (), True, ahead=False).init(jnp.eye(3)))
    assert len(whole) == 1


def test_numbered_results_keep_their_order(tmp_path):
    rename = collections.namedtuple("rename", ["class", "b"], rename=True)

    def network(w, x):
        return {10: w * x, 2: x, 1: {}}, rename(x, w)

    x = np.ones((2, 3), "float32")
    model = ow.Model(ow.trace(network, jnp.float32(2), x), jnp.float32(2))
    numbered, pair = ow.Evaluator(ow.load(ow.save(model, tmp_path / "m"))).forward(x).value
    assert (numbered[10] == 2).all()
    assert [*map(float, map(np.mean, jax.tree.leaves(numbered)))] == [1, 2]
    assert sorted(map(float, map(np.mean, jax.tree.leaves(pair)))) == [1, 2]


def test_a_length_that_is_returned_as_a_number_is_not_taken_for_another(tmp_path):
    model = ow.Model(
        ow.trace(lambda w, x: (x @ w, x.shape[0] - 1), jnp.ones(3), jnp.ones((4, 3))), jnp.ones(3)
    )
    with pytest.warns(UserWarning, match=r"jnp\.asarray\(x\.shape\[0\]\)"):
        found = ow.load(ow.save(model, tmp_path / "m"))
    assert ow.Evaluator(found).forward(np.ones((4, 3), "float32")).value[1] == 3
    assert ow.Evaluator(found).forward(np.ones((1, 3), "float32")).value[1] == 0


def test_data_of_a_length_of_its_own_keeps_it(tmp_path):
    """A scale with as many numbers as the batch happens to have examples."""

    def network():
        return ow.layer.fc(ow.data("x", (None, 2)) * ow.data("scale", (2,)), 3)

    model = ow.Model(network, seed=1, batch_size=2)
    found = ow.load(ow.save(model, tmp_path / "m"))
    assert found.about["inputs"] == ["x f32[b,2]", "scale f32[2]"]
    x, scale = np.ones((5, 2), "float32"), np.array([2, -1], "float32")
    np.testing.assert_allclose(
        ow.Evaluator(found).forward(x, scale).value, ow.Evaluator(model).forward(x, scale).value, atol=1e-6
    )
    assert found.topology.recipe.origin.fixed_data == {"scale"}


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_parameters_that_are_no_numbers_are_refused_unless_asked_for(tmp_path, value):
    def masked():
        return ow.layer.fc(ow.data("x", (None, 2)), 3, name="head") + mask

    mask = np.float32([0, 0, -np.inf])  # on purpose
    path, model = tmp_path / "some.model", ow.Model(masked, seed=1)
    assert ow.load(ow.save(model, path)).topology.constants
    before = path.read_bytes()
    model.replace({"head/w": jnp.ones((2, 3)).at[1, 2].set(value)})
    with pytest.raises(ow.NonFiniteError, match=rf"'head/w' holds {value} at \[1, 2\] \(1 of 6 numbers\)"):
        ow.save(model, path)
    assert path.read_bytes() == before
    ow.save(model, path, allow_nonfinite=True)
    with pytest.raises(ow.ModelFileError, match=r"'head/w' holds .* allow_nonfinite=True loads it"):
        ow.load(path)
    np.testing.assert_array_equal(ow.load(path, allow_nonfinite=True)["head/w"], model["head/w"])


def test_a_step_whose_parameters_are_nan_is_refused_and_its_slots_are_its_own(tmp_path):
    w, path = jnp.ones(2), tmp_path / "step.model"
    step = ow.compile(ow.Momentum(0.1).minimize(lambda w: jnp.sum(w**2), w))
    slots = step.init(w).replace({"w/velocity": jnp.full(2, jnp.nan)})
    assert ow.load_step(ow.save(step, path, slots))[1]["w/velocity"].shape == (2,)
    wrong = slots.replace({"w": jnp.full(2, jnp.nan)})
    with pytest.raises(ow.NonFiniteError, match="'w' holds nan"):
        ow.save(step, path, wrong)
    ow.save(step, path, wrong, allow_nonfinite=True)
    with pytest.raises(ow.ModelFileError, match="'w' holds nan"):
        ow.load_step(path)


def test_a_negative_cost_of_an_older_file_is_taken_for_unknown(tmp_path, monkeypatch):
    """As that of a sum over nothing was written."""
    monkeypatch.setattr(graph, "_cost", lambda op: {"flops": -3, "read": 12})
    program = ow.trace(lambda w, x: jnp.sum(x * w), jnp.ones(3), jnp.ones((2, 3)))
    path = ow.save(ow.Model(program, jnp.ones(3)), tmp_path / "older.model")
    costs = [ow.cost(op) for op in ow.load(path).topology.ops]
    assert {(cost.flops, cost.read) for cost in costs} == {(0, 12)}


def mean_square(p, x):
    return jnp.mean((x @ p["w"] + p["b"]) ** 2)


LINEAR = {
    "w": np.ones((4, 3), "float32"),
    "b": np.ones(3, "float32"),
}  # of sizes that 2 devices do not divide
ROWS = np.arange(32, dtype="float32").reshape(8, 4) / 32


@pytest.mark.parametrize("as_program", [True, False], ids=["Program", "step"])
def test_the_parts_of_slots_of_several_devices_are_put_together(tmp_path, as_program):
    program = ow.Momentum(0.1).minimize(mean_square, LINEAR, ROWS)
    several = ow.compile(ow.replicate(program, devices=2, merge=ow.Sharded()))
    state, _ = several(several.init(LINEAR), ROWS)
    assert state["b/velocity"].shape == (4,)
    path = ow.save(program if as_program else ow.compile(program), tmp_path / "m", state)
    again, begun = ow.load_step(path)
    found, out = again(begun, ROWS)
    expected, out_of_several = several(state, ROWS)
    np.testing.assert_allclose(out.loss, out_of_several.loss, rtol=1e-6)
    np.testing.assert_allclose(found["w"], expected["w"], rtol=1e-6)
    np.testing.assert_allclose(found["b/velocity"], expected["b/velocity"][:3], rtol=1e-6)


@pytest.mark.parametrize(
    ("parameters", "text"),
    {
        "shapes": (
            {"w": np.ones((4, 2), "float32"), "b": np.ones(2, "float32")},
            r"'w' is float32\[4, 2\], expected float32\[4,3\].*Nothing was saved",
        ),
        "dtypes": (
            jax.tree.map(lambda x: jnp.asarray(x, "bfloat16"), LINEAR),
            r"'w' is bfloat16\[4, 3\], expected float32\[4,3\]",
        ),
    }.values(),
    ids=["shapes", "dtypes"],
)
def test_the_state_of_another_program_is_refused_and_an_older_file_stays(tmp_path, parameters, text):
    program = ow.Momentum(0.1).minimize(mean_square, LINEAR, ROWS)
    path = tmp_path / "m"
    path.write_text("an older one")
    other = ow.compile(ow.Momentum(0.1).minimize(mean_square, parameters, ROWS)).init(parameters)
    for what in (program, ow.compile(program), ow.trace(mean_square, LINEAR, ROWS)):
        with pytest.raises(ow.ArgumentError, match=text):
            ow.save(what, path, other)
    assert path.read_text() == "an older one"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_safetensors_file_of_others_is_told_with_what_reads_it(tmp_path, dtype):
    path = tmp_path / "others.safetensors"
    ow.save_safetensors(path, {"w": jnp.ones(3, dtype)})
    for read in (ow.load, ow.load_step, ow.Endpoint):
        with pytest.raises(ow.ModelFileError, match=r"other contents: w, and no network.*load_safetensors\("):
            read(path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ow.ModelFileError, match="is not a whole model file"):
        ow.load(path)
