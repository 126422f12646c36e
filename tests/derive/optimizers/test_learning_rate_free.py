"""DoG, LDoG, Prodigy and D-Adaptation against their papers' equations and against optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.compiled import together
from tests.derive.optimizers.reference_b import (
    PRECISIONS,
    check,
    compare_with_peer,
    float32s,
    given,
    hundred_steps,
    run,
    trajectory,
)

import onward as ow
from onward.derive.optimizers.distance_over_gradients import DoG, LDoG
from onward.derive.optimizers.learning_rate_free import DAdaptAdam, DAdaptSGD, Prodigy

RATE, MOMENTUM, BETA1, BETA2, EPSILON, START = float32s(0.5, 0.8, 0.9, 0.99, 1e-6, 0.02)


def flat(precision):
    """All parameters as one vector, and their gradients: what the papers write about."""
    parameters, found = given(precision)
    return np.concatenate([p.ravel() for p in parameters]), np.concatenate(
        [g.reshape(len(g), -1) for g in found], axis=1
    )


def cut(path, precision):
    """The trajectory of the one vector as those of the parameters."""
    shapes = [p.shape for p in given(precision)[0]]
    ends = np.cumsum([int(np.prod(s)) for s in shapes])[:-1]
    parts = np.split(np.stack(path), ends, axis=1)
    return [part.reshape(len(path), *shape) for part, shape in zip(parts, shapes, strict=True)]


def size(x):
    return np.sqrt(np.sum(x**2))


def dog(w, gs, averaging):
    x0, x, r, total = w, w, START * (1 + size(w)), 0.0
    path, best = [], []
    for t, g in enumerate(gs, 1):
        r = max(r, size(w - x0))
        total += size(g) ** 2
        w = w - RATE * r / np.sqrt(total) * g
        x = (1 - (1 + averaging) / (t + averaging)) * x + (1 + averaging) / (t + averaging) * w
        path.append(w)
        best.append(x)
    return path, best


def d_adapt_sgd(w, gs):
    x, z, s, d, r, path = w, w, 0 * w, START, 0.0, []
    for g in gs:
        step = d * RATE / size(gs[0])
        r += step * np.sum(g * s)
        s = s + step * g
        z = z - step * g
        x = MOMENTUM * x + (1 - MOMENTUM) * z
        d = max(d, 2 * r / size(s))
        path.append(x)
    return path, d


def d_adapt_adam(w, gs):
    m, v, s, r, d, b, path = 0 * w, 0 * w, 0 * w, 0.0, START, np.sqrt(BETA2), []
    for g in gs:
        m = BETA1 * m + (1 - BETA1) * d * RATE * g
        v = BETA2 * v + (1 - BETA2) * g**2
        a = np.sqrt(v) + EPSILON
        w = w - m / a
        r = b * r + (1 - b) * d * RATE * np.sum(g * s / a)
        s = b * s + (1 - b) * d * RATE * g
        d = max(d, r / ((1 - b) * np.sum(np.abs(s))))
        path.append(w)
    return path, d


def prodigy(w, gs, rate=lambda t: RATE, start=START):
    w0, m, v, s, r, d, b, path = w, 0 * w, 0 * w, 0 * w, 0.0, start, np.sqrt(BETA2), []
    for t, g in enumerate(gs, 1):
        m = BETA1 * m + (1 - BETA1) * d * g
        v = BETA2 * v + (1 - BETA2) * d**2 * g**2
        r = b * r + (1 - b) * rate(t) * d**2 * np.sum(g * (w0 - w))
        s = b * s + (1 - b) * rate(t) * d**2 * g
        new = max(d, r / np.sum(np.abs(s)))
        w = w - rate(t) * d * m / (np.sqrt(v) + d * EPSILON)
        d = new
        path.append(w)
    return path, d


RULES = {
    "DAdaptSGD": (DAdaptSGD(0.5, 0.8, START), d_adapt_sgd),
    "DAdaptAdam": (DAdaptAdam(0.5, 0.9, 0.99, 1e-6, START), d_adapt_adam),
    "Prodigy": (Prodigy(0.5, 0.9, 0.99, 1e-6, START), prodigy),
}
AVERAGINGS = [0.0, 8.0]
HUNDRED = hundred_steps(
    {name: optimizer for name, (optimizer, _) in RULES.items()}
    | {f"DoG, {averaging}": DoG(0.5, 0.02, averaging) for averaging in AVERAGINGS}
    | {"LDoG": LDoG(0.5, 0.02)}
)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", RULES)
def test_a_hundred_steps_of_the_papers_equations(name, precision):
    """The estimate must grow on the way, or the equations that make it grow are not compared."""
    path, d = RULES[name][1](*flat(precision))
    assert d > 2 * START
    check(HUNDRED(precision)[name], cut(path, precision), precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("averaging", AVERAGINGS)
def test_a_hundred_steps_of_dog(averaging, precision):
    path, best = dog(*flat(precision), averaging)
    check(HUNDRED(precision)[f"DoG, {averaging}"], cut(path, precision), precision, cut(best, precision))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_hundred_steps_of_layerwise_dog(precision):
    pairs = [dog(w, gs, 8.0) for w, gs in zip(*given(precision), strict=True)]
    check(HUNDRED(precision)["LDoG"], [p for p, _ in pairs], precision, [b for _, b in pairs])


def corrected(step):
    """The learning rate that makes the paper's Prodigy the one of optax."""
    t = step + 1
    return jnp.sqrt(1 - 0.99**t) / (1 - 0.9**t)


PEERS = {
    "DoG": (DoG(1.0, averaging=None), optax.contrib.dog(1.0, ("heuristic", 1e-6), eps=0.0)),
    "Prodigy": (
        Prodigy(corrected, 0.9, 0.99, 1e-8, 0.02),
        optax.contrib.prodigy(1.0, (0.9, 0.99), eps=1e-8, estim_lr0=0.02),
    ),
}


@pytest.mark.parametrize("name", PEERS)
def test_the_same_as_optax(name):
    compare_with_peer(*PEERS[name], rtol=5e-5)


@pytest.mark.parametrize(
    "optimizer", [DoG(), LDoG(), DAdaptSGD(), Prodigy(epsilon=0.0)], ids=lambda o: type(o).__name__
)
def test_the_scale_of_the_loss_does_not_matter(optimizer):
    w, g = np.float32(given("float32")[0][1]), np.float32(given("float32")[1][1][:20])

    def scaled(factor):
        return trajectory(optimizer, [w], [factor * g])[0][0]

    small, plain, large = together({"": (jax.vmap(scaled), np.float32([1e-4, 1, 1e4]))})[""]
    np.testing.assert_allclose(small, plain, rtol=1e-3)
    np.testing.assert_allclose(large, plain, rtol=1e-3)
    assert np.any(np.asarray(plain[-1] != plain[0]))


def test_a_zero_gradient_at_first_does_not_stop_d_adaptation():
    g = np.ones((10, 3))
    g[0] = 0
    (moved,), _ = run(DAdaptSGD(), [np.ones(3, np.float32)], [np.float32(g)])
    (without,), _ = run(DAdaptSGD(), [np.ones(3, np.float32)], [np.float32(g[1:])])
    np.testing.assert_allclose(moved[1:], without, rtol=1e-6)
    assert np.all(np.asarray(moved[-1]) < 1)


def test_dog_without_an_average_is_evaluated_where_it_is():
    parameters, found = ([np.float32(a) for a in arrays] for arrays in given("float32"))
    moved, best = run(DoG(averaging=None), parameters, found)
    for mine, evaluated in zip(moved, best, strict=True):
        np.testing.assert_array_equal(mine, evaluated)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: DoG(initial_distance=0.0), ["DoG: initial_distance is 0", "nothing moves"]),
        (lambda: LDoG(averaging=-1.0), ["LDoG: averaging is -1.0"]),
        (lambda: Prodigy(initial_estimate=0.0), ["Prodigy: initial_estimate is 0", "small"]),
        (lambda: DAdaptAdam(initial_estimate=-1.0), ["DAdaptAdam: initial_estimate is -1.0"]),
        (lambda: DAdaptSGD(momentum=1.0), ["DAdaptSGD: momentum is 1.0", "less than 1"]),
    ],
)
def test_out_of_range(make, words):
    with pytest.raises(ow.HyperparameterError) as raised:
        make()
    assert all(word in str(raised.value) for word in words)
