"""Trainers and servers against one device: rounds are equal to it, the other modes learn as well."""

import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from threading import Event

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from sklearn.datasets import load_digits
from tests.fleet.on_threads import WAIT, alone, arrays, close, equal, running, together, trained

import onward as ow

STEPS, ROWS = 50, 12
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(STEPS * ROWS, 5)), RNG.normal(size=(STEPS * ROWS, 2))
FIRST = {"w": RNG.normal(size=(5, 3)), "v": RNG.normal(size=(3, 2)), "b": np.zeros(2)}
SINGLE = {name: x.astype(np.float32) for name, x in FIRST.items()}
OPTIMIZERS = {
    "sgd": ow.SGD(0.05),
    "momentum": ow.Momentum(0.02),
    "adam": ow.Adam(0.01),
    "adagrad": ow.Adagrad(0.05),
    "adamw": ow.AdamW(0.01),
}
ADAM, PLAIN = OPTIMIZERS["adam"], ow.SGD(0.1)

pytestmark = pytest.mark.usefixtures("short_pauses")
once = pytest.mark.usefixtures("graphs_made_once")


@pytest.fixture
def double():
    """For all threads, as none of them inherits it."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def loss(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] + params["b"] - y) ** 2)


@cache
def minimized(optimizer, rows, dtype=np.float32, loss=loss):
    types = [jax.ShapeDtypeStruct((rows, n), dtype) for n in (5, 2)]
    return optimizer.minimize(loss, {name: x.astype(dtype) for name, x in FIRST.items()}, *types)


def descended(rounds, rate=0.1):
    """Gradient descent by hand, in float64; ``rate`` may be one of each round."""
    p = dict(FIRST)
    for (x, y), step in zip(rounds, np.broadcast_to(rate, len(rounds)), strict=True):
        h = np.tanh(x @ p["w"])
        error = 2 * (h @ p["v"] + p["b"] - y) / y.size
        slopes = {"w": x.T @ (error @ p["v"].T * (1 - h**2)), "v": h.T @ error, "b": error.sum(0)}
        p = {name: w - step * slopes[name] for name, w in p.items()}
    return p


def batches_of(rows, count, dtype=np.float32):
    """The first ``count`` batches of so many rows."""
    parts = [slice(i * rows, (i + 1) * rows) for i in range(count)]
    return [(X[part].astype(dtype), Y[part].astype(dtype)) for part in parts]


# ---------------------------------------------------------------------------- rounds equal one device

CASES = [("sgd", 1, 3), ("adam", 1, 2)] + [(name, 3, 2 + k % 2) for k, name in enumerate(OPTIMIZERS)]


@cache
def by_one_device(name, steps):
    """The parameters and the losses, however the batches are shared out."""
    values, losses = alone(
        minimized(OPTIMIZERS[name], ROWS, np.float64), batches_of(ROWS, steps, np.float64), FIRST
    )
    return arrays(values, FIRST), losses


def equals_one_device(name, servers, trainers, rounds):
    rows = ROWS // trainers
    run = trained(
        minimized(OPTIMIZERS[name], rows, np.float64),
        batches_of(rows, rounds * trainers, np.float64),
        parameters=FIRST,
        servers=servers,
        trainers=trainers,
    )
    expected, losses = by_one_device(name, rounds)
    close(run.model, expected, FIRST, 1e-9)
    steps, trainer = run.history["step"].astype(int), run.history["trainer"].astype(int)
    assert list(zip(steps, trainer, strict=True)) == [
        (n, t) for n in range(1, rounds + 1) for t in range(trainers)
    ]
    found = [run.history["loss"][steps == n].mean() for n in range(1, rounds + 1)]
    np.testing.assert_allclose(found, losses, 1e-9)
    assert not run.history["staleness"].any()
    assert not run.history["lag"].any()
    assert run.events == []


@once
def test_fifty_rounds_equal_fifty_steps_of_one_device(double):
    equals_one_device("adam", 2, 2, STEPS)


@once
@pytest.mark.parametrize(("name", "servers", "trainers"), CASES)
def test_rounds_equal_steps_of_one_device(name, servers, trainers, double):
    equals_one_device(name, servers, trainers, 8)


@once
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_step_in_float32(name):
    batches = batches_of(4, 2)
    run = trained(minimized(OPTIMIZERS[name], 4), batches, parameters=SINGLE, servers=2)
    expected, _ = alone(minimized(OPTIMIZERS[name], 8), together(batches, 2), SINGLE)
    close(run.model, expected, FIRST, 1e-5, 1e-6)


@once
def test_a_schedule_counts_the_rounds(double):
    rule = ow.SGD(lambda step: 0.05 / (1 + step / 5))
    batches = batches_of(6, 20, np.float64)
    run = trained(minimized(rule, 6, np.float64), batches, parameters=FIRST, servers=2)
    expected = descended(together(batches, 2), 0.05 / (1 + np.arange(10) / 5))
    close(run.model, expected, FIRST, 1e-6)  # a schedule is float32, rounded as it is compiled


def slow(delays, count, rows=4):
    """A reader of the same batches as of all trainers, which makes trainer t wait so long for each."""

    def read(trainer, trainers):
        for batch in batches_of(rows, count)[trainer::trainers]:
            time.sleep(delays[trainer])
            yield batch

    return read


@once
def test_runs_are_equal_to_the_last_bit_whoever_comes_first():
    program = minimized(ADAM, 4)
    readers = [batches_of(4, 15), batches_of(4, 15), slow((0.04, 0.0, 0.02), 15)]
    readers.append(slow((0.0, 0.04, 0.02), 15))
    runs = [trained(program, read, parameters=SINGLE, trainers=3, servers=2) for read in readers]
    for other in runs[1:]:
        equal(other.model, runs[0].model, FIRST)
        assert sorted(other.history["loss"]) == sorted(runs[0].history["loss"])


def uneven(sizes):
    ends = np.cumsum(sizes)
    parts = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    return [(X[part].astype(np.float32), Y[part].astype(np.float32)) for part in parts]


@once
def test_batches_of_uneven_size_count_by_their_size():
    batches = uneven([2, 6, 6, 2, 4])
    run = trained(minimized(PLAIN, 4), batches, parameters=SINGLE)
    close(run.model, descended(together(batches, 2)), FIRST, 1e-5, 1e-6)
    assert sorted(run.history["examples"]) == [2, 2, 4, 6, 6]


@once
def test_gradients_of_a_sum_are_added_on_request_or_as_the_graph_tells():
    def total(params, x, y):
        return jnp.sum((jnp.tanh(x @ params["w"]) @ params["v"] + params["b"] - y) ** 2)

    batches = uneven([4, 2, 4])
    rounds = together(batches, 2)
    expected = descended(rounds, [0.01 * y.size for _, y in rounds])  # the mean of so many numbers
    for merge in (ow.Sum(), None):
        program = minimized(ow.SGD(0.01), 4, loss=total)
        run = trained(program, batches, parameters=SINGLE, servers=2, merge=merge)
        close(run.model, expected, FIRST, 1e-5, 1e-6)


@once
def test_epochs_follow_each_other_though_their_batches_do_not_divide():
    batches = ow.batches((X[:18].astype(np.float32), Y[:18].astype(np.float32)), 4)
    once = list(batches)
    assert [len(x) for x, _ in once] == [4, 4, 4, 4, 2]
    for mode in ("sync", "async"):
        run = trained(minimized(PLAIN, 4), batches, parameters=SINGLE, epochs=3, mode=mode)
        assert len(run.history["loss"]) == 15
        assert run.history["examples"].sum() == 3 * 18
        if mode == "sync":
            close(run.model, descended(together(once * 3, 2)), FIRST, 1e-5, 1e-6)


@once
def test_epochs_may_differ_in_length():
    def read(epoch):
        return batches_of(4, (3, 1, 4, 2)[epoch])

    run = trained(minimized(PLAIN, 4), read, parameters=SINGLE, epochs=4, trainers=3)
    expected = [batch for epoch in range(4) for batch in read(epoch)]
    close(run.model, descended(together(expected, 3)), FIRST, 1e-5, 1e-6)


@once
def test_trainers_without_a_batch_take_part_with_nothing():
    batches = batches_of(4, 2)
    run = trained(minimized(ADAM, 4), batches, parameters=SINGLE, trainers=3, servers=2)
    expected, _ = alone(minimized(ADAM, 8), together(batches, 2), SINGLE)
    close(run.model, expected, FIRST, 1e-5, 1e-6)
    assert sorted(run.history["trainer"]) == [0, 1]


@once
def test_trainers_may_have_different_numbers_of_batches():
    def read(trainer, trainers):
        return batches_of(4, 8)[4 * trainer :][: (4, 2)[trainer]]

    run = trained(minimized(PLAIN, 4), read, parameters=SINGLE)
    found = batches_of(4, 8)
    rounds = [found[0:5:4], found[1:6:4], found[2:3], found[3:4]]
    merged = [jax.tree.map(lambda *parts: np.concatenate(parts), *group) for group in rounds]
    close(run.model, descended(merged), FIRST, 1e-5, 1e-6)


@cache
def by_one_trainer():
    return alone(minimized(ADAM, 4), batches_of(4, 10), SINGLE)


@once
@pytest.mark.parametrize("mode", ["sync", "async", ow.cluster.Bounded(0)], ids=str)
def test_one_trainer_is_one_device_in_every_mode(mode):
    batches = batches_of(4, 10)
    run = trained(minimized(ADAM, 4), batches, parameters=SINGLE, trainers=1, servers=3, mode=mode)
    expected, losses = by_one_trainer()
    close(run.model, expected, FIRST, 1e-5, 1e-6)
    np.testing.assert_allclose(run.history["loss"], losses, 1e-5)


# ---------------------------------------------------------------------------- programs of all kinds


def declared():
    x, y = ow.data("x", (None, 5)), ow.data("y", (None, 2))
    return ow.layer.mse(ow.layer.fc(ow.layer.fc(x, 4, act="tanh"), 2), y)


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.relu(nn.Dense(4)(x)))


def of_module(make, call):
    """A training Program of a module of another library, and what it is trained from."""

    def loss(model, x, y):
        return jnp.mean((call(model, x) - y) ** 2)

    def program(rows):
        model = make()
        return ow.SGD(0.1).minimize(loss, model, *batches_of(rows, 1)[0]), model

    return program


def frozen(rows):
    program = ow.Adam(0.05).minimize(loss, SINGLE, *batches_of(rows, 1)[0], parameter_list=["v", "b"])
    return program, SINGLE


def unread(rows):
    first = {**SINGLE, "spare": np.ones(3, np.float32)}
    with pytest.warns(ow.UnreachedWarning):  # a second one would be an error
        return ow.Adam(0.05).minimize(loss, first, *batches_of(rows, 1)[0]), first


def beside(rows):
    def both(params, x, y):
        return loss(params, x, y), {"size": jnp.mean(params["w"] ** 2), "rows": x}

    forward = ow.trace(both, SINGLE, *batches_of(rows, 1)[0], has_aux=True)
    return ow.SGD(0.1).minimize(forward), SINGLE


def by_name(rows):
    return ow.SGD(0.1).minimize(ow.trace(declared, batch_size=rows)), None


LINEN = Linen()
KINDS = {
    "frozen": frozen,
    "unread": unread,
    "aux": beside,
    "declared": by_name,
    "equinox": of_module(lambda: eqx.nn.MLP(5, 2, 4, 1, key=jax.random.key(0)), lambda m, x: jax.vmap(m)(x)),
    "nnx": of_module(lambda: nnx.Linear(5, 2, rngs=nnx.Rngs(0)), lambda m, x: m(x)),
    "linen": of_module(lambda: LINEN.init(jax.random.key(0), jnp.ones((1, 5))), LINEN.apply),
}


@pytest.mark.parametrize("kind", KINDS)
def test_programs_of_all_kinds(kind):
    batches = batches_of(4, 3)
    if kind == "declared":
        batches = [dict(zip("xy", batch, strict=True)) for batch in batches]
    program, first = KINDS[kind](4)
    run = trained(program, batches, parameters=first, trainers=1, servers=2, seed=3)
    expected, _ = alone(program, batches, first, seed=3)
    names = [v.name for v in program.parameters]
    close(arrays(run.model, names), arrays(expected, names), names, 1e-5, 1e-6)
    assert jax.tree.structure(run.model.parameters) == jax.tree.structure(expected.parameters)
    if kind == "frozen":
        equal(run.model, SINGLE, ["w"])
    if kind == "aux":
        assert "rows" not in run.history
        began = run.history["step"] == 1
        np.testing.assert_allclose(run.history["size"][began], np.mean(SINGLE["w"] ** 2), 1e-6)
        assert (run.history["size"][~began] < run.history["size"][began].min()).all()


def with_state(params, state, x, y):
    """What it carries is the mean of all it saw, and a count."""
    mean = 0.9 * state["mean"] + 0.1 * x.mean(0)
    following = {"mean": mean, "count": state["count"] + 1}
    return jnp.mean(((x - mean) @ params["w"] @ params["v"] + params["b"] - y) ** 2), following


@cache
def by_hand():
    """Parameters and state after rounds of two batches each, and the one that is left."""
    gradient = jax.jit(jax.grad(with_state, has_aux=True))
    params, state = SINGLE, STATE
    for group in (CARRYING[0:2], CARRYING[2:]):
        shares = np.array([len(x) for x, _ in group]) / sum(len(x) for x, _ in group)
        found = jax.tree.map(np.asarray, [gradient(params, state, *batch) for batch in group])
        grads, states = zip(*found, strict=True)
        mean = jax.tree.map(lambda *xs, s=shares: sum(w * x for w, x in zip(s, xs, strict=True)), *grads)
        params = {name: (w - 0.1 * mean[name]).astype(np.float32) for name, w in params.items()}
        carried = sum(w * s["mean"] for w, s in zip(shares, states, strict=True)).astype(np.float32)
        state = {"mean": carried, "count": states[0]["count"]}
    return params, state


STATE = {"mean": np.zeros(5, np.float32), "count": np.int32(0)}
CARRYING = uneven([4, 2, 4])


@pytest.mark.parametrize("servers", [1, 2])
def test_state_of_the_model_is_the_mean_over_the_trainers(servers):
    program = ow.SGD(0.1).minimize(with_state, SINGLE, *CARRYING[0], state=STATE)
    run = trained(program, CARRYING, parameters=SINGLE, state=STATE, servers=servers, merge=ow.Average())
    params, expected = by_hand()
    close(run.model, params, FIRST, 1e-5, 1e-6)
    names = [v.name for v in program.state if v.name.endswith(("mean", "count"))]
    assert len(names) == 2
    for name in names:
        np.testing.assert_allclose(run.model[name], expected[name.rpartition("/")[2]], 1e-5, 1e-6)


@pytest.mark.parametrize("first", ["class weights", "raw key"])
def test_batches_count_by_their_examples_whatever_comes_first(first):
    def weighed(params, what, x, y):
        rates = what if first == "class weights" else jax.random.uniform(what, (2,)) + 0 * what.sum()
        return jnp.mean(rates * ((x @ params["w"]) @ params["v"] + params["b"] - y) ** 2)

    what = np.array([1, 3], "float32") if first == "class weights" else jax.random.PRNGKey(0)
    batches = [(what, *batch) for batch in uneven([4, 1])]
    program = ow.SGD(0.1).minimize(weighed, SINGLE, *batches[0])
    run = trained(program, batches, parameters=SINGLE)
    both = what, *(np.concatenate(arrays) for arrays in zip(*uneven([4, 1]), strict=True))
    gradient = jax.jit(jax.grad(weighed))(SINGLE, *both)
    close(run.model, {name: SINGLE[name] - 0.1 * gradient[name] for name in SINGLE}, SINGLE, 1e-5, 1e-6)
    assert sorted(run.history["examples"]) == [1, 4]


KEEPS = {
    "ema": ow.SGD(0.1, rules=[ow.EMA(0.9)]),
    "swa": ow.SGD(0.1, rules=[ow.SWA(1, every=2)]),
    "schedule free": ow.optimizer.ScheduleFreeSGD(0.1),
    "nothing": ow.SGD(0.1),
}


@pytest.mark.parametrize("name", KEEPS)
def test_averages_are_put_together_from_the_servers(name):
    batches = batches_of(4, 4)
    program = KEEPS[name].minimize(loss, SINGLE, *batches[0])
    step = ow.compile(program)
    state = step.init(SINGLE)
    for batch in batches:
        state, _ = step(state, *batch)
    expected = ow.averaged(program, state)
    with running(program, batches, parameters=SINGLE, trainers=1, servers=2) as run:
        assert np.isfinite(run.averaged()["w"]).all()  # while it trains
        run.wait(WAIT)
        close(run.averaged(), expected, [*SINGLE], 1e-6, 1e-6)
    close(run.model, state, [*SINGLE], 1e-6, 1e-6)


def test_averages_that_trainers_keep_are_not_on_the_servers():
    batches = batches_of(4, 4)
    program = KEEPS["ema"].minimize(loss, SINGLE, *batches[0])
    run = trained(program, batches, parameters=SINGLE, mode=ow.cluster.Local(2))
    with pytest.raises(ow.GraphError, match=r"servers have no '\w+/average', .* each trainer keeps its own"):
        run.averaged()


def normalized():
    x, y = ow.data("x", (None, 5)), ow.data("y", (None, 2))
    return ow.layer.mse(ow.layer.dropout(ow.layer.batch_norm(ow.layer.fc(x, 2)), 0.5), y)


def test_statistics_and_random_numbers_of_layers():
    batches = [dict(zip("xy", batch, strict=True)) for batch in batches_of(4, 4)]
    program = ow.SGD(0.05).minimize(ow.trace(normalized, batch_size=4))  # the bias before it has no gradient
    names = [v.name for v in ow.graph.forward_pass(program).state if "key" not in str(v.dtype)]
    assert any("mean" in name for name in names)
    one = trained(program, batches, trainers=1, servers=2, seed=5)
    expected, _ = alone(program, batches, seed=5)
    close(arrays(one.model, names), arrays(expected, names), names, 1e-5, 1e-6)
    two = trained(program, [batches[0], batches[0]], seed=5, merge=ow.Average())
    assert np.diff(two.history["loss"]) != 0  # each trainer drops others


# ---------------------------------------------------------------------------- tables by rows

TABLE = {
    "table": RNG.normal(size=(300, 4)).astype(np.float32),
    "w": RNG.normal(size=(4, 2)).astype(np.float32),
}
IDS = RNG.integers(0, 300, size=(48, 3)).astype(np.int32)


def looked_up(params, ids, y):
    return jnp.mean((params["table"][ids].mean(1) @ params["w"] - y) ** 2)


@cache
def tabled(optimizer, rows):
    return optimizer.minimize(looked_up, TABLE, IDS[:rows], Y[:rows].astype(np.float32))


def by_rows(rows=4, count=8):
    parts = [slice(i * rows, (i + 1) * rows) for i in range(count)]
    return [(IDS[part], Y[part].astype(np.float32)) for part in parts]


@once
@pytest.mark.parametrize(
    ("rule", "lazy", "servers"),
    [(ow.Adagrad(0.1), (), 1), (ow.Adam(0.05), (), 3), (ow.Adagrad(0.1), ("table",), 2)],
    ids=str,
)
def test_tables_travel_by_rows_and_equal_one_device(rule, lazy, servers):
    batches = by_rows(4, 4)
    batches.append((batches[0][0][:2], batches[0][1][:2]))
    run = trained(tabled(rule, 4), batches, parameters=TABLE, servers=servers, lazy=lazy)
    expected, _ = alone(tabled(rule, 8), together(batches, 2), TABLE)
    close(run.model, expected, TABLE, 1e-5, 1e-6)
    assert run.history["sent"].max() < TABLE["table"].nbytes / 2
    assert run.history["received"].max() < TABLE["table"].nbytes / 2


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_lazy_update_leaves_other_rows_alone(mode):
    run = trained(
        tabled(ow.Adagrad(0.1), 4),
        by_rows(),
        parameters=TABLE,
        servers=2,
        lazy=["table"],
        mode=mode,
        epochs=2,
    )
    table, first = np.asarray(run.model["table"]), TABLE["table"]
    touched = np.unique(IDS[:32])
    others = np.setdiff1d(np.arange(300), touched)
    np.testing.assert_array_equal(table[others], first[others])
    assert (table[touched] != first[touched]).any(1).all()


# ---------------------------------------------------------------------------- trainers at their own pace


def digits():
    """Images, float32 [n, 64] between 0 and 1, and labels: four fifths to train on, one held out."""
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    images, labels = found.data[order].astype(np.float32) / 16, found.target[order].astype(np.int32)
    held = len(labels) // 5
    return (images[held:], labels[held:]), (images[:held], labels[:held])


def predict(params, images):
    return jax.nn.relu(images @ params["a"] + params["b"]) @ params["c"] + params["d"]


def cross_entropy(params, images, labels):
    log_p = jax.nn.log_softmax(predict(params, images))
    return -jnp.mean(jnp.take_along_axis(log_p, labels[:, None], 1))


EPOCHS, BATCH = 9, 64


@pytest.fixture(scope="module")
def recognized():
    """The program, its first parameters, a reader, a measure of accuracy, and what one device reaches."""
    (images, labels), test = digits()
    per_epoch = len(labels) // BATCH
    draw = np.random.default_rng(1)
    first = {"a": draw.normal(size=(64, 128)) / 6, "b": np.zeros(128)}
    first |= {"c": draw.normal(size=(128, 10)) / 8, "d": np.zeros(10)}
    first = {name: x.astype(np.float32) for name, x in first.items()}

    def read(epoch):
        order = np.random.default_rng(epoch).permutation(len(labels))[: per_epoch * BATCH]
        return [(images[part], labels[part]) for part in np.split(order, per_epoch)]

    def rate(step):
        return 0.003 * (1 + jnp.cos(jnp.pi * step / (EPOCHS * per_epoch)))

    guess = jax.jit(lambda params, images: predict(params, images).argmax(1))

    def accuracy(params):
        return float(np.mean(np.asarray(guess(params, test[0])) == test[1]))

    program = ow.Adam(rate).minimize(cross_entropy, first, *read(0)[0])
    state, _ = alone(program, [batch for epoch in range(EPOCHS) for batch in read(epoch)], first)
    return program, first, read, accuracy, accuracy(state.parameters)


@once
@pytest.mark.parametrize("mode", ["async", ow.cluster.Bounded(2)], ids=str)
def test_trainers_at_their_own_pace_learn_as_well(mode, recognized):
    program, first, read, accuracy, expected = recognized
    run = trained(
        program, read, parameters=first, trainers=3, servers=2, mode=mode, epochs=EPOCHS, durability=None
    )
    assert expected > 0.97
    assert accuracy(run.model.parameters) > expected - 0.01
    assert run.history["staleness"].max() > 0
    assert len(run.history["loss"]) == EPOCHS * 22
    if mode != "async":
        assert run.history["lag"].max() <= 2


def held_up(count, rows=4):
    """A reader of the same batches, which holds trainer 1 up until the others have read all of theirs."""
    over = {0: Event(), 2: Event()}

    def read(trainer, trainers):
        for n, batch in enumerate(batches_of(rows, count)[trainer::trainers]):
            if trainer == 1 and n == 1:
                assert all(event.wait(30) for event in over.values())
                time.sleep(0.2)  # what is read ahead is computed as well
            yield batch
        if trainer in over:
            over[trainer].set()

    return read


@once
@pytest.mark.parametrize(("mode", "bound"), [("async", None), (ow.cluster.Bounded(1), 1)], ids=str)
def test_a_bound_holds_back_who_is_far_ahead(mode, bound):
    read = held_up(24) if bound is None else slow((0.0, 0.06, 0.0), 24)
    run = trained(minimized(PLAIN, 4), read, parameters=SINGLE, trainers=3, servers=2, mode=mode)
    lag = run.history["lag"].max()
    assert lag > 3 if bound is None else lag == bound
    assert len(run.history["loss"]) == 24
    applied = sum(s.pushes for s in run.servers)
    assert applied == 2 * 24


ENDING = """
import atexit, itertools, sys
import jax.numpy as jnp, numpy as np, onward as ow
from tests.fleet.hosting import Threads, release

def tell():
    print("running:", run.is_running, any(host.alive for host in engine.hosts))
    release()  # the threads that stand for processes: one that is in XLA when Python ends aborts it

engine, x = Threads(), np.ones((4, 3), np.float32)
program = ow.SGD(0.1).minimize(lambda w, x: jnp.mean(x @ w), np.ones(3, np.float32), x)
atexit.register(tell)
run = ow.cluster.start(
    program, lambda epoch: itertools.repeat((x,)), engine=engine, parameters=np.ones(3, np.float32)
)
sys.exit(3)
"""


def test_a_training_is_taken_down_before_the_interpreter_ends():
    """Ray ends next, and a thread that calls Ray after that ends the process with another status."""
    ended = subprocess.run(
        [sys.executable, "-c", ENDING],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.stdout.strip(), ended.returncode) == ("running: False False", 3), ended.stderr
