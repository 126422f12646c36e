"""Rolled training is training: a table of models, five steps each against ``jax.value_and_grad``.

A case is what a person arrives with, a loss, parameters and data, and how often which number of layers is to
be found in it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tests.compiled import together

import onward as ow
from onward.develop.roll.roll import roll, rolls_of

STEPS, RATE = 5, 0.01
KEY = jax.random.key(0)
WIDTH = 6


@dataclass(frozen=True)
class Case:
    """``loss(params, *data)``, and how many layers each loop is to have."""

    loss: Callable[..., Any]
    params: Any
    data: tuple[Any, ...]
    times: list[int]


SEEDS = count()


def normal(*shape, scale=0.25):
    """Other numbers at every call."""
    return jnp.asarray(np.random.default_rng(next(SEEDS)).normal(0, scale, shape).astype(np.float32))


def dense(a=WIDTH, b=WIDTH):
    return {"w": normal(a, b), "b": normal(b, scale=0.1)}


def filled(shapes):
    """Numbers in place of what only tells its shape."""
    return jax.tree.map(lambda v: normal(*v.shape) if isinstance(v, jax.ShapeDtypeStruct) else v, shapes)


def apply(layer, x):
    return x @ layer["w"] + layer["b"]


def normed(x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)


def squared(prediction, y):
    return jnp.mean((prediction - y) ** 2)


X, Y = normal(4, WIDTH, scale=1.0), normal(4, WIDTH, scale=1.0)


def mlp():
    def loss(layers, x, y):
        for layer in layers:
            x = jax.nn.relu(apply(layer, x))
        return squared(x, y)

    return Case(loss, [dense() for _ in range(3)], (X, Y), [3])


def mlp_of_other_ends():
    def loss(layers, x, y):
        for layer in layers[:-1]:
            x = jnp.tanh(apply(layer, x))
        return squared(apply(layers[-1], x), y[:, :2])

    layers = [dense(WIDTH, 8), *(dense(8, 8) for _ in range(3)), dense(8, 2)]
    return Case(loss, layers, (X, Y), [3])


def residual():
    def loss(params, x, y):
        for layer in params["layers"]:
            x = x + jax.nn.gelu(apply(layer, normed(x)))
        return squared(apply(params["last"], normed(x)), y)

    return Case(loss, {"layers": [dense() for _ in range(3)], "last": dense()}, (X, Y), [3])


def attention(layer, x, memory):
    """Without a softmax, which that of flax has."""
    q, k, v = (y @ layer[name] for y, name in ((x, "q"), (memory, "k"), (memory, "v")))
    seen = jnp.tril(jnp.ones((len(x), len(memory)), bool))
    return jnp.where(seen, q @ k.T, 0) @ v @ layer["out"]


def attending():
    return {name: normal(WIDTH, WIDTH) for name in ("q", "k", "v", "out")}


def encoder_decoder():
    def loss(params, x, y):
        for layer in params["encoder"]:
            x = x + attention(layer, x, x)
        z = y[::-1]
        for layer in params["decoder"]:
            z = z + attention(layer, z, x)
        return squared(z, y)

    params = {
        "encoder": [attending() for _ in range(3)],
        "decoder": [attending() for _ in range(4)],
    }
    return Case(loss, params, (X, Y), [3, 4])


def nested():
    def loss(blocks, x, y):
        for block in blocks:
            for layer in block["layers"]:
                x = x + jnp.tanh(apply(layer, x))
            x = jnp.sin(normed(x) * block["scale"])
        return squared(x, y)

    blocks = [{"layers": [dense() for _ in range(2)], "scale": normal(WIDTH)} for _ in range(3)]
    return Case(loss, blocks, (X, Y), [3])


def auxiliary_losses():
    def loss(layers, x, y):
        extra = []
        for layer in layers:
            x = x + jnp.tanh(apply(layer, x))
            extra.append(jnp.mean(x**2))
        return squared(x, y) + 0.1 * sum(extra) + 0.01 * extra[1]

    return Case(loss, [dense() for _ in range(3)], (X, Y), [3])


def shared_parameters():
    def loss(params, x, y):
        for _ in range(3):
            x = x + attention(params["shared"], x, x) + params["bias"]
        return squared(x, y)

    return Case(loss, {"shared": attending(), "bias": normal(WIDTH)}, (X, Y), [3])


def other_constants():
    def loss(layers, x, y):
        for i, layer in enumerate(layers):
            mask = np.arange(WIDTH) % (i + 2) > 0
            same = np.linspace(1, 2, WIDTH, dtype=np.float32)
            x = x + 0.1 * (i + 1) * jnp.tanh(apply(layer, x * mask * same))
        return squared(x, y)

    return Case(loss, [dense() for _ in range(3)], (X, Y), [3])


def two_streams():
    """Reversible layers: what one hands to the next are two Variables."""

    def loss(layers, x, y):
        a, b = x, y
        for layer in layers:
            a, b = b, a + jnp.tanh(apply(layer, b))
        return squared(a, b)

    return Case(loss, [dense() for _ in range(4)], (X, Y), [4])


def keys_by_splitting():
    def loss(layers, x, y, key):
        for layer in layers:
            key, own = jax.random.split(key)
            x = x + jnp.where(jax.random.bernoulli(own, 0.7, x.shape), jnp.tanh(apply(layer, x)), 0.0)
        return squared(x, y)

    return Case(loss, [dense() for _ in range(3)], (X, Y, KEY), [3])


def keys_split_before():
    def loss(layers, x, y, key):
        for layer, own in zip(layers, jax.random.split(key, 3), strict=True):
            x = x + jnp.where(jax.random.bernoulli(own, 0.7, x.shape), jnp.tanh(apply(layer, x)), 0.0)
        return squared(x, y)

    return Case(loss, [dense() for _ in range(3)], (X, Y, KEY), [3])


def cast_before():
    """All parameters are cast first, as mixed precision by hand does."""

    def loss(layers, x, y):
        for layer in jax.tree.map(lambda p: p.astype(jnp.bfloat16).astype(jnp.float32), layers):
            x = x + jnp.tanh(apply(layer, x))
        return squared(x, y)

    return Case(loss, [dense() for _ in range(3)], (X, Y), [3])


def skips():
    """Half as deep as a U: the way up reads what the way down made, last first."""

    def loss(params, x, y):
        seen = []
        for layer in params["down"]:
            x = jnp.tanh(apply(layer, x))
            seen.append(x)
        for layer in params["up"]:
            x = jnp.sin(apply(layer, x + seen.pop()))
        return squared(x, y)

    return Case(
        loss, {"down": [dense() for _ in range(4)], "up": [dense() for _ in range(4)]}, (X, Y), [4, 3]
    )


def control_flow():
    def loss(layers, x, y):
        for layer in layers:
            x, _ = jax.lax.scan(lambda h, _, w=layer["w"]: (jnp.tanh(h @ w), None), x, None, 2)
            x = x + jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x) * layer["b"]
        return squared(x, y)

    return Case(loss, [dense() for _ in range(3)], (X, Y), [3])


def checkpointed():
    """Each layer is one op."""
    block = jax.checkpoint(lambda layer, x: x + jnp.tanh(apply(layer, normed(x))))

    def loss(layers, x, y):
        for layer in layers:
            x = block(layer, x)
        return squared(x, y)

    return Case(loss, [dense() for _ in range(3)], (X, Y), [3])


def recurrent():
    """Each layer is one loop over time, whose states the next one reads."""

    def loss(layers, x, y):
        states = jnp.broadcast_to(x, (3, *x.shape))
        for layer in layers:
            _, states = jax.lax.scan(
                lambda h, x, layer=layer: (jnp.tanh(x @ layer["w"] + h * layer["b"]),) * 2, x, states
            )
        return squared(states[-1], y)

    return Case(loss, [dense() for _ in range(4)], (X, Y), [4])


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = x + nn.MultiHeadDotProductAttention(2, use_bias=False)(nn.LayerNorm(use_bias=False)(x))
        return x + nn.gelu(nn.Dense(WIDTH)(x))


class LinenTransformer(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = LinenBlock()(x)
        return x


def linen():
    model = LinenTransformer()
    params = filled(jax.eval_shape(model.init, KEY, X))
    return Case(lambda params, x, y: squared(model.apply(params, x), y), params, (X, Y), [3])


class NnxMlp(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(3)])

    def __call__(self, x):
        for layer in self.layers:
            x = x + nnx.silu(layer(x))
        return x


def flax_nnx():
    graph, shapes = nnx.split(nnx.eval_shape(lambda: NnxMlp(nnx.Rngs(0))), nnx.Param)
    return Case(lambda params, x, y: squared(nnx.merge(graph, params)(x), y), filled(shapes), (X, Y), [3])


def equinox():
    model = filled(eqx.filter_eval_shape(eqx.nn.MLP, WIDTH, 2, 8, depth=4, key=KEY))
    return Case(lambda model, x, y: squared(jax.vmap(model)(x), y[:, :2]), model, (X, Y), [3])


CASES = {
    f.__name__: f
    for f in (
        mlp,
        mlp_of_other_ends,
        residual,
        encoder_decoder,
        nested,
        auxiliary_losses,
        shared_parameters,
        other_constants,
        two_streams,
        keys_by_splitting,
        keys_split_before,
        cast_before,
        skips,
        control_flow,
        checkpointed,
        recurrent,
        linen,
        flax_nnx,
        equinox,
    )
}


def arrays(tree):
    return [x for x in jax.tree.leaves(tree) if eqx.is_inexact_array(x)]


def descent(case):
    """Gradient descent in plain JAX, a case for ``together``: the losses, and the parameters at the end."""
    moving, fixed = eqx.partition(case.params, eqx.is_inexact_array)

    def whole(moving, data):
        def step(moving, _):
            value, slope = jax.value_and_grad(lambda p: case.loss(eqx.combine(p, fixed), *data))(moving)
            return jax.tree.map(lambda p, g: p - RATE * g, moving, slope), value

        moving, losses = jax.lax.scan(step, moving, None, STEPS)
        return losses, arrays(moving)

    return whole, moving, case.data


@pytest.fixture(scope="module")
def by_hand():
    """Each case, and what plain JAX makes of it, all compiled as one."""
    cases = {name: make() for name, make in CASES.items()}
    found = together({name: descent(case) for name, case in cases.items()})
    return {name: (case, *found[name]) for name, case in cases.items()}


@pytest.mark.parametrize("name", CASES)
def test_rolled_training_is_that_of_plain_jax(by_hand, name):
    case, expected, parameters = by_hand[name]
    program = ow.SGD(RATE).minimize(case.loss, case.params, *case.data)
    rolled = roll(program)
    assert [found.times for found in rolls_of(rolled)] == case.times
    same_head(program, rolled)
    step = ow.compile(rolled)
    state = step.init(case.params)
    losses = []
    for _ in range(STEPS):
        state, out = step(state, *case.data)
        losses.append(out.loss)
    np.testing.assert_allclose(losses, expected, rtol=2e-5, atol=1e-6)
    for found, wanted in zip(arrays(state.parameters), parameters, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-6)


def same_head(program, rolled):
    """State, gradients, results and loss are the same Variables by name and type."""

    def shown(p):
        groups = (p.inputs, p.state, p.outputs, [g for _, g in p.gradients], [p.loss])
        return [[(v.name, v.type) for v in group] for group in groups]

    assert shown(rolled) == shown(program)
    assert {v.name for v in rolled.next_state} == {v.name for v in program.next_state}
