"""A replicated Program against one device with the whole batch, and in what it shows."""

from collections import Counter
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.compiled import together

import onward as ow

ROWS, STEPS = 16, 10


# ---------------------------------------------------------------- the networks


def inputs(shape, dtype):
    return ow.data("x", (None, *shape), dtype), ow.data("y", (None,), "int32")


def mlp(dtype):
    x, y = inputs((6,), dtype)
    return ow.layer.fc(ow.layer.fc(x, 5, act="tanh"), 3), y


def cnn(dtype):
    x, y = inputs((4, 4, 2), dtype)
    h = ow.layer.relu(ow.layer.batch_norm(ow.layer.conv(x, 3, 3, b=False)))
    return ow.layer.fc(ow.layer.pool(h, "global", kind="average"), 3, b=False), y


def transformer(dtype):
    x, y = inputs((3, 4), dtype)
    h = ow.layer.attention(x, heads=2, causal=True, b=False) if dtype == "float32" else in_double(x)
    return ow.layer.fc(jnp.mean(x + h, axis=1), 3, b=False), y


def in_double(x):
    """Attention with one head in the precision of x; that of JAX takes its softmax in float32."""
    query = ow.layer.fc(x, x.shape[-1], b=False)
    scores = jnp.where(np.tril(np.ones((3, 3), bool)), jnp.einsum("btd,bsd->bts", query, x), -1e30)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), x)


def recurrent(dtype):
    """One state, and weights that all steps share: an LSTM has more of the same."""
    x, y = inputs((3, 4), dtype)
    first = jnp.zeros((x.shape[0], 4), dtype)
    w = ow.parameter("w", (4, 4), dtype)
    h, _ = jax.lax.scan(lambda h, x: (jnp.tanh(x + h @ w), None), first, jnp.moveaxis(x, 1, 0))
    return ow.layer.fc(h, 3, b=False), y


def line(dtype):
    x, y = inputs((6,), dtype)
    return ow.layer.fc(x, 3), y


NETWORKS = {"mlp": mlp, "cnn": cnn, "transformer": transformer, "recurrent": recurrent}
SHAPES = {"mlp": (6,), "cnn": (4, 4, 2), "transformer": (3, 4), "recurrent": (3, 4), "line": (6,)}
BETA, EPSILON, DECAY = 0.5, 2.0**-20, 0.25  # as all hyperparameters here, a float32 exactly
OPTIMIZERS = {
    "sgd": ow.SGD(2.0**-4),
    "momentum": ow.Momentum(2.0**-5, BETA),
    "adam": ow.Adam(2.0**-6, BETA, BETA, EPSILON),
    "adamw": ow.AdamW(2.0**-6, BETA, BETA, EPSILON, DECAY),
}
MERGES = {
    "average": ow.Average(),
    "sum": ow.Sum(),
    "bucketed": ow.merge.Bucketed(64),
    "sharded": ow.Sharded(),
}


@cache
def traced(network, dtype="float32", total=False):
    """The mean cost, or a sum that comes to the same for the whole batch."""

    def loss():
        logits, y = {**NETWORKS, "line": line}[network](dtype)
        cost = ow.layer.cross_entropy(logits, y)
        aux = {"accuracy": ow.layer.accuracy(logits, y), "logits": logits}
        return cost * (logits.shape[0] / ROWS if total else 1), aux

    return ow.trace(loss, has_aux=True, batch_size=ROWS)


@cache
def program_of(network, optimizer, dtype="float32", total=False):
    """The training Program."""
    return optimizer.minimize(traced(network, dtype, total))


def data_of(network, dtype="float32", rows=ROWS):
    rng = np.random.default_rng(1)
    x = rng.normal(size=(rows, *SHAPES[network])).astype(dtype)
    return x, rng.integers(0, 3, rows).astype(np.int32)


def first_parameters(program):
    rng = np.random.default_rng(2)
    return {v.name: rng.normal(0, 0.5, v.shape).astype(v.dtype) for v in program.parameters}


def trained(program, data, steps):
    """All state and the last results, as NumPy."""
    step = ow.compile(program)
    state = step.init(first_parameters(program))
    for _ in range(steps):
        state, out = step(state, *data)
    return {name: np.asarray(state[name]) for name in state}, jax.tree.map(np.asarray, out.value)


@cache
def alone(network, optimizer, steps=1):
    """What one device makes of the whole batch."""
    return trained(program_of(network, optimizer), data_of(network), steps)


def updated(optimizer, w, gradient, slots, t):
    """A parameter and its slots after one update, by the rules as their papers have them."""
    rate = OPTIMIZERS[optimizer].learning_rate
    if optimizer == "sgd":
        return w - rate * gradient, {}
    if optimizer == "momentum":
        velocity = BETA * slots.get("velocity", 0) + gradient
        return w - rate * velocity, {"velocity": velocity}
    mean = BETA * slots.get("mean", 0) + (1 - BETA) * gradient
    variance = BETA * slots.get("variance", 0) + (1 - BETA) * gradient**2
    way = mean / (1 - BETA**t) / (np.sqrt(variance / (1 - BETA**t)) + EPSILON)
    decay = DECAY * w if optimizer == "adamw" else 0
    return w - rate * (way + decay), {"mean": mean, "variance": variance}


@cache
def backward(network):
    """The gradients of the whole batch on one device, in float64."""
    program = ow.append_backward(traced(network, "float64"))
    return ow.compile(program, [f"grad({v.name})" for v in program.parameters], donate=False)


def by_hand(network, optimizer):
    """All state and the last results of a training whose updates are done in NumPy."""
    step = backward(network)
    names, data = [v.name for v in step.program.parameters], data_of(network, "float64")
    state, slots = step.init(first_parameters(step.program)), {name: {} for name in names}
    for t in range(1, STEPS + 1):
        before = {name: np.asarray(state[name]) for name in names}
        state, out = step(state, *data)
        following = {}
        for name, w in before.items():
            gradient = np.asarray(out[f"grad({name})"])
            following[name], slots[name] = updated(optimizer, w, gradient, slots[name], t)
        state = state.replace(following)
    carried = {name: np.asarray(state[name]) for name in state}
    kept = {f"{name}/{slot}": x for name in names for slot, x in slots[name].items()}
    return {**carried, **kept, "step": STEPS}, jax.tree.map(np.asarray, out.value)


# ---------------------------------------------------------------- equal to one device


def every_pair():
    """Network, optimizer, merge and number of devices such that every pair occurs: an orthogonal array."""
    twice = [0, 2, 3, 1]  # in the field of four elements, where ^ is the sum
    for a, network in enumerate(NETWORKS):
        for b, optimizer in enumerate(OPTIMIZERS):
            merge = list(MERGES)[a ^ b]
            yield network, optimizer, merge, (2, 2, 4, 8)[a ^ twice[b]]


def test_the_table_covers_every_pair():
    rows = list(every_pair())
    columns = [NETWORKS, OPTIMIZERS, MERGES, (2, 4, 8)]
    for i, one in enumerate(columns):
        for j, other in enumerate(columns[:i]):
            assert len({(row[i], row[j]) for row in rows}) == len(one) * len(other)


def repeated(program, data):
    """A case for ``together``: all state and the last results of a training."""
    step = ow.Step(program, (), donate=False, ahead=False)

    def whole(state, data):
        state, outs = jax.lax.scan(lambda state, _: step(state, *data), state, None, STEPS)
        return {name: state[name] for name in state}, jax.tree.map(lambda x: x[-1], outs.value)

    return whole, step.init(first_parameters(program)), data


@cache
def on_devices(devices):
    """State and results of all rows of the table for so many devices, compiled as one."""
    cases = {}
    for network, optimizer, merge, count in every_pair():
        if count == devices:
            program = program_of(network, OPTIMIZERS[optimizer], "float64", merge == "sum")
            program = ow.replicate(program, devices, MERGES[merge])
            cases[network, optimizer] = repeated(program, data_of(network, "float64"))
    return together(cases)


@pytest.mark.parametrize(("network", "optimizer", "merge", "devices"), list(every_pair()))
def test_ten_steps_equal_those_of_one_device(network, optimizer, merge, devices):
    with jax.enable_x64(True):
        expected, value = by_hand(network, optimizer)
        program = program_of(network, OPTIMIZERS[optimizer], "float64", merge == "sum")
        expected |= {v.name: getattr(OPTIMIZERS[optimizer], v.name) for v in program.hyperparameters}
        found, results = on_devices(devices)[network, optimizer]
        for v in program.state:
            if found[v.name].shape == np.shape(expected[v.name]):
                np.testing.assert_allclose(found[v.name], expected[v.name], 1e-9, 1e-10, err_msg=v.name)
            else:
                assert merge == "sharded"
                assert v not in program.parameters
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-9, 1e-10), results, value)


@pytest.mark.parametrize(
    ("network", "merge"),
    [("transformer", "average"), ("line", "sum"), ("line", "bucketed"), ("line", "sharded")],
)
def test_gradients_of_one_step_in_single_precision(network, merge):
    """With a rate of 1 the gradient is the way that the parameters went."""
    devices = {"average": 8, "sum": 4, "bucketed": 2, "sharded": 8}[merge]
    program = program_of(network, ow.SGD(1.0), total=merge == "sum")
    found, _ = trained(ow.replicate(program, devices, MERGES[merge]), data_of(network), 1)
    expected, _ = alone(network, ow.SGD(1.0))
    for v in program.parameters:
        np.testing.assert_allclose(found[v.name], expected[v.name], 1e-5, 1e-6, err_msg=v.name)


# ---------------------------------------------------------------- equal to itself


def noisy():
    """What every kind of layer does at once: normalized by batch, dropped, counted."""
    x, y = inputs((6,), "float32")
    h = ow.layer.batch_norm(ow.layer.fc(x, 5, b=False), scale=False, offset=False, name="norm")
    h = ow.layer.dropout(h, 0.5, name="drop")
    logits = ow.layer.fc(h, 3)
    hits = ow.state("hits", (), "int32")
    steps = ow.state("steps", (), "int32")
    ow.assign(hits, hits + jnp.sum(y == 1, dtype="int32"))
    ow.assign(steps, steps + 1)
    return ow.layer.cross_entropy(logits, y), {"ones": jnp.sum(y == 1), "mask": h != 0, "x": x}


def noisy_program(optimizer=None):
    return (optimizer or ow.Adam(0.01)).minimize(ow.trace(noisy, has_aux=True, batch_size=ROWS))


def bits(state):
    return {
        v.name: np.asarray(jax.random.key_data(x) if jnp.issubdtype(v.dtype, jax.dtypes.prng_key) else x)
        for v, x in zip(state.layout.variables, state.values, strict=True)
    }


@cache
def noisy_step():
    return ow.compile(ow.replicate(noisy_program(ow.SGD(0.05)), 8), fetch=["fc_0"])


def run(step, state, data, steps):
    for _ in range(steps):
        state, out = step(state, *data)
    return bits(state), np.asarray(out.loss)


@pytest.mark.parametrize(
    "merge", [ow.merge.Bucketed(64), ow.Sharded(), ow.merge.PowerSGD(1)], ids=lambda m: m.name
)
def test_two_runs_are_equal_bit_by_bit(merge):
    program, data = program_of("line", ow.Momentum(0.01)), data_of("line")
    step = ow.compile(ow.replicate(program, 8, merge))
    found = [run(step, step.init(first_parameters(program)), data, 10) for _ in range(2)]
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_two_runs_are_equal_bit_by_bit_where_numbers_are_drawn():
    data, again = data_of("mlp"), noisy_step.__wrapped__()
    found = [run(step, step.init(seed=3), data, 10) for step in (noisy_step(), again)]
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_dropout_differs_from_device_to_device_and_from_step_to_step():
    step = noisy_step()
    state, data, masks = step.init(), data_of("mlp"), []
    for _ in range(3):
        state, out = step(state, *data)
        masks += list(np.asarray(out.aux["mask"]).reshape(8, -1))
    assert len({mask.tobytes() for mask in masks}) > 20  # of 24 masks of ten places


def test_integers_count_the_whole_batch_and_steps_stay_steps():
    step = noisy_step()
    state, (x, y) = step.init(), data_of("mlp")
    for _ in range(3):
        state, out = step(state, x, y)
    assert int(out.aux["ones"]) == np.sum(y == 1)
    assert int(state["hits"]) == 3 * np.sum(y == 1)
    assert int(state["steps"]) == int(state["step"]) == 3


# ---------------------------------------------------------------- what a step returns


def test_results_of_examples_are_joined_in_their_order():
    step, data = noisy_step(), data_of("mlp")
    _, out = step(step.init(), *data)
    np.testing.assert_array_equal(out.aux["x"], data[0])
    assert out["fc_0"].shape == (ROWS, 5)


def test_activations_and_gradients_can_be_fetched():
    program = program_of("mlp", ow.SGD(0.1))
    names, data = ["fc_0", "grad(fc_1/w)"], data_of("mlp")
    step = ow.compile(program, fetch=names)
    _, expected = step(step.init(first_parameters(program)), *data)
    step = ow.compile(ow.replicate(program, 8), fetch=[*names, "all_mean(grad(fc_1/w))"])
    _, out = step(step.init(first_parameters(program)), *data)
    np.testing.assert_allclose(out["fc_0"], expected["fc_0"], 1e-5, 1e-6)
    gradients = out["grad(fc_1/w)"]
    assert gradients.shape == (8, 5, 3)
    np.testing.assert_allclose(gradients.mean(0), out["all_mean(grad(fc_1/w))"], 1e-5, 1e-7)
    np.testing.assert_allclose(gradients.mean(0), expected["grad(fc_1/w)"], 1e-5, 1e-7)


def test_a_gradient_as_long_as_the_batch_of_one_device_is_not_taken_for_examples():
    program = ow.SGD(0.1).minimize(lambda w, x: jnp.mean(x @ w), jnp.ones(2), jnp.ones((8, 2)))
    step = ow.compile(ow.replicate(program, 4), fetch=["grad(w)"])
    _, out = step(step.init(jnp.ones(2)), np.arange(16, dtype="float32").reshape(8, 2))
    np.testing.assert_array_equal(out["grad(w)"], [[1, 2], [5, 6], [9, 10], [13, 14]])


def test_statistics_of_the_parts_or_of_the_whole_batch():
    x, y = data_of("mlp")
    of_parts = ow.compile(ow.replicate(noisy_program(ow.SGD(0.05)), 8, sync_batch_norm=False))
    running = {}
    for sync, step in ((True, noisy_step()), (False, of_parts)):
        state, _ = step(step.init({"fc_0/w": np.eye(6, 5, dtype="float32")}), x, y)
        running[sync] = np.asarray(state["norm/variance"])
    whole, parts = x[:, :5].var(0), x[:, :5].reshape(8, 2, 5).var(1).mean(0)
    np.testing.assert_allclose(running[True], 0.9 + 0.1 * whole, 1e-5)
    np.testing.assert_allclose(running[False], 0.9 + 0.1 * parts, 1e-5)
    assert not np.allclose(whole, parts, 1e-2)


def test_a_loss_that_is_a_sum_is_reported_as_the_sum():
    def loss(w, x):
        return jnp.sum((x @ w) ** 2)

    x, w = data_of("mlp")[0], jnp.ones(6)
    program = ow.SGD(0.1).minimize(loss, w, x)
    for merge in (ow.Sum(), ow.merge.Bucketed(64, ow.Sum())):
        step = ow.compile(ow.replicate(program, 8, merge))
        _, out = step(step.init(w), x)
        np.testing.assert_allclose(out.loss, loss(w, x), 1e-6)


# ---------------------------------------------------------------- shapes


def test_another_batch_size_is_traced_again_and_remembered():
    program = program_of("line", ow.SGD(0.1))
    step = ow.compile(ow.replicate(program, 4))
    state = step.init(first_parameters(program))
    for rows in (ROWS, 24, ROWS, 24):
        before = {v.name: np.asarray(state[v.name]) for v in program.parameters}
        state, out = step(state, *data_of("line", rows=rows))
        assert out.aux["logits"].shape == (rows, 3)
    assert (step.traces, step.compilations) == (1, 2)
    with pytest.raises(
        ow.ArgumentError, match=r"18 rows \('x'\), which 4 devices do not divide. Feed 16 or 20"
    ):
        step(state, *data_of("line", rows=18))
    last = ow.compile(program)
    state_1, expected = last(last.init(before), *data_of("line", rows=24))
    np.testing.assert_allclose(out.loss, expected.loss, 1e-5)
    np.testing.assert_allclose(state["fc_0/w"], state_1["fc_0/w"], 1e-5, 1e-6)


@pytest.mark.parametrize(
    ("rows", "devices", "sizes"), [(16, 3, "15 or 18"), (16, 7, "14 or 21"), (2, 4, "4")]
)
def test_a_batch_that_does_not_divide(rows, devices, sizes):
    data = data_of("mlp", rows=rows)
    program = ow.SGD(0.1).minimize(lambda w, x, y: jnp.mean(x @ w), np.ones(6, "float32"), *data)
    message = rf"the batch has {rows} rows \('x'\), which {devices} devices do not divide. Feed {sizes};"
    with pytest.raises(ow.ArgumentError, match=message):
        ow.replicate(program, devices)


def test_a_frozen_network_that_comes_first_may_hold_no_examples():
    frozen, x = np.ones((6, 3), "float32"), np.ones((8, 6), "float32")
    program = ow.SGD(0.1).minimize(lambda w, f, x: jnp.mean(x @ f * w), np.ones(3, "float32"), frozen, x)
    message = r"6 rows \('f'\), which 4 devices .* If the batch is 'x' \(float32\[8,6\]\): whole=\['f'\]\."
    with pytest.raises(ow.ArgumentError, match=message):
        ow.replicate(program, 4)
    assert [v.shape for v in ow.replicate(program, 4, whole=["f"]).inputs] == [(6, 3), (2, 6)]


def test_data_that_is_not_as_long_as_the_batch_goes_to_every_device_whole():
    def loss(w, x, scale, table):
        return jnp.mean(x @ w * scale + table.sum()), x

    x, w = data_of("mlp")[0], np.ones(6, "float32")
    extra = np.float32(2), np.arange(3, dtype="float32")
    program = ow.replicate(ow.SGD(0.1).minimize(loss, w, x, *extra, has_aux=True), 4)
    assert [v.shape for v in program.inputs] == [(4, 6), (), (3,)]
    step = ow.compile(program)
    _, out = step(step.init(w), x, *extra)
    np.testing.assert_allclose(out.loss, loss(w, x, *extra)[0], 1e-6)


def test_data_that_lies_on_a_device_already():
    program = program_of("line", ow.SGD(0.1))
    step = ow.compile(ow.replicate(program, 8))
    x, y = map(jnp.asarray, data_of("line"))
    _, out = step(step.init(first_parameters(program)), x, y)
    _, expected = alone("line", ow.SGD(0.1))
    np.testing.assert_allclose(out.loss, expected[0], 1e-6)


# ---------------------------------------------------------------- what is refused


def test_more_devices_than_there_are():
    program = ow.replicate(program_of("mlp", ow.SGD(0.1)), 16)
    message = r"for 16 devices, and JAX shows 8 \(cpu\).*--xla_force_host_platform_device_count=16"
    with pytest.raises(ow.ArgumentError, match=message):
        ow.compile(program)


def test_replicated_twice():
    program = ow.replicate(program_of("mlp", ow.SGD(0.1)), 2)
    with pytest.raises(ow.GraphError, match="replicated already, for 2 devices"):
        ow.replicate(program, 2)


def test_changed_by_hand():
    program = program_of("mlp", ow.SGD(0.1))
    changed = replace(program, ops=(*program.ops[:-1], replace(program.ops[-1])))
    with pytest.raises(ow.RecipeError, match="changed by hand"):
        ow.replicate(changed, 2)


@pytest.mark.parametrize("devices", [0, -1, 2.0, "two", True])
def test_a_number_of_devices_that_is_none(devices):
    with pytest.raises(ow.ArgumentError, match="expected how many, at least 1"):
        ow.replicate(program_of("mlp", ow.SGD(0.1)), devices)


@pytest.mark.parametrize("merge", ["average", ow.Average, jnp.mean])
def test_a_merge_that_is_none(merge):
    with pytest.raises(ow.ArgumentError, match="expected a merge strategy, an object and not its class"):
        ow.replicate(program_of("mlp", ow.SGD(0.1)), 2, merge)


def test_a_result_that_nothing_says_how_to_merge():
    program = ow.trace(
        lambda w, x: (jnp.mean(x @ w), x[0, 0] > 0), jnp.ones(6), jnp.ones((8, 6)), has_aux=True
    )
    with pytest.raises(ow.GraphError, match="nothing says how to merge it"):
        ow.replicate(ow.SGD(0.1).minimize(program), 2, sync_batch_norm=False)


def test_a_program_without_gradients_is_refused_but_for_a_test_program():
    forward = ow.trace(lambda w, x: jnp.mean(x @ w), jnp.ones(6), jnp.ones((8, 6)))
    with pytest.raises(ow.GraphError, match=r"no gradients to merge. Minimize first.*replicate\(for_test"):
        ow.replicate(forward, 2)
    assert kinds(ow.replicate(ow.for_test(forward), 2)) == {"all_mean": 1}
    assert kinds(ow.replicate(ow.append_backward(forward), 2)) == {"all_mean": 2}


def test_all_devices_unless_told():
    program = ow.replicate(program_of("mlp", ow.SGD(0.1)))
    assert program.replicas.count == jax.device_count() == 8


# ---------------------------------------------------------------- the tester is tested: a forgotten merge


def kinds(program):
    return Counter(op.type for op in program.ops if op.made_by == "collective")


def rewired(program, update, inputs):
    """The Program with other inputs for one op."""
    changed = replace(update, inputs=tuple(inputs.get(v, v) for v in update.inputs))
    return replace(program, ops=tuple(changed if op is update else op for op in program.ops))


@pytest.mark.parametrize("merge", [ow.Average(), ow.Sum(), ow.merge.Bucketed(64)], ids=lambda m: m.name)
def test_an_update_that_reads_the_unmerged_gradient_is_caught(merge):
    program = ow.replicate(program_of("mlp", ow.SGD(0.1)), 4, merge)
    raw = {merged: program[f"grad({p.name})"] for p, merged in program.gradients}
    updates = [op for op in program.ops if op.type == "sgd"]
    assert len(updates) == 4
    for op in updates:
        p = op.inputs[0].name
        with pytest.raises(ow.GraphError) as error:
            ow.check(rewired(program, op, raw))
        assert f"'{p}' is placed replicated, but 'next({p})', which replaces it, differs" in str(error.value)
        assert f"sgd computes it from 'grad({p})'. Merge it over the axis 'replicas' first" in str(
            error.value
        )


class Forgetful(ow.Merge):
    def merge(self, gradient, kept, devices):
        return gradient, kept


class Partial(ow.Merge):
    def merge(self, gradient, kept, devices):
        return devices.mean(gradient).at[0].set(gradient[0]), kept


class Numbered(ow.Merge):
    def merge(self, gradient, kept, devices):
        return devices.mean(gradient) + devices.index, kept


class Local(ow.Merge):
    def init(self, gradient):
        return {"error": jnp.zeros_like(gradient)}

    def merge(self, gradient, kept, devices):
        return devices.mean(gradient) + kept["error"], {"error": gradient}


@pytest.mark.parametrize(
    "merge", [Forgetful(), Partial(), Numbered(), Local(), ow.merge.Bucketed(9, Forgetful())]
)
def test_a_merge_whose_result_differs_is_caught(merge):
    with pytest.raises(ow.GraphError) as error:
        ow.replicate(program_of("mlp", ow.SGD(0.1)), 2, merge)
    assert "'next(fc_0/w)', which replaces it, differs from device to device" in str(error.value)
    assert f"sgd computes it from '{merge.name}(grad(fc_0/w))'" in str(error.value)


def test_a_merge_that_says_nothing():
    class Silent(ow.Merge):
        pass

    with pytest.raises(NotImplementedError, match="Silent does not say how to merge a gradient"):
        ow.replicate(program_of("mlp", ow.SGD(0.1)), 2, Silent())


def test_statistics_that_are_not_merged_are_caught():
    program = ow.replicate(noisy_program(), 2, sync_batch_norm=False)
    [merge] = [op for op in program.ops if "norm/mean" in op.outputs[0].name and op.type == "all_mean"]
    old = program["norm/mean"]
    mutant = replace(program, next_state={**program.next_state, old: merge.inputs[0]})
    with pytest.raises(ow.GraphError, match="'norm/mean' is placed replicated, but"):
        ow.check(mutant)


# ---------------------------------------------------------------- what is sent


LOWERED = ("all_reduce", "all_gather", "reduce_scatter")


def lowered(program):
    step = ow.Step(program, (), False, ahead=False)
    state = step.init(first_parameters(program))
    return jax.jit(step.function).lower(state, *data_of("mlp"))


def in_graph(program):
    """The collectives of all ops, by primitive, each with its bytes."""
    return [found for op in program.ops for found in op.body.collectives]


@pytest.mark.parametrize("merge", MERGES.values(), ids=lambda m: m.name)
def test_the_step_has_the_collectives_of_the_graph(merge):
    program = ow.replicate(program_of("mlp", ow.Momentum(0.1)), 8, merge)
    found = lowered(program)
    words = {"psum": "all_reduce", "reduce_scatter": "reduce_scatter", "all_gather": "all_gather"}
    expected = Counter(words[found.kind] for found in in_graph(program))
    text = found.as_text()
    assert {k: n for k in LOWERED if (n := text.count(f"stablehlo.{k}"))} == expected
    compiled = found.compile({"xla_disable_hlo_passes": "cpu-all-reduce-combiner"}).as_text()
    assert count_of_calls(compiled) == expected.total()


def count_of_calls(text):
    return sum(
        text.count(f" {k}(") for k in ("all-reduce", "all-gather", "reduce-scatter", "all-reduce-start")
    )


def test_buckets_send_the_same_bytes_in_fewer_messages():
    program = program_of("mlp", ow.SGD(0.1))
    bytes_of_all = sum(v.dtype.itemsize * np.prod(v.shape, dtype=int) for v in program.parameters)
    sent = {}
    for merge in (ow.Average(), ow.merge.Bucketed(64), ow.merge.Bucketed()):
        collectives = in_graph(ow.replicate(program, 8, merge))
        assert [(c.kind, c.bytes) for c in collectives[-2:]] == [
            ("psum", 4),
            ("psum", 4),
        ]  # loss and accuracy
        sent[merge] = collectives[:-2]
        assert sum(c.bytes for c in sent[merge]) == bytes_of_all
    assert list(map(len, sent.values())) == [4, 2, 1]


def test_shards_send_no_more_than_an_average():
    program = program_of("mlp", ow.Adam(0.1))
    collectives = in_graph(ow.replicate(program, 8, ow.Sharded()))
    padded = [-(-np.prod(v.shape, dtype=int) // 8) * 8 * 4 for v in program.parameters]
    scattered = [c.bytes for c in collectives if c.kind == "reduce_scatter"]
    gathered = [8 * c.bytes for c in collectives if c.kind == "all_gather"]
    assert sorted(scattered) == sorted(gathered) == sorted(padded)


# ---------------------------------------------------------------- under the transformations of JAX


def test_under_jit_and_scan_a_step_is_a_pure_function():
    program = program_of("line", ow.Adam(0.01))
    step = ow.compile(ow.replicate(program, 8))
    data = data_of("line")
    expected, _ = alone("line", ow.Adam(0.01), steps=5)
    state = step.init(first_parameters(program))
    state, _ = jax.jit(step)(state, *data)
    state, outs = jax.lax.scan(lambda s, _: step(s, *data), state, None, length=3)
    assert outs.loss.shape == (3,)
    assert outs.aux["logits"].shape == (3, ROWS, 3)
    state, _ = step(state, *data)
    assert (step.traces, step.compilations) == (0, 1)
    for v in program.parameters:
        np.testing.assert_allclose(state[v.name], expected[v.name], 1e-4, 1e-5)


# ---------------------------------------------------------------- the state is the same State


@pytest.mark.parametrize("order", ["one many", "many one"])
def test_state_goes_from_one_device_to_many_and_back(order):
    program, data = program_of("line", ow.Momentum(0.02)), data_of("line")
    steps = {"one": ow.compile(program), "many": ow.compile(ow.replicate(program, 8))}
    first, second = (steps[name] for name in order.split())
    assert [v.name for v in first.layout.variables] == [v.name for v in second.layout.variables]
    expected, _ = alone("line", ow.Momentum(0.02), steps=2)
    state = first.init(first_parameters(program))
    for step in (first, second):
        state, _ = step(state, *data)
    for name in state:
        np.testing.assert_allclose(state[name], expected[name], 1e-5, 1e-6)


def test_parameters_and_slots_have_no_axis_of_devices():
    program = program_of("line", ow.Adam(0.01))
    step = ow.Step(ow.replicate(program, 8), (), True, ahead=False)
    state = step.init(first_parameters(program))
    for v in program.state:
        assert state[v.name].shape == v.shape
        assert state[v.name].is_fully_replicated


@pytest.mark.parametrize("merge", [ow.Average(), ow.Sharded(), ow.merge.TopK(0.5), ow.merge.DiLoCo(2)])
def test_a_checkpoint_by_name(merge, tmp_path):
    program, data = program_of("line", ow.Adam(0.01)), data_of("line")
    step = ow.compile(ow.replicate(program, 4, merge))
    state = step.init(first_parameters(program))
    state, _ = step(state, *data)
    with ow.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save({name: state[name] for name in state}, 1)
    state, _ = step(state, *data)
    restored = step.init().replace(checkpoints.load().arrays)
    restored, _ = step(restored, *data)
    jax.tree.map(np.testing.assert_array_equal, bits(restored), bits(state))
