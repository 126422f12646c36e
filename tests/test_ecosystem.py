"""Libraries that people use beside Onward, as they are: grain, Orbax, optax, jaxtyping, treescope."""

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import treescope
from jaxtyping import Array, Float, Int, jaxtyped

import onward as ow
from onward.execute.loop.reader import LoopReader, move, position_of

EXAMPLES, BATCH = 20, 4


# grain ------------------------------------------------------------------------------------------------------


class Numbered:
    """Example i is the number 2**i, so that a sum tells which examples it is of, and how often."""

    def __len__(self):
        return EXAMPLES

    def __getitem__(self, i):
        return {"n": np.float32(2**i)}

    def __repr__(self):  # of which grain makes the position of a DataLoader
        return "Numbered()"


def mapped(epoch=0):
    return grain.MapDataset.source(Numbered()).shuffle(seed=epoch).batch(BATCH)


def streamed(epoch=0):
    return mapped(epoch).to_iter_dataset()


def loader(epoch=0):
    order = grain.samplers.IndexSampler(EXAMPLES, shuffle=True, num_epochs=1, seed=epoch)
    return grain.DataLoader(
        data_source=Numbered(), sampler=order, operations=[grain.transforms.Batch(BATCH)], worker_count=0
    )


def mixed():
    source = grain.MapDataset.source(Numbered()).to_iter_dataset()
    return grain.IterDataset.mix([source, source], [0.3, 0.7]).batch(BATCH)


def window():
    source = grain.MapDataset.source(Numbered()).to_iter_dataset()
    return grain.experimental.WindowShuffleIterDataset(source, window_size=7, seed=1).batch(BATCH)


def threaded():
    return mapped().to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=3))


def numbers(batch):
    return batch["n"].tolist()


@pytest.mark.parametrize("make", [mapped, streamed, loader, mixed, window, threaded])
def test_grain_goes_on_with_the_next_example(make):
    """At each position, in a training loop and by itself."""
    pairs = [(numbers(batch), position) for batch, position in LoopReader(make()).epoch(0)]
    for i, (_, position) in enumerate(pairs):
        reading = LoopReader(make())
        reading.restore(position)
        assert [numbers(batch) for batch, _ in reading.epoch(0)] == [batch for batch, _ in pairs[i + 1 :]]
    reader = iter(make())
    next(reader)
    again = iter(make())
    move(again, position_of(reader))
    assert [numbers(batch) for batch in again] == [batch for batch, _ in pairs[1:]]


def summed():
    """The weight counts down by every example that is read."""
    w = ow.parameter("w", (), initializer=ow.initializer.constant(0.0))
    return jnp.sum(ow.data("n", (BATCH,))) * w


ONCE = float(2**EXAMPLES - 1)  # the sum of all examples


def trained(reader, folder, stop=None, resume=False):
    def until(event):
        if event.step == stop:
            raise RuntimeError

    options = {"optimizer": ow.SGD(1.0), "checkpoints": ow.Checkpoints(folder, every=1), "progress": False}
    return ow.train(summed, reader, epochs=2, callbacks=[until], resume=resume, **options)


@pytest.mark.parametrize(("make", "stops"), [(streamed, (3, 5)), (loader, (7,))])
def test_a_trainer_over_grain_resumes_with_the_next_example(make, stops, tmp_path):
    """In the middle of an epoch whose order is another than that before, and at the end of one."""
    whole = trained(make, tmp_path / "whole")
    assert float(whole["w"]) == -2 * ONCE
    for stop in stops:
        folder = tmp_path / f"from {stop}"
        with pytest.raises(RuntimeError):
            trained(make, folder, stop)
        again = trained(make, folder, resume=True)
        assert float(again["w"]) == -2 * ONCE
        assert again.history["loss"].tolist() == whole.history["loss"].tolist()


def test_a_loop_of_your_own_keeps_the_position_of_grain(tmp_path):
    step = ow.compile(ow.SGD(1.0).minimize(summed))
    state, reader = step.init(), iter(streamed())
    with ow.Checkpoints(tmp_path) as checkpoints:
        for _ in range(3):
            state, _ = step(state, **next(reader))
        checkpoints.save(state, 3, reader=reader)
    reader = iter(streamed())
    state = step.restore(tmp_path, reader=reader)
    for batch in reader:
        state, _ = step(state, **batch)
    assert float(state["w"]) == -ONCE
    with pytest.raises(ow.ArgumentError, match=r"it = iter\(reader\), and then reader=it"):
        checkpoints.save(state, 5, reader=streamed())


# Orbax ------------------------------------------------------------------------------------------------------


def network():
    x = ow.data("x", (2, 3))
    for _ in range(4):  # equal layers share buffers
        x = ow.layer.fc(x, 3, act="tanh")
    return jnp.mean(ow.layer.dropout(x, 0.1))


def bits(state):
    values = dict(state).items()
    is_key = jax.dtypes.prng_key
    return {n: jax.random.key_data(x) if jnp.issubdtype(x.dtype, is_key) else x for n, x in values}


def assert_equal(one, other):
    found, expected = bits(one), bits(other)
    assert found.keys() == expected.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_orbax_takes_a_state_and_gives_it_back(tmp_path):
    """By name, and as the tree that it is; what a step makes meanwhile is not in it."""
    step, x = ow.compile(ow.Adam(0.1).minimize(network), roll=True), np.ones((2, 3), "float32")
    state, _ = step(step.init(seed=0), x)
    assert state.storage is not None, "shares no buffer: the test shows less than it says"
    assert not hasattr(jax.tree.map(type, state), "values")  # Python 3.11 asks so, in any order
    kept = state.copy()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "named", dict(state))
        checkpointer.save(tmp_path / "tree", state)
        later, _ = step(state, x)
        checkpointer.wait_until_finished()
        fresh = step.init(seed=1)
        assert_equal(fresh.replace(checkpointer.restore(tmp_path / "named", dict(fresh))), kept)
        tree = checkpointer.restore(tmp_path / "tree", fresh)
    assert_equal(tree, kept)
    assert_equal(step(tree, x)[0], later)


def test_what_orbax_saved_elsewhere_begins_a_training(tmp_path):
    params = {"w": jnp.arange(3.0), "b": jnp.float32(2)}
    step = ow.compile(ow.SGD(0.1).minimize(lambda p, x: jnp.sum(p["w"] * x) + p["b"], params, jnp.ones(3)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", params)
        checkpointer.wait_until_finished()
        state = step.init(checkpointer.restore(tmp_path / "params", params))
    state, out = step(state, jnp.ones(3))
    assert float(out.loss) == 5.0
    with ow.Checkpoints(tmp_path / "ours", backend="orbax") as checkpoints:
        checkpoints.save(state, 1)
    found = checkpoints.load().arrays
    with ocp.StandardCheckpointer() as checkpointer:  # from ours to Orbax's own
        checkpointer.save(tmp_path / "theirs", found)
        checkpointer.wait_until_finished()
        assert_equal(state.replace(checkpointer.restore(tmp_path / "theirs", found)), state)


# optax ------------------------------------------------------------------------------------------------------

LABELS, CLASSES = np.arange(4) % 3, np.eye(3, dtype="float32")[np.arange(4) % 3]
CASES = {
    "warmup_cosine": (
        optax.warmup_cosine_decay_schedule(0.0, 1.0, 2, 5, 0.1),
        lambda z: optax.softmax_cross_entropy_with_integer_labels(z, LABELS),
    ),
    "piecewise": (
        optax.piecewise_constant_schedule(1.0, {2: 0.5}),
        lambda z: optax.sigmoid_binary_cross_entropy(z, CLASSES),
    ),
    "joined": (
        optax.join_schedules([optax.linear_schedule(0, 1, 3), optax.exponential_decay(1.0, 2, 0.5)], [3]),
        lambda z: optax.huber_loss(z, CLASSES),
    ),
    "a_function": (lambda step: 1 / (1 + step), lambda z: optax.cosine_distance(z, CLASSES, epsilon=1e-6)),
}


def total(params):
    return sum(jnp.mean(loss(params[name])) for name, (_, loss) in CASES.items())


def test_schedules_and_losses_of_optax_are_used_as_they_are():
    """A parameter for each, against the gradients of JAX and the rates that the schedule gives."""
    z = np.random.default_rng(0).normal(size=(4, 3)).astype("float32")
    params = dict.fromkeys(CASES, z)
    groups = [ow.Group(name, ow.SGD(schedule)) for name, (schedule, _) in CASES.items()]
    program = ow.SGD(groups=groups).minimize(total, params)
    assert " joined/learning_rate = schedule(step)" in str(program)
    step = ow.compile(program)
    plain = jax.jit(
        lambda p, i: (jax.value_and_grad(total)(p), {n: rate(i) for n, (rate, _) in CASES.items()})
    )
    state = step.init(params)
    for i in range(5):
        state, out = step(state)
        (value, slopes), rates = plain(params, i)
        params = {n: x - np.asarray(rates[n]) * np.asarray(slopes[n]) for n, x in params.items()}
        np.testing.assert_allclose(out.loss, value, rtol=1e-5)
    for name, expected in params.items():
        np.testing.assert_allclose(state[name], expected, rtol=1e-4, atol=1e-6, err_msg=name)


# jaxtyping --------------------------------------------------------------------------------------------------


@jaxtyped(typechecker=None)
def annotated(params: dict, x: Float[Array, "b f"], y: Int[Array, "b"]):  # noqa: F821, F722
    assert isinstance(x, Float[Array, "b f"])
    assert isinstance(y, Int[Array, "b"])
    logits = x @ params["w"]
    if not isinstance(logits, Float[Array, "b classes"]) or isinstance(logits, Float[Array, "b f"]):
        raise TypeError("logits are of another shape")
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))


def test_jaxtyping_checks_a_loss_while_it_is_traced():
    params, x, y = {"w": jnp.ones((5, 3))}, jnp.ones((8, 5)), jnp.arange(8) % 3
    program = ow.trace(annotated, params, x, y)
    assert program.name == "annotated"
    line = annotated.__wrapped__.__code__.co_firstlineno + 4
    assert f"test_ecosystem.py:{line}" in str(program.ops[0].source)
    ow.accumulate(ow.SGD(0.1).minimize(program), 2)  # traced again for half of the examples
    with pytest.raises(ow.TraceError, match="logits are of another shape"):
        ow.trace(annotated, {"w": jnp.ones((5, 5))}, x, y)


# treescope --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The chararray class:DeprecationWarning")  # treescope reads all of NumPy
def test_treescope_shows_the_values_of_a_state_and_the_listing_of_a_program():
    program = ow.SGD(0.5).minimize(lambda w: w**2, jnp.float32(1.0))
    step = ow.compile(program)
    state = step.init(jnp.float32(1.0))
    shown = treescope.render_to_text(state)
    assert [name for name in state if f"'{name}': <jax.Array(" not in shown] == []
    lines = [line for line in str(program).split("\n") if line]
    assert treescope.render_to_text(program).split("\n") == lines
    step(state)
    assert treescope.render_to_text(state) == repr(state)
