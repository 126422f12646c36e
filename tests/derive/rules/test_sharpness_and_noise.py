"""SAM, whose gradients come from another place, and noise, which is told by its statistics."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from tests.compiled import together
from tests.derive.rules.around import RTOL, assert_close, case, given, run

import onward as ow

RADIUS, RATE = 0.25, 0.125  # exact in float32


def bowl(params, curvature):
    """Its gradient is curvature * p."""
    return sum(jnp.sum(curvature[k] * p**2) for k, p in params.items()) / 2


def sam_by_hand(params, curvature, adaptive):
    w, path = {k: v.astype(np.float64) for k, v in params.items()}, []
    for t in range(len(next(iter(curvature.values())))):
        c = {k: v[t].astype(np.float64) for k, v in curvature.items()}
        scale = {k: np.abs(w[k]) if adaptive else np.ones_like(w[k]) for k in w}
        length = np.sqrt(sum(np.sum((scale[k] * c[k] * w[k]) ** 2) for k in w))
        top = {k: w[k] + RADIUS * scale[k] ** 2 * c[k] * w[k] / length for k in w}
        w = {k: w[k] - RATE * c[k] * top[k] for k in w}
        path.append(w)
    return {k: np.stack([one[k] for one in path]) for k in w}


def curved(dtype):
    params, curvature = given(dtype)
    return params, {k: np.abs(v) / 2 for k, v in curvature.items()}


@cache
def followed(dtype):
    with jax.enable_x64(dtype == "float64"):
        return together(
            {
                adaptive: case(ow.SGD(RATE, rules=[ow.SAM(RADIUS, adaptive=adaptive)]), *curved(dtype), bowl)
                for adaptive in (False, True)
            }
        )


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("dtype", RTOL)
def test_sam_follows_the_gradients_of_the_perturbed_parameters(dtype, adaptive):
    assert_close(followed(dtype)[adaptive], sam_by_hand(*curved(dtype), adaptive), RTOL[dtype])


def test_sam_is_that_of_optax():
    w, x = np.float32([1, -2, 0.5]), np.float32([0.5, 2, 1])
    peer = optax.contrib.sam(
        optax.sgd(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)), opaque_mode=True
    )

    def loss(w, x):
        return jnp.sum(x * w**4)

    @jax.jit
    def advance(theirs, slots):
        slope = jax.grad(loss)(theirs, x)
        updates, slots = peer.update(slope, slots, theirs, grad_fn=lambda p, _: jax.grad(loss)(p, x))
        return optax.apply_updates(theirs, updates), slots

    step = ow.compile(ow.SGD(0.1, rules=[ow.SAM(0.05)]).minimize(loss, w, x))
    state, theirs, slots = step.init(w), w, peer.init(w)
    for _ in range(5):
        state, _ = step(state, x)
        theirs, slots = advance(theirs, slots)
    np.testing.assert_allclose(state.parameters, theirs, rtol=1e-5)


def test_sam_only_where_it_is_asked_for():
    params = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([3.0])}
    curvature = {"a": jnp.ones((1, 2)), "b": jnp.ones((1, 1))}
    actual = run(ow.SGD(RATE, rules=[ow.SAM(RADIUS, where="a")]), params, curvature, bowl)
    a = sam_by_hand({"a": np.array([1.0, 2.0])}, {"a": np.ones((1, 2))}, False)["a"]
    np.testing.assert_allclose(actual["a"], a, rtol=1e-6)
    np.testing.assert_allclose(actual["b"], [[3.0 * (1 - RATE)]], rtol=1e-6)


def noise(rule, params, steps):
    """What the rule adds in so many steps: with a rate of 1, the way of parameters without gradients."""
    zeros = {k: np.zeros((steps, *v.shape), v.dtype) for k, v in params.items()}
    path = run(ow.SGD(1.0, rules=[rule]), params, zeros)
    return {k: -np.diff(np.asarray(v), axis=0, prepend=v[:1] * 0) for k, v in path.items()}


@pytest.fixture(scope="module")
def drawn():
    params = {
        "a": np.zeros(20_000, np.float32),
        "b": np.zeros(20_000, np.float32),
        "z": np.zeros(20_000, np.complex64),
    }
    return noise(ow.rule.Noise(0.04, decay=0.5), params, 10)


def test_the_variance_of_noise_falls_with_the_steps(drawn):
    expected = 0.04 / (1 + np.arange(10)) ** 0.5
    for k, found in drawn.items():
        np.testing.assert_allclose(np.mean(np.abs(found) ** 2, axis=1), expected, rtol=0.05, err_msg=k)
        np.testing.assert_allclose(np.abs(found.mean(axis=1)), 0, atol=0.01, err_msg=k)
    peer = optax.add_noise(0.04, 0.5, 0)
    added = jax.jit(lambda zeros: peer.update(zeros, peer.init(zeros))[0])
    theirs = added(np.zeros(20_000, np.float32))
    np.testing.assert_allclose(np.var(drawn["a"][0]), np.var(theirs), rtol=0.05)


def test_noise_differs_from_step_to_step_and_from_parameter_to_parameter(drawn):
    drawn = {k: drawn[k] for k in ("a", "b")}
    rows = np.concatenate(list(drawn.values()))
    assert np.abs(np.corrcoef(rows) - np.eye(len(rows))).max() < 0.05


def test_noise_is_what_seed_and_step_say(drawn):
    params = {"a": np.zeros(100, np.float32)}
    first, again, other = (noise(ow.rule.Noise(0.04, seed=seed), params, 3)["a"] for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.abs(np.corrcoef(first[0], other[0])[0, 1]) < 0.4
