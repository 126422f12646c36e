"""Loss heads in chunks: every spelling is found and gives what JAX gives, what mixes rows is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.compiled import OPTIMIZED, at_once, expect_no, together, training

import onward as ow
from onward.core.jaxprs.body import body_of
from onward.core.jaxprs.products import reading_before
from onward.core.lower import lower
from onward.core.primitives.traits import Moves

BATCH, TIME, WIDTH, WORDS = 4, 3, 5, 24


def logits(p, x):
    return jnp.tanh(x) @ p["w"] + p["b"]


def picked(log_p, labels):
    return -jnp.take_along_axis(log_p, labels[..., None], axis=-1)[..., 0]


def flat(p, x):
    return logits(p, x).reshape(-1, WORDS)


def of_integers(p, x, labels, mask):
    return optax.softmax_cross_entropy_with_integer_labels(logits(p, x), labels).mean()


def of_one_hot(p, x, labels, mask):
    return optax.softmax_cross_entropy(flat(p, x), jax.nn.one_hot(labels.ravel(), WORDS)).mean()


def smoothed(p, x, labels, mask):
    wanted = optax.smooth_labels(jax.nn.one_hot(labels, WORDS), 0.1)
    return optax.softmax_cross_entropy(logits(p, x), wanted).mean()


def picked_from_log_softmax(p, x, labels, mask):
    return picked(jax.nn.log_softmax(logits(p, x)), labels).mean()


def by_hand(p, x, labels, mask):
    z = logits(p, x)
    z = z - jax.lax.stop_gradient(z.max(-1, keepdims=True))
    return jnp.mean(jnp.log(jnp.exp(z).sum(-1)) + picked(z, labels))


def with_z_loss(p, x, labels, mask):
    z = logits(p, x)
    norm = jax.nn.logsumexp(z, axis=-1)
    return jnp.mean(norm + picked(z, labels) + 1e-2 * norm**2)


def masked(p, x, labels, mask):
    each = optax.softmax_cross_entropy_with_integer_labels(logits(p, x), labels)
    return jnp.sum(each * mask) / jnp.maximum(mask.sum(), 1)


def all_at_once(p, x, labels, mask):
    return -jnp.einsum("btv,btv,bt->", jax.nn.one_hot(labels, WORDS), jax.nn.log_softmax(logits(p, x)), mask)


def looked_up_by_number(p, x, labels, mask):
    log_p = jax.nn.log_softmax(flat(p, x))
    return -log_p[jnp.arange(BATCH * TIME), labels.ravel()].sum()


def looked_up_by_two_numbers(p, x, labels, mask):
    places = jnp.arange(TIME)[:, None], jnp.arange(BATCH)[None]  # of which the second number is cut
    return -jax.nn.log_softmax(logits(p, x.swapaxes(0, 1)))[*places, labels.T].mean()


def layer(p, x, labels, mask):
    return ow.layer.cross_entropy(logits(p, x), labels)


def capped(p, x, labels, mask):
    return of_integers_of(5 * jnp.tanh(logits(p, x) / 5), labels)


def of_integers_of(z, labels):
    return optax.softmax_cross_entropy_with_integer_labels(z, labels).mean()


def tied(p, x, labels, mask):
    hidden = jnp.tanh(p["w"].T[labels] + x)
    return of_integers_of(jnp.einsum("btd,dv->btv", hidden, p["w"]), labels)


def time_first(p, x, labels, mask):
    return of_integers_of(logits(p, x.swapaxes(0, 1)), labels.T)


def low_then_wide(p, x, labels, mask):
    z = (jnp.tanh(x).astype("float32") @ p["w"].astype("float32")).astype("float64")
    return of_integers_of(z, labels)


def numbered_rows(p, x, labels, mask):
    counts = jnp.arange(BATCH * TIME) < 7
    return jnp.sum(jnp.where(counts[:, None], jax.nn.softmax(flat(p, x)), 0.0) ** 2)


def spread(p, x, labels, mask):
    each = picked(jax.nn.log_softmax(logits(p, x)), labels)
    return each.mean() + each.std()


def entropy_of_the_mean(p, x, labels, mask):
    mean = jax.nn.softmax(flat(p, x)).mean(0)
    return jnp.sum(mean * jnp.log(mean))


def rectified(p, x, labels, mask):
    return of_integers_of(jax.nn.relu(logits(p, x) * mask[..., None]), labels)  # 0 is met: relu has a rule


def of_each_word(p, x, labels, mask):
    return optax.sigmoid_binary_cross_entropy(logits(p, x), jax.nn.one_hot(labels, WORDS)).mean()


SPELLINGS = {
    f.__name__: f
    for f in (
        *(of_integers, of_one_hot, smoothed, picked_from_log_softmax, by_hand, with_z_loss, masked),
        *(all_at_once, looked_up_by_number, looked_up_by_two_numbers, layer, capped, tied, time_first),
        *(low_then_wide, numbered_rows, spread, entropy_of_the_mean),
        *(rectified, of_each_word),
    )
}


def numbers(dtype="float64"):
    rng = np.random.default_rng(0)
    p = {"w": rng.normal(size=(WIDTH, WORDS)).astype(dtype), "b": rng.normal(size=WORDS).astype(dtype)}
    x = rng.normal(size=(BATCH, TIME, WIDTH)).astype(dtype)
    labels = rng.integers(0, WORDS, (BATCH, TIME)).astype("int32")
    return p, x, labels, (rng.random((BATCH, TIME)) < 0.6).astype(dtype)


def with_gradients(program):
    """The loss of a forward Program and its gradients by the name of the parameter, as a function."""
    with_backward = ow.append_backward(program)
    run = lower(with_backward, [with_backward.loss, *(g for _, g in with_backward.gradients)])
    names = [p.name for p, _ in with_backward.gradients]

    def compute(p, *data):
        value, *gradients = run(
            [p[v.name] for v in program.state], [data[NAMES[v.name]] for v in program.inputs]
        )
        return value, dict(zip(names, gradients, strict=True))

    return compute


NAMES = {"x": 0, "labels": 1, "mask": 2}


@pytest.mark.filterwarnings("ignore::onward.UnreachedWarning")
def test_every_spelling_is_found_and_gives_the_values_and_gradients_of_jax():
    faults = {}
    with jax.enable_x64(True):
        given = numbers()
        cases = {}
        for name, f in SPELLINGS.items():
            program = ow.chunk(ow.trace(f, *given), 2)
            (head,) = ow.graph.chunks_of(program)
            assert head.count == 2, name
            cases[name] = (with_gradients(program), *given)
            cases[f"{name} by jax"] = (jax.value_and_grad(f), *given)
        found = jax.tree.map(np.asarray, at_once(cases, faults))
    expect_no(faults)
    for name in SPELLINGS:
        (value, gradients), (wanted, by_jax) = found[name], found[f"{name} by jax"]
        tolerance = 1e-6 if name == "low_then_wide" else 1e-12
        np.testing.assert_allclose(value, wanted, rtol=tolerance, err_msg=name)
        for key, gradient in gradients.items():
            np.testing.assert_allclose(gradient, by_jax[key], rtol=tolerance, atol=tolerance, err_msg=name)


def taught(w, x, labels, teacher):
    """By the logits of a teacher, whose softmax others read as well."""
    return -jnp.mean(jnp.sum(jax.nn.softmax(teacher) * jax.nn.log_softmax(x @ w), -1))


def taught_by_itself(w, x, labels, teacher):
    return jnp.mean(jnp.sum(jax.nn.softmax(x @ w) * (x @ w), -1))


def narrow(w, x, labels, teacher):
    """Row 256 is looked up as row 0: the numbers do not count the rows."""
    return -jnp.mean(jax.nn.log_softmax(x @ w)[jnp.arange(len(x)).astype("uint8"), labels])


@pytest.mark.parametrize("f", [taught, taught_by_itself])
def test_what_others_read_stays(f):
    rng = np.random.default_rng(0)
    w, x, teacher = (rng.normal(size=shape).astype("float32") for shape in ((3, 40), (12, 3), (12, 40)))
    given = w, x, rng.integers(0, 40, 12), teacher
    chunked = ow.append_backward(ow.chunk(ow.trace(f, *given), 4))
    run = lower(chunked, [chunked.loss, chunked.gradients[0][1]])
    cases = {"chunk": (lambda w, *data: run([w], data), *given), "jax": (jax.value_and_grad(f), *given)}
    found, wanted = together(cases).values()
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_numbers_that_are_too_narrow_count_no_rows():
    program = ow.trace(narrow, np.ones((3, 40), "f"), np.ones((300, 3), "f"), np.zeros(300, int), None)
    with pytest.raises(ow.GraphError, match=r"gather at test_chunk\.py"):
        ow.chunk(program, 4)


# ---------------------------------------------------------------- near misses


def log_p_of(z, labels):
    return picked(jax.nn.log_softmax(z), labels.ravel()).mean()


def against_each_other(p, x, labels, mask):
    z = flat(p, x) @ flat(p, x).T
    return log_p_of(z, jnp.arange(BATCH * TIME))


def dropped(p, x, labels, mask):
    kept = jax.random.bernoulli(jax.random.key(0), 0.5, (BATCH * TIME, WORDS))
    return log_p_of(jnp.where(kept, flat(p, x), 0), labels)


def printed(p, x, labels, mask):
    z = flat(p, x)
    jax.debug.print("{}", z)
    return log_p_of(z, labels)


def returned(p, x, labels, mask):
    z = flat(p, x)
    return log_p_of(z, labels), z


def of_flat(change):
    return lambda p, x, labels, mask: log_p_of(change(flat(p, x)), labels)


def by_wrong_number(p, x, labels, mask):
    return jax.nn.log_softmax(flat(p, x))[(jnp.arange(BATCH * TIME) + 1) % 12, labels.ravel()].mean()


def by_some_numbers(p, x, labels, mask):
    return jax.nn.log_softmax(flat(p, x))[jnp.arange(6), labels.ravel()[:6]].mean()


def with_rows_of_a_half(z):
    half = jnp.ones((BATCH * TIME // 2, WORDS))
    return z + jnp.concatenate([half, half])


NEAR_MISSES = {
    "softmax over the batch": (of_flat(lambda z: jax.nn.softmax(z, axis=0)), "reduces the rows to one"),
    "the largest of all": (of_flat(lambda z: z / z.max()), "reduces the rows to one"),
    "a statistic of the batch": (of_flat(lambda z: z - z.mean(0)), "a number that depends on all rows"),
    "sums along the batch": (of_flat(lambda z: jnp.cumsum(z, 0)), "runs along the rows"),
    "rows in another order": (of_flat(lambda z: z[::-1]), "runs along the rows"),
    "rows pushed on": (of_flat(lambda z: jnp.roll(z, 1, 0)), "does not keep the rows apart"),
    "rows padded": (of_flat(lambda z: jnp.pad(z, ((1, 0), (0, 0)))[:-1]), "does not keep the rows apart"),
    "rows pushed out": (
        of_flat(lambda z: jax.lax.pad(z, 0.0, ((1, -1, 0), (0, 0, 0)))),
        "does not keep the rows apart",
    ),
    "some of the rows": (by_some_numbers, "does not keep the rows apart"),
    "rows of something else": (of_flat(with_rows_of_a_half), "makes rows of something else"),
    "a loop": (of_flat(lambda z: jax.lax.map(jnp.sin, z)), "a function that is not looked into"),
    "another row": (by_wrong_number, "does not keep the rows apart"),
    "against each other": (against_each_other, "makes an array of all pairs of rows"),
    "dropout": (dropped, "draws random numbers"),
    "a debug print": (printed, "has an effect"),
    "logits returned": (returned, "read outside of the loss head and about as large as the logits"),
    "no product": (
        lambda p, x, labels, mask: jnp.sum(p["w"]) * x.sum(),
        "multiplies nothing with a parameter",
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_near_miss_is_refused_by_op_and_line_and_what_to_write(name):
    f, words = NEAR_MISSES[name]
    program = ow.trace(f, *numbers("float32"), has_aux=name == "logits returned")
    with pytest.raises(ow.GraphError, match="leave chunk away") as caught:
        ow.chunk(program, 2)
    assert words in str(caught.value)
    assert name == "no product" or "test_chunk.py:" in str(caught.value)


def test_what_else_cannot_be_chunked_is_refused():
    program = ow.trace(of_integers, *numbers("float32"))
    with pytest.raises(
        ow.GraphError, match=r"made by tanh at test_chunk.py.*expected the result of a product"
    ):
        ow.chunk(program, where="tanh")
    wide = ow.partition(minimized(deep_numbers()), {"d": 2}, {"w": (None, "d")}, batch="d")
    with pytest.raises(ow.GraphError, match=r"speaks of devices .chunk comes first, then partition"):
        ow.chunk(wide)
    with pytest.raises(ow.UnknownNameError, match="chunk, where: nothing is named 'logits'"):
        ow.chunk(program, where="logits")
    with pytest.raises(ow.ArgumentError, match=r"where is empty.*, or leave where= out to cut the loss head"):
        ow.chunk(program, where=ow.graph.attention_scores(program))
    with pytest.raises(ow.GraphError, match="in 2 chunks already, 'dot_general' among them"):
        ow.chunk(ow.chunk(program, 2), 2)
    with pytest.raises(ow.GraphError, match=r"in 4 chunks takes 288 B for each.* Write memory=288"):
        ow.chunk(ow.trace(of_one_hot, *numbers("float32")), memory=10)
    one = jax.tree.map(lambda a: a[:1, :1], numbers("float32")[1:])
    with pytest.raises(ow.GraphError, match="cannot be cut: no number divides the lengths"):
        ow.chunk(ow.trace(of_integers, numbers("float32")[0], *one))


# ---------------------------------------------------------------- what is made


@pytest.mark.parametrize(
    ("f", "options", "count"),
    [
        (of_integers, {"chunks": 2}, 2),
        (of_integers, {"chunks": 3}, 3),  # along the time, which is as long
        (of_integers, {}, 4),
        (time_first, {"chunks": 4}, 4),  # along the batch, the second dimension there
        (of_integers, {"memory": BATCH * TIME * WORDS * 4}, 1),
        (of_integers, {"memory": TIME * WORDS * 4}, 4),
        (of_integers, {"memory": "0.6 kB"}, 2),
        (of_integers, {"chunks": 2, "where": "dot_*"}, 2),
    ],
)
def test_the_number_of_chunks(f, options, count):
    (head,) = ow.graph.chunks_of(ow.chunk(ow.trace(f, *numbers("float32")), **options))
    assert head.count == count
    assert head.after * count == head.before == BATCH * TIME * WORDS * 4


def test_what_was_found_is_told():
    program = ow.chunk(ow.trace(of_one_hot, *numbers("float32")), 2)
    (head,) = ow.graph.chunks_of(program)
    assert str(head).startswith("dot_general at test_chunk.py:")
    assert str(head).endswith("ops, in 2 chunks: 576 B at a time in place of 1.1 KiB")
    assert "= chunk(" in str(program)
    assert "chunks=2" in str(program)
    inner = next(op for op in program.ops if op.type == "chunk").subprograms["chunk"]
    assert max(v.size for v in inner.variables.values()) == BATCH * TIME * WORDS // 2


def test_the_logits_never_exist_as_a_whole():
    rows, words = 512, 4096
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(8, words)).astype("float32"), rng.normal(size=(rows, 8)).astype("float32")
    program = ow.append_backward(
        ow.trace(lambda w, x, y: of_integers_of(x @ w, y), w, x, np.zeros(rows, int))
    )
    logits = rows * words * 4

    def temporaries(program):
        run = jax.jit(lower(program, [program.loss, program.gradients[0][1]]), compiler_options=OPTIMIZED)
        given = [v.aval for v in program.state], [v.aval for v in program.inputs]
        return run.lower(*given).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(program) > logits
    assert temporaries(ow.chunk(program, 16)) < logits / 4
    assert ow.memory(ow.chunk(program, 16)).peak < ow.memory(program).peak / 4


# ---------------------------------------------------------------- with other transforms


def network(p, x, labels, mask):
    hidden = x
    for layer in p["layers"]:
        with jax.named_scope("layer"):
            hidden = hidden + jnp.tanh(hidden @ layer)
    each = optax.softmax_cross_entropy_with_integer_labels(hidden @ p["w"], labels)
    return jnp.mean(each), jnp.argmax(hidden @ p["w"], -1)


TRANSFORMS = {
    "chunk": [ow.chunk],
    "chunk, micro-batches": [ow.chunk, lambda p: ow.accumulate(p, 2)],
    "roll, chunk": [ow.roll, ow.chunk],
    "chunk, roll": [ow.chunk, ow.roll],
    "chunk, recompute": [ow.chunk, lambda p: ow.recompute(p, scopes="layer", roll=False)],
    "guard, micro-batches, chunk": [lambda p: ow.guard(p, "skip"), lambda p: ow.accumulate(p, 2), ow.chunk],
}


def deep_numbers():
    p, *data = numbers("float32")
    rng = np.random.default_rng(2)
    layers = [rng.normal(size=(WIDTH, WIDTH)).astype("float32") / 4 for _ in range(6)]
    return {"layers": layers, "w": p["w"]}, *data


def in_chunks_by(transforms, program):
    for transform in transforms:
        program = transform(program)
    return program


def minimized(given):
    return ow.Momentum(1e-2, 0.9).minimize(network, *given, has_aux=True)


def test_it_composes_with_other_transforms_and_trains_as_the_plain_program():
    given = deep_numbers()
    params, *data = given
    batches = [np.stack([a, a]) for a in data]
    program = minimized(given)
    cases = {"plain": training(program, params, *batches)}
    for name, transforms in TRANSFORMS.items():
        made = in_chunks_by(transforms, program)
        assert len(ow.graph.chunks_of(made)) == 1, name
        cases[name] = training(made, params, *batches)
    found = together(cases)
    for name in TRANSFORMS:
        for key, value in found["plain"][0].items():
            np.testing.assert_allclose(found[name][0][key], value, 1e-5, 1e-6, err_msg=f"{name}: {key}")


@pytest.mark.parametrize(
    "transforms",
    [
        [ow.chunk, lambda p: ow.replicate(p, 2)],
        [ow.chunk, lambda p: ow.partition(p, {"d": 2}, {}, batch="d")],
    ],
    ids=["replicate", "partition"],
)
def test_on_several_devices_it_gives_what_one_device_does(transforms):
    params, *data = given = deep_numbers()
    step = ow.compile(in_chunks_by(transforms, minimized(given)), donate=False)
    _, out = step(step.init(params), *data)
    loss, _ = network(params, *data)
    np.testing.assert_allclose(out.loss, loss, rtol=1e-6)


def test_rows_that_divide_into_very_many_chunks_are_warned_of():
    params, *data = numbers("float32")
    rows = [np.resize(a, (17, *a.shape[2:])) for a in data]
    with pytest.warns(UserWarning, match="is in 17 chunks, where 2 were asked for"):
        ow.chunk(ow.trace(of_integers, params, *rows), 2)


@pytest.mark.parametrize("chunk_first", [False, True])
def test_a_head_with_low_rank_factors(chunk_first):
    params, *data = given = deep_numbers()
    program = ow.append_backward(ow.trace(network, *given, has_aux=True))
    adapted = ow.low_rank(program, rank=2)
    other = ow.low_rank(ow.chunk(program, 2), rank=2) if chunk_first else ow.chunk(adapted, 2)
    assert [head.count for head in ow.graph.chunks_of(other)] == [2]
    step = ow.compile(other, donate=False)
    state = step.init(params)
    head = program.parameters[-1].name
    state = state.replace({f"{head}/low_rank_b": np.ones_like(state[f"{head}/low_rank_b"])})
    _, out = step(state, *data)
    loss, _ = network(ow.merge_low_rank(other, state), *data)
    np.testing.assert_allclose(out.loss, loss, rtol=1e-5)


def test_another_batch_and_the_test_program_are_in_chunks_where_they_can_be():
    params, *data = given = deep_numbers()
    program = ow.chunk(minimized(given))
    assert [head.count for head in ow.graph.chunks_of(ow.for_test(program))] == [BATCH]
    step = ow.compile(program, donate=False)
    one = [a[:1, :1] for a in data]  # one row
    _, out = step(step.init(params), *one)
    np.testing.assert_allclose(out.loss, network(params, *one)[0], rtol=1e-6)
    assert [v.name for v in program.state] == [v.name for v in minimized(given).state]


def test_a_gradient_in_bfloat16_is_added_up_in_float32():
    rng = np.random.default_rng(0)
    w, x = rng.normal(size=(8, 32)), rng.normal(size=(64, 8))
    labels = rng.integers(0, 32, 64)

    def loss(w, x, labels):
        return of_integers_of((x @ w).astype("float32"), labels)

    low = jnp.asarray(w, "bfloat16"), jnp.asarray(x, "bfloat16"), labels
    cases = {
        "exact": (jax.grad(loss), *(a.astype("float32") for a in low[:2]), labels),
        "plain": (jax.grad(loss), *low),
    }
    program = ow.append_backward(ow.chunk(ow.trace(loss, *low), 64))
    run = lower(program, [program.gradients[0][1]])
    cases["chunk"] = (lambda w, x, labels: run([w], [x, labels])[0], *low)
    found = {name: np.asarray(value, "float32") for name, value in together(cases).items()}
    off = {name: np.abs(found[name] - found["exact"]).max() for name in ("plain", "chunk")}
    assert off["chunk"] < 1.5 * off["plain"]


# ---------------------------------------------------------------- attention

HEADS, LENGTH = 2, 16


def by_hand(q, k, v):
    z = jnp.einsum("bthd,bshd->bhts", q, k) / 2
    z = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), z, -jnp.inf)
    a = jnp.exp(z - z.max(-1, keepdims=True))
    return jnp.einsum("bhts,bshd->bthd", a / a.sum(-1, keepdims=True), v)


def with_a_bias(q, k, v):
    z = q.swapaxes(1, 2) @ k.transpose(0, 2, 3, 1)
    away = jnp.abs(jnp.arange(LENGTH)[:, None] - jnp.arange(LENGTH))
    return (jax.nn.softmax(z - 0.1 * away) @ v.swapaxes(1, 2)).swapaxes(1, 2)


def with_padding(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, mask=(jnp.arange(LENGTH) < 12)[None, None, None])


def with_grouped_queries(q, k, v):
    return jax.nn.dot_product_attention(q, k[:, :, :1], v[:, :, :1], is_causal=True)


def with_one_count(q, k, v):
    i = jnp.arange(LENGTH)
    z = jnp.where(i[:, None] >= i, jnp.einsum("bthd,bshd->bhts", q, k), -1e9)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(z), v)


def by_queries_first(q, k, v):
    z = jax.vmap(jax.vmap(lambda q, k: q @ k.T, 1, 0))(q, k)
    return jnp.einsum("bhts,bshd->bthd", jnp.exp(jax.nn.log_softmax(z, -1)), v)


ATTENTION = (by_hand, with_one_count, with_a_bias, with_padding, with_grouped_queries, by_queries_first)


def attending(p, x):
    for attention in ATTENTION:
        q, k, v = jnp.split((x @ p[attention.__name__]).reshape(1, LENGTH, HEADS, -1), 3, axis=-1)
        x = x + jnp.tanh(attention(q, k, v)).reshape(1, LENGTH, -1)
    return jnp.mean(x**2)


def test_attention_in_any_spelling_is_cut_by_its_queries():
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        p = {attention.__name__: rng.normal(size=(4, 12)) for attention in ATTENTION}
        given = p, rng.normal(size=(1, LENGTH, 4))
        program = ow.trace(attending, *given)
        chunked = ow.chunk(program, 4, where=ow.graph.attention_scores(program))
        found = ow.graph.chunks_of(chunked)
        assert [head.count for head in found] == [4] * len(ATTENTION), "some spelling was not found"
        cases = {"chunk": (with_gradients(chunked), *given), "jax": (jax.value_and_grad(attending), *given)}
        (value, gradients), (wanted, by_jax) = together(cases).values()
    np.testing.assert_allclose(value, wanted, rtol=1e-12)
    for name, gradient in by_jax.items():
        np.testing.assert_allclose(gradients[name], gradient, rtol=1e-10, atol=1e-12, err_msg=name)


def test_what_is_counted_outside_of_a_region_is_counted_once():
    def loss(p, x):
        i = jnp.arange(LENGTH)
        x = x + jnp.sin(0.1 * i)[:, None] + jnp.cos(0.1 * i)[:, None]
        q, k, v = jnp.split((x @ p).reshape(1, LENGTH, HEADS, -1), 3, axis=-1)
        return jnp.mean(jnp.where(i < 9, with_one_count(q, k, v).sum((0, 2, 3)), 0.0))

    program = ow.trace(loss, jnp.ones((4, 12)), jnp.ones((LENGTH, 4)))
    chunked = ow.chunk(program, 4, where=ow.graph.attention_scores(program))
    before, after = ([op.type for op in p.ops].count("iota") for p in (program, chunked))
    assert before == 2, "one of the loss, one of the mask"
    assert after == 1, "that of the mask is made within the region"


def linear(q, k, v):
    return jnp.einsum("thd,hde->the", q, jnp.einsum("thd,the->hde", k, v))


def of_all_pairs(q, k, v):
    return jax.nn.logsumexp(jnp.einsum("thd,shd->hts", q, k))


def over_the_queries(q, k, v):
    return jnp.einsum("hts,shd->thd", jax.nn.softmax(jnp.einsum("thd,shd->hts", q, k), 1), v)


def kept_by_the_user(q, k, v):
    z = jax.nn.softmax(jnp.einsum("thd,shd->hts", q, k))
    return jnp.einsum("hts,shd->thd", z, v), z


def short(q, k, v):
    return by_hand(*(jnp.concatenate([a] * 8, -1)[None] for a in (q, k, v)))


@pytest.mark.parametrize("f", [linear, of_all_pairs, kept_by_the_user, short])
def test_what_is_not_attention_or_would_gain_nothing_is_not_found(f):
    rows = jax.ShapeDtypeStruct((LENGTH, HEADS, 4), jnp.float32)
    program = ow.trace(lambda _, *qkv: f(*qkv), {}, rows, rows, rows)
    assert ow.graph.attention_scores(program) == ()


def test_a_softmax_over_queries_is_cut_by_what_it_leaves_apart():
    rows = jax.ShapeDtypeStruct((LENGTH, HEADS, 4), jnp.float32)
    program = ow.trace(lambda _, *qkv: over_the_queries(*qkv), {}, rows, rows, rows)
    found = ow.graph.attention_scores(program)
    assert [h.count for h in ow.graph.chunks_of(ow.chunk(program, 2, where=found))] == [HEADS]


def test_a_tied_head_reads_the_embedding_as_it_lies():
    """The transpose of an embedding would be an array as large as that, in front of the loop."""

    def tied(params, tokens, labels):
        h = jnp.tanh(params["words"][tokens] @ params["hidden"])
        logits = jnp.einsum("btd,vd->btv", h, params["words"]) + h @ params["words"].T
        log_p = jax.nn.log_softmax(logits)
        return -jnp.mean(jnp.take_along_axis(log_p, labels[..., None], -1))

    rng = np.random.default_rng(0)
    params = {"words": rng.normal(size=(60, 4)), "hidden": rng.normal(size=(4, 4))}
    params = jax.tree.map(jnp.float32, params)
    tokens = rng.integers(0, 60, (2, 8)), rng.integers(0, 60, (2, 8))
    plain = ow.SGD(0.1).minimize(tied, params, *tokens)
    less = ow.chunk(plain, 4)
    [head] = [op for op in less.ops if op.type == "chunk"]
    assert less["words"] in head.inputs
    forward = ow.graph.forward_pass(less)
    assert not [op.type for op in forward.ops if op.primitive.moves is Moves.PERMUTES]
    one, four = ow.compile(plain), ow.compile(less)
    (a, x), (b, y) = one(one.init(params), *tokens), four(four.init(params), *tokens)
    np.testing.assert_allclose(x.loss, y.loss, rtol=1e-6)
    for name in params:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1), (0, 2, 1), (2, 1, 0)])
def test_a_product_reads_what_stands_before_a_transpose(place, order):
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(3, 3, 3)).astype("float32") for _ in range(2)]
    turned = body_of(lambda x: [jnp.transpose(x, order)], values[0])
    is_found = []
    for sums in range(3):
        for batch in range(3):
            axes = ([sums], [(sums + 1) % 3]), ([] if batch == sums else [batch],) * 2
            if batch != sums and batch == (sums + 1) % 3:
                continue
            product = body_of(lambda x, y, axes=axes: [jax.lax.dot_general(x, y, axes)], *values)
            body = reading_before(product, place, turned)
            is_found.append(body is not None)
            if body is not None:
                given = [v.transpose(order) if i == place else v for i, v in enumerate(values)]
                np.testing.assert_allclose(body(*values)[0], product(*given)[0], rtol=1e-5)
    assert any(is_found)
