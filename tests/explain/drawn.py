"""The Programs that the tests of drawings look at, each made once."""

from functools import cache

import jax
import jax.numpy as jnp

import onward as ow
from onward.core.program import Program


@cache
def mlp(*rules) -> Program:
    def loss(params, x, y):
        with jax.named_scope("hidden"):
            h = jax.nn.relu(x @ params["w1"] + params["b1"])
        with jax.named_scope("output"):
            z = h @ params["w2"] + params["b2"]
        return jnp.mean((z - y) ** 2)

    params = {"w1": jnp.ones((4, 3)), "b1": jnp.zeros(3), "w2": jnp.ones((3, 2)), "b2": jnp.zeros(2)}
    return ow.Adam(1e-3, rules=rules).minimize(loss, params, jnp.ones((8, 4)), jnp.ones((8, 2)))


def _layer(p, x, i):
    with jax.named_scope(f"layer_{i}"):
        with jax.named_scope("attention"):
            q, k, v = x @ p["q"], x @ p["k"], x @ p["v"]
            x = x + jax.nn.softmax(q @ k.T) @ v
        with jax.named_scope("mlp"):
            return x + jnp.tanh(x @ p["w"] + p["b"])


@cache
def transformer(layers: int, derive: bool = True) -> Program:
    def loss(params, tokens, targets):
        with jax.named_scope("embed"):
            x = params["embed"][tokens]
        for i, p in enumerate(params["layers"]):
            x = _layer(p, x, i)
        with jax.named_scope("head"):
            return jnp.mean((x @ params["embed"].T - targets) ** 2)

    one = {name: jnp.eye(4) for name in "qkvw"} | {"b": jnp.zeros(4)}
    params = {"embed": jnp.ones((5, 4)), "layers": [dict(one) for _ in range(layers)]}
    forward = ow.trace(loss, params, jnp.zeros(3, jnp.int32), jnp.ones((3, 5)))
    return ow.AdamW(1e-3).minimize(forward) if derive else forward


@cache
def convolutional() -> Program:
    def network():
        images = ow.data("images", (None, 6, 6, 1))
        labels = ow.data("labels", (None,), "int32")
        x = jax.nn.relu(ow.layer.batch_norm(ow.layer.conv(images, 2, 3)))
        return ow.layer.cross_entropy(ow.layer.fc(x.reshape(x.shape[0], -1), 3), labels)

    return ow.Momentum(0.1, 0.9).minimize(ow.trace(network, batch_size=4))


@cache
def without_scopes() -> Program:
    def loss(params, x):
        for w, b in params:
            x = x + jnp.sin(x @ w + b)
        return jnp.mean(x**2)

    return ow.SGD(0.1).minimize(loss, [(jnp.eye(3), jnp.zeros(3)) for _ in range(5)], jnp.ones((2, 3)))


@cache
def long_line() -> Program:
    """Three hundred ops of which none repeats after the same distance."""

    def loss(w, x):
        x = x * w
        for i in range(300):
            x = [jnp.sin, jnp.cos, jnp.exp, jnp.tanh][(i * i // 7 + i // 11 + i % 3) % 4](x)
        return jnp.sum(x)

    return ow.trace(loss, jnp.ones(2), jnp.ones(2))


PROGRAMS = {
    "accumulated": lambda: ow.accumulate(mlp(), 4),
    "clipped": lambda: mlp(ow.ClipByGlobalNorm(1.0)),
    "convolutional": convolutional,
    "empty": lambda: Program("empty"),
    "forward": lambda: transformer(2, derive=False),
    "long": long_line,
    "mlp": mlp,
    "replicated": lambda: ow.replicate(mlp(), devices=8),
    "rolled": lambda: ow.roll(transformer(4)),
    "transformer": lambda: transformer(4),
    "without scopes": without_scopes,
}
