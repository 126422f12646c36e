"""Layers that steady a network: dropout, and normalization by batch, by layer, by root mean square.

Statistics are computed in float32, whatever is normalized; the result has the dtype of x.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from onward.core.words import Kind
from onward.define import declare
from onward.define.context import current_context
from onward.define.initializer import constant
from onward.define.layer.base import layer, weight
from onward.define.layer.expect import (
    expect_axis,
    expect_features,
    expect_fraction,
    expect_least,
    expect_share,
    floating,
    precise,
)


@layer
def dropout(
    x: Any, rate: float, *, key: Any = None, training: bool | None = None, name: str | None = None
) -> jax.Array:
    """Zeros in random places; what stays is divided by ``1 - rate``, which keeps the mean.

    In the test Program, and with rate 0, it is x itself and declares nothing.

    Args:
        x: an array of any shape.
        rate: how likely a number is dropped, at least 0 and less than 1.
        key: ``onward.key()`` unless given, which is another one at every step.
        training: whether to drop; unless given, as ``onward.is_training()`` says.
        name: as for every layer.

    Raises:
        HyperparameterError: a rate out of range.
        ArgumentError: no key outside of a traced function.

    Source: Srivastava et al., Dropout, 2014, section 4; inverted, section 10.

    Example:
        >>> import jax, jax.numpy as jnp, onward as ow
        >>> sorted(set(ow.layer.dropout(jnp.ones(100), 0.5, key=jax.random.key(0)).tolist()))
        [0.0, 2.0]
    """
    expect_fraction("dropout", "rate", rate)
    active = declare.is_training() if training is None else training
    return dropped(jnp.asarray(x), rate, key) if rate and active else x


def dropped(x: Any, rate: float, key: Any = None) -> Any:
    """The array with zeros in random places, the rest scaled up."""
    keep = jax.random.bernoulli(declare.key() if key is None else key, 1 - rate, x.shape)
    scaled = x / (1 - rate)
    return lax.select(keep, scaled, jnp.zeros_like(scaled))


@layer
def batch_norm(
    x: Any,
    *,
    axis: int = -1,
    momentum: float = 0.9,
    epsilon: float = 1e-5,
    scale: Any = None,
    offset: Any = None,
    mean: Any = None,
    variance: Any = None,
    training: bool | None = None,
    name: str | None = None,
) -> jax.Array:
    """``scale (x - mean) / sqrt(variance + epsilon) + offset``, by statistics of the batch.

    In training, mean and variance are those of the batch, over all axes but one; running ones are kept in
    the state Variables ``mean`` and ``variance``: ``mean <- momentum mean + (1 - momentum) batch mean``. The
    test Program normalizes with these.

    The running variance is that of the batch divided by n, as in flax, haiku and Keras (torch divides by
    n - 1 for it). Momentum is the share that is kept: 0.9 here is 0.1 in torch. Defaults differ: flax and
    Keras keep 0.99, and Keras has epsilon 1e-3.

    Args:
        x: [..., channels].
        axis: the one that keeps statistics of its own.
        momentum: how much of the running statistics stays at each step.
        epsilon: keeps the root away from zero.
        scale: [channels], begins at 1; False for none.
        offset: [channels], begins at 0; False for none.
        mean: [channels], what ``onward.state`` returned; begins at 0. An array outside of a trace.
        variance: the same; begins at 1.
        training: whether the batch's own statistics count; unless given, as ``onward.is_training()`` says.
            Outside of a trace, no running statistics are updated.
        name: as for every layer.

    Raises:
        ArgumentError: arrays of another shape, or an axis that x has not.
        HyperparameterError: a momentum that is not from 0 to 1, or a negative epsilon.
        TraceError: in training, a mean or variance to update that is not state.

    Source: Ioffe and Szegedy, Batch Normalization, 2015, algorithms 1 and 2.

    Example:
        >>> import onward as ow
        >>> program = ow.trace(lambda: ow.layer.batch_norm(ow.data("x", (None, 3))))
        >>> [v.name for v in program.parameters], [v.name for v in program.next_state]
        (['batch_norm_0/scale', 'batch_norm_0/offset'], ['batch_norm_0/mean', 'batch_norm_0/variance'])
    """
    x = jnp.asarray(x)
    expect_features("batch_norm", x)
    expect_axis("batch_norm", x, axis)
    expect_share("batch_norm", "momentum", momentum)
    expect_least("batch_norm", "epsilon", epsilon)
    axes = tuple(i for i in range(x.ndim) if i != axis % x.ndim)
    values, shape = precise(x), (x.shape[axis],)
    active = declare.is_training() if training is None else training
    running = _running(mean, variance, shape, values.dtype) if not active or current_context() else ()
    if active:
        centred, spread = _by_batch(values, axes, running, momentum)
    else:
        centred, spread = values - _along(running[0], axes), jnp.asarray(running[1])
    factor = lax.rsqrt(spread + epsilon)
    if scale is not False:
        factor = factor * weight(scale, "scale", shape, floating(x), constant(1.0))
    y = centred * _along(factor, axes)
    if offset is not False:
        y = y + _along(weight(offset, "offset", shape, floating(x), constant(0.0)), axes)
    return y.astype(floating(x))


@layer
def layer_norm(
    x: Any, *, epsilon: float = 1e-5, scale: Any = None, offset: Any = None, name: str | None = None
) -> jax.Array:
    """``scale (x - mean) / sqrt(variance + epsilon) + offset``, by statistics of the last axis.

    Args:
        x: [..., n].
        epsilon: keeps the root away from zero (flax: 1e-6, Keras: 1e-3).
        scale: [n], begins at 1; False for none.
        offset: [n], begins at 0; False for none.
        name: as for every layer.

    Raises:
        ArgumentError: arrays of another shape.

    Source: Ba, Kiros and Hinton, Layer Normalization, 2016, equations 3 and 4.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> ow.layer.layer_norm(jnp.array([1.0, 3.0]), scale=False, offset=False).round(3).tolist()
        [-1.0, 1.0]
    """
    x = jnp.asarray(x)
    expect_features("layer_norm", x)
    expect_least("layer_norm", "epsilon", epsilon)
    values = precise(x)
    centred = values - jnp.mean(values, -1, keepdims=True)
    variance = jnp.mean(centred**2, -1, keepdims=True)
    y = _scaled(centred * lax.rsqrt(variance + epsilon), x, scale)
    if offset is not False:
        y = y + weight(offset, "offset", x.shape[-1:], floating(x), constant(0.0))
    return y.astype(floating(x))


@layer
def rms_norm(x: Any, *, epsilon: float = 1e-6, scale: Any = None, name: str | None = None) -> jax.Array:
    """``scale x / sqrt(mean(x**2) + epsilon)``, over the last axis.

    Args:
        x: [..., n].
        epsilon: keeps the root away from zero.
        scale: [n], begins at 1; False for none.
        name: as for every layer.

    Raises:
        ArgumentError: a scale of another shape.

    Source: Zhang and Sennrich, Root Mean Square Layer Normalization, 2019, equation 4.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> ow.layer.rms_norm(jnp.array([3.0, 3.0]), scale=False).round(3).tolist()
        [1.0, 1.0]
    """
    x = jnp.asarray(x)
    expect_features("rms_norm", x)
    expect_least("rms_norm", "epsilon", epsilon)
    values = precise(x)
    y = values * lax.rsqrt(jnp.mean(values**2, -1, keepdims=True) + epsilon)
    return _scaled(y, x, scale).astype(floating(x))


def _running(mean: Any, variance: Any, shape: tuple[int, ...], dtype: Any) -> tuple[Any, ...]:
    """The running mean and variance, given or declared."""
    return (
        weight(mean, "mean", shape, dtype, constant(0.0), Kind.STATE),
        weight(variance, "variance", shape, dtype, constant(1.0), Kind.STATE),
    )


def _by_batch(
    values: Any, axes: tuple[int, ...], running: tuple[Any, ...], momentum: float
) -> tuple[Any, Any]:
    """Deviations from the batch's mean, and its variance; both move the running statistics."""
    mean = jnp.mean(values, axes)
    centred = values - _along(mean, axes)
    variance = jnp.mean(centred**2, axes)
    for old, new in zip(running, (mean, variance), strict=False):
        declare.assign(old, momentum * old + (1 - momentum) * new)
    return centred, variance


def _along(vector: Any, axes: tuple[int, ...]) -> Any:
    """A vector laid along the one axis that is not among these."""
    return jnp.expand_dims(vector, axes)


def _scaled(y: Any, x: Any, scale: Any) -> Any:
    return y if scale is False else y * weight(scale, "scale", x.shape[-1:], floating(x), constant(1.0))
