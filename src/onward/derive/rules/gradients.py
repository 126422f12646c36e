"""Gradients that are centred, or made noisy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from onward.core.words import UpdateType
from onward.derive.rule import GradientRule, Hyperparameter, Piece, Pieces, Slots


class Centralize(GradientRule):
    """From the gradient of each output unit its mean is subtracted; vectors and numbers stay as they are.

    ``g_i <- g_i - mean(g_i)``, where i counts along the last axis (the outputs of ``x @ w`` and of HWIO
    convolutions).

    Source: Yong et al., Gradient Centralization, 2020, equation 1 (optax counts i along the first axis, where
    torch has the outputs).

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> optimizer = ow.SGD(1.0, rules=[ow.rule.Centralize()])
        >>> w, x = jnp.zeros((2, 1)), jnp.array([[1.0], [3.0]])
        >>> step = ow.compile(optimizer.minimize(lambda w, x: jnp.sum(w * x), w, x))
        >>> state, out = step(step.init(w), x)
        >>> state.parameters.ravel().tolist()
        [1.0, -1.0]
    """

    type: ClassVar[UpdateType] = UpdateType.PER_MATRIX

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        """The gradient without the means of its units."""
        if gradient.ndim < 2 or not gradient.size:
            return gradient, slots
        return gradient - jnp.mean(gradient, axis=tuple(range(gradient.ndim - 1)), keepdims=True), slots


class Noise(GradientRule):
    """Normal noise is added to the gradients, less with every step.

    ``g <- g + N(0, variance / (1 + t)**decay)``, t counted from 0. What is drawn depends on ``seed`` and the
    step alone, so that a training goes on after a checkpoint as it would have.

    Source: Neelakantan et al., Adding Gradient Noise Improves Learning for Very Deep Networks, 2015,
    section 3.1 (decay 0.55; variance 0.01, 0.3 or 1).

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> optimizer = ow.SGD(1.0, rules=[ow.rule.Noise(0.01)])
        >>> step = ow.compile(optimizer.minimize(lambda w, x: jnp.sum(w * x), jnp.ones(1000), jnp.ones(1000)))
        >>> state, out = step(step.init(jnp.zeros(1000)), jnp.zeros(1000))
        >>> round(float(jnp.std(state.parameters)), 2)
        0.1
    """

    type: ClassVar[UpdateType] = UpdateType.ACROSS
    variance: Hyperparameter = 0.01
    decay: Hyperparameter = 0.55
    seed: int = 0

    def update(
        self, parameter: Sequence[Any], gradient: Sequence[Any], slots: Sequence[Slots]
    ) -> tuple[Sequence[Any], Sequence[Slots]]:
        """The gradients with noise."""
        pieces = [
            Piece(n, len(gradient), g.shape, 0, len(g) if g.ndim else 1) for n, g in enumerate(gradient)
        ]
        return self.update_share(parameter, gradient, slots, Pieces(pieces, ()))

    def update_share(
        self, parameter: Sequence[Any], gradient: Sequence[Any], slots: Sequence[Slots], share: Pieces
    ) -> tuple[Sequence[Any], Sequence[Slots]]:
        """Some of the gradients with the noise that all would have; of some rows what all rows would draw."""
        key = jax.random.fold_in(jax.random.key(self.seed), self.step)
        keys = jax.random.split(key, share.pieces[0].parameters)
        deviation = jnp.sqrt(self.variance / (1 + self.step) ** self.decay)
        return tuple(
            g
            + deviation.astype(jnp.abs(g).dtype)
            * piece.of(jax.random.normal(keys[piece.number], piece.shape, g.dtype))
            for piece, g in zip(share.pieces, gradient, strict=True)
        ), slots
