"""Optimizers whose step in each layer is measured by norms of that layer, made for large batches.

A layer is one parameter as a whole: a matrix, a convolution kernel with all its axes, a vector, a single
number. Biases and the scales of normalisation are layers too; the papers leave them out of weight decay.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from onward.core.words import UpdateType
from onward.derive.lengths import length, shortened
from onward.derive.optimizers.adam import AdamLike
from onward.derive.optimizers.arithmetic import bias_correction, squarable, squared
from onward.derive.optimizers.gradient_descent import HeavyBall
from onward.derive.optimizers.norms import norm, quotient
from onward.derive.rule import Hyperparameter, Slots


class LARS(HeavyBall):
    """Momentum with steps in proportion to the norm of each layer's weights.

    ``ratio = trust_coefficient * |w| / (|g| + weight_decay * |w|)``, or 1 where ``|w|`` or the denominator
    is 0; ``v <- momentum * v + learning_rate * ratio * (g + weight_decay * w)``; ``w <- w - v``.

    Source: You, Gitman and Ginsburg, Large Batch Training of Convolutional Networks, 2017, algorithm 1.
    The trust coefficient and the weight decay are the paper's and Paddle's; optax does not decay unless
    asked, and divides by ``|g + weight_decay * w|``. The learning rate is part of the velocity, as in the
    paper, optax and Paddle, and other than in ``Momentum``. Torch and Keras have no LARS.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> w = jnp.array([3.0, 4.0])
        >>> optimizer = ow.optimizer.LARS(1.0, trust_coefficient=0.1, weight_decay=0.0)
        >>> program = optimizer.minimize(lambda w: w @ w, w)
        >>> step = ow.compile(program)
        >>> state, out = step(step.init(w))
        >>> [round(x, 5) for x in state.parameters.tolist()]
        [2.7, 3.6]
    """

    own_decay: ClassVar[str] = "in the velocity"
    type: ClassVar[UpdateType] = UpdateType.PER_MATRIX
    learning_rate: Hyperparameter = 0.1
    weight_decay: Hyperparameter = 5e-4
    trust_coefficient: Hyperparameter = 1e-3

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        size = norm(parameter)
        ratio = _ratio(self.trust_coefficient * size, norm(gradient) + self.weight_decay * size)
        step = self.learning_rate * ratio * (gradient + self.weight_decay * parameter)
        velocity = self.momentum * slots["velocity"] + step
        return parameter - velocity, {"velocity": velocity}


class LAMB(AdamLike):
    """AdamW with steps in proportion to the norm of each layer's weights.

    ``m <- beta1 m + (1 - beta1) g``; ``v <- beta2 v + (1 - beta2) g**2``;
    ``r = (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + epsilon) + weight_decay * w``, t counted from 1;
    ``w <- w - learning_rate * (|w| / |r|) * r``, the quotient of the norms 1 where one of them is 0.

    Source: You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes, 2020,
    algorithm 2, with the identity for phi. The weight decay is the paper's and Paddle's (optax: 0); Keras
    decays outside of the quotient. Torch has no LAMB.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> w = jnp.array([3.0, 4.0])
        >>> step = ow.compile(ow.LAMB(0.1).minimize(lambda w: w @ w, w))
        >>> state, out = step(step.init(w))
        >>> round(float(jnp.linalg.norm(state.parameters - w)), 5)
        0.5
    """

    own_decay: ClassVar[str] = "in the trust ratio"
    type: ClassVar[UpdateType] = UpdateType.PER_MATRIX
    epsilon: Hyperparameter = 1e-6
    weight_decay: Hyperparameter = 1e-2

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        gradient = squarable(gradient)
        t = self.step + 1
        mean = self.beta1 * slots["mean"] + (1 - self.beta1) * gradient
        variance = self.beta2 * slots["variance"] + (1 - self.beta2) * squared(gradient)
        scale = jnp.sqrt(variance / bias_correction(self.beta2, t)) + self.epsilon
        direction = mean / bias_correction(self.beta1, t) / scale + self.weight_decay * parameter
        step = self.learning_rate * _ratio(norm(parameter), norm(direction)) * direction
        return parameter - step, {"mean": mean, "variance": variance}


class NovoGrad(AdamLike):
    """Momentum of gradients that are divided by the running norm of their layer.

    ``v <- beta2 v + (1 - beta2) |g|**2``, at the first step ``|g|**2``;
    ``m <- beta1 m + g / (sqrt(v) + epsilon) + weight_decay * w``; ``w <- w - learning_rate * m``.
    The second moment is one number for each layer, which halves the memory of Adam.

    Source: Ginsburg et al., Stochastic Gradient Methods with Layer-wise Adaptive Moments for Training of
    Deep Networks, 2019, algorithm 1, with the betas of its experiments (optax: ``beta2`` 0.25, that of the
    first version of the paper). No decay unless asked, as in optax. Torch, Keras and Paddle have no NovoGrad.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.optimizer.NovoGrad(0.1).minimize(lambda w: w @ w, jnp.ones(3))
        >>> [(v.name, v.shape) for v in program.state if "/" in v.name]
        [('w/mean', (3,)), ('w/variance', ())]
    """

    own_decay: ClassVar[str] = "in the mean"
    type: ClassVar[UpdateType] = UpdateType.PER_MATRIX
    learning_rate: Hyperparameter = 1e-2
    beta1: Hyperparameter = 0.95
    beta2: Hyperparameter = 0.98
    weight_decay: Hyperparameter = 0.0

    def init(self, parameter: Any) -> Slots:
        return {"mean": jnp.zeros_like(parameter), "variance": jnp.zeros((), jnp.abs(parameter).dtype)}

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        gradient = shortened(gradient, length([gradient]), 2.0 ** (np.finfo(gradient.dtype).maxexp // 2 - 2))
        size = jnp.sum(squared(gradient))
        running = self.beta2 * slots["variance"] + (1 - self.beta2) * size
        variance = jnp.where(self.step == 0, size, running)
        direction = gradient / (jnp.sqrt(variance) + self.epsilon) + self.weight_decay * parameter
        mean = self.beta1 * slots["mean"] + direction
        return parameter - self.learning_rate * mean, {"mean": mean, "variance": variance}


def _ratio(size: Any, step: Any) -> Any:
    """How far a step goes for a layer of this size; 1 where that would not be a number, or never move."""
    return jnp.where(size == 0, 1, quotient(size, step, otherwise=1.0))
