"""The numbers of a reader against those that JAX computes of all examples at once."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import onward as ow

N, CLASSES = 10, 4
RNG = np.random.default_rng(0)
X, LABEL = RNG.normal(size=(N, 3)).astype("float32"), RNG.integers(0, CLASSES, N).astype("int32")
MASK = np.array([0, 0, 0, 0, 1, 1, 0, 1, 0, 1], "float32")  # the first batch has nothing that counts
W = RNG.normal(size=(3, CLASSES)).astype("float32")


def errors_of(w, x, label):
    return -jnp.take_along_axis(jax.nn.log_softmax(x @ w), label[:, None], 1)[:, 0]


def confusion(w, x, label):
    return jnp.zeros((CLASSES, CLASSES)).at[label, jnp.argmax(x @ w, 1)].add(1.0)


def f1(found):
    both = jnp.maximum(found.sum(0) + found.sum(1), 1)
    return jnp.mean(2 * jnp.diag(found) / both)


def by_class(errors, label):
    total, count = (jax.ops.segment_sum(v, label, CLASSES) for v in (errors, jnp.ones_like(errors)))
    return jnp.mean(total / jnp.maximum(count, 1))


def correlation(a, b):
    centered = jnp.mean(a * b) - jnp.mean(a) * jnp.mean(b)
    return centered / jnp.sqrt((jnp.mean(a**2) - jnp.mean(a) ** 2) * (jnp.mean(b**2) - jnp.mean(b) ** 2))


def exact(w, x, label, mask):
    e = errors_of(w, x, label)
    right = jnp.argmax(x @ w, 1) == label
    told = {
        "mean": e.mean(),
        "sum": e.sum(),
        "count": jnp.sum(right),
        "accuracy": jnp.mean(right),
        "share": jnp.sum(right) / len(label),
        "rows": jnp.int32(len(label)),
        "largest": e.max(),
        "range": e.max() - e.min(),
        "any": jnp.any(e > 3),
        "all": jnp.all(e > 0),
        "perplexity": jnp.exp(jnp.mean(e)),
        "root of the mean square": jnp.sqrt(jnp.mean(e**2)),
        "sum and penalty": e.sum() + 0.1 * jnp.sum(w**2),
        "sums of roots": jnp.sqrt(e.mean()) + e.mean() + jnp.exp(jnp.sqrt(e.sum()) / len(label)),
        "weighted": jnp.average(e, weights=mask),
        "f1": f1(confusion(w, x, label)),
        "mean over classes": by_class(e, label),
        "correlation": correlation(e, x[:, 0]),
        "without one": e.sum() / (len(e) - 1),
        "a third of a count": jnp.sum(right) // 3,
        "by the root of the rows": e.sum() / np.sqrt(len(e)),
        "root of a sum by the rows": jnp.sqrt(e.sum() * len(e)),
        "by a table": e.mean() * np.array([len(e) - 1.0, 2.0], "float32")[0],
        "of parameters": jnp.sum(w),
        "a constant": jnp.float32(3.0),
    }
    return jnp.sum(mask * e) / jnp.sum(mask), told


def over_reader(function, batch, *data):
    model = ow.Model(ow.trace(function, W, *(x[:3] for x in data), has_aux=True), W)
    return ow.Evaluator(model).test(ow.batches(data, batch))


@pytest.mark.parametrize("batch", [3, 4, N, 1])  # of 3 the last has one
def test_numbers_of_a_reader_are_those_of_one_batch(batch):
    found = over_reader(exact, batch, X, LABEL, MASK)
    loss, told = exact(W, X, LABEL, MASK)
    assert found.keys() == {"loss", *told}
    for name, value in {"loss": loss, **told}.items():
        np.testing.assert_allclose(found[name], float(value), rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (jnp.median, "'sort' at .* runs along"),
        (jnp.std, "'sub' at .* reads a statistic of the examples"),
        (lambda e: e[0], "'slice' at .* takes some"),
        (lambda e: jnp.cumsum(e)[-1], "'cumsum' at .* runs along"),
        (lambda e: jnp.sum(e / (len(e) - 1)), "'div' at .* counts the examples"),
    ],
)
def test_a_number_that_cannot_be_told_is_the_mean_and_warned_of(number, why):
    def network(w, x, label):
        e = errors_of(w, x, label)
        return e.mean(), number(e)

    with pytest.warns(UserWarning, match=f"'aux' of a reader cannot be told .*: {why}"):
        found = over_reader(network, 4, X, LABEL)
    parts = [(X[i : i + 4], LABEL[i : i + 4]) for i in (0, 4, 8)]
    means = [len(x) * number(errors_of(W, x, label)) for x, label in parts]
    np.testing.assert_allclose(found["aux"], sum(means) / N, rtol=1e-5)
    np.testing.assert_allclose(found["loss"], errors_of(W, X, LABEL).mean(), rtol=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_allclose(
            over_reader(network, N, X, LABEL)["aux"], number(errors_of(W, X, LABEL)), rtol=1e-5
        )


def test_another_graph_for_some_lengths_is_warned_of():
    def network(w, x):
        e = jnp.sum((x @ w) ** 2, 1)
        return jnp.sqrt(jnp.mean(e)) if len(x) != 2 else jnp.sum(jnp.sqrt(e)), ()

    with pytest.warns(UserWarning, match="for a batch of 2 examples the function builds another graph"):
        found = over_reader(network, 4, X)
    sizes = [network(W, x)[0] * len(x) for x in (X[:4], X[4:8], X[8:])]
    np.testing.assert_allclose(found["loss"], sum(sizes) / N, rtol=1e-5)


def test_another_graph_for_all_examples_together_is_warned_of():
    def network(w, x):
        e = jnp.sum((x @ w) ** 2, 1)
        return jnp.sqrt(jnp.mean(e)) if len(x) < N else jnp.mean(jnp.sqrt(e)), ()

    with pytest.warns(UserWarning, match=f"for a batch of {N} examples the function builds another graph"):
        found = over_reader(network, 5, X)
    np.testing.assert_allclose(found["loss"], (network(W, X[:5])[0] + network(W, X[5:])[0]) / 2, rtol=1e-5)


def test_a_number_that_the_host_makes_of_a_mean_is_that_of_each_batch():
    def network(w, x):
        mean = jnp.mean((x @ w) ** 2)
        root = io_callback(lambda mean: np.sqrt(mean), jax.ShapeDtypeStruct((), "float32"), mean)
        return mean, root

    with pytest.warns(UserWarning, match="'aux' of a reader cannot be told .*'io_callback' at .* reads"):
        found = over_reader(network, 5, X)
    roots = [np.sqrt(network(W, x)[0]) for x in (X[:5], X[5:])]
    np.testing.assert_allclose(found["aux"], np.mean(roots), rtol=1e-5)


def test_data_in_containers_and_data_of_another_length():
    def network(w, batch, table):
        e = (batch["x"] @ w + table.sum()) ** 2
        return jnp.sqrt(jnp.mean(e)), jnp.sum(batch["mask"])

    batch, table = {"x": X, "mask": MASK}, np.arange(3, dtype="float32")
    model = ow.Model(ow.trace(network, W, batch, table, has_aux=True), W)
    parts = [(jax.tree.map(lambda x, i=i: x[i : i + 3], batch), table) for i in range(0, N, 3)]
    found = ow.Evaluator(model).test(parts)
    np.testing.assert_allclose(found["loss"], network(W, batch, table)[0], rtol=1e-5)
    assert found["aux"] == MASK.sum()


def test_a_program_from_a_file_gives_means(tmp_path):
    def network(w, x):
        return jnp.sqrt(jnp.mean((x @ w) ** 2)), ()

    ow.save(ow.Model(ow.trace(network, W, X, has_aux=True), W), tmp_path / "model")
    found = ow.Evaluator(ow.load(tmp_path / "model")).test([(X[:4],), (X[4:],)])
    expected = 0.4 * network(W, X[:4])[0] + 0.6 * network(W, X[4:])[0]
    np.testing.assert_allclose(found["loss"], expected, rtol=1e-5)


def test_a_large_count_is_exact():
    def network(w, x):
        many = jnp.int32(x)
        return jnp.mean(x @ w), (jnp.sum(many[:, 0]), jnp.maximum(jnp.sum(many[:, 1]), jnp.sum(many[:, 2])))

    for rows in (13, 26):  # 3 / 5 * 5 * 13 / 13 / 3 * 33,333 is not a whole number in float64
        found = over_reader(network, 5, np.full((rows, 3), 33_333, "float32"))
        assert (found["0"], found["1"]) == (33_333 * rows, 33_333 * rows)


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("sizes", [(4, 4, 2), (2, 2, 2, 4), (4, 1, 5)])
def test_a_matrix_that_is_as_long_as_a_batch_is_no_batch(sizes, place):
    matrix = np.diag(np.arange(1, 5, dtype="float32"))
    wide = RNG.normal(size=(N, 4)).astype("float32")

    def network(w, *data):
        x, mask, matrix = (*data[:place], *data[place + 1 :], data[place])
        e = jnp.sum((x @ matrix @ w) ** 2, 1)
        return jnp.sum(mask * e) / jnp.sum(mask), {"count": jnp.sum(mask), "root": jnp.sqrt(jnp.mean(e))}

    def batch(begin, end):
        data = [wide[begin:end], MASK[begin:end]]
        return (*data[:place], matrix, *data[place:])

    w = np.ones((4, 2), "float32")
    model = ow.Model(ow.trace(network, w, *batch(0, 4), has_aux=True), w)
    ends = np.cumsum(sizes).tolist()
    found = ow.Evaluator(model).test([batch(end - size, end) for size, end in zip(sizes, ends, strict=True)])
    loss, told = network(w, *batch(0, N))
    for name, value in {"loss": loss, **told}.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5)


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda w, x: jnp.sum((x.reshape(3, 3) @ w) ** 2), "takes no other length of 'x' than 3"),
        (lambda w, x: jnp.sum((x if len(x) < 5 else jnp.sin(x)) @ w), "for twice as many .* another graph"),
    ],
)
def test_of_a_function_of_one_length_the_means_are_given_and_warned_of(function, why):
    model = ow.Model(ow.trace(function, W, X[:3]), W)
    with pytest.warns(UserWarning, match=f"'loss' of a reader cannot be told .*: .*{why}"):
        found = ow.Evaluator(model).test([X[:3], X[3:6]])
    np.testing.assert_allclose(found["loss"], (function(W, X[:3]) + function(W, X[3:6])) / 2, rtol=1e-5)


def over_time(w, x, label):
    """The first axis is time, as recurrent networks of other libraries have it."""
    return errors_of(w, x.sum(0), label).mean()


def test_labels_that_are_no_examples_for_their_data_are_told():
    x = RNG.normal(size=(2, 8, 3)).astype("float32")
    model = ow.Model(ow.trace(over_time, W, x[:, :4], LABEL[:4]), W)
    with pytest.warns(UserWarning, match=r"'label' \(int32\[4\]\) is not as long as 'x' .* first axis"):
        ow.Evaluator(model).test([(x[:, :4], LABEL[:4]), (x[:, 4:], LABEL[4:8])])
    with pytest.raises(
        ow.ArgumentError, match=r"float32\[4,3\] of one batch and \(2, 3\) .* first axis of 'x'"
    ):
        ow.Evaluator(model).test([(x[:, :4], LABEL[:4]), (x[:, 4:6], LABEL[4:6])])


def of_lengths(function, *lengths, traced=5):
    """What a test over texts of these lengths gives, and each of them."""
    texts = [RNG.normal(size=(4 + i, n)).astype("float32") for i, n in enumerate(lengths)]
    model = ow.Model(
        ow.trace(function, np.float32(2), np.ones((4, traced), "float32"), has_aux=True), np.float32(2)
    )
    each = [function(jnp.float32(2), x) for x in texts]
    return ow.Evaluator(model).test(texts), texts, each


def of_texts(w, x):
    e, mask = (w * x) ** 2, jnp.abs(x) > 0.5
    told = {
        "sum": e.sum(),
        "most": e.max(),
        "masked": jnp.sum(mask * e) / jnp.sum(mask),
        "texts": e.mean(1).mean(),
    }
    return jnp.mean(e), {**told, "perplexity": jnp.exp(e.mean())}


def test_texts_of_one_length_are_tested_at_any():
    found, texts, _ = of_lengths(of_texts, 7, 7)
    loss, told = of_texts(2, jnp.concatenate(texts))
    for name, x in {"loss": loss, **told}.items():
        np.testing.assert_allclose(found[name], x, 1e-5)


@pytest.mark.parametrize("lengths", [(5, 8), (8, 5), (3, 9, 3)])
def test_texts_of_several_lengths_have_means_over_batches_of_what_counts_them(lengths):
    with pytest.warns(UserWarning, match="'x' has another shape in another batch") as said:
        found, texts, each = of_lengths(of_texts, *lengths)
    assert {str(w.message).split("'")[1] for w in said} == {"loss", "perplexity"}
    share = np.array([len(x) for x in texts]) / sum(map(len, texts))
    np.testing.assert_allclose(found["loss"], share @ [loss for loss, _ in each], 1e-5)
    for name in ("perplexity", "texts"):
        np.testing.assert_allclose(found[name], share @ [told[name] for _, told in each], 1e-5)
    e = np.concatenate([np.ravel(4 * x**2) for x in texts])
    expected = {"sum": e.sum(), "most": e.max(), "masked": e[e > 1].mean()}
    np.testing.assert_allclose([found[name] for name in expected], [*expected.values()], 1e-5)


@pytest.mark.parametrize("sizes", [(4, 3, 3), (4, 1, 4)])
@pytest.mark.parametrize("within", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_batches_that_cut_a_group_have_means_and_are_warned_of(sizes, within):
    @within
    def summed(r):
        return r[::2].mean(), (r[::2].sum(), r[::2].max())

    def network(w, x):
        return summed(x @ w)

    x, w = RNG.normal(size=(sum(sizes), 3)).astype("float32"), np.ones(3, "float32")
    model = ow.Model(ow.trace(network, w, x[:4], has_aux=True), w)
    parts = np.split(x, np.cumsum(sizes)[:-1])
    with pytest.warns(
        UserWarning, match=f"for a batch of {sizes[1]} examples the function builds another graph"
    ):
        found = ow.Evaluator(model).test(parts)
    each = [network(w, part)[0] for part in parts]
    np.testing.assert_allclose(found["loss"], np.average(each, weights=sizes), 1e-5)


@pytest.mark.parametrize(
    "network",
    [
        lambda w, x: jax.lax.top_k(x * w, min(len(x), 3))[0].mean(),
        lambda w, x: (x * w)[:, : len(x) // 2][:, :2].mean(),
        lambda w, x: (x * w * min(len(x), 3)).mean(),
        lambda w, x: jax.checkpoint(lambda h: h * min(len(x), 3))(x * w).mean(),
    ],
    ids=["length", "half", "number", "within"],
)
def test_a_short_batch_that_computes_otherwise_is_warned_of(network):
    x, w = RNG.normal(size=(8, 3)).astype("float32"), np.ones(3, "float32")
    model = ow.Model(ow.trace(network, w, x), w)
    parts = np.split(x, [4, 6])
    with pytest.warns(UserWarning, match="for a batch of 2 examples the function builds another graph"):
        found = ow.Evaluator(model).test(parts)
    np.testing.assert_allclose(
        found["loss"], np.average([network(w, p) for p in parts], weights=[4, 2, 2]), 1e-5
    )


def test_an_equation_of_each_example_that_is_solved_without_a_transpose():
    def network(w, x):
        halves = jax.lax.custom_linear_solve(lambda h: 2 * h, x * w, lambda _, h: h / 2)
        return halves.mean(), halves.max()

    x, w = RNG.normal(size=(8, 3)).astype("float32"), np.ones(3, "float32")
    model = ow.Model(ow.trace(network, w, x, has_aux=True), w)
    found = ow.Evaluator(model).test(np.split(x, [3, 7]))
    np.testing.assert_allclose([found["loss"], found["aux"]], [x.mean() / 2, x.max() / 2], 1e-5)


def test_graphs_of_several_sizes_beside_examples():
    def network(w, x, graph):
        return jnp.mean(w * x) + graph.mean(), jnp.sum(x)

    x, graphs = np.arange(8, dtype="float32"), [np.ones((n, n), "float32") for n in (6, 9, 3)]
    model = ow.Model(ow.trace(network, np.float32(1), x, graphs[0], has_aux=True), np.float32(1))
    with pytest.warns(UserWarning, match="'graph' has another shape in another batch"):
        found = ow.Evaluator(model).test([(np.roll(x, i), graph) for i, graph in enumerate(graphs)])
    assert found == {"loss": 4.5, "aux": 84}


BEFORE = {
    "a sum": lambda table, x: jnp.sum(x) + jnp.mean(table),
    "a median": lambda table, x: jnp.median(x) + jnp.sum(table),
    "the largest": lambda table, x: jnp.max(x) * jnp.mean(table),
    "a quotient": lambda table, x: jnp.sum(x * x) / jnp.sum(jnp.abs(x)) + jnp.sum(table),
}


@pytest.mark.parametrize("several", [False, True], ids=["a table", "weights and a table"])
@pytest.mark.parametrize("of", BEFORE.values(), ids=BEFORE)
def test_a_table_before_the_examples_is_not_taken_for_them_in_silence(of, several):
    """It is the same in all batches, and what comes behind it is not: the mean over batches, and a word."""

    def network(w, *data):
        return of(w * data[-2], data[-1]) + (jnp.sum(data[0]) if several else 0.0)

    x, table, weights = np.arange(12, dtype="float32"), np.ones((7, 3), "float32"), np.ones(5, "float32")
    before = (weights, table) if several else (table,)
    model = ow.Model(ow.trace(network, np.float32(1), *before, x[:6]), np.float32(1))
    batches = [(*before, x[:6]), (*before, x[6:])]
    each = [float(network(np.float32(1), *batch)) for batch in batches]
    with pytest.warns(UserWarning, match="'loss' of a reader cannot be told from that of each batch"):
        found = ow.Evaluator(model).test(batches)
    assert found["loss"] == pytest.approx(np.mean(each), rel=1e-6)


def test_a_key_or_a_table_of_each_batch_is_not_warned_of():
    def network(w, x, key, table):
        return jnp.mean((x @ w) ** 2) * jnp.sum(table) + 0 * jax.random.uniform(key)

    table = np.arange(5, dtype="float32")
    program = ow.trace(network, W, X[:4], jax.random.key(0), table, training=False)  # it draws on purpose
    model = ow.Model(program, W)
    batches = [(X[i : i + 4], jax.random.key(i), table[[0, 1, 2 + i // 4, 2 + i // 4, 4]]) for i in (0, 4)]
    found = ow.Evaluator(model).test(batches)  # of 5 and of 10, 12 at the end
    expected = np.mean([network(W, *batch) for batch in batches])
    np.testing.assert_allclose(found["loss"], expected, rtol=1e-5)


def test_a_table_is_compared_no_longer_once_the_examples_move(monkeypatch):
    asked = []
    monkeypatch.setattr(np, "array_equal", lambda x, other, **_: asked.append(x.shape) or (x == other).all())
    table, square = np.ones(5, "float32"), np.ones((3, 3), "float32")  # the second is as long as an example

    def network(w, x, table, square):
        return jnp.mean((x @ square @ w) ** 2) * jnp.sum(table)

    model = ow.Model(ow.trace(network, W, X[:2], table, square), W)
    batches = [(X[i : i + 2], table.copy(), square.copy()) for i in range(0, N, 2)]
    found = ow.Evaluator(model).test(batches)
    np.testing.assert_allclose(found["loss"], network(W, X, table, square), rtol=1e-5)
    assert [shape for shape in asked if shape] == [(2, 3), *[(3, 3)] * 4]


def test_empty_batches_are_left_out():
    def network(w, x):
        return jnp.mean((x @ w) ** 2), jnp.max(x)

    model = ow.Model(ow.trace(network, W, X, has_aux=True), W)
    for batches in ([X[:0], X], [X[:6], X[:0], X[6:]], [X, X[:0]]):
        found = ow.Evaluator(model).test(batches)
        np.testing.assert_allclose([found["loss"], found["aux"]], network(W, X), rtol=1e-5)
    with pytest.raises(ow.ArgumentError, match="the reader has no example: all batches are empty"):
        ow.Evaluator(model).test([X[:0], X[:0]])


@pytest.mark.parametrize("sizes", [(4, 4), (4, 6)])
def test_graphs_as_batches_give_means_and_are_warned_of(sizes):
    def network(w, matrix, x):
        return jnp.mean((matrix @ x @ w) ** 2), jnp.sum(x)

    graphs = [[RNG.normal(size=(n, wide)).astype("float32") for wide in (n, 3)] for n in sizes]
    model = ow.Model(ow.trace(network, W, *graphs[0], has_aux=True), W)
    with pytest.warns(UserWarning, match="cannot be told .*: the function takes no other length of") as said:
        found = ow.Evaluator(model).test(graphs)
    assert {str(w.message).split("'")[1] for w in said} == {"loss", "aux"}
    each = np.array([network(W, *graph) for graph in graphs])
    np.testing.assert_allclose([found["loss"], found["aux"]], sizes @ each / sum(sizes), rtol=1e-5)


def test_numbers_that_are_no_key_are_examples():
    def network(w, number, table, x):
        return jnp.mean((x @ w).sum(1) * number.astype("float32")) + 0 * table.sum()

    numbers, table = np.arange(4, dtype="uint32"), np.arange(3, dtype="float32")
    model = ow.Model(ow.trace(network, W, numbers[:2], table, X[:2]), W)
    found = ow.Evaluator(model).test([(numbers[i : i + 2], table, X[i : i + 2]) for i in (0, 2)])
    np.testing.assert_allclose(found["loss"], network(W, numbers, table, X[:4]), rtol=1e-5)


@pytest.mark.parametrize("step", ["test", "train"])
def test_a_complex_number_is_named_with_what_to_return_instead(step):
    def network(w, x):
        return jnp.mean((x @ w) ** 2), {"phase": jnp.mean(x @ w.astype("complex64"))}

    model = ow.Model(ow.trace(network, W, X, has_aux=True), W)
    run = ow.Evaluator(model).test if step == "test" else ow.Trainer(model, ow.SGD(0.1)).train
    with pytest.raises(ow.ArgumentError, match=r"'phase', which network returns, is complex64; .*jnp\.abs"):
        run([X])
    assert jnp.iscomplexobj(ow.Evaluator(model).forward(X).value[1]["phase"])


@pytest.mark.parametrize("rows", [4, 5])
def test_weights_of_classes_may_come_before_the_examples(rows):
    def network(w, weights, x, label):
        return jnp.sum(errors_of(w, x, label) * weights[label]) / jnp.sum(weights[label])

    weights = np.arange(1, CLASSES + 1, dtype="float32")
    model = ow.Model(ow.trace(network, W, weights, X[:rows], LABEL[:rows]), W)
    parts = [slice(0, 4), slice(4, 10)]
    found = ow.Evaluator(model).test([(weights, X[part], LABEL[part]) for part in parts])
    np.testing.assert_allclose(found["loss"], network(W, weights, X, LABEL), rtol=1e-5)
    others = [(weights + i, X[part], LABEL[part]) for i, part in enumerate(parts)]
    with pytest.warns(UserWarning, match="'loss' of a reader cannot be told from that of each .*'weights'"):
        mean = ow.Evaluator(model).test(others)["loss"]
    each = [network(W, *batch) for batch in others]
    np.testing.assert_allclose(mean, (4 * each[0] + 6 * each[1]) / 10, rtol=1e-5)
