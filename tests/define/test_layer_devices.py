"""What layers compute over a batch: by weight, against NumPy and sklearn; spread over devices, as on one."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

import onward as ow

L = ow.layer
ROWS = 16
RNG = np.random.default_rng(3)
X = RNG.normal(size=(ROWS, 6))
LABELS = RNG.integers(0, 3, ROWS).astype("int32")
SORTED = np.sort(LABELS % 2)  # each of two devices has examples of about one kind
FIRST = {"fc_0/w": RNG.normal(size=(6, 3)), "fc_0/b": RNG.normal(size=3)}
WEIGHTS = {
    "very unequal": 10.0 ** RNG.uniform(-3, 3, ROWS),
    "none on one device": np.where(np.arange(ROWS) < ROWS // 2, 0.0, RNG.uniform(1, 2, ROWS)),
    "one example alone": np.eye(ROWS)[5],
    "none at all": np.zeros(ROWS),
}
SPREAD = {
    "2 devices": {"devices": 2},
    "4 devices": {"devices": 4},
    "4 devices, each with a batch norm of its own": {"devices": 4, "sync_batch_norm": False},
}


@pytest.fixture(scope="module", autouse=True)
def double_precision():
    """Numbers that must agree to twelve digits."""
    with jax.enable_x64(True):
        yield


# ---------------------------------------------------------------- costs by weight, on one device and on many


def learned(x):
    """Weights that have a gradient themselves."""
    return jax.nn.softplus(x @ ow.parameter("v", (6,), "float64", ow.initializer.constant(0.3)))


COSTS = {
    "mse": lambda z, y, w, x: L.mse(z, jax.nn.one_hot(y, 3), weights=w),
    "huber": lambda z, y, w, x: L.huber(z, jax.nn.one_hot(y, 3), weights=w),
    "cross_entropy": lambda z, y, w, x: L.cross_entropy(z, y, weights=w),
    "cross_entropy, smoothed": lambda z, y, w, x: L.cross_entropy(z, y, label_smoothing=0.1, weights=w),
    "binary_cross_entropy": lambda z, y, w, x: L.binary_cross_entropy(
        z, jax.nn.one_hot(y, 3, dtype="int32"), weights=w
    ),
    "perplexity": lambda z, y, w, x: L.perplexity(L.cross_entropy(z, y, weights=w)),
    "weights by place": lambda z, y, w, x: L.mse(
        z, jax.nn.one_hot(y, 3), weights=w[:, None] * jnp.array([1.0, 0.0, 3.0])
    ),
    "learned weights": lambda z, y, w, x: L.cross_entropy(z, y, weights=w * learned(x)),
}


def all_costs():
    """Each cost trains a layer of its own."""
    x, y = ow.data("x", (None, 6), "float64"), ow.data("y", (None,), "int32")
    w = ow.data("weights", (None,), "float64")
    found = {name: cost(L.fc(x, 3), y, w, x) for name, cost in COSTS.items()}
    return sum(found.values()), found


@cache
def step_of(spread=None):
    program = ow.SGD(0.1).minimize(ow.trace(all_costs, has_aux=True, batch_size=ROWS))
    return ow.compile(ow.replicate(program, **SPREAD[spread]) if spread else program)


def begun(step):
    """All layers with the same first values."""
    first = {v.name: FIRST.get(f"fc_0/{v.name[-1]}") for v in step.program.parameters}
    return step.init(first | {"v": np.full(6, 0.3)})


@cache
def trained(spread, weights, steps=4):
    """The losses of all costs and the parameters after some steps."""
    step, losses = step_of(spread), []
    state = begun(step)
    for _ in range(steps):
        state, out = step(state, X, LABELS, WEIGHTS[weights])
        losses.append({cost: np.asarray(x) for cost, x in out.aux.items()} | {"sum": np.asarray(out.loss)})
    return losses, {name: np.asarray(state[name]) for name in state}


@pytest.mark.parametrize("spread", SPREAD)
@pytest.mark.parametrize("cost", COSTS)
def test_weights_count_as_they_do_on_one_device(cost, spread):
    own = (f"fc_{list(COSTS).index(cost)}/w", f"fc_{list(COSTS).index(cost)}/b", "v", "step")
    for name in WEIGHTS:
        expected, found = (trained(where, name) for where in (None, spread))
        for of in (cost, "sum"):
            losses = [[step[of] for step in run[0]] for run in (found, expected)]
            np.testing.assert_allclose(*losses, 1e-12, err_msg=f"{name}: {of}")
        for v in own:
            np.testing.assert_allclose(found[1][v], expected[1][v], 1e-11, 1e-13, err_msg=f"{name}: {v}")


@pytest.mark.parametrize("weights", list(WEIGHTS)[:3])
def test_the_cost_over_devices_is_the_average_of_numpy(weights):
    (first, *_), _ = trained("4 devices", weights)
    errors = (X @ FIRST["fc_0/w"] + FIRST["fc_0/b"] - np.eye(3)[LABELS]) ** 2
    np.testing.assert_allclose(first["mse"], np.average(errors.mean(1), weights=WEIGHTS[weights]), 1e-12)


def test_devices_speak_of_a_cost_only_where_there_are_weights():
    def spoken(weighs):
        def loss():
            x, y = ow.data("x", (None, 6)), ow.data("y", (None,), "int32")
            return L.cross_entropy(L.fc(x, 3), y, weights=ow.data("w", (None,)) if weighs else None)

        program = ow.replicate(ow.SGD(0.1).minimize(ow.trace(loss, batch_size=ROWS)), 4)
        gradients = {g for _, g in program.gradients} | {program.loss}
        return [op.type for op in program.ops if op.body.collectives and gradients.isdisjoint(op.outputs)]

    assert spoken(weighs=False) == []
    assert spoken(weighs=True) == ["all_sum"]  # none on the way back: weights that are data have no gradient


# ---------------------------------------------------------------- metrics


def measured():
    x, y = ow.data("x", (None, 6), "float64"), ow.data("y", (None,), "int32")
    labels, w = ow.data("labels", (None,), "int32"), ow.data("weights", (None,), "float64")
    logits = L.fc(x, 3)
    cost = L.cross_entropy(logits, y)
    return cost, {
        "accuracy": L.accuracy(logits, y),
        "accuracy by weight": L.accuracy(logits, y, weights=w),
        "accuracy of two guesses": L.accuracy(logits, y, top_k=2, weights=w),
        "auc": L.auc(jnp.round(x[:, 0], 1), labels),
        "auc by weight": L.auc(jnp.round(x[:, :1], 1), labels[:, None], weights=w),
        "perplexity": L.perplexity(cost),
        "perplexity by weight": L.perplexity(L.cross_entropy(logits, y, weights=w)),
        "of each": L.perplexity(-jnp.max(jax.nn.log_softmax(logits), -1)),
    }


def by_numpy(weights):
    logits = X @ FIRST["fc_0/w"] + FIRST["fc_0/b"]
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    losses = -log_p[np.arange(ROWS), LABELS]
    place = np.argsort(-logits, 1).argsort(1)[np.arange(ROWS), LABELS]
    scores = np.round(X[:, 0], 1)
    return {
        "accuracy": np.mean(place < 1),
        "accuracy by weight": np.average(place < 1, weights=weights),
        "accuracy of two guesses": np.average(place < 2, weights=weights),
        "auc": roc_auc_score(SORTED, scores),
        "auc by weight": roc_auc_score(SORTED, scores, sample_weight=weights),
        "perplexity": np.exp(losses.mean()),
        "perplexity by weight": np.exp(np.average(losses, weights=weights)),
        "of each": np.exp(-log_p.max(1)),
    }


@pytest.mark.parametrize("spread", [None, *SPREAD])
def test_metrics_are_those_of_the_whole_batch(spread):
    program = ow.SGD(0.0).minimize(ow.trace(measured, has_aux=True, batch_size=ROWS))
    step = ow.compile(ow.replicate(program, **SPREAD[spread]) if spread else program)
    padded = np.where(np.arange(ROWS) % 8 < 6, WEIGHTS["very unequal"] + 1, 0.0)
    for weights in (WEIGHTS["very unequal"], padded):
        _, out = step(step.init().replace(FIRST), X, LABELS, SORTED, weights)
        expected = by_numpy(weights)
        np.testing.assert_allclose(out.loss, np.log(expected["perplexity"]), 1e-12)
        for name, value in expected.items():
            rtol = 1e-6 if name in ("accuracy", "auc") else 1e-12  # these two are in float32
            np.testing.assert_allclose(out.aux[name], value, rtol, err_msg=name)


def test_examples_without_weight_are_left_out():
    kept = WEIGHTS["none on one device"] > 0

    @jax.jit
    def measured(logits, labels):
        some, binary, scores = (logits[kept], labels[kept]), labels % 2, logits[:, 0]
        by_weight = [L.accuracy(logits, labels, top_k=k, weights=kept) for k in (1, 2)]
        left_out = [L.accuracy(*some, top_k=k) for k in (1, 2)]
        by_weight.append(L.auc(scores, binary, weights=kept))
        left_out.append(L.auc(scores[kept], binary[kept]))
        nothing = L.accuracy(logits, labels, weights=0 * kept), L.auc(scores, binary, weights=0 * kept)
        return by_weight, left_out, nothing

    by_weight, left_out, nothing = measured(X[:, :3], LABELS)
    np.testing.assert_allclose(by_weight, left_out, 1e-6)
    assert nothing[0] == 0
    assert np.isnan(nothing[1])


@jax.jit
def areas(scores, labels, weights):
    """The AUC of vectors, and of columns."""
    return L.auc(scores, labels, weights=weights), L.auc(scores[:, None], labels[:, None], weights=weights)


@pytest.mark.parametrize("digits", [0, 1, 5])
@pytest.mark.parametrize("rows", [2, 50, 1001])
def test_auc_by_weight_is_that_of_sklearn(rows, digits):
    rng = np.random.default_rng(rows)
    scores, labels = np.round(rng.normal(size=rows), digits), rng.permutation(np.arange(rows) % 3 == 0)
    weights = rng.exponential(size=rows)
    expected = roc_auc_score(labels, scores, sample_weight=weights)
    np.testing.assert_allclose(areas(scores, labels, weights), expected, 1e-12)


def test_of_scores_in_perfect_order_the_auc_is_exactly_1():
    labels = np.arange(1000) > 300
    for weights in (None, np.random.default_rng(0).exponential(size=1000).astype("float32")):
        assert L.auc(jnp.arange(1000), labels, weights=weights) == 1
        assert L.auc(-jnp.arange(1000), labels, weights=weights) == 0


@pytest.mark.parametrize("layer", [L.accuracy, L.cross_entropy])
def test_weights_of_classes_are_refused(layer):
    message = rf"{layer.__name__} at .*weights of shape \[3\] for values of shape \[16\].*axes: \[16\]"
    with pytest.raises(ow.ArgumentError, match=message):
        layer(X[:, :3], LABELS, weights=np.ones(3))


# ---------------------------------------------------------------- attention in float64


def attention_of_numpy(q, k, v, w, allowed):
    """Each head by itself."""
    q, k, v = (x @ w[part] for x, part in zip((q, k, v), ("query", "key", "value"), strict=True))
    seen = []
    for head in (slice(0, 3), slice(3, 6)):
        scores = q[..., head] @ k[..., head].swapaxes(1, 2) / np.sqrt(3)
        e = np.where(allowed, np.exp(scores - scores.max(-1, keepdims=True)), 0)
        seen.append(e / e.sum(-1, keepdims=True) @ v[..., head])
    return np.concatenate(seen, -1) @ w["out"]


MASKS = {"all": np.ones((2, 5, 5), bool), "masked": (RNG.random((2, 5, 5)) < 0.5) | np.eye(5, dtype=bool)}


@cache
def attended():
    """Queries, keys and values, weights, and what attention makes of them in float64 and in float32."""
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(3, 2, 5, 6))
    w = {part: rng.normal(size=(6, 6)) for part in ("query", "key", "value", "out")}

    def every_way(q, k, v):
        return {
            (causal, mask): L.attention(
                q, k, v, heads=2, causal=causal, mask=MASKS[mask] if mask == "masked" else None, w=w, b=False
            )
            for causal in (False, True)
            for mask in MASKS
        }

    found = jax.jit(every_way)(q, k, v)
    with jax.enable_x64(False):
        return (q, k, v, w), found, jax.jit(every_way)(*np.float32([q, k, v]))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("causal", [False, True])
def test_attention_in_float64_is_that_of_numpy(causal, mask):
    given, found, half = attended()
    found, half = found[causal, mask], half[causal, mask]
    allowed = MASKS[mask] & (np.tril(np.ones((5, 5), bool)) if causal else True)
    assert found.dtype == "float64"
    np.testing.assert_allclose(found, attention_of_numpy(*given, allowed), 1e-12, 1e-12)
    np.testing.assert_allclose(half, found, 1e-4, 1e-4)
