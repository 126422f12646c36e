"""``fission``: what leaves a loop, what stays in it, and that the numbers are those of ``jax.grad``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import onward as ow
from onward.core.turn import ScanTurn
from onward.develop.fission.fission import fission, fissions

TURNS, ROWS, WIDE = 10, 2, 16


def filled(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(0, 0.3, shape), jnp.float32)


def along(xs, turn, first=None, **options):
    first = jnp.zeros((ROWS, WIDE)) if first is None else first
    return lax.scan(turn, first, xs, **options)


def lstm(p, xs):
    def turn(carry, x):
        h, c = carry
        i, f, o, u = jnp.split(x @ p["x"] + h @ p["h"] + p["b"], 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(u)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return along(xs, turn, (jnp.zeros((ROWS, WIDE)),) * 2)[1]


def gru_backwards(p, xs):
    def turn(h, x):
        given, kept = jnp.tanh(x @ p["e"]) @ p["x"], h @ p["h"]
        r, z, _ = jnp.split(jax.nn.sigmoid(given + kept), 3, axis=-1)
        n = jnp.tanh(given[:, 2 * WIDE :] + r * kept[:, 2 * WIDE :])
        h = (1 - z) * n + z * h
        return h, h

    return along(xs, turn, reverse=True)[1]


def state_space(p, xs):
    def turn(h, x):
        h = jnp.exp(-jnp.exp(p["a"])) * h + x @ p["i"]
        return h, h @ p["o"] + x @ (p["i"] @ p["o"])

    return along(xs, turn)[1]


def attention(p, xs):
    def turn(h, x):
        scores = jnp.einsum("bd,tbd->tb", h @ p["q"], xs @ p["k"])
        return jnp.tanh(jnp.einsum("tb,tbd->bd", jax.nn.softmax(scores, 0), xs @ p["v"]) + x @ p["w"]), None

    return along(xs, turn)[0]


def one_weight_twice(p, xs):
    def turn(h, x):
        return jnp.tanh(h @ p["w"] + x @ p["w"].T), None

    return along(xs, turn)[0]


S = WIDE
CELLS = {
    lstm: {"x": (S, 4 * S), "h": (S, 4 * S), "b": (4 * S,)},
    gru_backwards: {"e": (S, S), "x": (S, 3 * S), "h": (S, 3 * S)},
    state_space: {"a": (S,), "i": (S, S), "o": (S, S)},
    attention: {"q": (S, S), "k": (S, S), "v": (S, S), "w": (S, S)},
    one_weight_twice: {"w": (S, S)},
}
PARAMS = {cell.__name__: {k: filled(*s) for k, s in shapes.items()} for cell, shapes in CELLS.items()}
DATA = filled(TURNS, ROWS, S, seed=1)


def of_all(params, xs):
    return sum(jnp.mean(cell(params[cell.__name__], xs) ** 2) for cell in CELLS)


def products_in_loops(program):
    """The products that a turn of each loop computes."""
    turns = [ScanTurn.of(op.body) for op in program.ops if op.type.startswith("scan")]
    return [sum(op.primitive.is_product for op in turn.program.ops) for turn in turns if turn]


@pytest.fixture(scope="module")
def program():
    return ow.SGD(1.0).minimize(of_all, PARAMS, DATA)


def test_loops_keep_the_products_that_wait_for_the_turn_before(program):
    assert len(fissions(program)) == 2 * len(CELLS)
    assert not fissions(fission(program))
    whole = ow.trace(lambda p, xs: lstm(p, xs), PARAMS["lstm"], DATA)
    assert products_in_loops(whole) == [2]
    (op,) = (op for op in fission(whole).ops if op.type == "scan")
    inner = [str(call.primitive) for call in op.body.calls]
    assert inner.count("dot_general") == 1  # before the loop
    (call,) = (call for call in op.body.calls if call.primitive == "scan")
    (turn,) = call.inner["jaxpr"]
    assert [c.primitive for c in turn.calls].count("dot_general") == 1  # with what is carried


def test_the_gradients_are_those_of_jax(program):
    step = ow.compile(program)
    assert "fission: scan: of 10 turns 1 before them" in str(step.plan())
    state, out = step(step.init(PARAMS), DATA)
    loss, gradients = jax.jit(jax.value_and_grad(of_all))(PARAMS, DATA)
    np.testing.assert_allclose(out.loss, loss, rtol=1e-6)
    for old, new, g in zip(*map(jax.tree.leaves, (PARAMS, state.parameters, gradients)), strict=True):
        np.testing.assert_allclose(old - new, g, rtol=1e-4, atol=1e-6)


def weighed(turn):
    """The loss of a loop over the data, whose turn is given the weight."""
    return lambda w, xs: jnp.mean(along(xs, lambda h, x: (turn(w, h, x), None))[0] ** 2)


def read_elsewhere(w, xs):
    def turn(carry, x):
        h, total = carry
        total = total + x.T @ x
        return (jnp.tanh(h @ w) + total[:ROWS], total), None

    return jnp.mean(along(xs, turn, (jnp.zeros((ROWS, S)), jnp.zeros((S, S))))[0][0])


def drawn(w, h, x):
    key = jax.random.fold_in(jax.random.key(0), x[0, 0].astype(int))
    return jnp.tanh(h) + jax.lax.stop_gradient(jax.random.normal(key, (ROWS, S)) @ w)


STAY = {
    "a total that the turns read": (read_elsewhere, filled(S, S), DATA),
    "a product with what is carried": (weighed(lambda w, h, x: jnp.tanh(x + h @ w)), filled(S, S), DATA),
    "random numbers of each turn": (weighed(drawn), filled(S, S), DATA),
    "many rows, a small weight": (
        lambda w, xs: jnp.mean(along(xs, lambda h, x: (jnp.tanh(h + x @ w), None), jnp.zeros((64, 4)))[0]),
        filled(4, 4),
        filled(TURNS, 64, 4),
    ),
    "a loop of one turn": (weighed(lambda w, h, x: jnp.tanh(h + x @ w)), filled(S, S), DATA[:1]),
}


@pytest.mark.parametrize("why", STAY)
def test_it_stays(why):
    loss, w, xs = STAY[why]
    assert fissions(ow.trace(loss, w, xs)) == ()


def read_across(program):
    """Whether each product of a turn reads its weight, of 16 x 48 numbers, against the way it lies."""
    turns = (turn for op in program.ops for call in op.body.calls for turn in call.inner.get("jaxpr", ()))
    products = [call for turn in turns for call in turn.calls if call.primitive == "dot_general"]
    return [
        call.params["dimension_numbers"][0][side] != ((1,), (0,))[side]
        for call in products
        for side in (0, 1)
        if set(call.operands[side].shape) == {S, 3 * S}
    ]


def folded(y):
    return y.reshape(*y.shape[:-1], 3, S).sum(-2)


LAID = {
    "h @ w": lambda w, h: folded(h @ w),
    "h @ w.T": lambda w, h: jnp.tile(h, 3) @ w.T,
    "w.T @ h": lambda w, h: folded((w.T @ h.T).T),
    "w @ h": lambda w, h: (w @ jnp.tile(h, 3).T).T,
    "vmap of w.T @ h": lambda w, h: folded(jax.vmap(lambda h: w.T @ h)(h)),
    "einsum": lambda w, h: folded(jnp.einsum("io,bi->bo", w, h)),
    "a weight computed in the turn": lambda w, h: folded(h @ jnp.tanh(w)),
}


AS_IT_LIES = {"w @ h", "w.T @ h", "vmap of w.T @ h"}


@pytest.mark.parametrize("form", LAID)
def test_turns_read_weights_as_they_lie(form):
    def loss(w, xs):
        h, _ = lax.scan(lambda h, x: (jnp.tanh(LAID[form](w, h) + x), None), jnp.zeros(xs.shape[1:]), xs)
        return jnp.mean(h**2)

    w, xs = filled(S, 3 * S), filled(TURNS, 4, S)
    program = ow.SGD(1.0).minimize(loss, w, xs)
    after = read_across(fission(program))
    assert any(read_across(program)) == (form not in AS_IT_LIES)
    assert after.count(True) == 0 < len(after)
    assert not fissions(fission(program))
    with jax.enable_x64():
        w, xs = (x.astype(jnp.float64) for x in (w, xs))
        step = ow.compile(ow.SGD(1.0).minimize(loss, w, xs))
        state, out = step(step.init(w), xs)
        value, gradient = jax.value_and_grad(loss)(w, xs)
        np.testing.assert_allclose(out.loss, value, rtol=1e-13)
        np.testing.assert_allclose(w - state.parameters, gradient, rtol=1e-10, atol=1e-14)
        assert any("before" in note for note in fissions(step.program)) == (form not in AS_IT_LIES)


@pytest.mark.parametrize("rows", [1, 3, 65])
def test_weights_for_few_or_many_rows_stay_as_they_are(rows):
    def loss(w, xs):
        h, _ = lax.scan(lambda h, x: (jnp.tanh(folded(h @ w) + x), None), jnp.zeros(xs.shape[1:]), xs)
        return jnp.mean(h**2)

    program = ow.SGD(1.0).minimize(loss, filled(S, 3 * S), filled(TURNS, rows, S))
    assert read_across(fission(program)) == read_across(program)


def test_what_would_be_stacked_is_bounded():
    def loss(w, xs):
        def turn(total, x):
            return total + jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w), None

        return jnp.sum(lax.scan(turn, jnp.zeros_like(w), xs)[0] ** 2)

    few, many = (jax.ShapeDtypeStruct((turns, 2, 1024), jnp.float32) for turns in (4, 10**4))
    w = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    assert len(fissions(ow.trace(loss, w, few))) == 1
    (told,) = fissions(ow.trace(loss, w, many))  # micro-batches by hand: the activations stay in their turns
    assert "after" not in told


def test_loops_within_loops_and_what_a_turn_prints():
    seen = []

    def loss(w, xs):
        def turn(h, x):
            jax.debug.callback(lambda: seen.append(1))
            inner = along(xs, lambda h, x: (jnp.tanh(h @ w + x @ w), None), h)[0]
            return inner + x @ w, None

        return jnp.mean(along(xs, turn)[0] ** 2)

    program = ow.trace(loss, filled(S, S), DATA)
    assert len(fissions(program)) == 2
    apart, whole = (ow.compile(p, tune=False) for p in (fission(program), program))
    found, expected = (step(step.init(filled(S, S)), DATA)[1].loss for step in (apart, whole))
    jax.effects_barrier()
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert len(seen) == 2 * TURNS


def test_micro_batches_and_devices_keep_their_loops():
    def loss(w, xs):
        return jnp.mean(
            jax.vmap(lambda x: along(x, lambda h, x: (jnp.tanh(h @ w + x @ w), None))[0])(xs) ** 2
        )

    batch = filled(8, TURNS, ROWS, S)
    program = ow.SGD(1.0).minimize(loss, filled(S, S), batch)
    split = ow.accumulate(ow.replicate(program, 2), 2)
    assert len(fissions(split)) == 2
    apart, whole = (ow.compile(p, tune=False) for p in (fission(split), program))
    found, expected = (step(step.init(filled(S, S)), batch)[0].parameters for step in (apart, whole))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_a_total_over_the_turns_that_is_no_product_is_a_sum():
    def total(first, xs):
        return along(xs, lambda t, x: (t + jnp.sum(x, 0), None), first)[0]

    program = ow.trace(total, jnp.ones(S), DATA)
    assert fissions(program) == ("scan: of 10 turns 1 after them",)
    step = ow.compile(fission(program), tune=False)
    np.testing.assert_allclose(step(step.init(jnp.ones(S)), DATA)[1].loss, 1 + DATA.sum((0, 1)), rtol=1e-5)


def summed(to=None, scale=1):
    """The sum over the turns of a product of two matrices, times a scale, in a dtype."""

    def loss(w, xs):
        def turn(total, x):
            added = (x[:16, None] @ x[None]) * scale
            return total + (added if to is None else added.astype(to)), None

        return jnp.sum(lax.scan(turn, jnp.zeros((16, 64), to or xs.dtype), xs)[0].astype(jnp.float32)) * w

    return loss


@pytest.mark.parametrize(
    ("dtype", "to", "scale"),
    [("float16", "float32", 1), ("float16", None, 1 / 256), ("bfloat16", "float32", 1)],
)
def test_a_sum_that_its_dtype_may_not_hold_stays_in_its_loop(dtype, to, scale):
    xs = jnp.full((10, 64), 223, dtype)
    program = ow.trace(summed(to, scale), jnp.ones(()), xs)
    step = ow.compile(fission(program))
    found = float(step(step.init(jnp.ones(())), xs)[1].loss)
    expected = float(jax.jit(summed(to, scale))(jnp.ones(()), xs))
    assert np.isfinite(expected)
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_a_gradient_in_float16_is_what_jax_computes():
    def loss(p, xs):
        def turn(h, x):
            return h / 2 + x @ p.astype(xs.dtype), None

        first = jnp.zeros((1, 64), xs.dtype)
        return jnp.sum(lax.scan(turn, first, xs)[0].astype(jnp.float32))

    p, xs = jnp.full((64, 64), 1e-5), jnp.full((100, 1, 64), 5e4, "float16")
    expected = jax.jit(jax.grad(loss))(p, xs)
    assert 65504 < float(jnp.max(expected)) < np.inf  # more than float16 holds
    program = fission(ow.SGD(1.0).minimize(loss, p, xs))
    step = ow.compile(program)
    found = p - step(step.init(p), xs)[0]["p"]
    np.testing.assert_allclose(found, expected, rtol=2e-2)
