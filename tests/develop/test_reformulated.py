"""``reformulated``: each rule computes what the op computed before, wherever such an op stands."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tests.compiled import at_once

import onward as ow
from onward.core.jaxprs.body import body_of
from onward.core.jaxprs.patterns import primitives_in, windows_of
from onward.core.jaxprs.products import in_other_order
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
