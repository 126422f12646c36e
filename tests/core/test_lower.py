"""A Program as a function: op by op and at once are the same, under every transformation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.core.jaxprs.joining import joined
from onward.core.lower import lower

W, X = np.float32([[1, 2], [3, 4]]), np.float32([[1, -1], [2, 0.5]])


def deep(params, x):
    for w in params:
        x = jax.nn.softmax(jax.nn.relu(x @ w))
    return x.mean()


def with_constants(w, x):
    return (w * np.float32([[1, 2], [3, 4]]) @ x).sum(), jnp.ones(3), 2.5, w, x * 0 + jnp.arange(2.0)


def random(w, x):
    return jax.random.normal(jax.random.key(3), (2,)) * w.sum() + x.sum()


def controlled(w, x):
    x = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), c.sum()), x, None, length=3)[0]
    return jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x).sum()


CASES = {
    "layers": lambda: ow.append_backward(ow.trace(deep, [W, 2 * W, -W], X)),
    "training": lambda: ow.Adam(0.1).minimize(deep, [W, 2 * W, -W], X),
    "constants": lambda: ow.trace(with_constants, W, X),
    "random": lambda: ow.trace(random, W, X),
    "control flow": lambda: ow.append_backward(ow.trace(controlled, W, X)),
    "accumulation": lambda: ow.accumulate(ow.SGD(0.1).minimize(deep, [W], X), 2),
}


def values(program):
    state = [np.full(v.shape, 0.5, v.dtype) for v in program.state]
    return state, [X for _ in program.inputs]


def results(program):
    return [*program.outputs, *program.next_state.values(), *(g for _, g in program.gradients)]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_at_once_is_op_by_op(case):
    program = case()
    wanted = results(program)
    ways = [lower(program, wanted, at_once=at_once) for at_once in (False, True)]
    expected, found = jax.jit(lambda *given: [way(*given) for way in ways])(*values(program))
    for a, b, v in zip(found, expected, wanted, strict=True):
        assert (a.shape, a.dtype) == (v.shape, v.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_at_once_is_traced_as_one_equation():
    program = CASES["training"]()
    run = lower(program, results(program), at_once=True)
    found = jax.make_jaxpr(run)(*values(program))
    assert len(found.eqns) == 1
    assert len(jax.make_jaxpr(lower(program, results(program)))(*values(program)).eqns) > len(program.ops)


def test_at_once_can_be_batched_and_differentiated():
    program = ow.trace(deep, [W], X)
    run = lower(program, program.outputs, at_once=True)
    batch = np.stack([X, 2 * X, -X])

    @jax.jit
    def at_once_and_alone(w, batch):
        batched = jax.vmap(lambda x: run([w], [x])[0])(batch)
        gradients = [jax.grad(f)(w) for f in (lambda w: run([w], [X])[0], lambda w: deep([w], X))]
        return batched, [deep([w], x) for x in batch], *gradients

    batched, alone, gradient, expected = at_once_and_alone(W, batch)
    np.testing.assert_allclose(batched, alone, rtol=1e-6)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)


def test_effects_stay_in_order(capfd):
    def noisy(w, x):
        jax.debug.print("first {}", w, ordered=True)
        y = w * x
        jax.debug.print("second {}", y, ordered=True)
        return y

    program = ow.trace(noisy, jnp.float32(2), jnp.float32(3))
    run = jax.jit(lower(program, program.outputs, at_once=True))
    assert float(run([jnp.float32(2)], [jnp.float32(3)])[0]) == 6
    jax.effects_barrier()
    assert capfd.readouterr().out == "first 2.0\nsecond 6.0\n"


def test_ops_keep_their_scopes():
    def scoped(w, x):
        with jax.named_scope("block"):
            return (w * x).sum()

    program = ow.append_backward(ow.trace(scoped, W, X))
    run = jax.jit(lower(program, results(program), at_once=True))
    text = run.lower(*values(program)).as_text(debug_info=True)
    assert "forward/block/mul" in text
    assert "backward/block" in text


def test_an_array_used_by_two_ops_is_one_constant():
    table = jnp.arange(6.0)

    def network(w):
        for _ in range(2):
            w = jax.lax.cond(w.sum() > 0, lambda w: w + table, lambda w: w - table, w)
        return w

    program = ow.trace(network, jnp.ones(6))
    given = (*program.state, *program.inputs, *program.constants)
    body = joined(program.ops, given, program.outputs)
    np.testing.assert_array_equal(body(jnp.ones(6), *program.constants.values())[0], 1 + 2 * np.arange(6.0))
    assert len(body.closed.consts) + len(program.constants) <= 1
