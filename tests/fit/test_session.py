"""A Session: any part of a Program by naming targets, values kept by Variable between the runs."""

import os
import random
import signal
import threading
from collections import Counter
from contextlib import contextmanager
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 3)).astype("float32")
Y = (X.sum(1, keepdims=True) + 1).astype("float32")
FEED = {"x": X, "y": Y}


def network():
    hidden = ow.layer.fc(ow.data("x", (None, 3)), 4, act="tanh")
    return ow.layer.mse(ow.layer.fc(hidden, 1), ow.data("y", (None, 1)))


def noisy():
    """Dropout, batch normalization and a counter of its own."""
    seen = ow.state("seen", (), "int32")
    ow.assign(seen, seen + 1)
    hidden = ow.layer.batch_norm(ow.layer.fc(ow.data("x", (None, 3)), 4))
    hidden = ow.layer.dropout(hidden, 0.5)
    return ow.layer.mse(ow.layer.fc(hidden, 1), ow.data("y", (None, 1)))


@cache
def training(function=network, optimizer=None):
    return (optimizer or ow.Momentum(0.1)).minimize(ow.trace(function))


def values(session):
    """Every value of a session's scope, readable."""
    return {name: readable(session[name]) for name in session.scope}


def readable(value):
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(value) if is_key else value)


def changed(session, before):
    after = values(session)
    return {name for name in after if name in before and not np.array_equal(after[name], before[name])}


def compilations(action):
    """How many XLA computations an action compiles."""
    events = []

    def note(event, *_, **__):
        events.append(event)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        action()
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    return sum("backend_compile" in event for event in events)


# --------------------------------------------------------------------------- the early designs


def early():
    images, labels = ow.data("images"), ow.data("labels")
    w1, b1 = ow.var("w1"), ow.var("b1")
    hidden = ow.layer.fc(images, w=w1, b=b1)
    cost = ow.layer.mse(hidden, labels)
    return hidden, cost, w1, b1


@pytest.mark.parametrize("as_target", [lambda opt: opt, lambda opt: [opt]], ids=["opt", "[opt]"])
def test_the_network_of_the_early_designs(as_target):
    _, cost, w1, b1 = early()
    optimizer = ow.Adagrad(learning_rate=0.5)
    opt = optimizer.minimize(cost, parameter_list=[w1, b1])
    session = ow.Session()
    feed = {"images": X, "labels": Y}
    for _ in range(200):
        [loss] = session.run(target=as_target(opt), feed=feed, fetch=[cost])
    assert float(loss) < 1e-2
    np.testing.assert_allclose(session["w1"], np.ones((3, 1)), atol=0.1)


def test_adagrad_in_a_session_is_adagrad_by_hand():
    _, cost, *_ = early()
    opt = ow.Adagrad(learning_rate=0.1).minimize(cost)
    session = ow.Session()
    session["w1"], session["b1"] = np.zeros((3, 1), "float32"), np.zeros(1, "float32")
    params, sums = [np.zeros((3, 1)), np.zeros(1)], [0.0, 0.0]

    @jax.jit
    @jax.grad
    def gradient(p):
        return jnp.mean((X @ p[0] + p[1] - Y) ** 2)

    for _ in range(5):
        session.run(target=opt, feed={"images": X, "labels": Y})
        g = [np.asarray(d) for d in gradient(params)]
        sums = [s + d**2 for s, d in zip(sums, g, strict=True)]
        params = [p - 0.1 * d / (np.sqrt(s) + 1e-6) for p, d, s in zip(params, g, sums, strict=True)]
    np.testing.assert_allclose(session["w1"], params[0], rtol=1e-4)
    np.testing.assert_allclose(session["b1"], params[1], rtol=1e-4)


@pytest.mark.parametrize("shapes", [((None, 3), (None, 1)), (None, None)], ids=["declared", "left open"])
def test_a_cost_of_several_terms_can_be_minimized_and_fetched(shapes):
    x, y = ow.data("x", shapes[0]), ow.data("y", shapes[1])
    w = ow.var("w")
    fit = ow.layer.mse(ow.layer.fc(x, 1, w=w, b=False), y)
    penalty = 0.1 * (w * w)[0, 0]
    cost = fit + penalty
    opt = ow.SGD(0.1).minimize(cost)
    session = ow.Session()
    session["w"] = np.ones((3, 1), "float32")
    found = session.run(target=opt, feed=FEED, fetch=[cost, fit])
    expected = np.mean((X.sum(1, keepdims=True) - Y) ** 2)
    np.testing.assert_allclose(found, [expected + 0.1, expected], rtol=1e-5)
    gradient = 2 * X.T @ (X.sum(1, keepdims=True) - Y) / len(X)
    gradient[0, 0] += 0.2
    np.testing.assert_allclose(session["w"], 1 - 0.1 * gradient, rtol=1e-5)


def test_a_layer_alone_is_run_as_in_a_test():
    hidden, cost, *_ = early()
    dropped = ow.layer.dropout(hidden, 0.5)
    session = ow.Session()
    session.run(target=ow.SGD(0.1).minimize(cost), feed={"images": X, "labels": Y})
    before = values(session)
    [whole] = session.run(fetch=[dropped], feed={"images": X})
    np.testing.assert_allclose(whole, X @ before["w1"] + before["b1"], rtol=1e-5)
    assert set(values(session)) == set(before)
    assert changed(session, before) == set()


def test_feeds_may_be_keyed_by_the_declaration():
    x = ow.data("x", (None, 3))
    [total] = ow.Session().run(fetch=[x * 2], feed={x: X})
    np.testing.assert_array_equal(total, 2 * X)


# --------------------------------------------------------------------------- targets


TARGETS = {
    "the Program": (lambda p: p, {"fc_0", "fc_1"}),
    "a list of it": (lambda p: [p], {"fc_0", "fc_1"}),
    "its updates": (lambda p: p.updates, {"fc_0", "fc_1"}),
    "updates one by one": (lambda p: list(p.updates), {"fc_0", "fc_1"}),
    "one update": (lambda p: p.updates[-1], {"fc_1"}),
    "an update by name": (lambda p: "next(fc_0/w)", {"fc_0"}),
    "a Variable": (lambda p: p["next(fc_0/w)"], {"fc_0"}),
    "an update op": (lambda p: p.updates[-1].op, {"fc_1"}),
    "a gradient": (lambda p: "grad(fc_0/w)", set()),
    "a forward op": (lambda p: p.ops[0], set()),
    "the loss": (lambda p: "loss", set()),
}


@pytest.fixture(scope="module")
def begun():
    """A session after its first run, and the updates of each parameter so far."""
    session = ow.Session(training())
    session.run(target=training(), feed=FEED)
    return session, Counter(v.name for v in training().parameters)


@pytest.mark.parametrize(("choose", "trained"), TARGETS.values(), ids=TARGETS)
def test_a_target_changes_what_it_updates_and_nothing_else(begun, choose, trained):
    (session, updates), program = begun, training()
    before = values(session)
    assert session.run(target=choose(program), feed=FEED) == []
    moved = changed(session, before) - {"step"}
    assert {name.partition("/")[0] for name in moved} == trained
    updates.update(v.name for v in program.parameters if v.name in moved)
    assert int(session["step"]) == max(updates.values())


def test_only_what_the_targets_need_is_run():
    program = training()
    session = ow.Session(program)

    def ops(target):
        return [op.type for op in session.program(target).ops]

    everything = len(program.ops)
    assert ops(program) == ops(program.updates)
    assert everything - len(ops(program)) == 2  # the mean that is the loss, which no gradient reads
    assert ops("fc_0") == ["dot_general", "broadcast_in_dim", "add", "tanh"]
    assert not any("grad" in kind or kind == "momentum" for kind in ops("loss"))
    last, gradient = ops(program.updates[-1]), ops("grad(fc_1/b)")
    assert last.count("momentum") == 1
    assert len(gradient) < len(last) < everything
    assert ops("fc_0/w") == []
    assert session.program("fc_0").inputs == (program["x"],)


def test_what_is_not_needed_need_not_be_fed():
    session = ow.Session(training())
    [y] = session.run(fetch=["fc_1"], feed={"x": X})
    assert y.shape == (8, 1)
    assert session.run(fetch=["fc_1/b"])[0].tolist() == [0.0]
    [again] = session.run(fetch=["fc_1"], feed={**FEED, "y": "is not looked at"})
    np.testing.assert_array_equal(again, y)


def test_fetches_come_in_their_order_and_as_often_as_asked():
    program = training()
    session = ow.Session(program)
    chosen = ["fc_1", "loss", program["fc_0/w"], "fc_1", program.ops[0], "x"]
    found = session.run(fetch=chosen, feed=FEED)
    assert [np.shape(v) for v in found] == [(8, 1), (), (3, 4), (8, 1), (8, 4), (8, 3)]
    [alone] = session.run(fetch="loss", feed=FEED)
    assert float(alone) == float(found[1])


def test_a_fetched_parameter_is_its_value_before_the_update():
    program = training()
    session = ow.Session(program)
    before = session.run(fetch=["fc_0/w"])[0]
    fetched, following = session.run(target=program, feed=FEED, fetch=["fc_0/w", "next(fc_0/w)"])
    np.testing.assert_array_equal(fetched, before)
    np.testing.assert_array_equal(session["fc_0/w"], following)
    assert not np.array_equal(fetched, following)


def test_names_are_looked_up_in_the_program_that_was_given_or_run_last():
    def other():
        return ow.layer.mse(ow.layer.fc(ow.data("x", (None, 3)), 1, name="other"), ow.data("y", (None, 1)))

    one, two = training(), training(other)
    session = ow.Session()
    with pytest.raises(ow.ArgumentError, match=r"cannot tell which Program 'loss' belongs"):
        session.run(fetch=["loss"], feed=FEED)
    found = []
    for program in (one, two, one):
        [expected] = session.run(target=program, feed=FEED, fetch=["loss"])
        [now] = session.run(fetch=["loss"], feed=FEED)
        found.append((float(expected), float(now)))
    assert len({now for _, now in found}) == 3
    assert session.run(fetch=["fc_1"], feed=FEED)[0].shape == (8, 1)
    fixed = ow.Session(one)
    fixed.run(target=two, feed=FEED)
    assert fixed.run(fetch=["fc_1"], feed=FEED)[0].shape == (8, 1)


def test_a_program_to_come_is_the_last_program_too():
    hidden, cost, *_ = early()
    session = ow.Session()
    feed = {"images": X, "labels": Y}
    session.run(target=ow.SGD(0.1).minimize(cost), feed=feed)
    session.run(fetch=[hidden], feed={"images": X})
    [loss] = session.run(fetch=["loss"], feed=feed)
    [again] = session.run(fetch=[cost], feed=feed)
    assert float(loss) == pytest.approx(float(again))


# --------------------------------------------------------------------------- several optimizers


def sloped(name):
    """A cost whose gradient by one parameter is the mean of the data."""

    def cost():
        return ow.parameter(name, ()) * jnp.mean(ow.data("x", (None,)))

    cost.__name__ = f"cost_{name}"
    return ow.trace(cost)


def at_once():
    return ow.parameter("a", ()) * jnp.mean(ow.data("x", (None,))) - ow.parameter("b", ())


def slopes(count):
    return [np.full(4, [1.0, -3.0, 2.0][i % 3], "float32") for i in range(count)]


def adam_by_hand(gradients, rate=0.1):
    """Kingma and Ba, algorithm 1, in NumPy."""
    w = m = v = 0.0
    for t, g in enumerate(gradients, start=1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w -= rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return w


def test_each_optimizer_keeps_its_own_rate_counter_and_slots():
    a, b = ow.Adam(0.1).minimize(sloped("a")), ow.Adam(0.01).minimize(sloped("b"))
    c = ow.SGD(ow.schedule.linear(1.0, 0.0, steps=4)).minimize(sloped("c"))
    session = ow.Session()
    for i, x in enumerate(slopes(4)):
        for program in (a, b, b, c)[: 4 if i % 2 else 3]:
            session.run(target=program.updates, feed={"x": x})
    g = [float(x[0]) for x in slopes(4)]
    assert float(session["a"]) == pytest.approx(adam_by_hand(g), rel=1e-5)
    assert float(session["b"]) == pytest.approx(adam_by_hand(np.repeat(g, 2), 0.01), rel=1e-5)
    assert float(session["c"]) == pytest.approx(-(1.0 * g[1] + 0.75 * g[3]), rel=1e-6)
    assert [int(session[p["step"]]) for p in (a, b, c)] == [4, 8, 2]
    assert [int(session[n]) for n in ("step", "cost_b/step", "cost_c/step")] == [4, 8, 2]
    assert float(session[b["learning_rate"]]) == pytest.approx(0.01)


def test_two_optimizers_of_one_parameter_share_the_parameter_alone():
    slow, fast = (ow.Momentum(rate).minimize(sloped("w")) for rate in (0.5, 1.0))
    session, x = ow.Session(), {"x": np.ones(4, "float32")}
    for program in (slow, fast, slow):
        session.run(target=program, feed=x)
    assert float(session["w"]) == pytest.approx(-(0.5 + 1.0 + 0.5 * 1.9))
    assert float(session[slow["w/velocity"]]) == pytest.approx(1.9)
    assert float(session[fast["w/velocity"]]) == pytest.approx(1.0)


def test_a_network_and_an_optimizer_may_use_one_name():
    def counting_steps():
        step = ow.state("step", (), "int32")
        ow.assign(step, step + 10)
        return jnp.sum(ow.data("x", (None,))) + step

    session, x = ow.Session(), {"x": np.ones(4, "float32")}
    network, trained = ow.trace(counting_steps), ow.SGD(0.1).minimize(sloped("w"))
    for _ in range(2):
        session.run(target=trained, feed=x)
        session.run(target=network, feed=x)
    assert [int(session[p["step"]]) for p in (trained, network)] == [2, 20]


def test_the_same_optimizer_derived_again_goes_on():
    session = ow.Session()
    for i, x in enumerate(slopes(3)):
        session.run(target=ow.Adam(0.1).minimize(sloped("w")), feed={"x": x[: 4 - i]})
    assert float(session["w"]) == pytest.approx(adam_by_hand([1.0, -3.0, 2.0]), rel=1e-5)
    assert int(session["step"]) == 3


def test_who_trains_nothing_reads_what_the_optimizer_of_its_cost_keeps():
    both = [
        ow.SGD(rate, rules=[ow.EMA(0.5)]).minimize(sloped(name)) for name, rate in (("a", 1.0), ("b", 3.0))
    ]
    session, x = ow.Session(), {"x": np.ones(4, "float32")}
    for program in (*both, *both):
        session.run(target=program, feed=x)
    found = [session.run(target=ow.for_evaluation(p), feed=x, fetch=["loss"])[0] for p in both]
    alone = []
    for program in both:
        other = ow.Session()
        other.run(target=program, feed=x)
        other.run(target=program, feed=x)
        alone.append(other.run(target=ow.for_evaluation(program), feed=x, fetch=["loss"])[0])
    np.testing.assert_allclose(found, alone)
    assert found[1] == pytest.approx(3 * found[0])


def test_rates_are_set_by_the_variable_where_several_bear_the_name():
    a, b = ow.SGD(1.0).minimize(sloped("a")), ow.SGD(1.0).minimize(sloped("b"))
    session, x = ow.Session(), {"x": np.ones(4, "float32")}
    session[a["learning_rate"]] = 0.5
    session.run(target=a, feed=x)
    with pytest.raises(ow.StateError, match=r"did not run here yet.*'cost_a' \(trains a\)"):
        session[b["learning_rate"]] = 0.25
    session.run(target=b, feed=x)
    with pytest.raises(ow.ArgumentError, match=r"several optimizers.*session\[program\['learning_rate'\]\]"):
        session["learning_rate"] = 0.25
    session[b["learning_rate"]] = 0.25
    for program in (a, b):
        session.run(target=program, feed=x)
    assert [float(session[n]) for n in ("a", "b")] == [-1.0, -1.25]


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_checkpoint_knows_whose_values_it_keeps(tmp_path, rounds):
    a, b = ow.Adam(0.1).minimize(sloped("a")), ow.Adam(0.01).minimize(sloped("b"))
    session, g = ow.Session(), slopes(3)
    for x in g[:2]:
        session.run(target=a, feed={"x": x})
    session.run(target=b, feed={"x": g[0]})
    session.save(tmp_path)
    other = ow.Session()
    for _ in range(rounds):
        other.restore(tmp_path)
        other.run(target=b, feed={"x": g[1]})
        other.run(target=a, feed={"x": g[2]})
    assert float(other["a"]) == pytest.approx(adam_by_hand([1.0, -3.0, 2.0]), rel=1e-5)
    assert float(other["b"]) == pytest.approx(adam_by_hand([1.0, -3.0], 0.01), rel=1e-5)
    third = ow.Session()
    third.restore(tmp_path)
    with pytest.raises(ow.StateError, match=r"keeps values of Adam.*of 'cost_a'.*of 'cost_b'.*none of them"):
        third.run(target=ow.Adam(0.1).minimize(ow.trace(at_once)), feed={"x": g[0]})


def test_updates_in_parts_count_as_one_step(tmp_path):
    program = ow.Adam(0.1).minimize(ow.trace(at_once))
    session = ow.Session()
    _, *parts = program.updates
    for x in slopes(3):
        for part in parts:
            session.run(target=part, feed={"x": x})
    assert int(session["step"]) == 3
    assert float(session["a"]) == pytest.approx(adam_by_hand([1.0, -3.0, 2.0]), rel=1e-5)
    assert float(session["b"]) == pytest.approx(adam_by_hand([-1.0] * 3), rel=1e-5)
    session.run(target=parts[0], feed={"x": slopes(1)[0]})
    with pytest.raises(ow.StateError, match=r"'a' has had 4 updates here and 'b' 3.*an optimizer of its own"):
        session.run(target=program, feed={"x": slopes(1)[0]})
    session.save(tmp_path)
    other = ow.Session()
    other.restore(tmp_path)
    other.run(target=parts[1], feed={"x": slopes(1)[0]})
    assert int(other["step"]) == 4
    assert float(other["b"]) == pytest.approx(adam_by_hand([-1.0] * 4), rel=1e-5)


# --------------------------------------------------------------------------- training and test


def test_the_test_program_reads_what_training_wrote():
    program = training(noisy)
    test = ow.for_test(program)
    session = ow.Session()
    for _ in range(3):
        session.run(target=program, feed=FEED)
    before = values(session)
    one, two = (session.run(target=test, feed=FEED, fetch=["loss"])[0] for _ in range(2))
    assert float(one) == float(two)
    assert changed(session, before) <= {"seen"}
    v = before
    h = X @ v["fc_0/w"] + v["fc_0/b"]
    h = (h - v["batch_norm_0/mean"]) / np.sqrt(v["batch_norm_0/variance"] + 1e-5)
    y = (h * v["batch_norm_0/scale"] + v["batch_norm_0/offset"]) @ v["fc_1/w"] + v["fc_1/b"]
    np.testing.assert_allclose(one, np.mean((y - Y) ** 2), rtol=1e-4)


def test_statistics_and_keys_go_along_with_training_only():
    program = training(noisy)
    session = ow.Session(program)
    session.run(target=program, feed=FEED)
    before = values(session)
    assert np.array_equal(readable(session["key"]), before["key"])
    session.run(fetch=["loss"], feed=FEED)
    assert changed(session, before) == {"key"}
    session.run(target=program.updates[-1], feed=FEED)
    moved = changed(session, before)
    assert {"seen", "step", "key"} <= moved
    assert not any(name.startswith("fc_0") for name in moved)
    assert any(name.startswith("batch_norm_0") for name in moved)


def test_masks_differ_from_run_to_run_and_follow_from_the_seed():
    program = training(noisy)

    def losses(seed):
        session = ow.Session(program, seed=seed)
        return [float(session.run(fetch=["loss"], feed=FEED)[0]) for _ in range(3)]

    first = losses(0)
    assert len(set(first)) == 3
    assert first == losses(0) != losses(1)


# --------------------------------------------------------------------------- initialization


def test_variables_are_initialized_when_they_are_first_needed_and_once():
    ran = []

    def counted(name):
        def initializer(key, shape, dtype):
            jax.debug.callback(lambda: ran.append(name))
            return jnp.ones(shape, dtype)

        return initializer

    def two():
        x = ow.data("x", (None, 3))
        h = ow.layer.fc(x, 2, w=ow.parameter("w1", (3, 2), initializer=counted("w1")), b=False, name="h")
        return jnp.sum(h @ ow.parameter("w2", (2, 1), initializer=counted("w2")))

    forward = ow.trace(two)
    session = ow.Session(forward)
    session.run(fetch=["h"], feed={"x": X})
    jax.effects_barrier()
    assert ran == ["w1"]
    assert list(session.scope) == ["w1"]
    session["w1"] = np.full((3, 2), 2.0, "float32")
    for program in (forward, ow.SGD(0.0).minimize(forward), ow.Adam(0.0).minimize(forward), forward):
        for rows in (8, 2):
            session.run(target=program, feed={"x": X[:rows]})
    jax.effects_barrier()
    assert ran == ["w1", "w2"]
    assert session["w1"].tolist() == [[2.0, 2.0]] * 3


def test_arguments_have_no_first_value_until_they_are_given_one():
    program = ow.SGD(1.0).minimize(lambda w, x: jnp.sum(w * x), np.ones(3, "float32"), X[0])
    session = ow.Session(program)
    with pytest.raises(ow.StateError, match=r"keeps 'w' \(float32\[3\]\).*session\['w'\] = array"):
        session.run(target=program, feed={"x": X[0]})
    session["w"] = np.ones(3, "float32")
    session.run(target=program, feed={"x": X[0]})
    np.testing.assert_allclose(session["w"], 1 - X[0], rtol=1e-6)


def test_what_is_set_beforehand_is_not_initialized():
    session = ow.Session(training())
    session["fc_0/w"] = np.full((3, 4), 7.0, "float32")
    assert session.run(fetch=["fc_0/w"])[0].tolist() == [[7.0] * 4] * 3
    with pytest.raises(ow.ArgumentError, match=r"'fc_0/w' is float32\[3\]; expected float32\[3,4\]"):
        session["fc_0/w"] = np.ones(3, "float32")
    assert session["fc_0/w"].tolist() == [[7.0] * 4] * 3


def test_one_name_of_two_types_is_refused():
    session = ow.Session()
    session.run(target=training(), feed=FEED)
    with pytest.raises(ow.StateError, match=r"'fc_0/w' is float32\[3,4\] here.*another Session"):
        session.run(fetch=[ow.layer.fc(ow.data("x", (None, 3)), 5)], feed={"x": X})


# --------------------------------------------------------------------------- layers that nobody named


def two_alike(**names):
    x, y = ow.data("x", (None, 3)), ow.data("y", (None, 1))
    first, second = (ow.layer.fc(x, 1, **{k: f"{v}_{i}" for k, v in names.items()}) for i in range(2))
    return first, second, ow.layer.mse(first, y), ow.layer.mse(second, y)


@pytest.mark.parametrize("way", ["fetched", "trained", "one of each", "another scope"])
def test_two_layers_that_nobody_named_do_not_become_one(way):
    first, second, *costs = two_alike()
    session = ow.Session()
    pair = {
        "fetched": (first, second),
        "trained": [ow.SGD(0.1).minimize(c) for c in costs],
        "one of each": (ow.SGD(0.1).minimize(costs[0]), second),
        "another scope": (first, ow.trace(lambda: second.value(), batch_size=8)),
    }[way]
    session.run(target=pair[0], feed=FEED if way in ("trained", "one of each") else {"x": X})
    before = values(session)
    with pytest.raises(ow.StateError, match=r"'fc_0/[wb]' is that of Lazy fc.*another layer.*name='first'"):
        session.run(target=pair[1], feed=FEED if way == "trained" else {"x": X})
    assert changed(session, before) == set()


def test_two_layers_run_together_first_are_two_from_then_on():
    first, second, cost, _ = two_alike()
    session = ow.Session()
    together = session.run(fetch=[first, second], feed={"x": X})
    assert not np.array_equal(*together)
    session.run(target=ow.SGD(0.1).minimize(cost), feed=FEED)
    [after] = session.run(fetch=[second], feed={"x": X})
    np.testing.assert_array_equal(after, together[1])


def test_what_layers_share_on_purpose_they_share_still():
    first, second, *_ = two_alike(name="same")
    assert first.name != second.name
    x, w = ow.data("x", (None, 3)), ow.var("w")
    by_name = [ow.layer.fc(x, 1, name="one") for _ in range(2)]
    by_variable = [ow.layer.fc(x, 1, w=w, b=False) for _ in range(2)]
    for one, other in (by_name, by_variable):
        session = ow.Session()
        found = [session.run(fetch=[layer], feed={"x": X})[0] for layer in (one, other, one)]
        np.testing.assert_array_equal(*found[:2])


def test_random_keys_are_those_of_all_layers():
    x, y = ow.data("x", (None, 3)), ow.data("y", (None, 3))
    session = ow.Session()
    for _ in range(2):
        cost = ow.layer.mse(ow.layer.dropout(x * ow.parameter("scale", (3,)), 0.5), y)
        session.run(target=ow.SGD(0.1).minimize(cost), feed={"x": X, "y": X})
    assert {"key", "scale"} <= set(session.scope)


# --------------------------------------------------------------------------- values


def test_what_is_read_survives_later_runs():
    program = training()
    session = ow.Session(program)
    session.run(target=program, feed=FEED)
    kept = [session["fc_0/w"], session.run(fetch=["fc_0/w"])[0], session.scope["fc_0/w"]]
    copies = [np.array(w) for w in kept]
    for _ in range(3):
        session.run(target=program, feed=FEED)
    for w, copy in zip(kept, copies, strict=True):
        np.testing.assert_array_equal(w, copy)
    assert "fc_0/w" in session
    assert "fc_0/v" not in session
    with pytest.raises(ow.UnknownNameError, match=r"nothing named 'fc_0/v'.*'fc_0/w'"):
        session["fc_0/v"]


def test_sessions_share_a_scope():
    program = training()
    one = ow.Session(program)
    two = ow.Session(scope=one.scope)
    one.run(target=program, feed=FEED)
    two.run(target=program, feed=FEED)
    assert int(one["step"]) == int(two["step"]) == 2
    assert int(ow.Session(program).run(fetch=["step"])[0]) == 0


def test_save_and_restore(tmp_path):
    program = training(noisy)
    session = ow.Session(program)
    for _ in range(3):
        session.run(target=program, feed=FEED)
    saved = values(session)
    session.save(tmp_path)
    following = [float(session.run(target=program, feed=FEED, fetch=["loss"])[0]) for _ in range(3)]
    other = ow.Session(program, seed=9)
    other.restore(tmp_path)
    assert {n: v.tobytes() for n, v in values(other).items()} == {n: v.tobytes() for n, v in saved.items()}
    assert other.runs == 3
    assert [float(other.run(target=program, feed=FEED, fetch=["loss"])[0]) for _ in range(3)] == following
    session.restore(tmp_path)
    assert changed(session, saved) == set()


def test_a_folder_is_needed_to_save_and_restore(tmp_path):
    session = ow.Session(training())
    with pytest.raises(ow.ArgumentError, match=r"session\.save\('runs/one'\)"):
        session.save()
    with pytest.raises(ow.ArgumentError, match=r"session\.restore\('runs/one'\)"):
        session.restore()
    with pytest.raises(ow.CheckpointError):
        session.restore(tmp_path)


# --------------------------------------------------------------------------- remembered


def test_targets_fetches_and_shapes_are_compiled_once():
    program = training()
    session = ow.Session(program)

    def runs():
        for rows in (8, 4):
            session.run(target=program, feed={"x": X[:rows], "y": Y[:rows]}, fetch=["loss"])
            session.run(target=program.updates, feed={"x": X[:rows], "y": Y[:rows]}, fetch=["loss"])
            session.run(fetch=["fc_1", "fc_0"], feed={"x": X[:rows]})

    runs()
    assert compilations(runs) == 0
    new = [
        lambda: session.run(fetch=["fc_0", "fc_1"], feed={"x": X}),
        lambda: session.run(fetch=["fc_1", "fc_0"], feed={"x": X[:2]}),
        lambda: session.run(target=program, feed=FEED),
    ]
    assert [compilations(run) for run in new] == [1, 1, 1]
    assert [compilations(run) for run in new] == [0, 0, 0]


def test_programs_made_anew_are_not_taken_for_old_ones():
    session, seen = ow.Session(), []
    for factor in range(5):
        program = ow.trace(lambda factor=factor: jnp.sum(ow.data("x", (None, 3))) * factor)
        seen.append(
            float(session.run(target=program, fetch=["loss"], feed={"x": np.ones((1, 3), "float32")})[0])
        )
        del program
    assert seen == [0.0, 3.0, 6.0, 9.0, 12.0]


@pytest.mark.parametrize("name", ["state", "self", "data", "feed", "target"])
def test_data_may_bear_any_name(name):
    program = ow.trace(lambda: jnp.sum(ow.data(name, (None,))))
    [total] = ow.Session(program).run(fetch=["loss"], feed={name: np.ones(4, "float32")})
    assert float(total) == 4.0


# --------------------------------------------------------------------------- threads


def counting():
    """A loss whose gradient is always -1: under SGD(1) the parameter counts the runs."""
    seen = ow.state("seen", (), "int32")
    ow.assign(seen, seen + 1)
    return -ow.parameter("count", ()) + 0 * jnp.sum(ow.data("x", (None,)))


def in_threads(number, work):
    errors = []

    def guarded(i):
        try:
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.parametrize("shared", ["session", "scope"])
def test_threads_lose_no_run(shared):
    program = ow.SGD(1.0).minimize(ow.trace(counting))
    session = ow.Session(program)
    seen = []

    def work(i):
        mine = session if shared == "session" else ow.Session(program, scope=session.scope)
        for k in range(25):
            mine.run(target=program, feed={"x": np.ones(1 + (i + k) % 3, "float32")})
            seen.append(int(session["seen"]))

    in_threads(8, work)
    assert int(session["seen"]) == int(session["step"]) == int(session["count"]) == 200
    assert max(seen) == 200


# --------------------------------------------------------------------------- Ctrl-C


class Poking(np.ndarray):
    """An array that sends SIGINT the moment its shape is looked at, in the middle of a run."""

    armed = False

    @property
    def shape(self):
        if type(self).armed:
            type(self).armed = False
            signal.raise_signal(signal.SIGINT)
        return super().shape


@contextmanager
def poked():
    Poking.armed = True
    yield np.ones(2, "float32").view(Poking)
    assert not Poking.armed


@pytest.mark.parametrize("configured", [True, False])
def test_an_interrupt_waits_until_the_run_has_stored_its_values(tmp_path, configured):
    program = ow.SGD(1.0).minimize(ow.trace(counting))
    session = ow.Session(program, checkpoints=tmp_path if configured else None)
    plain = {"x": np.ones(2, "float32")}
    session.run(target=program, feed=plain)
    with poked() as x, pytest.raises(KeyboardInterrupt):
        session.run(target=program, feed={"x": x}, fetch=["loss"])
    assert [int(session[n]) for n in ("seen", "step", "count")] == [2, 2, 2]
    assert any(tmp_path.iterdir()) == configured
    if configured:
        other = ow.Session(program)
        other.restore(tmp_path)
        assert {n: v.item() for n, v in values(other).items()} == {
            n: v.item() for n, v in values(session).items()
        }
    session.run(target=program, feed=plain)
    assert int(session["seen"]) == 3


def run_until(timer, session, program, feed):
    timer.start()
    while True:
        session.run(target=program, feed=feed)


def test_interrupts_at_random_moments_leave_every_value_readable():
    program = ow.SGD(1.0).minimize(ow.trace(counting))
    session = ow.Session(program)
    feed = {"x": np.ones(2, "float32")}
    session.run(target=program, feed=feed)
    delays = random.Random(0)
    for _ in range(20):
        timer = threading.Timer(0.02 * delays.random(), os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            run_until(timer, session, program, feed)
        timer.join()
        counts = [int(session[n]) for n in ("seen", "step", "count")]
        assert counts == [session.runs] * 3


# --------------------------------------------------------------------------- what is refused


def test_what_cannot_be_run():
    one, two = training(), training(noisy)
    session = ow.Session(one)
    session.run(target=one, feed=FEED)
    before = values(session)
    cases = [
        ({}, ow.ArgumentError, "neither target nor fetch"),
        ({"target": [one, two]}, ow.GraphError, "belong to 2 Programs .*one after the other"),
        ({"target": [one.updates[0], two.updates[0]]}, ow.GraphError, "belong to 2 Programs"),
        ({"target": two.ops[0]}, ow.GraphError, "belongs to another Program than 'network'"),
        ({"target": two["next(fc_0/w)"]}, ow.GraphError, "belongs to another Program.*by its name.*'next"),
        ({"fetch": [two["batch_norm_0"]]}, ow.GraphError, "belongs to another Program"),
        ({"fetch": ["fc_2"]}, ow.UnknownNameError, "no Variable named 'fc_2'.*'fc_1'"),
        ({"target": 3}, ow.GraphError, "The target is 3: give a Program, an op"),
        ({"fetch": [None]}, ow.GraphError, "The target is None: give a Program"),
        ({"target": network}, ow.GraphError, "The target is a function: give a Program"),
        ({"target": one, "feed": [X, Y]}, ow.ArgumentError, "feed is a list of 2; expected a dict"),
        ({"target": one, "feed": {1: X}}, ow.ArgumentError, "feed has the key 1; expected a name"),
        ({"fetch": [ow.data("x", (None, 3)) * 2], "target": one}, ow.UnknownNameError, "has no name"),
        ({"feed": {**FEED, "z": X}, "target": one}, ow.ArgumentError, "takes no data named 'z'"),
    ]
    for options, kind, message in cases:
        with pytest.raises(kind, match=message):
            session.run(**{"feed": FEED, **options})
    assert changed(session, before) == set()


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, "0"])
def test_seeds_that_are_none(seed):
    with pytest.raises(ow.ArgumentError, match=r"The seed is .*expected a whole number"):
        ow.Session(training(), seed=seed).run(fetch=["fc_0/w"])
