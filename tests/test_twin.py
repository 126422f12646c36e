"""Deep networks of layers on real digits, next to their twins in plain JAX: the same losses, step by step."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.datasets import load_digits

import onward as ow

EPOCHS, BATCH, RATE = 6, 64, 3e-3
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
def step(predict, carry, images, labels):
    """One step of Adam, as in the paper."""
    p, statistics, m, v, t = carry
    gradient = jax.value_and_grad(partial(loss, predict), has_aux=True)
    (value, statistics), g = gradient(p, statistics, images, labels)
    t += 1
    m = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, m, g)
    v = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, v, g)

    def moved(p, m, v):
        return p - RATE * (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8)

    return (jax.tree.map(moved, p, m, v), statistics, m, v, t), value


def train_twin(predict, state, reader):
    p = {name: jnp.copy(value) for name, value in state.parameters.items()}
    statistics = {v.name: jnp.copy(state[v]) for v in state.layout.variables if v.name not in p}
    zeros = jax.tree.map(jnp.zeros_like, p)
    carry, losses = (p, statistics, zeros, zeros, jnp.float32(0)), []
    for _ in range(EPOCHS):
        for images, labels in reader:
            carry, value = step(predict, carry, images, labels)
            losses.append(float(value))
    return losses, carry


# ---------------------------------------------------------------------------- side by side

TWINS = {"cnn": (cnn, twin_cnn), "mlp": (mlp, twin_mlp)}


@pytest.mark.parametrize(("network", "predict"), TWINS.values(), ids=TWINS)
def test_a_network_and_its_twin(digits, network, predict):
    data, held_out = digits
    model = ow.Model(network, seed=1, has_aux=True)
    losses, (p, statistics, *_) = train_twin(predict, model.state, ow.batches(data, BATCH, shuffle=True))
    trainer = ow.Trainer(model, ow.Adam(RATE))
    history = trainer.train(
        ow.batches(data, BATCH, shuffle=True), epochs=EPOCHS, test=ow.batches(held_out, 360)
    )
    found = history["loss"][~np.isnan(history["loss"])]
    np.testing.assert_allclose(found[:20], losses[:20], rtol=1e-5)
    np.testing.assert_allclose(found, losses, rtol=1e-2, atol=1e-3)  # rounding grows, step by step
    logits, _ = predict(p, statistics, False, held_out[0])
    accuracy = np.mean(np.argmax(logits, 1) == held_out[1])
    assert accuracy > 0.95
    assert history["test_accuracy"][-1] > 0.95
    assert abs(history["test_accuracy"][-1] - accuracy) < 0.01
    print(f"{np.max(np.abs(found - losses)):.2g} apart at most, {accuracy:.3f} right")
