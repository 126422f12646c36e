"""Many steps in one call are the same steps: numbers, checks, errors; and the host does not wait."""

from __future__ import annotations

import itertools
import threading
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow
from onward.execute.loop import groups
from onward.execute.many_steps import ManySteps

FEATURES, CLASSES, ROWS = 3, 4, 5


def loss(params, x, labels):
    logits = jnp.tanh(x @ params["w"]) @ params["v"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()


def with_logits(params, x, labels):
    logits = x @ params["w"] @ params["v"]
    return jnp.mean((logits - labels[:, None]) ** 2), {"logits": logits, "mean": logits.mean()}


def parameters():
    rng = np.random.default_rng(0)
    return {
        "w": rng.normal(size=(FEATURES, FEATURES)).astype(np.float32),
        "v": rng.normal(size=(FEATURES, CLASSES)).astype(np.float32),
    }


def data(count, rows=ROWS, seed=1):
    rng = np.random.default_rng(seed)
    return [
        (rng.normal(size=(rows, FEATURES)).astype(np.float32), rng.integers(0, CLASSES, rows, np.int32))
        for _ in range(count)
    ]


def step_of(function=loss, optimizer=None, **options):
    optimizer = optimizer or ow.Momentum(1e-2)
    program = optimizer.minimize(function, parameters(), *data(1)[0], has_aux=function is with_logits)
    return ow.compile(program, **options)


@pytest.fixture(scope="module")
def step():
    return step_of(fetch=["grad(w)"])


@pytest.fixture(scope="module")
def many(step):
    return ManySteps(step)


def one_by_one(step, batches):
    state, outs = step.init(parameters()), []
    for batch in batches:
        state, out = step(state, *batch)
        outs.append(out)
    return state, outs


def expect_equal(found, expected):
    (state, outs), (other, singles) = found, expected
    for name in state:
        np.testing.assert_array_equal(np.asarray(state[name]), np.asarray(other[name]), err_msg=name)
    assert len(outs) == len(singles)
    np.testing.assert_array_equal(outs.loss, [float(out.loss) for out in singles])


@pytest.mark.parametrize(("batches", "steps"), [(6, 3), (7, 3), (2, 3), (1, 1), (4, 1)])
def test_steps_in_one_call_are_the_steps(step, many, batches, steps):
    found = many.run(step.init(parameters()), data(batches), steps=steps)
    expect_equal(found, one_by_one(step, data(batches)))
    grads = found[1]["grad(w)"]
    assert grads.shape == (batches, FEATURES, FEATURES)
    np.testing.assert_array_equal(grads[-1], one_by_one(step, data(batches))[1][-1]["grad(w)"])


@pytest.mark.parametrize(
    "spell",
    [
        tuple,
        list,
        lambda b: {"x": b[0], "labels": b[1]},
        lambda b: (b[0].tolist(), b[1].tolist()),
        lambda b: (jnp.asarray(b[0]), b[1]),
        lambda b: (b[0].astype(np.float64), b[1].astype(np.int64)),
    ],
    ids=["tuple", "list", "dict", "lists of numbers", "on a device", "wide"],
)
def test_batches_are_given_as_for_one_step(step, many, spell):
    expected = one_by_one(step, data(5))
    expect_equal(many.run(step.init(parameters()), map(spell, data(5)), steps=2), expected)


def test_batches_of_another_length_run_in_their_place():
    step = step_of(with_logits, ow.SGD(0.1))
    many = ManySteps(step)
    batches = [*data(3), *data(1, rows=2), *data(2, seed=5), *data(1, rows=1)]
    state, outs = many.run(step.init(parameters()), batches, steps=2)
    expect_equal((state, outs), one_by_one(step, batches))
    assert [x.shape[0] for x in outs.aux["logits"]] == [5, 5, 5, 2, 5, 5, 1]
    assert outs.aux["mean"].shape == (7,)
    assert outs.value[0].shape == (7,)
    assert many.compilations == 1


def test_a_reader_is_read_once_through(step, many):
    x, labels = (np.concatenate(column) for column in zip(*data(4), strict=True))
    reader = ow.batches((x, labels), ROWS)
    expect_equal(many.run(step.init(parameters()), reader, steps=2), one_by_one(step, data(4)))


def test_one_loop_is_compiled_for_a_shape_and_a_number_of_steps(step):
    many = ManySteps(step)
    state = step.init(parameters())
    for _ in range(2):
        state, _ = many.run(state, data(4), steps=2)
    assert many.compilations == 1
    many.run(state, data(3), steps=3)
    assert many.compilations == 2


def test_data_in_containers_and_data_that_is_not_read():
    def function(w, batch):
        return jnp.mean((batch["x"] * w) ** 2)

    batches = [{"x": np.full(2, i, np.float32), "unread": np.ones(3, np.float32)} for i in range(4)]
    step = ow.compile(ow.SGD(0.1).minimize(function, jnp.float32(1.0), batches[0]))
    state, outs = ManySteps(step).run(step.init(jnp.float32(1.0)), batches, steps=2)
    w, losses = 1.0, []
    for i in range(4):
        losses.append((i * w) ** 2)
        w -= 0.1 * 2 * i * i * w
    np.testing.assert_allclose(outs.loss, losses, rtol=1e-5)
    np.testing.assert_allclose(state.parameters, w, rtol=1e-5)


def test_schedules_dropout_and_hyperparameters_go_on_as_in_single_steps():
    def network():
        x = ow.data("x", (None, FEATURES))
        return jnp.mean(ow.layer.batch_norm(ow.layer.dropout(ow.layer.fc(x, 4), 0.5)) ** 4)

    step = ow.compile(ow.Momentum(lambda step: 0.1 / (1 + step)).minimize(network))
    batches = [(x,) for x, _ in data(6)]
    expected = step.init(seed=3).replace({"momentum": 0.5})
    losses = []
    for batch in batches:
        expected, out = step(expected, *batch)
        losses.append(float(out.loss))
    state, outs = ManySteps(step).run(step.init(seed=3).replace({"momentum": 0.5}), batches, steps=3)
    np.testing.assert_allclose(outs.loss, losses, rtol=1e-6)
    for name in state:
        if not jnp.issubdtype(state[name].dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(state[name], expected[name], rtol=1e-5, atol=1e-7, err_msg=name)


def test_the_state_that_was_given_is_spent_unless_nothing_is_donated(step, many):
    state = step.init(parameters())
    many.run(state, data(2), steps=2)
    assert state.is_spent
    with pytest.raises(ow.StateError, match="buffers over"):
        many.run(state, data(2), steps=2)
    kept = step.init(parameters())
    ManySteps(step, donates=False).run(kept, data(2), steps=2)
    assert not kept.is_spent


def test_what_no_step_changes_is_not_donated():
    program = ow.append_backward(ow.trace(loss, parameters(), *data(1)[0]), parameter_list=["w"])
    step = ow.compile(ow.SGD(0.1).create_optimization_pass(program))
    state = step.init(parameters())
    frozen = state["v"]
    following, _ = ManySteps(step).run(state, data(2), steps=2)
    np.testing.assert_array_equal(frozen, parameters()["v"])
    np.testing.assert_array_equal(following["v"], frozen)


def test_batches_are_read_in_the_thread_that_asked_and_no_further_than_needed(step, many):
    read = []

    def reader():
        for batch in data(6):
            read.append(threading.current_thread())
            yield batch

    many.run(step.init(parameters()), itertools.islice(reader(), 5), steps=2)
    assert read == [threading.current_thread()] * 5


def test_a_guard_stops_between_two_calls():
    step = ow.compile(ow.guard(ow.SGD(0.1).minimize(loss, parameters(), *data(1)[0]), "stop"))
    bad = [(np.full((ROWS, FEATURES), np.inf, np.float32), data(1)[0][1])]
    state, _ = ManySteps(step).run(step.init(parameters()), [*data(1), *bad, *data(2)], steps=2)
    with pytest.raises(ow.NonFiniteError):
        step.expect_going(state)
    first, _ = one_by_one(step, data(1))
    np.testing.assert_array_equal(state["w"], first["w"])

    def look(state):
        jax.block_until_ready(jax.tree.leaves(state))
        step._checks.look(state)

    with pytest.raises(ow.NonFiniteError):
        ManySteps(step, look=look).run(step.init(parameters()), [*bad, *data(5)], steps=2)


def test_convolutions_run_one_by_one_on_a_cpu():
    def network(w, x):
        return jnp.mean(jax.lax.conv(x, w, (1, 1), "SAME") ** 2)

    w, x = jnp.ones((1, 1, 3, 3)), jnp.ones((2, 1, 4, 4))
    step = ow.compile(ow.SGD(0.1).minimize(network, w, x))
    many = ManySteps(step)
    assert jax.default_backend() != "cpu" or "convolution" in (many.alone or "")
    _, outs = many.run(step.init(w), [(x,)] * 3, steps=3)
    assert outs.loss.shape == (3,)
    assert many.compilations == (jax.default_backend() != "cpu")


def test_several_devices_take_their_parts_of_every_batch():
    batches = data(3, rows=4)
    program = ow.replicate(ow.SGD(0.1).minimize(loss, parameters(), *batches[0]), devices=2)
    step = ow.compile(program)
    many = ManySteps(step)
    assert "2 devices" in (many.alone or "")
    expect_equal(many.run(step.init(parameters()), batches, steps=3), one_by_one(step, batches))


@pytest.mark.parametrize(("platform", "where"), [("cpu", "host"), ("gpu", "device")])
def test_batches_are_stacked_where_they_lie(monkeypatch, platform, where):
    lies_on = SimpleNamespace(platform=platform)
    x = Mock(spec=jax.Array, dtype=np.dtype("float32"), devices=lambda: [lies_on])
    monkeypatch.setattr(groups, "_stacked_on_device", lambda values: "device")
    monkeypatch.setattr(groups.np, "stack", lambda values: "host")
    batches = [groups.StackableBatch(i, (), {}, [x], ()) for i in range(2)]
    assert [group.stacked for group in groups.grouped(batches, 2)] == [[where]]


def good(number):
    return data(number)


BAD = {
    "steps": (lambda: good(1), 0, "steps is 0; expected a whole number"),
    "no iterable": (lambda: 3, 2, "batches is 3; expected an iterable"),
    "one batch": (lambda: {"x": 1}, 2, "a dict of 1; expected an iterable"),
    "nothing": (list, 2, "expected at least one batch"),
    "structure": (lambda: [*good(2), good(1)[0][:1]], 2, r"batch 2 .*takes 2 data arguments"),
    "dtype": (lambda: [*good(1), (good(1)[0][0] > 0, good(1)[0][1] * 1.5)], 2, r"batch 1 .*expected"),
    "rank": (lambda: [*good(1), (good(1)[0][0][0], good(1)[0][1])], 2, r"batch 1 .*of 1 axes"),
    "no rows": (lambda: [*good(3), *data(1, rows=0)], 2, r"batch 3 .*holds nothing"),
    "name": (lambda: [{"x": 1, "label": 2}], 2, r"batch 0 .*no data named 'label'"),
    "no number": (lambda: [("a", "b")], 2, r"batch 0 "),
}


@pytest.mark.parametrize(("batches", "steps", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_named(step, many, batches, steps, message):
    with pytest.raises(ow.ArgumentError, match=message):
        many.run(step.init(parameters()), batches(), steps=steps)


def test_labels_out_of_range_are_refused_before_they_reach_a_device():
    def network():
        x, labels = ow.data("x", (None, FEATURES)), ow.data("labels", (None,), "int32")
        return ow.layer.cross_entropy(ow.layer.fc(x, CLASSES), labels)

    step = ow.compile(ow.SGD(0.1).minimize(network))
    wrong = data(4)
    wrong[3][1][2] = CLASSES
    with pytest.raises(ow.ArgumentError, match=r"batch 3 .*'labels' holds 4 at \[2\]"):
        ManySteps(step).run(step.init(), wrong, steps=2)


def test_what_the_reader_raises_comes_through(step, many):
    def read():
        yield from data(2)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        many.run(step.init(parameters()), read(), steps=2)


def test_not_under_a_trace(step, many):
    with pytest.raises(ow.ArgumentError, match=r"jax\.lax\.scan"):
        jax.jit(lambda state: many.run(state, data(2), steps=2)[0])(step.init(parameters()))
    with pytest.raises(ow.ArgumentError, match="the first argument is the State"):
        many.run(parameters(), data(2), steps=2)


def test_a_reader_that_fills_one_array_again_and_again():
    one = np.float32(1.0)
    step = ow.compile(ow.SGD(0.25).minimize(lambda w, x: jnp.mean((w - x) ** 2), one, np.ones(3, "float32")))

    def reader():
        batch = np.zeros(3, "float32")
        for i in range(6):
            batch[:] = i
            yield batch

    _, expected = step.run(step.init(one), reader(), steps=1)
    _, found = step.run(step.init(one), reader(), steps=3)
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-6)


def test_one_step_of_many():
    one = np.float32(1.0)
    step = ow.compile(ow.SGD(0.25).minimize(lambda w, x: (w - x) ** 2, one, one), fetch=["grad(w)"])
    _, outs = step.run(step.init(one), [1.0, 2.0, 3.0, 4.0, 5.0], steps=2)
    assert [float(out.loss) for out in outs] == outs.loss.tolist()
    assert float(outs[-1]["grad(w)"]) == outs["grad(w)"][4]
    with pytest.raises(IndexError):
        outs[5]
    assert [name in outs for name in (4, -5, 5, -6)] == [True, True, False, False]
    assert [name in outs for name in ("grad(w)", "loss", "grad(x)")] == [True, True, False]
