"""Micro-batches against the big batch, against NumPy, and against a loop over single micro-batches."""

from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.core.recipe import undone
from onward.develop.accumulation.accumulate import accumulate, accumulated, accumulation_of

RNG = np.random.default_rng(0)
ROWS = 8
X, Y = RNG.normal(size=(2 * ROWS, 3)), RNG.normal(size=2 * ROWS)
WEIGHT = RNG.uniform(0.5, 2.0, 2 * ROWS)
W = RNG.normal(size=3)
RATE = 0.5
OPTIMIZER = ow.SGD(
    0.05,
    groups=[
        ow.Group(lambda v: v.name in ("first/b", "table", "conv"), ow.Adam(0.01), name="adam"),
        ow.Group("last", ow.Momentum(0.02)),
    ],
)


@pytest.fixture(autouse=True)
def in_double():
    with jax.enable_x64(True):
        yield


def equal(found, expected, rtol=1e-12, atol=1e-13):
    np.testing.assert_allclose(found, expected, rtol, atol)


# ---------------------------------------------------------------- the big batch, in one piece


def mlp(p, x, y):
    hidden = jnp.tanh(x @ p["first"]["w"] + p["first"]["b"])
    return cost(hidden @ p["last"], y)


def cnn(p, x, y):
    h = jax.lax.conv_general_dilated(x, p["conv"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return squared(jax.nn.relu(h).mean((1, 2)) @ p["last"], y)


def words(p, x, y):
    return squared(jnp.tanh(p["table"][x]).mean(1) @ p["last"], y)


def cost(logits, y):
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1)[:, 0]
    right = jnp.sum(jnp.argmax(logits, 1) == y)
    return losses.mean(), {"right": right, "losses": losses, "columns": logits.T}


def squared(out, y):
    """The same kinds of results in fewer kernels than cross-entropy takes."""
    losses = jnp.sum((out - y[:, None]) ** 2, 1)
    return losses.mean(), {"right": jnp.sum(losses < 1), "losses": losses, "columns": out.T}


def draw(*shape):
    return np.random.default_rng(len(shape)).normal(0, 0.5, shape)


MODELS = {
    "mlp": (mlp, {"first": {"w": draw(3, 4), "b": draw(4)}, "last": draw(4, 3)}, draw(ROWS, 3)),
    "cnn": (cnn, {"conv": draw(3, 3, 2, 2), "last": draw(2, 3)}, draw(ROWS, 4, 4, 2)),
    "words": (words, {"table": draw(5, 4), "last": draw(4, 3)}, RNG.integers(0, 5, (ROWS, 3))),
}
LABELS = RNG.integers(0, 3, ROWS)


def cast(tree, dtype):
    return jax.tree.map(lambda a: a.astype(dtype) if a.dtype.kind == "f" else a, tree)


def trained(program, params, data, steps=3):
    """All state and the results after some steps."""
    step = ow.compile(program)
    state = step.init(params)
    for _ in range(steps):
        state, out = step(state, *data)
    return {name: np.asarray(state[name]) for name in state}, jax.tree.map(np.asarray, out.value)


def check_equal(found, expected, rtol=1e-12):
    for name, value in expected[0].items():
        equal(found[0][name], value, rtol, 0.1 * rtol)
    jax.tree.map(lambda a, b: equal(a, b, rtol, 0.1 * rtol), found[1], expected[1])


@cache
def big_batch(model, dtype):
    """The Program, its parameters and data, and what some steps of it give."""
    loss, params, x = MODELS[model]
    params, data = cast(params, dtype), (cast(x, dtype), LABELS)
    program = OPTIMIZER.minimize(loss, params, *data, has_aux=True)
    return program, params, data, trained(program, params, data)


CASES = [
    ("mlp", 8, "float64"),
    ("cnn", 2, "float64"),
    ("words", 4, "float64"),
    ("words", 2, "float32"),
]


@pytest.mark.parametrize(("model", "steps", "dtype"), CASES)
def test_equal_to_the_big_batch(model, steps, dtype):
    program, params, data, expected = big_batch(model, dtype)
    found = trained(accumulate(program, steps), params, data)
    check_equal(found, expected, 1e-11 if dtype == "float64" else 1e-4)
    right, losses, columns = (found[1][1][name] for name in ("right", "losses", "columns"))
    assert (right.shape, losses.shape, columns.shape) == ((), (ROWS,), (3, ROWS))
    assert right.dtype == np.int64


def square(w, x, y):
    error = x @ w - y
    return jnp.mean(error**2), {"each": error, "nothing": jnp.zeros(2), "x": x}


@cache
def line(optimizer="plain"):
    rule = ow.SGD(RATE) if optimizer == "plain" else ow.Adam(0.01)
    return rule.minimize(square, W, X[:ROWS], Y[:ROWS], has_aux=True)


def by_hand(rows, weight=None):
    """The loss, the parameters after a step, and the error of each example, in NumPy."""
    x, weight = X[:rows], np.ones(rows) if weight is None else weight[:rows]
    error = x @ W - Y[:rows]
    total = weight.sum()
    return (weight * error**2).sum() / total, W - RATE * 2 * x.T @ (weight * error) / total, error


def check_line(program, rows=ROWS):
    step = ow.compile(program)
    state, out = step(step.init(W), X[:rows], Y[:rows])
    loss, parameters, error = by_hand(rows)
    equal(out.loss, loss)
    equal(state.parameters, parameters)
    equal(out.aux["each"], error)
    equal(out.aux["x"], X[:rows])
    return step


def test_numpy():
    check_line(accumulate(line(), 4))


@pytest.mark.parametrize("steps", [1, ROWS])
def test_one_step_and_as_many_as_rows(steps):
    check_line(accumulate(line(), steps))


def test_before_the_update_and_after_it_is_the_same():
    before = ow.append_backward(ow.trace(square, W, X[:ROWS], Y[:ROWS], has_aux=True))
    program = ow.append_update(accumulate(before, 4), ow.SGD(RATE))
    assert str(program) == str(accumulate(line(), 4))
    check_line(program)


def test_a_rule_between_sees_the_gradient_of_the_whole_batch():
    program = ow.append_backward(ow.trace(square, W, X[:ROWS], Y[:ROWS], has_aux=True))
    program = ow.append_update(ow.clip_by_global_norm(program, 0.1), ow.SGD(1.0))
    step = ow.compile(accumulate(program, 4), fetch=["global_norm", "grad(w)"])
    state, out = step(step.init(W), X[:ROWS], Y[:ROWS])
    gradient = (W - by_hand(ROWS)[1]) / RATE
    equal(out["grad(w)"], gradient)
    equal(out["global_norm"], np.linalg.norm(gradient))
    equal(state.parameters, W - 0.1 * gradient / np.linalg.norm(gradient))


def test_a_bfloat16_gradient_is_added_up_in_float32():
    x = np.concatenate([np.full((1, 1), 256.0), np.ones((255, 1))]).astype(jnp.bfloat16)
    program = ow.append_backward(
        ow.trace(lambda w, x: jnp.sum(x * w) / 256, jnp.zeros(1, jnp.bfloat16), x[:256])
    )
    step = ow.compile(accumulate(program, 256, is_sum=True), fetch=["grad(w)"])
    _, out = step(step.init(jnp.zeros(1, jnp.bfloat16)), x)
    assert float(out["grad(w)"][0]) == 2.0  # 1 + 255 / 256, of which the small ones are lost one by one


def test_a_gradient_that_an_output_holds_is_that_of_the_big_batch():
    @ow.transform
    def returning(program, name):
        return replace(program, outputs=(*program.outputs, program[name]))

    w, x = jnp.ones(3, jnp.bfloat16), jnp.arange(24, dtype=jnp.bfloat16).reshape(8, 3)
    program = ow.append_backward(ow.trace(lambda w, x: jnp.mean(jnp.square(x * w)), w, x))
    program = returning(program, "grad(mul)")
    found = []
    for p in (program, accumulate(program, 4)):
        step = ow.compile(p, fetch=["grad(mul)"])
        found.append(step(step.init(w), x)[1]["grad(mul)"])
    assert found[0].shape == (8, 3)
    np.testing.assert_array_equal(*found)


TOLD = np.array(
    [-1, -1, 2, 1, 0, -1, 1, 2]
)  # labels; the first two examples, and so a micro-batch, have none


# ---------------------------------------------------------------- results beside the loss


def with_results(parameters, x):
    v, w = parameters
    errors = (jnp.tanh(x @ v) @ w) ** 2
    told = {
        "largest": errors.max(),
        "smallest of each column": x.min(0),
        "any": jnp.any(errors > 3),
        "all": jnp.all(errors > 0),
        "an integer of parameters": jnp.argmax(jnp.abs(w)),
        "largest integer": jnp.max(jnp.int32(10 * errors)),
        "rows": jnp.int32(x.shape[0]),
        "count": jnp.sum(errors > 1),
        "sum": errors.sum(),
        "mean": errors.mean(),
        "perplexity": jnp.exp(errors.mean()),
        "root": jnp.sqrt(errors.sum()),
        "range": errors.max() - errors.min(),
        "finite": jnp.isfinite(errors.mean()),
        "without one": errors.sum() / (len(x) - 1),
        "half of a count": jnp.sum(errors > 1) // 2,
        "rows and one": jnp.asarray(len(x)) + 1,
        "rows as a float": jnp.asarray(float(len(x))),
        "one by rows": jnp.asarray(1 / len(x)),
        "share of the largest": jnp.sqrt(errors.mean()) / errors.max() + jnp.mean(v),
    }
    return errors.mean(), told


@pytest.mark.parametrize("how", ["micro-batches", "devices", "both", "pipeline"])
def test_results_are_those_of_the_big_batch(how):
    w, x = (2 * np.eye(3), np.array([0.5, -2.0, 1.0])), X[:ROWS]
    program = ow.SGD(RATE).minimize(with_results, w, x, has_aux=True)
    made = {
        "micro-batches": lambda: accumulate(program, 4),
        "devices": lambda: ow.replicate(program, 4),
        "both": lambda: accumulate(ow.replicate(program, 2), 2),
        "pipeline": lambda: ow.pipeline(program, 2, 4),
    }
    step = ow.compile(made[how]())
    _, out = step(step.init(w), x)
    _, told = with_results(w, x)
    assert out.aux.keys() == told.keys()
    for name, value in told.items():
        assert out.aux[name].dtype == value.dtype, name
        equal(out.aux[name], value)


def test_one_example_that_computes_otherwise_than_two_is_warned_of():
    program = ow.SGD(RATE).minimize(lambda w, x: jnp.mean(x @ w) * min(len(x), 2), np.ones(3), X[:4])
    with pytest.warns(UserWarning, match="'mul' at .* something else for one example than for two"):
        accumulate(program, 4)
    accumulate(program, 2)


def metrics_step(state, batch):
    """A training step as people write it, with numbers of the loss, the gradient and the batch."""

    def loss(w):
        errors = (batch["x"] @ w) ** 2
        return jnp.sum(batch["mask"] * errors) / jnp.sum(batch["mask"]), errors

    w, count = state
    (value, errors), slope = jax.value_and_grad(loss, has_aux=True)(w)
    told = {
        "loss": value,
        "slope": jnp.sqrt(jnp.sum(slope**2)),
        "perplexity": jnp.exp(value),
        "finite": jnp.isfinite(value),
        "counted": jnp.sum(batch["mask"]),
        "largest": errors.max(),
        "step": count,
        "errors": errors,
    }
    return (w - RATE * slope, count + 1), told


@pytest.mark.parametrize("how", ["micro-batches", "devices first", "devices last"])
def test_numbers_of_a_step_of_ones_own(how):
    state, batch = (W, jnp.int32(0)), {"x": X[:ROWS], "mask": 1.0 * (TOLD >= 0)}
    program = ow.adopt(metrics_step, state, batch)
    made = {
        "micro-batches": lambda: accumulate(program, 4),
        "devices first": lambda: accumulate(ow.replicate(program, 2), 2),
        "devices last": lambda: ow.replicate(accumulate(program, 2), 2),
    }
    step = ow.compile(made[how]())
    found = step.init(state)
    for _ in range(2):
        found, out = step(found, batch)
        state, told = metrics_step(state, batch)
        jax.tree.map(equal, out.value[1], told)
        assert out.value[1]["finite"].dtype == bool


def test_one_number_that_is_warned_of_leaves_the_others_right():
    def loss(w, x):
        errors = (x @ w) ** 2
        return errors.mean(), {"deviation": errors.std(), "perplexity": jnp.exp(errors.mean())}

    program = ow.SGD(RATE).minimize(loss, W, X[:ROWS], has_aux=True)
    with pytest.warns(UserWarning, match="'sub' at .* as batch normalization does"):
        step = ow.compile(accumulate(program, 4))
    _, out = step(step.init(W), X[:ROWS])
    equal(out.aux["perplexity"], loss(W, X[:ROWS])[1]["perplexity"])


def test_a_number_of_what_is_carried_is_that_of_the_big_batch():
    def loss(w, state, x):
        errors = (x @ w) ** 2
        state = state + errors.sum()
        return errors.mean(), (state, jnp.sqrt(state))

    program = ow.SGD(RATE).minimize(loss, W, X[:ROWS], state=np.float64(0), has_aux=True)
    step = ow.compile(accumulate(program, 4))
    state, out = step(step.init(W, np.float64(0)), X[:ROWS])
    _, (total, root) = loss(W, 0, X[:ROWS])
    equal(state.model_state, total)
    equal(out.aux, root)


# ---------------------------------------------------------------- statistics of the data


def by_count(w, x, labels):
    told = labels >= 0
    errors = -jnp.take_along_axis(jax.nn.log_softmax(x @ w), jnp.where(told, labels, 0)[:, None], 1)[:, 0]
    count = told.sum()
    right = jnp.sum((jnp.argmax(x @ w, 1) == labels) * told)
    return jnp.sum(errors * told) / count, {"count": count, "accuracy": right / count}


def by_shares(w, x, labels):
    share = (labels >= 0) / jnp.maximum(jnp.sum(1.0 * (labels >= 0)), 1e-6)
    total = jnp.sum(share * jnp.sum((x @ w) ** 2, 1)) + 0.1 * jnp.sum(w**2)
    return total, {"shares": share, "sum": jnp.sum(share * x[:, 0])}


def by_nested(w, x, labels):
    """Data that is normalized, and then counts as far as it lies from the middle."""
    normal = (x - x.mean(0)) / x.std(0, ddof=1)
    far = jnp.abs(normal).max(1)
    return jnp.sum(far * jnp.sum((normal @ w) ** 2, 1)) / far.sum() + jnp.sum(
        x[:, 0] * jnp.sum(w)
    ), far.mean()


def check_by_data(loss, *programs):
    """Two steps of each Program are those of the loss by JAX."""
    w, x = np.cos(np.arange(9.0)).reshape(3, 3), X[:ROWS]
    for program in programs:
        step = ow.compile(program)
        state, expected = step.init(w), w
        for _ in range(2):
            (value, aux), slope = jax.value_and_grad(loss, has_aux=True)(expected, x, TOLD)
            expected = expected - RATE * slope
            state, out = step(state, x, TOLD)
            equal(out.loss, value)
            jax.tree.map(equal, out.aux, aux)
        equal(state.parameters, expected)


@pytest.mark.parametrize("loss", [by_count, by_shares])
def test_micro_batches_divide_by_what_counts_in_the_whole_batch(loss):
    """One of them has nothing that counts: by its own number it would be NaN."""
    program = ow.SGD(RATE).minimize(loss, np.ones((3, 3)), X[:ROWS], TOLD, has_aux=True)
    check_by_data(
        loss, accumulate(program, 4), accumulate(program, 8), ow.replicate(accumulate(program, 2), 2)
    )


def test_statistics_of_statistics_of_the_data():
    program = ow.SGD(RATE).minimize(by_nested, np.ones((3, 3)), X[:ROWS], TOLD, has_aux=True)
    check_by_data(by_nested, accumulate(program, 4), accumulate(ow.replicate(program, 2), 2))


def test_numbers_that_count_the_batch_are_those_of_the_big_batch():
    def loss(w, x, labels):
        return jnp.sum((x @ w) ** 2) / (x.shape[0] - jnp.asarray(1.0)), labels

    program = ow.SGD(RATE).minimize(loss, np.ones((3, 3)), X[:ROWS], TOLD, has_aux=True)
    check_by_data(loss, accumulate(program, 4), accumulate(ow.replicate(program, 2), 2))


@pytest.mark.parametrize("devices_first", [True, False])
def test_what_counts_on_all_devices_by_a_function_that_speaks_of_them(devices_first):
    def plain(w, x, labels, over):
        told = labels >= 0
        return over(jnp.sum(told * jnp.sum((x @ w) ** 2, 1))) / over(jnp.sum(told)), labels

    loss = partial(plain, over=partial(jax.lax.psum, axis_name="replicas"))
    axis = {"axis_name": "replicas", "has_aux": True}
    program = ow.SGD(RATE).minimize(loss, np.ones((3, 3)), X[:ROWS], TOLD, **axis)
    both = (partial(ow.replicate, devices=2), partial(accumulate, steps=4))
    for step in both if devices_first else reversed(both):
        program = step(program)
    check_by_data(partial(plain, over=jnp.copy), program)


def test_statistics_merged_over_devices_are_those_of_one_micro_batch():
    def loss(w, x):
        middle = jax.lax.pmean(jnp.mean(x @ w), "replicas")
        return jnp.mean((x @ w - middle) ** 2)

    program = ow.SGD(RATE).minimize(loss, np.ones(3), X[:ROWS], axis_name="replicas")
    with pytest.warns(UserWarning, match="'sub' at .*test_accumulate.py.* as batch normalization does"):
        accumulate(ow.replicate(program, 2), 2)


def test_what_counts_is_computed_once_before_the_loop():
    program = accumulate(ow.SGD(RATE).minimize(by_count, np.ones((3, 3)), X[:ROWS], TOLD, has_aux=True), 4)
    loop = next(op for op in program.ops if op.type == "accumulate")
    first = program.ops[: program.ops.index(loop)]
    assert [op.outputs[0].shape for op in first if op.type == "reduce_sum"] == [()]
    assert first[-1].type == "of_whole_batch"
    assert first[-1].outputs[0] in loop.inputs
    inside = loop.subprograms["micro_batch"]
    assert "of_whole_batch" not in [op.type for op in inside.ops]


def test_a_statistic_that_is_carried_and_read_is_that_of_the_big_batch():
    def loss(w, state, x, labels):
        total = jnp.sum(x[:, 0] ** 2)
        return jnp.sum(x[:, 0] ** 2 / total * (x @ w)[:, 0]), state + total

    w = np.ones((3, 3))
    program = ow.SGD(RATE).minimize(loss, w, X[:ROWS], TOLD, state=np.float64(0))
    step = ow.compile(accumulate(program, 4))
    state, out = step(step.init(w, np.float64(0)), X[:ROWS], TOLD)
    equal(state.model_state, np.sum(X[:ROWS, 0] ** 2))
    equal(out.loss, loss(w, 0, X[:ROWS], TOLD)[0])


def test_a_function_without_that_op_at_another_length_is_refused():
    def network():
        x = ow.data("x", (None, 3), "float64")
        weight = jnp.sum(x[:, :1] ** 2) if x.shape[0] != 3 else jnp.float64(7)
        return jnp.sum(ow.layer.fc(x, 1) ** 2) / weight

    step = ow.compile(accumulate(ow.SGD(RATE).minimize(ow.trace(network)), 2))
    state, _ = step(step.init(), X[:ROWS])
    with pytest.raises(ow.OnwardError, match="the function builds another graph"):
        step(state, X[:6])


# ---------------------------------------------------------------- what data is cut


def test_data_of_another_length_goes_whole_and_a_new_batch_size_is_traced_again():
    def loss(w, x, y, scale):
        return jnp.mean((x @ w - y) ** 2) * jnp.sum(scale)

    scale = np.array([0.25, 0.75, 1.0])
    step = ow.compile(accumulate(ow.SGD(RATE).minimize(loss, W, X[:ROWS], Y[:ROWS], scale), 4))
    for rows in (ROWS, 2 * ROWS):
        state, out = step(step.init(W), X[:rows], Y[:rows], scale)
        equal(out.loss, 2 * by_hand(rows)[0])
        equal(state.parameters, W + 2 * (by_hand(rows)[1] - W))
    assert step.compilations == 2


def test_data_as_long_as_the_batch_can_be_kept_whole():
    def loss(w, x, table):
        return jnp.mean(x @ w) * jnp.sum(table)

    table = np.arange(ROWS, dtype=float)
    program = ow.SGD(RATE).minimize(loss, W, X[:ROWS], table)
    for kept in (
        accumulate(program, 4, whole=["table"]),
        ow.replicate(accumulate(program, 4, whole=["table"]), 2),
    ):
        step = ow.compile(kept)
        state, _ = step(step.init(W), X[:ROWS], table)
        equal(state.parameters, W - RATE * X[:ROWS].mean(0) * table.sum())


def test_a_batch_that_comes_second_is_asked_for():
    def loss(w, nodes, edges):
        return jnp.mean((nodes @ w)[edges])

    program = ow.SGD(RATE).minimize(loss, W, X[:6], np.arange(8) % 6)
    with pytest.raises(ow.ArgumentError, match=r"the batch is 'edges' \(int64\[8\]\): whole=\['nodes'\]"):
        accumulate(program, 4)
    accumulate(program, 4, whole=["nodes"])


def test_data_that_a_pruned_program_reads_no_more_is_cut_too():
    def loss(w, x, y):
        return jnp.mean((x @ w) ** 2), x @ w - y

    whole = ow.trace(loss, W, X[:ROWS], Y[:ROWS], has_aux=True)
    part = ow.append_backward(ow.prune(whole, whole.loss))
    program = ow.append_update(part, ow.SGD(RATE))
    gradient = 2 * X[:ROWS].T @ (X[:ROWS] @ W) / ROWS
    for cut in (accumulate(program, 4), ow.replicate(program, 2)):
        assert [v.name for v in cut.inputs] == ["x"]
        step = ow.compile(cut)
        state, _ = step(step.init(W), X[:ROWS])
        equal(state.parameters, W - RATE * gradient)


def test_a_batch_that_nothing_showed_is_as_long_as_the_steps():
    def network():
        x = ow.data("x", (None, 3))
        return ow.layer.mse(ow.layer.fc(x, 1), ow.data("y", (None, 1)))

    program = ow.SGD(0.1).minimize(ow.trace(network))
    assert accumulate(program, 8)["x"].shape == (8, 3)
    assert ow.replicate(accumulate(program, 8), 2)["x"].shape == (8, 3)


# ---------------------------------------------------------------- weights


def weighted(w, x, y, example_weight):
    error, total = x @ w - y, jnp.sum(example_weight)
    aux = {"error": jnp.sum(example_weight * jnp.abs(error)) / total, "each": error}
    return jnp.sum(example_weight * error**2) / total, aux


WEIGHTED = {
    "alone": lambda p: accumulate(p, 4),
    "then on devices": lambda p: ow.replicate(accumulate(p, 3), 4),
    "on devices before": lambda p: accumulate(ow.replicate(p, 2, ow.Sharded()), 3),
}


@cache
def weighted_step(how):
    program = ow.SGD(RATE).minimize(weighted, W, X[:ROWS], Y[:ROWS], WEIGHT[:ROWS], has_aux=True)
    return ow.compile(WEIGHTED[how](program))


@pytest.mark.parametrize("rows", [1, 5, 8])
@pytest.mark.parametrize("how", WEIGHTED)
def test_weighted_means_of_batches_that_do_not_divide(how, rows):
    step = weighted_step(how)
    for weight in (WEIGHT, WEIGHT * (np.arange(2 * ROWS) % 4 == 0)):  # whole micro-batches that weigh nothing
        state, out = step(step.init(W), X[:rows], Y[:rows], weight[:rows])
        loss, parameters, error = by_hand(rows, weight)
        equal(out.loss, loss)
        equal(state.parameters, parameters)
        equal(out.aux["each"], error)
        equal(out.aux["error"], np.average(abs(error), weights=weight[:rows]))


def test_the_mean_of_a_batch_that_weighs_nothing_is_not_0():
    step = weighted_step("alone")
    _, out = step(step.init(W), X[:8], Y[:8], np.zeros(8))
    assert np.isnan(weighted(W, X[:8], Y[:8], np.zeros(8))[0])
    assert np.isnan(out.loss)


@pytest.mark.parametrize("how", ["alone", "then on devices", "on devices before"])
def test_a_loss_that_is_a_sum(how):
    def total(w, x, y):
        error = x @ w - y
        return jnp.sum(error**2), {"mean": jnp.mean(abs(error))}

    program = ow.SGD(RATE).minimize(total, W, X[:ROWS], Y[:ROWS], has_aux=True)
    program = {
        "alone": lambda: accumulate(program, 4, is_sum=True),
        "then on devices": lambda: ow.replicate(accumulate(program, 4, is_sum=True), 2, ow.Sum()),
        "on devices before": lambda: accumulate(ow.replicate(program, 2, ow.Sum()), 4),
    }[how]()
    step = ow.compile(program)
    state, out = step(step.init(W), X[:ROWS], Y[:ROWS])
    loss, parameters, error = by_hand(ROWS)
    equal(out.loss, ROWS * loss)
    equal(state.parameters, W + ROWS * (parameters - W))
    equal(out.aux["mean"], abs(error).mean())


# ---------------------------------------------------------------- what the forward pass carries


def carrying():
    x, y = ow.data("x", (None, 3), "float64"), ow.data("y", (None, 1), "float64")
    seen = ow.state("seen", (), "int64", lambda key, shape, dtype: jnp.zeros(shape, dtype))
    now = ow.state("now", (), "float64", lambda key, shape, dtype: jnp.zeros(shape, dtype))
    before = ow.state("before", (), "float64", lambda key, shape, dtype: jnp.zeros(shape, dtype))
    ow.assign(seen, seen + x.shape[0])
    ow.assign(before, now)
    ow.assign(now, jnp.sum(x) + now)
    hidden = ow.layer.batch_norm(ow.layer.fc(x, 4))
    return ow.layer.mse(jnp.mean(hidden, 1, keepdims=True), y)


def with_noise(w, key, x):
    """A step with noise of no example in the loss and in the gradient, drawn from a key that it carries."""
    key, one, two = jax.random.split(key, 3)

    def loss(w):
        return jnp.mean((x @ (w + 0.1 * jax.random.normal(one, w.shape, w.dtype))) ** 2)

    value, gradient = jax.value_and_grad(loss)(w)
    return w - 0.1 * (gradient + jax.random.normal(two, w.shape, w.dtype)), key, value


CARRIED_KEYS = {"typed": jax.random.key, "raw": jax.random.PRNGKey}


@pytest.mark.parametrize("kind", CARRIED_KEYS)
@pytest.mark.parametrize("order", ["alone", "on devices"])
def test_a_key_that_is_carried_moves_on_once_a_step(kind, order):
    program = ow.adopt(with_noise, W, CARRIED_KEYS[kind](0), X[:ROWS])
    program = ow.replicate(program, 2) if order == "on devices" else program
    step = ow.compile(accumulate(program, 4))
    w, key = jnp.asarray(W), CARRIED_KEYS[kind](0)
    state = step.init((w, key))
    for _ in range(3):
        state, _ = step(state, X[:ROWS])
        w, key, _ = with_noise(w, key, X[:ROWS])
    equal(state.parameters[0], w)


def chained(params, key, x):
    """Layers that each split the key, with noise of no example at the end."""
    for w in params["layers"]:
        key, now = jax.random.split(key)
        x = jnp.tanh(x @ w) * jax.random.bernoulli(now, 0.5, x.shape)
    key, now = jax.random.split(key)
    return jnp.mean((x + 0.1 * jax.random.normal(now, (3,))) ** 2), (key, jax.random.normal(now, (3,)))


@pytest.mark.parametrize("how", ["rolled", "pipeline", "pipeline, rolled"])
def test_a_chain_of_keys_through_layers_is_that_of_one_batch(how):
    params = {"layers": [W[:, None] + np.eye(3) for _ in range(12)]}
    program = ow.SGD(RATE).minimize(chained, params, X[:ROWS], state=jax.random.key(0), has_aux=True)
    program = ow.roll(program) if "rolled" in how else program
    made = accumulate(program, 4) if how == "rolled" else ow.pipeline(program, 2, 4)
    step = ow.compile(made)
    state, key = step.init(params, jax.random.key(0)), jax.random.key(0)
    for _ in range(2):
        state, out = step(state, X[:ROWS])
        _, (key, noise) = chained(params, key, X[:ROWS])
        equal(out.aux, noise)


def test_keys_split_for_examples_are_their_own_in_a_loop_over_them():
    def loss(w, key, x):
        key, now = jax.random.split(key)
        masks = jax.lax.map(lambda k: jax.random.uniform(k, (3,)), jax.random.split(now, len(x)))
        return jnp.mean(masks * x * w), (key, masks)

    program = ow.SGD(RATE).minimize(loss, W, X[:ROWS], state=jax.random.key(0), has_aux=True)
    for made in (accumulate(program, 4), ow.replicate(program, 4)):
        step = ow.compile(made)
        _, out = step(step.init(W, jax.random.key(0)), X[:ROWS])
        assert len({part.tobytes() for part in np.asarray(out.aux).reshape(4, -1)}) == 4


def test_raw_keys_that_an_op_reads_draw_other_numbers_or_are_warned_of():
    def loss(w, key, x):
        now, key = jax.random.split(key)
        drop = jax.checkpoint(lambda x, key: x * jax.random.uniform(key, x.shape))
        return jnp.mean(drop(x, now) * w), (key, drop(jnp.ones_like(x), now))

    first = jax.random.PRNGKey(0)
    program = ow.SGD(RATE).minimize(loss, W, X[:ROWS], state=first, has_aux=True)
    step = ow.compile(accumulate(program, 4))
    _, out = step(step.init(W, first), X[:ROWS])
    assert len({part.tobytes() for part in np.asarray(out.aux).reshape(4, -1)}) == 4
    said = "draws numbers for its examples by a key that it makes within .* All draw the same numbers"
    with pytest.warns(UserWarning, match=said):
        ow.replicate(program, 2)
    fed = ow.SGD(RATE).minimize(lambda w, x, key: loss(w, key, x)[0], W, X[:ROWS], first)
    with pytest.warns(UserWarning, match=said):
        accumulate(fed, 4)


def test_micro_batches_drop_other_numbers_of_their_examples():
    def loss(w, key, x):
        key, now = jax.random.split(key)
        kept = jax.random.bernoulli(now, 0.5, x.shape)
        return jnp.mean(jnp.where(kept, x, 0) @ w), (key, kept)

    program = ow.SGD(RATE).minimize(loss, W, X[:ROWS], state=jax.random.key(0), has_aux=True)
    step = ow.compile(accumulate(program, 4))
    state = step.init(W, jax.random.key(0))
    masks = []
    for _ in range(2):
        state, out = step(state, X[:ROWS])
        masks += [part.tobytes() for part in np.asarray(out.aux).reshape(4, -1)]
    assert len(set(masks)) == 8


@pytest.mark.filterwarnings("ignore:.*as batch normalization does")
def test_state_goes_from_one_micro_batch_to_the_next():
    """Batch norm: that of a loop over Programs of one micro-batch; of gradients its mean."""
    small = ow.append_backward(ow.trace(carrying, batch_size=2))
    big = ow.SGD(RATE).minimize(ow.trace(carrying, batch_size=ROWS))
    names = [g.name for _, g in small.gradients]
    single, step = ow.compile(small, fetch=names), ow.compile(accumulate(big, 4), fetch=names)
    x, y = X[:ROWS], Y[:ROWS, None]
    one, state = single.init(), step.init()
    outs = []
    for i in range(0, ROWS, 2):
        one, out = single(one, x[i : i + 2], y[i : i + 2])
        outs.append(out)
    state, out = step(state, x, y)
    for name in {v.name for v in small.next_state} - {"before"}:
        equal(state[name], one[name])
    equal(out.loss, np.mean([o.loss for o in outs]))
    for name in names:
        equal(out[name], np.mean([o[name] for o in outs], 0))
    assert (int(state["seen"]), float(state["before"])) == (ROWS, 0.0)  # as it was before the step


@pytest.mark.parametrize("of", ["data", "activations"])
@pytest.mark.filterwarnings("ignore:.*as batch normalization does", "ignore:.*the loss is neither")
def test_statistics_are_those_of_numpy(of: str):
    """Of data, which is known before the loop, those of the whole batch; else of one part after the other."""

    def network():
        x, one = ow.data("x", (None, 3), "float64"), ow.parameter("one", (), "float64", lambda *_: 1.0)
        x = ow.layer.batch_norm(x if of == "data" else x * one, momentum=0.9) * one
        return ow.layer.mse(ow.layer.fc(x, 1), ow.data("y", (None, 1), "float64"))

    step = ow.compile(accumulate(ow.SGD(RATE).minimize(ow.trace(network, batch_size=ROWS)), 4))
    state, _ = step(step.init(), X[:ROWS], Y[:ROWS, None])
    mean, variance = np.zeros(3), np.ones(3)
    for piece in X[:ROWS].reshape(1 if of == "data" else 4, -1, 3):
        mean, variance = 0.9 * mean + 0.1 * piece.mean(0), 0.9 * variance + 0.1 * piece.var(0)
    equal(state["batch_norm_0/mean"], mean)
    equal(state["batch_norm_0/variance"], variance)


def test_prints_come_once_for_each_micro_batch_in_order(capsys):
    def loss(w, x):
        jax.debug.print("{}", x[0], ordered=True)
        return jnp.mean(x * w)

    step = ow.compile(accumulate(ow.SGD(RATE).minimize(loss, np.float64(1), np.arange(8.0)), 4))
    step(step.init(np.float64(1)), np.arange(8.0))
    jax.effects_barrier()
    assert capsys.readouterr().out.split() == ["0.0", "2.0", "4.0", "6.0"]


# ---------------------------------------------------------------- on several devices

MERGES = {
    "average": (ow.Average(), 2),
    "bucketed": (ow.merge.Bucketed(16), 4),
    "sharded": (ow.Sharded(), 4),
    "local sgd": (ow.merge.LocalSGD(2), 2),
}


@pytest.mark.parametrize("merge", MERGES)
def test_both_orders_on_devices(merge):
    strategy, devices = MERGES[merge]
    words, params, x = MODELS["words"]

    def loss(p, x, y):
        value, aux = words(p, x, y)
        return value, {**aux, "columns": aux["columns"].T}  # each device's rows stand in the first axis

    program = ow.Momentum(0.02).minimize(loss, params, x, LABELS, has_aux=True)
    spread = ow.replicate(program, devices, strategy)
    first, last = ow.replicate(accumulate(program, 2), devices, strategy), accumulate(spread, 2)
    assert str(first) == str(last)
    found, expected = (trained(p, params, (x, LABELS)) for p in (first, spread))
    check_equal(found, expected, 1e-10)


def test_devices_exchange_gradients_once_for_all_micro_batches():
    program = ow.replicate(accumulate(line(), 4), 2)
    assert not program.ops[0].body.collectives
    sent = ow.plan(program).sent
    assert sent == ow.plan(ow.replicate(line(), 2)).sent
    check_line(program)


@pytest.mark.filterwarnings("ignore:.*as batch normalization does")
@pytest.mark.parametrize("sync", [True, False])
def test_statistics_on_devices(sync):
    program = ow.SGD(RATE).minimize(ow.trace(carrying, batch_size=ROWS))
    spread = ow.replicate(accumulate(program, 2), 2, sync_batch_norm=sync)
    small = ow.replicate(ow.SGD(0.0).minimize(ow.trace(carrying, batch_size=4)), 2, sync_batch_norm=sync)
    step, single = ow.compile(spread), ow.compile(small)
    x, y = X[:ROWS], Y[:ROWS, None]
    state, _ = step(step.init(), x, y)
    one = single.init()
    for rows in ([0, 1, 4, 5], [2, 3, 6, 7]):  # what both devices take in one turn
        one, _ = single(one, x[rows], y[rows])
    for name in ("batch_norm_0/mean", "batch_norm_0/variance", "seen", "now"):
        equal(state[name], one[name])
    equal(state["before"], 0.0)  # as it was before the step


# ---------------------------------------------------------------- what else a Program is for


def test_under_jit_and_scan():
    step = ow.compile(accumulate(line(), 4))

    @jax.jit
    def run(state, x, y):
        return jax.lax.scan(lambda s, _: (step.function(s, x, y)[0], None), state, None, 3)[0]

    state = step.init(W)
    found = run(state, X[:ROWS], Y[:ROWS])
    for _ in range(3):
        state, _ = step(state, X[:ROWS], Y[:ROWS])
    equal(found.parameters, state.parameters)


def test_a_state_serves_both():
    program = line("adam")
    steps = [ow.compile(p) for p in (program, accumulate(program, 4))]
    assert steps[0].layout == steps[1].layout
    state, apart = steps[0].init(W), steps[0].init(W)
    for i in range(4):
        state, _ = steps[i % 2](state, X[:ROWS], Y[:ROWS])
        apart, _ = steps[0](apart, X[:ROWS], Y[:ROWS])
    equal(state.parameters, apart.parameters, 1e-11)
    assert state.is_spent is False


def test_the_listing_and_the_program_inside():
    program = accumulate(line(), 4)
    op = program.ops[0]
    assert "accumulate(x, y, w, steps=4)" in str(program)
    assert (op.made_by, op.attributes) == (ow.Pass.BACKWARD, {"steps": "4"})
    inside = op.subprograms["micro_batch"]
    assert inside["x"].shape == (2, 3)
    assert {o.made_by for o in inside.ops} == {ow.Pass.FORWARD, ow.Pass.BACKWARD}
    assert [t.op.type for t in program.updates] == ["count", "sgd"]


def test_the_way_back():
    program = accumulate(line(), 4)
    assert accumulation_of(program).steps == 4
    assert accumulation_of(line()) is None
    assert str(undone(program, accumulated)) == str(line())
    assert str(undone(ow.replicate(program, 2), accumulated)) == str(ow.replicate(line(), 2))
    assert str(ow.for_test(program)) == str(ow.for_test(line()))
    assert str(ow.graph.update_pass(program)) == str(ow.graph.update_pass(line()))


def temporary(program):
    return ow.compile(program)._first._compiled.memory_analysis().temp_size_in_bytes


def test_memory_is_that_of_a_micro_batch_and_of_one_buffer_for_each_gradient():
    def loss(w, x):
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    w, x = np.zeros((64, 64)), np.zeros((4096, 64))
    program = ow.Adam(0.1).minimize(loss, w, x)
    used = {steps: temporary(accumulate(program, steps)) for steps in (1, 8, 64)}
    assert used[8] < used[1] / 4
    assert used[64] < used[1] / 64 + 6 * w.nbytes


# ---------------------------------------------------------------- refusals


def refused(error, message, function, *args, **options):
    with pytest.raises(error, match=message):
        function(*args, **options)


def minimized(loss, *data):
    return ow.SGD(RATE).minimize(loss, W, *data, has_aux=True)


class Looking(ow.Optimizer):
    """Follows a gradient that it computes by itself."""

    type = ow.UpdateType.ACROSS
    evaluates_loss = True
    learning_rate: ow.Hyperparameter = 0.1

    def update(self, parameter, gradient, slots, loss):
        _, slopes = loss.value_and_gradient(*parameter)
        return tuple(p - self.learning_rate * s for p, s in zip(parameter, slopes, strict=True)), slots


def test_batches_that_do_not_divide():
    refused(
        ow.ArgumentError, "8 rows .'x'., which 3 micro-batches do not.*Feed 6 or 9", accumulate, line(), 3
    )
    step = ow.compile(accumulate(line(), 4))
    refused(ow.ArgumentError, "Feed 4 or 8", step, step.init(W), X[:6], Y[:6])
    apart = ow.compile(
        accumulate(ow.SGD(RATE).minimize(lambda w, x, y: jnp.mean(x @ w) + jnp.mean(y), W, X, Y), 4)
    )
    refused(ow.ArgumentError, "whole=", apart, apart.init(W), X[:8], Y[:4])
    message = "4 micro-batches on each of 4 devices do not divide. Feed 16"
    refused(ow.ArgumentError, message, ow.replicate, accumulate(line(), 4), 4)
    refused(ow.ArgumentError, message, accumulate, ow.replicate(line(), 4), 4)


@pytest.mark.parametrize("steps", [0, -1, 1.5, True, "4", None])
def test_steps_that_are_no_number(steps):
    refused(ow.ArgumentError, "steps is", accumulate, line(), steps)


def test_programs_that_cannot_be_accumulated():
    refused(ow.GraphError, "already, over 4", accumulate, accumulate(line(), 4), 2)
    refused(ow.GraphError, "no gradients", accumulate, ow.trace(square, W, X, Y, has_aux=True), 2)
    alone = ow.append_backward(ow.trace(lambda w: jnp.sum(w), W))
    refused(ow.ArgumentError, "no data with a batch", accumulate, alone, 2)
    looking = Looking().minimize(lambda w, x: jnp.mean(x @ w), W, X)
    refused(ow.GraphError, "'looking' reads 'x'", accumulate, looking, 2)
    refused(ow.ArgumentError, "is_sum=True", ow.replicate, accumulate(line(), 2), 2, ow.Sum())
    refused(ow.UnknownNameError, "weights", accumulate, line(), 2, example_weight="weights")


def test_results_that_cannot_be_put_together():
    pairs = minimized(lambda w, x: (jnp.mean(x @ w), x @ x.T), X)
    with pytest.warns(UserWarning, match="makes an array of all pairs of examples"):
        refused(ow.GraphError, r"float64\[16,16\] for the batch and float64\[4,4\]", accumulate, pairs, 4)
    first = minimized(lambda w, x: (jnp.mean(x @ w), x[0, 0] * w[0] > 0), X)
    with pytest.warns(UserWarning, match="takes some of the examples"):
        refused(ow.GraphError, "nothing says how to put it together", accumulate, first, 4)
    branch = minimized(lambda w, x: (jnp.mean(x @ w), jnp.sum(x) if len(x) > 8 else jnp.float64(0)), X)
    with pytest.warns(UserWarning, match="another graph than for the whole batch, from 'reduce_sum' at .*"):
        refused(ow.RecipeError, "builds another graph", accumulate, branch, 4)


def first_ones(w, x):
    return jnp.mean((x @ w)[:8] ** 2), (x @ w)[:4]


def by_length(w, x):
    return jnp.mean((x @ w) ** 2 if len(x) > 8 else jnp.abs(x @ w))


@pytest.mark.parametrize(("loss", "op"), [(first_ones, "slice"), (by_length, "integer_pow")])
def test_a_function_that_is_another_one_for_a_micro_batch_is_warned_of(loss, op):
    program = ow.SGD(RATE).minimize(loss, W, X, has_aux=loss is first_ones)
    with pytest.warns(
        UserWarning, match=f"another graph than for the whole batch, from '{op}' at .*means are"
    ):
        accumulate(program, 4)
    accumulate(program, 4, is_sum=False)


def test_a_function_that_takes_the_whole_batch_alone_says_where_it_was_traced_again():
    program = ow.SGD(RATE).minimize(lambda w, x: jnp.mean((x @ w).reshape(16) ** 2), W, X)
    words = r"traced for x of shape \(16, 3\), and again for \(4, 3\), that of a part of the batch"
    refused(ow.TraceError, words, accumulate, program, 4)


def test_data_that_is_as_long_as_the_batch_by_chance_is_named():
    classes = np.ones(ROWS)
    program = ow.SGD(RATE).minimize(
        lambda w, x, scale: jnp.mean((x @ w * scale) ** 2), np.ones((3, ROWS)), X[:ROWS], classes
    )
    words = r"x of shape \(8, 3\) and scale of shape \(8,\), .*say that it goes whole"
    refused(ow.TraceError, words, accumulate, program, 2)
    accumulate(program, 2, whole="scale")


def test_state_of_each_example_is_named():
    def loss(w, h, x):
        h = jnp.tanh(x * w + h)
        return jnp.mean(h**2), h

    def step(w, h, x):
        (found, h), grads = jax.value_and_grad(loss, has_aux=True)(w, h, x)
        return w - RATE * grads, h, found

    memory = np.zeros_like(X)
    words = r"x of shape \(16, 3\), .* If h of shape \(16, 3\) is of each example: .*is not cut"
    for program in (
        ow.SGD(RATE).minimize(loss, np.ones(3), X, state=memory),
        ow.adopt(step, np.ones(3), memory, X, carried=["w", "h"]),
    ):
        refused(ow.TraceError, words, accumulate, program, 4)


def test_what_is_printed_reads_the_statistic_of_the_whole_batch_or_its_own(capfd):
    """An op without results is no place for a statistic."""

    def loss(w, x, labels):
        told = labels >= 0
        jax.debug.print("{n} count", n=jnp.sum(told))
        return jnp.sum(told * jnp.sum((x @ w) ** 2, 1)) / jnp.sum(told)

    step = ow.compile(accumulate(ow.SGD(RATE).minimize(loss, np.ones((3, 3)), X[:ROWS], TOLD), 4))
    _, out = step(step.init(np.ones((3, 3))), X[:ROWS], TOLD)
    equal(out.loss, loss(np.ones((3, 3)), X[:ROWS], TOLD))
    jax.effects_barrier()
    assert "count" in capfd.readouterr().out


def test_an_activation_of_the_loop_cannot_be_fetched():
    refused(
        ow.UnknownNameError,
        "has no Variable named 'dot_general'",
        ow.compile,
        accumulate(line(), 4),
        ["dot_general"],
    )


def test_a_key_beside_a_largest_number():
    """The key is the same in all micro-batches, and has no largest one."""

    def loss(w, x, key):
        key, own = jax.random.split(key)
        h = (x @ w) * jax.random.bernoulli(own, 0.9, (3,))
        return jnp.mean(h**2), jnp.max(h)

    w, x = jnp.ones((3, 3)), jnp.arange(24.0).reshape(8, 3)
    alone = ow.SGD(0.1).minimize(loss, w, x, jax.random.key(0), has_aux=True)
    found = []
    for program in (alone, accumulate(alone, 4)):
        step = ow.compile(program)
        state, out = step(step.init(w), x, jax.random.key(3))
        found.append((out.loss, out.aux, state.parameters))
    for value, expected in zip(found[1], found[0], strict=True):
        np.testing.assert_allclose(value, expected, 1e-5)
