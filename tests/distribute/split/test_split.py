"""Trainers and parameter servers, moved by hand in one process, against one device with the whole batch."""

import os
import subprocess
import sys
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.distribute.split.by_hand import Alone, ByHand, compared, first_values, parts_of
from tests.pairs import pairs

import onward as ow
from onward.core.walk import producers
from onward.distribute.split.checks import check_landing
from onward.distribute.split.shards import Shard

ROWS, STEPS = 12, 20
OPTIMIZERS = {
    "sgd": ow.SGD(0.05),
    "momentum": ow.Momentum(0.02),
    "adam": ow.Adam(0.01),
    "adagrad": ow.Adagrad(0.05),
    "adamw": ow.AdamW(0.01),
    "scheduled": ow.SGD(lambda step: 0.05 / (1 + step / 10)),
}


@pytest.fixture
def double():
    with jax.enable_x64(True):
        yield


def loss(params, x, y):
    h = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.mean((h @ params["v"] - y) ** 2)


def numbers(dtype=np.float64):
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(40, 30)), "b": np.zeros(30), "v": rng.normal(size=(30, 1))}
    data = rng.normal(size=(ROWS, 40)), rng.normal(size=(ROWS, 1))
    return {n: x.astype(dtype) for n, x in params.items()}, tuple(x.astype(dtype) for x in data)


@cache
def program_of(optimizer, rows=ROWS, dtype=np.float32):
    params, data = numbers(dtype)
    return optimizer.minimize(loss, params, *(x[:rows] for x in data))


# ---------------------------------------------------------------- equal to one device


@cache
def alone(name):
    params, data = numbers()
    one = Alone(program_of(OPTIMIZERS[name], dtype=np.float64), params)
    losses = [float(one.step(*data).loss) for _ in range(STEPS)]
    return one, losses


# Without slots, with one and with two; of the others one row each.
EACH = ("sgd", "momentum", "adam")
OTHERS = [("adagrad", 3, 2), ("adamw", 2, 3), ("scheduled", 2, 2)]


@pytest.mark.parametrize(("optimizer", "servers", "trainers"), [*pairs(EACH, (1, 2, 3), (1, 2, 3)), *OTHERS])
def test_twenty_steps_equal_those_of_one_device(optimizer, servers, trainers, double):
    expected, expected_losses = alone(optimizer)
    params, data = numbers()
    cut = ow.split(program_of(OPTIMIZERS[optimizer], ROWS // trainers, np.float64), servers, trainers)
    hand = ByHand(cut, params)
    batches = [dict(zip("xy", part, strict=True)) for part in parts_of(data, trainers)]
    losses = [float(np.mean([own[0] for own in hand.step(batches)])) for _ in range(STEPS)]
    rtol = 1e-6 if optimizer == "scheduled" else 1e-9  # a schedule is float32, rounded as it is compiled
    np.testing.assert_allclose(losses, expected_losses, rtol)
    for name, value in hand.parameters().items():
        np.testing.assert_allclose(value, expected[name], rtol, err_msg=name)
        assert abs(value - params[name]).max() > 1e-3


@pytest.mark.parametrize("optimizer", ["adagrad", "adamw"])  # KINDS have the others
def test_one_step_in_float32(optimizer):
    params, data = numbers(np.float32)
    rule = OPTIMIZERS[optimizer]
    cut = ow.split(program_of(rule, ROWS // 2), 1, 2)
    compared(cut, program_of(rule), params, [data], 2, 1e-5, 1e-6)


def test_two_runs_are_equal_to_the_last_bit_and_trainers_can_change_places():
    params, data = numbers(np.float32)
    cut = ow.split(program_of(ow.Adam(0.01), 4), 2, 3)
    batches = [dict(zip("xy", part, strict=True)) for part in parts_of(data, 3)]

    def trained(order):
        hand = ByHand(cut, params)
        for _ in range(3):
            hand.step([batches[k] for k in order])
        return hand.parameters()

    first, again, other = trained((0, 1, 2)), trained((0, 1, 2)), trained((2, 0, 1))
    for name, value in first.items():
        np.testing.assert_array_equal(value, again[name])
        np.testing.assert_allclose(value, other[name], 1e-4, 1e-5)


gradients = jax.jit(jax.grad(loss))


@pytest.mark.parametrize("shares", [(0.5, 0.5, 0.0), (0.75, 0.25, 0.0), (0.0, 1.0, 0.0), (0.2, 0.5, 0.3)])
def test_trainers_count_by_their_shares(shares, double):
    params, data = numbers()
    parts = list(parts_of(data, 3))
    hand = ByHand(ow.split(program_of(ow.SGD(0.5), 4, np.float64), 2, 3), params)
    batches = [
        dict(zip("xy", part, strict=True)) if s else None for part, s in zip(parts, shares, strict=True)
    ]
    assert [own is None for own in hand.step(batches, shares)] == [s == 0 for s in shares]
    found = [gradients(params, *part) for part in parts]
    for name, value in hand.parameters().items():
        merged = sum(s * g[name] for s, g in zip(shares, found, strict=True))
        np.testing.assert_allclose(value, params[name] - np.float32(0.5) * merged, 1e-12, 1e-15)


# ---------------------------------------------------------------- parameters of all kinds


class ByMatrix(ow.Optimizer):
    """A rule that reads another hyperparameter of a vector than of a matrix."""

    type = ow.UpdateType.PER_MATRIX
    learning_rate: ow.Hyperparameter = 0.1
    decay: ow.Hyperparameter = 0.1

    def update(self, parameter, gradient, slots):
        if parameter.ndim > 1:
            gradient = gradient / (1 + jnp.linalg.norm(gradient)) + self.decay * parameter
        return parameter - self.learning_rate * gradient, slots


class Scalar(ow.Optimizer):
    """A rule with a slot that is one number for the whole parameter."""

    learning_rate: ow.Hyperparameter = 0.1

    def init(self, parameter):
        return {"decay": jnp.float32(1)}

    def update(self, parameter, gradient, slots):
        new = parameter - self.learning_rate * slots["decay"] * gradient
        return new, {"decay": slots["decay"] * 0.9}


def random(*shape, dtype="float32"):
    return np.random.default_rng(len(shape)).normal(size=shape).astype(dtype)


def squares(network):
    return lambda p, x: jnp.mean(jnp.abs(network(p, x)) ** 2).astype("float32")


COMPLEX = (random(6, 5) + 1j * random(6, 5)[::-1]).astype("complex64")
SCHEDULED = ow.Momentum(lambda step: 0.1 / (step + 1), momentum=lambda step: 0.9 - 0.1 / (step + 1))
KINDS = {
    "nested, one empty, one an integer, one a number": (
        lambda p, x: (x @ p["a"]["w"] + p["b"][0]["w"] + jnp.sum(p["b"][1])) * p["a"]["n"] + p["b"][2],
        {"a": {"w": random(6, 5), "n": np.int32(3)}, "b": [{"w": random(5)}, random(0, 3), np.float32(2)]},
        ow.Momentum(0.01),
    ),
    "bfloat16": (
        lambda p, x: x.astype("bfloat16") @ p["w"] + p["b"],
        {"w": jnp.asarray(random(6, 5), "bfloat16"), "b": jnp.zeros(5, "bfloat16")},
        ow.Momentum(0.01),
    ),
    "mixed": (
        lambda p, x: x @ p["w"].astype("float32") + p["b"],
        {"w": jnp.asarray(random(6, 5), "bfloat16"), "b": random(5)},
        ow.SGD(0.01),
    ),
    "complex": (lambda p, x: x @ p["w"], {"w": COMPLEX}, ow.Adam(0.01)),
    "schedules": (lambda p, x: x @ p["w"], {"w": random(6, 5)}, SCHEDULED),
    "named step": (
        lambda p, x: x @ p["step"] + p["learning_rate"],
        {"learning_rate": random(5), "step": random(6, 5)},
        ow.Adam(0.01),
    ),
    "named beta1 on one server": (
        lambda p, x: x @ p["a"] + p["beta1"],
        {"a": random(6, 50), "beta1": random(50)},
        ow.Adam(lambda step: 0.1 / (step + 1)),
    ),
    "named as feeds": (
        lambda p, x: x @ p["shares"] + p["trainer"],
        {"shares": random(6, 5), "trainer": random(5)},
        ow.SGD(0.01),
    ),
    "one gradient for two": (
        lambda p, x: jnp.sqrt(jnp.sum(p["a"] + p["b"] + jnp.mean(x)) ** 2),
        {"a": random(6), "b": random(6)},
        ow.SGD(0.01),
    ),
    "by matrix": (
        lambda p, x: x @ p["w"] + p["b"],
        {"b": random(5), "w": random(6, 5)},
        ByMatrix(0.01),
    ),
    "by matrix, vector first": (
        lambda p, x: x @ p["w"] + jnp.mean(p["b"]),
        {"b": random(500), "w": random(6, 5)},
        ByMatrix(0.01),
    ),
    "bare, with a slot of one number": (lambda p, x: x @ p, random(6, 5), Scalar(0.01)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_of_all_kinds(kind):
    network, params, optimizer = KINDS[kind]
    x = random(8, 6, 1)[..., 0]
    if kind == "one gradient for two":
        x = np.ones_like(x)
    program = optimizer.minimize(squares(network), params, x)
    cut = ow.split(optimizer.minimize(squares(network), params, x[:4]), 2, 2)
    rtol = 3e-2 if kind in ("bfloat16", "mixed") else 1e-5
    compared(cut, program, params, [(x,)] * 3, 2, rtol, rtol)


def test_frozen_parameters_stay_with_the_trainer():
    params, data = numbers(np.float32)
    programs = [
        ow.Momentum(0.01).minimize(loss, params, *(x[:n] for x in data), parameter_list=["v", "b"])
        for n in (ROWS, 6)
    ]
    cut = ow.split(programs[1], 2, 2)
    assert [v.name for v in cut.trainer.state] == ["w"]
    assert {s.parameter.name for own in cut.shards for s in own} == {"v", "b"}
    compared(cut, programs[0], params, [data] * 3, 2, 1e-5, 1e-6)


def test_a_parameter_that_the_loss_does_not_reach_was_told_of_already():
    with pytest.warns(ow.UnreachedWarning):
        program = ow.SGD(0.1).minimize(
            lambda p, x: jnp.mean(x @ p["w"]), {"w": random(6, 5), "lost": random(3)}, random(8, 6)
        )
    for told in (program, ow.replicate(program, 2)):  # a warning here would be an error
        cut = ow.split(told, 2)
        assert {s.parameter.name for own in cut.shards for s in own} == {"w"}
        assert [v.name for v in cut.trainer.state] == ["lost"]


def test_transforms_of_the_forward_pass_are_no_rule_between():
    @ow.transform
    def renamed(program):
        return replace(program, name="other")

    cut = ow.split(
        ow.SGD(0.1).minimize(renamed(ow.trace(lambda w, x: jnp.mean(x @ w), random(6), random(8, 6)))), 2, 2
    )
    assert cut.trainer.name == "other_trainer"


def test_a_clip_is_the_trainers_where_each_is_updated_for_alone():
    params, data = numbers(np.float32)
    program = clipped()
    cut = ow.split(program, 2)
    free = ByHand(ow.split(program_of(ow.SGD(0.1)), 2), params)
    free.step([both(data)])
    hand, _ = compared(cut, program, params, [data], 1, 1e-5, 1e-6)
    assert abs(hand.whole("v") - free.whole("v")).max() > 1e-3


def test_auxiliary_outputs_come_out_of_the_trainer():
    w, x = random(6, 5), random(4, 6)
    program = ow.SGD(0.1).minimize(
        lambda w, x: (jnp.mean(x @ w), {"w": w, "twice": 2 * w}), w, x, has_aux=True
    )
    [(value, twice, same)] = ByHand(ow.split(program, 3), w).step([{"x": x}])
    np.testing.assert_allclose(value, np.mean(x @ w), 1e-5, 1e-6)
    np.testing.assert_array_equal(twice, 2 * w)
    np.testing.assert_array_equal(same, w)


# ---------------------------------------------------------------- what the forward pass carries


def normalized():
    x, y = ow.data("x", (None, 6)), ow.data("y", (None, 2))
    return ow.layer.mse(ow.layer.fc(ow.layer.batch_norm(x), 2), y)


def dropping():
    x, y = ow.data("x", (None, 6)), ow.data("y", (None, 2))
    return ow.layer.mse(ow.layer.fc(ow.layer.dropout(x, 0.5), 2), y)


def declared(network, rows, optimizer=None):
    return (optimizer or ow.Momentum(0.1)).minimize(ow.trace(network, batch_size=rows))


XY = random(8, 6), random(8, 2, 1)[..., 0]


def both(part):
    return dict(zip("xy", part, strict=True))


@pytest.mark.parametrize(("network", "servers"), [(normalized, 2), (dropping, 1)])
def test_one_trainer_carries_what_one_device_carries(network, servers):
    program = declared(network, 8)
    one, hand = Alone(program, seed=3), ByHand(ow.split(program, servers), seed=3)
    for _ in range(3):
        expected = one.step(*XY)
        np.testing.assert_allclose(hand.step([both(XY)])[0][0], expected.loss, 1e-5)
    for name, value in hand.parameters().items():
        np.testing.assert_allclose(value, one[name], 1e-5, 1e-6)
    assert hand.cut.carried
    for v in hand.cut.carried:
        found, expected = hand.states[0][v.name], one[v.name]
        if jnp.issubdtype(v.dtype, jax.dtypes.prng_key):
            found, expected = map(jax.random.key_data, (found, expected))
        np.testing.assert_allclose(found, expected, 1e-5, 1e-6)


@cache
def each_alone():
    """The Program, and its state after a step on each half of the batch."""
    program = declared(normalized, 4)
    step = ow.compile(program, donate=False)
    return program, [step(step.init(), *part)[0] for part in parts_of(XY, 2)]


@pytest.mark.parametrize("shares", [(0.5, 0.5), (0.75, 0.25), (1.0, 0.0), (1.0, 1.0)])  # the last: of a sum
def test_statistics_are_averaged_by_shares(shares):
    program, ones = each_alone()
    hand = ByHand(ow.split(program, 2, 2))
    parts = list(parts_of(XY, 2))
    hand.step([both(part) if s else None for part, s in zip(parts, shares, strict=True)], shares)
    first = first_values(program, None, 0)
    assert len(hand.cut.carried) == 2
    for v in hand.cut.carried:
        expected = np.average([one[v.name] for one in ones], 0, shares)
        np.testing.assert_allclose(hand.states[0][v.name], expected, 1e-5, 1e-6)
        assert abs(expected - first[v.name]).max() > 1e-3


def test_trainers_draw_different_numbers_and_the_same_ones_again():
    half = next(parts_of(XY, 2))
    cut = ow.split(declared(dropping, 4, ow.SGD(0.0)), 2, 3)
    runs = []
    for _ in range(2):
        hand = ByHand(cut, seed=3)
        runs.append([[float(own[0]) for own in hand.step([both(half)] * 3)] for _ in range(3)])
    assert runs[0] == runs[1]
    assert len({x for step in runs[0] for x in step}) == 9


def test_the_key_moves_on_where_the_first_trainer_has_no_batch():
    hand = ByHand(ow.split(declared(dropping, 8), 2, 2))
    [key] = hand.cut.carried
    keys = [np.asarray(jax.random.key_data(hand.states[0][key.name]))]
    for shares in ((0.0, 1.0), (1.0, 0.0)):
        hand.step([both(XY) if s else None for s in shares], shares)
        keys.append(np.asarray(jax.random.key_data(hand.states[0][key.name])))
    assert len({k.tobytes() for k in keys}) == 3
    assert all(k.any() for k in keys)


# ---------------------------------------------------------------- who owns what


def test_servers_have_about_as_many_bytes():
    cut = ow.split(program_of(ow.Adam(0.01)), 3)
    sizes = [sum(int(np.prod(v.shape)) for v in s.state if v.shape) for s in cut.servers]
    assert max(sizes) < 1.1 * min(sizes)


@pytest.mark.parametrize("servers", [1, 2, 3, 5])
def test_every_row_is_updated_exactly_once(servers):
    program = program_of(ow.Adam(0.01))
    cut = ow.split(program, servers)
    for p in program.parameters:
        owned = sorted((s.begin, s.end) for own in cut.shards for s in own if s.parameter.name == p.name)
        ends = [0, *(end for _, end in owned)]
        assert [begin for begin, _ in owned] == ends[:-1]
        assert ends[-1] == p.shape[0]
    for program, own in zip(cut.servers, cut.shards, strict=True):
        assert [op.type for op in program.ops].count("adam") == len(own)


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_trainer_and_servers_agree_on_what_travels(servers):
    cut = ow.split(declared(normalized, 4), servers, 2)
    for i, part in enumerate(cut.server_parts):
        sent, received = cut.trainer_part.sent[i], cut.trainer_part.received[i]
        assert [[v.type for v in feeds] for feeds in part.received] == [[v.type for v in sent]] * 2
        assert [v.type for v in part.program.outputs] == [v.type for v in received]
    assert set(cut.trainer.inputs) >= {v for received in cut.trainer_part.received for v in received}


def test_what_is_shared_has_one_owner():
    cut = ow.split(program_of(ow.Adam(lambda step: 0.1 / (step + 1))), 3)
    shared = {"step", "beta1", "beta2", "epsilon"}
    owners = [shared & {v.name for v in program.state} for program in cut.servers]
    assert owners == [shared, set(), set()]
    assert {v.name for v in cut.shared.outputs} == {"learning_rate", *shared}
    for part in cut.server_parts[1:]:
        assert {v.name for v in part.shared} == {"learning_rate", *shared}
        assert set(part.shared) <= set(part.program.inputs)
        assert [op.type for op in part.program.ops].count("count") == 0
    assert [op.type for op in cut.servers[0].ops].count("count") == 1
    assert ow.split(program_of(ow.Adam(0.1)), 1).shared is None


def test_what_is_shared_is_all_that_any_server_reads():
    network, params, optimizer = KINDS["by matrix, vector first"]
    cut = ow.split(optimizer.minimize(squares(network), params, random(8, 6)), 2)
    assert [[v.name for v in part.shared] for part in cut.server_parts] == [
        ["learning_rate"],
        ["learning_rate", "decay"],
    ]
    assert [v.name for v in cut.shared.outputs] == ["learning_rate", "decay"]


@pytest.mark.parametrize("name", ["named step", "named beta1 on one server"])
def test_what_is_shared_bears_the_name_it_has_on_one_device(name):
    network, params, optimizer = KINDS[name]
    program = optimizer.minimize(squares(network), params, random(8, 6))
    cut = ow.split(program, 2)
    mine = {v.name for v in program.hyperparameters}
    assert {v.name for v in cut.servers[0].hyperparameters} == mine
    assert mine <= {v.name for v in cut.server_parts[1].shared} | {"learning_rate_1"} & mine
    assert {v.name for v in cut.server_parts[1].shared} == {v.name for v in cut.shared.outputs}


def test_a_rule_that_looks_at_a_whole_parameter_is_not_cut():
    cut = ow.split(program_of(ByMatrix()), 2)
    assert all(s.is_whole for own in cut.shards for s in own)


def test_another_batch_size_leaves_the_servers_alone():
    params, data = numbers(np.float32)
    cut = ow.split(program_of(ow.Adam(0.01)), 3, 2)
    for rows in (1, 3, 5):
        other = cut.at([x[:rows] for x in data])
        assert other.trainer["x"].shape == (rows, 40)
        for a, b in zip(cut.servers, other.servers, strict=True):
            assert str(a) == str(b)
    cut = ow.split(program_of(ow.Momentum(0.01), 5), 3, 2).at([x[:6] for x in data])
    compared(cut, program_of(ow.Momentum(0.01)), params, [data] * 2, 2, 1e-5, 1e-6)


# ---------------------------------------------------------------- refusals


class Together(ow.Optimizer):
    type = ow.UpdateType.ACROSS
    learning_rate: ow.Hyperparameter = 0.1

    def update(self, parameters, gradients, slots):
        return tuple(p - self.learning_rate * g for p, g in zip(parameters, gradients, strict=True)), slots


class Evaluating(ow.Optimizer):
    type = ow.UpdateType.ACROSS
    evaluates_loss = True
    learning_rate: ow.Hyperparameter = 0.1

    def update(self, parameters, gradients, slots, loss):
        return tuple(p - 0 * loss(*parameters) for p in parameters), slots


def clipped():
    params, data = numbers(np.float32)
    program = ow.append_backward(ow.trace(loss, params, *data))
    return ow.append_update(ow.clip_by_global_norm(program, 1.0), ow.SGD(0.1))


def traced():
    params, data = numbers(np.float32)
    return ow.trace(loss, params, *data)


def by_hand():
    program = program_of(ow.SGD(0.1))
    return replace(program, ops=(*program.ops,))


def embedding(optimizer, read=lambda t, i: t[i], rows=4, returned=None, **options):
    def loss(p, i):
        found = jnp.mean(read(p["table"], i) @ p["w"])
        return (found, p[returned]) if returned else found

    params = {"table": random(50, 3), "w": random(3, 2)}
    return optimizer.minimize(loss, params, np.zeros(rows, "int32"), has_aux=bool(returned), **options)


SMALL = ow.SGD(0.1).minimize(lambda w, x: jnp.mean(x @ w), np.ones(2, "float32"), np.ones((4, 2), "float32"))
PLAIN = program_of(ow.SGD(0.1))
REFUSED = {
    "across": (
        lambda: ow.split(program_of(Together()), 2),
        ow.GraphError,
        "Together looks at all parameters at once, and 2 servers have a part of them each. Take one server",
    ),
    "clip": (
        lambda: ow.split(clipped(), 1, 2),
        ow.GraphError,
        "clip_by_global_norm stands between the backward pass and the update of 'loss', so it stays with",
    ),
    "evaluates": (
        lambda: ow.split(program_of(Evaluating()), 1),
        ow.GraphError,
        "Evaluating evaluates the loss in its update, and servers have no data",
    ),
    "no update": (
        lambda: ow.split(ow.append_backward(traced()), 2),
        ow.GraphError,
        "has 0 updates; split cuts a Program whose last transform is its update",
    ),
    "no backward": (lambda: ow.split(traced(), 2), ow.GraphError, "has 0 updates;"),
    "not the last": (
        lambda: ow.split(ow.transform(lambda program: program)(PLAIN), 2),
        ow.GraphError,
        "after its update; split cuts a Program whose last transform is its update",
    ),
    "for test": (lambda: ow.split(ow.for_test(PLAIN), 2), ow.GraphError, "has 0 updates"),
    "changed": (
        lambda: ow.split(by_hand(), 2),
        ow.RecipeError,
        "were changed by hand, which its recipe does not know, so it cannot be traced again without its",
    ),
    "not traced": (
        lambda: ow.split(replace(PLAIN, recipe=None), 2),
        ow.RecipeError,
        "was not made by trace, so it cannot be traced again without its update. Build it with",
    ),
    "rows": (
        lambda: ow.split(SMALL, 3),
        ow.GraphError,
        "2 parameters and parts of such are too few for 3 servers. Take 2.",
    ),
    "matrices": (
        lambda: ow.split(program_of(ByMatrix()), 4),
        ow.GraphError,
        "There are 3 parameters for 4 servers, and ByMatrix looks at each as a whole. Take at most 3",
    ),
    "lazy unknown": (
        lambda: ow.split(embedding(ow.Adam(0.1)), 2, lazy="tabel"),
        ow.UnknownNameError,
        "The nearest names are 'table'",
    ),
    "lazy whole": (
        lambda: ow.split(embedding(ow.Adam(0.1)), 2, lazy=["table", "w"]),
        ow.UnknownNameError,
        "'w' travels whole: dot_general at test_split.py",
    ),
    "lazy without rows": (
        lambda: ow.split(embedding(ow.Adam(0.1)), 2, lazy=["table"], rows=False),
        ow.UnknownNameError,
        "split, lazy: 'table' travels whole: rows=False. An update is lazy where rows alone are sent.",
    ),
    "lazy in micro-batches": (
        lambda: ow.split(ow.accumulate(embedding(ow.Adam(0.1)), 2), 2, lazy=["table"]),
        ow.UnknownNameError,
        "'table' travels whole: accumulate adds up the gradients of micro-batches, which read different rows",
    ),
    "lazy and frozen": (
        lambda: ow.split(embedding(ow.Adam(0.1), parameter_list=["w"]), 2, lazy=["table"]),
        ow.UnknownNameError,
        "'table' travels whole: it is not trained",
    ),
    "lazy in a checkpoint": (
        lambda: ow.split(embedding(ow.Adam(0.1), read=jax.checkpoint(lambda t, i: t[i])), 2, lazy="table"),
        ow.UnknownNameError,
        "reads it, and by rows goes what is read by lookups of whole rows alone (table[ids])",
    ),
    "lazy and returned": (
        lambda: ow.split(embedding(ow.Adam(0.1), returned="table"), 2, lazy="t*"),
        ow.UnknownNameError,
        "'table' travels whole: the function returns it",
    ),
    "lazy and long": (
        lambda: ow.split(embedding(ow.Adam(0.1), rows=50), 2, lazy="table"),
        ow.UnknownNameError,
        "'table' travels whole: a batch looks up 50 rows, and it has 50",
    ),
    "lazy and guarded": (
        lambda: ow.split(ow.guard(embedding(ow.Adagrad(0.1))), 2, lazy=["table"]),
        ow.GraphError,
        "split: lazy updates of 'table' touch the rows that were sent, and what leaves an update out",
    ),
    "watched": (
        lambda: ow.split(ow.watch(embedding(ow.Adam(0.1)), gradients=True), 2, lazy=["table"]),
        ow.GraphError,
        "split: 'grad(table)' is watched, and neither the forward and backward pass of a trainer",
    ),
    "lazy matrix": (
        lambda: ow.split(embedding(ByMatrix()), 2, lazy=["table"]),
        ow.GraphError,
        "lazy updates look at single rows, and ByMatrix looks at each parameter as a whole",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    call, error, text = REFUSED[case]
    with pytest.raises(error) as caught:
        call()
    assert text in str(caught.value)


@pytest.mark.parametrize("what", ["servers", "trainers"])
@pytest.mark.parametrize("count", [0, -1, 1.5, True, "2", None])
def test_a_count_that_is_none(what, count):
    with pytest.raises(ow.ArgumentError, match=f"split: {what} is .*; expected how many, at least 1"):
        ow.split(PLAIN, **{"servers": 1, "trainers": 1, what: count})


def test_a_rule_across_parameters_has_one_server():
    params, data = numbers(np.float32)
    cut = ow.split(program_of(Together(), 6), 1, 2)
    compared(cut, program_of(Together()), params, [data] * 2, 2, 1e-5, 1e-6)


# ---------------------------------------------------------------- the proof of landing


def with_server(cut, index, change):
    """The Split with another Program for one server."""
    wrong = replace(cut)
    parts = list(cut.server_parts)
    parts[index] = replace(parts[index], program=change(parts[index].program))
    wrong.__dict__["server_parts"] = tuple(parts)
    return wrong


def with_shards(cut, change):
    return replace(cut, shards=tuple(tuple(change(s) for s in own) for own in cut.shards))


def updates(program):
    return [op for op in program.ops if op.type == "adam"]


def without(program):
    [first, *_] = updates(program)
    return replace(program, ops=tuple(op for op in program.ops if op is not first))


def doubled(program):
    first = updates(program)[0]
    again = replace(first, outputs=tuple(replace(v, name=f"{v.name}_again") for v in first.outputs))
    return replace(program, ops=(*program.ops, again))


def other(program):
    first = updates(program)[0]
    return replace(program, ops=tuple(replace(op, type="sgd") if op is first else op for op in program.ops))


def not_replaced(program):
    following = dict(program.next_state)
    following.pop(program.parameters[0])
    return replace(program, next_state=following)


def counting(program):
    count = next(op for op in CUT.servers[0].ops if op.type == "count")
    return replace(program, ops=(*program.ops, count))


def shortened(shard):
    return Shard(shard.parameter, shard.begin, shard.end - 1) if shard.begin else shard


def overlapping(shard):
    return Shard(shard.parameter, shard.begin - 1, shard.end) if shard.begin else shard


CUT = ow.split(program_of(ow.Adam(0.1)), 3)
WRONG = {
    "row missing": (
        lambda: with_shards(CUT, shortened),
        "the servers own the rows .*; expected 0 to 40, once",
    ),
    "row doubled": (
        lambda: with_shards(CUT, overlapping),
        "the servers own the rows .*; expected 0 to 40, once",
    ),
    "server missing": (lambda: replace(CUT, shards=CUT.shards[:2]), "expected 0 to 40, once"),
    "server doubled": (lambda: replace(CUT, shards=(*CUT.shards, CUT.shards[2])), "expected 0 to 40, once"),
    "op missing": (
        lambda: with_server(CUT, 1, without),
        "loss_server_1 updates 'w.*' by 0 ops of type adam; expected one for each",
    ),
    "op doubled": (
        lambda: with_server(CUT, 2, doubled),
        "loss_server_2 has an op adam that updates none of its parameters",
    ),
    "op other": (
        lambda: with_server(CUT, 2, other),
        "loss_server_2 updates '.*' by 0 ops of type adam; expected one for each",
    ),
    "not replaced": (
        lambda: with_server(CUT, 1, not_replaced),
        "loss_server_1 updates 'w.*' by 0 ops of type adam",
    ),
    "second counter": (lambda: with_server(CUT, 1, counting), "which belongs to the first server"),
}


def test_a_right_split_lands():
    assert [str(s) for own in CUT.shards for s in own if s.parameter.name == "w"] != ["w"]
    assert check_landing(CUT) is CUT
    assert check_landing(with_server(CUT, 1, lambda program: program)).servers == CUT.servers


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_split_does_not_land(case):
    make, text = WRONG[case]
    with pytest.raises(ow.GraphError, match=text):
        check_landing(make())


def test_what_replaces_a_parameter_is_made_by_its_update():
    for program in CUT.servers:
        made = producers(program)
        assert all(made[program.next_state[p]].type == "adam" for p in program.parameters)


# ---------------------------------------------------------------- fingerprints

PRINTS = """
import jax, jax.numpy as jnp, numpy as np, onward as ow

def loss(p, ids, x):
    h, _ = jax.lax.scan(lambda c, r: (jnp.tanh(c + r), None), jnp.zeros(4), jax.nn.relu(x))
    e = jax.nn.silu(jnp.take(p["table"], ids, axis=0)) @ p["w"]
    return jnp.mean((e + h * np.arange(4, dtype="float32") * SCALE) ** 2)

def network():
    x = ow.data("x", (None, 6))
    return jnp.mean(ow.layer.fc(ow.layer.dropout(ow.layer.batch_norm(x), 0.5), 2))

def prints():
    params = {"table": np.ones((50, 3), "float32"), "w": np.ones((3, 4), "float32")}
    data = np.zeros(4, "int32"), np.ones((5, 4), "float32")
    program = OPTIMIZER.minimize(loss, params, *data)
    cuts = [ow.split(program, 2, 2, lazy=["table"]), ow.split(OPTIMIZER.minimize(ow.trace(network)), 2)]
    return " ".join(cut.fingerprint for cut in cuts)
"""


def prints(scale="2", optimizer="ow.Adam(0.1)"):
    names = {}
    exec(f"{PRINTS}\nSCALE = {scale}\nOPTIMIZER = {optimizer}", names)
    return names["prints"]()


def test_fingerprints_are_equal_in_other_processes():
    mine = prints()
    code = f"{PRINTS}\nSCALE = 2\nOPTIMIZER = ow.Adam(0.1)\nprint(prints())"
    command, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONHASHSEED": "7"}
    screen, terminal = os.openpty()  # where JAX prints in colours
    done = subprocess.run(command, env=environment, stdout=terminal, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 0, done.stderr
    assert os.read(screen, 10_000).decode().strip() == mine
    assert prints() == mine


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("ow.Adam(0.1)"), ("ow.Adam(0.2)")),
        (("ow.Adam(0.1)"), ("ow.AdamW(0.1)")),
        (("ow.Momentum(0.1)"), ("ow.Momentum(0.1, nesterov=True)")),
        (("ow.SGD(lambda step: 1 / (step + 1))"), ("ow.SGD(lambda step: 1 / (step + 2))")),
    ],
)
def test_fingerprints_tell_optimizers_apart(first, second):
    pairs = zip(prints(optimizer=first).split(), prints(optimizer=second).split(), strict=True)
    assert all(a != b for a, b in pairs)


def test_fingerprints_tell_graphs_and_cuts_apart():
    def of(network, **options):
        x = random(8, 6)
        return ow.split(
            ow.SGD(0.1).minimize(network, random(6, 5), x), **{"servers": 2, **options}
        ).fingerprint

    fixed = random(5)
    found = [
        of(lambda w, x: jnp.mean(x @ w * 2)),
        of(lambda w, x: jnp.mean(x @ w * 3)),
        of(lambda w, x: jnp.mean(x @ w + fixed)),
        of(lambda w, x: jnp.mean(x @ w + fixed[::-1])),
        of(lambda w, x: jnp.mean(jnp.sin(x @ w))),
        of(lambda w, x: jnp.mean(x @ w * 2), servers=3),
        of(lambda w, x: jnp.mean(x @ w * 2), trainers=2),
    ]
    assert len(set(found)) == len(found)
    assert of(lambda w, x: jnp.mean(x @ w * 2)) == found[0]
    lazy = [ow.split(embedding(ow.Adam(0.1)), 2, lazy=names).fingerprint for names in ((), ("table",))]
    assert lazy[0] != lazy[1]
