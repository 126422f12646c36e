"""Every op belongs to a forward op, by what it says or by the flow of values."""

import jax
import jax.numpy as jnp

import onward as ow
from onward.core.homes import scopes


def test_scopes_of_rules_and_collectives():
    def loss(params, x):
        for i, w in enumerate(params):
            with jax.named_scope(f"layer_{i}"):
                x = jnp.tanh(x @ w)
        return jnp.mean(x)

    optimizer = ow.Adam(0.1, rules=[ow.ClipByNorm(1.0)])
    program = optimizer.minimize(loss, [jnp.eye(4)] * 2, jnp.ones((8, 4)))
    found = scopes(ow.replicate(program, devices=8))
    where = {}
    for op, home in found.items():
        where.setdefault(op.type, []).append(home)
    assert sorted(where["adam"]) == ["layer_0", "layer_1"]
    assert sorted(where["tanh_grad"]) == ["layer_0", "layer_1"]
    assert {"layer_0", "layer_1"} <= set(where["all_mean"])
    assert where["count"] == [""]


def test_gradient_ops_belong_to_what_they_differentiate():
    program = ow.Adam(0.1).minimize(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2), jnp.eye(3), jnp.ones((2, 3)))
    found = ow.graph.homes(program)
    for op in program.ops:
        if op.of is not None:
            assert op.of in found[op].outputs
        if op.made_by is ow.Pass.FORWARD:
            assert found[op] is op
    (update,) = (op for op in program.ops if op.type == "adam")
    assert found[update].type == "dot_general"


def test_what_updates_several_parameters_belongs_to_none():
    program = ow.LBFGS().minimize(lambda p: jnp.sum(jnp.sin(p[0])) + jnp.sum(p[1] ** 2), [jnp.ones(3)] * 2)
    found = ow.graph.homes(program)
    across = [op for op in program.ops if op.update is ow.UpdateType.ACROSS and len(op.outputs) > 4]
    assert across
    assert all(found[op] is None for op in across)


def test_a_sum_of_gradients_belongs_where_it_is_read():
    def loss(w, x):
        with jax.named_scope("early"):
            x = jnp.tanh(x @ w)
        with jax.named_scope("late"):
            return jnp.sum(jnp.sin(x) * jnp.cos(x))

    program = ow.SGD(0.1).minimize(loss, jnp.eye(3), jnp.ones((2, 3)))
    (total,) = (op for op in program.ops if op.type == "sum")
    assert scopes(program)[total] == "early"


def test_a_loop_of_micro_batches_is_the_home_of_nothing():
    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2), {"accuracy": jnp.mean(x[:, 0] > 0)}  # divided after the loop

    params, x = [0.9 * jnp.eye(4)] * 24, jnp.arange(32.0).reshape(8, 4)
    program = ow.Adam(0.1).minimize(loss, params, x, has_aux=True)
    results = []
    for given in (program, ow.accumulate(program, 4)):
        step = ow.compile(given)  # the gradients of its updates are stacked
        results.append(step(step.init(params), x)[1].value)
    assert results[0][1]["accuracy"] == results[1][1]["accuracy"] == 7 / 8
    assert abs(results[0][0] - results[1][0]) < 1e-6
