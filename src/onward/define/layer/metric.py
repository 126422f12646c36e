"""Metrics: how good a prediction is, to be looked at. They have no gradient, except for perplexity."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from onward.core.errors import ArgumentError
from onward.core.jaxprs.tracing import current_axis
from onward.core.source import user_line
from onward.define.layer.base import cost, layer
from onward.define.layer.costs import checked_weights, expect_labels, weighted_mean
from onward.define.layer.expect import count, expect_same_shape, precise


@cost
def accuracy(
    logits: Any, labels: Any, *, top_k: int = 1, weights: Any = None, name: str | None = None
) -> jax.Array:
    """The share of examples whose label has the largest logit, or one of the ``top_k`` largest.

    Args:
        logits: [..., classes]; anything that is larger for likelier classes.
        labels: integers [...] or [..., 1]; or [..., classes], whose largest is the label.
        top_k: how many guesses there are.
        weights: how much each example counts, as for a cost: with 0 where an example is padding, the share
            of those that are none.
        name: as for every layer.

    Returns:
        A scalar, float32, or as wide as the weights.

    Raises:
        ArgumentError: labels or weights that do not fit the logits, or more guesses than classes.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> logits = jnp.array([[0.1, 0.9, 0.0], [0.4, 0.3, 0.2]])
        >>> float(ow.layer.accuracy(logits, jnp.array([1, 2])))
        0.5
        >>> float(ow.layer.accuracy(logits, jnp.array([1, 2]), weights=jnp.array([1, 0])))
        1.0
    """
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)
    expect_labels("accuracy", logits, labels)
    if count("accuracy", "top_k", top_k) > logits.shape[-1]:
        raise ArgumentError(
            f"accuracy at {user_line()} was given top_k={top_k} for {logits.shape[-1]} classes; expected "
            "a number from 1 to that many."
        )
    if labels.shape == logits.shape:
        labels = jnp.argmax(labels, -1)
    labels = labels.reshape(logits.shape[:-1])
    if top_k == 1:
        hits = jnp.argmax(logits, -1) == labels
    else:
        hits = jnp.any(lax.top_k(logits, top_k)[1] == labels[..., None], -1)
    return weighted_mean("accuracy", hits.astype("float32"), weights)


@cost
def auc(scores: Any, labels: Any, *, weights: Any = None, name: str | None = None) -> jax.Array:
    """How likely a positive example has a higher score than a negative one; equal scores count half.

    The area under the ROC curve, exactly, over the whole batch: several devices that hold a part of it each
    gather it. It is NaN unless there are both, or where a score or a label is.

    Args:
        scores: [n] or [n, 1].
        labels: of the same shape: 1 for a positive example, 0 or -1 for a negative one; between 0 and 1, for
            that much of both.
        weights: how much each example counts, [n]: a pair counts the product of its two.
        name: as for every layer.

    Returns:
        A scalar, float32, or as wide as the weights.

    Raises:
        ArgumentError: two shapes, weights of another, or several scores for an example.

    Source: Hanley and McNeil, The Meaning and Use of the Area under a ROC Curve, 1982.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> float(ow.layer.auc(jnp.array([0.1, 0.4, 0.4, 0.8]), jnp.array([0, 0, 1, 1])))
        0.875
    """
    scores, labels = jnp.asarray(scores), jnp.asarray(labels)
    expect_same_shape("auc", scores, labels, ("scores", "labels"))
    if scores.ndim != 1 and scores.shape[1:] != (1,):
        raise ArgumentError(
            f"auc at {user_line()} was given scores of shape {list(scores.shape)}; expected one for each "
            "example, [n]: take scores[:, 1] of two classes."
        )
    scores, positive = jnp.where(jnp.isnan(labels), jnp.nan, scores), precise(jnp.clip(labels, 0, 1)).ravel()
    w = 1.0 if weights is None else checked_weights("auc", weights, scores).ravel()
    s, positive, negative = _gathered((scores.ravel(), w * positive, w * (1 - positive)))
    order = jnp.argsort(s)
    s, positive, negative = s[order], positive[order], negative[order]
    found = jnp.sum(positive * (_share_below(s, negative) - 0.5)) / jnp.sum(positive) + 0.5
    is_unknown = jnp.any(jnp.isnan(s) & (positive + negative != 0))
    return jnp.where(is_unknown, jnp.nan, found)


@layer
def perplexity(mean_cross_entropy: Any, *, name: str | None = None) -> jax.Array:
    """``exp`` of a mean cross entropy: among how many equally likely classes the choice seems to be.

    Args:
        mean_cross_entropy: what ``cross_entropy`` returned, or an array of any shape.
        name: as for every layer.

    Returns:
        An array of the same shape.

    Source: Jelinek et al., Perplexity, a Measure of the Difficulty of Speech Recognition Tasks, 1977.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> round(float(ow.layer.perplexity(ow.layer.cross_entropy(jnp.zeros((2, 8)), jnp.array([0, 1])))), 3)
        8.0
    """
    return jnp.exp(precise(jnp.asarray(mean_cross_entropy)))


def _share_below(scores: Any, weights: Any) -> Any:
    """Which share of all weights lies at lower scores than each, in ascending order.

    What lies at the same score counts half: the sums where a run of equal scores begins, and where it ends.
    """
    sums, steps = jnp.cumsum(weights), scores[1:] != scores[:-1]
    begins, ends = (
        jnp.pad(steps, width, constant_values=True)[: scores.shape[0]] for width in ((1, 0), (0, 1))
    )
    below = lax.cummax(jnp.where(begins, sums - weights, 0))
    up_to = lax.cummin(jnp.where(ends, sums, jnp.inf), reverse=True)
    return (below + up_to) / (2 * jnp.sum(weights))


def _gathered(arrays: Any) -> Any:
    """Arrays over examples, or a pytree of them, with the examples of all devices, in their order."""
    axis = current_axis()
    return arrays if axis is None else lax.all_gather(arrays, axis.name, tiled=True)
