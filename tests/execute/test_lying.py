"""A step runs where its arrays lie: on another device, or sharded over several, as under ``jax.jit``."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import onward as ow

X = np.linspace(-1, 1, 128, dtype="float32").reshape(16, 8)
PARAMETERS = {"w": jnp.linspace(-1, 1, 128, dtype="float32").reshape(8, 16), "b": jnp.zeros(16)}


def loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) - 0.5) ** 2)


def mesh_of(kind):
    """Eight devices in a row; jax.make_mesh makes the axis a part of types."""
    return jax.make_mesh((8,), ("d",)) if kind == "explicit" else Mesh(np.array(jax.devices()), ("d",))


def spread(spec, kind="auto"):
    return NamedSharding(mesh_of(kind), spec)


def sharded(kind="auto"):
    return {
        "w": jax.device_put(PARAMETERS["w"], spread(P(None, "d"), kind)),
        "b": jax.device_put(PARAMETERS["b"], spread(P(), kind)),
    }


def trained(step, state, x, steps=3):
    for _ in range(steps):
        state, out = step(state, x)
    return state, out


def expect_alike(state, other):
    for name in other:
        np.testing.assert_allclose(state[name], other[name], rtol=2e-5, atol=2e-6)


@pytest.fixture(scope="module")
def step():
    return ow.compile(ow.Adam(1e-2).minimize(loss, PARAMETERS, X))


@pytest.fixture(scope="module")
def single(step):
    return trained(step, step.init(PARAMETERS), X)[0]


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_parameters_and_their_slots_stay_sharded(step, single, kind):
    before = step.compilations
    state = step.init(sharded(kind))
    assert state["w/mean"].sharding == spread(P(None, "d"), kind)
    state, _ = trained(step, state, X)
    assert state.parameters["w"].sharding == spread(P(None, "d"), kind)
    assert state["w/variance"].sharding == spread(P(None, "d"), kind)
    assert state["b/mean"].sharding.is_equivalent_to(spread(P(), kind), 1)
    assert state.parameters["w"].addressable_shards[0].data.shape == (8, 2)
    expect_alike(state, single)
    assert step.compilations == before + 1  # not again for each step


def test_jit_keeps_them_just_so(step):
    state = step.init(sharded())
    alike = jax.jit(jax.grad(loss))(sharded(), jnp.asarray(X))
    following, _ = step(state, X)
    assert following["w"].sharding.is_equivalent_to(alike["w"].sharding, 2)


def test_a_sharded_batch_stays_so(step, single):
    x = jax.device_put(X, spread(P("d")))
    state, out = trained(step, step.init(PARAMETERS), x)
    assert state["w"].sharding == spread(P())
    assert out.loss.devices() == set(jax.devices())
    expect_alike(state, single)
    both, _ = trained(step, step.init(sharded()), x)
    assert both["w"].sharding == spread(P(None, "d"))
    expect_alike(both, single)


def test_another_device(step, single):
    one = jax.devices()[1]
    state, out = trained(step, step.init(jax.device_put(PARAMETERS, one)), X)
    assert state["w"].devices() == state["step"].devices() == out.loss.devices() == {one}
    expect_alike(state, single)
    state, _ = step(step.init(PARAMETERS), jax.device_put(X, one))
    assert state["w"].devices() == {one}
    again, out = step(step.init(PARAMETERS), X)  # and where nobody says a device
    assert again["w"].devices() == out.loss.devices() == {jax.devices()[0]}


def test_different_devices_are_refused_by_name(step):
    state = step.init(jax.device_put(PARAMETERS, jax.devices()[1]))
    with pytest.raises(ow.ArgumentError, match=r"'b', 'w' and \d more on device 1; 'x' on device 2\."):
        step(state, jax.device_put(X, jax.devices()[2]))
    mixed = {**sharded(), "b": jax.device_put(PARAMETERS["b"], jax.devices()[3])}
    with pytest.raises(ow.ArgumentError, match=r"'b' on device 3; 'w' on devices 0, 1, 2, .*device_put"):
        step.init(mixed)
    turned = Mesh(np.array(jax.devices()[::-1]), ("d",))
    with pytest.raises(ow.ArgumentError, match="'x' on devices 7, 6, 5"):
        step(step.init(sharded()), jax.device_put(X, NamedSharding(turned, P("d"))))


def test_a_replaced_value_stays_where_it_was_put(step):
    state = step.init(PARAMETERS).replace({"w": sharded()["w"]})
    state, _ = step(state, X)
    assert state["w"].sharding == state["w/mean"].sharding == spread(P(None, "d"))


def test_what_shares_a_buffer_shares_none_when_it_comes_sharded():
    def deep(params, x):
        for w in params:
            x = x + jnp.tanh(x @ w)
        return jnp.mean(x**2)

    parameters = [jnp.eye(8)] * 6
    step = ow.compile(ow.Momentum(0.1).minimize(deep, parameters, X), roll=True)
    assert step.plan().storage is not None
    one, _ = trained(step, step.init(parameters), X, 2)
    state, _ = trained(step, step.init(jax.device_put(parameters, spread(P("d")))), X, 2)
    assert {w.sharding for w in state.parameters} == {spread(P("d"))}
    expect_alike(state, one)


def test_many_steps_in_one_call_stay_sharded(step, single):
    state, outs = step.run(step.init(sharded()), [X] * 3, steps=3)
    assert state["w"].sharding == spread(P(None, "d"))
    assert outs.loss.shape == (3,)
    expect_alike(state, single)
    state, _ = step.run(step.init(PARAMETERS), [jax.device_put(X, spread(P("d")))] * 3, steps=3)
    assert state["w"].sharding == spread(P())
    expect_alike(state, single)


def network():
    return jnp.mean((ow.layer.fc(ow.data("x", (None, 8)), 16, name="f") - 0.5) ** 2)


def test_trainer_checkpoints_and_evaluator(tmp_path):
    batches = [{"x": X}] * 2
    place = spread(P(None, "d"))
    model = ow.Model(network, {"f/w": jax.device_put(PARAMETERS["w"], place)})
    trainer = ow.Trainer(model, ow.Momentum(0.1), checkpoints=tmp_path)
    trainer.train(lambda: iter(batches))
    alone = ow.Trainer(ow.Model(network, {"f/w": PARAMETERS["w"]}), ow.Momentum(0.1))
    alone.train(lambda: iter(batches))
    trainer.checkpoint()
    trainer.restore()
    assert trainer.state["f/w"].sharding == trainer.state["f/w/velocity"].sharding == place
    expect_alike(trainer.state, alone.state)
    found, expected = (t.test(lambda: iter(batches)) for t in (trainer, alone))
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_session_keeps_them_and_restores_them(tmp_path, single):
    session = ow.Session(checkpoints=tmp_path)
    for name, value in sharded().items():
        session[name] = value
    program = ow.Adam(1e-2).minimize(loss, PARAMETERS, X)
    for _ in range(3):
        session.run(program, feed={"x": X})
    session.save()
    session.restore()
    assert session["w"].sharding == session["w/mean"].sharding == spread(P(None, "d"))
    np.testing.assert_allclose(session["w"], single["w"], rtol=2e-5, atol=2e-6)


def by_hand(params, x):
    multiply = jax.shard_map(
        lambda x, w: x @ w, mesh=mesh_of("auto"), in_specs=(P(), P(None, "d")), out_specs=P(None, "d")
    )
    return jnp.mean((jnp.tanh(multiply(x, params["w"]) + params["b"]) - 0.5) ** 2)


def constrained(params, x):
    w = jax.lax.with_sharding_constraint(params["w"], spread(P(None, "d")))
    return loss({**params, "w": w}, x)


@pytest.mark.parametrize("function", [by_hand, constrained])
def test_a_mesh_of_its_own_runs_but_not_replicated(single, function):
    program = ow.Adam(1e-2).minimize(function, PARAMETERS, X)
    step = ow.compile(program)
    expect_alike(trained(step, step.init(PARAMETERS), X)[0], single)
    halves = ow.accumulate(program, 2)
    for refused in (program, halves):
        with pytest.raises(ow.GraphError, match=r"test_lying\.py:\d+, over a mesh of its own.*device_put"):
            ow.replicate(refused, 2)
    step = ow.compile(halves)
    expect_alike(trained(step, step.init(PARAMETERS), X)[0], single)


def test_replicate_refuses_sharded_parameters_and_takes_replicated_ones():
    step = ow.compile(ow.replicate(ow.SGD(0.1).minimize(loss, PARAMETERS, X), 8))
    with pytest.raises(ow.ArgumentError, match=r"'w' comes sharded.*without replicate.*device_get\(w\)"):
        step.init(sharded())
    whole = jax.device_put(PARAMETERS, spread(P()))
    _, out = step(step.init(whole), jax.device_put(X, spread(P("d"))))
    assert float(out.loss) == pytest.approx(float(loss(PARAMETERS, X)), rel=1e-5)
