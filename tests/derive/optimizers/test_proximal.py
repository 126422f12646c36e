"""ProximalGD, ProximalAdagrad and FTRL against their equations, and against what they minimize."""

import jax.numpy as jnp
import numpy as np
import pytest
from tests.derive.optimizers.reference_b import PRECISIONS, check, float32s, hundred_steps, one_by_one, run

import onward as ow
from onward.derive.optimizers.proximal import FTRL, ProximalAdagrad, ProximalGD

RATE, L1, L2, BEGIN = float32s(0.05, 0.3, 0.2, 0.1)


def shrink(p, rate):
    return np.sign(p) * np.maximum(np.abs(p) - rate * L1, 0) / (1 + rate * L2)


def proximal_gd(w, g, s, t):
    return shrink(w - RATE * g, RATE)


def proximal_adagrad(w, g, s, t):
    s["s"] = s.get("s", 0) + g**2
    return shrink(w - RATE * np.divide(g, np.sqrt(s["s"]), where=s["s"] > 0, out=np.zeros_like(g)), RATE)


def proximal_adagrad_scaled(w, g, s, t):
    s["s"] = s.get("s", BEGIN) + g**2
    return shrink(w - RATE * g / np.sqrt(s["s"]), RATE / np.sqrt(s["s"]))


def ftrl(beta):
    """The leader by definition: ``z`` summed up again from all gradients, rates and weights so far."""

    def rule(w, g, s, t):
        s.setdefault("w", []).append(w)
        s.setdefault("g", []).append(g)
        n = BEGIN + np.cumsum(np.square(s["g"]), axis=0)
        eta = RATE / (beta + np.sqrt(n))
        sigma = np.diff(1 / eta, axis=0, prepend=0)
        z = np.sum(s["g"], axis=0) - np.sum(sigma * np.array(s["w"]), axis=0)
        return -np.sign(z) * np.maximum(np.abs(z) - L1, 0) / (1 / eta[-1] + L2)

    return rule


RULES = {
    "ProximalGD": (ProximalGD(0.05, 0.3, 0.2), proximal_gd),
    "ProximalAdagrad": (ProximalAdagrad(0.05, 0.3, 0.2), proximal_adagrad),
    "ProximalAdagrad, scaled": (
        ProximalAdagrad(0.05, 0.3, 0.2, initial_accumulator=BEGIN, scaled_penalty=True),
        proximal_adagrad_scaled,
    ),
    "FTRL": (FTRL(0.05, 1.0, 0.3, 0.2, initial_accumulator=BEGIN), ftrl(1.0)),
    "FTRL, no beta": (FTRL(0.05, 0.0, 0.3, 0.2, initial_accumulator=BEGIN), ftrl(0.0)),
}
HUNDRED = hundred_steps({name: optimizer for name, (optimizer, _) in RULES.items()})


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", RULES)
def test_a_hundred_steps_of_the_papers_equations(name, precision):
    check(HUNDRED(precision)[name], one_by_one(RULES[name][1], precision), precision)


def test_the_paper_begins_ftrl_at_zero():
    """Algorithm 1 of the paper, word for word, from ``w = z = n = 0``."""
    alpha, beta, lambda1, lambda2 = float32s(0.1, 1.0, 0.5, 0.25)
    found = np.random.default_rng(0).normal(0.2, 1.0, (50, 6))
    z, n, path = np.zeros(6), np.zeros(6), []
    for g in found:
        w = np.where(
            np.abs(z) <= lambda1, 0, -(z - np.sign(z) * lambda1) / ((beta + np.sqrt(n)) / alpha + lambda2)
        )
        path.append(w)
        sigma = (np.sqrt(n + g**2) - np.sqrt(n)) / alpha
        z, n = z + g - sigma * w, n + g**2
    (moved,), _ = run(FTRL(0.1, 1.0, 0.5, 0.25), [jnp.zeros(6)], [jnp.asarray(found)])
    np.testing.assert_allclose(moved[:-1], path[1:], rtol=1e-4, atol=1e-6)
    assert np.sum(np.asarray(moved) == 0) > 10


def test_a_step_is_the_minimum_of_what_it_minimizes():
    """``g w + (w - w0)**2 / (2 rate) + l1 |w| + l2 / 2 w**2``, on a grid."""
    grid = np.linspace(-2, 2, 40_001)
    for w, g in [(0.5, -1.0), (-0.2, 0.1), (0.02, 0.1), (1.0, 8.0)]:
        (moved,), _ = run(ProximalGD(0.1, 0.7, 0.4), [jnp.array([w])], [jnp.array([[g]])])
        cost = g * grid + (grid - w) ** 2 / 0.2 + 0.7 * np.abs(grid) + 0.2 * grid**2
        np.testing.assert_allclose(moved[0, 0], grid[np.argmin(cost)], atol=1.1e-4)


def test_l1_makes_zeros_and_without_it_there_are_none():
    found = [jnp.asarray(np.random.default_rng(0).normal(size=(100, 20)), jnp.float32)]
    for rule, l1 in ((ProximalGD, 1.0), (ProximalAdagrad, 1.0), (FTRL, 20.0)):
        (sparse,), _ = run(rule(0.05, l1=l1), [jnp.full(20, 0.3)], found)
        (dense,), _ = run(rule(0.05), [jnp.full(20, 0.3)], found)
        assert np.sum(np.asarray(sparse[-1]) == 0) >= 5
        assert np.all(np.asarray(dense[-1]) != 0)


def test_a_complex_number_is_shrunk_along_its_angle():
    (moved,), _ = run(ProximalGD(0.5, 2.0, 1.0), [jnp.array([3 + 4j])], [jnp.zeros((1, 1), complex)])
    np.testing.assert_allclose(moved[0], [(0.6 + 0.8j) * (5 - 1) / 1.5], rtol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_ftrl_forgets_no_weight_that_has_no_gradient(beta):
    (moved,), _ = run(FTRL(0.1, beta), [jnp.array([0.5, -2.0])], [jnp.zeros((3, 2))])
    np.testing.assert_allclose(moved, [[0.5, -2.0]] * 3, rtol=1e-6)


def test_ftrl_remembers_its_learning_rate():
    """Warmed up from 0, and lowered later: without a gradient the weights stay where they are."""
    g = np.zeros((6, 2))
    g[2] = [1.0, -3.0]
    rates = jnp.array([0.0, 0.1, 0.2, 0.1, 0.01, 0.0])
    (moved,), _ = run(FTRL(lambda step: rates[step]), [jnp.array([0.5, -2.0])], [jnp.asarray(g)])
    np.testing.assert_allclose(moved[:2], [[0.5, -2.0]] * 2, rtol=1e-6)
    np.testing.assert_allclose(moved[2], [0.5 - 0.2 / 2, -2.0 + 0.2 * 3 / 4], rtol=1e-5)
    np.testing.assert_allclose(moved[3:], [moved[2]] * 3, rtol=1e-5)


def test_out_of_range():
    with pytest.raises(ow.HyperparameterError, match=r"FTRL: beta is -1\.0"):
        FTRL(beta=-1.0)
    with pytest.raises(ow.HyperparameterError, match="initial_accumulator is nan"):
        ProximalAdagrad(initial_accumulator=float("nan"))
