"""Passes know their own ops by marks: what a user gives the same name is trained as under any other."""

import copy
import pickle
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.core.marks import MARKS, Mark

NAMES = sorted({*MARKS, "optimization_barrier", "stack_grad", "scan", "while", "cond"})
W, X = np.linspace(0.5, 1.5, 4).reshape(2, 2).astype("float32"), np.float32([[1, 2], [3, 4]])


def loss(w, x):
    with jax.named_scope("block"):
        return jnp.mean(jnp.tanh(jnp.sin(x @ w)) ** 2)


def class_name(name):
    return "".join(part.capitalize() for part in name.split("_"))


def changed(program):
    """What transforms make of a Program, each by itself."""
    yield "as it is", program
    yield "guarded", ow.guard(program)
    yield "stopping", ow.guard(program, "stop")
    yield "checked", ow.check_finite(program)
    yield "recomputed", ow.recompute(program, scopes="block")
    yield "fenced", ow.fence(program)
    yield "accumulated", ow.accumulate(program, 2)
    yield "watched", ow.watch(program, "grad(w)")


def trained(program):
    step = ow.compile(program)
    state, out = step.init(W), None
    for _ in range(2):
        state, out = step(state, X)
    return [np.asarray(out.loss), np.asarray(state.parameters)]


@cache
def by_sgd():
    """What each of them gives with a rule of the house."""
    return {how: trained(program) for how, program in changed(ow.SGD(0.1).minimize(loss, W, X))}


@pytest.mark.parametrize("name", ["accumulate", "fence", "keep", "count", "stop", "stack"])
def test_a_rule_of_ones_own_may_bear_any_name(name):
    rule = type(class_name(name), (ow.SGD,), {})
    program = rule(0.1).minimize(loss, W, X)
    assert name in [op.type for op in program.ops if not isinstance(op.type, Mark)]
    assert ow.graph.fences(program) == ()
    for (how, found), (same, expected) in zip(changed(program), by_sgd().items(), strict=True):
        assert how == same
        for a, b in zip(trained(found), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-6, err_msg=how)


@cache
def by_tanh():
    return trained(ow.SGD(0.1).minimize(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2), W, X))


@pytest.mark.parametrize("name", NAMES)
def test_a_function_of_ones_own_may_bear_any_name(name):
    def function(x):
        return jnp.tanh(x)

    function.__name__ = name
    with_rule = jax.custom_jvp(function)
    with_rule.defjvp(lambda p, t: (jnp.tanh(*p), t[0] * (1 - jnp.tanh(*p) ** 2)))
    program = ow.SGD(0.1).minimize(lambda w, x: jnp.mean(with_rule(x @ w) ** 2), W, X)
    assert name in [op.type for op in program.ops]
    ow.cost(program), ow.summary(program), ow.memory(program)
    for found, expected in zip(trained(ow.guard(program)), by_tanh(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def with_rule(name, function):
    """The function under a name, with a rule of its own."""

    def called(x):
        return function(x)

    called.__name__ = name
    found = jax.custom_vjp(called)
    found.defvjp(lambda x: (function(x), x), lambda x, g: jax.vjp(function, x)[1](g))
    return found


def made_with(name):
    """What passes that ask what an op computes make of a forward pass and an update that call a function."""
    large, quiet = with_rule(name, lambda x: x * 1e5), with_rule(name, jnp.nan_to_num)

    class Quiet(ow.SGD):
        def update(self, parameter, gradient, slots):
            return super().update(parameter, quiet(gradient), slots)

    def own(w, x):
        return jnp.mean(jnp.tanh(large(large(x @ w)) @ w))

    yield ow.mixed_precision(ow.SGD(0.1).minimize(own, W, X), "float16")
    yield ow.check_finite(Quiet(0.1).minimize(lambda w, x: jnp.sum(jnp.sqrt(w * x)), W, X))


@pytest.mark.parametrize("name", ["abs", "div", "name", "neg", "relu", "scan"])
def test_a_function_of_ones_own_is_no_primitive_and_no_relu_by_its_name(name):
    for named, other in zip(made_with(name), made_with("own"), strict=True):
        types = [
            [(len(op.inputs), [v.type for v in op.outputs]) for op in program.ops]
            for program in (named, other)
        ]
        assert types[0] == types[1]


def test_a_gradient_that_an_update_hides_is_looked_at_whatever_the_name():
    _, checked = made_with("abs")
    step = ow.compile(checked)
    state, out = step(step.init(W), np.zeros_like(X))  # where the square root has no slope
    assert not state["is_finite"]
    assert out.loss == 0


STACKS = {
    "of constants": lambda w, x: jnp.sum(w * jnp.stack([1.0, 0.0]) * x),
    "along the last axis": lambda w, x: jnp.sum(jnp.stack([w[0], w[1]], axis=1) ** 2 * x),
    "of parameters": lambda w, x: jnp.sum(jnp.stack([w[0], w[1]]) ** 3 * x),
    "in a derivative by forward mode": lambda w, x: jnp.sum(
        jax.jvp(lambda t: jnp.tanh(jnp.stack([t, 1.0]) @ w), (x[0, 0],), (1.0,))[1] ** 2
    ),
}


@pytest.mark.parametrize("name", STACKS)
def test_stacks_of_ones_own_train_as_by_jax(name):
    function = STACKS[name]
    parameters = {"a": W, "b": 2 * W}

    def whole(p, x):
        return function(p["a"], x) + function(p["b"], x)

    step = ow.compile(ow.SGD(0.1).minimize(whole, parameters, X))
    state, _ = step(step.init(parameters), X)
    for key, gradient in jax.jit(jax.grad(whole))(parameters, X).items():
        np.testing.assert_allclose(state[key], parameters[key] - 0.1 * gradient, rtol=1e-5, err_msg=key)


def test_a_mark_stays_itself():
    for mark in MARKS:
        assert copy.deepcopy(mark) is mark
        assert pickle.loads(pickle.dumps(mark)) is mark
        assert mark == str(mark)


def test_a_saved_program_keeps_its_marks(tmp_path):
    step = ow.compile(ow.guard(ow.SGD(0.1).minimize(loss, W, X)))
    path = tmp_path / "step.safetensors"
    ow.save(step, path, step.init(W))
    loaded = ow.load_step(path)[0].program
    known = {op.type for op in step.program.ops if isinstance(op.type, Mark)}
    assert {op.type for op in loaded.ops if isinstance(op.type, Mark)} == known != set()
