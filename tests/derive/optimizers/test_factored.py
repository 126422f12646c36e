"""SM3 and Adafactor against their papers' equations and against optax."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.derive.optimizers.reference_b import (
    PRECISIONS,
    check,
    compare_with_peer,
    float32s,
    given,
    hundred_steps,
    one_by_one,
    run,
)

import onward as ow
from onward.derive.optimizers.factored import SM3, Adafactor, relative_step

RATE, EXPONENT, EPSILON, SCALE, THRESHOLD = float32s(0.1, 0.8, 1e-30, 1e-3, 0.7)


def sm3(momentum):
    """Number by number, over every slice that it lies in: as the paper writes it."""

    def rule(w, g, s, t):
        w, g = np.atleast_1d(w), np.atleast_1d(g)
        old = s.get("mu", {})
        s["mu"], direction = {}, np.zeros_like(g)
        for i in itertools.product(*map(range, g.shape)):
            slices = list(enumerate(i))
            bound = min(old.get(r, 0.0) for r in slices) + g[i] ** 2
            direction[i] = g[i] / np.sqrt(bound) if bound > 0 else 0.0
            for r in slices:
                s["mu"][r] = max(s["mu"].get(r, 0.0), bound)
        s["v"] = momentum * s.get("v", 0.0) + (1 - momentum) * direction
        return (w - RATE * s["v"]).reshape(s.setdefault("shape", w.shape))

    return rule


def scalar_again(path, w):
    return [p.reshape(w.shape) for p in path]


def adafactor(rate, momentum=0.0, scaled=True, whole=False):
    """Row sums times column sums over the sum of all, as in algorithm 4; algorithm 5 for vectors."""

    def second_moment(g, s, beta):
        squares = g**2 + EPSILON
        if g.ndim < 2 or whole:
            s["v"] = beta * s.get("v", 0) + (1 - beta) * squares
            return s["v"]
        row, column = sorted(sorted(range(g.ndim), key=lambda a: (g.shape[a], a))[-2:])
        s["r"] = beta * s.get("r", 0) + (1 - beta) * squares.sum(column, keepdims=True)
        s["c"] = beta * s.get("c", 0) + (1 - beta) * squares.sum(row, keepdims=True)
        return s["r"] * s["c"] / s["r"].sum(row, keepdims=True)

    def rule(w, g, s, t):
        u = g / np.sqrt(second_moment(g, s, 1 - t**-EXPONENT))
        u = u / max(1, np.sqrt(np.mean(u**2)) / THRESHOLD)
        step = rate(t) * (max(SCALE, np.sqrt(np.mean(w**2))) if scaled else 1) * u
        s["m"] = momentum * s.get("m", 0) + (1 - momentum) * step
        return w - s["m"]

    return rule


def paper_rate(t):
    """The paper's relative step, rounded to float32 as every scheduled hyperparameter is."""
    return float(np.float32(min(1e-2, 1 / np.sqrt(t))))


ADAFACTORS = {
    "as in the paper": (Adafactor(clipping_threshold=0.7), adafactor(paper_rate)),
    "with momentum": (
        Adafactor(0.1, clipping_threshold=0.7, momentum=0.9),
        adafactor(lambda t: RATE, momentum=0.9),
    ),
    "absolute steps": (
        Adafactor(0.1, clipping_threshold=0.7, parameter_scale=False),
        adafactor(lambda t: RATE, scaled=False),
    ),
    "nothing factored": (
        Adafactor(0.1, clipping_threshold=0.7, smallest_axis=128),
        adafactor(lambda t: RATE, whole=True),
    ),
}
MOMENTA = [0.0, 0.9]
HUNDRED = hundred_steps(
    {f"SM3, {momentum}": SM3(0.1, momentum=momentum) for momentum in MOMENTA}
    | {name: optimizer for name, (optimizer, _) in ADAFACTORS.items()}
)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("momentum", MOMENTA)
def test_a_hundred_steps_of_sm3(momentum, precision):
    paths = one_by_one(sm3(momentum), precision)
    expected = [scalar_again(path, w) for path, w in zip(paths, given(precision)[0], strict=True)]
    check(HUNDRED(precision)[f"SM3, {momentum}"], expected, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ADAFACTORS)
def test_a_hundred_steps_of_adafactor(name, precision):
    check(HUNDRED(precision)[name], one_by_one(ADAFACTORS[name][1], precision), precision)


PEERS = {
    "SM3": (SM3(0.1), optax.sm3(0.1)),
    "Adafactor": (
        Adafactor(0.1, momentum=0.9),
        optax.adafactor(0.1, min_dim_size_to_factor=1, momentum=0.9),
    ),
}


@pytest.mark.parametrize("name", PEERS)
def test_the_same_as_optax(name):
    """Optax has no SM3 for a scalar, and for one Adafactor is the same as for a vector."""
    compare_with_peer(*PEERS[name], first=1)


def test_sm3_bounds_the_sum_of_squares_from_above():
    optimizer, w = SM3(0.1, momentum=0.0), np.zeros((4, 3), np.float32)
    update = jax.jit(lambda g, slots: optimizer.update(w, g, slots)[1])
    slots, total = optimizer.init(w), np.zeros((4, 3))
    for g in np.float32(np.random.default_rng(0).normal(size=(10, 4, 3))):
        slots = update(g, slots)
        total += g**2
    bound = np.minimum(np.asarray(slots["axis0"])[:, None], slots["axis1"])
    assert np.all(bound >= total * (1 - 1e-6))
    assert bound.max() < total.sum()


def test_adafactor_is_exact_for_squares_of_rank_one():
    """Where the squares are a product of a row and a column, nothing is lost by keeping only those."""
    g = jnp.outer(jnp.array([1.0, -2.0, 3.0]), jnp.array([0.5, 4.0]))[None]
    w = [jnp.ones((3, 2))]
    (factored,), _ = run(Adafactor(0.1), w, [g])
    (whole,), _ = run(Adafactor(0.1, smallest_axis=9), w, [g])
    np.testing.assert_allclose(factored, whole, rtol=1e-6)


@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (2, 3, 0, 1), (1, 3, 0, 2)])
def test_adafactor_takes_the_two_largest_axes_wherever_they_are(axes):
    w, g = np.ones((2, 3, 5, 7)), np.random.default_rng(0).normal(size=(3, 2, 3, 5, 7))
    turned = [0, *(a + 1 for a in axes)]
    (plain,), _ = run(Adafactor(0.1), [jnp.asarray(w)], [jnp.asarray(g)])
    (moved,), _ = run(Adafactor(0.1), [jnp.asarray(w.transpose(axes))], [jnp.asarray(g.transpose(turned))])
    np.testing.assert_allclose(moved, plain.transpose(turned), rtol=1e-5)


def test_adafactor_keeps_little():
    slots = Adafactor().init(jnp.zeros((3, 3, 64, 128)))
    assert {k: v.shape for k, v in slots.items()} == {"rows": (3, 3, 64), "columns": (3, 3, 128)}


def test_the_relative_step_falls_after_ten_thousand_steps():
    steps = np.array([0, 99, 9_999, 39_999])
    np.testing.assert_allclose([relative_step(s) for s in steps], [0.01, 0.01, 0.01, 0.005], rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Adafactor(clipping_threshold=0.0), ["clipping_threshold is 0", "a large number"]),
        (lambda: Adafactor(momentum=1.0), ["Adafactor: momentum is 1.0", "less than 1"]),
        (lambda: SM3(momentum=-0.5), ["SM3: momentum is -0.5", "at least 0"]),
    ],
)
def test_out_of_range(make, words):
    with pytest.raises(ow.HyperparameterError) as raised:
        make()
    assert all(word in str(raised.value) for word in words)
