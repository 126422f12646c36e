"""One page that walks the whole flow: trace, derive, compile, train, look inside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow


def loss(params, x, y):
    with jax.named_scope("hidden"):
        h = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.mean((h @ params["w2"] - y) ** 2)


@pytest.fixture(scope="module")
def case():
    k1, k2, k3 = jax.random.split(jax.random.key(0), 3)
    params = {
        "w1": jax.random.normal(k1, (4, 8)),
        "b1": jnp.zeros(8),
        "w2": jax.random.normal(k2, (8, 1)),
    }
    x = jax.random.normal(k3, (16, 4))
    return params, x, x.sum(1, keepdims=True)


def test_the_listing_grows_by_one_pass_at_a_time(case):
    forward = ow.trace(loss, *case)
    backward = ow.append_backward(forward)
    training = ow.append_update(backward, ow.SGD(0.1))
    passes = [{str(op.made_by) for op in p.ops} for p in (forward, backward, training)]
    assert passes == [{"forward"}, {"forward", "backward"}, {"forward", "backward", "update"}]
    assert [line for line in str(training).splitlines() if line.startswith("update")]
    assert len(backward.ops) > len(forward.ops) < len(training.ops)


def test_fifty_steps_equal_the_hand_written_loop(case):
    params, x, y = case
    step = ow.compile(ow.Momentum(0.05, 0.9).minimize(loss, params, x, y))
    state = step.init(params)
    velocity = jax.tree.map(jnp.zeros_like, params)

    @jax.jit
    def by_hand(params, velocity):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
        return jax.tree.map(lambda p, v: p - 0.05 * v, params, velocity), velocity, value

    for _ in range(50):
        state, out = step(state, x, y)
        params, velocity, value = by_hand(params, velocity)
        np.testing.assert_allclose(out.loss, value, rtol=1e-5)
    for name, value in state.parameters.items():
        np.testing.assert_allclose(value, params[name], rtol=2e-5, atol=1e-6)


def test_every_activation_and_gradient_can_be_fetched(case):
    params, x, y = case
    step = ow.compile(ow.SGD(0.1).minimize(loss, *case), fetch=["hidden/tanh", "grad(hidden/tanh)"])
    _, out = step(step.init(params), x, y)
    h = jnp.tanh(x @ params["w1"] + params["b1"])
    np.testing.assert_allclose(out["hidden/tanh"], h, rtol=1e-6)
    expected = jax.grad(lambda h: jnp.mean((h @ params["w2"] - y) ** 2))(h)
    np.testing.assert_allclose(out["grad(hidden/tanh)"], expected, rtol=1e-5, atol=1e-7)


def test_the_forward_part_of_a_training_program_reads_its_state(case):
    params, x, y = case
    program = ow.SGD(0.1).minimize(loss, *case)
    train, test = ow.compile(program), ow.compile(ow.prune(program, [program.loss]))
    state, _ = train(train.init(params), x, y)
    same, out = test(state, x, y)
    np.testing.assert_allclose(out.loss, loss(state.parameters, x, y), rtol=1e-6)
    assert same is not state
    assert not state.is_spent


def test_nothing_is_traced_or_compiled_twice(case):
    params, x, y = case
    traces = []

    def counted(params, x, y):
        traces.append(x.shape)
        return loss(params, x, y)

    step = ow.compile(ow.Adam(1e-2).minimize(counted, params, x, y))
    state = step.init(params)
    for rows in (16, 16, 7, 16, 7):
        state, _ = step(state, x[:rows], y[:rows])
    state = state.replace({"learning_rate": 0.5})
    state, _ = step(state, x, y)
    assert traces == [(16, 4), (7, 4)]
    assert (step.traces, step.compilations) == (1, 2)


def test_a_pruned_program_asks_only_for_the_data_it_reads(case):
    params, x, _ = case
    program = ow.SGD(0.1).minimize(loss, *case)
    predict = ow.compile(ow.prune(program, ["dot_general"]))
    assert [v.name for v in predict.program.inputs] == ["x"]
    state = ow.compile(program).init(params)
    for rows in (16, 5):
        _, out = predict(state, x[:rows])
        expected = jnp.tanh(x[:rows] @ params["w1"] + params["b1"]) @ params["w2"]
        np.testing.assert_allclose(out["dot_general"], expected, rtol=1e-5)
