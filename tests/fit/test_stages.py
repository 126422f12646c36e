"""A Trainer over a Pipeline: the numbers, and the checkpoints, of one device; resumed bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(24, 4)).astype("float32")
Y = X.sum(1, keepdims=True)
ROWS = 8
BATCH = {"x": X[:ROWS], "y": Y[:ROWS]}
EMA = ow.Adam(0.01, rules=[ow.EMA(0.5)])


def network():
    h = ow.layer.fc(ow.data("x", (None, 4)), 6, act="tanh", name="first")
    h = ow.layer.fc(ow.layer.dropout(h, 0.5, name="drop"), 6, act="tanh", name="second")
    return ow.layer.mse(ow.layer.fc(h, 1, name="last"), ow.data("y", (None, 1)))


def plain(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["first"]) @ params["last"] - y) ** 2)


PLAIN = {"first": RANDOM.normal(size=(4, 6)), "last": RANDOM.normal(size=(6, 1))}


@pytest.fixture(scope="module")
def dropping():
    """A network with dropout, and its training Program."""
    topology = ow.trace(network, feed=BATCH)
    return topology, EMA.minimize(topology)


def cut(program, data=2):
    return ow.pipeline(program, 2, 4, data=data)


def reader():
    return ow.batches((X, Y), ROWS, shuffle=True, seed=3)


def bits(trainer):
    values = {name: trainer.state[name] for name in trainer.state}
    return {n: np.asarray(jax.random.key_data(x) if n == "key" else x).tobytes() for n, x in values.items()}


def test_twenty_steps_are_those_of_plain_jax_and_the_model_is_whole():
    with jax.enable_x64(True):
        batches = [(X[rows].astype(float), Y[rows].astype(float)) for rows in np.split(np.arange(24), 3)]
        program = ow.SGD(0.05).minimize(plain, PLAIN, *batches[0])
        trainer = ow.Trainer(ow.Model(ow.trace(plain, PLAIN, *batches[0]), PLAIN), cut(program))
        trainer.train(batches, epochs=7, progress=False)
        params = PLAIN
        for i in range(21):
            gradients = jax.grad(plain)(params, *batches[i % 3])
            params = {name: x - 0.05 * gradients[name] for name, x in params.items()}
        for name, x in params.items():
            np.testing.assert_allclose(trainer.model[name], x, rtol=0, atol=1e-9)
        assert trainer.model["last"].devices() == {*jax.devices()[2:4]}
        short = batches[0][0][:3], batches[0][1][:3]  # a test takes batches of any length
        np.testing.assert_allclose(trainer.test([short])["loss"], plain(params, *short), atol=1e-9)
        machine = ow.GradientMachine(trainer.model)
        machine.backward(*short)
        for name, x in jax.grad(plain)(params, *short).items():
            np.testing.assert_allclose(machine.gradient(name), x, rtol=0, atol=1e-9)
        trainer.model.replace(PLAIN)  # other values, on one device: they are gone on with
        np.testing.assert_allclose(trainer.update(*batches[0]).loss, plain(PLAIN, *batches[0]), atol=1e-9)
        np.testing.assert_allclose(
            trainer.model(trainer.model.parameters, *short), trainer.test([short])["loss"], atol=1e-9
        )


def test_it_is_resumed_bit_for_bit_and_on_one_device_and_back(dropping, tmp_path):
    topology, program = dropping
    seen = []

    def stop(event):
        seen.append(str(event.kind))
        if event.kind == "step" and event.step == 4:
            raise ow.StopTraining("half way")

    def fresh(folder, optimizer):
        return ow.Trainer(ow.Model(topology, seed=1), optimizer, checkpoints=folder)

    pipeline = cut(program)
    whole = fresh(None, pipeline)
    whole.train(reader(), epochs=3, test=[(X, Y)])
    half = fresh(tmp_path / "half", pipeline)
    half.train(reader(), epochs=3, test=[(X, Y)], callbacks=[stop])
    assert seen == ["begin", "step", "step", "step", "epoch", "test", "step", "checkpoint", "end"]
    resumed = fresh(tmp_path / "half", pipeline)
    assert not resumed.restore().kept
    assert bits(resumed) == bits(half)
    resumed.train(reader(), epochs=3, test=[(X, Y)])
    assert bits(resumed) == bits(whole)
    alone = fresh(tmp_path / "half", program)
    assert not alone.restore(tmp_path / "half").kept
    assert bits(alone) == bits(resumed)
    assert alone.test([(X, Y)]) == resumed.test([(X, Y)])
    path = alone.checkpoint(tmp_path / "alone")
    back = fresh(None, pipeline)
    assert not back.restore(path).kept
    assert bits(back) == bits(alone)
    assert bits(back.averaged())["first/w"] == np.asarray(back["first/w/average"]).tobytes()
    np.testing.assert_array_equal(back.update(**BATCH).loss, resumed.update(**BATCH).loss)
    assert bits(back) == bits(resumed)


def test_without_sharing_the_buffers_of_the_model_are_taken_over(dropping):
    topology, program = dropping
    trainer = ow.Trainer(ow.Model(topology), cut(program, data=1), share=False)
    trainer.update(**BATCH)
    before = trainer.model["last/w"]
    trainer.update(**BATCH)
    assert before.is_deleted()
    assert not trainer.model["last/w"].is_deleted()


def test_what_does_not_go_with_stages_is_refused_by_name(dropping):
    topology, program = dropping
    model, pipeline = ow.Model(topology), cut(program)
    for options, words in (
        ({"check_finite": True}, "of which each stage sees a part. Leave it out: train"),
        ({"devices": 2}, "data=2"),
        ({"merge": ow.merge.Average()}, "partitioner sums the gradients"),
        ({"parameter_list": ["last/*"]}, "before the cut"),
    ):
        with pytest.raises(ow.ArgumentError, match=words):
            ow.Trainer(model, pipeline, **options)
    with pytest.raises(ow.ArgumentError, match=r"The model keeps 'key'.*keeps nothing of that name"):
        ow.Trainer(model, cut(ow.SGD(0.05).minimize(plain, PLAIN, X, Y)))
    trainer = ow.Trainer(model, pipeline)
    assert trainer.plan() is pipeline
    trainer.expect_going()
    with pytest.raises(ow.ArgumentError, match="threads=2 updates all parameters in one place"):
        trainer.train(reader(), threads=2)
    with pytest.raises(ow.ArgumentError, match="apply updates all parameters in one place"):
        trainer.apply({})
    with pytest.raises(ow.ArgumentError, match=r"Batch 0 of epoch 0.*left out by batches.*drop_last"):
        trainer.train([(X[:4], Y[:4])], progress=False)
    with pytest.raises(ow.NonFiniteError, match="The loss was"):
        trainer.train([(np.full((ROWS, 4), 1e30, "f"), np.full((ROWS, 1), 1e30, "f"))], progress=False)
