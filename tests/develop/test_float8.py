"""Products in float8: beside plain JAX by hand, what is clipped or not finite, and other transforms."""

from functools import cache

import equinox
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.develop.mixed.float8 import forward_scale, largest, product

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 16)).astype("float32")
Y = RNG.normal(size=(8, 4)).astype("float32")
WEIGHTS = {  # small enough that a step of 0.01 goes down
    "a": 0.2 * RNG.normal(size=(16, 32)).astype("float32"),
    "b": 0.2 * RNG.normal(size=(32, 16)).astype("float32"),
    "c": 0.2 * RNG.normal(size=(16, 4)).astype("float32"),
}
LOW, GRADIENT = jnp.float8_e4m3fn, jnp.float8_e5m2


def network(w, x, y):
    with jax.named_scope("hidden"):
        h = jax.nn.relu(x @ w["a"]) @ w["b"]
    return jnp.mean((h @ w["c"] - y) ** 2)


def minimized(function=network, w=None, *data, **options):
    w, data = WEIGHTS if w is None else w, data or (X, Y)
    return ow.mixed_precision(ow.SGD(0.01).minimize(function, w, *data), "float8", **options)


@cache
def trained(scaling):
    return minimized(scaling=scaling)


def scale_by_hand(x, most):
    amax = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0)).astype(jnp.float32)
    return jnp.where(amax > 0, jnp.maximum(amax / most, 2.0**-126), 1)


def by_hand(spec, scale_of_x=None, scale_of_w=None):
    """A product as the papers have it, for an einsum and those of its two gradients, with ``custom_vjp``."""
    result, of_x, of_w = spec

    def low(x, scale, dtype, most):
        y = x.astype(jnp.float32) / scale
        return jnp.where(jnp.isfinite(y), jnp.clip(y, -most, most), y).astype(dtype).astype(jnp.float32)

    def forward(x, w):
        x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
        s = scale_by_hand(x, 448.0) if scale_of_x is None else scale_of_x
        t = scale_by_hand(w, 448.0) if scale_of_w is None else scale_of_w
        x, w = low(x, s, LOW, 448.0), low(w, t, LOW, 448.0)
        return (jnp.einsum(result, x, w) * s * t).astype(jnp.bfloat16), (x, w, s, t)

    def backward(saved, g):
        x, w, s, t = saved
        u = scale_by_hand(g, 57344.0)
        g = low(g, u, GRADIENT, 57344.0)
        grads = jnp.einsum(of_x, g, w) * u * t, jnp.einsum(of_w, g, x) * u * s
        return tuple(found.astype(jnp.bfloat16).astype(jnp.float32) for found in grads)

    product = jax.custom_vjp(lambda x, w: forward(x, w)[0])
    product.defvjp(forward, backward)
    return product


SPECS = {
    "matmul": ("ij,jk->ik", (8, 16), (16, 4), ("ij,jk->ik", "ik,jk->ij", "ik,ij->jk")),
    "transposed": ("ji,kj->ik", (16, 8), (4, 16), ("ji,kj->ik", "ik,kj->ji", "ik,ji->kj")),
    "batched": ("bij,bjk->bik", (3, 8, 16), (3, 16, 4), ("bij,bjk->bik", "bik,bjk->bij", "bik,bij->bjk")),
    "two sums": ("iab,bak->ik", (8, 4, 6), (6, 4, 5), ("iab,bak->ik", "ik,bak->iab", "ik,iab->bak")),
}


@pytest.mark.parametrize("case", SPECS)
def test_a_product_and_its_gradients_are_those_by_hand(case):
    """Bit for bit but for the order of sums, which float32 shows after its 20th bit."""
    spec, of_x, of_w, all_three = SPECS[case]
    x, w = (RNG.normal(size=shape).astype("float32") for shape in (of_x, of_w))
    weight = jnp.asarray(RNG.normal(size=jax.eval_shape(lambda: jnp.einsum(spec, x, w)).shape), jnp.float32)

    def loss(p, weight):
        return jnp.sum(jnp.einsum(spec, p["x"], p["w"]).astype(jnp.float32) * weight)

    def plain(p, weight):
        return jnp.sum(by_hand(all_three)(p["x"], p["w"]).astype(jnp.float32) * weight)

    program = minimized(loss, {"x": x, "w": w}, weight, where="*")
    assert "float8_product" in [op.type for op in program.ops]
    step = ow.compile(program, fetch=[program.loss, *(g for _, g in program.gradients)])
    _, out = step(step.init({"x": x, "w": w}), weight)
    value, grads = jax.jit(jax.value_and_grad(plain))({"x": x, "w": w}, weight)
    np.testing.assert_allclose(out[program.loss], value, rtol=2.0**-20)
    for p, g in program.gradients:
        np.testing.assert_allclose(out[g], grads[p.name], rtol=2.0**-7, err_msg=p.name)
        assert np.mean(np.asarray(out[g]) == np.asarray(grads[p.name])) > 0.99, p.name


def test_what_reads_float8_and_what_stays():
    """Products that read parameters, but for the last; a product of gradients reads e5m2 and e4m3fn."""
    program = trained("current")
    products = [op for op in program.ops if op.type == "float8_product"]
    assert [v.name for op in products for v in op.inputs[1:2]] == ["bfloat16(a)", "bfloat16(b)"]
    assert (program["grad(a)"].type, program.loss.type) == ("float32[16,32]", "float32[]")
    assert {str(v.dtype) for op in products for v in op.outputs[1:]} == {"float8_e4m3fn"}
    (last,) = (op for op in program.ops if op.type == "dot_general")
    assert last.inputs[1].type == "bfloat16[16,4]"
    texts = {op.type: op.body.text for op in program.ops if "float8" in op.type}
    assert "f8_e4m3fn" in texts["float8_product"]
    assert "f8_e5m2" in texts["float8_product_grad"]
    only_b = minimized(where="b")
    assert [op.inputs[1].name for op in only_b.ops if op.type == "float8_product"] == ["bfloat16(b)"]


def test_zeros_and_tiny_numbers_stay_finite_and_large_ones_are_clipped():
    scaled = product((((1,), (0,)), ((), ())), None, np.dtype(np.float32))
    one = jnp.float32(1)
    eye = jnp.eye(3, dtype=jnp.float32)
    assert np.array_equal(scaled(1000 * eye, eye, one, one), 448 * eye)  # by a scale of the past
    for x in (0 * eye, 1e-38 * eye, 3e38 * eye):
        of_x = forward_scale(largest(x))
        value, pull = jax.vjp(lambda x, of_x=of_x: scaled(x, eye, of_x, one), x)
        assert np.all(np.isfinite([value, *pull(0 * value)]))
    assert np.array_equal(scaled(3e38 * eye, eye, forward_scale(largest(3e38 * eye)), one) > 2e38, eye > 0)


def test_what_is_not_finite_shows_and_leaves_other_rows_alone():
    scaled = product((((1,), (0,)), ((), ())), None, np.dtype(np.float32))
    one, w = jnp.float32(1), jnp.ones((3, 2), jnp.float32)
    for bad in (np.inf, -np.inf, np.nan):
        x = jnp.ones((2, 3), jnp.float32).at[0, 0].set(bad)
        value, pull = jax.vjp(lambda w, x=x: scaled(x, w, forward_scale(largest(x)), one), w)
        assert np.all(np.isnan(value[0]))
        assert np.allclose(value[1], [3.0, 3.0])
        (of_w,) = pull(jnp.ones((2, 2)).at[0, 0].set(bad))
        assert not np.any(np.isfinite(of_w[:, 0]))


def test_delayed_scales_are_those_of_the_steps_before():
    """The first step has a scale of 1, and the history is a moving window over the largest values."""
    program = minimized(scaling="delayed", history=2)
    step = ow.compile(program, fetch=["hidden/dot_general"])
    state = step.init(WEIGHTS)
    past = np.zeros(2, np.float32)
    for factor in (1.0, 2.0, 0.5):
        x, a = jnp.asarray(factor * X), np.array(state["a"])
        s, t = (1.0 if not h.max() else h.max() / 448 for h in (past, state["largest_of(bfloat16(a))"]))
        plain = by_hand(SPECS["matmul"][3], np.float32(s), np.float32(t))(x, jnp.asarray(a))
        state, out = step(state, factor * X, Y)
        np.testing.assert_allclose(
            np.asarray(out["hidden/dot_general"], "float32"), np.asarray(plain, "float32"), rtol=2.0**-7
        )
        past = np.array([np.max(np.abs(x.astype(jnp.bfloat16))), past[0]], np.float32)
        np.testing.assert_array_equal(state["largest_of(bfloat16(x))"], past)


@cache
def after_a_step(scaling, transform=lambda program: program, rows=(0, 8)):
    program = transform(trained(scaling))
    step = ow.compile(program)
    state, _ = step(step.init(WEIGHTS), X[slice(*rows)], Y[slice(*rows)])
    return {v.name: np.asarray(state[v.name]) for v in trained(scaling).state}


@pytest.mark.parametrize("scaling", ["current", "delayed"])
def test_recomputed_it_is_the_same(scaling):
    """But for what XLA fuses otherwise: a bfloat16 that is not rounded between two ops."""
    found = after_a_step(scaling, lambda program: ow.recompute(program, scopes=["hidden"]))
    for name, value in after_a_step(scaling).items():
        moved = np.max(np.abs(value - WEIGHTS[name])) if name in WEIGHTS else 0
        np.testing.assert_allclose(found[name], value, atol=0.1 * moved, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("scaling", "transform"),
    [("current", ow.accumulate), ("current", ow.replicate), ("delayed", ow.replicate)],
)
def test_parts_of_a_batch_have_scales_of_their_own(scaling, transform):
    """A step is the mean of those of its parts; histories are of the whole batch."""
    found = after_a_step(scaling, lambda program: transform(program, 2))
    parts = [after_a_step(scaling, rows=rows) for rows in ((0, 4), (4, 8))]
    for name, first in WEIGHTS.items():
        mean = (parts[0][name] + parts[1][name]) / 2
        moved = np.max(np.abs(mean - first))
        np.testing.assert_allclose(found[name], mean, atol=1e-2 * moved, err_msg=name)
    for name in found.keys() - WEIGHTS.keys():
        largest_of_parts = np.maximum(parts[0][name], parts[1][name])
        np.testing.assert_array_equal(found[name], largest_of_parts, err_msg=name)


def test_micro_batches_hand_the_history_on():
    found = after_a_step("delayed", lambda program: ow.accumulate(program, 2))["largest_of(bfloat16(x))"]
    parts = [np.max(np.abs(jnp.asarray(x, jnp.bfloat16))) for x in (X[4:], X[:4])]
    np.testing.assert_array_equal(found[:3], [*np.asarray(parts, "float32"), 0])


def test_a_test_program_scales_by_the_tensor_at_hand():
    test = ow.for_test(trained("delayed"))
    assert "float8_product" in [op.type for op in test.ops]
    assert [v.name for v in test.state] == ["a", "b", "c"]


def layers(w, x, y):
    for p in w["layers"]:
        x = x + jnp.tanh(x @ p)
    return jnp.mean((x @ w["head"] - y) ** 2)


@pytest.mark.parametrize("scaling", ["current", "delayed"])
def test_a_rolled_network_is_the_same(scaling):
    w = {
        "layers": [0.2 * RNG.normal(size=(16, 16)).astype("float32") for _ in range(4)],
        "head": WEIGHTS["c"],
    }
    program = minimized(layers, w, X, Y, scaling=scaling)
    rolled = ow.roll(program)
    assert len(rolled.ops) < len(program.ops) / 2
    states = []
    for each in (program, rolled):
        step = ow.compile(each)
        states.append(step(step.init(w), X, Y)[0])
    for v in program.parameters:
        np.testing.assert_allclose(*(np.asarray(s[v.name]) for s in states), atol=2e-3, err_msg=v.name)


LAYERED = {"layers": 0.2 * RNG.normal(size=(3, 16, 16)).astype("float32"), "c": WEIGHTS["c"]}


def layered(form):
    """Layers one by one, checkpointed, or in a loop, before a head."""

    def loss(w, x, y):
        if form == "scan":
            x, _ = jax.lax.scan(lambda x, p: (jax.nn.relu(x @ p), None), x, w["layers"])
        else:
            layer = jax.checkpoint(lambda x, p: jax.nn.relu(x @ p))
            for i in range(3):
                x = (layer if form == "checkpoint" else layer.__wrapped__)(x, w["layers"][i])
        return jnp.mean((x @ w["c"] - y) ** 2)

    return loss


@pytest.mark.parametrize("form", ["checkpoint", "scan"])
def test_within_checkpoint_and_loops_it_is_the_same(form):
    """By the tensor at hand, whichever scaling is asked for: no turn hands scales to the next."""
    expected, found, delayed = (
        minimized(layered(form), LAYERED, scaling=scaling)
        for form, scaling in (("", None), (form, None), (form, "delayed"))
    )
    assert not [v.name for v in delayed.state if v.name.startswith("largest_of")]
    losses = []
    for program in (expected, found, delayed):
        step = ow.compile(program, roll=False)
        state, _ = step(step.init(LAYERED), X, Y)
        losses.append(float(step(state, X, Y)[1].loss))
    np.testing.assert_allclose(losses[1:], losses[0], rtol=0.02)
    products = [
        [str(v.dtype) for v in call.operands]
        for op in found.ops
        if op.made_by is ow.Pass.FORWARD
        for call in op.body.calls_within
        if call.primitive == "dot_general"
    ]
    assert products.count(["float8_e4m3fn"] * 2) == (3 if form == "checkpoint" else 1)
    assert products.count(["bfloat16"] * 2) == 1  # the head


def test_a_model_of_equinox():
    model = equinox.nn.MLP(16, 4, 32, 2, key=jax.random.key(0))

    def loss(model, x, y):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    program = minimized(loss, model, X, Y)
    assert [op.type for op in program.ops].count("float8_product") == 2


@pytest.mark.parametrize("scaling", ["current", "delayed"])
def test_training_reaches_what_bfloat16_reaches(scaling):
    reached = []
    program = ow.Adam(0.01).minimize(network, WEIGHTS, X, Y)
    for mixed in (
        ow.mixed_precision(program, "bfloat16"),
        ow.mixed_precision(program, "float8", scaling=scaling),
    ):
        step = ow.compile(mixed)
        state = step.init(WEIGHTS)
        for _ in range(60):
            state, out = step(state, X, Y)
        reached.append(float(out[mixed.loss]))
    assert reached[1] < 1.2 * reached[0] + 0.01


def branching(w, x, y):
    x = jax.lax.cond(x[0, 0] > 0, lambda x: jnp.tanh(x @ w["hidden"]), jnp.tanh, x)
    return jnp.mean((x @ w["head"] - y) ** 2)


def second():
    program = ow.mixed_precision(ow.trace(network, WEIGHTS, X, Y), "float8")
    program, (g,) = ow.gradients(program, program.loss, "x")
    return ow.gradients(program, g, "x")


WRONG = {
    "dtype": (lambda: minimized(scaling="best"), ow.ArgumentError, "'current' or 'delayed'"),
    "for others": (
        lambda: ow.mixed_precision(ow.trace(network, WEIGHTS, X, Y), "bfloat16", scaling="current"),
        ow.ArgumentError,
        'scaling is for "float8"',
    ),
    "no history": (lambda: minimized(history=4), ow.ArgumentError, "history is for scaling="),
    "history": (lambda: minimized(scaling="delayed", history=0), ow.HyperparameterError, "history"),
    "name": (lambda: minimized(where="nothing"), ow.UnknownNameError, "nothing"),
    "branches": (
        lambda: minimized(branching, {"hidden": np.ones((16, 16), "float32"), "head": WEIGHTS["c"]}),
        ow.GraphError,
        "no product to take in float8 beside its last one",
    ),
    "second derivative": (second, ow.GraphError, "8 bits"),
    "other float8": (
        lambda: ow.mixed_precision(ow.trace(network, WEIGHTS, X, Y), jnp.float8_e5m2),
        ow.ArgumentError,
        "'bfloat16', 'float16' or 'float8'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused(case):
    make, error, words = WRONG[case]
    with pytest.raises(error, match=words):
        make()
