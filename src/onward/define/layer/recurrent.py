"""Layers that read a series step by step, as one ``jax.lax.scan``.

What x contributes is computed for all steps at once, before the scan. Parameters are declared outside of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from onward.core.errors import ArgumentError
from onward.core.source import user_line
from onward.define.context import Initializer
from onward.define.initializer import constant, orthogonal, xavier_uniform
from onward.define.layer.base import layer, weight
from onward.define.layer.expect import count, expect_axes, floating

_SERIES = "[batch, time, features]"


@layer
def lstm(
    x: Any,
    size: int,
    *,
    initial: tuple[Any, Any] | None = None,
    reverse: bool = False,
    w: Any = None,
    u: Any = None,
    b: Any = None,
    initializer: Initializer | None = None,
    name: str | None = None,
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """A long short-term memory, with a forget gate and without peepholes.

    With the gates side by side in the order input, forget, cell, output (torch, Keras, flax):
    ``i, f, g, o = x w + h u + b``, then ``c <- sigmoid(f) c + sigmoid(i) tanh(g)`` and
    ``h <- sigmoid(o) tanh(c)``. b begins at 0 (Keras: 1 in the forget gate).

    Args:
        x: [batch, time, n].
        size: how many numbers h and c have.
        initial: (h, c) before the first step, [batch, size] each; zeros unless given.
        reverse: whether to read from the end; outputs stay in the places of their inputs.
        w: [n, 4 size].
        u: [size, 4 size].
        b: [4 size]; False for none.
        initializer: of w; Xavier's uniform one unless given. u is orthogonal at first.
        name: as for every layer.

    Returns:
        ``(outputs, (h, c))``: h of every step, [batch, time, size], and both after the last step read.

    Raises:
        ArgumentError: arrays of another shape.

    Source: Gers, Schmidhuber and Cummins, Learning to Forget, 2000, section 3; gates as in Graves, Generating
    Sequences with Recurrent Neural Networks, 2013, equations 7 to 11, without peepholes.

    Example:
        >>> import onward as ow
        >>> def network():
        ...     outputs, (h, c) = ow.layer.lstm(ow.data("x", (None, 5, 3)), 4)
        ...     return outputs
        >>> program = ow.trace(network, batch_size=8)
        >>> program.outputs[0].shape, [v.shape for v in program.parameters]
        ((8, 5, 4), [(3, 16), (4, 16), (16,)])
    """
    x = jnp.asarray(x)
    size = count("lstm", "size", size)
    gates, u = _projected("lstm", x, size, 4, w, u, initializer)
    if b is not False:
        gates = gates + weight(b, "b", (4 * size,), floating(x), constant(0.0))
    first = tuple(_initial("lstm", x, size, h) for h in (initial or (None, None)))

    def step(carry: tuple[Any, Any], gates: Any) -> tuple[tuple[Any, Any], Any]:
        h, c = carry
        i, f, g, o = jnp.split(gates + h @ u, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    return _scanned(step, first, gates, reverse)


@layer
def gru(
    x: Any,
    size: int,
    *,
    initial: Any = None,
    reverse: bool = False,
    w: Any = None,
    u: Any = None,
    b: Any = None,
    initializer: Initializer | None = None,
    name: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """A gated recurrent unit, the variant that resets after the matrix (cuDNN, torch, flax, Keras).

    With the gates side by side in the order reset, update, new:
    ``r = sigmoid(x w_r + h u_r + b_r)``, ``z = sigmoid(x w_z + h u_z + b_z)``,
    ``n = tanh(x w_n + b_n + r (h u_n + b_h))``, then ``h <- (1 - z) n + z h``. As published, r multiplies
    h before the matrix, and z and 1 - z change places.

    Args:
        x: [batch, time, n].
        size: how many numbers h has.
        initial: h before the first step, [batch, size]; zeros unless given.
        reverse: whether to read from the end; outputs stay in the places of their inputs.
        w: [n, 3 size].
        u: [size, 3 size].
        b: [4 size]: of reset, update, new and, last, of h inside the reset; False for none.
        initializer: of w; Xavier's uniform one unless given. u is orthogonal at first, b begins at 0.
        name: as for every layer.

    Returns:
        ``(outputs, h)``: h of every step, [batch, time, size], and after the last step read.

    Raises:
        ArgumentError: arrays of another shape.

    Source: Cho et al., Learning Phrase Representations using RNN Encoder-Decoder, 2014, section 2.3; this
    variant is that of its first version, arXiv:1406.1078v1.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> w, u = jnp.ones((3, 12)), jnp.ones((4, 12))
        >>> outputs, h = ow.layer.gru(jnp.ones((8, 5, 3)), 4, w=w, u=u, b=False)
        >>> outputs.shape, bool((outputs[:, -1] == h).all())
        ((8, 5, 4), True)
    """
    x = jnp.asarray(x)
    size = count("gru", "size", size)
    gates, u = _projected("gru", x, size, 3, w, u, initializer)
    inside: Any = 0
    if b is not False:
        both = weight(b, "b", (4 * size,), floating(x), constant(0.0))
        gates, inside = gates + both[: 3 * size], both[3 * size :]

    def step(h: Any, gates: Any) -> tuple[Any, Any]:
        (x_r, x_z, x_n), (h_r, h_z, h_n) = jnp.split(gates, 3, -1), jnp.split(h @ u, 3, -1)
        r, z = jax.nn.sigmoid(x_r + h_r), jax.nn.sigmoid(x_z + h_z)
        h = (1 - z) * jnp.tanh(x_n + r * (h_n + inside)) + z * h
        return h, h

    return _scanned(step, _initial("gru", x, size, initial), gates, reverse)


def _projected(
    layer: str, x: Any, size: int, gates: int, w: Any, u: Any, initializer: Initializer | None
) -> tuple[Any, Any]:
    """The contribution of x to the gates of every step, and the matrix for that of h."""
    expect_axes(layer, x, (3,), _SERIES)
    dtype, width = floating(x), gates * size
    w = weight(w, "w", (x.shape[-1], width), dtype, initializer or xavier_uniform())
    return x @ w, jnp.asarray(weight(u, "u", (size, width), dtype, orthogonal()))


def _initial(layer: str, x: Any, size: int, given: Any) -> Any:
    """The state before the first step: the given one, or zeros."""
    if given is None:
        return jnp.zeros((x.shape[0], size), floating(x))
    if jnp.shape(given) != (x.shape[0], size):
        raise ArgumentError(
            f"{layer} at {user_line()} was given an initial state of shape {list(jnp.shape(given))}; "
            f"expected {[x.shape[0], size]}: the batch, then the size."
        )
    return jnp.asarray(given, floating(x))


def _scanned(step: Callable[[Any, Any], Any], first: Any, gates: Any, reverse: bool) -> tuple[Any, Any]:
    """The output of every step, batch first, and what is remembered after the last."""
    last, outputs = lax.scan(step, first, jnp.swapaxes(gates, 0, 1), reverse=reverse)
    return jnp.swapaxes(outputs, 0, 1), last
