"""A guard around a step that decides by itself what is not finite is told to be one too many."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import onward as ow

W, X = jnp.ones(3), jnp.ones((4, 3))
SCALE = jnp.float32(2.0**127)
RULE = optax.apply_if_finite(optax.sgd(0.1), 5)


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


def scaled(w, scale, x):
    """A step with a dynamic loss scale of its own."""
    value, gradient = jax.value_and_grad(lambda w: loss(w, x) * scale)(w)
    gradient = gradient / scale
    finite = jnp.all(jnp.isfinite(gradient))
    w = jnp.where(finite, w - 0.01 * gradient, w)
    return w, jnp.where(finite, scale, scale / 2**8), value / scale


def counting(w, bad, x):
    value, gradient = jax.value_and_grad(loss)(w, x)
    return jax.lax.cond(
        jnp.isfinite(value), lambda: (w - 0.1 * gradient, bad, value), lambda: (w, bad + 1, value)
    )


def of_optax(w, state, x):
    value, gradient = jax.value_and_grad(loss)(w, x)
    updates, state = RULE.update(gradient, state, w)
    return optax.apply_updates(w, updates), state, value


def keeping(w, x):
    value, gradient = jax.value_and_grad(loss)(w, x)
    return jnp.where(jnp.isfinite(value), w - 0.1 * gradient, w), value


CASES = {
    "a loss scale": (scaled, (W, SCALE), "'scale' of that"),
    "a count": (counting, (W, jnp.int32(0)), "'s?bad' of that"),
    "optax": (of_optax, (W, RULE.init(W)), "'state/notfinite_count', "),
}


@pytest.mark.parametrize("action", ["skip", "stop"])
@pytest.mark.parametrize(("step", "carry", "names"), CASES.values(), ids=CASES)
def test_a_step_that_guards_itself_is_told(step, carry, names, action):
    program = ow.adopt(step, *carry, X, carried=list(step.__code__.co_varnames[:2]))
    with pytest.warns(UserWarning, match=rf"is_finite at .*py:\d+\), and makes .*{names}") as told:
        ow.guard(program, action)
    assert [w.filename for w in told] == [__file__]
    assert str(told[0].message).endswith("Leave out ow.guard: the step guards itself.")


def test_it_is_told_once_however_often_the_recipe_is_replayed():
    program = ow.adopt(scaled, W, SCALE, X, carried=["w", "scale"])
    with pytest.warns(UserWarning, match="guards itself"):
        program = ow.guard(program)
    step = ow.compile(ow.replicate(program, devices=2))
    state, _ = step(step.init((W, SCALE)), X)
    assert float(state["scale"]) == float(SCALE)  # as the warning says


def test_without_the_guard_the_scale_falls_as_in_jax():
    step = ow.compile(ow.adopt(scaled, W, SCALE, X, carried=["w", "scale"]))
    state, plain = step.init((W, SCALE)), (W, SCALE)
    for _ in range(3):
        state, _ = step(state, X)
        *plain, _ = jax.jit(scaled)(*plain, X)
    np.testing.assert_allclose(state["w"], plain[0], rtol=1e-5)
    assert float(state["scale"]) == float(plain[1]) < float(SCALE)


def counted(w, bad, x):
    """A step that counts what is not finite, and leaves nothing out."""
    value, gradient = jax.value_and_grad(loss)(w, x)
    return w - 0.1 * gradient, bad + ~jnp.isfinite(value), value


def test_others_are_guarded_in_silence():
    ow.guard(ow.adopt(keeping, W, X, carried=["w"]))
    ow.guard(ow.adopt(counted, W, jnp.int32(0), X, carried=["w", "bad"]))
    ow.guard(ow.Adam(0.1).minimize(lambda w, x: jnp.where(jnp.isfinite(loss(w, x)), 1.0, 0.0) * w[0], W, X))


def clipping(w, moment, x):
    """An update that asks whether a norm is finite, and lets NaN through all the same."""
    value, gradient = jax.value_and_grad(loss)(w, x)
    norm = jnp.linalg.norm(gradient)
    moment = 0.9 * moment + gradient * jnp.where(jnp.isfinite(norm), jnp.minimum(1.0, 1 / norm), 1.0)
    return w - 0.1 * moment, moment, value


def test_what_follows_from_the_numbers_of_a_gradient_is_guarded_in_silence():
    ow.guard(ow.adopt(clipping, W, W, X, carried=["w", "moment"]))
    ow.guard(ow.SGD(0.1, rules=[ow.ClipByGlobalNorm(1.0)]).minimize(loss, W, X))
