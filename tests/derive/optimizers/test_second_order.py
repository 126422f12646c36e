"""Sophia and L-BFGS against closed forms, NumPy and scipy; and how fast rules for matrices converge."""

from functools import cache, partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import scipy.optimize
from tests.compiled import together, trained, training
from tests.derive.optimizers import reference_c as reference

import onward as ow
from onward.derive.optimizers.kron import PSGDKron
from onward.derive.optimizers.lbfgs import LBFGS, two_loop
from onward.derive.optimizers.line_search import Point, strong_wolfe
from onward.derive.optimizers.muon import Muon
from onward.derive.optimizers.shampoo import Shampoo
from onward.derive.optimizers.soap import SOAP
from onward.derive.optimizers.sophia import Sophia, hutchinson
from onward.derive.rule import at_step
from onward.derive.update.loss import Loss

SOPHIA = {"beta1": 0.9, "beta2": 0.8, "gamma": 0.05, "epsilon": 1e-8, "weight_decay": 0.1}


def coupled(params, a, b):
    """Of all parameters laid end to end: gradient ``A w + w**3 + b``, Hessian ``A + 3 diag(w**2)``."""
    w = jnp.concatenate([p.ravel() for p in params.values()])
    return 0.5 * w @ a @ w + 0.25 * jnp.sum(w**4) + b @ w


def probes(shapes, steps, dtype):
    def drawn(step):
        key = jax.random.fold_in(jax.random.key(0), step)
        each = [jax.random.normal(jax.random.fold_in(key, i), s, dtype) for i, s in enumerate(shapes)]
        return jnp.concatenate([u.ravel() for u in each])

    return np.float64(reference.jit(lambda steps: jax.lax.map(drawn, steps))(np.arange(steps)))


def sophia(w, a, bs, shapes, dtype, every):
    h = {k: np.float64(dtype(v)) for k, v in SOPHIA.items()}
    us = probes(shapes, len(bs), dtype)
    mean, curvature, rate = np.zeros_like(w), np.zeros_like(w), np.float64(dtype(0.01))
    for t, b in enumerate(bs):
        gradient = a @ w + w**3 + b
        mean = h["beta1"] * mean + (1 - h["beta1"]) * gradient
        if t % every == 0:
            estimate = us[t] * (a @ us[t] + 3 * w**2 * us[t])
            curvature = h["beta2"] * curvature + (1 - h["beta2"]) * estimate
        w = w - rate * h["weight_decay"] * w
        w = w - rate * np.clip(mean / np.maximum(h["gamma"] * curvature, h["epsilon"]), -1, 1)
    return w


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float64, 1e-12)])
def test_a_hundred_steps_of_sophias_equations(dtype, tolerance):
    """The gradients are far from zero, or else its sign, which float32 does not know, would decide."""
    draw = np.random.default_rng(0)
    with jax.enable_x64(True):
        params, _ = reference.tree(dtype)
        params = {k: params[k] for k in ("kernel", "matrix", "scalar")}
        shapes = [p.shape for p in params.values()]
        w = np.concatenate([np.float64(p).ravel() for p in params.values()])
        a = draw.normal(size=(w.size, w.size)).astype(np.float32)
        a = ((a + a.T) / 2).astype(dtype)
        bs = np.float32(5 * draw.normal(size=w.size) + draw.normal(size=(100, w.size))).astype(dtype)
        program = Sophia(0.01, **SOPHIA, every=4).minimize(coupled, params, a, bs[0])
        state, _ = trained(program, params, np.broadcast_to(a, (len(bs), *a.shape)), bs)
        ours = np.concatenate([np.float64(state[k]).ravel() for k in params])
        expected = sophia(w, np.float64(a), bs, shapes, dtype, 4)
    np.testing.assert_allclose(ours, expected, rtol=tolerance, atol=tolerance)


def test_hutchinsons_estimate_is_right_on_average():
    a = jnp.array([[2.0, 1.0], [1.0, -3.0]])
    loss = Loss(lambda w, v: 0.5 * w @ a @ w + 4 * v**2)
    at = (jnp.ones(2), jnp.float32(1.0))
    found = reference.jit(jax.vmap(lambda t: hutchinson(loss, at, 0, t)))(jnp.arange(4000))
    np.testing.assert_allclose(np.mean(found[0], axis=0), [2, -3], atol=0.2)
    np.testing.assert_allclose(np.mean(found[1]), 8, atol=0.5)


def test_sophia_looks_at_the_hessian_at_every_kth_step_only():
    w = np.ones(3, np.float32)
    program = Sophia(0.01, every=3).minimize(lambda w: jnp.sum(w**4), w)
    seen = np.asarray(trained(program, w, steps=8, fetch=["w/curvature"])[1]["w/curvature"])
    assert np.all(seen[0] == 0)
    changed = [not np.array_equal(a, b) for a, b in pairwise(seen)]
    assert changed == [True, False, False, True, False, False, True]


def dense(gradient, steps, changes):
    """The BFGS formula for the inverse Hessian as whole matrices, oldest pair first."""
    n = gradient.size
    h = np.eye(n) * (steps[-1] @ changes[-1]) / (changes[-1] @ changes[-1])
    for s, y in zip(steps, changes, strict=True):
        rho = 1 / (s @ y)
        h = (np.eye(n) - rho * np.outer(s, y)) @ h @ (np.eye(n) - rho * np.outer(y, s)) + rho * np.outer(s, s)
    return h @ gradient


LOOPS = reference.jit(two_loop)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_the_two_loops_are_the_bfgs_formula(count):
    draw = np.random.default_rng(count)
    root = draw.normal(size=(6, 6))
    steps = draw.normal(size=(count, 6))
    changes, gradient = steps @ (root @ root.T + np.eye(6)), draw.normal(size=6)
    with jax.enable_x64(True):
        s, y = (np.zeros((5, 6)) for _ in range(2))
        places = (np.arange(count) + 3) % 5
        s[places], y[places] = steps, changes
        newest_first = (places[-1] - np.arange(5)) % 5
        split = [(x[..., :2], x[..., 2:].reshape(*x.shape[:-1], 2, 2)) for x in (gradient, s, y)]
        found = LOOPS(*split, newest_first)
    found = np.concatenate([np.ravel(x) for x in found])
    np.testing.assert_allclose(found, dense(gradient, steps, changes), rtol=1e-12, atol=1e-12)


LINES = {
    "parabola": lambda a: (a - 3) ** 2,
    "far": lambda a: (a - 300) ** 2,
    "near": lambda a: (a - 0.001) ** 2,
    "waves": lambda a: jnp.cos(3 * a) + 0.1 * (a - 4) ** 2 - 0.3 * a,
    "cliff": lambda a: jnp.where(a < 0.3, (a - 0.2) ** 2, jnp.nan),
    "log": lambda a: a - 2 * jnp.log(a + 0.1),
}


def search(f, first):
    def evaluate(a):
        return Point(a, *jax.value_and_grad(f)(a)), a

    start, extra = evaluate(jnp.zeros_like(first))
    return start, strong_wolfe(evaluate, start, extra, first, 1e-4, 0.1, 30)


@cache
def searches():
    with jax.enable_x64(True):
        firsts = np.array([0.01, 1.0, 30.0])
        return together({name: (jax.vmap(partial(search, f)), firsts) for name, f in LINES.items()})


@pytest.mark.parametrize("name", LINES)
def test_a_line_search_ends_where_the_strong_wolfe_conditions_hold(name):
    start, (end, extra) = searches()[name]
    np.testing.assert_array_equal(extra, end.step)
    assert np.all(end.step > 0)
    assert np.all(end.value <= start.value + 1e-4 * end.step * start.slope)
    assert np.all(abs(end.slope) <= 0.1 * abs(start.slope))


def test_a_line_search_that_finds_nothing_stays():
    def evaluate(a):
        return Point(a, jnp.where(a > 0, jnp.nan, 1.0), 0 * a - 1), ()

    end, _ = reference.jit(lambda a: strong_wolfe(evaluate, evaluate(0 * a)[0], (), a))(jnp.float32(1.0))
    assert end.step == 0


def test_lbfgs_takes_as_many_steps_as_scipy_and_optax():
    f, value_and_gradient = reference.rosenbrock, jax.value_and_grad(reference.rosenbrock)
    other = optax.lbfgs()

    def one(carry, _):
        w, state = carry
        value, gradient = value_and_gradient(w)
        updates, state = other.update(gradient, state, w, value=value, grad=gradient, value_fn=f)
        return (optax.apply_updates(w, updates), state), value

    ours = reference.jit(lambda w: reference.descended(LBFGS(), f, w, 60)[2])
    theirs = reference.jit(lambda w: jax.lax.scan(one, (w, other.init(w)), None, 60)[1])
    both = reference.jit(value_and_gradient)
    with jax.enable_x64(True):
        for start in ([-1.2, 1.0], [-1.0, 2.0]):
            peer = scipy.optimize.minimize(
                lambda x: tuple(map(np.asarray, both(jnp.asarray(x)))),
                start,
                jac=True,
                method="L-BFGS-B",
                options={"ftol": 0, "gtol": 1e-10},
            )
            losses, others = np.asarray(ours(jnp.array(start))), np.asarray(theirs(jnp.array(start)))
            steps, optax_steps = (int(np.argmax(x < 1e-20)) for x in (losses, others))
            assert peer.fun < 1e-20
            assert 0 < steps <= 1.2 * max(peer.nit, optax_steps)
            assert np.all(np.diff(losses) <= 0)


def test_lbfgs_sees_all_parameters_as_one_vector():
    """On a quadratic of n numbers in several parameters: as when they are one, and done in about n steps."""
    draw = np.random.default_rng(0)
    root = draw.normal(size=(7, 7))
    a, b = root @ root.T + np.eye(7), draw.normal(size=7)

    def flat(w):
        return 0.5 * w @ a @ w - b @ w

    def split(p):
        return flat(jnp.concatenate([p["s"][None], p["m"].ravel(), p["v"]]))

    with jax.enable_x64(True):
        whole, parts = np.zeros(7), {"m": np.zeros((2, 2)), "s": np.zeros(()), "v": np.zeros(2)}
        cases = {"whole": (flat, whole), "parts": (split, parts)}
        states = together(
            {
                k: training(LBFGS(curvature=0.1).minimize(*case), case[1], steps=20)
                for k, case in cases.items()
            }
        )
        (w, _), (p, _) = states.values()
        found = np.concatenate([p["s"][None], p["m"].ravel(), p["v"]])
    np.testing.assert_allclose(found, np.linalg.solve(a, b), rtol=1e-8)
    np.testing.assert_allclose(found, w["w"], rtol=1e-8)


def test_lbfgs_forgets_when_a_step_finds_nothing_better():
    """The slots of a step that is not taken are zeros, which count as no pair."""
    loss = Loss(lambda w: jnp.where(w[0] > 0.99, jnp.sum(w), jnp.nan))
    optimizer, w = at_step(LBFGS(memory=2, evaluations=3), {"step": jnp.int32(5)}), jnp.ones(1)
    ones = {name: jnp.ones((2, 1)) for name in ("steps", "changes")}
    update = reference.jit(lambda w, g, s: optimizer.update((w,), (g,), (s,), loss))
    (after,), (slots,) = update(w, jnp.ones(1), ones)
    assert after.tolist() == [1.0]
    assert slots["steps"].tolist() == slots["changes"].tolist() == [[1.0], [0.0]]


def test_lbfgs_goes_downhill_where_a_rule_turned_the_gradient_around():
    optimizer, w = at_step(LBFGS(), {"step": jnp.int32(0)}), jnp.ones(2)
    loss = Loss(lambda w: jnp.sum(w**2))
    update = reference.jit(lambda w, g, s: optimizer.update((w,), (g,), (s,), loss))
    (after,), _ = update(w, -w, optimizer.init(w))
    assert float(loss(after)) < 2


def test_lbfgs_takes_complex_parameters():
    w = jnp.array([1 + 2j, -1j, 3], jnp.complex64)
    after, _, losses = reference.jit(lambda w: reference.descended(LBFGS(), reference.parabola, w, 12))(w)
    assert after.dtype == jnp.complex64
    assert losses[-1] < 1e-6 * losses[0]


def test_sophia_refuses_complex_parameters():
    with pytest.raises(ow.HyperparameterError, match=r"Sophia .* complex64.* Use AdamW"):
        Sophia().minimize(lambda w: jnp.abs(w) ** 2, jnp.complex64(1))


def network(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["a"]) @ params["b"] - y) ** 2)


@pytest.mark.parametrize(
    "optimizer",
    [
        Sophia(0.1, every=2),
        LBFGS(),
    ],
    ids=lambda o: type(o).__name__,
)
def test_several_devices_do_what_one_does(optimizer):
    draw = np.random.default_rng(0)
    params = {"a": np.float32(draw.normal(size=(3, 4))), "b": np.float32(draw.normal(size=(4, 1)))}
    x, y = np.float32(draw.normal(size=(8, 3))), np.float32(draw.normal(size=(8, 1)))
    program = optimizer.minimize(network, params, x, y)
    alone, _ = trained(program, params, *(np.stack([a] * 4) for a in (x, y)))
    step = ow.compile(ow.replicate(program, 2))
    state = step.init(params)
    for _ in range(4):
        state, _ = step(state, x, y)
    for k, w in state.parameters.items():
        np.testing.assert_allclose(w, alone[k], rtol=1e-3, atol=1e-4)


def falling(rate, steps):
    """A learning rate that falls to zero in a straight line, without which steps of fixed length circle."""
    return lambda t: rate * jnp.maximum(1 - t / steps, 0)


# From ones the gradient is a matrix of rank 1 or 2, and what Muon and SOAP do with the rest of it depends on
# rounding: Muon takes 44 to 61 steps, SOAP 65 to 154, by how XLA orders sums. Hence the margin.
PARABOLA = [
    (Muon(falling(0.2, 200), momentum=0.8), 100),
    (Shampoo(0.3, momentum=0.5), 40),
    (Shampoo(1.0, momentum=0.0, every=1, grafting="none"), 30),
    (SOAP(0.05), 200),
    (PSGDKron(falling(0.1, 100)), 60),
    (Sophia(0.1, weight_decay=0.0), 20),
    (LBFGS(), 10),
]
ROSENBROCK = [
    (Muon(falling(0.05, 2000)), 120),
    (Shampoo(0.2, every=1, grafting="none"), 500),
    (SOAP(0.02), 400),
    (PSGDKron(falling(0.02, 2000)), 300),
    (Sophia(0.01, weight_decay=0.0), 450),
    (LBFGS(), 35),
]


BOTH = {
    **{f"parabola, {i}": (reference.parabola, np.ones((3, 4)), *row) for i, row in enumerate(PARABOLA)},
    **{f"rosenbrock, {i}": (reference.rosenbrock, [-1.2, 1], *row) for i, row in enumerate(ROSENBROCK)},
}


@cache
def losses():
    def descended(loss, optimizer, steps, w):
        return reference.descended(optimizer, loss, w, steps)[2]

    return together(
        {
            name: (partial(descended, loss, optimizer, steps), np.float32(start))
            for name, (loss, start, optimizer, steps) in BOTH.items()
        }
    )


@pytest.mark.parametrize("name", BOTH, ids=lambda name: f"{name}, {type(BOTH[name][2]).__name__}")
def test_convergence_within_a_thousandth_of_the_start(name):
    assert np.min(losses()[name]) < 1e-3 * losses()[name][0]


EVERY = {
    type(o).__name__: o for o in (Muon(), Shampoo(), SOAP(every=2), PSGDKron(), Sophia(every=2), LBFGS())
}


@cache
def at_several_rates():
    """All at once, and one after the other."""
    w, rates = np.ones((2, 2), np.float32), np.float32([0.01, 0.1])

    def case(optimizer, over):
        def run(rate):
            return reference.descended(optimizer, reference.parabola, w, 4, learning_rate=rate)[0]

        return partial(over, run), rates

    at_once = {name: case(o, lambda run, rates: jax.vmap(run)(rates)) for name, o in EVERY.items()}
    return together(at_once | {f"{name} alone": case(o, jax.lax.map) for name, o in EVERY.items()})


@pytest.mark.parametrize("name", EVERY)
def test_several_learning_rates_at_once_are_each_as_alone(name):
    at_once, alone = at_several_rates()[name], at_several_rates()[f"{name} alone"]
    np.testing.assert_allclose(at_once, alone, rtol=1e-4, atol=1e-5)
    assert not np.allclose(at_once[0], at_once[1])


LEVEL = tuple(np.ones(s, np.float32) for s in [(), (3,), (2, 3), (1, 2, 2, 2), (0, 3)])


@cache
def without_slope():
    zeros = tuple(map(np.zeros_like, LEVEL))
    loss = Loss(lambda *ws: sum(0 * jnp.sum(w) for w in ws) + 1)

    def update(optimizer, params):
        fixed = {"weight_decay": 0.0} if isinstance(optimizer, Sophia) else {}
        now = at_step(optimizer, reference.numbers(optimizer, jnp.float32, **fixed) | {"step": jnp.int32(0)})
        return now.update(params, zeros, tuple(map(optimizer.init, params)), loss)

    return together({type(o): (partial(update, o), LEVEL) for o in (Sophia(), LBFGS())})


@pytest.mark.parametrize("kind", [Sophia, LBFGS], ids=lambda kind: kind.__name__)
def test_a_loss_without_slope_leaves_parameters_of_any_shape(kind):
    after, states = without_slope()[kind]
    for a, b in zip(after, LEVEL, strict=True):
        np.testing.assert_array_equal(a, b)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(states))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sophia(every=0), "every is 0. It must be a whole number of at least 1"),
        (lambda: LBFGS(memory=0), "memory is 0. It must be a whole number of at least 1"),
        (lambda: LBFGS(decrease=0.5, curvature=0.4), "decrease is 0.5 and curvature 0.4"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ow.HyperparameterError, match=message):
        make()
