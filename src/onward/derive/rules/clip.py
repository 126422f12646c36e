"""Gradients that are too long are shortened: number by number, one by one, together, by their parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from onward.core.words import UpdateType
from onward.derive.lengths import Length, all_shortened, length, rooted, shortened, squares
from onward.derive.rule import GradientRule, Hyperparameter, Pieces, Slots


class ClipByValue(GradientRule):
    """Every number of a gradient is moved into ``[-max_value, max_value]``; a complex one is shortened.

    Source: Mikolov, Statistical Language Models Based on Neural Networks, 2012, section 3.3.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> optimizer = ow.SGD(1.0, rules=[ow.ClipByValue(0.5)])
        >>> step = ow.compile(optimizer.minimize(lambda w, x: jnp.sum(w * x), jnp.ones(2), jnp.ones(2)))
        >>> state, out = step(step.init(jnp.zeros(2)), jnp.array([3.0, -0.25]))
        >>> state.parameters.tolist()
        [-0.5, 0.25]
    """

    max_value: Hyperparameter = 1.0

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        """The gradient with its numbers in range."""
        top = self.max_value
        if jnp.iscomplexobj(gradient):
            return gradient * _shortening(jnp.abs(gradient), top), slots
        return jnp.clip(gradient, -top, top), slots


class ClipByNorm(GradientRule):
    """Each gradient by itself is shortened to a norm of at most ``max_norm``.

    ``g <- g min(1, max_norm / |g|)``.

    Source: Pascanu, Mikolov and Bengio, On the Difficulty of Training Recurrent Neural Networks, 2013,
    algorithm 1, parameter by parameter.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> optimizer = ow.SGD(1.0, rules=[ow.ClipByNorm(1.0)])
        >>> step = ow.compile(optimizer.minimize(lambda w, x: jnp.sum(w * x), jnp.ones(2), jnp.ones(2)))
        >>> state, out = step(step.init(jnp.zeros(2)), jnp.array([3.0, 4.0]))
        >>> [round(x, 3) for x in state.parameters.tolist()]
        [-0.6, -0.8]
    """

    type: ClassVar[UpdateType] = UpdateType.PER_MATRIX
    max_norm: Hyperparameter = 1.0

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        """The gradient, no longer than allowed."""
        return shortened(gradient, length([gradient]), self.max_norm), slots


class ClipByGlobalNorm(GradientRule):
    """All gradients are shortened by one factor, so that their norm together is at most ``max_norm``.

    ``g <- g min(1, max_norm / norm)``, where ``norm`` is the root of the sum of the squares of all. On
    several parameter servers it is that of the merged gradients of all of them; where each trainer's gradient
    is an update of its own (asynchronous modes), that of this one gradient, which its trainer sends along.

    Source: Pascanu, Mikolov and Bengio, On the Difficulty of Training Recurrent Neural Networks, 2013,
    algorithm 1.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> optimizer = ow.Adam(1e-3, rules=[ow.ClipByGlobalNorm(1.0)])
        >>> params = {"w": jnp.ones(3), "b": jnp.float32(0)}
        >>> program = optimizer.minimize(lambda p, x: jnp.sum(p["w"] * x) + p["b"], params, jnp.ones(3))
        >>> [target.op.type for target in program.updates]
        ['count', 'clip_by_global_norm', 'adam', 'adam']
    """

    type: ClassVar[UpdateType] = UpdateType.ACROSS
    any_layout: ClassVar[bool] = True
    max_norm: Hyperparameter = 1.0

    def update(
        self, parameter: Sequence[Any], gradient: Sequence[Any], slots: Sequence[Slots]
    ) -> tuple[Sequence[Any], Sequence[Slots]]:
        """The gradients, together no longer than allowed."""
        return all_shortened(gradient, length(gradient), self.max_norm), slots

    def sums(self, gradient: Sequence[Any]) -> Sequence[Any]:
        """The squares of all numbers, as they are and scaled down."""
        return squares(gradient)

    def update_share(
        self, parameter: Sequence[Any], gradient: Sequence[Any], slots: Sequence[Slots], share: Pieces
    ) -> tuple[Sequence[Any], Sequence[Slots]]:
        """Some of the gradients, all together no longer than allowed."""
        return all_shortened(gradient, rooted(*share.sums), self.max_norm), slots


class AdaptiveClip(GradientRule):
    """The gradient of each output unit is shortened to a part of the norm of its weights.

    For each unit i ``g_i <- g_i min(1, ratio max(|w_i|, epsilon) / |g_i|)``, where a unit is a slice along
    the last axis (the outputs of ``x @ w`` and of HWIO convolutions); a vector is one unit. Heads are left
    out in the paper: ``where=``.

    Source: Brock et al., High-Performance Large-Scale Image Recognition Without Normalization, 2021,
    section 4.1, with a vector as one unit as in the authors' code and optax (which of three axes sums over
    the first alone; Keras has no such clip).

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> optimizer = ow.SGD(1.0, rules=[ow.rule.AdaptiveClip(0.1)])
        >>> step = ow.compile(optimizer.minimize(lambda w, x: jnp.sum(w * x), jnp.ones(2), jnp.ones(2)))
        >>> state, out = step(step.init(jnp.array([3.0, 4.0])), jnp.array([10.0, 0.0]))
        >>> [round(x, 3) for x in state.parameters.tolist()]
        [2.5, 4.0]
    """

    type: ClassVar[UpdateType] = UpdateType.PER_MATRIX
    ratio: Hyperparameter = 0.01
    epsilon: Hyperparameter = 1e-3

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        """The gradient, unit by unit no longer than allowed."""
        longest = self.ratio * jnp.maximum(_unit_lengths(parameter).norm, self.epsilon)
        return shortened(gradient, _unit_lengths(gradient), longest), slots


def _unit_lengths(x: Any) -> Length:
    """The norm of each slice along the last axis, to be multiplied with the array; of a vector the whole."""
    axes = tuple(range(x.ndim - 1)) if x.ndim > 1 else None
    return length([x], axes, keepdims=True)


def _shortening(norm: Any, longest: Any) -> Any:
    """The factor that makes a norm at most so long; 1 for a norm of 0."""
    return jnp.minimum(1, longest / jnp.maximum(norm, np.finfo(norm.dtype).tiny))
