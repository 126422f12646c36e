"""Costs against closed forms, and against what XLA counts in a whole Program."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import onward as ow
from onward.core.flops import flops
from onward.core.jaxprs.body import body_of
from onward.core.lower import lower

pytestmark = pytest.mark.usefixtures("optimized")


@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (2, 3, 5), (16, 8, 4)])
def test_dot_and_both_gradients(m, k, n):
    def loss(params, x):
        return jnp.sum((x @ params["a"]) @ params["b"])

    params = {"a": jnp.ones((k, n)), "b": jnp.ones((n, k))}
    program = ow.append_backward(ow.trace(loss, params, jnp.ones((m, k))))
    forward = [ow.cost(op).flops for op in program.ops if op.type == "dot_general"]
    backward = [ow.cost(op).flops for op in program.ops if op.type == "dot_general_grad"]
    assert forward == [2 * m * k * n] * 2
    assert backward == [2 * 2 * m * k * n, 2 * m * k * n]  # the first layer's input needs no gradient


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_batched_products(batch):
    a, b = jnp.ones((*batch, 4, 5)), jnp.ones((*batch, 5, 6))
    program = ow.trace(lambda a, b: jnp.matmul(a, b), a, b)
    assert ow.cost(program).flops == 2 * int(np.prod(batch, initial=1)) * 4 * 5 * 6


def pairs(size, kernel, stride, pad, lhs_dilation, rhs_dilation):
    """By hand: the places of a window, over all windows, that lie on a number."""
    low, high = pad
    wide = (size - 1) * lhs_dilation + 1
    reach = (kernel - 1) * rhs_dilation + 1
    count = 0
    for start in range(-low, wide + high - reach + 1, stride):
        for k in range(kernel):
            at = start + k * rhs_dilation
            count += 0 <= at < wide and at % lhs_dilation == 0
    return count


CONVOLUTIONS = [
    (stride, pad, lhs, rhs, groups)
    for stride, pad, lhs, rhs, groups in itertools.product(
        (1, 2, 3), ((0, 0), (1, 1), (2, 1)), (1, 2), (1, 2), (1, 2)
    )
    if stride == 1 or lhs == 1
]


@pytest.mark.parametrize(("stride", "pad", "lhs", "rhs", "groups"), CONVOLUTIONS)
def test_convolution(stride, pad, lhs, rhs, groups):
    image, kernel = jnp.ones((2, 4, 9, 7)), jnp.ones((6, 4 // groups, 3, 2))

    def convolve(w, x):
        return lax.conv_general_dilated(
            x, w, (stride, 1), (pad, pad), (lhs, 1), (rhs, 1), feature_group_count=groups
        )

    met = pairs(9, 3, stride, pad, lhs, rhs) * pairs(7, 2, 1, pad, 1, 1)
    found = ow.cost(ow.trace(convolve, kernel, image)).flops
    assert found == 2 * 2 * 6 * (4 // groups) * met


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_both_gradients_of_a_convolution_meet_as_often_as_it(stride, padding):
    """Each product of a pixel and a weight gives one of each gradient, whatever the padding."""

    def loss(params, x):
        for w in params:
            x = lax.conv(x, w, (stride, stride), padding)
        return jnp.sum(x)

    params = [jnp.ones((5, 3, 3, 3)), jnp.ones((2, 5, 3, 3))]
    program = ow.append_backward(ow.trace(loss, params, jnp.ones((2, 3, 16, 16))))
    first, second = (ow.cost(op).flops for op in program.ops if op.type == "conv_general_dilated")
    late, early = (ow.cost(op).flops for op in program.ops if op.type == "conv_general_dilated_grad")
    assert (late, early) == (2 * second, first)


@pytest.mark.parametrize("length", [0, 1, 100])
def test_a_loop_costs_its_length_times_its_body(length):
    def loss(w, x):
        return lax.scan(lambda c, _: (c @ w, None), x, None, length=length)[0]

    program = ow.trace(loss, jnp.ones((4, 4)), jnp.ones((2, 4)))
    assert ow.cost(program).flops == length * 2 * 2 * 4 * 4


def test_a_loop_in_a_loop():
    def inner(c, _):
        return lax.scan(lambda c, _: (c * 2, None), c, None, length=3)[0], None

    program = ow.trace(lambda x: lax.scan(inner, x, None, length=5)[0], jnp.ones(7))
    assert ow.cost(program).flops == 3 * 5 * 7


def test_the_dearest_branch_counts():
    def choose(x, which):
        return lax.cond(which, lambda x: x @ x, lambda x: x + 1, x)

    (op,) = (op for op in ow.trace(choose, jnp.ones((4, 4)), jnp.asarray(True)).ops if op.type == "cond")
    assert ow.cost(op).flops == 2 * 4**3


def test_a_while_loop_counts_as_one_turn_and_says_so():
    program = ow.trace(lambda x: lax.while_loop(lambda x: x[0] < 9, lambda x: x + 1, x), jnp.ones(4))
    found = ow.cost(program)
    assert found.endless
    assert found.flops == 4 + 1
    assert not ow.cost(ow.trace(jnp.sum, jnp.ones(3))).endless


def test_a_rolled_network_costs_what_it_did():
    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    program = ow.SGD(0.1).minimize(loss, [jnp.eye(8)] * 12, jnp.ones((4, 8)))
    first_gradient = 2 * 4 * 8 * 8  # the loop gives that of its first input as well
    assert ow.cost(ow.roll(program)).flops == ow.cost(program).flops + first_gradient


def test_rows_of_a_table_are_read_not_the_table():
    table, ids = jnp.ones((1000, 8)), jnp.arange(4)
    (gather,) = (op for op in ow.trace(lambda t, i: t[i], table, ids).ops if op.type == "gather")
    assert ow.cost(gather).read < 8 * 4 * 8


def test_what_devices_exchange():
    def loss(w, x):
        return jnp.mean(x @ w)

    program = ow.SGD(0.1).minimize(loss, jnp.ones((16, 4)), jnp.ones((8, 16)))
    merged = ow.replicate(program, devices=8)
    (gradient,) = (op for op in merged.ops if op.type == "all_mean" and op.outputs[0].size == 64)
    assert ow.cost(gradient).exchanged == 64 * 4
    assert ow.cost(program).exchanged == 0


def test_costs_add_and_multiply():
    one = ow.typing.Cost(1, 2, 3, 4, 1)
    assert one + one == one * 2 == ow.typing.Cost(2, 4, 6, 8, 2)
    assert (one + ow.typing.Cost(endless=True)).endless
    assert one.bytes == 5


def mlp():
    x, y = ow.data("x", (None, 20)), ow.data("y", (None,), "int32")
    for _ in range(3):
        x = ow.layer.fc(x, 32, act="relu")
    return ow.layer.cross_entropy(ow.layer.fc(x, 10), y)


def elementwise():
    x = ow.data("x", (None, 64))
    w = ow.parameter("w", (64,))
    return jnp.mean(jnp.exp(-((x * w) ** 2)) + jnp.tanh(x) * jnp.log1p(w**2) / (1 + jnp.abs(x)))


def convolutional():
    x, y = ow.data("x", (None, 12, 12, 3)), ow.data("y", (None,), "int32")
    x = ow.layer.batch_norm(ow.layer.conv(x, 8, 3, act="relu"))
    x = ow.layer.conv(ow.layer.pool(x, 2), 16, 3, stride=2, act="tanh")
    return ow.layer.cross_entropy(ow.layer.fc(x.reshape(x.shape[0], -1), 10), y)


def transformer():
    x, y = ow.data("x", (None, 8, 16)), ow.data("y", (None,), "int32")
    for _ in range(2):
        q, k, v = (ow.layer.fc(x, 16) for _ in range(3))
        scores = jax.nn.softmax(q @ jnp.swapaxes(k, 1, 2) / 4.0)
        x = ow.layer.layer_norm(x + scores @ v)
        x = x + ow.layer.fc(ow.layer.fc(x, 64, act="gelu"), 16)
    return ow.layer.cross_entropy(ow.layer.fc(x.mean(axis=1), 10), y)


def table():
    ids, y = ow.data("ids", (None, 5), "int32"), ow.data("y", (None,), "int32")
    rows = ow.layer.embedding(ids, 50, 16)
    return ow.layer.cross_entropy(ow.layer.fc(rows.mean(axis=1), 10), y)


MODELS = [mlp, elementwise, convolutional, transformer, table]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
@pytest.mark.parametrize("passes", ["forward", "sgd", "adamw"])
def test_totals_are_those_of_xla(model, passes):
    """Before XLA rewrites anything: operations as in the text that JAX gives it."""
    program = ow.trace(model, batch_size=8)
    if passes != "forward":
        program = {"sgd": ow.SGD(0.1), "adamw": ow.AdamW(1e-3)}[passes].minimize(program)
    wanted = (*program.outputs, *program.next_state.values())
    given = ([jax.ShapeDtypeStruct(v.shape, v.dtype) for v in vs] for vs in (program.state, program.inputs))
    counted = jax.jit(lower(program, wanted)).lower(*given).cost_analysis()
    total = counted["flops"] + counted.get("transcendentals", 0)
    assert ow.cost(program).flops == pytest.approx(total, rel=0.05)
    assert ow.cost(program).transcendentals == pytest.approx(counted.get("transcendentals", 0), rel=0.05)


def only(function, *args):
    (op,) = (op for op in ow.trace(function, *args).ops if ow.cost(op).flops)
    return ow.cost(op)


def test_what_only_moves_is_free_however_it_is_called():
    @jax.custom_vjp
    def turned(x):
        return x.T

    turned.defvjp(lambda x: (x.T, None), lambda _, g: (g.T,))
    x = jnp.ones((10, 4))
    for function in (turned, lambda x: jnp.tile(x, (2, 2)), lambda x: jax.jit(lambda y: y.T)(x)):
        assert ow.cost(ow.trace(function, x)).flops == 0


@pytest.mark.parametrize(("power", "products"), [(1, 0), (4, 2), (7, 4), (-4, 3)])
def test_a_power_costs_its_products_and_a_quotient_below_0(power, products):
    program = ow.trace(lambda x: jax.lax.integer_pow(x, power), jnp.ones(10))
    assert ow.cost(program).flops == 10 * products


@pytest.mark.parametrize("how", ["add", "min", "max", "multiply", "subtract"])
def test_scatters_cost_what_is_scattered(how):
    places = jnp.array([1, 2])
    program = ow.trace(lambda x: getattr(x.at[places], how)(jnp.ones((2, 4))), jnp.ones((100, 4)))
    (op,) = (op for op in program.ops if "scatter" in op.type)
    assert ow.cost(op).flops == 2 * 4


def test_ragged_products():
    groups = jnp.array([3, 5], jnp.int32)
    found = only(lambda x, w: lax.ragged_dot(x, w, groups), jnp.ones((8, 4)), jnp.ones((2, 4, 6)))
    assert found.flops == 2 * 8 * 4 * 6


def test_solving_costs_what_the_solver_does():
    n = 16
    program = ow.trace(jnp.linalg.solve, jnp.eye(n), jnp.ones((n, n)))
    triangular, factors = 2 * n**3, 2 * n**3 // 3
    assert ow.cost(program).flops == pytest.approx(triangular + factors, rel=0.1)


def test_a_long_convolution_is_counted_without_a_table_of_all_pairs():
    image, kernel = jnp.ones((1, 1, 20_000)), jnp.ones((1, 1, 3_000))
    program = ow.trace(lambda w, x: lax.conv_general_dilated(x, w, (1,), "VALID"), kernel, image)
    assert ow.cost(program).flops == 2 * 17_001 * 3_000


def test_factorizations_by_their_leading_terms():
    x = jnp.eye(12)
    for function, expected in [
        (lax.linalg.cholesky, 12**3 // 3),
        (lambda x: lax.linalg.triangular_solve(x, x, left_side=True), 12**3),
        (lax.linalg.hessenberg, 10 * 12**3 // 3),
        (lambda x: lax.linalg.tridiagonal(x, lower=True), 4 * 12**3 // 3),
        (lambda x: lax.linalg.householder_product(x, x[0]), 4 * 12**3 // 3),
        (lax.linalg.schur, 25 * 12**3),
        (lax.linalg.eig, 25 * 12**3),
    ]:
        body = body_of(lambda x, function=function: jax.tree.leaves(function(x)), x)
        assert expected in [flops(call) for call in body.calls]


def test_a_sum_of_nothing_costs_nothing():
    program = ow.trace(lambda x: jnp.sum(x[:, 1:], 1), jnp.ones((4, 1)))
    assert [ow.cost(op).flops for op in program.ops if "sum" in op.type] == [0]


@pytest.mark.parametrize("wrong", [3, jnp.sum, None])
def test_no_program_and_no_op(wrong):
    for function in (ow.cost, ow.graph.homes, ow.draw):
        with pytest.raises(ow.ArgumentError, match="expected a Program"):
            function(wrong)
