"""LARS, LAMB and NovoGrad against their papers' equations and against optax."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.derive.optimizers.reference_b import (
    PRECISIONS,
    check,
    compare_with_peer,
    float32s,
    hundred_steps,
    one_by_one,
    run,
)

from onward.derive.optimizers.layerwise import LAMB, LARS, NovoGrad

RATE, MOMENTUM, DECAY, TRUST = float32s(0.05, 0.9, 0.01, 0.02)
BETA1, BETA2, EPSILON = float32s(0.9, 0.99, 1e-6)


def size(x):
    return np.sqrt(np.sum(x**2))


def lars(w, g, s, t):
    ratio = TRUST * size(w) / (size(g) + DECAY * size(w))
    s["v"] = MOMENTUM * s.get("v", 0) + RATE * ratio * (g + DECAY * w)
    return w - s["v"]


def lamb(w, g, s, t):
    s["m"] = BETA1 * s.get("m", 0) + (1 - BETA1) * g
    s["v"] = BETA2 * s.get("v", 0) + (1 - BETA2) * g**2
    m, v = s["m"] / (1 - BETA1**t), s["v"] / (1 - BETA2**t)
    r = m / (np.sqrt(v) + EPSILON) + DECAY * w
    return w - RATE * size(w) / size(r) * r


def novograd(w, g, s, t):
    s["v"] = BETA2 * s["v"] + (1 - BETA2) * size(g) ** 2 if t > 1 else size(g) ** 2
    s["m"] = BETA1 * s.get("m", 0) + g / (np.sqrt(s["v"]) + EPSILON) + DECAY * w
    return w - RATE * s["m"]


RULES = {
    "LARS": (LARS(0.05, 0.9, 0.01, 0.02), lars),
    "LAMB": (LAMB(0.05, 0.9, 0.99, 1e-6, 0.01), lamb),
    "NovoGrad": (NovoGrad(0.05, 0.9, 0.99, 1e-6, 0.01), novograd),
}
HUNDRED = hundred_steps({name: optimizer for name, (optimizer, _) in RULES.items()})
PEERS = {
    "LARS": (LARS(0.05, 0.9, 0.0, 0.02), optax.lars(0.05, 0.0, trust_coefficient=0.02, momentum=0.9)),
    "LAMB": (RULES["LAMB"][0], optax.lamb(0.05, 0.9, 0.99, 1e-6, weight_decay=0.01)),
    "NovoGrad": (RULES["NovoGrad"][0], optax.novograd(0.05, 0.9, 0.99, 1e-6, weight_decay=0.01)),
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", RULES)
def test_a_hundred_steps_of_the_papers_equations(name, precision):
    check(HUNDRED(precision)[name], one_by_one(RULES[name][1], precision), precision)


@pytest.mark.parametrize("name", PEERS)
def test_the_same_as_optax(name):
    compare_with_peer(*PEERS[name])


@pytest.mark.parametrize("optimizer", [LARS(0.5, weight_decay=0.0), LAMB(0.5, weight_decay=0.0)])
def test_a_layer_of_zeros_moves_as_without_the_ratio(optimizer):
    """LARS is then a step of gradient descent, and LAMB one of Adam."""
    (moved,), _ = run(optimizer, [jnp.zeros(2)], [jnp.array([[3.0, -4.0]])])
    direction = np.sign([3.0, -4.0]) if isinstance(optimizer, LAMB) else np.array([3.0, -4.0])
    np.testing.assert_allclose(moved[0], -0.5 * direction, rtol=1e-5)


@pytest.mark.parametrize("name", ["LARS", "NovoGrad"])
def test_a_complex_layer_moves_like_its_real_and_imaginary_parts(name):
    """These two divide by nothing of single numbers, and the norms are the same."""
    optimizer = RULES[name][0]
    draw = np.random.default_rng(0)
    parts = [np.float32(draw.normal(size=shape)) for shape in ((2, 3), (5, 2, 3))]
    whole = [np.complex64(p[..., 0, :] + 1j * p[..., 1, :]) for p in parts]
    (real,), _ = run(optimizer, [parts[0]], [parts[1]])
    (moved,), _ = run(optimizer, [whole[0]], [whole[1]])
    np.testing.assert_allclose(moved, np.asarray(real)[:, 0] + 1j * np.asarray(real)[:, 1], rtol=1e-5)


def test_lamb_keeps_the_angle_of_a_complex_gradient():
    (moved,), _ = run(LAMB(0.5, weight_decay=0.0), [jnp.array([3 + 4j])], [jnp.array([[6 - 8j]])])
    np.testing.assert_allclose(moved[0], [3 + 4j - 0.5 * 5 * (0.6 - 0.8j)], rtol=1e-5)
