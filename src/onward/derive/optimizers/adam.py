"""Adam, and the forms of it that stay closest to its paper."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp

from onward.core.words import UpdateType
from onward.derive.optimizer import Optimizer
from onward.derive.optimizers.arithmetic import bias_correction, squarable, squared
from onward.derive.rule import Hyperparameter, Slots


class Moments(Optimizer):
    """The base of what keeps running means: ``mean`` of the gradient, ``variance`` of its square."""

    learning_rate: Hyperparameter = 1e-3
    beta1: Hyperparameter = 0.9
    beta2: Hyperparameter = 0.999
    below_one: ClassVar[tuple[str, ...]] = ("beta1", "beta2")

    def init(self, parameter: Any) -> Slots:
        return {"mean": jnp.zeros_like(parameter), "variance": jnp.zeros_like(jnp.abs(parameter))}

    def averaged(self, gradient: Any, slots: Slots) -> tuple[Any, Any]:
        """Both means, one gradient later."""
        gradient = squarable(gradient)
        mean = self.beta1 * slots["mean"] + (1 - self.beta1) * gradient
        variance = self.beta2 * slots["variance"] + (1 - self.beta2) * squared(gradient)
        return mean, variance


class AdamLike(Moments):
    """The base of Adam and what is Adam but for a part."""

    epsilon: Hyperparameter = 1e-8

    def corrected(self, mean: Any, variance: Any) -> Any:
        """One mean over the root of the other, each corrected for its start at zero."""
        t = self.step + 1
        scale = jnp.sqrt(variance / bias_correction(self.beta2, t)) + self.epsilon
        return mean / bias_correction(self.beta1, t) / scale

    def direction(self, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        """The direction of Adam, and the moments it leaves."""
        mean, variance = self.averaged(gradient, slots)
        return self.corrected(mean, variance), {"mean": mean, "variance": variance}


class Adam(AdamLike):
    """Running means of the gradient and of its square, corrected for their start at zero.

    ``m <- beta1 m + (1 - beta1) g``; ``v <- beta2 v + (1 - beta2) g**2``;
    ``w <- w - learning_rate * (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + epsilon)``,
    t counted from 1.

    A number of a gradient beyond 2**62 (4.6e18; 2**510 in float64) counts as that: its square would make the
    variance infinite, as in optax, and the parameter would never move again. So in every rule that keeps a
    running mean of squares; ``Adagrad`` and others that add them up forever do come to rest.

    Source: Kingma and Ba, Adam, 2015, algorithm 1 (optax and torch add epsilon in the same place; the
    "epsilon hat" form of TensorFlow and Keras does not).

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.Adam(1e-3).minimize(lambda w: w**2, jnp.float32(1.0))
        >>> [v.name for v in program.state if "/" in v.name]
        ['w/mean', 'w/variance']
    """

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        direction, slots = self.direction(gradient, slots)
        return parameter - self.learning_rate * direction, slots


class AdamW(AdamLike):
    """Adam with weight decay apart from the gradient.

    As ``Adam``, and ``w <- w - learning_rate * weight_decay * w`` in the same update.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019, algorithm 2, with the
    decay scaled by the learning rate as in torch, optax and Paddle. Its default, 1e-2, is that of torch
    and Paddle (optax: 1e-4; Keras: 4e-3).

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.AdamW(1e-3, weight_decay=0.1).minimize(lambda w: w**2, jnp.float32(1.0))
        >>> [v.name for v in program.hyperparameters]
        ['learning_rate', 'beta1', 'beta2', 'epsilon', 'weight_decay']
    """

    weight_decay: Hyperparameter = 1e-2

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        direction, slots = self.direction(gradient, slots)
        return parameter - self.learning_rate * (direction + self.weight_decay * parameter), slots


class AMSGrad(AdamLike):
    """Adam whose step sizes never grow: it divides by the largest variance so far.

    As ``Adam``, with ``u <- max(u, v)`` in place of ``v`` in the step.

    Source: Reddi, Kale and Kumar, On the Convergence of Adam and Beyond, 2018, algorithm 2, which has no
    corrections for the start. They are here, as in torch and Keras, where the maximum is over v as it
    is kept (optax: over the corrected v, so that the first gradients weigh forever).

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.optimizer.AMSGrad(1e-3).minimize(lambda w: w**2, jnp.float32(1.0))
        >>> [v.name for v in program.state if "/" in v.name]
        ['w/largest', 'w/mean', 'w/variance']
    """

    def init(self, parameter: Any) -> Slots:
        return {**super().init(parameter), "largest": jnp.zeros_like(jnp.abs(parameter))}

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        mean, variance = self.averaged(gradient, slots)
        largest = jnp.maximum(slots["largest"], variance)
        new = parameter - self.learning_rate * self.corrected(mean, largest)
        return new, {"mean": mean, "variance": variance, "largest": largest}


class Adamax(AdamLike):
    """Adam with the largest of the remembered gradients in place of their mean square.

    ``m <- beta1 m + (1 - beta1) g``; ``u <- max(beta2 u, |g| + epsilon)``;
    ``w <- w - learning_rate / (1 - beta1**t) * m / u``, t counted from 1.

    Source: Kingma and Ba, Adam, 2015, section 7.1, algorithm 2, with its learning rate, as torch (optax and
    Keras: 1e-3). Epsilon, which the paper does not have, stands in the maximum as in torch and optax.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.optimizer.Adamax().minimize(lambda w: w**2, jnp.float32(1.0))
        >>> [v.name for v in program.state if "/" in v.name]
        ['w/largest', 'w/mean']
    """

    learning_rate: Hyperparameter = 2e-3

    def init(self, parameter: Any) -> Slots:
        return {"mean": jnp.zeros_like(parameter), "largest": jnp.zeros_like(jnp.abs(parameter))}

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        mean = self.beta1 * slots["mean"] + (1 - self.beta1) * gradient
        largest = jnp.maximum(self.beta2 * slots["largest"], jnp.abs(gradient) + self.epsilon)
        rate = self.learning_rate / bias_correction(self.beta1, self.step + 1)
        return parameter - rate * mean / largest, {"mean": mean, "largest": largest}


class LazyAdam(AdamLike):
    """Adam for embeddings: a row whose gradient is zero keeps its numbers, its mean and its variance.

    As ``Adam`` for every row of the first axis that has a gradient other than zero; the t of the corrections
    counts all steps. Every number of a vector is a row of its own, and a scalar is one row.

    Source: the sparse updates of Kingma and Ba, Adam, 2015, as TensorFlow's LazyAdamOptimizer and torch's
    SparseAdam have them, with the same defaults. Without them, a word that does not occur would be moved by
    its mean of long ago.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> table, words = jnp.ones((3, 2)), jnp.array([0, 2])
        >>> step = ow.compile(ow.optimizer.LazyAdam(0.5).minimize(lambda t, w: t[w].sum(), table, words))
        >>> state, out = step(step.init(table), words)
        >>> state.parameters.round(3).tolist()
        [[0.5, 0.5], [1.0, 1.0], [0.5, 0.5]]
    """

    type: ClassVar[UpdateType] = UpdateType.PER_MATRIX

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        direction, new = self.direction(gradient, slots)
        touched = jnp.any(gradient != 0, axis=tuple(range(1, gradient.ndim)), keepdims=True)
        moved = jnp.where(touched, parameter - self.learning_rate * direction, parameter)
        return moved, {name: jnp.where(touched, new[name], slots[name]) for name in slots}
