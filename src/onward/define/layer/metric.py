"""Metrics: how good a prediction is, to be looked at. They have no gradient, except for perplexity."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from onward.core.errors import ArgumentError
from onward.core.source import user_line
from onward.define.layer.base import cost, layer
from onward.define.layer.costs import expect_labels
from onward.define.layer.expect import expect_same_shape, precise


@cost
def accuracy(logits: Any, labels: Any, *, top_k: int = 1, name: str | None = None) -> Any:
    """The share of examples whose label has the largest logit, or one of the ``top_k`` largest.

    Args:
        logits: [..., classes]; anything that is larger for likelier classes.
        labels: integers [...] or [..., 1]; or [..., classes], whose largest is the label.
        top_k: how many guesses there are.
        name: as for every layer.

    Returns:
        A scalar, float32.

    Raises:
        ArgumentError: labels that do not fit the logits, or more guesses than classes.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> logits = jnp.array([[0.1, 0.9, 0.0], [0.4, 0.3, 0.2]])
        >>> float(ow.layer.accuracy(logits, jnp.array([1, 2])))
        0.5
    """
    logits, labels = jnp.asarray(logits), jnp.asarray(labels)
    expect_labels("accuracy", logits, labels)
    if not 1 <= top_k <= logits.shape[-1]:
        raise ArgumentError(
            f"accuracy at {user_line()} was given top_k={top_k} for {logits.shape[-1]} classes; expected "
            "a number from 1 to that many."
        )
    if labels.shape == logits.shape:
        labels = jnp.argmax(labels, -1)
    labels = labels.reshape(logits.shape[:-1])
    if top_k == 1:
        return jnp.mean((jnp.argmax(logits, -1) == labels).astype("float32"))
    guesses = lax.top_k(logits, top_k)[1]
    return jnp.mean(jnp.any(guesses == labels[..., None], -1).astype("float32"))


@cost
def auc(scores: Any, labels: Any, *, name: str | None = None) -> Any:
    """How likely a positive example has a higher score than a negative one; equal scores count half.

    The area under the ROC curve, exactly, by ranks of the whole batch. It is NaN unless there are both.

    Args:
        scores: [n] or [n, 1].
        labels: of the same shape: 0 or 1.
        name: as for every layer.

    Returns:
        A scalar, float32.

    Raises:
        ArgumentError: two shapes, or several scores for an example.

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
    s, positive = scores.ravel(), precise(labels).ravel()
    positives, negatives = jnp.sum(positive), jnp.sum(1 - positive)
    above = jnp.sum(positive * (_ranks(s) - (s.size + 1) / 2))
    return above / (positives * negatives) + 0.5


@layer
def perplexity(mean_cross_entropy: Any, *, name: str | None = None) -> Any:
    """``exp`` of a mean cross entropy: among how many equally likely classes the choice seems to be.

    Args:
        mean_cross_entropy: what ``cross_entropy`` returned.
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


def _ranks(scores: Any) -> Any:
    """The place of each score in order, from 1; equal scores share the mean of their places."""
    ordered = jnp.sort(scores)
    below = jnp.searchsorted(ordered, scores, side="left")
    return (below + jnp.searchsorted(ordered, scores, side="right") + 1) / 2
