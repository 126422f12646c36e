"""``reformulated``: each rule computes what the op computed before, wherever such an op stands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tests.compiled import at_once

import onward as ow
from onward.core.jaxprs import products
from onward.core.jaxprs.body import body_of
from onward.core.jaxprs.edited import rewritten
from onward.core.jaxprs.patterns import primitives_in, windows_of
from onward.core.jaxprs.products import in_other_order, turned_first
from onward.derive.differentiate import rule_for
from onward.develop.rewrite.formulations import reformulated, reformulated_ops
from onward.develop.rewrite.windows import touching_windows

pytestmark = pytest.mark.usefixtures("optimized")
SHAPES = [((2, 4, 6, 3), (1, 2, 2, 1)), ((2, 5, 7, 2), (1, 2, 3, 1)), ((3, 9), (2, 3)), ((7,), (4,))]


def pool(window, strides=None, padding="VALID"):
    def largest(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, window, strides or window, padding)

    return largest


def gradient(function, shape, dtype=jnp.float32):
    forward = body_of(lambda x: [function(x)], jax.ShapeDtypeStruct(shape, dtype))
    body = rule_for(forward, [0], [0]).backward  # reads x, then g
    assert [t.shape for t in body.in_types] == [shape, forward.out_types[0].shape]
    return body


def values(shape, dtype=np.float32, seed=0):
    """Few different numbers, so that most windows hold the largest one more than once."""
    return np.random.default_rng(seed).integers(-2, 3, shape).astype(dtype)


def results(rule, body, *arguments):
    """What a rule gives, and what the op gave before."""
    faults = {}
    found = at_once({"rule": (rule, *arguments), "body": (body, *arguments)}, faults)
    assert not faults
    return found["rule"][0], found["body"][0]


def first_largest(x, g, window):
    """The gradient, one window at a time."""
    found = np.zeros_like(x)
    for place in np.ndindex(g.shape):
        corner = tuple(slice(i * n, (i + 1) * n) for i, n in zip(place, window, strict=True))
        at = np.unravel_index(np.argmax(x[corner]), window)
        found[corner][at] = g[place]
    return found


@pytest.mark.parametrize(("shape", "window"), SHAPES)
def test_the_largest_of_touching_windows(shape, window):
    body = body_of(lambda x: [pool(window)(x)], jax.ShapeDtypeStruct(shape, np.float32))
    rule = touching_windows(body)
    assert "reduce_window_max" not in primitives_in(rule)
    np.testing.assert_array_equal(*results(rule, body, values(shape)))


@pytest.mark.parametrize(("shape", "window"), SHAPES)
def test_its_gradient_goes_to_the_first_of_equal_numbers(shape, window):
    body = gradient(pool(window), shape)
    rule = touching_windows(body)
    assert "select_and_scatter_add" not in primitives_in(rule)
    x = values(shape)
    g = values(body.in_avals[1].shape, seed=1) + 10
    found, expected = results(rule, body, x, g)
    np.testing.assert_array_equal(found, first_largest(x, g, window))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("strange", [np.nan, np.inf, -np.inf, -0.0])
def test_strange_numbers_are_treated_alike(strange):
    window = (2, 3)
    x = values((4, 6))
    x[::2, 1::2] = strange
    x[2:, 3:] = strange
    forward = body_of(lambda x: [pool(window)(x)], x)
    np.testing.assert_array_equal(*results(touching_windows(forward), forward, x))
    body = gradient(pool(window), x.shape)
    g = np.arange(1, 5, dtype=np.float32).reshape(2, 2)
    np.testing.assert_array_equal(*results(touching_windows(body), body, x, g))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_low_precision(dtype):
    x = jnp.asarray(values((2, 4)), dtype)
    body = gradient(pool((1, 2)), x.shape, x.dtype)
    g = jnp.ones((2, 2), dtype)
    found, expected = results(touching_windows(body), body, x, g)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))


@pytest.mark.parametrize(
    ("window", "strides", "padding"),
    [((3,), (2,), "VALID"), ((2,), (2,), ((1, 1),)), ((1,), (1,), "VALID"), ((32,), (32,), "VALID")],
)
def test_other_windows_are_left_alone(window, strides, padding):
    function = pool(window, strides, padding)
    assert touching_windows(body_of(lambda x: [function(x)], jnp.ones(64))) is None
    assert touching_windows(gradient(function, (64,))) is None


def test_other_ops_are_left_alone():
    assert windows_of(body_of(lambda x: [x * 2], jnp.ones(3))) is None
    sums = body_of(lambda x: [lax.reduce_window(x, 0.0, lax.add, (2,), (2,), "VALID")], jnp.ones(4))
    assert touching_windows(sums) is None


def network(w, x):
    h = jax.nn.relu(x * w)
    return jnp.sum(pool((1, 2, 2, 1))(h) ** 2)


DATA = jnp.ones(3), jnp.asarray(values((2, 4, 4, 3)))


def test_a_program_changes_bodies_only_and_trains_alike():
    program = ow.SGD(0.1).minimize(network, *DATA)
    new = reformulated(program)
    assert [op.type for op in reformulated_ops(program, "cpu")] == [
        "reduce_window_max",
        "reduce_window_max_grad",
    ]
    for old, op in zip(program.ops, new.ops, strict=True):
        assert (op.type, op.inputs, op.outputs) == (old.type, old.inputs, old.outputs)
    results = []
    for each in (program, new):
        step = ow.compile(each)
        state, out = step(step.init(DATA[0]), DATA[1])
        results.append((out.loss, state.parameters))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    np.testing.assert_allclose(results[0][1], results[1][1], rtol=1e-6)


def test_it_is_for_the_platform_it_is_told():
    program = ow.SGD(0.1).minimize(network, *DATA)
    assert reformulated(program, platform="gpu").ops == program.ops


def test_it_is_replayed_for_a_batch_of_another_length():
    step = ow.compile(reformulated(ow.SGD(0.1).minimize(network, *DATA)))
    _, out = step(step.init(DATA[0]), DATA[1][:1])
    assert step.traces == 1
    expected = jax.jit(network)(DATA[0], DATA[1][:1])
    np.testing.assert_allclose(out.loss, expected, rtol=1e-6)


def test_the_pool_layer_makes_no_windows_where_they_touch():
    def loss(w, x):
        return jnp.sum(ow.layer.pool(w * x, 2))

    program = ow.SGD(0.1).minimize(loss, jnp.ones(3), jnp.ones((2, 5, 4, 3)))
    assert not any("window" in op.type for op in program.ops)
    x = values((2, 5, 4, 3))
    np.testing.assert_array_equal(ow.layer.pool(jnp.asarray(x), 2), pool((1, 2, 2, 1))(x))


def whole(*shape):
    """Whole numbers, whose products and sums have no rounding."""
    return jnp.asarray(values(shape, seed=len(shape)))


def test_a_gradient_that_sums_over_several_axes_is_a_product_without_a_transpose():
    x, w, g = whole(2, 3, 4), whole(4, 5), whole(2, 3, 5)

    def both(x, w, g):
        with jax.default_matmul_precision("highest"):
            return jax.vjp(lambda x, w: x @ w, x, w)[1](g)

    body = body_of(both, x, w, g)
    exchanged = in_other_order(body)
    assert "transpose" in set(primitives_in(body))
    assert "transpose" not in set(primitives_in(exchanged))
    assert exchanged.out_types == body.out_types
    for found, expected in zip(exchanged(x, w, g), body(x, w, g), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_products_that_are_no_such_gradient_stay():
    x, g = whole(2, 3, 4), whole(2, 3, 5)

    def product(x, g, axes=(0, 1)):
        return lax.dot_general(g, x, ((axes, axes), ((), ())))

    def read_twice(x, g):
        found = product(x, g)
        return [found.T, found + 1]

    def given_out(x, g):
        found = product(x, g)
        return [found.T, found]

    others = {
        "over one axis": lambda x, g: [product(x[0], g[0], (0,)).T],
        "another order of axes": lambda x, g: [product(x[..., None], g).transpose(2, 0, 1)],
        "axes side by side": lambda x, g: [lax.dot_general(g, x, (((1,), (1,)), ((0,), (0,)))).mT],
        "not transposed": lambda x, g: [product(x, g)],
        "read by others": read_twice,
        "given out as it is": given_out,
    }
    assert [name for name, f in others.items() if in_other_order(body_of(f, x, g)) is not None] == []


def test_the_gradient_of_every_weight_of_a_network_is_rewritten():
    def loss(ws, x):
        return jnp.mean((jnp.tanh(x @ ws[0]) @ ws[1]) ** 2)

    ws, x = [jnp.ones((4, 5)), jnp.ones((5, 3))], jnp.ones((2, 3, 4))
    program = ow.append_backward(ow.trace(loss, ws, x))
    assert [op.type for op in reformulated_ops(program, "cpu")] == ["dot_general_grad"] * 2
    assert reformulated_ops(reformulated(program), "cpu") == () == reformulated_ops(program, "gpu")


def weight_gradient(x, g):
    return lax.dot_general(g, x, (((0, 1), (0, 1)), ((), ()))).T


def summed(f, *values):
    """What two turns of a loop add up."""
    return lax.fori_loop(0, 2, lambda _, total: total + f(*values), jnp.zeros_like(f(*values)))


WITHIN = {
    "scan": lambda f, *v: lax.scan(lambda c, _: (c, f(*v)), 0.0, None, length=2)[1],
    "while": lambda f, *v: lax.while_loop(
        lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + f(*v)), (0, jnp.ones_like(f(*v)))
    )[1],
    "one of two branches": lambda f, *v: lax.cond(v[0].sum() > 0, lambda: 2 * f(*v), lambda: f(*v)),
    "checkpoint": lambda f, *v: jax.checkpoint(lambda *v: 2 * f(*v))(*v),
    "what a turn hands on": lambda f, *v: lax.scan(lambda c, _: (c, f(*c)), v, None, length=2)[1],
    "a checkpoint that hands on": lambda f, *v: jax.checkpoint(lambda *v: (*v, f(*v)))(*v)[-1],
    "a linear solve": lambda f, *v: lax.custom_linear_solve(
        lambda x: x + 0 * f(*v), f(*v), lambda matvec, b: b, symmetric=True
    ),
    "a loop in a loop": lambda f, *v: lax.map(lambda i: i * summed(f, *v), jnp.arange(2.0)),
}


@pytest.mark.parametrize("within", WITHIN.values(), ids=WITHIN)
@pytest.mark.parametrize(
    ("rule", "function", "given", "gone"),
    [
        (in_other_order, weight_gradient, (whole(2, 3, 4), whole(2, 3, 5)), "transpose"),
        (touching_windows, pool((2, 2)), (whole(4, 6),), "reduce_window_max"),
    ],
    ids=["product", "windows"],
)
def test_what_an_op_runs_is_rewritten_too(within, rule, function, given, gone):
    body = body_of(lambda *v: [within(function, *v)], *given)
    found = rewritten(body, rule)
    assert gone in {call.primitive for call in body.calls_within}
    assert gone not in {call.primitive for call in found.calls_within}
    assert found.out_types == body.out_types
    np.testing.assert_array_equal(*results(found, body, *given))
    assert rewritten(found, rule) is None


def test_the_gradient_of_a_weight_in_a_loop_is_rewritten():
    def loss(ws, x):
        return jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2)

    program = ow.SGD(0.1).minimize(loss, jnp.ones((3, 4, 4)), jnp.ones((2, 3, 4)))
    assert [op.type for op in reformulated_ops(program, "cpu")] == ["scan_grad"]
    assert reformulated_ops(reformulated(program), "cpu") == ()


def test_a_loop_over_micro_batches_stays_one():
    program = ow.accumulate(ow.SGD(0.1).minimize(network, *DATA), 2)
    (loop,) = (op for op in reformulated(program).ops if op.type == "accumulate")
    (before,) = (op for op in program.ops if op.type == "accumulate")
    assert "reduce_window_max" in {call.primitive for call in before.body.calls_within}
    assert "reduce_window_max" not in {call.primitive for call in loop.body.calls_within}
    assert (loop.attributes, loop.subprograms) == (before.attributes, before.subprograms)


@pytest.mark.parametrize(
    ("x", "g"),
    [((6, 8), (6, 2)), ((6, 2), (6, 8)), ((2, 3, 8), (2, 3, 1)), ((2, 3, 2), (2, 3, 8))],
    ids=["left", "right", "left, two axes", "right, two axes"],
)
@pytest.mark.parametrize("exchanged", [False, True])
def test_a_product_with_one_long_side_is_turned_before(monkeypatch, x, g, exchanged):
    monkeypatch.setattr(products, "_WORTH", 0)
    x, g, axes = whole(*x), whole(*g) + 1, tuple(range(len(x) - 1))

    def product(x, g):
        pair = (g, x) if exchanged else (x, g)
        return [lax.dot_general(*pair, ((axes, axes), ((), ())), precision=("highest", "default"))]

    body = body_of(product, x, g)
    found = turned_first(body)
    (before,), after = body.calls, [call for call in found.calls if call.primitive == "dot_general"]
    (over, _), _ = after[0].params["dimension_numbers"]
    assert over == (1,)
    longer = 0 if before.operands[0].shape[-1] == 8 else 1
    assert after[0].params["precision"][0] is before.params["precision"][longer]
    assert found.out_types == body.out_types
    np.testing.assert_array_equal(*results(found, body, x, g))


def test_products_that_gain_nothing_by_it_stay(monkeypatch):
    x, g = jnp.ones((6, 8)), jnp.ones((6, 2))
    over = lambda axes: lambda x, g: [lax.dot_general(x, g, (axes, ((), ())))]  # noqa: E731
    first = over(((0,), (0,)))
    assert turned_first(body_of(first, x, g)) is None  # few multiplications
    monkeypatch.setattr(products, "_WORTH", 0)
    assert turned_first(body_of(first, x, g)) is not None
    assert turned_first(body_of(first, x, jnp.ones((6, 3)))) is None  # not four times as long
    assert turned_first(body_of(first, x.astype("bfloat16"), g.astype("bfloat16"))) is None
    assert turned_first(body_of(over(((1,), (1,))), x, jnp.ones((2, 8)))) is None
    assert turned_first(body_of(over(((1,), (0,))), x.T, g)) is None
    assert turned_first(body_of(lambda x, g: [x * 2], x, g)) is None
    assert turned_first(body_of(first, x, x)) is None
    for none in ((), (8,)):  # a product of two numbers, and of all pairs
        given = jnp.ones(none), jnp.ones((2,) if none else ())
        assert turned_first(body_of(over(((), ())), *given)) is None
