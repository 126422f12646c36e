"""Clipping the gradient of an activation on its way back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.derive.error_clip import error_clip

PARAMS = {"v": jnp.array([[1.0, -2.0], [0.5, 3.0]]), "w": jnp.array([4.0, -0.1])}
X = jnp.array([[0.3, -0.2], [0.1, 0.4], [-0.5, 0.2]])


def loss(p, x):
    hidden = jnp.tanh(x @ p["v"])
    return jnp.sum(hidden * p["w"]) + jnp.sum(hidden)


def by_hand(limit):
    """The gradient of v, where that of ``tanh`` is clipped: both readers' parts together."""
    v, w, x = (np.asarray(a, np.float64) for a in (PARAMS["v"], PARAMS["w"], X))
    error = np.clip(np.broadcast_to(w + 1, (3, 2)), -limit, limit)
    return error, x.T @ (error * (1 - np.tanh(x @ v) ** 2))


@pytest.mark.parametrize("where", ["tanh", "tan*", ["tanh"], lambda v: v.name == "tanh"])
def test_the_gradient_of_the_activation_and_of_what_lies_before_it_is_clipped(where):
    program = error_clip(ow.trace(loss, PARAMS, X), where, 0.95)
    step = ow.compile(ow.SGD(1.0).minimize(program), fetch=["tanh", "grad(tanh)", "grad(v)", "grad(w)"])
    _, out = step(step.init(PARAMS), X)
    error, expected = by_hand(0.95)
    np.testing.assert_allclose(out["grad(tanh)"], error, rtol=1e-6)
    np.testing.assert_allclose(out["grad(v)"], expected, rtol=1e-5)
    hidden = np.tanh(X @ PARAMS["v"])
    np.testing.assert_allclose(out["tanh"], hidden, rtol=1e-5)
    np.testing.assert_allclose(out["grad(w)"], hidden.sum(0), rtol=1e-5)
    np.testing.assert_allclose(out.loss, loss(PARAMS, X), rtol=1e-6)


def test_a_batch_of_another_length_and_the_test_program():
    program = ow.SGD(1.0).minimize(error_clip(ow.trace(loss, PARAMS, X), "tanh", 0.95))
    step = ow.compile(program, fetch=["grad(tanh)"])
    _, out = step(step.init(PARAMS), X[:2])
    np.testing.assert_allclose(out["grad(tanh)"], by_hand(0.95)[0][:2], rtol=1e-6)
    assert not any(op.type == "error_clip" for op in ow.for_test(program).ops)


def test_what_a_test_program_does_not_have_may_be_clipped():
    def network():
        x = ow.layer.dropout(ow.data("x", (None, 4)), 0.5, name="dropped")
        return jnp.mean(ow.layer.fc(x, 1) ** 2)

    program = ow.trace(network)
    picked = next(v.name for op in program.ops for v in op.outputs if op.type in ("where", "select_n", "mul"))
    program = ow.SGD(1.0).minimize(error_clip(program, picked, 0.5))
    assert any(op.type == "error_clip" for op in program.ops)
    assert not any(op.type == "error_clip" for op in ow.for_test(program).ops)


def test_inside_of_a_network_it_is_a_function():
    def clipped(p, x):
        hidden = ow.layer.clip_error(jnp.tanh(x @ p["v"]), 0.95)
        return jnp.sum(hidden * p["w"]) + jnp.sum(hidden)

    np.testing.assert_allclose(jax.grad(clipped)(PARAMS, X)["v"], by_hand(0.95)[1], rtol=1e-5)
    program = ow.SGD(1.0).minimize(clipped, PARAMS, X)
    assert [op.type for op in program.ops].count("error_clip") == 1
    step = ow.compile(program, fetch=["grad(v)"])
    np.testing.assert_allclose(step(step.init(PARAMS), X)[1]["grad(v)"], by_hand(0.95)[1], rtol=1e-5)


def test_as_a_layer_it_takes_lazy_values():
    hidden = ow.layer.clip_error(ow.layer.fc(ow.data("x", (None, 4)), 3), 0.5, name="clipped")
    assert ow.trace(hidden).outputs[0].name == "clipped"


def test_complex_and_low_precision_gradients():
    z = jnp.array([1.0 + 1j, 1e-3j], jnp.complex64)
    given = jnp.array([3.0 - 4j, 0.1 + 0j], jnp.complex64)
    (found,) = jax.vjp(lambda z: ow.layer.clip_error(z, 0.5), z)[1](given)
    np.testing.assert_allclose(found, [0.3 - 0.4j, 0.1], rtol=1e-6)
    half = jax.grad(lambda x: jnp.sum(ow.layer.clip_error(x, 0.5) * 3))(jnp.ones(2, jnp.bfloat16))
    assert half.dtype == jnp.bfloat16
    np.testing.assert_array_equal(half, jnp.full(2, 0.5, jnp.bfloat16))


def test_the_mean_over_a_batch_is_clipped_device_by_device():
    """Each of two devices has half of the batch, so that its errors are twice as large."""

    def mean(w, x):
        return jnp.mean(jnp.tanh(w * x))

    x = jnp.array([0.1, -0.2, 0.3, 0.4])
    program = ow.SGD(1.0).minimize(error_clip(ow.trace(mean, jnp.float32(1), x), "tanh", 0.3))
    with pytest.warns(UserWarning, match="'error_clip_grad' .* each of 2 devices has those of a mean"):
        step = ow.compile(ow.replicate(program, 2))
    state, _ = step(step.init(jnp.float32(1)), x)
    np.testing.assert_allclose(1 - state["w"], 2 * np.mean(0.3 * (1 - np.tanh(x) ** 2) * x), rtol=1e-5)


WRONG = {
    "negative": (
        lambda p: error_clip(p, "tanh", -1.0),
        ow.HyperparameterError,
        ["max_value is -1.0", "at least 0"],
    ),
    "no number": (lambda p: error_clip(p, "tanh", "big"), ow.HyperparameterError, ["'big'"]),
    "not finite": (lambda p: error_clip(p, "tanh", float("nan")), ow.HyperparameterError, ["nan"]),
    "a parameter": (lambda p: error_clip(p, "w", 1.0), ow.UnknownNameError, ["error_clip", "'w'"]),
    "a name of nothing": (lambda p: error_clip(p, "tahn", 1.0), ow.UnknownNameError, ["'tahn'", "'tanh'"]),
    "the loss": (lambda p: error_clip(p, p.loss, 1.0), ow.GraphError, ["the loss", "Leave it out"]),
    "too late": (
        lambda p: error_clip(ow.SGD(0.1).minimize(p), "tanh", 1.0),
        ow.GraphError,
        ["has a backward pass already", "minimize(error_clip("],
    ),
}


@pytest.mark.parametrize(("call", "error", "words"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(call, error, words):
    with pytest.raises(error) as raised:
        call(ow.trace(loss, PARAMS, X))
    for word in words:
        assert word in str(raised.value)
