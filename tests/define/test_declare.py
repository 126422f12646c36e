"""Declarations: what a network needs, said where it is needed, inside a traced function or before it."""

import threading
import time
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import onward as ow
from onward.define.context import Context

RNG = np.random.default_rng(0)
X = RNG.normal(size=(6, 3)).astype("float32")
Y = RNG.normal(size=(6, 3)).astype("float32")


def names(variables):
    return [v.name for v in variables]


def array(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def first(program, parameters=None, **feed):
    """What the first step returns, and the State after it."""
    step = ow.compile(program, fetch=[g for _, g in program.gradients])
    state, out = step(step.init(parameters), **feed)
    return state, out


# --------------------------------------------------------------------------- mixed with plain JAX


def plain(w, b, x):
    h = jnp.tanh(x @ w + b)
    return jnp.mean(lax.cumsum(jnp.where(h > 0, h, 0.1 * h), axis=0) ** 2)


def declared():
    x = ow.data("x", (None, 3))
    w = ow.parameter("w", (3, 2))
    h = jnp.tanh(x @ w + ow.parameter("b", (2,)))
    return jnp.mean(lax.cumsum(jnp.where(h > 0, h, 0.1 * h), axis=0) ** 2)


def test_declarations_mix_with_any_jax_code():
    given = {"w": array(1, 3, 2), "b": array(2, 2)}
    program = ow.append_backward(ow.trace(declared))
    _, out = first(program, given, x=X)
    loss, (dw, db) = jax.jit(jax.value_and_grad(plain, (0, 1)))(given["w"], given["b"], X)
    np.testing.assert_allclose(out.loss, loss, rtol=1e-6)
    np.testing.assert_allclose(out["grad(w)"], dw, rtol=1e-5)
    np.testing.assert_allclose(out["grad(b)"], db, rtol=1e-5)


def test_the_listing_of_a_declared_program():
    def network():
        x = ow.data("x", (None, 3))
        with jax.named_scope("head"):
            y = x @ ow.parameter("w", (3, 1))
        seen = ow.state("seen", (), "int32")
        ow.assign(seen, seen + 1)
        return jnp.sum(y)

    assert str(ow.trace(network, batch_size=4)) == LISTING.strip("\n")


LISTING = """
Program network: 1 feed, 1 parameter (3 numbers), 1 other state Variable, 3 ops

feed      │ f32[4,3]  x
parameter │ f32[3,1]  head/w
state     │ i32[]     seen
──────────┼──────────────────────────────────────────────────────────────────────
forward   │ f32[4,1]  head/dot_general = dot_general(x, head/w)
          │ i32[]     next(seen) = add(seen, 1)
          │ f32[]     reduce_sum = reduce_sum(head/dot_general, axes=(0, 1))
──────────┼──────────────────────────────────────────────────────────────────────
return    │ f32[]     reduce_sum  (the loss)
next step │ 1 array   each state Variable x takes the value of next(x)
"""


def test_arguments_and_declarations_in_one_function():
    def loss(params, x):
        return jnp.mean((params["w"] * x * ow.parameter("scale", (3,)) - ow.data("y", (None, 3))) ** 2)

    program = ow.SGD(0.5).minimize(loss, {"w": np.ones(3, "float32")}, X, feed={"y": Y})
    assert names(program.inputs) == ["x", "y"]
    assert names(program.parameters) == ["w", "scale"]
    step = ow.compile(program)
    state, out = step(step.init({"w": np.ones(3, "float32")}), X, Y)
    np.testing.assert_allclose(out.loss, np.mean(Y**2), rtol=1e-6)  # scale begins at 0
    expected = jax.jit(jax.grad(lambda s: jnp.mean((X * s - Y) ** 2)))(np.zeros(3, "float32"))
    np.testing.assert_allclose(state["scale"], -0.5 * expected, rtol=1e-5)
    assert set(state.parameters) == {"w"}


def test_an_inner_trace_has_declarations_of_its_own():
    inner = []

    def outer():
        x = ow.data("x", (None, 3))
        inner.append(ow.trace(declared))
        return jnp.sum(x * ow.parameter("w", (3,)))

    program = ow.trace(outer)
    assert [v.shape for v in program.parameters] == [(3,)]
    assert [v.shape for v in inner[0].parameters] == [(3, 2), (2,)]


# --------------------------------------------------------------------------- one name, one Variable


def unit(x):
    return x / jnp.sqrt(jnp.sum(x**2, -1, keepdims=True))


def towers():
    """Two texts, projected by one matrix, compared by the cosine of their angle."""
    a, b = ow.data("text_a", (None, 3)), ow.data("text_b", (None, 3))
    projected = [x @ ow.parameter("projection", (3, 2)) for x in (a, b)]
    return jnp.mean(ow.layer.cosine_similarity(*projected))


def test_two_towers_share_a_matrix_and_its_gradients_are_summed():
    program = ow.append_backward(ow.trace(towers))
    assert names(program.parameters) == ["projection"]
    w = array(3, 3, 2)
    _, out = first(program, {"projection": w}, text_a=X, text_b=Y)

    def cosine(w, v):
        return jnp.mean(jnp.sum(unit(X @ w) * unit(Y @ v), -1))

    left, right = jax.jit(jax.grad(cosine, (0, 1)))(w, w)
    np.testing.assert_allclose(out["grad(projection)"], left + right, rtol=1e-4, atol=1e-6)


def test_two_towers_of_layers_outside_of_a_trace():
    w = ow.var("projection")
    a, b = (ow.layer.fc(ow.data(n, (None, 3)), 2, w=w, b=False) for n in ("text_a", "text_b"))
    program = ow.trace(ow.layer.cosine_similarity(a, b), feed={"text_a": X, "text_b": Y})
    assert names(program.parameters) == ["projection"]
    given = array(3, 3, 2)
    _, out = first(program, {"projection": given}, text_a=X, text_b=Y)
    np.testing.assert_allclose(out.value, np.sum(unit(X @ given) * unit(Y @ given), -1), rtol=1e-5)


@pytest.mark.parametrize(
    ("second", "found"),
    [
        (lambda: ow.parameter("w", (4,)), r"parameter float32\[4\]"),
        (lambda: ow.parameter("w", (3,), "bfloat16"), r"parameter bfloat16\[3\]"),
        (lambda: ow.state("w", (3,)), r"state float32\[3\]"),
        (lambda: ow.data("w", (3,)), r"data float32\[3\]"),
    ],
)
def test_one_name_of_two_types_shows_both_lines(second, found):
    def network():
        one = ow.parameter("w", (3,))
        two = second()
        return jnp.sum(one) + jnp.sum(two)

    with pytest.raises(ow.TraceError) as caught:
        ow.trace(network)
    message = str(caught.value)
    assert message.count("test_declare.py:") == 2
    assert "'w' is declared twice: as parameter float32[3] at" in message
    assert found.replace("\\", "") in message
    assert "give the second another name" in message


def test_scopes_are_put_before_names_but_not_before_data():
    def network():
        with jax.named_scope("encoder"):
            x = ow.data("x", (None, 3)) * ow.parameter("scale", (3,))
            with jax.named_scope("deep"):
                x = x + ow.parameter("shift", (3,))
                count = ow.state("count", ())
                ow.assign(count, count + 1)
            ow.assign("deep/count", ow.state("deep/count", ()) * 2)
        return jnp.sum(x)

    program = ow.trace(network)
    assert names(program.inputs) == ["x"]
    assert names(program.state) == ["encoder/scale", "encoder/deep/shift", "encoder/deep/count"]
    assert [new.name for new in program.next_state.values()] == ["next(encoder/deep/count)"]


def test_a_declaration_may_not_bear_the_name_of_an_argument():
    with pytest.raises(ow.TraceError, match=r"'w' declared at .*has the name of an argument"):
        ow.trace(lambda w: jnp.sum(w * ow.parameter("w", (3,))), np.ones(3, "float32"))


# --------------------------------------------------------------------------- inside the body of something

INSIDE = {
    "scan": lambda f: lax.scan(lambda c, _: (c + f(), None), 0.0, length=2)[0],
    "cond": lambda f: lax.cond(ow.data("x", ()) > 0, f, lambda: 0.0),
    "while": lambda f: lax.while_loop(lambda c: c < 3, lambda c: c + f(), 0.0),
    "vmap": lambda f: jnp.sum(jax.vmap(lambda c: c + f())(jnp.ones(2))),
    "jit": lambda f: jax.jit(lambda: f())(),
    "grad": lambda f: jax.grad(lambda c: c * f())(1.0),
    "checkpoint": lambda f: jax.checkpoint(lambda c: c * f())(1.0),
}
DECLARE = {
    "parameter": (lambda: ow.parameter("w", ()), "The parameter '.*w' is declared"),
    "state": (lambda: ow.state("s", ()), "The state '.*s' is declared"),
    "data": (lambda: ow.data("d", ()), "The data 'd' is declared"),
    "key": (lambda: jax.random.uniform(ow.key()), "A random key is declared"),
    "assign": (lambda: ow.assign("known", 1.0) or 0.0, "The next value of 'known' is declared"),
}


@pytest.mark.parametrize("place", INSIDE)
@pytest.mark.parametrize("what", DECLARE)
def test_a_declaration_inside_a_body_is_refused_by_name(place, what):
    declare, message = DECLARE[what]

    def network():
        ow.state("known", ())
        return INSIDE[place](declare)

    with pytest.raises(ow.TraceError, match=f"{message} at .*test_declare.py.*close over the array"):
        ow.trace(network)


def test_what_is_declared_outside_can_be_asked_for_inside():
    def network():
        w = ow.parameter("w", ())
        ow.key()
        noise = lax.scan(lambda c, _: (c + w * ow.parameter("w", ()), None), 0.0, length=3)[0]
        return noise + lax.cond(w > 0, lambda: ow.parameter("w", ()), lambda: 0.0)

    _, out = first(ow.trace(network), {"w": np.float32(2.0)})
    assert float(out.loss) == 3 * 4.0 + 2.0


# --------------------------------------------------------------------------- state


def run(network, steps=1, seed=0, **feed):
    return run_compiled(ow.compile(ow.trace(network)), steps, seed, **feed)


def run_compiled(step, steps=1, seed=0, **feed):
    state, outs = step.init(seed=seed), []
    for _ in range(steps):
        state, out = step(state, **feed)
        outs.append(out.value)
    return state, outs


def test_what_is_read_after_assign_is_what_was_assigned():
    def network():
        s = ow.state("s", (), initializer=ow.initializer.constant(3.0))
        ow.assign(s, s + 1)
        between = ow.state("s", ())
        ow.assign(between, between * 10)
        return s, between, ow.state("s", ())

    state, outs = run(network, 2)
    assert [list(map(float, values)) for values in outs] == [[3, 4, 40], [40, 41, 410]]
    assert float(state["s"]) == 410


def test_state_may_be_shifted_from_one_to_the_next():
    def network():
        before, now = ow.state("before", ()), ow.state("now", ())
        ow.assign(before, now)
        ow.assign(now, now + 1)
        return before

    state, outs = run(network, 4)
    assert list(map(float, outs)) == [0, 0, 1, 2]
    assert (float(state["before"]), float(state["now"])) == (3, 4)


def test_an_array_that_is_the_value_of_two_states_is_refused_as_a_target():
    def network():
        ow.state("a", ())
        ow.assign("a", ow.state("b", ()))
        ow.assign(ow.state("a", ()), 1.0)
        return 0.0

    with pytest.raises(ow.TraceError, match=r"the value of several: 'b', 'a'.*assign\('b', value\)"):
        ow.trace(network)


def test_an_integer_counts_exactly():
    def network():
        n = ow.state("n", (), "int32", ow.initializer.constant(2**24))
        ow.assign(n, n + 1)
        return n

    state, outs = run(network, 3)
    assert [int(n) for n in outs] == [2**24, 2**24 + 1, 2**24 + 2]
    assert state["n"].dtype == jnp.int32


WRONG = {
    "another shape": (
        lambda s: ow.assign(s, jnp.ones(3)),
        r"is float32\[3\]; it is declared as float32\[2\]",
    ),
    "another dtype": (lambda s: ow.assign(s, jnp.ones(2, "int32")), r"is int32\[2\].*float32\[2\]"),
    "one number": (lambda s: ow.assign(s, 1.0), r"is float32\[\].*float32\[2\]"),
    "a list": (lambda s: ow.assign(s, [1.0, 2.0]), "is not an array.*keeps its type from step to step"),
    "None": (lambda s: ow.assign(s, None), "is not an array"),
    "a float for an integer": (lambda s: ow.assign("n", 0.5), r"is float32\[\].*int32\[\]"),
    "an unknown name": (lambda s: ow.assign("mena", s), "no state is named 'mena'.*'mean'.*Declare it first"),
    "a parameter": (lambda s: ow.assign("p", s), "no state is named 'p'"),
    "a computed array": (
        lambda s: ow.assign(s + 1, s),
        "was given an array that onward.state did not return",
    ),
}


@pytest.mark.parametrize(("wrong", "message"), WRONG.values(), ids=WRONG)
def test_what_assign_refuses(wrong, message):
    def network():
        mean = ow.state("mean", (2,))
        ow.state("n", (), "int32")
        ow.parameter("p", (2,))
        wrong(mean)
        return 0.0

    with pytest.raises(ow.TraceError, match=f"assign at .*test_declare.py.*{message}"):
        ow.trace(network)


@pytest.mark.parametrize("use", [lambda: ow.assign("a", 1.0), ow.key])
def test_what_only_a_traced_function_can_do(use):
    with pytest.raises(ow.ArgumentError, match="traced function"):
        use()


# --------------------------------------------------------------------------- random keys


def noisy():
    return jax.random.normal(ow.key(), (2,)), jax.random.normal(ow.key(), (2,))


def test_a_key_differs_from_call_to_call_and_from_step_to_step():
    _, outs = run(noisy, 3)
    drawn = {np.asarray(x).tobytes() for pair in outs for x in pair}
    assert len(drawn) == 6


def test_keys_follow_from_the_seed():
    step = ow.compile(ow.trace(noisy))
    one, again, other = (run_compiled(step, 2, seed=seed)[1] for seed in (1, 1, 2))
    assert np.array_equal(one, again)
    assert not np.any(np.asarray(one) == np.asarray(other))


def test_a_random_key_can_be_state():
    def network():
        key = ow.state("own", (), jax.random.key(0).dtype)
        key, used = jax.random.split(key)
        ow.assign("own", key)
        return jax.random.normal(used)

    _, outs = run(network, 3)
    assert len({float(x) for x in outs}) == 3


# --------------------------------------------------------------------------- first values

SHAPES = {"a": (3, 2), "b": (3, 2), "c/w": (4,), "d": (2, 2, 2)}


def normals(order):
    def network():
        values = [ow.parameter(n, SHAPES[n], initializer=ow.initializer.normal(1.0)) for n in order]
        return sum(jnp.sum(v**2) for v in values)

    return network


def readable(value):
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value)


def initial(network, seed=0, **options):
    state = ow.compile(ow.trace(network, **options)).init(seed=seed)
    return {v.name: readable(state[v]) for v in state.layout.variables}


def test_first_values_depend_on_the_seed_and_the_name_not_on_the_order():
    forward, backward = initial(normals("abd")), initial(normals(["d", "c/w", "b", "a"]))
    for name in "abd":
        assert np.array_equal(forward[name], backward[name])
    assert not np.any(forward["a"] == forward["b"])
    other = initial(normals("abd"), seed=1)
    assert not any(np.any(forward[name] == other[name]) for name in "abd")


def test_an_initializer_runs_once_for_each_variable_and_never_again():
    ran = []

    def counted(key, shape, dtype):
        jax.debug.callback(lambda: ran.append(shape))
        return jnp.ones(shape, dtype)

    def network():
        x = ow.data("x", (None, 3))
        y = x @ ow.parameter("a", (3, 2), initializer=counted)
        y = y @ ow.parameter("b", (2, 1), initializer=counted)
        return jnp.mean((y + 0 * (x @ ow.parameter("a", (3, 2), initializer=counted))[:, :1]) ** 2)

    program = ow.SGD(0.1).minimize(ow.trace(network))
    session = ow.Session(program)
    for rows in (6, 6, 2):
        session.run(target=program, feed={"x": X[:rows]})
    session.run(target=ow.for_test(program), feed={"x": X})
    session.run(target=ow.Momentum(0.1).minimize(ow.trace(network)), feed={"x": X})
    jax.effects_barrier()
    assert ran == [(3, 2), (2, 1)]


def test_the_test_program_has_the_same_variables_with_the_same_first_values():
    def network():
        h = ow.layer.dropout(ow.layer.fc(ow.data("x", (None, 3)), 4), 0.5)
        return ow.layer.mse(ow.layer.batch_norm(h), jnp.zeros_like(h))

    training, test = initial(network), initial(network, training=False)
    assert set(training) - set(test) == {"key"}
    assert all(np.array_equal(training[name], test[name]) for name in test)


# --------------------------------------------------------------------------- declared outside of a trace


def early():
    """The network of the early designs, near verbatim."""
    images, labels = ow.data("images"), ow.data("labels")
    w1, b1 = ow.var("w1"), ow.var("b1")
    hidden = ow.layer.fc(images, w=w1, b=b1)
    return ow.layer.mse(hidden, labels), w1, b1, hidden


def test_layers_and_the_first_feed_complete_what_is_declared_without_shapes():
    cost, *_ = early()
    program = ow.trace(cost, feed={"images": X, "labels": Y})
    assert [v.type for v in program.inputs] == ["float32[6,3]", "float32[6,3]"]
    assert {v.name: v.shape for v in program.parameters} == {"w1": (3, 3), "b1": (3,)}
    given = {"w1": array(4, 3, 3), "b1": array(5, 3)}
    _, out = first(program, given, images=X, labels=Y)
    np.testing.assert_allclose(out.loss, np.mean((X @ given["w1"] + given["b1"] - Y) ** 2), rtol=1e-5)


@pytest.mark.parametrize("choose", [lambda w, b: [w, b], lambda w, b: [b], lambda w, b: w])
def test_a_parameter_list_of_lazy_variables(choose):
    cost, w1, b1, _ = early()
    chosen = choose(w1, b1)
    later = ow.Adagrad(learning_rate=0.1).minimize(cost, parameter_list=chosen)
    program = later.complete({"images": X, "labels": Y})
    wanted = {v.name for v in (chosen if isinstance(chosen, list) else [chosen])}
    assert {p.name for p, _ in program.gradients} == wanted


def test_names_stay_and_are_the_same_for_objects_made_anew():
    def build():
        x = ow.data("x", (None, 3))
        h = ow.layer.fc(ow.layer.fc(x, 4, act="relu"), 4)
        return h, ow.layer.mse(ow.layer.fc(h, 1), ow.data("y", (None, 1)))

    found = []
    for _ in range(2):
        h, cost = build()
        alone = names(ow.trace(h).parameters)
        whole = names(ow.trace(cost).parameters)
        assert names(ow.trace(h, training=False).parameters) == alone == whole[:4]
        assert h.name == "fc_1"
        found.append(whole)
    assert found[0] == found[1] == [f"fc_{i}/{p}" for i in range(3) for p in "wb"]


def test_layers_that_were_traced_apart_do_not_share_in_silence():
    x = ow.data("x", (None, 3))
    a, b = ow.layer.fc(x, 2), ow.layer.fc(x, 2)
    assert names(ow.trace(a).parameters) == names(ow.trace(b).parameters)
    with pytest.raises(
        ow.TraceError, match=r"Two layers are named 'fc_0'.*layer\.fc\(\.\.\., name='first'\)"
    ):
        ow.trace([a, b])
    named = [ow.layer.fc(x, 2, name="same") for _ in range(2)]
    assert names(ow.trace(named).parameters) == ["same/w", "same/b"]


def test_a_layer_declared_outside_does_not_share_with_one_inside_a_function():
    x = ow.data("x", (None, 3))
    outside = ow.layer.fc(x, 2)
    whole = ["fc_0/w", "fc_0/b", "fc_1/w", "fc_1/b"]

    def network():
        before = outside * 1.0
        return before + ow.layer.fc(x * 2.0, 2)

    for training in (True, False):  # the second trace finds the first layer named
        assert names(ow.trace(network, training=training).parameters) == whole


def test_an_unnamed_layer_is_not_numbered_as_people_named_another():
    def network():
        x = ow.data("x", (None, 3))
        named = ow.layer.fc(x, 2, name="fc_0")
        return named + ow.layer.fc(x * 2.0, 2) + ow.layer.fc(x * 3.0, 2, name="fc_0")

    assert names(ow.trace(network).parameters) == ["fc_0/w", "fc_0/b", "fc_1/w", "fc_1/b"]


def test_a_layer_named_in_a_trace_of_its_own_cannot_be_met_by_one_numbered_alike():
    x = ow.data("x", (None, 3))
    outside = ow.layer.fc(x, 2)
    ow.trace(outside)
    with pytest.raises(ow.TraceError, match=r"named 'fc_0'.*the fc at .*test_declare\.py:\d+ and Lazy fc"):
        ow.trace(lambda: ow.layer.fc(x * 2.0, 2) + outside)


ARITHMETIC = {
    "+": lambda a, b: a + b,
    "1 +": lambda a, b: 1 + a,
    "-": lambda a, b: a - b,
    "1 -": lambda a, b: 1 - a,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / (b * b + 1),
    "1 /": lambda a, b: 1 / (a * a + 1),
    "**": lambda a, b: a**2,
    "2 **": lambda a, b: 2.0**a,
    "@": lambda a, b: a @ np.ones((3, 2), "float32"),
    "@ from numpy": lambda a, b: np.ones((2, 6), "float32") @ a,
    "+ from numpy": lambda a, b: np.ones(3, "float32") + a,
    "* from jax": lambda a, b: jnp.arange(3.0) * a,
    "* from a numpy scalar": lambda a, b: np.float32(2) * a,
    "-a": lambda a, b: -a,
    "abs": lambda a, b: abs(a),
    "[]": lambda a, b: a[1:, 0],
    "<": lambda a, b: (a < b) * 1.0,
    ">=": lambda a, b: (a >= 0.0) * 1.0,
}


@cache
def calculated(outside):
    """All results, by one program."""
    a, b = ow.data("a", (None, 3)), ow.data("b", (None, 3))

    def network():
        return [calculate(a, b) for calculate in ARITHMETIC.values()]

    _, out = first(ow.trace(network() if outside else network, feed={"a": X, "b": Y}), a=X, b=Y)
    return dict(zip(ARITHMETIC, out.value, strict=True))


@pytest.mark.parametrize("outside", [True, False], ids=["outside", "closed over"])
@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_on_lazy_values(name, outside):
    np.testing.assert_allclose(calculated(outside)[name], ARITHMETIC[name](X, Y), rtol=1e-5)


def test_a_function_may_close_over_lazy_values():
    x, w = ow.data("x", (None, 3)), ow.parameter("w", (3, 3))
    hidden = ow.layer.fc(x, 3, w=w, b=False, act="tanh")

    def network():
        assert x.shape == (6, 3)
        return jnp.mean((jnp.asarray(hidden) * x.T[:, :1].T + hidden.sum() - jnp.asarray(w)[0]) ** 2)

    given = array(6, 3, 3)
    _, out = first(ow.trace(network, batch_size=6), {"w": given}, x=X)
    h = np.tanh(X @ given)
    np.testing.assert_allclose(out.loss, np.mean((h * X.T[:, :1].T + h.sum() - given[0]) ** 2), rtol=1e-5)


def test_state_declared_outside_counts_inside():
    n = ow.state("n", (), "int32")

    def network():
        ow.assign(n, n + 1)
        return n.value()

    state, _ = run(network, 3)
    assert int(state["n"]) == 3


TEACH = {
    "bool": (bool, ow.ArgumentError, "has no value yet.*inside a function that onward.trace"),
    "iteration": (list, ow.ArgumentError, r"cannot be unpacked.*value\[0\]"),
    "numpy.asarray": (np.asarray, ow.ArgumentError, "has no value yet"),
    "jax.numpy.asarray": (jnp.asarray, ow.ArgumentError, "has no value yet"),
    "value": (lambda v: v.value(), ow.ArgumentError, "has no value yet"),
    "mean": (lambda v: v.mean(), AttributeError, "has no 'mean' yet.*def network()"),
    "ndim": (lambda v: v.ndim, AttributeError, "has no 'ndim' yet"),
}


@pytest.mark.parametrize("lazy", [ow.data("x"), ow.layer.fc(ow.data("x"), 2)], ids=["data", "layer"])
@pytest.mark.parametrize(("use", "kind", "message"), TEACH.values(), ids=TEACH)
def test_a_lazy_value_says_that_it_has_no_value(lazy, use, kind, message):
    with pytest.raises(kind, match=f"Lazy .*{message}"):
        use(lazy)


def test_a_lazy_value_given_to_jax_itself_says_how_to_make_an_array_of_it():
    x = ow.data("x", (None, 3))
    with pytest.raises(ow.TraceError, match=r"declaration made outside.*jnp\.asarray\(x\)"):
        ow.trace(lambda: jnp.sum(x))


def test_a_variable_that_no_layer_completes_is_refused():
    w = ow.var("w")
    for network in (w, lambda: w, lambda: w * 2):
        with pytest.raises(ow.TraceError, match=r"var\('w'\) has no shape.*parameter\('w', \(784, 128\)\)"):
            ow.trace(network)


def test_a_variable_with_a_shape_needs_no_layer():
    w = ow.var("w", (3,))
    program = ow.trace(lambda: jnp.sum(ow.data("x", (None, 3)) * w))
    assert [v.type for v in program.parameters] == ["float32[3]"]
    assert initial(lambda: jnp.sum(jnp.asarray(w)))["w"].tolist() == [0, 0, 0]


def test_a_program_to_come_says_so():
    cost, *_ = early()
    later = ow.SGD(0.1).minimize(cost)
    assert isinstance(later, ow.typing.Deferred)
    assert str(later).startswith(
        "A Program to come: its first feed will show the shape of 'images', 'labels'."
    )
    assert "deferred.complete({'images': array, 'labels': array})" in str(later)
    for attribute in ("ops", "parameters", "updates"):
        with pytest.raises(ow.ArgumentError, match=f"A Program to come.*Then it has '{attribute}'"):
            getattr(later, attribute)
    with pytest.raises(AttributeError):
        _ = later.opps
    with pytest.raises(ow.ArgumentError, match="'labels' is declared without a shape"):
        later.complete({"images": X})


def test_a_cost_whose_shapes_are_known_is_minimized_at_once():
    cost = ow.layer.mse(ow.layer.fc(ow.data("x", (None, 3)), 1), ow.data("y", (None, 1)))
    assert isinstance(ow.SGD(0.1).minimize(cost), ow.Program)


# --------------------------------------------------------------------------- threads, and what fails


def test_threads_that_trace_at_once_do_not_mix():
    count, barrier, found = 8, threading.Barrier(8), {}

    def work(i):
        def network():
            x = ow.data(f"x{i}", (None, i + 1))
            for k in range(3):
                barrier.wait(10)
                x = ow.layer.fc(x, i + 2) * ow.parameter(f"scale{i}_{k}", ())
            return jnp.sum(x)

        found[i] = ow.trace(network)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(count):
        assert names(found[i].inputs) == [f"x{i}"]
        layers = [(f"fc_{k}/w", f"fc_{k}/b", f"scale{i}_{k}") for k in range(3)]
        assert names(found[i].parameters) == [name for layer in layers for name in layer]
        assert found[i]["fc_0/w"].shape == (i + 1, i + 2)


def test_one_lazy_cost_traced_by_many_threads(monkeypatch):
    cost = ow.layer.mse(ow.layer.fc(ow.layer.fc(ow.data("x", (None, 3)), 4), 1), ow.data("y", (None, 1)))
    number, data, found = Context.number, Context.data, []

    def slowly(context, kind):  # others, which began later, reach a layer between the names of two
        time.sleep(0.04)
        return number(context, kind)

    def later(context, *args):
        time.sleep(0.01 * int(threading.current_thread().name))
        return data(context, *args)

    monkeypatch.setattr(Context, "number", slowly)
    monkeypatch.setattr(Context, "data", later)

    def work():
        found.append(names(ow.trace(cost).state))

    threads = [threading.Thread(target=work, name=str(i)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [["fc_0/w", "fc_0/b", "fc_1/w", "fc_1/b"]] * 8


class Failure(Exception):
    pass


def test_a_failing_trace_leaves_no_context_behind():
    def network():
        raise Failure(f"on the way to {ow.parameter('w', (3,))}")

    for _ in range(2):
        with pytest.raises(ow.TraceError, match="Failure: on the way"):
            ow.trace(network)
        assert isinstance(ow.data("x", (None, 3)), ow.typing.Lazy)
        with pytest.raises(ow.ArgumentError, match="outside of a traced function"):
            ow.assign("w", 1.0)
    assert names(ow.trace(declared).parameters) == ["w", "b"]


# --------------------------------------------------------------------------- batches


def deep():
    x = ow.data("x", (None, 3))
    return ow.layer.mse(ow.layer.fc(x, 2, act="relu"), ow.data("y", (None, 2)))


@pytest.mark.parametrize(
    "options", [{}, {"batch_size": 6}, {"feed": {"x": X, "y": Y[:, :2]}}, {"feed": {"y": Y[:, :2]}}]
)
def test_a_batch_of_another_size_is_traced_once_more(options):
    program = ow.SGD(0.1).minimize(ow.trace(deep, **options))
    step = ow.compile(program)
    state = step.init()
    for rows in (6, 4, 1, 4, 6, 1):
        w, b = np.asarray(state["fc_0/w"]), np.asarray(state["fc_0/b"])
        state, out = step(state, x=X[:rows], y=Y[:rows, :2])
        expected = np.mean((np.maximum(X[:rows] @ w + b, 0) - Y[:rows, :2]) ** 2)
        np.testing.assert_allclose(out.loss, expected, rtol=1e-5)
    assert step.traces == (2 if options else 3)
    assert step.compilations == step.traces + 1


@pytest.mark.parametrize("fed", [("x",), ("y",), ("x", "y")])
def test_what_is_not_fed_follows_the_batch_of_what_is(fed):
    feed = {"x": X, "y": Y[:, :2]}
    program = ow.trace(deep, feed={name: feed[name] for name in fed})
    assert [v.shape for v in program.inputs] == [(6, 3), (6, 2)]


FEEDS = {
    "rows": ({"x": X, "y": Y[:5, :2]}, {}, "6 rows in 'x' and 5 in 'y'"),
    "batch_size": ({"x": X}, {"batch_size": 4}, "4 rows in 'batch_size' and 6 in 'x'"),
    "width": ({"x": X[:, :2]}, {}, r"'x' is declared as \[None, 3\] and fed as \[6, 2\]"),
    "axes": ({"x": X[0]}, {}, r"'x' is declared as \[None, 3\] and fed as \[3\]"),
    "misspelt": ({"xx": X}, {}, "declares no data 'xx'.*'x'"),
    "no array": ({"x": "abc"}, {}, "feed 'x' is 'abc'; expected an array"),
    "ragged": ({"x": [[1.0], [1.0, 2.0]]}, {}, "feed 'x' is a list of 2; expected numbers"),
    "objects": ({"x": np.array([None])}, {}, "feed 'x' is an array.*expected numbers"),
    "no dict": ([X], {}, "feed is a list of 1; expected a dict"),
    "no rows": ({"x": X[:0]}, {}, r"'x' is fed as \[0, 3\]: a batch without rows"),
    "negative": (None, {"batch_size": -1}, "batch_size is -1; expected a whole number"),
}


@pytest.mark.parametrize(("feed", "options", "message"), FEEDS.values(), ids=FEEDS)
def test_examples_that_contradict_the_declarations(feed, options, message):
    with pytest.raises(ow.ArgumentError, match=message):
        ow.trace(deep, feed=feed, **options)


REFUSED = {
    "no name": (lambda: ow.data("", (None,)), "needs a name"),
    "a number for a name": (lambda: ow.parameter(3, (2,)), "needs a name, a string, not 3"),
    "a number for a shape": (lambda: ow.data("x", 3), r"the shape is 3; write a tuple.*\(None, 784\)"),
    "a string for a shape": (lambda: ow.data("x", "ab"), "the shape is 'ab'; write a tuple"),
    "half a row": (lambda: ow.data("x", (2.5,)), r"the shape is \(2.5,\); write a tuple of whole numbers"),
    "less than nothing": (lambda: ow.data("x", (-1, 3)), "negative size; None stands for the batch"),
    "a batch of parameters": (
        lambda: ow.parameter("w", (None, 3)),
        "None stands for the batch, which only data",
    ),
    "a batch of state": (lambda: ow.state("s", (None,)), "None stands for the batch, which only data"),
    "integers to train": (
        lambda: ow.parameter("w", (3,), int),
        r"'w' is declared as int32.*onward\.state\('w'",
    ),
    "no dtype": (lambda: ow.data("x", (3,), "flat32"), "the dtype is 'flat32'; write one such as"),
    "strings": (lambda: ow.data("x", (3,), "U3"), "the dtype is 'U3'; write one such as"),
    "64 bits": (
        lambda: ow.data("x", (3,), "int64"),
        "declared as int64, and JAX holds int32.*jax_enable_x64",
    ),
    "64 bit parameters": (lambda: ow.parameter("w", (3,), np.float64), "as float64, and JAX holds float32"),
}


@pytest.mark.parametrize("traced", [True, False], ids=["traced", "outside"])
@pytest.mark.parametrize(("declare", "message"), REFUSED.values(), ids=REFUSED)
def test_declarations_that_are_refused(declare, message, traced):
    with pytest.raises(ow.ArgumentError, match=message):
        ow.trace(lambda: jnp.sum(declare())) if traced else declare()


def test_pythons_own_types_are_dtypes():
    program = ow.trace(lambda: jnp.sum(ow.data("x", (2,), float)) + ow.data("n", (), int))
    assert [str(v.dtype) for v in program.inputs] == ["float32", "int32"]


def test_none_beyond_the_batch_needs_an_example():
    def network():
        return jnp.sum(ow.data("x", (None, None)) ** 2)

    with pytest.raises(ow.ArgumentError, match=r"None can stand for the batch, the first axis.*feed=\{'x'"):
        ow.trace(network)
    assert ow.trace(network, feed={"x": X}).inputs[0].shape == (6, 3)


@pytest.mark.parametrize(("dtype", "found"), [("float32", "float32"), (None, "int32")])
def test_examples_show_the_dtypes_that_are_not_declared(dtype, found):
    program = ow.trace(lambda: jnp.sum(ow.data("x", (None, 3), dtype)), feed={"x": np.ones((4, 3), int)})
    assert program.inputs[0].type == f"{found}[4,3]"


# --------------------------------------------------------------------------- deep networks


def stack(depth):
    def network():
        x = ow.data("x", (None, 4))
        for _ in range(depth):
            x = ow.layer.fc(x, 4, act="tanh")
        return jnp.sum(x)

    return network


def compilations(action):
    """How many XLA computations an action compiles."""
    events = []

    def listen(event, *_, **__):
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        action()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return sum("backend_compile" in event for event in events)


def test_deep_networks_are_initialized_without_compiling_for_each_layer():
    programs = [ow.trace(stack(depth)) for depth in (2, 24)]
    assert [len(p.parameters) for p in programs] == [4, 48]
    steps = [ow.compile(p) for p in programs]
    steps[0].init()
    assert compilations(lambda: steps[1].init()) == 0
    assert compilations(lambda: ow.trace(stack(24))) == 0
