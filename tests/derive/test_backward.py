"""What the backward pass consists of: higher derivatives, loops, pruning, sums, names, remembered rules."""

import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from tests.compiled import at_once, expect_no, named

import onward as ow
from onward.core.lower import lower
from onward.core.words import Kind, Pass
from onward.derive import differentiate as rules

jitted = partial(jax.jit)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def of_pass(program, made_by):
    return [op for op in program.ops if op.made_by is made_by]


def kinds(program, made_by=Pass.BACKWARD):
    return Counter(op.type for op in of_pass(program, made_by))


def run(program, variables, parameters, *data):
    function = jitted(lower(program, variables))
    return function(jax.tree.leaves(parameters), jax.tree.leaves(data))


def layered(params, x):
    for p in params:
        x = jnp.tanh(x @ p["w"] + p["b"])
    return jnp.mean(x**2)


def layers(count, width=4):
    return [{"w": normal(width, width, seed=i) / 2, "b": normal(width, seed=i)} for i in range(count)]


# Higher derivatives


@jax.custom_vjp
def wave(x):
    return jnp.sin(x) * x


wave.defvjp(lambda x: (jnp.sin(x) * x, x), lambda x, g: (g * (jnp.cos(x) * x + jnp.sin(x)),))


@jax.custom_jvp
def soft_square(x):
    return x**2


@soft_square.defjvp
def _(primals, tangents):
    return soft_square(primals[0]), tangents[0] * jnp.tanh(primals[0]) * primals[0]


V, M = normal(4), normal(4, 4, seed=1)
SERIES = normal(3, 4, seed=2)

SCALARS = {
    "quadratic form": lambda v: v @ M @ v,
    "rosenbrock": lambda v: jnp.sum(100 * (v[1:] - v[:-1] ** 2) ** 2 + (1 - v[:-1]) ** 2),
    "network": lambda v: jnp.sum(jax.nn.softplus(jnp.tanh(M @ v) @ M)),
    "logsumexp": lambda v: jax.scipy.special.logsumexp(M @ v),
    "attention": lambda v: jnp.sum(jax.nn.softmax(jnp.outer(v, v)) @ v),
    "product and gather": lambda v: jnp.prod(v) + jnp.sum(v[jnp.array([0, 2, 2])] ** 3),
    "sort": lambda v: jnp.sort(v) ** 3 @ jnp.arange(4.0),
    "log of a determinant": lambda v: jnp.linalg.slogdet(jnp.diag(v**2 + 1) + jnp.outer(v, v))[1],
    "scan": lambda v: jnp.sum(lax.scan(lambda h, x: (jnp.tanh(M @ h + x * v), h**2), v, SERIES)[1]),
    "scan of cond": lambda v: jnp.sum(
        lax.scan(lambda h, x: (lax.cond(x[0] > 0, jnp.sin, lambda h: h * v, h), x), v**2, SERIES)[0]
    ),
    "cond": lambda v: lax.cond(v[0] > 0, lambda v: jnp.sum(v**3), lambda v: jnp.prod(jnp.exp(v)), v),
    "custom_jvp": lambda v: jnp.sum(soft_square(M @ v) * v),
    "custom_vjp": lambda v: jnp.sum(wave(M @ v) * v),
    "custom_vjp in scan": lambda v: jnp.sum(lax.scan(lambda h, x: (wave(h) + x, h), v, SERIES)[0]),
    "checkpoint": lambda v: jnp.sum(jax.checkpoint(lambda v: jnp.sin(M @ jnp.sin(v)))(v)),
    "nested jit": lambda v: jax.jit(lambda v: jnp.sum(jax.jit(jnp.sin)(v * v)))(v),
}


def hessian_by_jax(name):
    """The Hessian and the gradient, forward over reverse but for a custom_vjp, which does not allow that."""
    again = jax.jacrev if "custom_vjp" in name else jax.jacfwd
    return again(lambda v: (jax.grad(SCALARS[name])(v),) * 2, has_aux=True)


def hessian_of(name):
    """The gradient and, from its gradients in four directions, the Hessian."""
    function = SCALARS[name]
    program = ow.trace(lambda v, direction: (function(v), direction), V, V)
    program, (first,) = ow.gradients(program, program.outputs[0], "v")
    program, (second,) = ow.gradients(program, first, "v", target_gradients=["direction"])
    row = lower(program, [first, second])

    def found(v):
        gradients, rows = lax.map(lambda direction: tuple(row([v], [direction])), jnp.eye(4))
        return gradients[0], rows

    return found


def test_gradients_of_gradients_are_the_hessian():
    derived, faults = {}, {}
    for name in SCALARS:
        with named(name, faults):
            derived[name] = hessian_of(name)
    pairs = at_once(
        {n: (lambda v, n=n, f=f: (f(v), hessian_by_jax(n)(v)), V) for n, f in derived.items()}, faults
    )
    for name, ((gradient, rows), (expected, slope)) in pairs.items():
        with named(name, faults):
            np.testing.assert_allclose(rows, expected, rtol=1e-5, atol=1e-5 * np.max(np.abs(expected)))
            np.testing.assert_allclose(gradient, slope, rtol=1e-5, atol=1e-5)
    expect_no(faults)


POWERS = {
    "sin": jnp.sin,
    "power": lambda x: x**5,
    "composed": lambda x: jnp.exp(jnp.tanh(x)),
    "loop": lambda x: lax.fori_loop(0, 3, lambda _, y: y * x, x),
}


def four_derivatives(function):
    program = ow.trace(lambda x: function(x), jnp.float32(0.7))
    target, found, expected = program.loss, [], [function]
    for _ in range(4):
        program, (target,) = ow.gradients(program, target, "x")
        found.append(target)
        expected.append(jax.grad(expected[-1]))
    run = lower(program, found)
    return lambda x: (run([x], []), [each(x) for each in expected[1:]])


def test_four_derivatives_in_one_program():
    derived, faults = {}, {}
    for name, function in POWERS.items():
        with named(name, faults):
            derived[name] = four_derivatives(function), np.float32(0.7)
    for name, (found, expected) in at_once(derived, faults).items():
        with named(name, faults):
            np.testing.assert_allclose(found, expected, rtol=1e-5)
    expect_no(faults)


# Loops


def recurrent(w, xs):
    return jnp.sum(lax.scan(lambda h, x: (jnp.tanh(h @ w + x), h), xs[0], xs)[0])


def recurrent_twice(w, xs):
    def outer(h, x):
        return lax.scan(lambda h, y: (jnp.tanh(h @ w + y), h.sum()), h, x)

    return jnp.sum(lax.scan(outer, xs[0, 0], xs)[0])


LOOPS = {
    "scan": (recurrent, normal(8, 4), 2),
    "scan, reverse": (lambda w, xs: recurrent(w, xs[::-1]), normal(8, 4), 2),
    "fori_loop": (
        lambda w, x: jnp.sum(lax.fori_loop(0, 8, lambda _, h: jnp.tanh(h @ w), x)),
        normal(4),
        2,
    ),
    "scan with a checkpoint": (
        lambda w, xs: jnp.sum(
            lax.scan(jax.checkpoint(lambda h, x: (jnp.tanh(h @ w + x), None)), xs[0], xs)[0]
        ),
        normal(8, 4),
        2,
    ),
    "two scans": (lambda w, xs: recurrent(w, xs) * recurrent(w, 2 * xs), normal(8, 4), 4),
    "scan in scan": (recurrent_twice, normal(7, 8, 4), 4),
}


def count_of_loops(function, *args):
    return jitted(function).lower(*args).compile().as_text().count(" while(")


@pytest.mark.parametrize("name", LOOPS)
def test_a_gradient_adds_one_loop_for_each_loop(name):
    function, xs, expected = LOOPS[name]
    program = ow.append_backward(ow.trace(function, M, xs))
    (_, gradient), *_ = program.gradients
    assert count_of_loops(lower(program, [program.loss, gradient]), [M], [xs]) == expected
    assert count_of_loops(jax.value_and_grad(function), M, xs) == expected


# What is trained, what is cut off


X = normal(5, 4)


def test_every_op_on_the_path_has_one_gradient_op():
    program = ow.append_backward(ow.trace(layered, layers(3), X))
    forward = {op.outputs[0]: op for op in of_pass(program, Pass.FORWARD)}
    gradient_ops = [op for op in of_pass(program, Pass.BACKWARD) if op.of is not None]
    assert len({op.of for op in gradient_ops}) == len(gradient_ops)
    assert all(op.type == f"{forward[op.of].type}_grad" for op in gradient_ops)
    reached = ow.graph.descendants(program, program.parameters)
    assert {op.of for op in gradient_ops} == {v for v in forward if v in reached}
    assert [op.type for op in of_pass(program, Pass.BACKWARD) if op.of is None] == ["ones"]


def test_gradient_ops_come_in_reverse_and_carry_source_and_scope():
    program = ow.append_backward(ow.trace(layered, layers(2), X))
    position = {v: i for i, op in enumerate(program.ops) for v in op.outputs}
    order = [position[op.of] for op in program.ops if op.of is not None]
    assert order == sorted(order, reverse=True)
    for op in program.ops:
        if op.of is not None:
            made = next(f for f in program.ops if op.of in f.outputs)
            assert (op.scope, op.source) == (made.scope, made.source)
            assert op.source.file == __file__


def test_gradients_are_named_for_people():
    program = ow.append_backward(ow.trace(layered, layers(1), X))
    assert [(p.name, g.name) for p, g in program.gradients] == [
        ("params/0/b", "grad(params/0/b)"),
        ("params/0/w", "grad(params/0/w)"),
    ]
    assert all(g.kind is Kind.GRADIENT for _, g in program.gradients)
    assert program["grad(tanh)"].shape == program["tanh"].shape == (5, 4)


LAST_LAYER = {
    "names": ["params/2/w", "params/2/b"],
    "a pattern": ["*/2/*"],
    "a predicate": [lambda v: v.name.startswith("params/2")],
    "one string": "params/2/?",
}


@pytest.mark.parametrize("chosen", LAST_LAYER.values(), ids=LAST_LAYER)
def test_training_the_last_layer_derives_the_last_layer(chosen):
    program = ow.append_backward(ow.trace(layered, layers(3), X), parameter_list=chosen)
    expected = {"ones": 1, "div_grad": 1, "reduce_sum_grad": 1, "integer_pow_grad": 1, "tanh_grad": 1}
    expected |= {"add_grad": 1, "dot_general_grad": 1, "broadcast_in_dim_grad": 1}
    assert kinds(program) == expected
    assert [p.name for p, _ in program.gradients] == ["params/2/b", "params/2/w"]
    last = next(op for op in program.ops if op.type == "dot_general_grad")
    assert len(last.outputs) == 1, "the gradient of the layer's input is not needed"
    everything = ow.append_backward(ow.trace(layered, layers(3), X))
    assert kinds(everything)["dot_general_grad"] == 3
    found = run(program, [g for _, g in program.gradients], layers(3), X)
    whole = run(everything, [g for _, g in everything.gradients], layers(3), X)
    np.testing.assert_array_equal(found[1], whole[5])


def test_training_the_first_layer_leaves_the_other_weights_out():
    program = ow.append_backward(ow.trace(layered, layers(3), X), parameter_list=["params/0/w"])
    products = [op for op in program.ops if op.type == "dot_general_grad"]
    assert [len(op.outputs) for op in products] == [1, 1, 1]
    assert kinds(program)["broadcast_in_dim_grad"] == 0


CUT = {
    "a name": ["tanh"],
    "a Variable": lambda program: [program["tanh"]],
    "a predicate": [lambda v: v.name == "tanh"],
}


@pytest.mark.parametrize("cut", CUT.values(), ids=CUT)
def test_no_gradient_flows_through_the_no_grad_set(cut):
    program = ow.trace(layered, layers(2), X)
    cut = cut(program) if callable(cut) else cut
    with pytest.warns(ow.UnreachedWarning, match="'params/0/b', 'params/0/w'"):
        program = ow.append_backward(program, no_grad_set=cut)
    assert [p.name for p, _ in program.gradients] == ["params/1/b", "params/1/w"]
    assert kinds(program)["tanh_grad"] == kinds(program)["dot_general_grad"] == 1
    assert not any(v.name == "grad(tanh)" for v in program.variables.values())

    def stopped(params, x):
        return layered(params[1:], lax.stop_gradient(jnp.tanh(x @ params[0]["w"] + params[0]["b"])))

    found = run(program, [g for _, g in program.gradients], layers(2), X)
    expected = jitted(jax.grad(stopped))(layers(2), X)[1]
    np.testing.assert_array_equal(found[1], expected["w"])


def test_a_cut_beside_another_way_leaves_the_other_way():
    program = ow.trace(lambda w: jnp.sum(jnp.sin(w) * jnp.cos(w)), V)
    (_, gradient), *_ = ow.append_backward(program, no_grad_set=["cos"]).gradients
    derived = ow.append_backward(program, no_grad_set=["cos"])
    (found,) = run(derived, [derived["grad(w)"]], V)
    np.testing.assert_allclose(found, np.cos(V) ** 2, rtol=1e-6)
    assert gradient.name == "grad(w)"
    assert "cos_grad" not in kinds(derived)


def test_a_parameter_in_the_no_grad_set_is_not_trained():
    program = ow.trace(layered, layers(1), X)
    program = ow.append_backward(program, no_grad_set=["params/0/w"])
    assert [p.name for p, _ in program.gradients] == ["params/0/b"]
    assert "dot_general_grad" not in kinds(program)


def test_an_unknown_name_is_an_error():
    program = ow.trace(layered, layers(1), X)
    for option in ("parameter_list", "no_grad_set"):
        with pytest.raises(LookupError, match=option):
            ow.append_backward(program, **{option: ["params/0/weight"]})


NOTHING_FLOWS = {
    "stop_gradient": lambda w: lax.stop_gradient(jnp.exp(jnp.sin(w))),
    "a comparison": lambda w: (jnp.sin(w) > 0).astype(jnp.float32),
    "rounding": lambda w: jnp.exp(jnp.round(jnp.sin(w))),
    "an index": lambda w: jnp.argmax(jnp.sin(w)).astype(jnp.float32),
}


@pytest.mark.parametrize("name", NOTHING_FLOWS)
def test_no_gradient_op_where_nothing_flows(name):
    side = NOTHING_FLOWS[name]
    program = ow.append_backward(ow.trace(lambda w: jnp.sum(w * side(w)), V))
    assert kinds(program) == {"ones": 1, "reduce_sum_grad": 1, "mul_grad": 1}
    (product,) = (op for op in program.ops if op.type == "mul_grad")
    assert [v.name for v in product.outputs] == ["grad(w)"]


def carried(w, x):
    (a, b), _ = lax.scan(lambda c, t: ((c[0] * t, c[1] * t), None), (w, x), jnp.arange(1.0, 4.0))
    return jnp.sum(w * b) + jnp.sum(lax.stop_gradient(a))


def chosen(w, x):
    a, b = lax.cond(x[0] > 0, lambda: (x * 2, w * 3), lambda: (x, w))
    return jnp.sum(w * a * lax.stop_gradient(b))


@pytest.mark.parametrize("function", [carried, chosen])
def test_no_gradient_op_without_a_gradient(function):
    """One output depends on the parameter, and only the other one leads to the loss."""
    program = ow.append_backward(ow.trace(function, V, V))
    assert all(op.outputs for op in program.ops)
    assert not {"scan_grad", "cond_grad"} & kinds(program).keys()
    (found,) = run(program, [program["grad(w)"]], V, V)
    np.testing.assert_array_equal(found, jitted(jax.grad(function))(V, V))


# What is saved, and what is added


def test_residuals_are_variables_of_the_forward_op():
    program = ow.append_backward(ow.trace(lambda w: jnp.sum(jnp.sin(w)), V))
    forward, backward = (next(op for op in program.ops if op.type == t) for t in ("sin", "sin_grad"))
    assert [v.name for v in forward.outputs] == ["sin", "saved(sin)"]
    assert set(backward.inputs) == {program["grad(sin)"], forward.outputs[1]}
    assert len(forward.primal.out_types) == 1
    np.testing.assert_allclose(run(program, [forward.outputs[1]], V)[0], np.cos(V), rtol=1e-6)


READS = {
    "add reads nothing": (lambda w, x: w + x, "add_grad", set()),
    "mul reads the other factor": (lambda w, x: w * x, "mul_grad", {"x"}),
    "exp reads its output": (lambda w, x: jnp.exp(w), "exp_grad", {"exp"}),
    "dot reads the other matrix": (lambda w, x: w @ x, "dot_general_grad", {"x"}),
    "where reads the condition": (lambda w, x: jnp.where(x > 0, w, 0.0), "select_n_grad", {"gt"}),
    "sin reads what sin saves": (lambda w, x: jnp.sin(w), "sin_grad", {"saved(sin)"}),
}


@pytest.mark.parametrize("name", READS)
def test_a_gradient_op_reads_what_it_needs(name):
    function, kind, expected = READS[name]
    program = ow.append_backward(ow.trace(lambda w, x: jnp.sum(function(w, x)), V, V))
    (op,) = (op for op in program.ops if op.type == kind)
    assert {v.name for v in op.inputs if v.kind is not Kind.GRADIENT} == expected


SUMS = {
    "a chain": (lambda w, x: jnp.sum(jnp.sin(jnp.exp(w))), []),
    "a value used by two": (lambda w, x: jnp.sum(jnp.sin(w) + jnp.cos(w)), [2]),
    "a value used by four": (lambda w, x: jnp.sum(w + jnp.sin(w) + jnp.cos(w) + jnp.exp(w)), [4]),
    "a value used twice by one": (lambda w, x: jnp.sum(w * w), []),
    "two residual connections": (
        lambda w, x: jnp.sum((h := jnp.sin(w) + w) + jnp.cos(h)),
        [2, 2],
    ),
    "data used twice": (lambda w, x: jnp.sum(w * x + x), []),
    "one way of two is stopped": (lambda w, x: jnp.sum(jnp.sin(w) + lax.stop_gradient(jnp.cos(w))), []),
}


@pytest.mark.parametrize("name", SUMS)
def test_gradients_are_added_where_they_meet(name):
    function, expected = SUMS[name]
    program = ow.append_backward(ow.trace(function, V, V))
    sums = [op for op in program.ops if op.type == "sum"]
    assert [len(op.inputs) for op in sums] == expected
    assert all(len(set(op.inputs)) == len(op.inputs) for op in sums)


def mixed(params, x):
    h, _ = lax.scan(lambda h, t: (jnp.tanh(h @ params[0]["w"] + t), None), x[0], x)
    h = jax.checkpoint(jnp.sin)(lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, h))
    return jnp.sum(jax.nn.relu(h) * jax.nn.softmax(params[0]["b"]))


FORWARD = {
    "layers": (layered, layers(3)),
    "scan, cond, checkpoint": (mixed, layers(1)),
}


@pytest.mark.parametrize("name", FORWARD)
def test_the_forward_pass_comes_back_when_the_backward_pass_is_pruned(name):
    function, parameters = FORWARD[name]
    before = ow.trace(function, parameters, X)
    derived = ow.append_backward(before)
    assert any(op.primal is not None for op in derived.ops)
    after = ow.prune(derived, [derived.loss])
    found = [(op.type, op.inputs, op.outputs, op.primal) for op in after.ops]
    assert found == [(op.type, op.inputs, op.outputs, None) for op in before.ops]
    assert all(a.body is b.body for a, b in zip(after.ops, before.ops, strict=True))
    assert (after.inputs, after.state, after.outputs) == (before.inputs, before.state, before.outputs)
    assert after.gradients == ()


def test_the_forward_pass_comes_back_after_two_derivatives():
    before = ow.trace(lambda w: jnp.sum(jnp.sin(w) * jnp.exp(w)), V)
    program, (first,) = ow.gradients(before, before.loss, "w")
    program, (_,) = ow.gradients(program, first, "w")
    after = ow.prune(program, [before.loss])
    assert [op.body for op in after.ops] == [op.body for op in before.ops]
    once = ow.prune(program, [first])
    assert sum(op.made_by is Pass.BACKWARD for op in once.ops) < sum(
        op.made_by is Pass.BACKWARD for op in program.ops
    )
    np.testing.assert_array_equal(run(once, [first], V)[0], run(program, [first], V)[0])


def test_append_backward_adds_ops_and_changes_none():
    before = ow.trace(layered, layers(2), X)
    kept = before.ops
    derived = ow.append_backward(before)
    assert before.ops is kept
    assert [op.type for op in of_pass(derived, Pass.FORWARD)] == [op.type for op in kept]
    shared = [op for op in kept if op in derived.ops]
    saving = [op for op in derived.ops if op.primal is not None]
    assert len(shared) + len(saving) == len(kept)
    assert (derived.state, derived.inputs, derived.outputs) == (before.state, before.inputs, before.outputs)


# Parameters the loss does not reach


def test_an_unreached_parameter_is_named_and_not_updated():
    params = {"w": V, "lost": 2 * V}
    with pytest.warns(ow.UnreachedWarning, match="'lost'") as found:
        program = ow.Momentum(0.1, 0.9).minimize(lambda p: jnp.sum(p["w"] ** 2), params)
    assert found[0].filename == __file__
    assert [p.name for p, _ in program.gradients] == ["w"]
    assert program["lost"] not in program.next_state
    assert not any(v.name.startswith("lost/") for v in program.state)
    step = ow.compile(program)
    state, _ = step(step.init(params))
    np.testing.assert_array_equal(state.parameters["lost"], params["lost"])
    assert np.all(np.asarray(state.parameters["w"]) != params["w"])


UNREACHED = {
    "not used": lambda p: jnp.sum(p["w"]),
    "stopped": lambda p: jnp.sum(p["w"]) + jnp.sum(lax.stop_gradient(p["lost"])),
    "compared": lambda p: jnp.sum(jnp.where(p["lost"] > 0, p["w"], 0.0)),
    "in another output": lambda p: jnp.sum(p["w"]),
}


@pytest.mark.parametrize("name", UNREACHED)
def test_each_way_of_not_reaching_a_parameter_is_noticed(name):
    with pytest.warns(ow.UnreachedWarning, match="does not reach 'lost'"):
        program = ow.append_backward(ow.trace(UNREACHED[name], {"w": V, "lost": V}))
    assert [p.name for p, _ in program.gradients] == ["w"]


# Gradients of anything for anything


def test_gradients_for_data_parameters_and_activations():
    params = layers(2)
    program, found = ow.gradients(ow.trace(layered, params, X), "div", ["x", "params/1/w", "tanh"])
    values = run(program, found, params, X)
    hidden = jnp.tanh(X @ params[0]["w"] + params[0]["b"])
    by_weights, by_data = jitted(jax.grad(layered, argnums=(0, 1)))(params, X)
    by_hidden = jitted(jax.grad(layered, argnums=1))(params[1:], hidden)
    for value, expected in zip(values, [by_data, by_weights[1]["w"], by_hidden], strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-7)
    assert program.gradients == ()
    assert [v.name for v in found] == ["grad(x)", "grad(params/1/w)", "grad(tanh)"]


def test_gradients_stop_at_the_first_activation_wanted():
    program, (gradient,) = ow.gradients(ow.trace(layered, layers(3), X), "div", "tanh_1")
    assert kinds(program)["dot_general_grad"] == kinds(program)["tanh_grad"] == 1
    assert gradient.shape == (5, 4)


def test_several_targets_are_summed():
    program = ow.trace(lambda w: (jnp.sin(w), jnp.exp(w)), V)
    program, (gradient,) = ow.gradients(program, ["sin", "exp"], "w")
    np.testing.assert_allclose(run(program, [gradient], V)[0], np.cos(V) + np.exp(V), rtol=1e-6)


def test_target_gradients_are_the_cotangents_of_vjp():
    program = ow.trace(lambda w, u: (jnp.sin(w) @ M, u), V, V)
    program, (gradient,) = ow.gradients(program, "dot_general", "w", target_gradients=["u"])
    _, pull = jax.vjp(lambda w: jnp.sin(w) @ M, V)
    (found,) = run(program, [gradient], V, V[::-1].copy())
    np.testing.assert_allclose(found, pull(V[::-1])[0], rtol=1e-6)
    assert "ones" not in kinds(program)


def test_a_target_gradient_beside_one_left_out():
    program = ow.trace(lambda w, u: (jnp.sin(w), jnp.exp(w), u), V, V)
    program, (gradient,) = ow.gradients(program, ["sin", "exp"], "w", target_gradients=["u", None])
    expected = np.cos(V) * 3 + np.exp(V)
    np.testing.assert_allclose(run(program, [gradient], V, np.full_like(V, 3))[0], expected, rtol=1e-6)


def test_the_gradient_of_a_target_for_itself_is_one():
    program, (gradient,) = ow.gradients(ow.trace(lambda w: jnp.sin(w), V), "sin", "sin")
    np.testing.assert_array_equal(run(program, [gradient], V)[0], np.ones(4))


def test_a_target_that_leads_to_another_target():
    program = ow.trace(lambda w: jnp.exp(jnp.sin(w)), V)
    program, (by_sin, by_w) = ow.gradients(program, ["exp", "sin"], ["sin", "w"])
    outer = np.exp(np.sin(V)) + 1
    found = run(program, [by_sin, by_w], V)
    np.testing.assert_allclose(found[0], outer, rtol=1e-6)
    np.testing.assert_allclose(found[1], outer * np.cos(V), rtol=1e-5)


DISCONNECTED = {
    "another input": "x",
    "a later activation": "exp",
    "behind stop_gradient": "cos",
}


@pytest.mark.parametrize("name", DISCONNECTED)
def test_a_disconnected_input_has_no_gradient(name):
    program = ow.trace(lambda w, x: (jnp.sin(w) + lax.stop_gradient(jnp.cos(w)), jnp.exp(x)), V, V)
    program, (found, by_w) = ow.gradients(program, "add", [DISCONNECTED[name], "w"])
    assert found is None
    assert by_w is program["grad(w)"]


def test_integers_have_no_gradients():
    program = ow.trace(lambda w, i: jnp.sum(w[i]), V, np.array([0, 1]))
    with pytest.raises(ValueError, match=r"'i' is int32.2.: only floating point"):
        ow.gradients(program, "reduce_sum", "i")


# Rules are derived once


def remembered():
    return {*rules._rules.rules, *rules._rules_by_identity.rules}


def derived_rules(program):
    before = remembered()
    ow.append_backward(program)
    return remembered() - before


def test_twelve_layers_need_no_more_rules_than_two():
    width = 13  # used nowhere else, so that no other test has derived these rules
    x = normal(3, width)
    assert derived_rules(ow.trace(layered, layers(2, width), x))
    assert not derived_rules(ow.trace(layered, layers(12, width), x))
    assert derived_rules(ow.trace(layered, layers(2, width), normal(4, width)))


def test_equal_ops_share_the_bodies_of_their_gradients():
    program = ow.append_backward(ow.trace(layered, layers(12), X))
    for kind, count in {"tanh_grad": 12, "add_grad": 12, "broadcast_in_dim_grad": 12}.items():
        bodies = [op.body for op in program.ops if op.type == kind]
        assert (len(bodies), len(set(map(id, bodies)))) == (count, 1)
    savers = [op.body for op in program.ops if op.type == "tanh" and op.primal is not None]
    assert len(set(map(id, savers))) == 1


LIKE = {
    "parameter": (lambda w: lax.integer_pow(w, 2), lambda w: lax.integer_pow(w, 3)),
    "literal": (lambda w: jnp.sum(w * 2.0), lambda w: jnp.sum(w * 3.0)),
    "flag": (lambda w: lax.cumsum(w), lambda w: lax.cumsum(w, reverse=True)),
    "bound": (partial(jnp.clip, min=-0.5), partial(jnp.clip, min=-0.1)),
    "loop body": (lambda w: lax.map(jnp.sin, w), lambda w: lax.map(jnp.cos, w)),
    "branches": (
        lambda w: lax.cond(w[0] > 9, jnp.sin, jnp.cos, w),
        lambda w: lax.cond(w[0] > 9, jnp.cos, jnp.sin, w),
    ),
}


def slope_beside_jax(function):
    program = ow.trace(lambda w: function(w), V)
    program, (gradient,) = ow.gradients(program, program.outputs, "w")
    found = lower(program, [gradient])
    return lambda w: (found([w], [])[0], jax.grad(lambda w: jnp.sum(function(w)))(w))


def test_what_is_remembered_is_told_apart():
    derived, faults = {}, {}
    for name, functions in LIKE.items():
        for place, function in zip(("first", "second"), functions, strict=True):
            with named(f"{name}, {place}", faults):
                derived[f"{name}, {place}"] = slope_beside_jax(function), V
    for name, (found, expected) in at_once(derived, faults).items():
        with named(name, faults):
            np.testing.assert_allclose(found, expected, rtol=1e-6)
    expect_no(faults)


def test_names_of_gradients_never_collide():
    def crowded(params):
        return jnp.sum(params["grad(w)"] * params["w"] * params["saved(sin)"] * jnp.sin(params["w"]))

    params = {"w": V, "grad(w)": V, "saved(sin)": V}
    program = ow.append_backward(ow.trace(crowded, params))
    assert {p.name: re.sub(r"_\d+$", "", g.name) for p, g in program.gradients} == {
        "grad(w)": "grad(grad(w))",
        "saved(sin)": "grad(saved(sin))",
        "w": "grad(w)",
    }


def test_the_second_derivative_goes_through_what_a_custom_rule_computes():
    """As in JAX: the rule the first time, and the operations of its forward part the second time."""

    @jax.custom_vjp
    def f(x):
        return jnp.sin(x) * x

    f.defvjp(lambda x: (jnp.sin(x) * x, x), lambda x, g: (2 * g * jnp.cos(x) * x,))

    def value(v):
        return jnp.sum(f(2 * v) * v)

    v = jnp.arange(1.0, 4.0)
    program, (first,) = ow.gradients(ow.trace(value, v), "reduce_sum", "v")
    program, (second,) = ow.gradients(program, first, "v")
    step = ow.compile(program, fetch=[second])
    _, out = step(step.init(v))
    expected = jitted(jax.grad(lambda v: jnp.sum(jax.grad(value)(v))))(v)
    np.testing.assert_allclose(out[second], expected, rtol=1e-6)


def test_an_effect_is_never_repeated_for_a_second_derivative():
    def f(w, y):
        def body(h, t):
            jax.debug.print("{}", t)
            return jnp.sin(h * t * y), None

        return jnp.sum(jax.lax.scan(body, w, jnp.ones(3))[0])

    program, _ = ow.gradients(ow.trace(f, 1.0, 2.0), "reduce_sum", "w")
    with pytest.raises(ow.GraphError, match="Ask for both derivatives in one call"):
        ow.gradients(program, "reduce_sum", "y")


def test_a_mutable_array_is_refused_where_it_is_used():
    def f(w):
        r = jax.new_ref(jnp.zeros_like(w))
        r[...] = jnp.sin(w)
        return jnp.sum(r[...] * w)

    with pytest.raises(ow.TraceError, match=r"test_backward\.py:\d+ uses a mutable array"):
        ow.trace(f, jnp.ones(3))


def test_a_complex_loss_is_refused_as_by_jax():
    def loss(w, x):
        return jnp.sum(w * x)

    w, x = jnp.ones(2, "complex64"), jnp.ones(2)
    with pytest.raises(TypeError, match="complex"):
        jax.grad(loss)(w, x)
    with pytest.raises(ow.LossError, match=r"is complex64.*, a complex number.*loss\.real"):
        ow.SGD(0.1).minimize(loss, w, x)
    program = ow.trace(loss, w, x)
    with pytest.raises(ow.LossError, match=r"The target .* is complex64.*, a complex number"):
        ow.gradients(program, program.outputs[0], "w")
    step = ow.compile(ow.SGD(0.5).minimize(lambda w, x: loss(w, x).real, w, x))
    state, _ = step(step.init(w), x)
    np.testing.assert_allclose(state["w"], w - 0.5 * jax.grad(lambda w: loss(w, x).real)(w))
