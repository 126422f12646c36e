"""Muon, Shampoo, SOAP and PSGD-Kron against NumPy, optax and closed forms."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from tests.compiled import together, training
from tests.derive.optimizers import reference_c as reference

import onward as ow
from onward.core.program import Variable
from onward.derive.optimizers.adam import AdamW
from onward.derive.optimizers.kron import PSGDKron, probe
from onward.derive.optimizers.muon import Muon, newton_schulz
from onward.derive.optimizers.shampoo import Shampoo
from onward.derive.optimizers.soap import SOAP
from onward.derive.rule import at_step

MUON = {"learning_rate": 0.02, "momentum": 0.9}
SHAMPOO = {"learning_rate": 0.1, "momentum": 0.5, "epsilon": 1e-2, "every": 3}
SOAPS = {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "shampoo_beta": 0.9, "epsilon": 1e-8, "every": 5}
KRON = {"learning_rate": 0.01, "momentum": 0.9, "fit_rate": 0.1, "damping": 1e-3, "clip": 1.1}


def psgd(w, gradients):
    like = np.shape(w) or (1,)
    draw = reference.jit(lambda steps: jax.lax.map(lambda t: probe(0, t, like, w.dtype), steps))
    probes = np.float64(draw(np.arange(len(gradients))))
    due = [t < 20 or t % 7 == 0 for t in range(len(gradients))]
    return reference.psgd(np.float64(w), np.float64(gradients), probes, due=due, **KRON)


def by(rule, **options):
    return lambda w, gradients: rule(np.float64(w), np.float64(gradients), **options)


CASES = {
    "Muon": (Muon(**MUON), by(reference.muon, **MUON, nesterov=True, scale="original")),
    "Muon, match_rms": (
        Muon(**MUON, nesterov=False, scale="match_rms"),
        by(reference.muon, **MUON, nesterov=False, scale="match_rms"),
    ),
    "Shampoo": (Shampoo(**SHAMPOO, grafting="none"), by(reference.shampoo, **SHAMPOO)),
    "Shampoo, sgd": (
        Shampoo(**SHAMPOO, decay=0.9, grafting="sgd", max_size=3),
        by(reference.shampoo, **SHAMPOO, decay=0.9, grafting="sgd", max_size=3),
    ),
    "Shampoo, adagrad": (Shampoo(**SHAMPOO), by(reference.shampoo, **SHAMPOO, grafting="adagrad")),
    "SOAP": (SOAP(**SOAPS), by(reference.soap, **SOAPS)),
    "PSGDKron": (PSGDKron(**KRON, warmup=20, every=7), psgd),
}


def given(name, dtype):
    """Two of four shapes in single precision, the others in double; with the next rule the other way."""
    turn = (list(CASES).index(name) + (dtype == np.float64)) % 2
    names = [("vector", "matrix"), ("scalar", "kernel")][turn]
    return tuple({k: tree[k] for k in names} for tree in reference.tree(dtype))


def case(name, *tree, dtype=np.float32):
    optimizer = CASES[name][0]
    return partial(reference.trained, optimizer), *tree, reference.numbers(optimizer, dtype)


@cache
def hundred_steps(dtype):
    """By each of the rules: the parameters at the end, and the slots."""
    with jax.enable_x64(True):
        return together({name: case(name, *given(name, dtype), dtype=dtype) for name in CASES})


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-5), (np.float64, 1e-12)])
def test_a_hundred_steps_of_the_papers_equations(name, dtype, tolerance):
    params, gradients = given(name, dtype)
    ours, slots = hundred_steps(dtype)[name]
    with jax.enable_x64(True):
        expected = {k: CASES[name][1](w, gradients[k]) for k, w in params.items()}
    for k in params:
        assert ours[k].dtype == dtype
        assert {s.dtype for s in slots[k].values()} == {np.dtype(dtype)}
        np.testing.assert_allclose(ours[k], expected[k], rtol=tolerance, atol=tolerance, err_msg=k)


PLAIN = {type(o).__name__: o for o in (Muon(0.1), Shampoo(0.1, every=2), SOAP(0.1, every=2), PSGDKron(0.1))}
each = pytest.mark.parametrize("name", PLAIN)


def two_matrices():
    params, gradients = reference.tree(np.float32, steps=8)
    return tuple({"a": x["matrix"], "b": x["matrix"][..., ::-1]} for x in (params, gradients))


@cache
def programs():
    """Each with what it makes of two matrices."""
    params, gradients = two_matrices()

    def loss(p, g):
        return sum(jnp.sum(p[k] * g[k]) for k in p)

    first = {k: g[0] for k, g in gradients.items()}
    made = {name: CASES[name][0].minimize(loss, params, first) for name in IN_PROGRAMS}
    found = together({name: training(program, params, gradients) for name, program in made.items()})
    return {name: (program, found[name][0]) for name, program in made.items()}


IN_PROGRAMS = ["Muon", "Shampoo, adagrad", "SOAP", "PSGDKron"]


@pytest.mark.parametrize("name", IN_PROGRAMS)
def test_a_program_gives_what_the_rule_gives(name):
    """The rule as in the papers."""
    program, state = programs()[name]
    assert [t.op.update for t in program.updates][1:] == [ow.UpdateType.PER_MATRIX] * 2
    params, gradients = two_matrices()
    for k, w in params.items():
        np.testing.assert_allclose(state[k], CASES[name][1](w, gradients[k]), rtol=1e-5, atol=1e-5)


ONES = {str(s): np.ones(s, np.float32) for s in [(), (3,), (2, 3), (0,), (0, 3), (2, 0)]}


@cache
def without_gradients():
    zeros = {k: np.zeros((3, *p.shape), np.float32) for k, p in ONES.items()}
    h = {name: reference.numbers(optimizer, np.float32) for name, optimizer in PLAIN.items()}
    return together(
        {name: (partial(reference.trained, o), ONES, zeros, h[name]) for name, o in PLAIN.items()}
    )


@each
def test_nothing_becomes_nan_without_a_gradient(name):
    after, slots = without_gradients()[name]
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(slots))
    for k, w in ONES.items():
        np.testing.assert_array_equal(after[k], w)


@cache
def downhill():
    w = np.complex64((1 + 1j) * np.arange(1, 7).reshape(2, 3))

    def run(optimizer, w):
        return reference.descended(optimizer, reference.parabola, w, 90, learning_rate=0.3)

    return together({name: (partial(run, optimizer), w) for name, optimizer in PLAIN.items()})


@each
def test_complex_matrices_go_downhill(name):
    after, _, losses = downhill()[name]
    assert after.dtype == np.complex64
    assert losses[-1] < 0.01 * losses[0]


def unitary(seed, n=3):
    draw = np.random.default_rng(seed)
    return np.linalg.qr(draw.normal(size=(n, n)) + 1j * draw.normal(size=(n, n)))[0]


def once(optimizer, gradient, **changed):
    """How far a first step goes, in units of the learning rate."""

    @reference.jit
    def update(gradient):
        w = jnp.zeros_like(gradient)
        h = reference.numbers(optimizer, jnp.abs(gradient).dtype, learning_rate=1.0, **changed)
        return -at_step(optimizer, h | {"step": jnp.int32(0)}).update(w, gradient, optimizer.init(w))[0]

    return update(gradient)


def test_newton_schulz_leaves_the_singular_vectors_and_moves_the_values_to_one():
    u, v, moved = unitary(0), unitary(1), reference.jit(newton_schulz)
    for values in ([1.0, 0.3, 0.05], [5e9, 1e9, 4e8], [1e-30, 1e-30, 1e-31]):
        result = u.conj().T @ np.asarray(moved(np.complex64(u * values @ v))) @ v.conj().T
        assert np.all((np.diag(result).real > 0.65) & (np.diag(result).real < 1.25))
        np.testing.assert_allclose(result - np.diag(np.diag(result)), 0, atol=1e-4)
    tall = np.linalg.svd(moved(np.ones((8, 2)) + np.eye(8, 2)))[1]
    assert np.all((tall > 0.65) & (tall < 1.25))


def test_a_first_step_of_shampoo_is_the_nearest_unitary_matrix():
    """``(G G^H)**(-1/4) G (G^H G)**(-1/4) = U V^H``."""
    u, v = unitary(2), unitary(3)
    gradient = jnp.complex64(u * [3.0, 1.0, 0.5] @ v)
    np.testing.assert_allclose(once(Shampoo(grafting="none"), gradient, epsilon=0.0), u @ v, atol=2e-5)


def test_grafting_gives_the_length_of_another_step():
    gradient = jnp.array([[1.0, -2.0], [3.0, 4.0]])
    assert np.linalg.norm(once(Shampoo(grafting="sgd"), gradient)) == pytest.approx(30**0.5, rel=1e-5)
    assert np.linalg.norm(once(Shampoo(), gradient)) == pytest.approx(2, rel=1e-4)


def test_soap_is_adam_in_the_eigenbasis():
    """The same run in rotated coordinates is the same run, rotated; of a vector it is Adam, a step later."""
    draw = np.random.default_rng(0)
    u, v = (np.linalg.qr(draw.normal(size=(3, 3)))[0].astype(np.float64) for _ in range(2))
    gradients = draw.normal(size=(12, 3, 3))
    optimizer = SOAP(0.1, every=5)
    with jax.enable_x64(True):
        h = reference.numbers(optimizer, np.float64)
        run = reference.jit(
            lambda g: reference.trained(optimizer, {"w": jnp.zeros(g.shape[1:])}, {"w": g}, h)[0]["w"]
        )
        np.testing.assert_allclose(run(u @ gradients @ v), u @ run(gradients) @ v, atol=1e-10)
        adam = ow.Adam(0.1, 0.95, 0.95)
        h = reference.numbers(adam, np.float64)
        flat = gradients[:, 0]
        expected = reference.trained(adam, {"w": jnp.zeros(3)}, {"w": flat[1:]}, h)[0]["w"]
        np.testing.assert_allclose(run(flat), expected, rtol=1e-12)


def test_psgd_whitens_gradients():
    """P is fitted to ``P E[g g^T] P = I``: in the end no direction of ``P g`` is larger than another."""
    draw = np.random.default_rng(0)
    left, right = np.diag([4.0, 1.0, 0.25]), np.array([[1.0, 0.5], [0.0, 0.2]])
    gradients = np.float32(left @ draw.normal(size=(1500, 3, 2)) @ right)
    optimizer = PSGDKron(momentum=0.0, warmup=1500, fit_rate=lambda t: 0.1 / (1 + t / 100))

    def fit(slots, at):
        step, g = at
        h = reference.numbers(optimizer, jnp.float32, step)
        return at_step(optimizer, h | {"step": step}).update(jnp.zeros((3, 2)), g, slots)[1], None

    slots = reference.jit(lambda *at: jax.lax.scan(fit, optimizer.init(jnp.zeros((3, 2))), at)[0])(
        np.arange(1500), gradients
    )
    q = [np.float64(slots[f"factor_{i}"]) for i in range(2)]
    for factor in q:
        np.testing.assert_array_equal(np.tril(factor, -1), 0)
    white = (q[0].T @ q[0] @ gradients @ q[1].T @ q[1]).reshape(-1, 6)
    eigenvalues = np.linalg.eigvalsh(white.T @ white / len(white))
    assert eigenvalues[-1] / eigenvalues[0] < 2.5
    before = np.linalg.eigvalsh(np.cov(gradients.reshape(-1, 6).T))
    assert before[-1] / before[0] > 5000


def test_a_step_of_psgd_is_no_longer_than_clip():
    assert np.sqrt(np.mean(once(PSGDKron(), jnp.full((2, 2), 1e4)) ** 2)) == pytest.approx(1.1, rel=1e-5)


def test_muon_as_in_optax():
    params, gradients = reference.tree(np.float32, steps=10)
    w, g = params["matrix"], gradients["matrix"]
    peer = optax.contrib.scale_by_muon(nesterov=False, beta=0.9)
    scaled = optax.chain(peer, optax.scale(-0.02 * (4 / 3) ** 0.5))
    slots, expected = scaled.init(w), w
    update = reference.jit(scaled.update)
    for one in g:
        updates, slots = update(one, slots, expected)
        expected = optax.apply_updates(expected, updates)
    optimizer = Muon(0.02, 0.9, nesterov=False)
    h = reference.numbers(optimizer, jnp.float32)
    ours = reference.jit(lambda w, g: reference.trained(optimizer, {"w": w}, {"w": g}, h)[0])(w, g)
    np.testing.assert_allclose(ours["w"], expected, rtol=1e-4, atol=1e-5)


def routed(optimizer, **shapes):
    types = {k: Variable(k, s, np.dtype(np.float32)) for k, s in shapes.items()}
    return [k for k, v in types.items() if optimizer.route(v) is optimizer]


def test_muon_routes_all_but_inner_matrices_to_its_fallback():
    shapes = {"w": (3, 4), "kernel": (3, 3, 2, 4), "b": (4,), "scale": (), "gain": (1, 4), "one": (1, 1, 4)}
    named = dict.fromkeys(
        ["token_embedding", "lm_head", "transformer.wte", "wpe", "Embed_0", "logits"], (3, 4)
    )
    assert routed(Muon(), **shapes, **named) == ["w", "kernel"]
    assert routed(Muon(aside=("w*",)), **shapes, lm_head=(3, 4)) == ["kernel", "lm_head"]
    fallback = AdamW(0.5)
    assert Muon(fallback=fallback).route(Variable("b", (4,), np.dtype(np.float32))) is fallback


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Muon(scale="big"), "scale is 'big'. Write one of 'original', 'match_rms'"),
        (lambda: Muon(steps=0), "steps is 0. It must be a whole number of at least 1"),
        (lambda: Muon(aside="*head*"), r"aside is '\*head\*'. Write a tuple"),
        (lambda: Muon(fallback="adam"), "fallback is 'adam'. Give an optimizer"),
        (lambda: Muon(momentum=1.0), "momentum is 1.0. It must be less than 1"),
        (lambda: Shampoo(grafting="adam"), "grafting is 'adam'. Write one of"),
        (lambda: Shampoo(decay=1.5), "decay is 1.5. It must be above 0, and at most 1"),
        (lambda: Shampoo(every=2.0), "every is 2.0. It must be a whole number"),
        (lambda: SOAP(every=True), "every is True. It must be a whole number"),
        (lambda: PSGDKron(warmup=-1), "warmup is -1. It must be at least 0"),
        (lambda: PSGDKron(fit_rate=1.0), "fit_rate is 1.0. It must be less than 1"),
    ],
)
def test_refusals(make, message):
    with pytest.raises(ow.HyperparameterError, match=message):
        make()
