"""``fence``: which values of a network get a fence, and that nothing but the speed changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.core.lower import lower
from onward.develop.fence import fence, fences, worth_fencing

DEPTH, WIDTH = 4, 4


def normalized(x):
    centered = x - x.mean(-1, keepdims=True)
    return centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-6)


BLOCKS = {
    "layer norm first": lambda w, b, x: x + jax.nn.relu(normalized(x) @ w + b),
    "bias last": lambda w, b, x: x + normalized(x) @ w + b,
    "scaled": lambda w, b, x: (x + jax.nn.relu(normalized(x) @ w + b)) * 0.9,
    "layer norm last": lambda w, b, x: normalized(x + jax.nn.relu(x @ w + b)) * b + b,
}


def residual(block, depth=DEPTH):
    def loss(layers, x):
        for w, b in layers:
            x = block(w, b, x)
        return jnp.mean(x**2)

    rng = np.random.default_rng(0)
    layers = [
        (jnp.asarray(rng.normal(0, WIDTH**-0.5, (WIDTH, WIDTH)), jnp.float32), jnp.full(WIDTH, 0.1))
        for _ in range(depth)
    ]
    return loss, layers, jnp.asarray(rng.normal(size=(4, WIDTH)), jnp.float32)


def training(block, depth=DEPTH):
    return ow.SGD(0.1).minimize(*residual(block, depth))


def compiled(program):
    run = lower(program, [*program.next_state.values(), *program.outputs])
    given = [[jax.ShapeDtypeStruct(v.shape, v.dtype) for v in g] for g in (program.state, program.inputs)]
    return jax.jit(run).lower(*given).compile()


@pytest.mark.parametrize("kind", BLOCKS)
def test_the_compiler_does_less_for_the_same_step(kind):
    _, layers, x = residual(BLOCKS[kind])
    program = training(BLOCKS[kind])
    plain, fenced = compiled(program), compiled(fence(program))
    given = {v.name: value for v, value in zip(program.parameters, jax.tree.leaves(layers), strict=True)}
    state = [given.get(v.name, jnp.full(v.shape, 0.1, v.dtype)) for v in program.state]
    for found, expected in zip(fenced(state, [x]), plain(state, [x]), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    if jax.default_backend() == "cpu":
        assert len(fenced.as_text()) < 0.95 * len(plain.as_text())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_fence_changes_no_number(dtype):
    program = fence(training(BLOCKS["scaled"]))
    assert fences(program)
    (body,) = {op.body for op in program.ops if op.type == "fence"}
    values = np.array([0.0, -0.0, 1.5, -3e4, 6e4, np.inf, -np.inf, np.nan, 1e-7, -1e-7] * 4)
    x = jnp.asarray(values, jnp.float32)[: 4 * WIDTH].reshape(4, WIDTH)
    assert np.array_equal(np.asarray(body(x)[0]).view(np.uint32), np.asarray(x).view(np.uint32))
    low = x.astype(dtype)
    same = jnp.maximum(low, low - 1)
    np.testing.assert_array_equal(np.asarray(same, np.float32), np.asarray(low, np.float32))


def test_it_leaves_alone_what_is_shallow():
    program = training(BLOCKS["scaled"], depth=1)
    assert fence(program).ops == program.ops
    worth, reason = worth_fencing(program)
    assert not worth
    assert "builds on" in reason


def test_it_leaves_alone_plain_layers():
    def loss(layers, x):
        for w, b in layers:
            x = jax.nn.relu(x @ w + b)
        return jnp.mean(x**2)

    _, layers, x = residual(BLOCKS["scaled"])
    assert not fences(fence(ow.Adam(0.1).minimize(loss, layers, x)))


def test_it_is_for_cpu():
    program = training(BLOCKS["scaled"])
    assert fence(program, platform="gpu").ops == program.ops
    assert worth_fencing(program, "gpu") == (
        False,
        "only XLA's CPU compiler computes cheap values again; this is for gpu",
    )


def test_it_says_what_it_would_fence():
    program = training(BLOCKS["scaled"])
    worth, reason = worth_fencing(program)
    assert worth
    count = len(fences(fence(program)))
    assert reason.startswith(f"{count} values would be computed again for each reader: ")


def test_names_stay_and_later_ops_read_the_fence():
    program = training(BLOCKS["scaled"])
    fenced = fence(program)
    assert set(program.variables) < set(fenced.variables)
    assert (fenced.outputs, fenced.gradients) == (program.outputs, program.gradients)
    assert fenced.next_state == program.next_state
    behind = {op.inputs[0]: op.outputs[0] for op in fenced.ops if op.type == "fence"}
    assert [v.name for v in behind.values()] == [f"fenced({v.name})" for v in behind]
    readers = [op for op in fenced.ops if not behind.keys().isdisjoint(op.inputs)]
    assert {op.type for op in readers} == {"fence"}


def test_twice_is_once():
    program = fence(training(BLOCKS["scaled"]))
    assert len(fences(fence(program))) == len(fences(program))


def test_it_is_replayed_for_a_batch_of_another_length():
    loss, layers, x = residual(BLOCKS["scaled"])
    step = ow.compile(fence(training(BLOCKS["scaled"])))
    _, out = step(step.init(layers), x[:2])
    assert step.traces == 1
    np.testing.assert_allclose(out.loss, jax.jit(loss)(layers, x[:2]), rtol=1e-5)
