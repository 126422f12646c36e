"""Scopes that nobody named: the calls of the user's functions, told apart by their stacks."""

from contextlib import nullcontext
from functools import reduce

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import onward as ow
from onward.core.calls import called_scopes
from onward.core.homes import scopes

LAYERS, WIDTH = 3, 4


def network(marked):
    """A small transformer, its functions marked by ``jax.named_scope`` or not at all."""
    mark = jax.named_scope if marked else lambda name: nullcontext()

    def ln(x):
        return x - jnp.mean(x, -1, keepdims=True)

    def attention(p, x):
        return jax.nn.softmax((x @ p["q"]) @ jnp.swapaxes(x @ p["k"], 1, 2)) @ x

    def mlp(p, x):
        return jnp.tanh(x @ p["w"]) @ p["v"]

    def block(p, x):
        with mark("ln_0"):
            h = ln(x)
        with mark("attention"):
            h = attention(p, h)
        x = x + h
        with mark("ln_1"):
            h = ln(x)
        with mark("mlp"):
            return mlp(p, h)

    def head(w, x):
        return x @ w

    def loss(params, x):
        for i, p in enumerate(params["blocks"]):
            with mark(f"block_{i}"):
                x = block(p, x)
        with mark("head"):
            x = head(params["head"], x)
        return jnp.mean(x**2)

    return loss


def params():
    draw = np.random.default_rng(0).standard_normal
    square = (WIDTH, WIDTH)
    blocks = [{name: jnp.asarray(draw(square)) for name in "qkwv"} for _ in range(LAYERS)]
    return {"blocks": blocks, "head": jnp.asarray(draw(square))}


def training(marked):
    return ow.SGD(0.1).minimize(network(marked), params(), jnp.ones((8, 5, WIDTH)))


@pytest.mark.parametrize(
    "change",
    [
        lambda program: program,
        lambda program: ow.recompute(program, 0.8),
        lambda program: ow.replicate(program, devices=2),
        lambda program: ow.mixed_precision(program),
        ow.roll,
    ],
    ids=["plain", "recompute", "replicate", "mixed precision", "roll"],
)
def test_the_rows_are_those_of_marks(change):
    without, with_marks = (change(training(marked)) for marked in (False, True))
    assert {op.scope for op in without.ops if op.type != "scan"} <= {"", "_where"}
    assert ow.summary(without, depth=None).rows == ow.summary(with_marks, depth=None).rows
    assert ow.summary(without).rows == ow.summary(with_marks).rows


def scope_list(function, *values):
    """The scopes of the ops of a function, in order, each once in a row."""
    found = list(called_scopes(ow.trace(function, *values).ops).values())
    return [scope for scope, before in zip(found, [None, *found], strict=False) if scope != before]


def one(x):
    return jnp.sin(x)


def two(x):
    return jnp.cos(jnp.sin(x))


def turning(x):
    for _ in range(3):
        x = jnp.sin(x)
    return x


@jax.jit
def jitted(x):
    return two(x) + 1


def descend(x, depth):
    return jnp.sin(x) if depth == 0 else descend(jnp.cos(x), depth - 1)


class Layer:
    def __call__(self, x):
        return jnp.tanh(x)

    def twice(self, x):
        return self(self(x))


CALLS = {
    "once": (lambda x: two(x) + 1, ["two", ""]),
    "on one line": (lambda x: one(two(one(x))) + 1, ["one_0", "two", "one_1", ""]),
    "in a loop": (lambda x: jnp.sum(reduce(lambda y, _: two(y), range(2), x)), ["two_0", "two_1", ""]),
    "by a comprehension": (lambda x: sum([two(x) for _ in range(2)]), ["two_0", "two_1", ""]),
    "by map": (lambda x: jnp.stack([*map(two, [x, x])]), ["two_0", "two_1", ""]),
    "by a tree": (lambda x: jnp.stack(jax.tree.map(two, [x, x])), ["two_0", "two_1", ""]),
    "with a loop of its own": (lambda x: turning(turning(x)) + 1, ["turning_0", "turning_1", ""]),
    "jitted, and traced once": (
        lambda x: jitted(jitted(x)) * 2,
        ["jitted_0/two", "jitted_0", "jitted_1/two", "jitted_1", ""],
    ),
    "as objects": (lambda x: Layer().twice(x) + one(x), ["twice/Layer_0", "twice/Layer_1", "one", ""]),
    "of itself": (
        lambda x: descend(x, 2) + one(x),
        ["descend", "descend/descend", "descend/descend/descend", "one", ""],
    ),
    "checkpointed": (lambda x: jax.checkpoint(two)(jax.checkpoint(two)(x)) + 1, ["two_0", "two_1", ""]),
    "scanned": (
        lambda x: jax.lax.scan(lambda c, _: (two(c), None), x, length=2)[0] + one(x),
        ["", "one", ""],
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls_are_told_apart(case):
    function, expected = CALLS[case]
    found = scope_list(lambda w: jnp.sum(function(w)), jnp.ones(3))
    assert found == expected


def test_a_library_names_what_is_below_the_user():
    class Block(eqx.Module):
        linear: eqx.nn.Linear

        def __call__(self, x):
            return jax.nn.relu(self.linear(x))

    def loss(blocks, x):
        for block in blocks:
            x = jax.vmap(block)(x)
        return jnp.sum(x)

    blocks = [Block(eqx.nn.Linear(3, 3, key=jax.random.key(i))) for i in range(2)]
    found = scope_list(loss, blocks, jnp.ones((2, 3)))
    inside = ["Block_0/eqx.nn.Linear", "Block_0", "Block_1/eqx.nn.Linear", "Block_1"]
    assert found == [*inside, ""]


def test_layers_of_nnx_have_the_names_of_their_classes():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.norm = nnx.Linear(3, 3, rngs=rngs), nnx.LayerNorm(3, rngs=rngs)

        def __call__(self, x):
            return x + self.linear(self.norm(x))

    graph, state = nnx.split(Block(nnx.Rngs(0)))

    def loss(state, x):
        block = nnx.merge(graph, state)
        return jnp.sum(nnx.remat(Block.__call__)(block, block(block(x))))

    found = scope_list(loss, state, jnp.ones((2, 3)))
    inside = [f"Block_{i}{layer}" for i in range(2) for layer in ("/LayerNorm", "/Linear", "")]
    assert found == [*inside, "Block_2", ""]


def test_linen_names_what_it_computes_again_and_not_its_wrappers():
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + nn.Dense(3)(x)

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.jit(Block)()(nn.remat(Block)()(nn.remat(Block)()(x)))

    params = Network().init(jax.random.key(0), jnp.ones((2, 3)))
    found = scope_list(lambda p, x: jnp.sum(Network().apply(p, x)), params, jnp.ones((2, 3)))
    blocks = ["CheckpointBlock_1", "CheckpointBlock_0", "JitBlock_0/Dense_0"]
    assert found[:3] == [f"Network/{block}" for block in blocks]


def test_what_casts_a_parameter_stands_where_that_is_read():
    def to_half(x):
        return x.astype(jnp.bfloat16)

    def loss(params, x):
        return network(False)(jax.tree.map(to_half, params), x).astype(jnp.float32)

    found = ow.trace(loss, params(), jnp.ones((8, 5, WIDTH)))
    rows = {row.scope: row.parameters for row in ow.summary(found).rows}
    assert rows == {"block_0 ... block_2": 64, "head": 16, "loss": 0}


def test_micro_batches_keep_them():
    (loop,) = (op for op in ow.accumulate(training(False), 2).ops if op.subprograms)
    assert "block_2/mlp" in loop.body.closed.jaxpr.pretty_print(name_stack=True)


def test_every_look_uses_them():
    program = training(False)
    assert "attention" in ow.draw(program)._repr_html_()
    assert 'label="block_0"' in ow.draw(program).dot
    assert "block_0/" in str(ow.memory(program))
    step = ow.compile(ow.watch(program, "block_1/mlp/tanh*", statistics="norm", every=1))
    state, out = step(step.init(params()), jnp.ones((8, 5, WIDTH)))
    assert [*out.watched] == ["block_1/mlp/tanh_1"]
    found = ow.profile(step, state, jnp.ones((8, 5, WIDTH)), steps=1, depth=2)
    assert {"block_0/attention", "block_2/mlp", "head"} <= {row.scope for row in found.rows if row.seconds}


def test_names_and_scopes_of_a_program_stay():
    program = training(False)
    assert {op.scope for op in program.ops} <= {"", "_where"}
    assert "tanh_1" in program.variables
    assert scopes(program)[next(op for op in program.ops if op.type == "tanh")] == "block_0/mlp"
