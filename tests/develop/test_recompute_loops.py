"""Loops whose turns compute again what they did not keep: equal numbers, less memory."""

import warnings
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.core.errors import GraphError
from onward.develop import tuned
from onward.develop.recompute.again import keeping
from onward.develop.recompute.lean import lean
from onward.develop.recompute.loops import loops_kept
from onward.develop.recompute.measure import compiled
from onward.develop.recompute.recompute import recompute
from onward.develop.recompute.report import recomputed
from onward.develop.roll.roll import roll

RNG = np.random.default_rng(0)
TURNS, WIDTH, ROWS = 6, 8, 64
STACKED = jnp.asarray(RNG.normal(0, 0.3, (TURNS, WIDTH, WIDTH)), jnp.float32)
X = jnp.asarray(RNG.normal(size=(ROWS, WIDTH)), jnp.float32)


def turn(x, w):
    h = jnp.tanh(jnp.sin(x @ w))
    return x + h * jnp.exp(-(h**2)), jnp.mean(h)


def looped(params, x):
    """A loop that carries two values, one of them a number, and returns one for each turn."""

    def body(carry, w):
        x, total = carry
        x, mean = turn(x, w * params["scale"])
        return (x, total + mean), mean**2

    (x, total), squares = jax.lax.scan(body, (x, 0.0), params["w"], reverse=True)
    return jnp.mean(x**2) + 0.1 * total + jnp.sum(squares)


def unrolled(params, x):
    for w in params["w"]:
        x, _ = turn(x, w * params["scale"])
    return jnp.mean(x**2)


LOOPED = {"w": STACKED, "scale": jnp.float32(1.1)}
LAYERS = {"w": list(STACKED), "scale": jnp.float32(1.1)}


@cache
def plain(name):
    if name == "looped":
        return ow.SGD(0.1).minimize(looped, LOOPED, X), LOOPED
    return roll(ow.SGD(0.1).minimize(unrolled, LAYERS, X)), LAYERS


@cache
def halved(name):
    return recompute(plain(name)[0], 0.5)


def trained(program, params, steps=20):
    step = ow.compile(program)
    state = step.init(params)
    for _ in range(steps):
        state, out = step(state, X)
    return jax.tree.leaves((state.parameters, out.loss))


@pytest.mark.parametrize("name", ["looped", "rolled"])
def test_half_the_memory_at_equal_numbers(name):
    program, params = plain(name)
    assert compiled(halved(name)) <= compiled(program) / 2
    for found, expected in zip(trained(halved(name), params), trained(program, params), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_gradients_are_those_of_jax():
    program = halved("looped")
    step = ow.compile(program, fetch=[g for _, g in program.gradients])
    _, out = step(step.init(LOOPED), X)
    expected = jax.jit(jax.grad(looped))(LOOPED, X)
    for p, g in program.gradients:
        np.testing.assert_allclose(out[g], expected[p.name], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["looped", "rolled"])
def test_what_the_loss_does_not_reach_stays_without_a_gradient(name):
    """A gradient of zeros would let AdamW decay it, and keep moments for it."""

    def body(x, layer):
        return turn(x, layer["w"])[0] + jax.lax.stop_gradient(layer["still"]), None

    def loss(layers, x):
        if name == "looped":
            return jnp.mean(jax.lax.scan(body, x, layers)[0] ** 2)
        for layer in layers:
            x, _ = body(x, layer)
        return jnp.mean(x**2)

    stacked = {"w": STACKED, "still": jnp.ones((TURNS, WIDTH))}
    layers = (
        stacked if name == "looped" else [jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(TURNS)]
    )
    with pytest.warns(ow.UnreachedWarning):
        program = ow.AdamW(0.1).minimize(loss, layers, X)
    with warnings.catch_warnings(action="ignore", category=ow.UnreachedWarning):
        program = program if name == "looped" else roll(program)
        thin = lean(program)
    assert sum(v.size for v in thin.variables.values()) < sum(v.size for v in program.variables.values())
    assert [p.name for p, _ in thin.gradients] == [p.name for p, _ in program.gradients]
    assert [v.name for v in thin.state] == [v.name for v in program.state]


@pytest.mark.parametrize(("turns", "is_leaner"), [(32, True), (31, False)])
def test_a_loop_of_the_users_keeps_less_where_that_is_16_mib(turns, is_leaner):
    """Two arrays of 64 x 1,024 numbers in each turn."""

    def loss(w, x):
        return jnp.mean(jax.lax.scan(lambda h, _: (jnp.tanh(jnp.sin(h + w)), None), x, None, length=turns)[0])

    program = ow.SGD(0.1).minimize(loss, jnp.zeros(1024), jnp.zeros((64, 1024)))
    notes = " ".join(tuned.tuned(program, may_split=False).notes)
    assert ("lean: the backward pass computes again" in notes) is is_leaner
    assert "lean" not in " ".join(tuned.tuned(program, tune=False).notes)


def test_products_leave_a_loop_that_keeps_less(monkeypatch):
    """Where memory is to be saved, by a budget, they stay, for they are stacked up."""
    monkeypatch.setattr(tuned, "_MUCH", 0)

    def loss(w, x):
        def turn(h, x):
            h = jnp.tanh(jnp.sin(x @ w["in"] + h @ w["on"]))
            return h * jnp.exp(-(h**2)), None

        return jnp.mean(jax.lax.scan(turn, jnp.zeros((8, 64)), x)[0] ** 2)

    params = {"in": jnp.full((64, 64), 0.1), "on": jnp.full((64, 64), 0.01)}
    program = ow.SGD(0.1).minimize(loss, params, jnp.ones((24, 8, 64)))
    notes = " ".join(ow.compile(program).plan().notes)
    assert "lean: " in notes
    assert "fission: scan: of 24 turns 1 before" in notes
    assert "fission" not in " ".join(ow.compile(recompute(program, 0.5)).plan().notes)


def test_a_small_loop_beside_rolled_layers_stays_as_it_is(monkeypatch):
    def loss(params, x):
        for w in params["layers"]:
            x = jnp.tanh(jnp.sin(x @ w))
        still = params["still"]
        return jnp.mean(jax.lax.scan(lambda h, _: (jnp.tanh(jnp.sin(h + still)), None), x, None, 3)[0] ** 2)

    params = {"layers": [jnp.full((8, 8), 0.1)] * 6, "still": jnp.ones(8)}
    program = roll(ow.SGD(0.1).minimize(loss, params, jnp.ones((4, 8))))
    assert len(loops_kept(tuned.in_loops(program).program)) == 1
    monkeypatch.setattr(tuned, "_MUCH", 0)
    assert len(loops_kept(tuned.in_loops(program).program)) == 2


def test_a_leaner_loop_of_the_users_trains_as_it_did(monkeypatch):
    program, params = plain("looped")
    expected = trained(program, params)
    monkeypatch.setattr(tuned, "_MUCH", 0)
    assert any(note.startswith("lean") for note in ow.compile(program).plan().notes)
    for found, other in zip(trained(program, params), expected, strict=True):
        np.testing.assert_allclose(found, other, rtol=1e-5, atol=1e-7)


def test_what_a_loop_saves_is_itself_where_it_is_fetched(monkeypatch):
    program, params = plain("looped")
    saved = [name for name in program.variables if name.startswith("saved(")]
    outs = []
    for much in (0, 2**40):
        monkeypatch.setattr(tuned, "_MUCH", much)
        step = ow.compile(program, fetch=saved)
        outs.append(step(step.init(params), X)[1])
    assert saved
    for name in saved:
        np.testing.assert_array_equal(outs[0][name], outs[1][name])


def test_the_table_tells_what_each_turn_keeps():
    told = recomputed(halved("looped"))
    ((_, kept),) = told.loops
    assert f"keeps {', '.join(kept) or 'nothing'}" in str(told)
    assert told.estimated[1] < told.estimated[0]


def test_what_was_chosen_for_other_activations_is_refused():
    program = ow.SGD(0.1).minimize(unrolled, LAYERS, X)
    with pytest.raises(GraphError, match=r"recompute\(roll\(program\), budget\)"):
        keeping(program, ("one", "that", "roll", "took", "away"), ())


INNER = {
    "a gradient": lambda w, x: w - 0.1 * jax.grad(lambda w: jnp.mean(jnp.tanh(jnp.sin(x @ w)) ** 2))(w),
    "a vjp": lambda w, x: w + 0.1 * jax.vjp(lambda w: jnp.exp(-((x @ w) ** 2)), w)[1](jnp.cos(x @ w))[0],
}


@pytest.mark.parametrize("inner", INNER.values(), ids=INNER)
def test_a_turn_may_take_a_gradient_of_its_own(inner):
    """It is part of the forward pass of the loop, whatever it is within the turn."""

    def loss(w, x):
        w, _ = jax.lax.scan(lambda w, _: (inner(w, x), None), w, None, length=3)
        return jnp.mean((x @ w) ** 2)

    program = ow.SGD(0.1).minimize(loss, STACKED[0], X)
    found = recompute(program, budget=0.9)
    assert found.ops != program.ops
    step = ow.compile(found, fetch=["grad(w)"])
    _, out = step(step.init(STACKED[0]), X)
    np.testing.assert_allclose(out["grad(w)"], jax.grad(loss)(STACKED[0], X), rtol=1e-4, atol=1e-6)
