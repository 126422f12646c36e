"""Deep networks of layers on real digits, next to their twins in plain JAX: the same losses, step by step."""

from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.datasets import load_digits
from tests.compiled import optimized

import onward as ow

EPOCHS, BATCH, RATE = 6, 64, 0.05
MOMENTUM, EPSILON = 0.9, 1e-5


@pytest.fixture(scope="module")
def digits():
    """Images [n, 8, 8, 1] and labels: four fifths to train on, one fifth held out."""
    found = load_digits()
    images = (found.images / 16).astype("float32")[..., None]
    labels = found.target.astype("int32")
    order = np.random.default_rng(0).permutation(len(labels))
    held_out, rest = np.split(order, [len(order) // 5])
    return (images[rest], labels[rest]), (images[held_out], labels[held_out])


def answer(logits):
    labels = ow.data("labels", (None,), "int32")
    return ow.layer.cross_entropy(logits, labels), {"accuracy": ow.layer.accuracy(logits, labels)}


def cnn():
    h = ow.data("images", (None, 8, 8, 1))
    for name, channels in (("conv1", 16), ("conv2", 32)):
        h = ow.layer.pool(ow.layer.conv(h, channels, 3, act="relu", name=name), 2)
    return answer(ow.layer.fc(h.reshape(h.shape[0], -1), 10, name="last"))


def mlp():
    """Six layers, with batch normalization between them."""
    h = ow.data("images", (None, 8, 8, 1))
    h = h.reshape(h.shape[0], -1)
    for n in range(5):
        h = ow.layer.fc(h, 48, b=False, name=f"fc{n}")
        h = jax.nn.relu(ow.layer.batch_norm(h, momentum=MOMENTUM, epsilon=EPSILON, name=f"norm{n}"))
    return answer(ow.layer.fc(h, 10, name="last"))


# ---------------------------------------------------------------------------- the twins: no framework


def twin_cnn(p, statistics, training, images):
    h = images
    for name in ("conv1", "conv2"):
        dimensions = ("NHWC", "HWIO", "NHWC")
        h = jax.lax.conv_general_dilated(h, p[f"{name}/w"], (1, 1), "SAME", dimension_numbers=dimensions)
        h = jax.nn.relu(h + p[f"{name}/b"])
        n, height, width, channels = h.shape
        h = h.reshape(n, height // 2, 2, width // 2, 2, channels).max((2, 4))
    return h.reshape(len(h), -1) @ p["last/w"] + p["last/b"], statistics


def twin_mlp(p, statistics, training, images):
    h, following = images.reshape(len(images), -1), {}
    for n in range(5):
        h = h @ p[f"fc{n}/w"]
        mean, variance = statistics[f"norm{n}/mean"], statistics[f"norm{n}/variance"]
        now = (h.mean(0), h.var(0)) if training else (mean, variance)
        following[f"norm{n}/mean"] = MOMENTUM * mean + (1 - MOMENTUM) * now[0]
        following[f"norm{n}/variance"] = MOMENTUM * variance + (1 - MOMENTUM) * now[1]
        h = (h - now[0]) / jnp.sqrt(now[1] + EPSILON) * p[f"norm{n}/scale"] + p[f"norm{n}/offset"]
        h = jax.nn.relu(h)
    return h @ p["last/w"] + p["last/b"], following


def loss(predict, p, statistics, images, labels):
    logits, statistics = predict(p, statistics, True, images)
    log_p = jax.nn.log_softmax(logits)
    return -jnp.mean(log_p[jnp.arange(len(labels)), labels]), statistics


@partial(jax.jit, static_argnums=0)
def step(predict, p, statistics, velocity, images, labels):
    """One step of gradient descent with momentum."""
    gradient = jax.value_and_grad(partial(loss, predict), has_aux=True)
    (value, statistics), g = gradient(p, statistics, images, labels)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, g)
    return jax.tree.map(lambda p, v: p - RATE * v, p, velocity), statistics, velocity, value


def train_twin(predict, state, reader):
    p = {name: jnp.copy(value) for name, value in state.parameters.items()}
    statistics = {v.name: jnp.copy(state[v]) for v in state.layout.variables if v.name not in p}
    velocity, losses = jax.tree.map(jnp.zeros_like, p), []
    for _ in range(EPOCHS):
        for images, labels in reader:
            p, statistics, velocity, value = step(predict, p, statistics, velocity, images, labels)
            losses.append(float(value))
    return losses, p, statistics


# ---------------------------------------------------------------------------- side by side

TWINS = {"cnn": (cnn, twin_cnn), "mlp": (mlp, twin_mlp)}


@pytest.mark.parametrize("kind", TWINS)
def test_a_network_and_its_twin(digits, kind):
    network, predict = TWINS[kind]
    model = ow.Model(network, seed=1, has_aux=True)
    with optimized() if kind == "cnn" else nullcontext():  # it has pooling
        side_by_side(*digits, model, predict)


def side_by_side(data, held_out, model, predict):
    reader = partial(ow.batches, data, BATCH, shuffle=True, drop_last=True)
    losses, p, statistics = train_twin(predict, model.state, reader())
    trainer = ow.Trainer(model, ow.Momentum(RATE, 0.9))
    history = trainer.train(reader(), epochs=EPOCHS, test=ow.batches(held_out, 360))
    found = history["loss"][~np.isnan(history["loss"])]
    np.testing.assert_allclose(found[:40], losses[:40], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found, losses, rtol=1e-2, atol=1e-3)  # rounding grows where a relu turns
    logits, _ = predict(p, statistics, False, held_out[0])
    accuracy = np.mean(np.argmax(logits, 1) == held_out[1])
    assert accuracy > 0.95
    assert history["test_accuracy"][-1] > 0.95
    assert abs(history["test_accuracy"][-1] - accuracy) < 0.01
