"""A compiled step as a person meets it: called, traced by their own jit, fed badly, looked into."""

from collections import namedtuple
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import onward as ow

Layer = namedtuple("Layer", "w b")
RNG = np.random.default_rng(0)
W, X, Y = (jnp.asarray(RNG.normal(size=shape), "float32") for shape in ((3, 4), (8, 3), (8,)))
PARAMS = {"hidden": Layer(W, jnp.zeros(4)), "out": [jnp.ones(4)]}
LEARNING_RATE = 0.1


def loss(params, x, y):
    h = checkpoint_name(jnp.tanh(x @ params["hidden"].w + params["hidden"].b), "h")
    return jnp.mean((h @ params["out"][0] - y) ** 2)


def program(optimizer=None):
    return (optimizer or ow.Momentum(LEARNING_RATE)).minimize(loss, PARAMS, X, Y)


def made(optimizer=None, **options):
    """A step of its own and its first State."""
    step = ow.compile(program(optimizer), **options)
    return step, step.init(PARAMS)


@cache
def compiled_once(*fetch):
    return ow.compile(program(), fetch=fetch)


def begun():
    """The step that tests share which feed it nothing of another shape, and a State of their own."""
    return compiled_once(), compiled_once().init(PARAMS)


def fetching():
    """The step that tests share which fetch, or feed other shapes, and a State of their own."""
    step = compiled_once("h", "grad(h)", "grad(hidden/w)", "x", "hidden/w", "next(hidden/w)")
    return step, step.init(PARAMS)


@jax.jit
def one_by_hand(params, velocity, learning_rate, x, y):
    value, grads = jax.value_and_grad(loss)(params, x, y)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
    return value, jax.tree.map(lambda p, v: p - learning_rate * v, params, velocity), velocity


def by_hand(steps, learning_rate=LEARNING_RATE, params=PARAMS, x=X, y=Y):
    """Losses and parameters of so many steps of momentum, in plain JAX."""
    velocity = jax.tree.map(np.zeros_like, params)
    losses = []
    for _ in range(steps):
        value, params, velocity = one_by_hand(params, velocity, learning_rate, x, y)
        losses.append(value)
    return np.array(losses), params


def assert_close(found, expected):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, expected)


def same_bytes(one, other):
    return all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(other)))


# ---------------------------------------------------------------- under the transformations of JAX


def test_steps_equal_the_hand_written_loop():
    step, state = begun()
    losses = []
    for _ in range(5):
        state, out = step(state, X, Y)
        losses.append(out.loss)
    expected, params = by_hand(5)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_close(state.parameters, params)


def test_under_jit_a_step_is_a_pure_function():
    step, state = begun()
    compiled = jax.jit(step)
    first, out = compiled(state, X, Y)
    again, _ = compiled(state, X, Y)
    assert not state.is_spent
    assert same_bytes(first, again)
    assert_close(first.parameters, by_hand(1)[1])
    after, _ = step(first, X, Y)
    assert_close(after.parameters, by_hand(2)[1])
    np.testing.assert_allclose(out.loss, by_hand(1)[0][0], rtol=1e-5)
    assert (step.traces, step.compilations) == (0, 1)


def test_under_scan_the_state_is_carried():
    step, state = begun()
    state, outs = lax.scan(lambda state, _: step(state, X, Y), state, None, length=4)
    losses, params = by_hand(4)
    np.testing.assert_allclose(outs.loss, losses, rtol=1e-5)
    assert_close(state.parameters, params)
    assert int(state["step"]) == 4
    following, _ = step(state, X, Y)
    assert_close(following.parameters, by_hand(5)[1])


def test_under_scan_over_batches():
    step, state = begun()
    batches = jnp.stack([X, 2 * X, 3 * X]), jnp.stack([Y, Y, Y])
    found, outs = lax.scan(lambda state, batch: step(state, *batch), state, batches)
    losses = []
    for x, y in zip(*batches, strict=True):
        state, out = step(state, x, y)
        losses.append(out.loss)
    np.testing.assert_allclose(outs.loss, losses, rtol=1e-5)
    assert_close(found.parameters, state.parameters)


def test_under_fori_loop_and_cond():
    step, state = begun()

    @jax.jit
    def three(state):
        def body(i, state):
            return lax.cond(i < 3, lambda s: step(s, X, Y)[0], lambda s: s, state)

        return lax.fori_loop(0, 5, body, state)

    assert_close(three(state).parameters, by_hand(3)[1])


def test_under_vmap_over_learning_rates():
    step, state = begun()
    rates = np.array([0.0, 0.01, 0.2], np.float32)

    def two(rate):
        mine = state.replace({"learning_rate": rate})
        mine, _ = step(mine, X, Y)
        return step(mine, X, Y)

    states, outs = jax.vmap(two)(rates)
    for i, rate in enumerate(rates):
        losses, params = by_hand(2, rate)
        np.testing.assert_allclose(outs.loss[i], losses[-1], rtol=1e-5)
        assert_close(jax.tree.map(lambda a, i=i: a[i], states.parameters), params)


def test_under_vmap_over_seeds():
    step, _ = begun()

    @jax.jit
    def fresh(key):
        noise = jax.random.normal(key)
        return jax.tree.map(lambda p: p + noise, PARAMS)

    keys = jax.random.split(jax.random.key(5), 3)
    states = jax.vmap(lambda key: step.init(fresh(key)))(keys)
    states, outs = jax.vmap(step, in_axes=(0, None, None))(states, X, Y)
    for i, key in enumerate(keys):
        losses, params = by_hand(1, params=fresh(key))
        np.testing.assert_allclose(outs.loss[i], losses[0], rtol=1e-5)
        assert_close(jax.tree.map(lambda a, i=i: a[i], states.parameters), params)


def test_gradients_pass_through_a_step():
    step, state = made(ow.SGD(LEARNING_RATE))

    def after(rate):
        following, _ = step(state.replace({"learning_rate": rate}), X, Y)
        return step(following, X, Y)[1].loss

    @jax.jit
    def plain(rate):
        grads = jax.grad(loss)(PARAMS, X, Y)
        return loss(jax.tree.map(lambda p, g: p - rate * g, PARAMS, grads), X, Y)

    np.testing.assert_allclose(jax.grad(after)(0.1), jax.grad(plain)(0.1), rtol=1e-4)


def test_the_function_of_a_step_never_donates():
    step, state = begun()
    first, out = step.function(state, X, Y)
    assert not state.is_spent
    assert_close(state.parameters, PARAMS)
    assert_close(first.parameters, by_hand(1)[1])
    np.testing.assert_allclose(out.loss, by_hand(1)[0][0], rtol=1e-5)
    jaxpr = jax.make_jaxpr(step.function)(state, X, Y)
    assert len(jaxpr.in_avals) == len(jax.tree.leaves(state)) + 2


def test_state_and_out_are_pytrees():
    step, state = fetching()
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_flatten_with_path(state)[0]]
    assert "['hidden/w']" in paths
    assert "['hidden/w/velocity']" in paths
    doubled = jax.tree.map(lambda a: 2 * a, state)
    assert_close(doubled.parameters, jax.tree.map(lambda a: 2 * a, PARAMS))
    following, out = step(state, X, Y)
    assert jax.tree.structure(following) == jax.tree.structure(doubled)
    copied = jax.tree.map(np.asarray, out)
    np.testing.assert_array_equal(copied["h"], out["h"])


# --------------------------------------------------------------------------------- shapes and feeds


def test_a_batch_of_another_shape_is_traced_once_and_remembered():
    step, state = made()
    seen = []
    for size in (8, 4, 8, 4, 2, 8, 2):
        state, out = step(state, X[:size], Y[:size])
        assert out.loss.shape == ()
        seen.append((size, step.traces, step.compilations))
    assert seen == [(8, 0, 1), (4, 1, 2), (8, 1, 2), (4, 1, 2), (2, 2, 3), (8, 2, 3), (2, 2, 3)]


def test_a_batch_of_another_shape_trains_as_it_should():
    step, state = fetching()
    state, out = step(state, X[:5], Y[:5])
    losses, params = by_hand(1, x=X[:5], y=Y[:5])
    np.testing.assert_allclose(out.loss, losses[0], rtol=1e-5)
    assert_close(state.parameters, params)


def test_fetched_variables_have_the_shape_of_the_batch():
    step, state = fetching()
    _, out = step(state, X[:5], Y[:5])
    assert out["h"].shape == out["grad(h)"].shape == (5, 4)


FEEDS = {
    "jax": (X, Y),
    "numpy": (np.asarray(X), np.asarray(Y)),
    "numpy in 64 bits": (np.asarray(X, np.float64), np.asarray(Y, np.float64)),
    "lists": (np.asarray(X).tolist(), np.asarray(Y).tolist()),
    "tuples": (tuple(map(tuple, np.asarray(X).tolist())), tuple(np.asarray(Y).tolist())),
    "a mixture": (np.asarray(X, np.float64), np.asarray(Y).tolist()),
    "not contiguous": (np.asfortranarray(X), np.asarray(Y)[::-1][::-1]),
}


@pytest.mark.parametrize("feeds", FEEDS.values(), ids=FEEDS)
def test_feeds_of_many_makes_are_the_same_step(feeds):
    step, state = begun()
    _, out = step(state, *feeds)
    np.testing.assert_allclose(out.loss, by_hand(1)[0][0], rtol=1e-5)
    assert (step.traces, step.compilations) == (0, 1)


def picked(w, index, scale):
    return jnp.sum(w[index]) * scale


INDICES = {
    "int32": np.array([0, 2], np.int32),
    "int64": np.array([0, 2], np.int64),
    "list": [0, 2],
    "jax": jnp.array([0, 2]),
}


THREE = jnp.array([1.0, 2.0, 4.0])


@pytest.fixture(scope="module")
def picking():
    return ow.compile(ow.SGD(0.1).minimize(picked, THREE, np.array([0, 1]), 1.0))


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("scale", [3, 3.0, np.float64(3), np.float32(3), jnp.float32(3)], ids=repr)
def test_integers_in_64_bits_and_python_numbers_are_feeds(picking, index, scale):
    _, out = picking(picking.init(THREE), index, scale)
    assert float(out.loss) == 15.0
    assert picking.compilations == 1


BAD_FEEDS = {
    "too few": ((X,), r"loss takes 2 data arguments \(x, y\); 1 were given"),
    "too many": ((X, Y, Y), r"loss takes 2 data arguments \(x, y\); 3 were given"),
    "none at all": ((), r"loss takes 2 data arguments \(x, y\); 0 were given"),
    "wrong features": (
        (X[:, :2], Y),
        r"'x' is float32\[8, 2\] \(traced as float32\[8,3\]\), .*cannot be built.*test_step.py:\d+ in loss",
    ),
    "batches that differ": (
        (X, Y[:3]),
        r"'y' is float32\[3\] \(traced as float32\[8\]\), .*test_step.py:\d+",
    ),
    "integers": (
        (X.astype(int), Y),
        r"'x' is int32\[8, 3\]; expected float32\[8,3\]\. .*x\.astype\('float32'\)",
    ),
    "half precision": ((X, Y.astype(jnp.bfloat16)), r"'y' is bfloat16\[8\]; expected float32\[8\]"),
    "complex": ((X, Y + 1j), r"'y' is complex64\[8\]; expected float32\[8\]"),
    "text": (("images.npz", Y), r"'x' is 'images.npz'; expected an array float32\[8,3\]"),
    "none": ((X, None), r"'y' is None; expected an array float32\[8\]"),
    "array of text": ((X, np.array(["a"] * 8)), "none of numbers"),
    "containers": (({"x": X}, Y), r"expected an array float32\[8,3\]"),
}


@pytest.mark.parametrize(("data", "message"), BAD_FEEDS.values(), ids=BAD_FEEDS)
def test_a_feed_that_does_not_fit_is_refused_and_the_state_stays(data, message):
    step, state = begun()
    with pytest.raises(ow.ArgumentError, match=message):
        step(state, *data)
    assert not state.is_spent
    assert step.compilations == 1
    _, out = step(state, X, Y)
    np.testing.assert_allclose(out.loss, by_hand(1)[0][0], rtol=1e-5)


def of_batch(w, batch):
    return jnp.mean((batch["x"] @ w - batch["pair"][0]) ** 2) + jnp.sum(batch["pair"][1])


BATCH = {"x": X, "pair": (Y, jnp.ones(2))}

BAD_BATCHES = {
    "lacks": ({"x": X}, r"of_batch: batch is not built as it was.*lacks 'pair/0', 'pair/1'"),
    "surplus": ({**BATCH, "z": X}, "it has 'z', which the traced one has not"),
    "list for tuple": ({**BATCH, "pair": [Y, jnp.ones(2)]}, "containers are"),
    "array": (X, "lacks 'pair/0', 'pair/1', 'x'"),
    "dtype": ({**BATCH, "x": X.astype(int)}, r"'batch/x' is int32\[8, 3\]; expected float32\[8,3\]"),
}


@pytest.fixture(scope="module")
def batched():
    return ow.compile(ow.SGD(0.1).minimize(of_batch, jnp.ones(3), BATCH))


@pytest.mark.parametrize(("batch", "message"), BAD_BATCHES.values(), ids=BAD_BATCHES)
def test_a_batch_of_another_structure_is_refused_by_path(batched, batch, message):
    state = batched.init(jnp.ones(3))
    with pytest.raises(ow.ArgumentError, match=message):
        batched(state, batch)
    np.testing.assert_allclose(batched(state, BATCH)[1].loss, of_batch(jnp.ones(3), BATCH), rtol=1e-5)


def test_an_object_that_is_no_state_is_refused():
    step, _ = begun()
    with pytest.raises(ow.ArgumentError, match=r"not a dict.*\. Begin with state = step\.init\(params\)"):
        step(PARAMS, X, Y)


# --------------------------------------------------------------------------------------- fetching


def test_any_variable_can_be_fetched():
    step, state = fetching()
    w, b = PARAMS["hidden"]
    state, out = step(state, X, Y)
    grads = jax.grad(loss)(PARAMS, X, Y)
    h = jnp.tanh(X @ w + b)
    assert_close(out["h"], h)
    assert_close(out["grad(h)"], jax.grad(lambda h: jnp.mean((h @ PARAMS["out"][0] - Y) ** 2))(h))
    assert_close(out["grad(hidden/w)"], grads["hidden"].w)
    np.testing.assert_array_equal(out["x"], X)
    np.testing.assert_array_equal(out["hidden/w"], w)
    assert_close(out["next(hidden/w)"], w - LEARNING_RATE * grads["hidden"].w)
    np.testing.assert_array_equal(out["next(hidden/w)"], state["hidden/w"])


def test_what_was_fetched_outlives_the_next_steps():
    step, state = fetching()
    state, first = step(state, X, Y)
    for _ in range(3):
        state, _ = step(state, X, Y)
    np.testing.assert_array_equal(first["hidden/w"], PARAMS["hidden"].w)
    assert_close(first["next(hidden/w)"], by_hand(1)[1]["hidden"].w)


def test_a_fetch_may_be_a_variable_or_a_single_name():
    training = program()
    step = ow.compile(training, fetch=training["h"])
    _, out = step(step.init(PARAMS), X, Y)
    assert out[training["h"]] is out["h"]
    assert repr(ow.compile(training, fetch="h")) == "Step('loss', 1 compiled)"


def test_a_hyperparameter_follows_its_schedule():
    rates = []
    step, state = made(
        ow.Momentum(lambda count: 0.1 / (count + 1)), fetch=["learning_rate", "momentum", "step"]
    )
    assert list(state.hyperparameters) == ["momentum"]
    for i in range(3):
        state, out = step(state, X, Y)
        rates.append(float(out["learning_rate"]))
        assert (int(out["step"]), int(state["step"])) == (i, i + 1)
        assert float(out["momentum"]) == pytest.approx(0.9)
    np.testing.assert_allclose(rates, [0.1, 0.05, 0.1 / 3], rtol=1e-6)


UNKNOWN = {
    "compile": (
        lambda step, state, out: ow.compile(step.program, fetch=["grad(hiden/w)"]),
        "'grad(hidden/w)'",
    ),
    "out": (lambda step, state, out: out["hh"], r"'h'.*compile(program, fetch=['hh'])"),
    "state": (lambda step, state, out: state["hidden/velocity"], "'hidden/w/velocity'"),
    "replace": (lambda step, state, out: state.replace({"learnin_rate": 1.0}), "'learning_rate'"),
}


@pytest.mark.parametrize(("look", "offered"), UNKNOWN.values(), ids=UNKNOWN)
def test_an_unknown_name_offers_the_nearest(look, offered):
    step, state = fetching()
    state, out = step(state, X, Y)
    with pytest.raises(ow.UnknownNameError) as error:
        look(step, state, out)
    assert "nearest names are" in str(error.value)
    for part in offered.split(".*"):
        assert part in str(error.value)


def test_in_asks_for_a_name_and_what_has_no_order_is_not_gone_through():
    step, state = fetching()
    state, out = step(state, X, Y)
    w = step.program["hidden/w"]
    for holder, name in ((step.program, "h"), (out, "grad(h)"), (state, "hidden/w")):
        assert name in holder
        assert "grad(hh)" not in holder
    for found in (step.program, state, out):
        assert w in found
        assert 0 not in found
    assert "loss" in out
    for holder in (step.program, out):
        with pytest.raises(TypeError, match="not iterable"):
            list(holder)
    with pytest.raises(ow.UnknownNameError, match="no Variable named 0"):
        step.program[0]


# ------------------------------------------------------------------------------ who owns the buffers


def test_the_parameters_that_were_passed_stay_usable():
    passed = jax.tree.map(jnp.array, PARAMS)
    step, _ = begun()
    first, second = step.init(passed), step.init(passed)
    for _ in range(2):
        first, _ = step(first, X, Y)
    assert same_bytes(passed, PARAMS)
    assert_close(second.parameters, PARAMS)


def test_the_data_that_was_passed_stays_usable():
    step, state = begun()
    x, y = jnp.array(X), jnp.array(Y)
    for _ in range(3):
        state, _ = step(state, x, y)
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(y, Y)


USES = {
    "step": lambda step, state: step(state, X, Y),
    "function": lambda step, state: step.function(state, X, Y),
    "parameters": lambda step, state: state.parameters,
    "another step": lambda step, state: ow.compile(step.program)(state, X, Y),
    "hyperparameters": lambda step, state: state.hyperparameters,
    "replace": lambda step, state: state.replace({"learning_rate": 0.5}),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_state_that_was_given_away_is_refused(use):
    step, state = begun()
    following, _ = step(state, X, Y)
    assert state.is_spent
    assert repr(state) == "State(given to a step, spent)"
    with pytest.raises(ow.StateError, match=r"state, out = step\(state, \.\.\.\).*donate=False"):
        use(step, state)
    assert not following.is_spent
    step(following, X, Y)


def test_without_donation_old_states_stay():
    step, state = made(donate=False)
    first, _ = step(state, X, Y)
    again, _ = step(state, X, Y)
    assert not state.is_spent
    assert same_bytes(first, again)
    assert same_bytes(state.parameters, PARAMS)


# --------------------------------------------------------------------------- reading and replacing


def test_parameters_come_back_in_their_containers():
    step, state = begun()
    state, _ = step(state, X, Y)
    found = state.parameters
    assert jax.tree.structure(found) == jax.tree.structure(PARAMS)
    assert (type(found), type(found["hidden"]), type(found["out"])) == (dict, Layer, list)
    assert state["hidden/w"] is found["hidden"].w
    assert state.model_state is None
    assert repr(state).startswith("State(9 Variables: ")


GOOD_RATES = [0.0, 1, 0.5, True, np.float64(0.5), np.float32(0.5), jnp.float32(0.5), np.array(0.5)]


@pytest.mark.parametrize("rate", GOOD_RATES, ids=repr)
def test_a_learning_rate_is_replaced_without_compiling(rate):
    step, state = begun()
    changed = state.replace({"learning_rate": rate})
    assert changed["learning_rate"].dtype == np.float32
    assert float(changed.hyperparameters["learning_rate"]) == float(rate)
    assert float(state["learning_rate"]) == pytest.approx(LEARNING_RATE)
    following, _ = step(changed, X, Y)
    assert_close(following.parameters, by_hand(1, float(rate))[1])
    assert (step.traces, step.compilations) == (0, 1)


@pytest.mark.parametrize(
    "rate", [-0.1, float("nan"), float("inf"), np.float32(-1), jnp.nan, "0.1", None], ids=repr
)
def test_a_learning_rate_that_is_no_sound_number_is_refused(rate):
    _, state = begun()
    with pytest.raises(ow.HyperparameterError, match=r"learning_rate is .*finite number of at least 0"):
        state.replace({"learning_rate": rate})


REPLACEMENTS = {
    "shape": ({"hidden/b": jnp.ones(5)}, r"'hidden/b' is float32\[5\]; expected float32\[4\]"),
    "dtype": ({"hidden/b": jnp.ones(4, int)}, r"'hidden/b' is int32\[4\]; expected float32\[4\]"),
    "a float for the counter": ({"step": 5.0}, r"'step' is float32\[\]; expected int32\[\]"),
    "a vector of rates": (
        {"learning_rate": np.ones(2)},
        r"'learning_rate' is float32\[2\]; expected float32\[\]",
    ),
    "a shape": ({"hidden/b": jax.ShapeDtypeStruct((4,), np.float32)}, "only a shape .*pass an array"),
    "text": ({"hidden/b": "zeros"}, r"'hidden/b' is 'zeros'; expected an array float32\[4\]"),
}


@pytest.mark.parametrize(("changes", "message"), REPLACEMENTS.values(), ids=REPLACEMENTS)
def test_a_replacement_that_does_not_fit_is_refused(changes, message):
    _, state = begun()
    with pytest.raises(ow.ArgumentError, match=message):
        state.replace(changes)


def test_parameters_slots_and_the_counter_are_replaced_too():
    step, state = begun()
    value = np.full((3, 4), 2.0)
    changed = state.replace({"hidden/w": value, "hidden/w/velocity": np.ones((3, 4)), "step": 7})
    value[:] = 0
    assert float(changed.parameters["hidden"].w[0, 0]) == 2
    assert same_bytes(state.parameters, PARAMS)
    following, _ = step(changed, X, Y)
    assert int(following["step"]) == 8
    params = {**PARAMS, "hidden": PARAMS["hidden"]._replace(w=jnp.full((3, 4), 2.0))}
    grad = jax.grad(loss)(params, X, Y)["hidden"].w
    assert_close(following["hidden/w"], 2.0 - LEARNING_RATE * (0.9 + grad))


BAD_PARAMETERS = {
    "lacks": ({"hidden": PARAMS["hidden"]}, "lacks 'out/0'"),
    "surplus": ({**PARAMS, "more": X}, "it has 'more', which the traced one has not"),
    "tuple for namedtuple": ({**PARAMS, "hidden": tuple(PARAMS["hidden"])}, "params is not built as it was"),
    "shape": ({**PARAMS, "out": [jnp.ones(5)]}, r"'out/0' is float32\[5\]; expected float32\[4\]"),
    "dtype": ({**PARAMS, "out": [jnp.ones(4, int)]}, r"'out/0' is int32\[4\]; expected float32\[4\]"),
    "shape only": ({**PARAMS, "out": [jax.ShapeDtypeStruct((4,), np.float32)]}, "only a shape"),
    "none": (None, r"begins with parameters of yours: step.init\(params\)"),
}


@pytest.mark.parametrize(("params", "message"), BAD_PARAMETERS.values(), ids=BAD_PARAMETERS)
def test_parameters_that_are_not_as_traced_are_refused(params, message):
    step, _ = begun()
    with pytest.raises(ow.ArgumentError, match=message):
        step.init(params)


def test_model_state_is_asked_for_and_only_where_there_is_some():
    def counting(w, count, x):
        return jnp.sum(w * x), {"n": count["n"] + 1}

    step, _ = begun()
    with pytest.raises(ow.ArgumentError, match="loss was traced without state="):
        step.init(PARAMS, {"n": 0})
    step = ow.compile(ow.SGD(0.1).minimize(counting, jnp.ones(3), X, state={"n": 0}))
    with pytest.raises(ow.ArgumentError, match=r"carries model state: step\.init\(w, count\)"):
        step.init(jnp.ones(3))
    state, _ = step(step.init(jnp.ones(3), {"n": 5}), X)
    assert int(state.model_state["n"]) == 6


# ------------------------------------------------------------------------- several steps, one State


def test_a_test_time_step_reads_the_training_state():
    train = compiled_once()
    test = ow.compile(ow.prune(train.program, ["h"]))
    assert {op.made_by for op in test.program.ops} == {ow.Pass.FORWARD}
    state = train.init(PARAMS)
    for i in range(3):
        _, params = by_hand(i)
        same, out = test(state, X)
        assert_close(out["h"], jnp.tanh(X @ params["hidden"].w + params["hidden"].b))
        assert not state.is_spent
        assert same_bytes(same, state)
        state, _ = train(same, X, Y)
    assert test(state, X[:2])[1]["h"].shape == (2, 4)
    assert (test.traces, test.compilations) == (1, 2)


def test_a_forward_step_of_the_same_function_reads_the_training_state():
    train, state = begun()
    evaluate = ow.compile(ow.trace(loss, PARAMS, X, Y))
    state, _ = train(state, X, Y)
    _, out = evaluate(state, X, Y)
    np.testing.assert_allclose(out.loss, by_hand(2)[0][1], rtol=1e-5)

    def body(state, _):
        before = evaluate(state, X, Y)[1].loss
        return train(state, X, Y)[0], before

    _, losses = lax.scan(body, state, None, length=3)
    np.testing.assert_allclose(losses, by_hand(4)[0][1:], rtol=1e-5)


@pytest.fixture(scope="module")
def part():
    return ow.compile(ow.Momentum(LEARNING_RATE).minimize(loss, PARAMS, X, Y, parameter_list=["out/0"]))


def test_a_step_that_trains_a_part_keeps_the_rest_of_the_state(part):
    train, state = begun()
    state, _ = part(state, X, Y)
    np.testing.assert_array_equal(state["hidden/w"], PARAMS["hidden"].w)
    assert_close(state["out/0"], by_hand(1)[1]["out"][0])
    state, _ = train(state, X, Y)
    assert not np.array_equal(state["hidden/w"], PARAMS["hidden"].w)


def test_a_state_that_lacks_something_is_refused():
    train, _ = begun()
    state = ow.compile(program(ow.SGD(LEARNING_RATE))).init(PARAMS)
    with pytest.raises(
        ow.StateError, match=r"has no .*'hidden/w/velocity' \(float32\[3,4\]\).*this step's own init"
    ):
        train(state, X, Y)


@pytest.mark.parametrize("optimizer", [ow.SGD(0.1), ow.Momentum(0.1, nesterov=True), ow.Adam(0.01)], ids=repr)
def test_two_identical_runs_are_bitwise_equal(optimizer):
    def run():
        step, state = made(optimizer, fetch=["grad(hidden/w)"])
        outs = []
        for size in (8, 4, 8):
            state, out = step(state, X[:size], Y[:size])
            outs.append(jax.tree.map(np.asarray, out))
        return state, outs

    assert same_bytes(run(), run())


# ------------------------------------------------------------------------- what once went wrong


FIRST_ONLY = "is_spent looks at the first Variable only: an error of JAX"


@pytest.mark.parametrize("use", ["step", "function", "parameters"])
def test_a_state_that_was_given_away_in_part_is_refused(part, use):
    step, state = begun()
    part(state, X, Y)
    with pytest.raises(ow.StateError, match="donate=False"):
        jax.block_until_ready(USES[use](step, state))


def test_a_replaced_state_says_that_the_first_one_was_given_away():
    step, state = begun()
    (first,) = jax.tree_util.tree_flatten_with_path(state)[0][0][0]
    changed = state.replace({first.key: np.zeros(state[first.key].shape, np.float32)})
    step(state, X, Y)
    with pytest.raises(ow.StateError):
        step(changed, X, Y)


def test_a_variable_of_a_state_that_was_given_away_is_refused():
    step, state = begun()
    step(state, X, Y)
    with pytest.raises(ow.StateError):
        state["hidden/w"]


def test_a_ragged_list_is_refused():
    step, state = begun()
    with pytest.raises(ow.ArgumentError, match="'x'"):
        step(state, [[1.0, 2.0, 3.0], [1.0]], Y)


def test_under_jit_a_batch_of_another_shape_compiles_once():
    step, state = made()
    jax.jit(step)(state, X[:4], Y[:4])
    assert (step.traces, step.compilations) == (1, 1)


def test_a_learning_rate_in_bfloat16_is_a_sound_number():
    _, state = begun()
    assert float(state.replace({"learning_rate": jnp.bfloat16(0.5)})["learning_rate"]) == 0.5


def test_a_feed_in_containers_is_described_in_short():
    step, state = begun()
    with pytest.raises(ow.ArgumentError) as error:
        step(state, {"x": X}, Y)
    assert len(str(error.value)) < 200


def test_replacing_a_hyperparameter_that_follows_a_schedule_says_so():
    _, state = made(ow.SGD(lambda step: 0.1))
    with pytest.raises(ow.UnknownNameError, match="schedule"):
        state.replace({"learning_rate": 0.1})


def test_the_message_about_an_old_style_key_says_what_to_write():
    def noisy(w, k):
        return jnp.sum(w * jax.random.normal(k, (3,)))

    step = ow.compile(ow.trace(noisy, jnp.ones(3), jax.random.key(0)))
    with pytest.raises(ow.ArgumentError, match="wrap_key_data"):
        step(step.init(jnp.ones(3)), jax.random.PRNGKey(0))


def test_disable_jit_is_told_to_have_no_effect():
    """JAX would unroll the loops of a trace, fail in some, and refuse to call what was compiled."""

    def looping(w, x):
        h, _ = lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=3)
        halved = lax.while_loop(lambda h: jnp.max(h) > 0.5, lambda h: h / 2, lax.stop_gradient(h))
        return jnp.mean((h - halved) ** 2)

    weights = jnp.eye(3) / 2
    with jax.disable_jit():
        with pytest.warns(
            UserWarning, match="disable_jit has no effect here: looping is traced once.*call it by itself"
        ):
            program = ow.SGD(LEARNING_RATE).minimize(looping, weights, X)
        step = ow.compile(program)
        state, out = step(step.init(weights), X)
        state, _ = step.run(state, [X, X], steps=2)
    assert "scan" in [op.type for op in program.ops]
    plain = ow.compile(ow.SGD(LEARNING_RATE).minimize(looping, weights, X))
    expected, first = plain(plain.init(weights), X)
    expected, _ = plain.run(expected, [X, X], steps=2)
    assert out.loss == first.loss
    np.testing.assert_array_equal(state.parameters, expected.parameters)
