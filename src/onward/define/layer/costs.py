"""Costs: how far a prediction is from its target, averaged over the batch.

They compute in float32 or wider, whatever they compare. ``weights`` says how much each example counts: an
array over the leading axes, such as [n]. The cost is then ``sum(weights * losses) / sum(weights)``, and 0
where all weights are 0.

Where several devices share the batch, each returns its part of the cost such that their mean is the cost of
the whole batch, by the weights of all devices.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from onward.core.errors import ArgumentError
from onward.core.source import user_line
from onward.define.context import current_context
from onward.define.layer.base import cost
from onward.define.layer.expect import (
    expect_fraction,
    expect_least,
    expect_same_shape,
    is_integer,
    precise,
    words,
)


@cost
def mse(prediction: Any, target: Any, *, weights: Any = None, name: str | None = None) -> jax.Array:
    """The mean squared error, over all numbers.

    Args:
        prediction: an array of any shape.
        target: of the same shape; nothing is broadcast.
        weights: how much each example counts.
        name: as for every layer.

    Returns:
        A scalar.

    Raises:
        ArgumentError: two shapes, such as [8, 1] against [8].

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> float(ow.layer.mse(jnp.array([1.0, 3.0]), jnp.array([1.0, 1.0])))
        2.0
    """
    prediction, target = jnp.asarray(prediction), jnp.asarray(target)
    expect_same_shape("mse", prediction, target, ("a prediction", "target"))
    return weighted_mean("mse", (precise(prediction) - precise(target)) ** 2, weights)


@cost
def huber(
    prediction: Any, target: Any, *, delta: float = 1.0, weights: Any = None, name: str | None = None
) -> jax.Array:
    """Half the squared error up to ``delta``, and beyond that ``delta (|error| - delta / 2)``; the mean.

    Args:
        prediction: an array of any shape.
        target: of the same shape; nothing is broadcast.
        delta: where the square becomes a line.
        weights: how much each example counts.
        name: as for every layer.

    Returns:
        A scalar.

    Raises:
        ArgumentError: two shapes.

    Source: Huber, Robust Estimation of a Location Parameter, 1964.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> float(ow.layer.huber(jnp.array([1.0, 5.0]), jnp.array([0.0, 0.0])))
        2.5
    """
    prediction, target = jnp.asarray(prediction), jnp.asarray(target)
    expect_least("huber", "delta", delta, above=True)
    expect_same_shape("huber", prediction, target, ("a prediction", "target"))
    error = jnp.abs(precise(prediction) - precise(target))
    near = jnp.minimum(error, delta)
    return weighted_mean("huber", near * (error - near / 2), weights)


@cost
def cross_entropy(
    logits: Any,
    labels: Any,
    *,
    label_smoothing: float = 0.0,
    weights: Any = None,
    name: str | None = None,
) -> jax.Array:
    """The mean of ``-log softmax(logits)[label]``.

    Args:
        logits: [..., classes], before the softmax.
        labels: integers [...] or [..., 1], checked to lie in ``range(classes)`` where they are fed from
            the host (the cost of another label is NaN, and so it is for arrays on an accelerator, which are
            not looked at); or how likely each class is, [..., classes].
        label_smoothing: the part of the label that is spread evenly over all classes.
        weights: how much each example counts.
        name: as for every layer.

    Returns:
        A scalar.

    Raises:
        ArgumentError: labels that do not fit the logits, or logits of a single class.

    Source: label smoothing is that of Szegedy et al., Rethinking the Inception Architecture, 2016, section 7.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> logits = jnp.log(jnp.array([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1]]))
        >>> round(float(ow.layer.cross_entropy(logits, jnp.array([0, 1]))), 4)  # (log 2 - log 0.8) / 2
        0.4581
    """
    expect_fraction("cross_entropy", "label_smoothing", label_smoothing)
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)
    expect_labels("cross_entropy", logits, labels)
    log_p = jax.nn.log_softmax(precise(logits))
    losses = _surprise(log_p, labels)
    if label_smoothing:
        losses = (1 - label_smoothing) * losses - label_smoothing * jnp.mean(log_p, -1)
    return weighted_mean("cross_entropy", losses, weights)


@cost
def binary_cross_entropy(
    logits: Any, targets: Any, *, weights: Any = None, name: str | None = None
) -> jax.Array:
    """The mean of ``-t log p - (1 - t) log(1 - p)`` with ``p = sigmoid(logits)``.

    Args:
        logits: an array of any shape, before the sigmoid.
        targets: of the same shape: 0 or 1, or how likely 1 is. Integers are checked where they are fed from
            the host; the cost of another integer is NaN.
        weights: how much each example counts.
        name: as for every layer.

    Returns:
        A scalar.

    Raises:
        ArgumentError: two shapes, such as [8, 1] against [8].

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> round(float(ow.layer.binary_cross_entropy(jnp.zeros(2), jnp.array([0, 1]))), 4)  # log 2
        0.6931
    """
    logits, targets = jnp.asarray(logits), jnp.asarray(targets)
    expect_same_shape("binary_cross_entropy", logits, targets, ("logits", "targets"))
    if is_integer(targets) and (context := current_context()) is not None:
        context.bound(targets, 2, "targets")
    x, t = precise(logits), precise(targets)
    losses = t * jax.nn.softplus(-x) + (1 - t) * jax.nn.softplus(x)
    if is_integer(targets):
        losses = jnp.where((targets == 0) | (targets == 1), losses, jnp.nan)
    return weighted_mean("binary_cross_entropy", losses, weights)


@cost
def cosine_similarity(a: Any, b: Any, *, epsilon: float = 1e-8, name: str | None = None) -> jax.Array:
    """The cosine of the angle between vectors, from -1 to 1; no mean is taken.

    Args:
        a: [..., n].
        b: of the same shape.
        epsilon: the least length that a vector is taken to have, as in torch: at zero the similarity is 0 and
            its gradient finite.
        name: as for every layer.

    Returns:
        [...]: a similarity, to be made large: minimize ``-jnp.mean(similarity)``.

    Raises:
        ArgumentError: two shapes.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> ow.layer.cosine_similarity(jnp.array([[1.0, 0], [0, 0]]), jnp.array([[2.0, 0], [1, 1]])).tolist()
        [1.0, 0.0]
    """
    a, b = jnp.asarray(a), jnp.asarray(b)
    expect_least("cosine_similarity", "epsilon", epsilon)
    expect_same_shape("cosine_similarity", a, b, ("a first array", "a second"))
    return jnp.sum(_unit(precise(a), epsilon) * _unit(precise(b), epsilon), -1)


def expect_labels(layer: str, logits: Any, labels: Any) -> None:
    """Raise ``ArgumentError`` unless the labels are classes, or likelihoods of classes, of the logits."""
    if not logits.ndim or logits.shape[-1] < 2:
        raise ArgumentError(
            f"{layer} at {user_line()} was given logits {words(logits)}, whose last axis holds no "
            "classes to choose from. Give the last layer a size, fc(x, 10); for one yes or no, take "
            "binary_cross_entropy."
        )
    integers = is_integer(labels) and labels.shape in (logits.shape[:-1], (*logits.shape[:-1], 1))
    if not integers and labels.shape != logits.shape:
        raise ArgumentError(
            f"{layer} at {user_line()} was given logits {words(logits)} and labels {words(labels)}; expected "
            f"integers {list(logits.shape[:-1])}, or how likely each class is, {list(logits.shape)}. Write "
            "labels.astype(int) if they are integers in another dtype."
        )


def weighted_mean(layer: str, values: Any, weights: Any) -> Any:
    """The mean over examples, by weight."""
    if weights is None:
        return jnp.mean(values)
    w = checked_weights(layer, weights, values)
    each = jnp.mean(values, tuple(range(w.ndim, values.ndim)))
    return jnp.sum(w * each) / jnp.maximum(jnp.sum(w), 1e-30)


def checked_weights(layer: str, weights: Any, values: Any) -> Any:
    """The weights in float32 or wider; ``ArgumentError`` unless they are over leading axes of values."""
    w = precise(jnp.asarray(weights))
    if w.shape != values.shape[: w.ndim]:
        raise ArgumentError(
            f"{layer} at {user_line()} was given weights of shape {list(w.shape)} for values of shape "
            f"{list(values.shape)}. Weights are over the leading axes: {list(values.shape[:1])}."
        )
    return w


def _surprise(log_p: Any, labels: Any) -> Any:
    """Minus the logarithm of how likely the label was said to be."""
    if labels.shape == log_p.shape:
        return -jnp.sum(precise(labels) * log_p, -1)
    if (context := current_context()) is not None:
        context.bound(labels, log_p.shape[-1], "labels")
    return -_picked(log_p, labels.reshape(log_p.shape[:-1]))


def _picked(table: Any, index: Any) -> Any:
    """From each row along the last axis the number at its index; NaN where there is none."""
    leading = tuple(range(index.ndim))
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(index.ndim,),
        start_index_map=(index.ndim,),
        operand_batching_dims=leading,
        start_indices_batching_dims=leading,
    )
    return lax.gather(table, index[..., None], numbers, (1,) * table.ndim, mode="fill", fill_value=jnp.nan)


def _unit(x: Any, epsilon: float) -> Any:
    square = jnp.sum(x**2, -1, keepdims=True)
    return x * lax.rsqrt(jnp.maximum(square, epsilon**2))
