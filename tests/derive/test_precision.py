"""Parameters and slots of few bits: nothing small is lost, nothing becomes NaN, no dtype ever changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.derive.update.precision import KeptSlot, Type, narrowed, rounded_at_random

pytestmark = pytest.mark.usefixtures("optimized")  # two programs round alike, to the bit
LOW = ("bfloat16", "float16")
ELEMENTWISE = {"SGD": ow.SGD, "Momentum": ow.Momentum, "Adam": ow.Adam, "Adagrad": ow.Adagrad}


def dot(p, g):
    return sum(jnp.sum(p[k] * g[k]) for k in p).astype(jnp.float32)


def begun(step, params):
    """The first State, by one program; slots of few bits are written by many otherwise."""
    return jax.jit(step.init)(params)


def trained(optimizer, params, gradients, loss=dot, keep=()):
    """The State after these gradients, and what is kept of each step."""
    series = [jax.tree.map(lambda x, i=i: x[i], gradients) for i in range(len(jax.tree.leaves(gradients)[0]))]
    step = ow.compile(optimizer.minimize(loss, params, series[0]), donate=False)
    state, kept = (step.init(params) if optimizer.slot_dtype is None else begun(step, params)), []
    for g in series:
        state, _ = step(state, g)
        kept.append({name: np.asarray(state[name]) for name in keep})
    return state, {name: np.stack([k[name] for k in kept]) for name in keep}


@pytest.mark.parametrize("how", ["master", "stochastic"])
@pytest.mark.parametrize("dtype", LOW)
def test_a_hundred_small_steps_are_not_lost(dtype, how):
    """In bfloat16, 1.0 + 0.001 is 1.0; from 1.1 up to 1.3 it is."""
    w = {"w": (1 + np.arange(4096) * 2.0**-16).astype(dtype)}
    g = {"w": np.full((100, 4096), -1.0, dtype)}
    state, _ = trained(ow.SGD(1e-3, low_precision=how), w, g)
    way = np.asarray(state["w"], np.float64) - np.asarray(w["w"], np.float64)
    assert state["w"].dtype == dtype
    if how == "master":
        whole = np.asarray(state["w"], np.float32) + np.asarray(state["w/rest"])
        np.testing.assert_allclose(whole - np.asarray(w["w"], np.float32), 0.1, rtol=1e-4)
        np.testing.assert_allclose(way, 0.1, atol=0.004)
    else:
        np.testing.assert_allclose(way.mean(), 0.1, atol=0.02)
        assert not any(name.endswith("rest") for name in state)


def test_rounded_to_the_nearest_small_steps_are_lost():
    w = {"w": np.ones(4, jnp.bfloat16)}
    state, _ = trained(ow.SGD(1e-3, low_precision="nearest"), w, {"w": np.full((100, 4), -1.0, jnp.bfloat16)})
    np.testing.assert_array_equal(state["w"], w["w"])


@pytest.mark.parametrize("dtype", LOW)
def test_parameter_and_rest_are_the_float32_run_bit_for_bit(dtype):
    """By each of the rules, which train a parameter of their name."""
    random = np.random.default_rng(0)
    w = {name: random.normal(size=500).astype(dtype) for name in ELEMENTWISE}
    g = {name: random.normal(size=(50, 500)).astype(dtype) for name in ELEMENTWISE}
    each = ow.SGD(0.01, groups=[ow.Group(name, rule(0.01)) for name, rule in ELEMENTWISE.items()])
    low, path = trained(each, w, g, keep=(*w, *(f"{name}/rest" for name in w)))
    single = (jax.tree.map(lambda x: x.astype("float32"), tree) for tree in (w, g))
    wide, expected = trained(each, *single, keep=tuple(w))
    slots = [slot for slot in wide if slot.partition("/")[0] in w and wide[slot].shape == (500,)]
    assert {slot.partition("/")[0] for slot in slots if "/" in slot} == {"Momentum", "Adam", "Adagrad"}
    for name in w:
        whole = np.asarray(path[name], np.float32) + np.asarray(path[f"{name}/rest"])
        np.testing.assert_array_equal(whole, expected[name], err_msg=name)
        np.testing.assert_array_equal(path[name], expected[name].astype(dtype), err_msg=name)
    for slot in slots:
        if "/" in slot:
            np.testing.assert_array_equal(low[slot], wide[slot], err_msg=slot)


RULES = [
    ow.ClipByGlobalNorm(1.0),
    ow.L2(0.1),
    ow.WeightDecay(0.1),
    ow.EMA(0.9),
    ow.rule.Cautious(),
    ow.rule.Lookahead(every=2),
]


@pytest.mark.parametrize("how", ["master", "stochastic", "nearest"])
@pytest.mark.parametrize("rules", [[], RULES], ids=["alone", "with rules"])
def test_a_gradient_of_zero_makes_no_nan_and_no_dtype_changes(how, rules):
    params = {
        "h": np.ones(3, "float16"),
        "b": np.ones((2, 2), jnp.bfloat16),
        "f": np.float32(1),
        "e": np.ones((0, 3), "float32"),
    }
    zeros = jax.tree.map(lambda p: np.zeros((5, *p.shape), p.dtype), params)
    state, _ = trained(ow.Adam(0.1, rules=rules, low_precision=how), params, zeros)
    for name, p in params.items():
        assert state[name].dtype == p.dtype
        assert state[f"{name}/mean"].dtype == state[f"{name}/variance"].dtype == jnp.float32
        assert np.all(np.isfinite(np.asarray(state[name], np.float32)))
        if not rules:
            np.testing.assert_array_equal(state[name], p)


@pytest.mark.parametrize("how", ["master", "stochastic", "nearest"])
def test_rules_see_what_is_trained_in_float32(how):
    seen = []

    class Watch(ow.ParameterRule):
        def update(self, parameter, updated, gradient, slots):
            rate = self.optimizer["learning_rate"]
            seen.extend(x.dtype for x in (parameter, updated, gradient, rate))
            return updated, slots

    params = {"w": jnp.ones(3, jnp.bfloat16)}
    ow.SGD(0.1, rules=[Watch()], low_precision=how).minimize(dot, params, params)
    assert set(seen) == {jnp.dtype("float32")}


@pytest.mark.parametrize("dtype", LOW)
def test_a_parameter_that_is_put_in_place_counts_without_the_old_rest(dtype):
    w, g = {"w": np.full(3, 100.0, dtype)}, {"w": np.full(3, 0.01, dtype)}
    step = ow.compile(ow.SGD(1.0).minimize(dot, w, g))
    state, _ = step(step.init(w), g)
    assert abs(float(state["w/rest"][0])) > 0.009
    state, _ = step(state.replace({"w": np.full(3, 0.001, dtype)}), {"w": np.zeros(3, dtype)})
    np.testing.assert_array_equal(state["w"], np.full(3, 0.001, dtype))
    np.testing.assert_allclose(state["w/rest"], 0, atol=1e-6)


@pytest.mark.parametrize("dtype", LOW)
def test_rounding_at_random_is_right_on_average(dtype):
    random = np.random.default_rng(1)
    x = np.float32(random.normal(size=2000) * 10.0 ** random.uniform(-4, 3, 2000))
    x[:6] = [0.0, -0.0, 1.0, np.inf, -np.inf, 3e-8]
    steps = np.arange(500)
    rounded, none = jax.jit(
        lambda steps, nan: (
            jax.vmap(lambda step: rounded_at_random(x, dtype, step))(steps),
            rounded_at_random(nan, dtype, jnp.int32(0)),
        )
    )(steps, np.float32(np.nan))
    found = np.asarray(rounded, np.float64)
    finite = np.isfinite(x)
    gap = np.float64(
        np.maximum(np.spacing(np.abs(x[finite])) * {"bfloat16": 2**16, "float16": 2**13}[dtype], 6e-8)
    )
    assert np.all(np.abs(found[:, finite] - x[finite]) <= gap)
    assert np.all(np.abs(found[:, finite].mean(0) - x[finite]) < 0.12 * gap)
    for exact in range(5):
        assert np.all(found[:, exact] == x[exact])
    assert np.isnan(np.float32(none))


@pytest.mark.parametrize("dtype", LOW)
def test_what_is_left_out_of_any_number_is_kept(dtype):
    random = np.random.default_rng(2)
    x = np.float32(random.normal(size=5000) * 10.0 ** random.uniform(-30, 4, 5000))
    near, rest = jax.jit(lambda v: narrowed(v, dtype))(x)
    np.testing.assert_array_equal(np.asarray(near, np.float32) + np.asarray(rest), x)


def test_eight_bits_keep_numbers_of_all_sizes():
    kept = KeptSlot(Type((3000,), np.dtype(np.float32)), "int8")
    assert {k: (v.shape, v.dtype) for k, v in kept.types.items()} == {
        "": ((12, 256), np.uint8),
        "/scale": ((12,), np.float32),
    }
    random = np.random.default_rng(3)
    x = np.float32(random.choice([-1, 1], 3000) * 10.0 ** random.uniform(-5, 0, 3000))
    x[256:512] = 0
    found = np.asarray(jax.jit(jax.vmap(lambda step: kept.read(kept.write(x, step))))(np.arange(200)))
    assert np.all(found[:, 256:512] == 0)
    large = np.abs(x) > 0.1
    assert np.all(np.abs(found / np.where(x == 0, 1, x) - 1)[:, large] < 0.15)
    np.testing.assert_allclose(found.mean(0)[large], x[large], rtol=0.02)
    assert np.all(np.sign(found) == np.sign(x))


def least_squares(p, x):
    return jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"] - jnp.tanh(x[:, 0] - x[:, 1])) ** 2)


@pytest.fixture(scope="module")
def problem():
    random = np.random.default_rng(4)
    params = {"w": np.float32(random.normal(size=(8, 512)) / 3), "v": np.zeros(512, "float32")}
    return params, np.float32(random.normal(size=(200, 64, 8)))


def mean_loss(params, batches):
    """Of the first 20 batches, by NumPy."""
    p = {name: np.asarray(params[name], np.float64) for name in ("w", "v")}
    return np.mean(
        [np.mean((np.tanh(x @ p["w"]) @ p["v"] - np.tanh(x[:, 0] - x[:, 1])) ** 2) for x in batches[:20]]
    )


@pytest.fixture(scope="module")
def final_loss(problem):
    params, batches = problem

    def run(**options):
        state, _ = trained(ow.Adam(3e-3, **options), params, batches, least_squares)
        return state, mean_loss(state.parameters, batches)

    return run


@pytest.fixture(scope="module")
def in_float32(final_loss):
    return final_loss()[1]


@pytest.mark.parametrize(("form", "tolerance"), [("bfloat16", 0.05), ("int8", 0.1)])
def test_adam_with_small_slots_gets_as_far(problem, final_loss, in_float32, form, tolerance):
    """To a loss near that with float32 slots, which is a hundredth of the first one."""
    params, batches = problem
    state, loss = final_loss(slot_dtype=form)
    assert in_float32 < mean_loss(params, batches) / 100
    assert abs(loss / in_float32 - 1) < tolerance
    plan = ow.Adam(3e-3, slot_dtype=form).plan(ow.trace(least_squares, params, batches[0]))
    assert {name: v.dtype for d in plan.destinations for name, v in d.slots.items()} == {
        name: state[name].dtype for name in state if name.startswith(("w/", "v/"))
    }
    assert sum(d.slot_bytes for d in plan.destinations) == sum(
        state[name].nbytes for name in state if name.startswith(("w/", "v/"))
    )


@pytest.mark.parametrize("form", ["bfloat16", "int8"])
def test_a_variance_with_a_slow_decay_does_not_stand_still(form):
    """From 1 it decays to 0.999**1000 of that, with gradients of 0; rounded to the nearest it would stay."""
    w = {"w": np.zeros((64, 64), "float32")}
    step = ow.compile(ow.Adam(0.0, beta2=0.999, slot_dtype=form).minimize(dot, w, w), donate=False)
    state, _ = step(begun(step, w), {"w": np.linspace(0.5, 1.0, 4096, dtype="float32").reshape(64, 64)})
    zeros = w
    final = jax.jit(lambda s: jax.lax.fori_loop(0, 1000, lambda _, s: step(s, zeros)[0], s))(state)
    kept = KeptSlot(Type((64, 64), np.dtype(np.float32)), form)

    read = jax.jit(lambda s: kept.read([s[n] for n in s if n.startswith("w/variance")]))
    means = [np.asarray(read(s)).mean() for s in (final, state)]
    np.testing.assert_allclose(means[0] / means[1], 0.999**1000, rtol=0.03)


def test_small_slots_stay_exact_and_slots_of_other_shapes_too():
    plan = ow.Adam(1e-3, slot_dtype="int8").plan(
        ow.trace(
            lambda p: jnp.sum(p["big"]) + jnp.sum(p["small"]),
            {"big": jnp.ones(4096), "small": jnp.ones(4095)},
        )
    )
    assert plan["small"].slot_bytes == 2 * 4 * 4095
    assert plan["big"].slot_bytes == 2 * (4096 + 4 * 16)


def test_words_that_are_no_form():
    with pytest.raises(ow.HyperparameterError, match=r"slot_dtype is 'int4'; expected 'float32', .*'int8'"):
        ow.Adam(1e-3, slot_dtype="int4")
    with pytest.raises(
        ow.HyperparameterError, match=r"low_precision is 'exact'; expected 'master', 'stochastic'"
    ):
        ow.Adam(1e-3, low_precision="exact")


def test_slots_that_are_complex_stay_so_whatever_the_form():
    plan = ow.Adam(1e-3, slot_dtype="bfloat16").plan(
        ow.trace(lambda z: jnp.abs(z.sum()), jnp.ones(4, jnp.complex64))
    )
    assert {k: str(v.dtype) for k, v in plan["z"].slots.items()} == {
        "z/mean": "complex64",
        "z/variance": "bfloat16",
    }


def test_integer_parameters_are_not_trained():
    params = {"w": jnp.ones(3), "n": jnp.arange(3)}
    program = ow.Adam(0.1).minimize(lambda p: jnp.sum(p["w"] * p["n"]), params)
    assert [v.name for v in program.parameters] == ["w"]
    step = ow.compile(program)
    state, _ = step(step.init(params))
    np.testing.assert_array_equal(state["n"], params["n"])


def test_learning_rates_are_swept_in_one_compilation():
    w, g = {"w": np.ones(3, jnp.bfloat16)}, {"w": np.ones(3, jnp.bfloat16)}
    traces = []

    def loss(p, g):
        traces.append(1)
        return dot(p, g)

    step = ow.compile(
        ow.Adam(0.1, rules=[ow.EMA(0.5)], slot_dtype="bfloat16").minimize(loss, w, g), donate=False
    )
    traces.clear()
    rates = [0.1, 0.01, 0.0]
    first = begun(step, w)
    swept, _ = jax.jit(jax.vmap(step, (0, None)))(first.sweep({"learning_rate": rates}), g)
    assert not traces
    found = {name: np.asarray(swept[name]).astype("float32") for name in swept}
    for i, rate in enumerate(rates):
        one, _ = step(first.replace({"learning_rate": rate}), g)
        for name in one:
            np.testing.assert_allclose(
                found[name][i],
                np.asarray(one[name], np.float32),
                rtol=1e-2,
                err_msg=name,
            )


@pytest.mark.parametrize("rate", [0.1, lambda n: 0.1 / (n + 1), ow.schedule.cosine(0.1, steps=100)])
def test_float64_parameters_are_updated_with_float64_hyperparameters(rate):
    with jax.enable_x64(True):
        w = np.zeros(3)
        step = ow.compile(ow.SGD(rate).minimize(lambda w, x: jnp.sum(w * x), w, w))
        state, _ = step(step.init(w), np.ones(3))
        np.testing.assert_array_equal(state["w"], -0.1)


def test_adam_in_float64_is_the_formula_in_float64():
    with jax.enable_x64(True):
        w, gradients = np.linspace(-1, 1, 5), np.random.default_rng(0).normal(size=(20, 5))
        step = ow.compile(ow.Adam(1e-3).minimize(lambda w, x: jnp.sum(w * x), w, w))
        state, expected, m, v = step.init(w), w.copy(), np.zeros(5), np.zeros(5)
        for t, g in enumerate(gradients, 1):
            state, _ = step(state, g)
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
            expected -= 1e-3 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        np.testing.assert_allclose(state["w"], expected, rtol=1e-12)


def test_a_float32_parameter_beside_a_float64_one_stays_float32():
    with jax.enable_x64(True):
        params = {"a": np.zeros(2, np.float32), "b": np.zeros(2)}
        program = ow.Adam(0.1).minimize(lambda p: jnp.sum(p["a"]) + jnp.sum(p["b"]), params)
        step = ow.compile(program)
        state, _ = step(step.init(params))
        assert (state["a"].dtype, state["b"].dtype) == (np.float32, np.float64)
        assert {v.dtype for v in program.hyperparameters} == {np.dtype(np.float64)}
        alone = ow.Adam(0.1).minimize(lambda a: jnp.sum(a), params["a"])
        assert {v.dtype for v in alone.hyperparameters} == {np.dtype(np.float32)}


def test_equal_weights_are_rounded_each_by_itself():
    """Half of the way between two bfloat16 numbers: half of the weights go up, without a pattern."""
    x = np.full((512, 8), 1 + 2.0**-8, "float32")
    rounded = jax.jit(lambda step: rounded_at_random(x, jnp.bfloat16, step))
    up = np.asarray(rounded(np.int32(3)), np.float32) > 1
    np.testing.assert_allclose(up.mean(), 0.5, atol=0.05)
    np.testing.assert_allclose((up[1:] == up[:-1]).mean(), 0.5, atol=0.05)
    later = np.asarray(rounded(np.int32(4)), np.float32) > 1
    np.testing.assert_allclose((up == later).mean(), 0.5, atol=0.05)


@pytest.mark.parametrize("form", ["bfloat16", "int8"])
def test_equal_slots_are_rounded_each_by_itself(form):
    kept = KeptSlot(Type((4096,), np.dtype(np.float32)), form)
    value = np.full(4096, 0.501953125 if form == "bfloat16" else 0.3, "float32")
    value[::256] = 1.0
    read = jax.jit(lambda value: kept.read(kept.write(value, jnp.int32(0))))(value)
    read = np.asarray(read)[np.arange(4096) % 256 != 0]
    assert 0.1 < (read > np.median(np.unique(read))).mean() < 0.9
    np.testing.assert_allclose(read.mean(), float(value[1]), rtol=0.003)
