"""Batches that devices do not divide, filled up by ``example_weight``, against NumPy and one device."""

from functools import cache, partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compiled import compilations

import onward as ow
from onward.execute.portions import Filling

DEVICES, MOST = 4, 9
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(MOST, 3)), RNG.normal(size=MOST)
WEIGHT = RNG.uniform(0.5, 2.0, MOST)
W = RNG.normal(size=3)
SIZES = range(1, MOST + 1)
RATE = 0.5


@pytest.fixture(autouse=True)
def in_double():
    with jax.enable_x64(True):
        yield


# ---------------------------------------------------------------- in plain JAX


def mean_loss(w, x, y, example_weight):
    error = x @ w - y
    total = jnp.sum(example_weight)
    aux = {"error": jnp.sum(example_weight * jnp.abs(error)) / total, "each": error, "x": x}
    return jnp.sum(example_weight * error**2) / total, aux


def sum_loss(w, x, y, example_weight):
    error = x @ w - y
    return jnp.sum(example_weight * error**2), {"each": error, "x": x}


def by_hand(rows, weight=WEIGHT, total=False, w=W):
    """Loss, gradient and results of the first rows, in NumPy."""
    x, y, weight = X[:rows], Y[:rows], np.asarray(weight[:rows], float)
    error = x @ w - y
    whole = 1.0 if total else weight.sum()
    aux = {"each": error, "x": x}
    if not total:
        aux["error"] = (weight * np.abs(error)).sum() / whole
    return (weight * error**2).sum() / whole, 2 * x.T @ (weight * error) / whole, aux


MERGES = {
    "average": ow.Average(),
    "sum": ow.Sum(),
    "bucketed": ow.merge.Bucketed(8),
    "sharded": ow.Sharded(),
    "local sgd": ow.merge.LocalSGD(1),
}


def feeds(rows, weight=WEIGHT):
    return X[:rows], Y[:rows], weight[:rows]


@cache
def program_of(total=False, traced=8, dtype="float64"):
    weight = jax.ShapeDtypeStruct((traced,), dtype)
    loss = sum_loss if total else mean_loss
    return ow.SGD(RATE).minimize(loss, W, X[:traced], Y[:traced], weight, has_aux=True)


@cache
def step_of(merge="average", traced=8, dtype="float64", by="shard_map", **options):
    program = ow.replicate(program_of(merge == "sum", traced, dtype), DEVICES, MERGES[merge], **options)
    return ow.compile(program, by=by)


@cache
def fetching():
    fetch = ["all_mean(grad(w))", "x", "sub", "example_weight"]
    return ow.compile(step_of().program, fetch)


def equal(found, expected, rtol=1e-12, atol=1e-12):
    np.testing.assert_allclose(found, expected, rtol, atol)


def check(step, rows, weight=WEIGHT, total=False, fed=None, run=None, rtol=1e-12):
    """One step on the first rows is that of one device on the very same rows."""
    loss, gradient, aux = by_hand(rows, weight, total)
    state, out = (run or step)(step.init(W), *(feeds(rows, weight) if fed is None else fed))
    equal(out.loss, loss, rtol)
    equal(state.parameters, W - RATE * gradient, rtol)
    assert out.aux.keys() == aux.keys()
    for name, value in aux.items():
        assert out.aux[name].shape == np.shape(value)
        equal(out.aux[name], value, rtol)


@pytest.mark.parametrize("rows", [1, 3, 5, 7, 8])
@pytest.mark.parametrize("merge", MERGES)
def test_equal_to_the_batch_that_is_not_filled_up(merge, rows):
    check(step_of(merge), rows, total=merge == "sum")


def test_sizes_that_are_filled_up_to_the_same_are_compiled_once():
    """All sizes, by the average; what takes the rows that filled up away is one computation for each size."""
    step = step_of()
    filled = [rows for rows in SIZES if rows % DEVICES]
    assert compilations(lambda: [check(step, rows) for rows in SIZES]) <= 3 + len(filled)
    assert (step.traces, step.compilations) == (2, 3)  # for each device one row, two or three


def test_all_devices_get_rows_if_there_are_enough():
    """Five rows on four devices are 2, 1, 1, 1 and not 2, 2, 1, 0."""

    def loss(w, x, y, example_weight):
        """Of a part of the batch another graph, so that nothing but the weights is known."""
        error = (x @ w - y) ** 2
        return jnp.mean(error) if len(x) > 4 else jnp.mean(jnp.abs(error))

    program = ow.SGD(RATE).minimize(loss, W, *feeds(8))
    with pytest.warns(UserWarning, match="another graph"):
        step = ow.compile(ow.replicate(program, DEVICES), fetch=["share(example_weight)"])
    _, out = step(step.init(W), *feeds(5))
    mine = [WEIGHT[:2].sum(), *WEIGHT[2:5]]
    equal(out["share(example_weight)"], mine / np.mean(mine))


def test_the_gradients_that_are_merged():
    step = fetching()
    for rows in (2, 5):
        _, out = step(step.init(W), *feeds(rows))
        equal(out["all_mean(grad(w))"], by_hand(rows)[1])


def test_several_steps_of_adam_with_a_clip():
    program = ow.append_backward(ow.trace(mean_loss, W, *feeds(8), has_aux=True))
    program = ow.append_update(ow.clip_by_global_norm(program, 0.3), ow.Adam(0.05))
    states = []
    for p in (program, ow.replicate(program, DEVICES)):
        step = ow.compile(p)
        state = step.init(W)
        for rows in (7, 3, 7, 3):
            state, _ = step(state, *feeds(rows))
        states.append(state)
    equal(states[1].parameters, states[0].parameters, 1e-9)


def test_gradients_of_float32():
    x, y, weight = (a.astype("float32") for a in feeds(7))
    program = ow.SGD(RATE).minimize(mean_loss, W.astype("float32"), x, y, weight, has_aux=True)
    step = ow.compile(ow.replicate(program, DEVICES))
    for rows in (1, 7):
        state, out = step(step.init(W.astype("float32")), x[:rows], y[:rows], weight[:rows])
        loss, gradient, _ = by_hand(rows)
        equal(out.loss, loss, 1e-5)
        equal(state.parameters, W - RATE * gradient, 1e-5, 1e-6)


# ---------------------------------------------------------------- weights of other kinds, other feeds


@pytest.mark.parametrize("rows", [4, 7, 8])
@pytest.mark.parametrize("dtype", ["int32", "bool"])
def test_weights_that_are_no_floats(dtype, rows):
    check(step_of(dtype=dtype), rows, np.arange(1, MOST + 1).astype(dtype), rtol=1e-6)


@pytest.mark.parametrize("dtype", ["int32", "bool", "float32"])
def test_weights_that_are_no_floats_for_a_loss_of_float64(dtype):
    check(step_of(dtype=dtype), 5, np.arange(1, MOST + 1).astype(dtype))


@pytest.mark.parametrize("dtype", ["int32", "bool", "float16"])
def test_weights_that_are_no_floats_for_fewer_rows_than_devices(dtype):
    check(step_of(dtype=dtype), 3, np.arange(1, MOST + 1).astype(dtype), rtol=1e-3)


def test_a_device_whose_examples_all_weigh_nothing():
    """As where the caller has filled up the last batch himself."""
    weight = WEIGHT * (np.arange(MOST) < 6)
    check(step_of(), 8, weight)


def test_a_weight_of_nothing_here_and_there():
    check(step_of(), 8, WEIGHT * np.array([0, 1, 1, 0, 0, 1, 1, 0, 1]))


@pytest.mark.parametrize("rows", [3, 5, 8])
@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray, np.ndarray.tolist], ids=["numpy", "jax", "lists"])
def test_whatever_is_fed(kind, rows):
    check(step_of(), rows, fed=[kind(x) for x in feeds(rows)])


def test_arrays_that_lie_on_another_device():
    check(step_of(), 5, fed=[jax.device_put(x, jax.devices()[6]) for x in feeds(5)])


def test_by_name():
    step = step_of()
    _, out = step(step.init(W), example_weight=WEIGHT[:5], y=Y[:5], x=X[:5])
    equal(out.loss, by_hand(5)[0])


@pytest.mark.parametrize("rows", [2, 5, 8])
def test_under_jit(rows):
    step = step_of()
    check(step, rows, run=jax.jit(step))


def test_under_scan():
    step = step_of()
    many = [np.stack([x[:5], x[1:6]]) for x in (X, Y, WEIGHT)]
    _, outs = jax.lax.scan(lambda s, batch: step(s, *batch), step.init(W), many)
    assert outs.aux["each"].shape == (2, 5)
    equal(outs.loss[0], by_hand(5)[0])
    equal(outs.aux["x"], many[0])


@pytest.mark.parametrize("rows", [1, 5, 8])
def test_a_step_by_pmap(rows):
    check(step_of(by="pmap"), rows)
    check(step_of("sharded", by="pmap"), rows)


@pytest.mark.parametrize("traced", [2, 5, 7])
def test_traced_at_a_batch_that_does_not_divide(traced):
    for rows in (1, 4, traced, 8):
        check(step_of(traced=traced), rows)


def test_traced_at_a_batch_of_one():
    check(step_of(traced=1), 4)


def test_another_name():
    def loss(w, x, w8):
        return (w8 * (x @ w) ** 2).sum() / w8.sum()

    program = ow.replicate(ow.SGD(RATE).minimize(loss, W, X[:8], WEIGHT[:8]), DEVICES, example_weight="w8")
    step = ow.compile(program)
    _, out = step(step.init(W), X[:5], WEIGHT[:5])
    equal(out.loss, loss(W, X[:5], WEIGHT[:5]))
    step = ow.compile(ow.replicate(ow.SGD(RATE).minimize(loss, W, X[:8], WEIGHT[:8]), DEVICES))
    with pytest.raises(ow.ArgumentError, match=r"5 rows \('x'\), which 4 devices do not divide"):
        step(step.init(W), X[:5], WEIGHT[:5])


def test_weights_that_say_nothing_of_the_loss_of_a_sum():
    """The loss of ``Sum`` is the sum; what the function itself divides by its weights is still a mean."""
    step = step_of("sum")
    _, out = step(step.init(W), *feeds(6))
    equal(out.loss, by_hand(6, total=True)[0])


def test_a_weighted_mean_beside_a_loss_that_is_a_sum():
    def loss(w, x, example_weight):
        total = (example_weight * (x @ w) ** 2).sum()
        return total, total / example_weight.sum()

    program = ow.SGD(RATE).minimize(loss, W, X[:8], WEIGHT[:8], has_aux=True)
    step = ow.compile(ow.replicate(program, DEVICES, ow.Sum()))
    _, out = step(step.init(W), X[:6], WEIGHT[:6])
    equal(out.aux, loss(W, X[:6], WEIGHT[:6])[1])


# ---------------------------------------------------------------- what layers do


def network(is_whole=True):
    x, y = ow.data("x", (None, 3), "float64"), ow.data("y", (None,), "int32")
    weight = ow.data("example_weight", (None,), "float64")
    logits = ow.layer.fc(x, 3)
    found = {"accuracy": ow.layer.accuracy(logits, y, weights=weight), "logits": logits}
    if is_whole:
        found["size"] = ow.layer.mse(logits, jnp.zeros_like(logits), weights=weight)
        found["auc"] = ow.layer.auc(logits[:, 0], y == 0, weights=weight)
    return ow.layer.cross_entropy(logits, y, weights=weight), found


LABELS = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2], "int32")


@cache
def of_layers(merge=None):
    """All metrics on one device and by the average; how gradients are merged is nothing to them."""
    loss = partial(network, merge in (None, "average"))
    program = ow.SGD(RATE).minimize(ow.trace(loss, has_aux=True, batch_size=8))
    return ow.compile(program if merge is None else ow.replicate(program, DEVICES, MERGES[merge]))


@cache
def alone(rows, weights=tuple(WEIGHT)):
    step = of_layers()
    state, out = step(step.init(seed=1), X[:rows], LABELS[:rows], np.array(weights[:rows]))
    return state, out.value


@pytest.mark.parametrize(
    ("merge", "rows"),
    [("average", 3), *product(("average", "local sgd"), (5, 8))],
)
def test_costs_and_metrics_of_layers(merge, rows):
    step, (expected, (loss, metrics)) = of_layers(merge), alone(rows)
    state, out = step(step.init(seed=1), X[:rows], LABELS[:rows], WEIGHT[:rows])
    equal(out.loss, loss, 1e-10)
    assert out.aux.keys() == (metrics.keys() if merge == "average" else {"accuracy", "logits"})
    for name, value in out.aux.items():
        equal(value, metrics[name], 1e-10)
    for v in step.program.parameters:
        equal(state[v.name], expected[v.name], 1e-10)


@pytest.mark.parametrize("mask", [[1, 1, 1, 1, 1, 1, 0, 0], [0, 1, 0, 1, 1, 1, 0, 0], [0] * 8])
def test_layers_take_weights_of_nothing(mask):
    step, (expected, value) = of_layers("average"), alone(8, tuple(map(float, mask)))
    state, out = step(step.init(seed=1), X[:8], LABELS[:8], np.array(mask, float))
    jax.tree.map(lambda a, b: equal(a, b, 1e-10), out.value, value)
    for v in step.program.parameters:
        equal(state[v.name], expected[v.name], 1e-10)


def test_evaluated_on_many_devices():
    forward = ow.trace(network, has_aux=True, batch_size=8)
    step = ow.compile(ow.replicate(ow.for_test(forward), DEVICES))
    for rows in (3, 5):
        _, out = step(step.init(seed=1), X[:rows], LABELS[:rows], WEIGHT[:rows])
        jax.tree.map(lambda a, b: equal(a, b, 1e-10), out.value, alone(rows)[1])


def test_the_part_of_a_program_that_does_not_read_the_weights():
    program = ow.prune(of_layers("average").program, ["fc_0"])
    step = ow.compile(program)
    assert [v.name for v in program.inputs] == ["x"]
    for rows in (3, 5):
        _, out = step(step.init(seed=1), X[:rows])
        equal(out["fc_0"], alone(rows)[1][1]["logits"], 1e-10)


# ---------------------------------------------------------------- what is fetched


def test_activations_over_examples_are_fetched_without_the_filling():
    step = fetching()
    for rows in (3, 5):
        _, out = step(step.init(W), *feeds(rows))
        equal(out["x"], X[:rows])
        equal(out["sub"], X[:rows] @ W - Y[:rows])


def test_the_weights_are_fetched_as_they_were_fed():
    step = fetching()
    _, out = step(step.init(W), *feeds(5))
    equal(out["example_weight"], WEIGHT[:5])


def test_integers_that_the_weights_mask_count_right():
    def loss(w, x, example_weight):
        each = (x @ w) ** 2
        return jnp.sum(example_weight * each) / jnp.sum(example_weight), jnp.sum(
            (example_weight > 0.1) & (each > 0)
        )

    program = ow.SGD(RATE).minimize(loss, W, X[:8], WEIGHT[:8], has_aux=True)
    step = ow.compile(ow.replicate(program, DEVICES))
    for rows in (2, 5, 8):
        _, out = step(step.init(W), X[:rows], WEIGHT[:rows])
        assert out.aux == rows


# ---------------------------------------------------------------- weights of more axes


@pytest.mark.parametrize("tokens", [1, 2, 8])
def test_weights_of_every_token(tokens):
    def loss(w, x, example_weight):
        return (example_weight * (x @ w) ** 2).sum() / example_weight.sum()

    rng = np.random.default_rng(1)
    x, weight = rng.normal(size=(8, tokens, 3)), rng.uniform(0.5, 2, (8, tokens))
    step = ow.compile(ow.replicate(ow.SGD(RATE).minimize(loss, W, x, weight), DEVICES))
    _, out = step(step.init(W), x, weight)
    equal(out.loss, loss(W, x, weight))
    _, out = step(step.init(W), x[:5], weight[:5])
    equal(out.loss, loss(W, x[:5], weight[:5]))


# ---------------------------------------------------------------- what is refused


def unweighted():
    return ow.SGD(RATE).minimize(lambda w, x, y: jnp.mean((x @ w - y) ** 2), W, X[:8], Y[:8])


@pytest.mark.parametrize(("rows", "sizes"), [(1, "4"), (3, "4"), (5, "4 or 8"), (9, "8 or 12")])
@pytest.mark.parametrize("by", ["shard_map", "pmap"])
def test_without_weights_the_nearest_sizes_are_named(rows, sizes, by):
    step = ow.Step(ow.replicate(unweighted(), DEVICES), (), True, ahead=False, by=by)
    message = (
        rf"{rows} rows \('x'\), which 4 devices do not divide. Feed {sizes}; or let the loss take example_w"
    )
    with pytest.raises(ow.ArgumentError, match=message):
        step(step.init(W), X[:rows], Y[:rows])


def test_arrays_of_different_length():
    step = step_of()
    with pytest.raises(ow.ArgumentError, match="'example_weight' has 6 rows, 'x' 5; both are split"):
        step(step.init(W), X[:5], Y[:5], WEIGHT[:6])
    step = ow.Step(ow.replicate(unweighted(), DEVICES), (), True, ahead=False)
    with pytest.raises(ow.ArgumentError, match="'y' has 4 rows, 'x' 8; both are split over the devices"):
        step(step.init(W), X[:8], Y[:4])


def test_a_batch_of_nothing_is_as_on_one_device():
    """In plain JAX it is 0 / 0 on any number of devices; layers that ask for a batch refuse it."""
    for program in (program_of(), ow.replicate(program_of(), DEVICES)):
        step = ow.compile(program)
        state, out = step(step.init(W), *feeds(0))
        assert np.isnan(out.loss)
        assert out.aux["each"].shape == (0,)
        equal(state.parameters, W)
    for step in (of_layers(), of_layers("average")):
        with pytest.raises(ow.ArgumentError, match="a batch without rows has no mean"):
            step(step.init(), X[:0], LABELS[:0], WEIGHT[:0])


def test_a_batch_of_nothing_without_weights():
    step = ow.Step(ow.replicate(unweighted(), DEVICES), (), True, ahead=False)
    _, out = step(step.init(W), X[:0], Y[:0])
    assert np.isnan(out.loss)


# ---------------------------------------------------------------- what stays whole


def with_table(w, x, table):
    return ((x @ w + table.sum()) ** 2).mean(), table


def test_data_as_long_as_the_batch_that_stays_whole():
    table = np.arange(8.0)
    program = ow.SGD(RATE).minimize(with_table, W, X[:8], table, has_aux=True)
    replicated = ow.replicate(program, DEVICES, whole=["table"])
    assert [v.shape for v in replicated.inputs] == [(2, 3), (8,)]
    assert [v.placement for v in replicated.inputs] == [ow.Placement.SHARDED, ow.Placement.REPLICATED]
    step = ow.compile(replicated)
    rows = np.concatenate([X, X])
    for length in (8, 4, 16, 8):  # whole data of the length of the batch, of a part, and of neither
        _, out = step(step.init(W), rows[:length], table)
        equal(out.loss, with_table(W, rows[:length], table)[0])
        equal(out.aux, table)
    assert step.traces == 2
    for length in (4, 2, 1, 3):  # another table: of the length of the batch, of a part
        _, out = step(step.init(W), X[:4], table[:length])
        equal(out.loss, with_table(W, X[:4], table[:length])[0])


@pytest.mark.parametrize("where", [["table"], "table", ["t*"], [lambda v: len(v.shape) == 1]])
def test_what_stays_whole_is_named_by_pattern_or_predicate(where):
    program = ow.SGD(RATE).minimize(with_table, W, X[:8], np.ones(8), has_aux=True)
    assert [v.shape for v in ow.replicate(program, DEVICES, whole=where).inputs] == [(2, 3), (8,)]


def test_a_name_that_is_no_data():
    program = ow.SGD(RATE).minimize(with_table, W, X[:8], np.ones(8), has_aux=True)
    with pytest.raises(ow.UnknownNameError, match=r"whole: nothing is named 'tabel'. .*'table'"):
        ow.replicate(program, DEVICES, whole=["tabel"])


def test_nothing_is_split():
    program = ow.SGD(RATE).minimize(with_table, W, X[:7], np.ones(8), has_aux=True)
    step = ow.compile(ow.replicate(program, DEVICES, whole="*"))
    _, out = step(step.init(W), X[:7], np.ones(8))
    equal(out.loss, with_table(W, X[:7], np.ones(8))[0])


def test_nothing_is_split_by_pmap():
    program = ow.SGD(RATE).minimize(with_table, W, X[:7], np.ones(8), has_aux=True)
    ow.compile(ow.replicate(program, DEVICES, whole="*"), by="pmap")


def test_declared_data_without_none_is_no_batch():
    def declared():
        table, x = ow.data("table", (4, 3), "float64"), ow.data("x", (None, 3), "float64")
        return jnp.mean(ow.layer.fc(x + table.mean(0), 1) ** 2)

    program = ow.replicate(ow.SGD(RATE).minimize(ow.trace(declared, batch_size=8)), DEVICES)
    assert [v.shape for v in program.inputs] == [(4, 3), (2, 3)]


def test_whole_data_beside_weights():
    def loss(w, table, x, example_weight):
        each = (x @ w + table.sum()) ** 2
        return (example_weight * each).sum() / example_weight.sum(), each

    table = np.arange(3.0)
    program = ow.SGD(RATE).minimize(loss, W, table, X[:8], WEIGHT[:8], has_aux=True)
    replicated = ow.replicate(program, DEVICES)
    assert [v.shape for v in replicated.inputs] == [(3,), (2, 3), (2,)]
    step = ow.compile(replicated)
    for rows in (3, 5):
        _, out = step(step.init(W), table, X[:rows], WEIGHT[:rows])
        expected = loss(W, table, X[:rows], WEIGHT[:rows])
        jax.tree.map(equal, out.value, expected)


def of_label(w, x, label, example_weight):
    """A cross entropy whose graph is another one for one example: JAX leaves out axes."""
    each = -jnp.take_along_axis(jax.nn.log_softmax(x @ w), label[:, None], 1)[:, 0]
    return jnp.sum(example_weight * each) / jnp.sum(example_weight)


KEPT = {
    "the loss": lambda kept, v, x, y, weight: 0.9 * kept + 0.1 * v,
    "examples seen": lambda kept, v, x, y, weight: kept + jnp.sum(weight),
    "a weighted mean": lambda kept, v, x, y, weight: (
        0.9 * kept + 0.1 * jnp.sum(weight * (x[:, 0] > 0)) / jnp.sum(weight)
    ),
}


@pytest.mark.parametrize("traced", [8, 3])
@pytest.mark.parametrize("keep", KEPT.values(), ids=KEPT)
def test_a_short_batch_leaves_no_device_one_example_alone(keep, traced):
    """8, then 6, then 3 on four devices: of one example each, nothing would be known of the update."""

    def step(params, kept, x, label, example_weight):
        v, gradient = jax.value_and_grad(of_label)(params, x, label, example_weight)
        return params - RATE * gradient, keep(kept, v, x, label, example_weight), v

    w, zero = jnp.asarray(RNG.normal(size=(3, 3))), jnp.zeros(())
    label, weight = np.arange(MOST) % 3, np.where(np.arange(MOST) == 1, 0.0, WEIGHT)
    first, *batches = [(X[:n], label[:n], weight[:n]) for n in (traced, 8, 6, 3)]
    program = ow.adopt(step, w, zero, *first, carried=["params", "kept"])
    replicated = ow.compile(ow.replicate(program, DEVICES))
    carried, state = (w, zero), replicated.init((w, zero))
    for batch in batches:
        *carried, _ = jax.jit(step)(*carried, *batch)
        state, _ = replicated(state, *batch)
    jax.tree.map(lambda x, y: equal(x, y, 1e-10), state.parameters, tuple(carried))


@pytest.mark.filterwarnings("ignore:.*each device takes one example")
def test_without_weights_a_batch_of_one_example_each_is_refused_by_its_cause():
    def loss(w, x, label):
        return of_label(w, x, label, jnp.ones(len(x))) * (3 if len(x) == 1 else 1)

    def step(params, kept, x, label):
        v, gradient = jax.value_and_grad(loss)(params, x, label)
        return params - RATE * gradient, kept + jnp.sqrt(v), v

    w, zero = jnp.ones((3, 3)), jnp.zeros(())
    label = np.arange(MOST) % 3
    program = ow.adopt(step, w, zero, X[:8], label[:8], carried=["params", "kept"])
    replicated = ow.compile(ow.replicate(program, DEVICES))
    state = replicated.init((w, zero))
    with pytest.raises(ow.ArgumentError, match=r"one example, .* fewer devices, .*drop_last=True"):
        replicated(state, X[:4], label[:4])


def test_one_example_each_stays_alone_where_filling_up_would_change_the_loss():
    def loss(w, x, example_weight):
        return jnp.mean(example_weight * (x @ w) ** 2)

    step = ow.compile(ow.replicate(ow.SGD(RATE).minimize(loss, W, X[:8], WEIGHT[:8]), DEVICES))
    _, out = step(step.init(W), X[:4], WEIGHT[:4])
    equal(out.loss, loss(W, X[:4], WEIGHT[:4]))


def test_rows_that_fill_up_leave_results_with_several_rows_of_each_example():
    filling, rows = Filling.of(5, DEVICES, 2), np.arange(5)
    filled = filling.filled(rows)
    found = filling.emptied([np.repeat(filled, 2), filled, np.arange(7)])
    for value, expected in zip(found, (np.repeat(rows, 2), rows, np.arange(7)), strict=True):
        np.testing.assert_array_equal(value, expected)


def test_a_loss_that_reads_the_number_of_rows_in_a_way_of_its_own():
    def loss(w, x, example_weight):
        return jnp.mean(example_weight * (x @ w) ** 2) * np.sqrt(len(x))

    x, w = np.random.default_rng(0).normal(size=(8, 3)).astype("float32"), np.ones(3, "float32")
    weight = np.array([1, 2, 0, 0, 3, 0, 1, 5], "float32")
    program = ow.SGD(0.1).minimize(loss, w, x, weight)
    steps = [ow.compile(one) for one in (program, ow.replicate(program, 4))]
    (alone, out), (state, seen) = (step(step.init(w), x, weight) for step in steps)
    np.testing.assert_allclose(seen.loss, out.loss, rtol=1e-6)
    np.testing.assert_allclose(state.parameters, alone.parameters, rtol=1e-5)
