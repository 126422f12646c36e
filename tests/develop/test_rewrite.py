"""``rewrite``: what a pattern finds is computed by its replacement, which has to compute the same."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import onward as ow

W, X = np.linspace(-1, 1, 12).reshape(4, 3), np.linspace(-2, 2, 20).reshape(5, 4)


def swish(x):
    return x * jax.nn.sigmoid(x)


def by_tanh(x):
    return x * (jnp.tanh(x / 2) + 1) / 2


def attention(q, k, v):
    scores = jnp.einsum("qd,kd->qk", q, k) * q.shape[-1] ** -0.5
    return jax.nn.softmax(scores) @ v


def quarter(q, k, v):
    return jax.nn.softmax(jnp.einsum("qd,kd->qk", q, k) * 0.25) @ v


def one_query_at_a_time(q, k, v):
    return lax.map(lambda one: jax.nn.softmax(k @ one / math.sqrt(k.shape[-1])) @ v, q)


LOSS = (lambda w, x: jnp.sum(swish(x @ w)), jnp.asarray(W), jnp.asarray(X))
SQUARE = (jnp.ones((2, 2)),) * 3


def minimized(loss, *arguments, optimizer=None):
    return (optimizer or ow.SGD(0.1)).minimize(loss, *arguments)


def kinds(program):
    forward = [op for op in program.ops if op.made_by is ow.Pass.FORWARD]
    found = [op.type for op in forward]
    for op in forward:
        for inner in op.subprograms.values():
            found += kinds(inner)
    return found


def trained(program, params, *data, steps=3):
    step = ow.compile(program)
    state, losses = step.init(params), []
    for _ in range(steps):
        state, out = step(state, *data)
        losses.append(float(out.loss))
    return losses


def value_of(program, params, *data):
    step = ow.compile(program)
    return step(step.init(jnp.asarray(params)), *map(jnp.asarray, data))[1].loss


def test_a_value_and_its_gradient_are_those_of_the_replacement():
    def loss(w, x):
        h = swish(x @ w)
        return jnp.sum(jax.nn.sigmoid(h) * h)  # in the other order

    program = minimized(loss, jnp.asarray(W), jnp.asarray(X))
    new = ow.rewrite(program, swish, by_tanh)
    assert kinds(new).count("tanh") == 2
    assert "logistic" not in kinds(new)
    expected = jax.value_and_grad(loss)(jnp.asarray(W), jnp.asarray(X))
    step = ow.compile(new, fetch=["grad(w)"])
    _, out = step(step.init(jnp.asarray(W)), jnp.asarray(X))
    for found, value in zip((out.loss, out["grad(w)"]), expected, strict=True):
        np.testing.assert_allclose(found, value, rtol=1e-6)
    assert ow.check(new) is new


def test_numbers_come_from_lengths_and_layers_in_loops_are_reached():
    def loss(params, x):
        def layer(h, w):
            return h + attention(h @ w, h, h), None

        return jnp.mean(lax.scan(layer, x, params)[0] ** 2)

    params, x = jnp.asarray(np.stack([W[:3, :3]] * 2)), jnp.asarray(X[:, :3])
    program = minimized(loss, params, x, optimizer=ow.Adam(0.1))
    new = ow.rewrite(program, attention, one_query_at_a_time, like=SQUARE)
    assert kinds(program).count("scan") == 1
    assert kinds(new).count("scan") == 2
    np.testing.assert_allclose(trained(new, params, x), trained(program, params, x), rtol=1e-5)
    with pytest.raises(ow.GraphError, match=r"ends like it, but where the pattern has mul, there is mul"):
        ow.rewrite(program, quarter, attention, like=SQUARE)


@pytest.mark.parametrize("around", ["checkpoint", "cond", "while"])
def test_what_runs_other_functions_is_entered(around):
    def loss(w, x):
        if around == "checkpoint":
            return jnp.sum(jax.checkpoint(lambda x: swish(x @ w))(x))
        if around == "cond":
            return jnp.sum(lax.cond(x[0, 0] < 0, lambda x: swish(x @ w), lambda x: x @ w, x))
        return jnp.sum(lax.fori_loop(0, 2, lambda _, x: swish(x), x @ w))

    w, x = jnp.asarray(W), jnp.asarray(X)
    program = minimized(loss, w, x)
    new = ow.rewrite(program, swish, by_tanh)
    assert "tanh" in kinds(new)
    assert "logistic" not in kinds(new)
    np.testing.assert_allclose(trained(new, w, x), trained(program, w, x), rtol=1e-5)


def test_a_rule_of_its_own_is_the_gradient():
    calls = []

    @jax.custom_vjp
    def own(x):
        return swish(x)

    def back(x, g):
        calls.append(1)
        return (g * (jax.nn.sigmoid(x) * (1 + x * (1 - jax.nn.sigmoid(x)))),)

    own.defvjp(lambda x: (swish(x), x), back)
    w, x = jnp.asarray(W), jnp.asarray(X)
    program = minimized(lambda w, x: jnp.sum(swish(x @ w)), w, x)
    new = ow.rewrite(program, swish, own)
    assert any(op.body.has_rule_of_users or (op.primal and op.primal.has_rule_of_users) for op in new.ops)
    np.testing.assert_allclose(trained(new, w, x), trained(program, w, x), rtol=1e-5)
    assert calls

    wrong = jax.custom_vjp(swish)
    wrong.defvjp(lambda x: (swish(x), x), lambda x, g: (g,))
    with pytest.raises(ow.ArgumentError, match=r"the gradient of argument 0 is .* at \[0, 0\], where swish"):
        ow.rewrite(program, swish, wrong)
    with pytest.raises(ow.ArgumentError, match="the gradient of argument 0"):
        ow.rewrite(ow.trace(*LOSS), swish, wrong)  # a backward pass may be derived later


def test_several_results_and_several_spellings():
    def moments(x):
        mean = jnp.mean(x, axis=1, keepdims=True)
        return mean, jnp.mean((x - mean) ** 2, axis=1, keepdims=True)

    def at_once(x):
        mean = jnp.mean(x, axis=1, keepdims=True)
        return mean, jnp.mean(x**2, axis=1, keepdims=True) - mean**2

    def by_root(mean, x, variance):
        return (x - mean) / jnp.sqrt(variance + 1e-5)

    def normal(x):
        mean, variance = moments(x)
        return by_root(mean, x, variance)

    def loss(w, x):
        h = normal(x @ w)
        other = x * w[0, 0]
        return jnp.sum(h**3) + jnp.sum(
            (other - jnp.mean(other, 1, keepdims=True)) * lax.rsqrt(2.0 + other**2)
        )

    w, x = jnp.asarray(W), jnp.asarray(X)
    program = minimized(loss, w, x)
    new = ow.rewrite(program, moments, at_once, like=jnp.ones((2, 2)))
    assert len(ow.graph.matches_of(program, moments, like=jnp.ones((2, 2)))) == 1
    np.testing.assert_allclose(trained(new, w, x), trained(program, w, x), rtol=1e-5)
    spellings = [lambda x: lax.rsqrt(2.0 + x**2), lambda x: 1 / jnp.sqrt(x)]
    (found,) = ow.graph.matches_of(program, spellings)
    assert str(found).startswith("the lambda at test_rewrite.py:")
    assert [op.type for op in found.ops] == ["integer_pow", "add", "rsqrt"]


def test_a_value_that_others_read_is_in_the_way():
    def loss(w, x):
        h = x @ w
        gate = jax.nn.sigmoid(h)
        return jnp.sum(gate * h) + jnp.sum(gate)

    program = ow.trace(loss, jnp.asarray(W), jnp.asarray(X))
    with pytest.raises(
        ow.GraphError, match=r"all of it stands at mul .*, but reduce_sum.* reads logistic as well"
    ):
        ow.rewrite(program, swish, by_tanh)


NEAR = {
    "another number": (lambda x: x * 2.0 + 1, lambda x: x * 2.0 + 1.5),
    "another side of a difference": (lambda x: 1 - jnp.exp(x), lambda x: jnp.exp(x) - 1),
    "another axis": (lambda x: jnp.cumsum(jnp.sin(x), 0), lambda x: jnp.cumsum(jnp.sin(x), 1)),
    "another wire": (lambda x: x * jnp.exp(jnp.sin(x)), lambda x: jnp.sin(x) * jnp.exp(jnp.sin(x))),
    "another power": (lambda x: jnp.sin(x) ** 2, lambda x: jnp.sin(x) ** 3),
    "the operand twice": (lambda x: jnp.sin(x) * jnp.sin(x), lambda x: jnp.sin(x) * jnp.cos(x)),
}


@pytest.mark.parametrize("near", NEAR)
def test_what_only_resembles_a_pattern_is_left(near):
    pattern, there = NEAR[near]
    program = ow.trace(lambda w, x: jnp.sum(there(x @ w)), jnp.asarray(W), jnp.asarray(X))
    assert not ow.graph.matches_of(program, pattern, like=jnp.ones((2, 2)))
    other = ow.trace(lambda w, x: jnp.sum(pattern(x @ w)), jnp.asarray(W), jnp.asarray(X))
    assert len(ow.graph.matches_of(other, pattern, like=jnp.ones((2, 2)))) == 1


def test_it_is_built_again_with_other_transforms():
    def loss(params, x):
        for w in params:
            x = swish(x @ w)
        return jnp.mean(x**2)

    params = [jnp.asarray(W[:3, :3]) * (i + 1) / 4 for i in range(4)]
    x = jnp.asarray(np.linspace(-1, 1, 24).reshape(8, 3))
    expected = trained(minimized(loss, params, x), params, x)
    program = minimized(loss, params, x)
    for other in (
        lambda p: ow.accumulate(ow.rewrite(p, swish, by_tanh), 2),
        lambda p: ow.rewrite(ow.replicate(p, 2), swish, by_tanh),
        lambda p: ow.rewrite(ow.roll(p), swish, by_tanh),
    ):
        new = other(program)
        np.testing.assert_allclose(trained(new, params, x), expected, rtol=1e-5)
    step = ow.compile(ow.rewrite(program, swish, by_tanh))
    _, out = step(step.init(params), x[:3])
    np.testing.assert_allclose(out.loss, loss(params, x[:3]), rtol=1e-5)


def test_only_where_it_is_meant():
    program = ow.trace(lambda w, x: jnp.sum(swish(swish(x @ w))), jnp.asarray(W), jnp.asarray(X))
    new = ow.rewrite(program, swish, jax.nn.relu, where="mul_1", tolerance=math.inf)
    assert kinds(new).count("logistic") == 1
    expected = np.sum(np.maximum(swish(X @ W), 0))
    np.testing.assert_allclose(value_of(new, W, X), expected, rtol=1e-5)
    with pytest.raises(ow.UnknownNameError, match="rewrite, where: nothing is named 'mul_7'"):
        ow.rewrite(program, swish, jax.nn.relu, where="mul_7")
    with pytest.raises(ow.ArgumentError, match="where is empty"):
        ow.rewrite(program, swish, jax.nn.relu, where=[])


def test_arrays_in_functions_and_results_that_are_there_already():
    table = np.arange(12.0).reshape(4, 3)

    def pattern(x):
        return x * table * 1.0

    program = ow.trace(lambda w, x: jnp.sum(pattern(w) @ x.T), jnp.asarray(W), jnp.asarray(X[:, :3]))
    like = jnp.ones((4, 3))
    assert len(ow.graph.matches_of(program, pattern, like=like)) == 1
    assert not ow.graph.matches_of(program, lambda x: x * (table + 1) * 1.0, like=like)
    new = ow.rewrite(program, lambda x: x * 1.0, lambda x: x, like=like)
    assert len(new.ops) == len(program.ops)
    np.testing.assert_allclose(*(value_of(p, W, X[:, :3]) for p in (program, new)), rtol=1e-6)


def test_a_loop_takes_no_arrays_of_a_replacement():
    table = np.linspace(0, 1, 3)

    def loss(w, x):
        return jnp.sum(lax.fori_loop(0, 2, lambda _, x: swish(x), x @ w))

    program = ow.trace(loss, *LOSS[1:])
    with pytest.raises(ow.GraphError, match=r"would stand in the scan .* cannot hold the arrays"):
        ow.rewrite(program, swish, lambda x: swish(x) + 0 * table)


def test_a_rewritten_loop_is_rewritten_again():
    def loss(w, x):
        return jnp.sum(
            lax.scan(lambda h, _: (jnp.sin(jnp.where(h > 0, h, -1.0)) + swish(h), None), x @ w, length=2)[0]
        )

    program = minimized(loss, *LOSS[1:])
    once = ow.rewrite(program, swish, by_tanh)
    twice = ow.rewrite(
        once,
        lambda h: jnp.sin(jnp.where(h > 0, h, -1.0)),
        lambda h: jnp.where(h > 0, jnp.sin(h), jnp.sin(-1.0)),
    )
    np.testing.assert_allclose(trained(twice, *LOSS[1:]), trained(program, *LOSS[1:]), rtol=1e-5)
    scopes = {op.scope for op in next(op for op in twice.ops if op.type == "scan").subprograms["jaxpr"].ops}
    assert not any("forward" in scope for scope in scopes)


def test_half_precision_is_compared_in_float32():
    program = ow.mixed_precision(minimized(*LOSS))
    assert "logistic" not in kinds(ow.rewrite(program, swish, by_tanh))  # found before there are casts
    low = ow.trace(
        lambda w, x: jnp.sum(swish(x @ w)), jnp.asarray(W, jnp.bfloat16), jnp.asarray(X, jnp.bfloat16)
    )
    ow.rewrite(low, swish, by_tanh)
    with pytest.raises(ow.ArgumentError, match="computes something else than the pattern swish"):
        ow.rewrite(low, swish, lambda x: 1.004 * x * jax.nn.sigmoid(x))


WRONG = {
    "another computation": (
        (swish, jax.nn.relu),
        ow.ArgumentError,
        "the replacement relu computes something else than the pattern swish",
    ),
    "another number of arguments": (
        (swish, lambda x, y: x * y),
        ow.ArgumentError,
        "the pattern swish takes 1 argument, and the replacement .*: missing a required argument: 'y'",
    ),
    "a name that is not there": (
        (swish, lambda x: sigmoid(x) * x),  # noqa: F821
        ow.TraceError,
        r"NameError: name 'sigmoid' is not defined\.$",
    ),
    "another shape": ((swish, jnp.sum), ow.ArgumentError, r"gives float32\[5,3\], and sum, .* float32\[\]"),
    "another dtype": (
        (swish, lambda x: by_tanh(x).astype(jnp.float16)),
        ow.ArgumentError,
        "Expected the same",
    ),
    "nothing there": ((jnp.sin, jnp.sin), ow.GraphError, "nothing in '.*' is computed as sin does"),
    "nothing computed": ((lambda x: x, jnp.sin), ow.ArgumentError, "returns what no op of it computes"),
    "an argument of no use": (
        (lambda x, y: swish(x), swish),
        ow.ArgumentError,
        "does not use its argument 1",
    ),
    "no functions": ((swish, 3.0), ow.ArgumentError, "expected functions of arrays"),
    "no pattern": (([], swish), ow.ArgumentError, "was given no pattern"),
    "not traced alone": ((lambda x: x @ x, jnp.sin), ow.TraceError, r"Say what it is called with.*like="),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls_are_explained(case):
    given, error, text = WRONG[case]
    with pytest.raises(error, match=f"(?s){text}"):
        ow.rewrite(ow.trace(*LOSS), *given)


def test_a_tolerance_is_a_part_of_the_largest_number():
    program = ow.trace(*LOSS)

    def near(x):
        return swish(x) * 1.001

    with pytest.raises(ow.ArgumentError, match=r"tolerance=0\.01 of the largest number"):
        ow.rewrite(program, swish, near)
    ow.rewrite(program, swish, near, tolerance=0.01)
    for wrong in (-1, "0.1", math.nan):
        with pytest.raises(ow.ArgumentError, match="tolerance is"):
            ow.rewrite(program, swish, near, tolerance=wrong)


def test_where_nothing_is_finite_nothing_was_compared():
    def never(x):
        return jnp.log(-jnp.exp(x)) ** 2

    with pytest.raises(ow.ArgumentError, match="no finite number"):
        ow.rewrite(ow.trace(lambda w: jnp.sum(never(w)), jnp.asarray(W)), never, lambda x: x * jnp.nan)


def test_like_products_become_one():
    def loss(params, x):
        q = jnp.tanh(x @ params[0])
        z = q * 2  # read before the second product is computed
        k, v = x @ params[1], x @ params[2]
        return jnp.sum(z * k) + jnp.sum(jnp.sin(v) * k)

    def apart(x, a, b, c):
        return x @ a, x @ b, x @ c

    def at_once(x, a, b, c):
        return tuple(jnp.split(x @ jnp.concatenate([a, b, c], axis=1), 3, axis=1))

    params, x = jnp.asarray(np.stack([W, W + 1, W - 1])), jnp.asarray(X)
    program = minimized(loss, params, x)
    like = (jnp.ones((2, 2)),) * 4
    assert len(ow.graph.matches_of(program, apart, like=like)) == 1
    new = ow.rewrite(program, apart, at_once, like=like)
    assert kinds(new).count("dot_general") == 1
    np.testing.assert_allclose(trained(new, params, x), trained(program, params, x), rtol=1e-4)


def test_places_that_need_each_other_are_not_both_replaced():
    def loss(w, x):
        a, b = jnp.sin(x @ w), jnp.cos(x)
        return jnp.sum(jnp.cos(a)) + jnp.sum(jnp.sin(b))

    program = minimized(loss, *LOSS[1:])
    new = ow.rewrite(
        program,
        lambda x, y: (jnp.sin(x), jnp.cos(y)),
        lambda x, y: (jnp.cos(x - np.pi / 2), jnp.sin(y + np.pi / 2)),
    )
    np.testing.assert_allclose(trained(new, *LOSS[1:]), trained(program, *LOSS[1:]), rtol=1e-4)


def test_a_replacement_that_changes_between_calls_is_compared_each_time():
    program = ow.SGD(0.1).minimize(lambda w, x: jnp.mean(jnp.tanh(x @ w)), jnp.ones((4, 3)), jnp.ones((2, 4)))
    scale = [1.0]

    def replacement(h):
        return scale[0] * (2 * jax.nn.sigmoid(2 * h) - 1)

    ow.rewrite(program, jnp.tanh, replacement)
    scale[0] = 2.0
    with pytest.raises(ow.ArgumentError, match="computes something else"):
        ow.rewrite(program, jnp.tanh, replacement)


def test_a_place_that_reads_what_it_computes_is_left_alone():
    def loss(w, x):
        h, other = jnp.tanh(x @ w), x @ w.T
        return jnp.mean(h * (h + 1)) + jnp.mean(jnp.tanh(other) * (x + 1))

    program = ow.trace(loss, jnp.ones((4, 4)), jnp.ones((2, 4)))
    (match,) = ow.graph.matches_of(program, lambda a, b: jnp.tanh(a) * (b + 1))
    assert program["x"] in match.inputs


def test_another_length_is_compared_as_well():
    program = minimized(lambda w, x: jnp.mean(jnp.tanh(x @ w)), *LOSS[1:])
    new = ow.rewrite(program, lambda x: jnp.mean(x), lambda x: jnp.sum(x) / 15, like=jnp.ones((2, 2)))
    step = ow.compile(new)
    state = step.init(jnp.asarray(W))
    with pytest.raises(ow.ArgumentError, match=r"With float32\[3,3\], on random numbers"):
        step(state, jnp.asarray(X[:3]))


OTHER = {
    "a bound": (lambda x: jnp.clip(x, 0, 6), lambda x: jnp.maximum(x, 0)),
    "a far branch": (lambda x: jnp.where(jnp.abs(x) < 10, x * x, 20 * jnp.abs(x)), lambda x: x * x),
    "an overflow": (
        lambda x: jnp.log1p(jnp.exp(-jnp.abs(x))),
        lambda x: jnp.log(jnp.exp(jnp.abs(x)) + 1) - jnp.abs(x),
    ),
    "a rounding": (jnp.tanh, lambda x: jnp.tanh(x.astype(jnp.bfloat16)).astype(x.dtype)),
}


@pytest.mark.parametrize("case", OTHER)
def test_what_differs_at_some_numbers_alone_is_refused(case):
    pattern, other = OTHER[case]
    program = ow.trace(lambda w, x: jnp.sum(pattern(x @ w)), *LOSS[1:])
    with pytest.raises(ow.ArgumentError, match="computes something else"):
        ow.rewrite(program, pattern, other)


@pytest.mark.parametrize("other", [lambda i: i, lambda i: jnp.abs(i) * i])
def test_whole_numbers_are_drawn_large_and_negative(other):
    program = ow.trace(lambda w, i: jnp.sum(w * (i * i)), jnp.ones(3), jnp.ones(3, int))
    with pytest.raises(ow.ArgumentError, match="computes something else"):
        ow.rewrite(program, lambda i: i * i, other, like=jnp.ones(2, int))


def test_a_place_within_a_loop_has_a_name_of_its_own():
    def loss(w, x):
        return jnp.sum(lax.fori_loop(0, 2, lambda _, x: swish(x), swish(x @ w)))

    program = ow.trace(loss, *LOSS[1:])
    names = [match.name for match in ow.graph.matches_of(program, swish)]
    assert names == ["mul", "scan_1/mul"] or names[1].endswith("/mul")
    for name, left in zip(names, ([0, 1], [1, 0]), strict=True):
        new = ow.rewrite(program, swish, by_tanh, where=name)
        outside = [op.type for op in new.ops].count("logistic")
        assert [outside, kinds(new).count("logistic") - outside] == left


def test_a_program_is_built_again_under_a_trace():
    step = ow.compile(ow.rewrite(minimized(*LOSS), swish, by_tanh))
    state = step.init(jnp.asarray(W))
    x = jnp.asarray(X[:2])
    _, found = jax.jit(lambda state, x: step.function(state, x))(state, x)
    np.testing.assert_allclose(found.loss, LOSS[0](jnp.asarray(W), x), rtol=1e-5)
