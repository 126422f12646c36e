"""Steps that are not finite are left out, or nothing changes from then on."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.develop.guard import guard, stop_of
from onward.execute.nonfinite.checks import Stopped

RNG = np.random.default_rng(0)
BATCHES = [RNG.normal(size=(8, 3)).astype("float32") for _ in range(7)]
BAD = (2, 5)
PARAMS = {"skipped": RNG.normal(size=(3, 4)).astype("float32"), "b": np.ones(4, "float32")}


def loss(params, x):
    return jnp.mean(jnp.tanh(x @ params["skipped"] + params["b"]) ** 2)


def normalized():
    x = ow.layer.batch_norm(ow.layer.fc(ow.data("x", (8, 3)), 4))
    return jnp.mean(jnp.tanh(ow.layer.dropout(x, 0.5)) ** 2)


def spoiled(batch, value=np.nan):
    """The batch with one number that is none, in the part of the last device."""
    batch = batch.copy()
    batch[-1, 0] = value
    return batch


def bits(state, names=None):
    """Values of a State, to the bit."""

    def data(value):
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(value) if is_key else value).tobytes()

    return {name: data(state[name]) for name in names or state}


def run(program, *series, params=(PARAMS,)):
    """The State after each series of batches, by one executable, and the losses of the last."""
    step = ow.compile(program, donate=False)
    ends = []
    for batches in series:
        state, losses = step.init(*params), []
        for batch in batches:
            try:
                state, out = step(state, batch)
            except ow.NonFiniteError:
                break
            losses.append(float(out.loss))
        ends.append(state)
    return *ends, losses


def assert_close(state, other):
    """States of two executables, which may round differently."""
    for name in other:
        if not jnp.issubdtype(other[name].dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(state[name], other[name], rtol=1e-5, atol=1e-7)


OPTIMIZERS = [ow.SGD(0.1), ow.Adam(lambda step: 0.1 / (step + 1.0))]
SPOILED = [spoiled(b, (np.nan, np.inf)[i % 2]) if i in BAD else b for i, b in enumerate(BATCHES)]
GOOD = [b for i, b in enumerate(BATCHES) if i not in BAD]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_skipped_steps_leave_no_trace(optimizer):
    program = optimizer.minimize(loss, PARAMS, BATCHES[0])
    plain, _ = run(program, GOOD)
    without, state, losses = run(guard(program), GOOD, SPOILED)
    assert bits(without, list(plain)) == bits(state, list(plain))
    assert_close(state, plain)
    assert int(state["skipped_1"]) == len(BAD)
    assert [i for i, x in enumerate(losses) if not np.isfinite(x)] == [
        2
    ]  # infinity spoils the gradients alone


def test_carried_statistics_stay_and_random_keys_move_on():
    step = ow.compile(guard(ow.SGD(0.1).minimize(ow.trace(normalized))), donate=False)
    before = step.init()
    after, _ = step(before, SPOILED[BAD[0]])
    changed = [name for name, value in bits(after).items() if value != bits(before)[name]]
    assert changed == ["key", "skipped"]
    for batch in BATCHES[:2]:
        after, _ = step(after, batch)
    moved = [name for name, value in bits(after).items() if value != bits(before)[name]]
    assert {"batch_norm_0/mean", "fc_0/w", "step"} < set(moved)


def test_after_a_stop_nothing_changes_any_more():
    program = guard(ow.Adam(0.1).minimize(ow.trace(normalized)), "stop")
    before, after, _ = run(program, BATCHES[: BAD[0]], SPOILED, params=())
    assert bool(after["stopped"])
    assert not bool(before["stopped"])
    names = [name for name in before if name not in ("stopped", "culprits")]
    assert bits(before, names) == bits(after, names)


def test_a_stopped_state_goes_on_when_it_is_told_to():
    step = ow.compile(guard(ow.SGD(0.1).minimize(loss, PARAMS, BATCHES[0]), "stop"), donate=False)
    begun, ends = step.init(PARAMS), []
    spoilt, _ = step(begun, SPOILED[BAD[0]])
    for state in (begun, spoilt.replace({"stopped": False})):
        for batch in GOOD:
            state, _ = step(state, batch)
        ends.append(bits(state, [*PARAMS, "step", "stopped", "culprits"]))
    assert ends[0] == ends[1]


def rooted(params, x):
    return jnp.sum(jnp.sqrt(params["a"] * x)) + jnp.sum(params["b"] ** 2)


def test_a_stop_names_the_gradient_the_line_and_the_step():
    """The root has no slope at 0: the loss is finite, one gradient is not."""
    params = {"a": jnp.ones(3), "b": jnp.ones(2)}
    program = ow.append_backward(ow.trace(rooted, params, jnp.ones(3)))
    program = guard(ow.append_update(ow.clip_by_global_norm(program, 1.0), ow.SGD(0.1)), "stop")
    step = ow.compile(program)
    state, out = step(step.init(params), jnp.ones(3))
    state, out = step(state, jnp.zeros(3))
    assert np.isfinite(out.loss)
    stop = stop_of(program)
    assert bool(state[stop.stopped])
    message = stop.message(state[stop.culprits].tolist(), int(state[stop.step]))
    line = rooted.__code__.co_firstlineno + 1
    assert message.startswith(
        f"'grad(a)' (mul_grad at test_guard.py:{line}) held NaN or infinity in the step"
    )
    assert "after 1 updates" in message
    assert "{'stopped': False}" in message
    assert "grad(b)" not in message


def test_what_is_infinite_in_the_loss_is_named_as_well():
    program = guard(ow.SGD(0.1).minimize(loss, PARAMS, BATCHES[0]), "stop")
    state, _ = run(program, [SPOILED[2]])
    stop = stop_of(program)
    assert repr(program.loss.name) in stop.message(state[stop.culprits].tolist(), 0)
    assert stop_of(guard(ow.SGD(0.1).minimize(loss, PARAMS, BATCHES[0]))) is None


MERGES = {"average": None, "buckets": ow.merge.Bucketed(64), "sharded": ow.Sharded()}
COUNTED = {"skip": GOOD, "stop": GOOD[: BAD[0]]}
MOMENTUM = ow.Momentum(0.1, 0.9).minimize(loss, PARAMS, BATCHES[0])


def on_two(program, merge):
    return ow.replicate(program, devices=2, merge=MERGES[merge])


@cache
def unguarded(merge):
    """Of each action, the State that no bad step was part of."""
    *ends, _ = run(on_two(MOMENTUM, merge), *COUNTED.values())
    return dict(zip(COUNTED, ends, strict=True))


@pytest.mark.parametrize("action", COUNTED)
@pytest.mark.parametrize("merge", MERGES)
def test_all_devices_leave_out_a_step_that_is_bad_on_one(merge, action):
    inside, outside = on_two(guard(MOMENTUM, action), merge), guard(on_two(MOMENTUM, merge), action)
    plain, state, _ = run(inside, COUNTED[action], SPOILED)
    names = ["skipped", "b", "b/velocity", "step"]
    assert bits(plain, names) == bits(state, names)
    assert_close(state, unguarded(merge)[action])
    if merge == "average":
        assert bits(state) == bits(run(outside, SPOILED)[0])
    assert ("all_min" in [op.type for op in outside.ops]) == (merge == "sharded")


def test_a_thousand_steps_of_which_every_seventh_is_bad():
    program = guard(
        ow.Momentum(0.05, 0.9).minimize(lambda w, x: jnp.sum((w - x) ** 2), jnp.zeros(3), jnp.ones(3))
    )
    step = ow.compile(program)
    targets = jnp.where(jnp.arange(1000)[:, None] % 7 == 3, jnp.nan, jnp.arange(3.0))

    @jax.jit
    def train(state):
        return jax.lax.scan(lambda s, x: (step.function(s, x)[0], ()), state, targets)[0]

    state = train(step.init(jnp.zeros(3)))
    assert int(state["skipped"]) == int(jnp.isnan(targets[:, 0]).sum()) == 143
    np.testing.assert_allclose(state.parameters, np.arange(3.0), atol=1e-6)


def test_a_guard_sits_beside_what_is_there():
    program = ow.Adam(0.1).minimize(loss, PARAMS, BATCHES[0])
    guarded = guard(program)
    assert [op.body for op in guarded.ops[: len(program.ops)]] == [op.body for op in program.ops]
    assert [op.type for op in guarded.ops].count("finite") == 1
    assert all(new.name == f"next({old.name})" for old, new in guarded.next_state.items())
    assert ow.for_test(guarded).next_state == {}


def test_a_batch_of_another_size_is_guarded_too():
    step = ow.compile(guard(ow.SGD(0.1).minimize(loss, PARAMS, BATCHES[0])))
    state, _ = step(step.init(PARAMS), SPOILED[2][3:])
    assert int(state["skipped_1"]) == 1


REFUSED = {
    "no update": (lambda p: guard(ow.append_backward(p)), ow.GraphError, r"no update.*Minimize first"),
    "twice": (lambda p: guard(guard(ow.SGD(0.1).minimize(p)), "stop"), ow.GraphError, "guarded already"),
    "another word": (lambda p: guard(ow.SGD(0.1).minimize(p), "halt"), ow.ArgumentError, "'skip' or 'stop'"),
}


@pytest.mark.parametrize(("make", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_a_guard_that_cannot_be(make, error, words):
    with pytest.raises(error, match=words):
        make(ow.trace(loss, PARAMS, BATCHES[0]))


def test_several_processes_look_at_one_call(monkeypatch):
    """A flag may be there for one process and not yet for another, which would step on alone."""
    program = ow.guard(ow.SGD(0.1).minimize(lambda w: jnp.sum(w), jnp.ones(2)), "stop")
    state = ow.compile(program).init(jnp.ones(2)).replace({"stopped": True})
    look = Stopped(stop_of(program)).look
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for _ in range(63):
        look(state)
    with pytest.raises(ow.NonFiniteError):
        look(state)
