"""Training steps as people publish them, one of each kind, for ``onward.adopt`` to take as they are.

Each is written in the way of a known example: flax's MNIST (gradients in one jitted function, the update in
another), flax.nnx with an optimizer and metrics that are changed in place, an equinox network, a neural ODE,
haiku with state, variational inference, a small GPT, PPO, a graph network, deep Q-learning.

No parameter has a gradient of zero but for rounding, as a bias before a normalization has: Adam makes steps
of full length of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState
from jax import grad

KEY = jax.random.key(0)
RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(16, 4, 4, 1)).astype(np.float32)
LABELS = RANDOM.integers(3, size=16).astype(np.int32)
X = RANDOM.normal(size=(16, 4)).astype(np.float32)
Y = np.sin(X.sum(1, keepdims=True))


@dataclass(frozen=True)
class Published:
    """A step with what it begins with: ``parts`` gives the next state and the loss of what it returns."""

    step: Callable[..., Any]
    state: tuple[Any, ...]
    data: tuple[Any, ...]
    parts: Callable[[Any], tuple[tuple[Any, ...], Any]]
    draws: bool = False
    keeps_statistics: bool = False


def drawn(init, *args):
    """Numbers in the shapes that ``init`` gives, by NumPy: JAX compiles a draw for half a second."""
    rng, shapes = np.random.default_rng(0), jax.eval_shape(init, *args)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.5, x.shape), x.dtype), shapes)


def dense(rng, n, m):
    return {"w": jnp.asarray(rng.normal(size=(n, m)) / n**0.5, "float32"), "b": jnp.zeros(m)}


def mlp(params, x):
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def layers(*sizes):
    return [dense(np.random.default_rng(i), n, m) for i, (n, m) in enumerate(pairwise(sizes))]


def linen_mnist():
    """Gradients in a jitted function, the update in another, both called by a plain one."""

    class CNN(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.avg_pool(nn.relu(nn.Conv(2, (3, 3))(x)), (2, 2), strides=(2, 2))
            return nn.Dense(3)(x.reshape(x.shape[0], -1))

    network = CNN()
    params = drawn(network.init, KEY, IMAGES)["params"]
    state = TrainState.create(apply_fn=network.apply, params=params, tx=optax.sgd(0.1, momentum=0.9))

    @jax.jit
    def apply_model(state, images, labels):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, images)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

        (loss, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return grads, loss, jnp.mean(jnp.argmax(logits, -1) == labels)

    @jax.jit
    def update_model(state, grads):
        return state.apply_gradients(grads=grads)

    def train_step(state, images, labels):
        grads, loss, accuracy = apply_model(state, images, labels)
        return update_model(state, grads), loss, accuracy

    return Published(train_step, (state,), (IMAGES, LABELS), lambda out: (out[:1], out[1]))


def nnx_mnist():
    """Modules, an optimizer and metrics that are changed in place, with batch normalization."""

    class Network(nnx.Module):
        def __init__(self, rngs):
            self.dense, self.norm = nnx.Linear(4, 4, use_bias=False, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
            self.head = nnx.Linear(4, 3, rngs=rngs)

        def __call__(self, x):
            return self.head(nnx.relu(self.norm(self.dense(x))))

    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))

    def loss_fn(model, x, labels):
        logits = model(x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

    @nnx.jit
    def train_step(model, optimizer, metrics, x, labels):
        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, x, labels)
        metrics.update(loss=loss, logits=logits, labels=labels)
        optimizer.update(model, grads)
        return loss

    return Published(
        train_step, (model, optimizer, metrics), (X, LABELS), lambda out: ((), out), keeps_statistics=True
    )


def equinox_cnn():
    key = jax.random.key(1)
    model = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(1, 2, 3, padding=1, key=key),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.MaxPool2d(2, 2),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.Linear(8, 3, key=key),
        ]
    )
    optimizer = optax.adamw(1e-2)

    @eqx.filter_value_and_grad
    def loss_fn(model, images, labels):
        logits = jax.vmap(model)(jnp.moveaxis(images, -1, 1))
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @eqx.filter_jit
    def make_step(model, opt_state, images, labels):
        loss, grads = loss_fn(model, images, labels)
        updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    state = model, optimizer.init(eqx.filter(model, eqx.is_array))
    return Published(make_step, state, (IMAGES, LABELS), lambda out: (out[:2], out[2]))


def neural_ode():
    """Trajectories by Runge and Kutta's method, in a scan; the times are fed with them."""
    params, optimizer = layers(2, 4, 2), optax.adabelief(1e-2)
    times = np.linspace(0, 1, 4, dtype=np.float32)
    paths = np.cumsum(RANDOM.normal(size=(16, 4, 2)), 1).astype(np.float32) / 4

    def solve(params, start):
        def step(y, dt):
            half = y + dt / 2 * mlp(params, y)
            y = y + dt * mlp(params, half)
            return y, y

        return jnp.concatenate([start[None], jax.lax.scan(step, start, jnp.diff(times))[1]])

    @partial(jax.jit, donate_argnums=())
    def make_step(params, opt_state, paths):
        def loss(params):
            return jnp.mean((jax.vmap(solve, (None, 0))(params, paths[:, 0]) - paths) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return value, optax.apply_updates(params, updates), opt_state

    state = params, optimizer.init(params)
    return Published(make_step, state, (paths,), lambda out: (out[1:], out[0]))


def haiku_with_state():
    def network(x, is_training):
        x = hk.BatchNorm(True, True, 0.9)(hk.Linear(4, with_bias=False)(x), is_training)
        return hk.Linear(1)(jax.nn.relu(x))

    made = hk.without_apply_rng(hk.transform_with_state(network))
    params, statistics = made.init(KEY, X, True)
    optimizer = optax.rmsprop(1e-2)

    @jax.jit
    def update(state, batch):
        def loss(params):
            out, statistics = made.apply(params, state["statistics"], batch["x"], True)
            return jnp.mean((out - batch["y"]) ** 2), statistics

        (value, statistics), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        updates, opt_state = optimizer.update(grads, state["opt"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "statistics": statistics, "opt": opt_state}, {"loss": value}

    state = {"params": params, "statistics": statistics, "opt": optimizer.init(params)}
    return Published(
        update, (state,), ({"x": X, "y": Y},), lambda out: (out[:1], out[1]["loss"]), keeps_statistics=True
    )


def variational_inference():
    """A key that is split in the state, a guide with its own scale, a sum over the data and a prior."""
    guide = {"mean": jnp.zeros((4, 1)), "log_scale": jnp.zeros((4, 1))}
    optimizer = optax.adam(1e-2)

    def negative_elbo(guide, key, x, y):
        scale = jnp.exp(guide["log_scale"])
        w = guide["mean"] + scale * jax.random.normal(key, scale.shape)
        divergence = jnp.sum(0.5 * (scale**2 + guide["mean"] ** 2 - 1) - guide["log_scale"])
        return 0.5 * jnp.sum((y - x @ w) ** 2) + divergence

    @jax.jit
    def update(state, x, y):
        guide, opt_state, key = state
        key, now = jax.random.split(key)
        loss, grads = jax.value_and_grad(negative_elbo)(guide, now, x, y)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(guide, updates), opt_state, key), loss

    state = guide, optimizer.init(guide), KEY
    return Published(update, (state,), (X, Y), lambda out: (out[:1], out[1]), draws=True)


def small_gpt(blocks=2):
    """Tokens, causal attention, a loss over those that are no padding, a schedule, clipped gradients."""
    tokens = RANDOM.integers(1, 8, size=(16, 6)).astype(np.int32)

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            normed = nn.RMSNorm()(x)
            q, k, v = (nn.Dense(8, use_bias=False)(normed) for _ in range(3))
            length = x.shape[1]
            scores = jnp.where(jnp.tri(length, dtype=bool), q @ k.swapaxes(1, 2) / 8**0.5, -1e9)
            x = x + nn.softmax(scores) @ v
            return x + nn.Dense(8)(nn.gelu(nn.Dense(16)(nn.RMSNorm()(x))))

    class GPT(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            embed = nn.Embed(8, 8)
            x = embed(tokens) + self.param("positions", nn.initializers.normal(), (6, 8))
            for _ in range(blocks):
                x = Block()(x)
            return embed.attend(nn.RMSNorm()(x))

    network = GPT()
    rates = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rates))
    params = drawn(network.init, KEY, tokens)["params"]

    @partial(jax.jit, donate_argnames=("params", "opt_state"))
    def train_step(params, opt_state, tokens):
        def loss(params):
            logits = network.apply({"params": params}, tokens)[:, :-1]
            each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return jnp.mean(each)

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        metrics = {"loss": value, "norm": optax.tree.norm(grads)}
        return optax.apply_updates(params, updates), opt_state, metrics

    state = params, optimizer.init(params)
    return Published(train_step, state, (tokens,), lambda out: (out[:2], out[2]["loss"]))


def ppo_update():
    """Advantages that are normalized over the batch, a clipped ratio, a clipped value, an entropy."""
    params = {"policy": layers(4, 4, 3), "value": layers(4, 4, 1)}
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-5))
    batch = {
        "obs": X,
        "action": LABELS,
        "log_prob": np.full(16, -1.1, np.float32),
        "advantage": Y[:, 0] * 2 + 1,
        "value": Y[:, 0] / 2,
    }

    @jax.jit
    def update(train_state, batch):
        params, opt_state = train_state

        def loss(params):
            log_probs = jax.nn.log_softmax(mlp(params["policy"], batch["obs"]))
            value = mlp(params["value"], batch["obs"])[:, 0]
            chosen = jnp.take_along_axis(log_probs, batch["action"][:, None], 1)[:, 0]
            ratio = jnp.exp(chosen - batch["log_prob"])
            gae = batch["advantage"]
            gae = (gae - gae.mean()) / (gae.std() + 1e-8)
            actor = -jnp.minimum(ratio * gae, jnp.clip(ratio, 0.8, 1.2) * gae).mean()
            clipped = batch["value"] + jnp.clip(value - batch["value"], -0.2, 0.2)
            targets = batch["advantage"] + batch["value"]
            critic = 0.5 * jnp.maximum((value - targets) ** 2, (clipped - targets) ** 2).mean()
            entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
            return actor + 0.5 * critic - 0.01 * entropy, (critic, entropy)

        (value, others), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return (optax.apply_updates(params, updates), opt_state), (value, *others)

    state = params, optimizer.init(params)
    return Published(update, (state,), (batch,), lambda out: (out[:1], out[1][0]))


def graph_network():
    """One graph: messages along edges are summed at the nodes that they reach."""
    params, optimizer = {"edge": layers(4, 4), "node": layers(4, 3)}, optax.adam(1e-2)
    edges = RANDOM.integers(16, size=(2, 32)).astype(np.int32)

    @jax.jit
    def update(params, opt_state, nodes, senders, receivers, labels):
        def loss(params):
            messages = jnp.tanh(mlp(params["edge"], nodes[senders]))
            reached = jax.ops.segment_sum(messages, receivers, nodes.shape[0])
            logits = mlp(params["node"], nodes + reached)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), opt_state, value

    state = params, optimizer.init(params)
    return Published(update, state, (X, *edges, LABELS), lambda out: (out[:2], out[2]))


def deep_q_learning():
    """A target network that follows slowly; gradients alone, by ``jax.grad`` of a module of its own."""
    params = layers(4, 4, 3)

    class Agent:
        @partial(jax.jit, static_argnums=0)
        def learn(self, online, target, count, batch):
            def loss(params):
                chosen = jnp.take_along_axis(mlp(params, batch["obs"]), batch["action"][:, None], 1)[:, 0]
                best = batch["reward"] + 0.9 * mlp(target, batch["next_obs"]).max(1)
                return optax.huber_loss(chosen, jax.lax.stop_gradient(best)).mean()

            grads = grad(loss)(online)
            online = jax.tree.map(lambda p, g: p - 0.1 * g, online, grads)
            slow = optax.incremental_update(online, target, 0.1)
            return online, optax.periodic_update(online, slow, count, 2), count + 1

    batch = {"obs": X, "action": LABELS, "reward": Y[:, 0], "next_obs": X[::-1].copy()}
    state = params, jax.tree.map(lambda p: p / 2, params), jnp.asarray(1)
    return Published(Agent().learn, state, (batch,), lambda out: (out, None))


def autoencoder():
    """flax's VAE: a key that is fed, ``jax.grad``, no loss returned, a reconstruction within the loss."""

    class VAE(nn.Module):
        @nn.compact
        def __call__(self, x, key):
            mean, logvar = nn.Dense(2)(x), nn.Dense(2)(x)
            z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(key, logvar.shape)
            return nn.Dense(4)(nn.relu(nn.Dense(4)(z))), mean, logvar

    network = VAE()
    state = TrainState.create(
        apply_fn=network.apply, params=drawn(network.init, KEY, X, KEY)["params"], tx=optax.adam(1e-2)
    )

    @jax.jit
    def train_step(state, batch, z_rng):
        def loss_fn(params):
            recon, mean, logvar = state.apply_fn({"params": params}, batch, z_rng)
            kld = -0.5 * jnp.sum(1 + logvar - mean**2 - jnp.exp(logvar), -1).mean()
            return ((recon - batch) ** 2).sum(-1).mean() + kld

        return state.apply_gradients(grads=jax.grad(loss_fn)(state.params))

    return Published(train_step, (state,), (X, KEY), lambda out: ((out,), None), draws=True)


def averaged_weights():
    """``optax.MultiSteps``, and an average of the weights that is kept beside them."""
    optimizer = optax.MultiSteps(optax.lion(1e-2), 2)
    params = layers(4, 4, 1)

    @jax.jit
    def step(params, ema, opt_state, x, y):
        value, grads = jax.value_and_grad(lambda p: jnp.mean((mlp(p, x) - y) ** 2))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        ema = jax.tree.map(lambda e, p: 0.9 * e + 0.1 * p, ema, params)
        return params, ema, opt_state, value

    state = params, params, optimizer.init(params)
    return Published(step, state, (X, Y), lambda out: (out[:3], out[3]))


PUBLISHED = {
    maker.__name__: maker
    for maker in (
        linen_mnist,
        nnx_mnist,
        equinox_cnn,
        neural_ode,
        haiku_with_state,
        variational_inference,
        small_gpt,
        ppo_update,
        graph_network,
        deep_q_learning,
        autoencoder,
        averaged_weights,
    )
}
