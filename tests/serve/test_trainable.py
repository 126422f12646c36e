"""A model that was saved trainable is trained as the network it came from; what cannot be refuses at once."""

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import onward as ow

OLDER = Path(__file__).parent / "files" / "0.1.0"
X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
Y = 2 * X[:, :2]
PARAMS = {"w1": jax.random.normal(jax.random.key(0), (3, 8)), "w2": jnp.ones((8, 2))}


def network(params, x):
    return jnp.tanh(x @ params["w1"]) @ params["w2"]


def loss_of(function):
    return lambda params, x, y: jnp.mean((function(params, x) - y) ** 2)


def losses(program, x=X, y=Y, count=3):
    step = ow.compile(program, tune=False)
    state, found = step.init(PARAMS), []
    for _ in range(count):
        state, out = step(state, x, y)
        found.append(float(out.loss))
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("trainable") / "network.model"
    return ow.load(ow.save(ow.Model(ow.trace(network, PARAMS, X), PARAMS), path, trainable=True))


@pytest.fixture(scope="module")
def programs(model):
    """A training Program of the network, and that of the network from the file."""
    return [ow.Adam(0.05).minimize(loss_of(f), PARAMS, X, Y) for f in (network, model)]


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """A training Program whose whole loss is from a file."""
    forward = ow.trace(loss_of(model), PARAMS, X, Y)
    state = ow.compile(forward, tune=False).init(PARAMS)
    path = tmp_path_factory.mktemp("trainable") / "loss.model"
    return ow.Adam(0.05).minimize(ow.load(ow.save(forward, path, state, trainable=True)).topology)


@pytest.fixture(scope="module")
def expected(programs):
    """The losses of the network itself, which no transform below changes."""
    return losses(programs[0])


def test_within_a_loss_of_ones_own(programs, whole, expected):
    np.testing.assert_allclose(losses(programs[1]), expected, rtol=1e-6)
    np.testing.assert_allclose(losses(whole), expected, rtol=1e-6)
    np.testing.assert_allclose(losses(whole, X[:5], Y[:5]), losses(programs[0], X[:5], Y[:5]), rtol=1e-6)


def test_a_function_like_any_other(model):
    found, expected = (jax.jit(jax.grad(lambda p, f=f: f(p, X).sum()))(PARAMS) for f in (model, network))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), found, expected)
    np.testing.assert_allclose(model(PARAMS, X[:2]), network(PARAMS, X[:2]), atol=1e-6)
    for wrong, text in [
        (lambda: model(PARAMS), r"model\(parameters, x\)"),
        (lambda: model({"w1": PARAMS["w1"]}, X), "w2"),
        (lambda: model(PARAMS | {"w2": jnp.ones((8, 3))}, X), "expected float32"),
        (lambda: model(PARAMS, X[:, :2]), "takes x"),
    ]:
        with pytest.raises(ow.OnwardError, match=text):
            wrong()


@pytest.mark.parametrize(
    "transform",
    [
        lambda p: ow.watch(ow.guard(p), gradients=True, every=1),
        lambda p: ow.accumulate(p, 2),
        lambda p: ow.replicate(p, devices=2),
        ow.check_finite,
    ],
    ids=["guard and watch", "accumulate", "replicate", "check_finite"],
)
def test_transforms_give_the_numbers_of_the_network(programs, whole, transform, expected):
    for program in (programs[1], whole):
        np.testing.assert_allclose(losses(transform(program)), expected, rtol=1e-5)


def test_trained_and_saved_again(programs, tmp_path):
    step = ow.compile(programs[1], tune=False)
    state, _ = step(step.init(PARAMS), X, Y)
    again, begun = ow.load_step(ow.save(programs[1], tmp_path / "half.model", state))
    expected, found = step(state, X, Y)[1].loss, again(begun, X, Y)[1].loss
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def images(n, seed):
    return np.random.default_rng(seed).normal(size=(n, 4, 4, 1)).astype("float32"), np.arange(n) % 3


def classifier():
    """Statistics, random numbers, an embedding and attention: it is trained otherwise than it answers."""
    seen = ow.layer.batch_norm(ow.layer.conv(ow.data("images", (None, 4, 4, 1)), 2, 3, act="relu"))
    labels = ow.data("labels", (None,), "int32")
    tokens = jnp.clip(seen.reshape(seen.shape[0], -1)[:, :3], 0, 2).astype("int32")
    read = ow.layer.attention(ow.layer.embedding(tokens, 3, 4), heads=2, b=False)
    hidden = ow.layer.dropout(ow.layer.fc(seen.reshape(seen.shape[0], -1), 4), 0.5)
    return ow.layer.cross_entropy(ow.layer.fc(hidden, 3) + ow.layer.fc(read.mean(1), 3, b=False), labels)


@pytest.fixture(scope="module")
def trained_otherwise(tmp_path_factory):
    model = ow.Model(classifier, seed=3, batch_size=4)
    path = tmp_path_factory.mktemp("otherwise") / "classifier.model"
    return model, ow.load(ow.save(model, path, batch=4, trainable=True))


def test_dropout_and_statistics_are_those_of_training(trained_otherwise):
    model, found = (m.copy() for m in trained_otherwise)
    trainers = [ow.Trainer(m, ow.Momentum(0.1)) for m in (model, found)]
    for seed in range(3):
        expected, other = (float(t.update(*images(4, seed)).loss) for t in trainers)
        np.testing.assert_allclose(other, expected, rtol=1e-6)
    for name in model.state:
        if name != "key":
            np.testing.assert_allclose(found[name], model[name], rtol=1e-5, atol=1e-6)
    expected, other = (float(ow.Evaluator(m).forward(*images(4, 5)).loss) for m in (model, found))
    np.testing.assert_allclose(other, expected, rtol=1e-5)


def test_what_differs_from_device_to_device_is_refused(trained_otherwise):
    program = ow.SGD(0.1).minimize(trained_otherwise[1].topology)
    with pytest.raises(ow.GraphError, match=r"classifier\.model and carries .* one device"):
        ow.replicate(program, devices=1)


def test_what_cannot_be_says_so_when_it_is_called(whole, tmp_path, monkeypatch):
    """Nothing of it has to run: a step that is loaded is left uncompiled, which takes most of the time."""
    plain = ow.load(
        ow.save(ow.Model(ow.trace(network, PARAMS, X), PARAMS), tmp_path / "plain.model", batch=8)
    )
    monkeypatch.setattr("onward.execute.executable.Executable.compile", lambda executable: None)
    older, (step, begun) = ow.load(OLDER / "network.model"), ow.load_step(OLDER / "step.model")
    trained = step.program
    for refused, text in [
        (lambda: ow.SGD(0.1).minimize(older.topology), r"network\.model holds no derivative: older files"),
        (lambda: ow.gradients(older.topology, older.topology.outputs[0], "output/w"), "trainable=True"),
        (lambda: ow.Trainer(older, ow.SGD(0.1)), r"network\.model holds no derivative"),
        (lambda: ow.SGD(0.1).minimize(loss_of(plain), PARAMS, X, Y), r"plain\.model holds no derivative"),
        (lambda: ow.SGD(0.1).minimize(plain.topology), "without trainable=True"),
        (lambda: ow.append_backward(trained), r"load_step\(path\)"),
        (lambda: ow.guard(trained), r"step\.model, whose State counts no steps left out\. Guard before save"),
        (lambda: ow.accumulate(trained, 2), r"step\.model, .*compile\(accumulate\(program, 2\)\)"),
        (lambda: ow.accumulate(ow.watch(trained, gradients=True), 2), "Accumulate before save"),
        (lambda: ow.averaged(trained, begun), r"step\.model, .* takes the State of load_step"),
        (lambda: ow.replicate(trained, devices=2), r"step\.model and holds its update"),
        (lambda: ow.recompute(trained, budget=0.5), "loaded from"),
        (lambda: ow.mixed_precision(whole, "bfloat16"), r"loss\.model, in which every op has its dtype"),
        (lambda: ow.graph.update_pass(trained), "cannot be fed"),
        (lambda: ow.for_test(trained), "Save the Model as well"),
        (lambda: ow.roll(trained), "roll"),
    ]:
        with pytest.raises(ow.OnwardError, match=text):
            refused()


def test_a_network_without_a_derivative_is_not_saved_trainable(tmp_path):
    def endless(w, x):
        return jax.lax.while_loop(lambda v: v.sum() < 10, lambda v: v * 2, w * x)

    model = ow.Model(ow.trace(endless, jnp.float32(2), jnp.ones(2)), jnp.float32(2))
    with pytest.raises(ow.ArgumentError, match="cannot be exported"):
        ow.save(model, tmp_path / "m", trainable=True)
    with pytest.raises(ow.ArgumentError, match="trainable"):
        ow.save(model, tmp_path / "m", trainable="yes")
    with pytest.raises(ow.ArgumentError, match=r"save\(program, path, state\)"):
        ow.save(model.topology, tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


def test_a_module_with_a_number_that_is_not_finite(tmp_path):
    """As a pooling layer has it, which begins with -inf."""
    layers = jnp.ones(4), eqx.nn.MaxPool1d(2)

    def loss(layers, x):
        return jnp.mean(layers[1](x * layers[0]))

    x = np.arange(8.0, dtype="float32").reshape(2, 4)
    step = ow.compile(ow.SGD(0.1).minimize(loss, layers, x))
    again, state = ow.load_step(ow.save(step, tmp_path / "step", step.init(layers)))
    np.testing.assert_allclose(again(state, x)[1].loss, loss(layers, x))
