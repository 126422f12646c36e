"""Randomness and statistics that are carried and that no step replaces are refused; nothing else is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.core.jaxprs.body import body_of
from onward.core.jaxprs.drawing import DrawsAlike

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(6, 3)).astype("float32")
W = jnp.ones(3)
SGD = ow.SGD(0.1)


def dropped(w, key, x):
    return jnp.mean(x * w * jax.random.bernoulli(key, 0.5, x.shape))


def scanned(w, keys, x):
    def layer(h, key):
        return h * w * jax.random.bernoulli(key, 0.5, h.shape), None

    return jnp.mean(jax.lax.scan(layer, x, keys)[0])


def turned(w, key, x):
    """A key that a loop carries and splits, as ``while`` and ``fori_loop`` do."""

    def turn(i, carry):
        key, h = carry
        key, own = jax.random.split(key)
        return key, h * w * jax.random.bernoulli(own, 0.5, h.shape)

    return jnp.mean(jax.lax.fori_loop(0, jnp.int32(x[0, 0] * 0) + 2, turn, (key, x))[1])


def chosen(w, key, x):
    return jax.lax.cond(x[0, 0] > 0, dropped, lambda w, key, x: jnp.mean(x * w), w, key, x)


DRAWS = {
    "a key": (dropped, KEY),
    "a raw key": (dropped, jax.random.PRNGKey(0)),
    "a key that is split": (lambda w, key, x: dropped(w, jax.random.split(key)[1], x), KEY),
    "a seed": (lambda w, seed, x: dropped(w, jax.random.key(seed), x), jnp.uint32(3)),
    "keys of a scan": (scanned, jax.random.split(KEY, 2)),
    "in a branch": (chosen, KEY),
    "recomputed": (jax.checkpoint(dropped), KEY),
    "in a jit": (jax.jit(dropped), KEY),
    "of vmap": (
        lambda w, keys, x: jnp.mean(jax.vmap(dropped, (None, 0, None))(w, keys, x)),
        jax.random.split(KEY, 2),
    ),
    "gamma": (lambda w, key, x: jnp.mean(w * x * jax.random.gamma(key, 2.0, x.shape)), KEY),
}


@pytest.mark.parametrize(("draw", "key"), DRAWS.values(), ids=DRAWS)
def test_a_key_among_the_parameters_is_refused(draw, key):
    with pytest.raises(ow.ArgumentError, match=r"(?s)same random numbers: .*'key' \(.*\) alone.*feed a new"):
        SGD.minimize(lambda p, x: draw(p["w"], p["key"], x), {"w": W, "key": key}, X)


@pytest.mark.parametrize(("draw", "key"), DRAWS.values(), ids=DRAWS)
def test_a_key_that_comes_with_the_batch_is_welcome(draw, key):
    SGD.minimize(draw, W, key, X)


def test_a_key_in_a_loop_of_unknown_length_is_refused():
    forward = ow.trace(lambda p, x: turned(p["w"], p["key"], x), {"w": W, "key": KEY}, X)
    with pytest.raises(ow.ArgumentError, match="'key'"):
        SGD.minimize(forward)


def test_a_fixed_key_may_be_folded_with_what_changes():
    def by_data(p, x, i):
        return dropped(p["w"], jax.random.fold_in(p["key"], i), x)

    def by_state(p, count, x):
        return by_data(p, x, count), count + 1

    params = {"w": W, "key": KEY}
    SGD.minimize(by_data, params, X, jnp.int32(0))
    step = ow.compile(ow.SGD(0.0).minimize(by_state, params, X, state=jnp.int32(0)))
    state, losses = step.init(params, jnp.int32(0)), []
    for i in range(3):
        state, out = step(state, X)
        losses.append(float(out.loss))
        np.testing.assert_allclose(out.loss, by_data(params, X, i), rtol=1e-6)
    assert len(set(losses)) == 3


def test_a_counter_that_comes_back_as_it_was_is_refused():
    def loss(w, state, x):
        return dropped(w, jax.random.fold_in(state["key"], state["count"]), x), state

    with pytest.raises(ow.ArgumentError, match=r"'state/count'.*'state/key'.*comes back as it was"):
        SGD.minimize(loss, W, X, state={"key": KEY, "count": jnp.int32(0)})


def test_a_key_that_is_declared_and_not_assigned_is_refused():
    def network():
        key = ow.state("mask", (), KEY.dtype, lambda key, shape, dtype: key)
        return dropped(ow.parameter("w", (3,)), key, ow.data("x", (None, 3)))

    with pytest.raises(ow.ArgumentError, match=r"onward\.assign\('mask', value\), or take onward\.key"):
        SGD.minimize(ow.trace(network))


def test_a_key_of_the_persons_own_code_stays_fixed():
    """As in plain JAX: random features, drawn once and for all."""
    step = ow.compile(SGD.minimize(lambda w, x: dropped(w, KEY, x), W, X))
    np.testing.assert_allclose(step(step.init(W), X)[1].loss, dropped(W, KEY, X), rtol=1e-6)


def test_a_key_that_nothing_draws_from_and_integers_may_stay():
    def loss(p, x):
        return jnp.mean(x[:, p["order"]] * p["w"]) + 0 * jax.random.key_data(p["key"]).sum()

    SGD.minimize(loss, {"w": W, "order": jnp.arange(3), "key": KEY}, X)


def test_what_decides_a_draw_is_followed_into_loops():
    def body(key, counter, x):
        first = jax.lax.scan(lambda k, x: (jax.random.fold_in(k, jnp.int32(x)), x), key, x)[0]
        return [jax.random.normal(first), jax.random.normal(jax.random.fold_in(key, counter))]

    walk = DrawsAlike()
    found = walk.run(body_of(body, KEY, jnp.int32(0), X[0]), [frozenset("k"), frozenset("c"), None])
    assert found == [None, frozenset("kc")]
    assert walk.decided == {"k", "c"}


def test_a_loop_whose_turns_the_data_count_leaves_another_key_each_time():
    def body(key, x):
        return [jax.lax.fori_loop(0, jnp.int32(x), lambda i, key: jax.random.fold_in(key, i), key)]

    assert DrawsAlike().run(body_of(body, KEY, X[0, 0]), [frozenset("k"), None]) == [None]
    assert DrawsAlike().run(body_of(body, KEY, X[0, 0]), [frozenset("k"), frozenset("x")]) == [
        frozenset("kx")
    ]


# Statistics ------------------------------------------------------------------------------------------------


def normalized(mean, h):
    """What is normalized by its batch, and the moving mean."""
    return h - h.mean(0), 0.9 * mean + 0.1 * h.mean(0)


def with_mean(p, x):
    h, _ = normalized(p["mean"], x * p["w"])
    return jnp.mean(h**2)


def test_a_moving_mean_among_the_parameters_is_refused():
    with pytest.raises(
        ow.ArgumentError, match=r"(?s)would replace 'mean' \(float32\[3\]\).*return value, state"
    ):
        SGD.minimize(with_mean, {"w": W, "mean": jnp.zeros(3)}, X)
    with pytest.raises(ow.ArgumentError, match="would replace 'mean'"):
        SGD.minimize(with_mean, {"w": W, "mean": jnp.zeros(3)}, X, parameter_list=["w"])


def test_it_is_refused_without_minimize_as_well():
    program = ow.trace(with_mean, {"w": W, "mean": jnp.zeros(3)}, X)
    with pytest.warns(ow.UnreachedWarning):
        program = ow.append_backward(program)
    with pytest.raises(ow.ArgumentError, match="would replace 'mean'"):
        ow.append_update(program, SGD)


def test_a_moving_mean_that_comes_back_as_it_was_is_refused():
    def loss(w, mean, x):
        h, _ = normalized(mean, x * w)
        return jnp.mean(h**2), mean

    with pytest.raises(ow.ArgumentError, match=r"would replace 'mean'.*comes back as it was"):
        SGD.minimize(loss, W, X, state=jnp.zeros(3))


def test_a_counter_among_the_parameters_is_refused():
    def loss(p, x):
        _ = p["count"] + 1
        return jnp.mean(x * p["w"]) / (1.0 + p["count"])

    with pytest.raises(ow.ArgumentError, match="would replace 'count'"):
        SGD.minimize(loss, {"w": W, "count": jnp.int32(0)}, X)


def test_statistics_that_are_declared_and_not_assigned_are_refused():
    def network():
        mean = ow.state("mean", (3,))
        h, _ = normalized(mean, ow.data("x", (None, 3)) * ow.parameter("w", (3,)))
        return jnp.mean(h**2)

    with pytest.raises(ow.ArgumentError, match=r"would replace 'mean'.*onward\.assign\('mean', value\)\."):
        SGD.minimize(ow.trace(network))


def test_a_number_that_the_loss_reads_may_stay():
    """As the decay of an optimizer within the loss: what no inner gradient reads is not a next value."""

    def loss(w, state, x):
        slope = jax.grad(lambda h: (h * state["scale"]) ** 2)(jnp.sum(w * x))
        return slope**2, {"scale": state["scale"], "count": state["count"] + 1}

    state = {"scale": jnp.float32(3), "count": jnp.int32(0)}
    step = ow.compile(SGD.minimize(loss, W, X, state=state))
    next_state, out = step(step.init(W, state), X)
    np.testing.assert_allclose(out.loss, loss(W, state, X)[0], rtol=1e-5)
    assert (float(next_state.model_state["scale"]), int(next_state.model_state["count"])) == (3.0, 1)


def test_a_layer_whose_result_is_not_used_is_only_warned_of():
    def loss(p, x):
        _ = x @ p["head"] + p["bias"]
        return jnp.mean(x * p["w"])

    params = {"w": W, "head": jnp.ones((3, 2)), "bias": jnp.ones(2)}
    with pytest.warns(ow.UnreachedWarning, match="'bias', 'head'"):
        SGD.minimize(loss, params, X[0])


@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.parametrize("product", [jnp.matmul, lambda h, w: jnp.einsum("bi,oi->bo", h, w)])
def test_a_square_head_that_is_not_used_is_only_warned_of_whatever_the_batch(product, batch):
    def loss(p, x):
        _ = product(x, p["head"])
        return jnp.mean(x * p["w"])

    with pytest.warns(ow.UnreachedWarning, match="'head'"):
        SGD.minimize(loss, {"w": W, "head": jnp.ones((3, 3))}, X[:batch])


def test_what_is_shown_by_a_debug_print_is_read():
    def loss(p, x):
        jax.debug.print("{}", 0.5 * p["spare"])
        return jnp.mean(x * p["w"])

    with pytest.warns(ow.UnreachedWarning, match="'spare'"):
        SGD.minimize(loss, {"w": W, "spare": W}, X)


# The test Program ------------------------------------------------------------------------------------------


def test_a_test_program_that_draws_without_asking_is_warned_of():
    program = SGD.minimize(dropped, W, KEY, X)
    with pytest.warns(
        UserWarning, match=r"dropped draws .*bernoulli at test_replaced\.py.*is_training"
    ) as told:
        ow.for_test(program)
    assert told[0].filename == __file__


def test_one_that_asks_may_draw():
    """A variational model samples when it is tested, too."""

    def loss(w, key, x):
        return dropped(w, key, x) if ow.is_training() else 2 * dropped(w, key, x)

    assert any("bernoulli" in op.type for op in ow.for_test(SGD.minimize(loss, W, KEY, X)).ops)


def test_a_number_in_a_metric_that_is_dropped_is_only_warned_of():
    def loss(p, x):
        _ = p["temperature"] * -jnp.log(x)
        return (p["w"] * x) ** 2

    params = {"w": jnp.float32(1), "temperature": jnp.float32(1)}
    with pytest.warns(ow.UnreachedWarning, match="temperature"):
        ow.SGD(0.1).minimize(loss, params, jnp.float32(2))
