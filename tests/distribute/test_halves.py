"""Backward loops in two halves: together they give what the loop gives, and compute nothing twice."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.distribute.test_pipeline import normal

import onward as ow
from onward.core.cost import cost
from onward.core.names import Names
from onward.core.program import Op
from onward.distribute.pipeline.halves import in_halves

WIDE, LAYERS, ROWS = 6, 8, 4
X, SEQUENCE = normal(ROWS, WIDE), normal(5, ROWS, WIDE)
STACK = normal(LAYERS, WIDE, WIDE)


def stacked(w: Any, x: Any) -> Any:
    """Each layer has a matrix, and gives a number that the loss reads."""

    def layer(h: Any, w: Any) -> Any:
        z = jnp.tanh(h @ w)
        return h + z, z.mean()

    h, means = jax.lax.scan(layer, x, w)
    return jnp.mean(h**2) + jnp.sum(means)


def normalized(w: Any, x: Any) -> Any:
    """What is read for the gradients is repeated over a row, and cheaper to make again."""

    def layer(h: Any, w: Any) -> Any:
        centred = h - h.mean(-1, keepdims=True)
        scale = jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-3)
        return h + jax.nn.gelu(centred * scale * w[0] @ w), None

    return jnp.mean(jax.lax.scan(layer, x, w, unroll=2)[0] ** 2)


def recurrent(w: Any, x: Any) -> Any:
    """All turns share one matrix, whose gradient they add up."""

    def cell(h: Any, x: Any) -> Any:
        h = jnp.tanh(jnp.concatenate([x, h], -1) @ w)
        return h, h

    return jnp.mean(jax.lax.scan(cell, jnp.zeros((ROWS, WIDE)), x)[1] ** 2)


def penalized(w: Any, x: Any) -> Any:
    """A sum over the layers is carried beside the activations, and a factor that begins as a number."""

    def layer(carry: Any, w: Any) -> Any:
        h, total, factor = carry
        h = h + jnp.tanh(h @ w) * factor
        return (h, total + jnp.mean(h**2), factor * w[0, 0]), None

    h, total, _ = jax.lax.scan(layer, (x, 0.0, 1.0), w)[0]
    return jnp.mean(h**2) + total


LOOPS = {
    "stacked": (stacked, STACK, X),
    "normalized": (normalized, STACK, X),
    "recurrent": (recurrent, normal(2 * WIDE, WIDE), SEQUENCE),
}


def backward(network: str) -> tuple[Op, int]:
    """The backward loop of a network, and which of its outputs is the gradient of the data."""
    function, w, x = LOOPS[network]
    program = ow.trace(lambda w, x: jax.grad(function, (0, 1))(w, x), w, x)
    op = next(op for op in reversed(program.ops) if op.primitive.is_loop and len(op.outputs) > 1)
    (at,) = (i for i, v in enumerate(op.outputs) if v.shape == x.shape)
    return op, at


def flops(*ops: Op) -> float:
    return sum(cost(op).flops for op in ops)


@pytest.mark.parametrize("network", LOOPS)
def test_both_halves_give_what_the_loop_gives(network: str):
    op, at = backward(network)
    halves = in_halves(op, [at], Names())
    assert halves is not None
    values = dict(zip(op.inputs, (normal(*v.shape) for v in op.inputs), strict=True))
    expected = dict(zip(op.outputs, op.body(*values.values()), strict=True))
    for half in halves:
        values |= zip(half.outputs, half.body(*map(values.__getitem__, half.inputs)), strict=True)
    assert op.outputs[at] in halves[0].outputs
    assert set(halves[1].outputs).isdisjoint(halves[0].outputs)
    for v, wanted in expected.items():
        np.testing.assert_allclose(values[v], wanted, rtol=1e-5, atol=1e-6)
    assert flops(*halves) == pytest.approx(flops(op), rel=0.05)
    assert 0.3 < flops(halves[1]) / flops(op) < 0.6


def test_what_is_repeated_is_made_again():
    op, at = backward("normalized")
    first, then = in_halves(op, [at], Names())
    saved = {v for v in then.inputs if v in first.outputs}
    assert saved == {*first.outputs} - {*op.outputs}
    assert all(v.size <= LAYERS * ROWS * WIDE for v in saved)


def test_a_loop_that_leaves_nothing_to_put_off_stays_one():
    op, at = backward("stacked")
    assert in_halves(op, range(len(op.outputs)), Names()) is None
    rest = [i for i in range(len(op.outputs)) if i != at]
    assert in_halves(op, rest, Names()) is None  # the gradient of the data comes with the others
    assert in_halves(ow.trace(jnp.tanh, X).ops[0], [0], Names()) is None


def layers(params: Any, x: Any) -> Any:
    for w in params:
        x = x + jnp.tanh(x @ w)
    return jnp.mean(x**2)


def cells(params: Any, x: Any) -> Any:
    """One loop over time after the other, each with weights of its own and a first value made before it."""
    for i, w in enumerate(params):
        with jax.named_scope(f"cell_{i}"):

            def cell(h: Any, x: Any, w: Any = w) -> Any:
                h = jnp.tanh(jnp.concatenate([x, h], -1) @ w)
                return h, h

            x = jax.lax.scan(cell, jnp.zeros((x.shape[0], WIDE), x.dtype), jnp.swapaxes(x, 0, 1))[1]
            x = jnp.swapaxes(x, 0, 1)
    return jnp.mean(x**2)


NETWORKS = {
    "stacked": (stacked, STACK, X, {}),
    "penalized": (penalized, STACK, X, {}),
    "rolled": (layers, [normal(WIDE, WIDE) for _ in range(24)], X, {}),
    "cells": (cells, [normal(2 * WIDE, WIDE) for _ in range(2)], normal(ROWS, 5, WIDE), {"at": ["cell_1"]}),
}


@pytest.mark.parametrize("network", NETWORKS)
def test_gradients_of_parameters_are_put_off(network: str):
    function, params, x, options = NETWORKS[network]
    program = ow.SGD(0.1).minimize(function, params, x)
    program = ow.roll(program) if network == "rolled" else program
    kept, put_off = (ow.pipeline(program, 2, 2, name, **options) for name in ("1f1b", "zero_bubble"))
    parts = [flops(*put_off.parts[1, work].ops) for work in "BW"]
    assert sum(parts) == pytest.approx(flops(*kept.parts[1, "B"].ops), rel=0.05)
    assert 0.4 < parts[1] / sum(parts) < 0.6
    assert not put_off.parts[1, "W"].state  # no parameter is read again
    steps = [ow.compile(one) for one in (program, put_off)]
    (state, out), (piped, seen) = (step(step.init(params), x) for step in steps)
    np.testing.assert_allclose(seen.loss, out.loss, rtol=1e-5)
    for mine, wanted in zip(*(jax.tree.leaves(one.parameters) for one in (piped, state)), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-6)
