"""Layers against flax, optax, sklearn and closed forms; in a trace, under jit, by name, and where refused."""

import inspect
from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from sklearn.metrics import roc_auc_score
from tests.compiled import OPTIMIZED, optimized

import onward as ow

L = ow.layer


def normal(i, *shape):
    return jax.device_put(np.random.default_rng(60 + i).normal(size=shape).astype("float32"))


def total(function):
    """A sum of all that the function returns, each number with its own factor; and what it returns."""

    def summed(*args):
        found = function(*args)
        factors = [np.cos(np.arange(y.size, dtype="float32")) for y in jax.tree.leaves(found)]
        return sum(map(jnp.vdot, jax.tree.leaves(found), factors)), found

    return summed


def compared(cases, options=None):
    """Gradients with respect to every argument, and values, of both of each case, by one program."""

    def both(args):
        return {
            name: [jax.grad(total(f), tuple(range(len(args[name]))), has_aux=True)(*args[name]) for f in pair]
            for name, (*pair, _) in cases.items()
        }

    return jax.jit(both, compiler_options=options)({name: args for name, (*_, args) in cases.items()})


def assert_agree(mine, other, rtol=1e-5, atol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol, atol), mine, other)


# ------------------------------------------------------------------------- against flax

X, IMAGE, SERIES, VOLUME = (
    normal(0, 4, 3),
    normal(1, 2, 6, 7, 4),
    normal(2, 2, 5, 3),
    normal(3, 1, 3, 4, 5, 2),
)
B = normal(4, 6)


def flax_conv(padding="SAME", **options):
    def apply(x, w, b):
        module = nn.Conv(6, w.shape[:-2], padding=padding, **options)
        return module.apply({"params": {"kernel": w, "bias": b}}, x)

    return apply


def flax_norm(module):
    return lambda x, s, o: module.apply({"params": {"scale": s, "bias": o}}, x)


def flax_attention(x, y, wq, wk, wv, wo, bq, bk, bv, bo, **options):
    module = nn.MultiHeadDotProductAttention(2, qkv_features=6, out_features=6)
    parts = {"query": (wq, bq), "key": (wk, bk), "value": (wv, bv)}
    params = {n: {"kernel": w.reshape(-1, 2, 3), "bias": b.reshape(2, 3)} for n, (w, b) in parts.items()}
    params["out"] = {"kernel": wo.reshape(2, 3, 6), "bias": bo}
    return module.apply({"params": params}, x, y, **options)


def our_attention(x, y, wq, wk, wv, wo, bq, bk, bv, bo, **options):
    w = {"query": wq, "key": wk, "value": wv, "out": wo}
    b = {"query": bq, "key": bk, "value": bv, "out": bo}
    return L.attention(x, y, heads=2, size=6, w=w, b=b, training=False, **options)


def flax_lstm(x, w, u, b, reverse=False):
    parts = zip("ifgo", jnp.split(w, 4, 1), jnp.split(u, 4, 1), jnp.split(b, 4), strict=True)
    cell = {}
    for gate, w, u, b in parts:
        cell |= {f"i{gate}": {"kernel": w}, f"h{gate}": {"kernel": u, "bias": b}}
    rnn = nn.RNN(nn.LSTMCell(2), return_carry=True, reverse=reverse, keep_order=True)
    (c, h), outputs = rnn.apply({"params": {"cell": cell}}, x)
    return outputs, (h, c)


def flax_gru(x, w, u, b, reverse=False):
    parts = zip("rzn", jnp.split(w, 3, 1), jnp.split(u, 3, 1), jnp.split(b, 4)[:3], strict=True)
    cell = {}
    for gate, w, u, bias in parts:
        cell |= {f"i{gate}": {"kernel": w, "bias": bias}, f"h{gate}": {"kernel": u}}
    cell["hn"]["bias"] = b[6:]
    rnn = nn.RNN(nn.GRUCell(2), return_carry=True, reverse=reverse, keep_order=True)
    h, outputs = rnn.apply({"params": {"cell": cell}}, x)
    return outputs, h


def pooled(kind, size, stride, padding):
    pool = {"max": nn.max_pool, "average": lambda *a: nn.avg_pool(*a, count_include_pad=False)}[kind]
    return lambda x: pool(x, size, stride, padding)


ATTENTION = (
    SERIES,
    normal(2, 2, 4, 3),
    *(normal(5 + i, 3, 6) for i in range(3)),
    normal(8, 6, 6),
    B,
    B,
    B,
    B,
)
MASK = normal(9, 2, 5, 4) > -1
MASKS = jnp.stack([MASK, ~MASK | (jnp.arange(4) == 0)], axis=1)
LSTM = (SERIES, normal(5, 3, 8), normal(6, 2, 8), normal(7, 8))
GRU = (SERIES, normal(5, 3, 6), normal(6, 2, 6), normal(7, 8))
AGAINST_FLAX = {
    "fc": (
        lambda x, w, b: L.fc(x, w=w, b=b),
        lambda x, w, b: nn.Dense(6).apply({"params": {"kernel": w, "bias": b}}, x),
        (X, normal(5, 3, 6), B),
    ),
    "fc of a series": (
        lambda x, w: L.fc(x, w=w, b=False, act="tanh"),
        lambda x, w: jnp.tanh(nn.Dense(6, use_bias=False).apply({"params": {"kernel": w}}, x)),
        (SERIES, normal(5, 3, 6)),
    ),
    "embedding": (
        lambda w: L.embedding(jnp.array([[1, 4], [1, 0]]), 5, 3, w=w),
        lambda w: nn.Embed(5, 3).apply({"params": {"embedding": w}}, jnp.array([[1, 4], [1, 0]])),
        (normal(5, 5, 3),),
    ),
    "conv": (
        lambda x, w, b: L.conv(x, 6, 3, w=w, b=b),
        flax_conv(),
        (IMAGE, normal(5, 3, 3, 4, 6), B),
    ),
    "conv with stride, groups": (
        lambda x, w, b: L.conv(x, 6, (3, 2), stride=(2, 1), padding="valid", groups=2, w=w, b=b),
        flax_conv("VALID", strides=(2, 1), feature_group_count=2),
        (IMAGE, normal(5, 3, 2, 2, 6), B),
    ),
    "conv with dilation, padding": (
        lambda x, w, b: L.conv(x, 6, 3, dilation=2, padding=((1, 2), (0, 1)), w=w, b=b),
        flax_conv(((1, 2), (0, 1)), kernel_dilation=2),
        (IMAGE, normal(5, 3, 3, 4, 6), B),
    ),
    "conv of a series": (
        lambda x, w, b: L.conv(x, 6, 3, padding=1, w=w, b=b),
        flax_conv(1),
        (SERIES, normal(5, 3, 3, 6), B),
    ),
    "conv of a volume": (
        lambda x, w, b: L.conv(x, 6, 2, w=w, b=b),
        flax_conv(),
        (VOLUME, normal(5, 2, 2, 2, 2, 6), B),
    ),
    "max pool": (lambda x: L.pool(x, 2), pooled("max", (2, 2), (2, 2), "VALID"), (IMAGE,)),
    "average pool": (
        lambda x: L.pool(x, 2, kind="average"),
        pooled("average", (2, 2), (2, 2), "VALID"),
        (IMAGE,),
    ),
    "max pool, padded": (
        lambda x: L.pool(x, 3, stride=2, padding="SAME"),
        pooled("max", (3, 3), (2, 2), "SAME"),
        (IMAGE,),
    ),
    "average pool, padded": (
        lambda x: L.pool(x, (3, 2), stride=1, padding=1, kind="average"),
        pooled("average", (3, 2), (1, 1), ((1, 1), (1, 1))),
        (IMAGE,),
    ),
    "pool of a series": (lambda x: L.pool(x, 2), pooled("max", (2,), (2,), "VALID"), (SERIES,)),
    "pool of a volume": (lambda x: L.pool(x, 2), pooled("max", (2, 2, 2), (2, 2, 2), "VALID"), (VOLUME,)),
    "global max pool": (lambda x: L.pool(x, "global"), lambda x: x.max((1, 2)), (IMAGE,)),
    "global average pool": (
        lambda x: L.pool(x, "global", kind="average"),
        lambda x: x.mean((1, 2)),
        (IMAGE,),
    ),
    "batch_norm": (
        lambda x, s, o: L.batch_norm(x, scale=s, offset=o),
        lambda x, s, o: nn.BatchNorm(False).apply(
            {"params": {"scale": s, "bias": o}}, x, mutable=["batch_stats"]
        )[0],
        (IMAGE, normal(5, 4), normal(6, 4)),
    ),
    "batch_norm by running statistics": (
        lambda x, s, o: L.batch_norm(x, scale=s, offset=o, mean=s, variance=o**2, training=False),
        lambda x, s, o: nn.BatchNorm(True).apply(
            {"params": {"scale": s, "bias": o}, "batch_stats": {"mean": s, "var": o**2}}, x
        ),
        (IMAGE, normal(5, 4), normal(6, 4)),
    ),
    "batch_norm of the second axis": (
        lambda x: L.batch_norm(x, axis=1, scale=False, offset=False),
        lambda x: nn.BatchNorm(False, axis=1, use_scale=False, use_bias=False).apply(
            {}, x, mutable=["batch_stats"]
        )[0],
        (IMAGE,),
    ),
    "layer_norm": (
        lambda x, s, o: L.layer_norm(x, scale=s, offset=o),
        flax_norm(nn.LayerNorm(epsilon=1e-5)),
        (SERIES, normal(5, 3), normal(6, 3)),
    ),
    "rms_norm": (
        lambda x, s: L.rms_norm(x, scale=s),
        lambda x, s: nn.RMSNorm().apply({"params": {"scale": s}}, x),
        (SERIES, normal(5, 3)),
    ),
    "attention": (our_attention, flax_attention, ATTENTION),
    "attention by XLA": (lambda *a: our_attention(*a, implementation="xla"), flax_attention, ATTENTION),
    "attention with a mask": (
        lambda *a: our_attention(*a, mask=MASK),
        lambda *a: flax_attention(*a, mask=MASK[:, None]),
        ATTENTION,
    ),
    "attention with a mask for each head": (
        lambda *a: our_attention(*a, mask=MASKS),
        lambda *a: flax_attention(*a, mask=MASKS),
        ATTENTION,
    ),
    "causal attention": (
        lambda x, *a: our_attention(x, x, *a, causal=True),
        lambda x, *a: flax_attention(x, x, *a, mask=jnp.tril(jnp.ones((5, 5), bool))),
        (SERIES, *ATTENTION[2:]),
    ),
    "lstm": (lambda x, w, u, b: L.lstm(x, 2, w=w, u=u, b=b), flax_lstm, LSTM),
    "lstm in reverse": (
        lambda x, w, u, b: L.lstm(x, 2, w=w, u=u, b=b, reverse=True),
        lambda *a: flax_lstm(*a, reverse=True),
        LSTM,
    ),
    "gru": (lambda x, w, u, b: L.gru(x, 2, w=w, u=u, b=b), flax_gru, GRU),
    "gru in reverse": (
        lambda x, w, u, b: L.gru(x, 2, w=w, u=u, b=b, reverse=True),
        lambda *a: flax_gru(*a, reverse=True),
        GRU,
    ),
}


@cache
def beside_flax(pooling):
    """What has pooling is compiled with all optimizations."""
    cases = {name: case for name, case in AGAINST_FLAX.items() if ("pool" in name) is pooling}
    return compared(cases, OPTIMIZED if pooling else None)


@pytest.mark.parametrize("name", AGAINST_FLAX)
def test_values_and_gradients_are_those_of_flax(name):
    assert_agree(*beside_flax("pool" in name)[name])


@pytest.mark.parametrize("layer", [L.lstm, L.gru])
def test_a_series_can_be_read_in_two_parts(layer):
    gates = 8 if layer is L.lstm else 6
    w = {"w": normal(5, 3, gates), "u": normal(6, 2, gates), "b": False}

    @jax.jit
    def whole_and_parts(series):
        first, state = layer(series[:, :2], 2, **w)
        second, after = layer(series[:, 2:], 2, initial=state, **w)
        return layer(series, 2, **w), (jnp.concatenate([first, second], 1), after)

    whole, parts = whole_and_parts(SERIES)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), parts, whole)


def test_what_comes_later_does_not_reach_causal_attention():
    def last_seen(x):
        return our_attention(x, x, *ATTENTION[2:], causal=True)[0, 2].sum()

    reached = np.abs(jax.jit(jax.grad(last_seen))(SERIES)).sum(-1)
    assert (reached[0] > 0).tolist() == [True, True, True, False, False]
    assert float(reached[1].sum()) == 0


DROPPED = dict(zip(["query", "key", "value", "out"], normal(5, 4, 4, 4), strict=True))


def dropping(rate):
    """Attention to all and causal attention, of which a part of the weights is dropped."""
    x = normal(6, 1, 3, 4)
    return tuple(
        L.attention(x, heads=2, causal=causal, dropout=rate, w=DROPPED, b=False) for causal in (False, True)
    )


@cache
def dropped_at_random():
    """What 400 steps found, with dropout; and what is without it, and in a test program."""
    step = ow.compile(ow.trace(lambda: dropping(0.2)))
    state, found = step.init(), []
    for _ in range(400):
        state, out = step(state)
        found.append(out.value)
    p = ow.trace(lambda: dropping(0.2), training=False)
    untrained = ow.core.lower.lower(p, p.outputs)
    return found, *jax.jit(lambda: (dropping(0.0), untrained([], [])))()


@pytest.mark.parametrize("causal", [False, True])
def test_attention_that_drops_weights_keeps_their_mean(causal):
    steps, whole, untrained = dropped_at_random()
    found, whole, untrained = [out[causal] for out in steps], whole[causal], untrained[causal]
    np.testing.assert_allclose(np.mean(found, 0), whole, atol=5 * np.std(found, 0).max() / 20)
    assert np.std(found, 0).max() > 0.01
    np.testing.assert_allclose(untrained, whole, rtol=1e-5)


# ------------------------------------------------------------------------- dropout, batch_norm: state


def test_dropout_drops_at_its_rate_another_way_each_step():
    step = ow.compile(ow.trace(lambda: L.dropout(ow.data("x", (None,)), 0.3)))
    x = np.ones(20_000, np.float32)
    state, first = step(step.init(), x)
    _, second = step(state, x)
    assert sorted(set(np.unique(first.loss))) == [0, np.float32(1) / np.float32(0.7)]
    np.testing.assert_allclose([np.mean(first.loss == 0), np.mean(first.loss)], [0.3, 1.0], atol=0.02)
    np.testing.assert_allclose(np.mean((first.loss == 0) & (second.loss == 0)), 0.09, atol=0.02)


def test_two_dropouts_of_a_step_differ():
    step = ow.compile(ow.trace(lambda: (L.dropout(jnp.ones(99), 0.5), L.dropout(jnp.ones(99), 0.5))))
    _, out = step(step.init())
    assert not np.array_equal(out["dropout_0"], out["dropout_1"])


@pytest.mark.parametrize(("rate", "training"), [(0.5, False), (0.0, True)])
def test_dropout_that_drops_nothing_declares_nothing(rate, training):
    program = ow.trace(lambda: 2 * L.dropout(ow.data("x", (None,)), rate), training=training)
    assert (len(program.ops), program.state) == (1, ())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_running_statistics_are_those_of_flax(dtype):
    step = ow.compile(ow.trace(lambda: L.batch_norm(ow.data("x", (None, 3), dtype), momentum=0.8)))
    state, module = step.init(), nn.BatchNorm(False, momentum=0.8)
    theirs = jax.jit(module.init)(jax.random.key(0), X)
    apply = jax.jit(lambda variables, x: module.apply(variables, x, mutable=["batch_stats"])[1])
    for i in range(4):
        x = (5 + i * np.asarray(normal(i, 6, 3))).astype(dtype)
        state, out = step(state, x)
        theirs |= apply(theirs, x)
        assert out.loss.dtype == dtype
    for name, other in (("mean", "mean"), ("variance", "var")):
        found = state[f"batch_norm_0/{name}"]
        assert found.dtype == "float32"
        np.testing.assert_allclose(found, theirs["batch_stats"][other], rtol=2e-5)


def test_the_test_program_normalizes_with_running_statistics():
    def network():
        return L.batch_norm(ow.data("x", (None, 3)))

    program = ow.trace(network, training=False)
    assert [v.name for v in program.state] == [
        f"batch_norm_0/{n}" for n in ("mean", "variance", "scale", "offset")
    ]
    assert program.next_state == {}


def test_batch_norm_outside_of_a_trace_asks_for_running_statistics_in_test_alone():
    L.batch_norm(X, scale=False, offset=False)
    with pytest.raises(ow.ArgumentError, match="'mean'"):
        L.batch_norm(X, scale=False, offset=False, training=False)


def test_batch_norm_may_be_given_state_of_ones_own():
    def network():
        mean, variance = ow.state("m", (3,)), ow.state("v", (3,))
        return L.batch_norm(ow.data("x", (None, 3)), mean=mean, variance=variance)

    assert [v.name for v in ow.trace(network).next_state] == ["m", "v"]


# ------------------------------------------------------------------------- costs and metrics

LOGITS = normal(0, 6, 4)
P = jax.device_put(np.random.default_rng(1).dirichlet(np.ones(4), 6).astype("float32"))
LABELS = jax.device_put(np.array([0, 3, 1, 1, 2, 0], "int32"))
WEIGHTS = jax.device_put(np.array([1, 0, 2, 1, 0, 0.5], "float32"))
ONE_HOT = jax.device_put(np.eye(4, dtype="float32")[np.asarray(LABELS)])
BITS = jax.device_put((np.asarray(normal(2, 6, 4)) > 0).astype("float32"))


def weighted(losses):
    return (losses * WEIGHTS).sum() / WEIGHTS.sum()


def integer(logits):
    return optax.softmax_cross_entropy_with_integer_labels(logits, LABELS)


COSTS = {
    "mse": (L.mse, lambda a, b: ((a - b) ** 2).mean(), (LOGITS, P)),
    "mse, weighted": (
        lambda a, b: L.mse(a, b, weights=WEIGHTS),
        lambda a, b: weighted(((a - b) ** 2).mean(1)),
        (LOGITS, P),
    ),
    "huber": (
        lambda a, b: L.huber(a, b, delta=0.7),
        lambda a, b: optax.huber_loss(a, b, delta=0.7).mean(),
        (LOGITS, P),
    ),
    "cross_entropy": (lambda x: L.cross_entropy(x, LABELS), lambda x: integer(x).mean(), (LOGITS,)),
    "cross_entropy of a column": (
        lambda x: L.cross_entropy(x, LABELS[:, None]),
        lambda x: integer(x).mean(),
        (LOGITS,),
    ),
    "cross_entropy of one-hot integers": (
        lambda x: L.cross_entropy(x, ONE_HOT.astype(int)),
        lambda x: integer(x).mean(),
        (LOGITS,),
    ),
    "cross_entropy of a series": (
        lambda x: L.cross_entropy(x.reshape(2, 3, 4), LABELS.reshape(2, 3)),
        lambda x: integer(x).mean(),
        (LOGITS,),
    ),
    "cross_entropy, weighted": (
        lambda x: L.cross_entropy(x, LABELS, weights=WEIGHTS),
        lambda x: weighted(integer(x)),
        (LOGITS,),
    ),
    "cross_entropy of probabilities": (
        L.cross_entropy,
        lambda x, p: optax.softmax_cross_entropy(x, p).mean(),
        (LOGITS, P),
    ),
    "cross_entropy, smoothed": (
        lambda x: L.cross_entropy(x, LABELS, label_smoothing=0.2),
        lambda x: optax.softmax_cross_entropy(x, optax.smooth_labels(ONE_HOT, 0.2)).mean(),
        (LOGITS,),
    ),
    "cross_entropy of probabilities, smoothed": (
        lambda x: L.cross_entropy(x, P, label_smoothing=0.2),
        lambda x: optax.softmax_cross_entropy(x, optax.smooth_labels(P, 0.2)).mean(),
        (LOGITS,),
    ),
    "binary_cross_entropy": (
        lambda x: L.binary_cross_entropy(x, BITS),
        lambda x: optax.sigmoid_binary_cross_entropy(x, BITS).mean(),
        (LOGITS,),
    ),
    "binary_cross_entropy of probabilities": (
        L.binary_cross_entropy,
        lambda x, p: optax.sigmoid_binary_cross_entropy(x, p).mean(),
        (LOGITS, P),
    ),
    "binary_cross_entropy of integers": (
        lambda x: L.binary_cross_entropy(x, BITS.astype(int), weights=WEIGHTS),
        lambda x: weighted(optax.sigmoid_binary_cross_entropy(x, BITS).mean(1)),
        (LOGITS,),
    ),
    "cosine_similarity": (L.cosine_similarity, optax.cosine_similarity, (LOGITS, P)),
    "perplexity": (
        lambda x: L.perplexity(L.cross_entropy(x, LABELS)),
        lambda x: jnp.exp(integer(x).mean()),
        (LOGITS,),
    ),
}
EXTREME = {
    "cross_entropy": (L.cross_entropy, [[1e4, -1e4, 0.0]], [1], 2e4),
    "cross_entropy of an impossible class": (L.cross_entropy, [[0.0, 0.0, -np.inf]], [1], np.log(2)),
    "binary_cross_entropy": (L.binary_cross_entropy, [-1e4, 1e4], [1, 1], 5e3),
    "binary_cross_entropy near 0": (L.binary_cross_entropy, [20.0], [1], np.log1p(np.exp(-20.0))),
    "cosine_similarity": (L.cosine_similarity, [[0.0, 0.0]], [[1.0, 0.0]], 0.0),
    "huber": (L.huber, [1.0], [1.0], 0.0),
}


@cache
def beside_optax():
    return compared(COSTS)


@cache
def at_extremes():
    """Of each case the cost and its gradient, by one program."""

    def of(name, prediction):
        cost, _, target, _ = EXTREME[name]
        return jax.value_and_grad(lambda p: cost(p, jnp.array(target)).sum())(prediction)

    predictions = {name: jnp.array(prediction) for name, (_, prediction, *_) in EXTREME.items()}
    return jax.jit(lambda predictions: {name: of(name, p) for name, p in predictions.items()})(predictions)


@pytest.mark.parametrize("name", COSTS)
def test_costs(name):
    assert_agree(*beside_optax()[name])


@pytest.mark.parametrize("name", EXTREME)
def test_costs_at_extremes(name):
    found, gradient = at_extremes()[name]
    np.testing.assert_allclose(found, EXTREME[name][-1], rtol=1e-5)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("cost", [L.mse, L.huber, L.cross_entropy, L.binary_cross_entropy])
def test_costs_compute_in_32_bits(cost):
    half = LOGITS.astype("bfloat16")
    found, expected = jax.jit(lambda half, wide: (cost(half, P), cost(wide, P)))(half, half.astype("float32"))
    assert found.dtype == "float32"
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_an_unknown_label_makes_the_cost_nan_and_no_weight_makes_it_zero():
    above, below = (jnp.array([0, 3, label, 1, 2, 0]) for label in (4, -1))

    @jax.jit
    def costs(x):
        unknown = [L.cross_entropy(x, labels) for labels in (above, below)]
        return unknown, L.cross_entropy(x, LABELS, weights=0 * WEIGHTS)

    unknown, weightless = costs(LOGITS)
    assert np.isnan(unknown).all()
    assert float(weightless) == 0


AUC = jax.jit(L.auc)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("digits", [0, 1, 5])
def test_auc_is_that_of_sklearn(seed, digits):
    rng = np.random.default_rng(seed)
    scores, labels = rng.normal(size=50).round(digits).astype("float32"), rng.random(50) < 0.3
    expected = roc_auc_score(labels, scores)
    np.testing.assert_allclose(AUC(scores, labels), expected, rtol=1e-5)
    np.testing.assert_allclose(AUC(scores[:, None], labels[:, None].astype(int)), expected, rtol=1e-5)


@pytest.mark.parametrize("negative", [0, -1])
def test_auc_of_signs_and_of_runs_of_equal_scores(negative):
    scores, labels = np.array([3, 1, 1, 2, 1, 3, 3.0]), np.array([1, 1, 0, 0, 1, 1, 0])
    weights = np.array([1, 2, 0.5, 1, 0, 3, 1])
    expected = roc_auc_score(labels, scores, sample_weight=weights)
    found = AUC(scores, np.where(labels, 1, negative), weights=weights)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_auc_of_one_kind_alone_or_without_a_number_is_nan():
    assert np.isnan(AUC(np.arange(3.0), np.ones(3)))
    scores, labels = np.array([1, 0, np.nan, -np.inf]), np.array([1, 0, 1, 0])
    assert np.isnan(AUC(scores, labels))
    assert AUC(scores, labels, weights=np.array([1, 1, 0, 1.0])) == 1.0
    assert np.isnan(AUC(np.array([1, 0.0]), np.array([np.nan, 0])))
    assert np.isnan(AUC(np.zeros(0), np.zeros(0)))


def test_auc_of_labels_in_between_counts_them_as_much_of_both():
    scores, labels = np.array([3.0, 1.0, 2.0]), np.array([0.9, 0.2, 0.4])
    apart = AUC(np.tile(scores, 2), np.repeat([1, 0], 3), weights=np.concatenate([labels, 1 - labels]))
    np.testing.assert_allclose(AUC(scores, labels), apart, rtol=1e-6)


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("labels", [LABELS, LABELS[:, None], ONE_HOT], ids=["integers", "column", "one-hot"])
def test_accuracy(k, labels):
    best = np.argsort(-np.asarray(LOGITS), 1)[:, :k]
    expected = np.mean([label in row for label, row in zip(LABELS.tolist(), best.tolist(), strict=True)])
    np.testing.assert_allclose(L.accuracy(LOGITS, labels, top_k=k), expected, rtol=1e-6)


# ------------------------------------------------------------------------- in a trace, under jit, Lazy

NETWORKS = {
    "fc": lambda x: L.fc(x, 2),
    "conv": lambda x: L.conv(x.reshape(-1, 4, 3), 2, 3),
    "pool": lambda x: L.pool(x.reshape(-1, 4, 3), 2),
    "dropout": lambda x: L.dropout(x, 0.5),
    "batch_norm": lambda x: L.batch_norm(x),
    "layer_norm": lambda x: L.layer_norm(x),
    "rms_norm": lambda x: L.rms_norm(x),
    "attention": lambda x: L.attention(x.reshape(-1, 4, 3), heads=3),
    "lstm": lambda x: L.lstm(x.reshape(-1, 4, 3), 2)[0],
    "gru": lambda x: L.gru(x.reshape(-1, 4, 3), 2)[0],
    "embedding": lambda x: L.embedding((x > 0).astype(int), 2, 3),
    **{
        function.__name__: function
        for function in (L.relu, L.relu6, L.leaky_relu, L.elu, L.selu, L.gelu, L.silu)
    },
    **{function.__name__: function for function in (L.hard_silu, L.tanh, L.sigmoid, L.softplus)},
    **{function.__name__: function for function in (L.softmax, L.log_softmax)},
}


def fed(dtype):
    return ow.data("x", (None, 12), dtype) * ow.parameter("factor", (), dtype)


def layer_of(name, x, dtype):
    y = NETWORKS[name](x)
    assert y.dtype == (dtype if name != "embedding" else "float32")
    return y.astype("float32")


@cache
def trained(dtype, names):
    """The State after a step in which all these were trained, and their values."""

    def network():
        x = fed(dtype)
        values = {name: layer_of(name, x, dtype) for name in names}
        return (jnp.concatenate([y.ravel() for y in values.values()]) ** 2).sum(), values

    program = ow.SGD(0.1).minimize(ow.trace(network, has_aux=True, batch_size=2))
    step, rng = ow.compile(program), np.random.default_rng(3)
    first = {v.name: rng.normal(0, 0.3, v.shape).astype(v.dtype) for v in program.parameters}
    state, out = step(jax.jit(step.init)(first), np.ones((2, 12), dtype))
    return state, out.aux


def trained_with(name, dtype):
    """All layers at once, but for pooling, which is compiled with all optimizations."""
    if name != "pool":
        return trained(dtype, tuple(n for n in NETWORKS if n != "pool"))
    with optimized():
        return trained(dtype, ("pool",))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", NETWORKS)
def test_each_layer_trains_in_its_scope(name, dtype):
    def network():
        return (layer_of(name, fed(dtype), dtype) ** 2).sum() + ow.parameter("one", ())

    program = ow.trace(network, batch_size=2)
    assert f"{name}_0" in [v.name for op in program.ops for v in op.outputs]
    assert all(v.name.startswith((f"{name}_0/", "factor", "one", "key")) for v in program.state)
    state, values = trained_with(name, dtype)
    assert np.isfinite(values[name]).all()
    parameters = [v.name for v in program.parameters if v.name != "one"]
    assert [v for v in parameters if not np.isfinite(np.asarray(state[v], "float32")).all()] == []


def test_integers_are_multiplied_with_floating_point_parameters():
    program = ow.trace(lambda: L.fc(ow.data("x", (None, 3), "uint8"), 2))
    assert [v.dtype for v in (*program.parameters, *program.outputs)] == ["float32"] * 3


@pytest.mark.parametrize("name", ["relu", "tanh", jnp.tanh, L.tanh], ids=["relu", "tanh", "jnp", "layer"])
def test_act_is_a_name_or_a_function(name):
    function = getattr(jax.nn, name) if isinstance(name, str) else jnp.tanh
    w = normal(5, 3, 2)
    np.testing.assert_allclose(L.fc(X, w=w, b=False, act=name), function(X @ w), rtol=1e-6)


@pytest.mark.parametrize(("layer", "argument"), [(L.fc, {"w": X[:3]}), (L.rms_norm, {"scale": X[0]})])
def test_under_jit_with_arrays_given(layer, argument):
    options = {"b": False} if layer is L.fc else {}
    found = jax.jit(lambda x, a: layer(x, **a, **options))(X, argument)
    np.testing.assert_allclose(found, layer(X, **argument, **options), rtol=1e-5)


def test_lazy_arguments_make_the_network_that_a_function_makes():
    def network():
        x, y = ow.data("x", (None, 3)), ow.data("y", (None,), "int32")
        hidden = L.relu(L.layer_norm(L.fc(x, 4)))
        return L.cross_entropy(L.fc(hidden, 5), y), L.accuracy(L.fc(hidden, 5, name="fc_1"), y)

    x, y = ow.data("x", (None, 3)), ow.data("y", (None,), "int32")
    logits = L.fc(L.relu(L.layer_norm(L.fc(x, 4))), 5)
    lazy, traced = ow.trace((L.cross_entropy(logits, y), L.accuracy(logits, y))), ow.trace(network)
    assert {v.name for v in lazy.parameters} == {v.name for v in traced.parameters}
    assert (
        [v.name for v in lazy.outputs]
        == [v.name for v in traced.outputs]
        == ["cross_entropy_0", "accuracy_0"]
    )
    assert {op.type for op in lazy.ops} == {op.type for op in traced.ops}


def test_what_no_layer_takes_is_refused_where_it_is_written():
    """Also before anything is traced: a declaration that cannot be made fails at its own line."""
    for name in sorted({*ow.layer.__all__} - {"cost", "data", "layer", "weight"}):
        layer = getattr(ow.layer, name)
        where = rf"{name} at .*test_layer.py:\d+"
        with pytest.raises(ow.ArgumentError, match=f"{where}: missing .* Write {name}\\("):
            layer(name="first")
        if "options" not in inspect.signature(layer).parameters:  # those of a function of JAX
            with pytest.raises(ow.ArgumentError, match=f"{where} has no argument 'wieght'"):
                layer(ow.data("x"), wieght=1)
    with pytest.raises(ow.ArgumentError, match=r"fc at .*test_layer.py.*: too many positional"):
        ow.layer.fc(ow.data("x"), 8, "relu")


def test_a_layer_says_what_other_libraries_call_its_arguments():
    for layer, given, here in [
        (ow.layer.fc, "W", "w"),
        (ow.layer.fc, "bias_attr", "b"),
        (ow.layer.fc, "activation", "act"),
        (ow.layer.lstm, "W", "w"),
        (ow.layer.embedding, "param_attr", "w"),
        (ow.layer.layer_norm, "eps", "epsilon"),
    ]:
        with pytest.raises(ow.ArgumentError, match=f"no argument '{given}'. Here it is '{here}'."):
            layer(ow.data("x"), **{given: 1})


def test_a_cost_takes_its_arguments_by_their_names():
    logits, labels = jnp.zeros((4, 3)), jnp.zeros(4, "int32")
    expected = ow.layer.cross_entropy(logits, labels)
    assert ow.layer.cross_entropy(labels=labels, logits=logits) == expected
    lazy = ow.layer.cross_entropy(
        logits=ow.layer.fc(ow.data("x", (None, 4)), 3), labels=ow.data("y", (None,), "int32")
    )
    assert ow.trace(lazy).outputs[0].shape == ()


def test_lazy_layers_are_numbered_from_the_first_on():
    program = ow.trace(L.fc(L.fc(ow.data("x", (None, 3)), 4), 5))
    assert [(v.name, v.shape) for v in program.parameters][::2] == [("fc_0/w", (3, 4)), ("fc_1/w", (4, 5))]


def test_the_target_tells_the_last_layer_its_size():
    x, y = ow.data("x"), ow.data("y")
    cost = L.mse(L.fc(x, w=ow.var("w"), b=False), y)
    program = ow.trace(cost, feed={"x": jnp.ones((4, 3)), "y": jnp.ones((4, 2))})
    assert [v.type for v in program.parameters] == ["float32[3,2]"]


def test_layers_of_one_name_or_one_array_share_parameters():
    def by_name():
        x = ow.data("x", (None, 3))
        return L.fc(x, 3, name="shared") + L.fc(2 * x, 3, name="shared")

    def by_array():
        x, w = ow.data("x", (None, 3)), ow.parameter("w", (3, 3))
        return L.fc(x, w=w, b=False) + L.fc(2 * x, w=w, b=False)

    assert [v.name for v in ow.trace(by_name).parameters] == ["shared/w", "shared/b"]
    assert [v.name for v in ow.trace(by_array).parameters] == ["w"]


def test_fed_integers_are_bounded():
    def network():
        words = L.embedding(ow.data("ids", (None, 2), "int32"), 7, 3).sum((1,))
        likely = L.binary_cross_entropy(words, ow.data("bits", (None, 3), "int32"))
        return likely + L.cross_entropy(words, ow.data("labels", (None,), "int32"))

    bounds = {v.name: bound for v, bound in ow.trace(network).bounds.items()}
    assert bounds == {"ids": (7, "embedding ids"), "labels": (3, "labels"), "bits": (2, "targets")}


# ------------------------------------------------------------------------- refusals

COLUMN = jnp.ones((4, 1))
REFUSALS = {
    "no size": (lambda: L.fc(X), ["fc at", "test_layer.py:", "fc(x, 10)"]),
    "a scalar": (lambda: L.fc(jnp.float32(1), 2), ["single number", "x[None]"]),
    "nothing given": (lambda: L.fc(X, 2), ["'w'", "[3, 2]", "w=array"]),
    "another w": (lambda: L.fc(X, 2, w=jnp.ones((2, 2)), b=False), ["w of shape [2, 2]", "[3, 2]"]),
    "an unknown act": (lambda: L.fc(X, w=X[:3], b=False, act="rule"), ["'rule'", "'relu'"]),
    "columns against rows": (lambda: L.mse(COLUMN, COLUMN[:, 0]), ["[4, 1]", "[4]", "target[..., None]"]),
    "rows against columns": (lambda: L.huber(COLUMN[:, 0], COLUMN), ["[4, 1]", "target[..., 0]"]),
    "other shapes": (lambda: L.binary_cross_entropy(X, COLUMN), ["logits of shape [4, 3]", "the same shape"]),
    "ids in floats": (lambda: L.embedding(X, 3, 2), ["float32[4, 3]", "integers", "astype(int)"]),
    "labels in floats": (lambda: L.cross_entropy(X, jnp.ones(4)), ["float32[4]", "astype(int)", "[4, 3]"]),
    "a single class": (lambda: L.cross_entropy(COLUMN, jnp.ones(4, int)), ["fc(x, 10)", "binary_cross"]),
    "accuracy of one class": (lambda: L.accuracy(COLUMN, jnp.ones(4, int)), ["accuracy", "fc(x, 10)"]),
    "too many guesses": (lambda: L.accuracy(X, jnp.ones(4, int), top_k=4), ["top_k=4", "3 classes"]),
    "weights": (lambda: L.mse(X, X, weights=X[0]), ["weights of shape [3]", "[4, 3]", "[4]"]),
    "scores of classes": (lambda: L.auc(X, X), ["[4, 3]", "scores[:, 1]"]),
    "an image without channels": (lambda: L.conv(X, 2, 3), ["conv", "float32[4, 3]", "channels"]),
    "a window of another rank": (lambda: L.pool(IMAGE, (2, 2, 2)), ["(2, 2, 2)", "a tuple of 2"]),
    "a padding": (lambda: L.pool(IMAGE, 2, padding="FULL"), ["'FULL'", '"SAME"']),
    "a kind": (lambda: L.pool(IMAGE, 2, kind="mean"), ["'mean'", '"average"']),
    "groups": (lambda: L.conv(IMAGE, 6, 3, groups=3), ["4 channels", "6 filters", "3 groups"]),
    "heads": (lambda: L.attention(SERIES, heads=2), ["2 heads", "3 features", "size="]),
    "implementation": (
        lambda: L.attention(SERIES, heads=3, implementation="flash"),
        ["implementation='flash'", "'xla', 'cudnn' or None"],
    ),
    "cudnn on a processor": (
        lambda: L.attention(SERIES, heads=3, dropout=0.5, training=False, implementation="cudnn"),
        ["'cudnn'", "NVIDIA GPU", "Leave implementation away"],
    ),
    "cudnn that drops": (
        lambda: L.attention(SERIES, heads=3, dropout=0.5, training=True, implementation="cudnn"),
        ["drops weights", "dropout=0.0"],
    ),
    "no series": (lambda: L.lstm(X, 2), ["lstm", "[batch, time, features]"]),
    "an initial state": (lambda: L.gru(*GRU[:1], 2, w=GRU[1], u=GRU[2], b=GRU[3], initial=X), ["[2, 2]"]),
    "another batch": (
        lambda: L.attention(SERIES, SERIES[:1], heads=3),
        ["same batch", "key float32[1, 5, 3]"],
    ),
    "a mask of numbers": (lambda: our_attention(*ATTENTION, mask=1.0 * MASK), ["mask > 0"]),
    "a mask of sources": (lambda: our_attention(*ATTENTION, mask=MASK[:, 0]), ["mask[:, None, None, :]"]),
    "no key": (lambda: L.dropout(X, 0.5), ["onward.key()", "jax.random.key(0)"]),
}


@pytest.mark.parametrize(("call", "words"), REFUSALS.values(), ids=REFUSALS)
def test_refusals(call, words):
    with pytest.raises(ow.ArgumentError) as raised:
        call()
    assert [w for w in words if w not in str(raised.value)] == []


@pytest.mark.parametrize("rate", [1.0, -0.1, float("nan")])
def test_rates_are_fractions(rate):
    with pytest.raises(ow.HyperparameterError, match="at least 0 and less than 1"):
        L.dropout(X, rate)


def test_two_parameters_of_one_name_and_two_shapes_are_refused_with_both_lines():
    def network():
        h = L.fc(ow.data("x", (None, 3)), 4, name="same")
        return L.fc(h, 5, name="same")

    with pytest.raises(ow.TraceError, match=r"'same/w'.*\[3, 4\].*\[4, 5\]") as raised:
        ow.trace(network)
    line = network.__code__.co_firstlineno
    assert [n for n in (1, 2) if f"test_layer.py:{line + n}" not in str(raised.value)] == []


BODIES = {
    "scan": lambda f, x: lax.scan(lambda c, x: (c, f(x)), 0.0, x)[1],
    "cond": lambda f, x: lax.cond(x.sum() > 0, f, jnp.zeros_like, x),
    "vmap": lambda f, x: jax.vmap(f)(x),
    "grad": lambda f, x: jax.grad(lambda x: f(x).sum())(x),
    "jit": lambda f, x: jax.jit(f)(x),
    "checkpoint": lambda f, x: jax.checkpoint(f)(x),
}
INSIDE = {
    "fc": (lambda x: L.fc(x, 3), r"fc_0\)?/w"),
    "batch_norm": (lambda x: L.batch_norm(x, scale=False, offset=False), r"batch_norm_0\)?/mean"),
    "dropout": (lambda x: L.dropout(x, 0.5), "random key"),
}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(("layer", "word"), INSIDE.values(), ids=INSIDE)
def test_declarations_inside_a_body_are_refused_by_name(body, layer, word):
    with pytest.raises(ow.TraceError, match=f"{word}.*test_layer.py:") as raised:
        ow.trace(lambda: BODIES[body](layer, ow.data("x", (None, 3))).sum())
    assert "outside" in str(raised.value)


def test_names_are_listed_once_and_explained():
    assert sorted(set(L.__all__)) == list(L.__all__)
    assert [
        n for n in L.__all__ if not callable(getattr(L, n)) or "Example" not in getattr(L, n).__doc__
    ] == [
        "cost",
        "weight",
    ]


WRONG_ARGUMENTS = {
    "fc 1.5": (lambda: ow.layer.fc(PLANE, 1.5), r"fc at .* size=1\.5; expected a whole number of at least 1"),
    "fc 8.0": (lambda: ow.layer.fc(PLANE, 8.0), r"size=8\.0; .*Write 8\."),
    "fc '8'": (lambda: ow.layer.fc(PLANE, "8"), r"fc at .* size='8'; expected a whole number"),
    "fc 0": (lambda: ow.layer.fc(PLANE, 0), r"fc at .* size=0; expected a whole number of at least 1"),
    "fc True": (lambda: ow.layer.fc(PLANE, True), r"fc at .* size=True"),
    "embedding": (lambda: ow.layer.embedding(np.arange(3), 2.5, 4), r"embedding at .* vocabulary=2\.5"),
    "embedding 0": (lambda: ow.layer.embedding(np.arange(3), 3, 0), r"embedding at .* size=0"),
    "filters": (lambda: ow.layer.conv(PLANE, 0, 3), r"conv at .* filters=0"),
    "groups": (lambda: ow.layer.conv(PLANE, 4, 3, groups=1.5), r"conv at .* groups=1\.5"),
    "window": (lambda: ow.layer.conv(PLANE, 4, 2.5), r"The size of a window .* is 2\.5"),
    "stride": (lambda: ow.layer.conv(PLANE, 4, 3, stride="2"), r"The stride of a window .* is '2'"),
    "dilation": (lambda: ow.layer.conv(PLANE, 4, 3, dilation=0), r"The dilation of a window .* is 0"),
    "padding": (lambda: ow.layer.conv(PLANE, 4, 3, padding=1.5), r"The padding of a window .* is 1\.5"),
    "pads": (lambda: ow.layer.conv(PLANE, 4, 3, padding=[(0.5, 1), (1, 1)]), r"The padding .* is \[\(0\.5"),
    "pool": (lambda: ow.layer.pool(PLANE, 2, stride=0.5), r"The stride of a window .* is 0\.5"),
    "rate": (lambda: ow.layer.dropout(PLANE, "0.5"), r"dropout at .* rate='0\.5'; expected a number"),
    "rate NaN": (lambda: ow.layer.dropout(PLANE, float("nan")), r"dropout at .* rate=nan"),
    "momentum": (lambda: ow.layer.batch_norm(PLANE, momentum=2), r"batch_norm .* momentum=2; .* from 0 to 1"),
    "epsilon": (lambda: ow.layer.batch_norm(PLANE, epsilon=-1e-5), r"batch_norm at .* epsilon=-1e-05"),
    "axis": (lambda: ow.layer.batch_norm(PLANE, axis=7), r"batch_norm at .* axis=7 .*from -4 to 3"),
    "layer_norm": (lambda: ow.layer.layer_norm(PLANE, epsilon=-1), r"layer_norm at .* epsilon=-1"),
    "rms_norm": (lambda: ow.layer.rms_norm(PLANE, epsilon=None), r"rms_norm at .* epsilon=None"),
    "lstm": (lambda: ow.layer.lstm(PLANE[0], 2.5), r"lstm at .* size=2\.5"),
    "gru": (lambda: ow.layer.gru(PLANE[0], 0), r"gru at .* size=0"),
    "heads": (lambda: ow.layer.attention(PLANE[0], heads=1.5), r"attention at .* heads=1\.5"),
    "attention": (lambda: ow.layer.attention(PLANE[0], heads=1, size="4"), r"attention at .* size='4'"),
    "delta": (lambda: ow.layer.huber(PLANE, PLANE, delta=0), r"huber at .* delta=0; .* above 0"),
    "top_k": (lambda: ow.layer.accuracy(np.eye(3), np.arange(3), top_k=1.5), r"accuracy at .* top_k=1\.5"),
}
PLANE = np.ones((2, 6, 6, 2), np.float32)


@pytest.mark.parametrize(("call", "words"), WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS)
def test_a_wrong_argument_is_named(call, words):
    with pytest.raises((ow.ArgumentError, ow.HyperparameterError), match=words):
        ow.trace(call)


def test_whole_numbers_of_numpy_are_sizes():
    program = ow.trace(lambda: ow.layer.conv(PLANE, np.int64(4), np.int32(3), stride=(np.int64(2), 1)))
    assert program.outputs[0].shape == (2, 3, 6, 4)
    assert ow.trace(lambda: ow.layer.fc(PLANE, np.int64(4))).outputs[0].shape == (2, 6, 6, 4)
