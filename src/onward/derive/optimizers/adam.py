"""Adam, and the forms of it that stay closest to its paper."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import jax.numpy as jnp

from onward.core.words import UpdateType
from onward.derive.optimizer import Optimizer
from onward.derive.optimizers.arithmetic import bias_correction, squarable, squared
from onward.derive.rule import Hyperparameter, Slots


class Adam(Optimizer):
    """Running means of the gradient and of its square, corrected for their start at zero.

    ``m <- beta1 m + (1 - beta1) g``; ``v <- beta2 v + (1 - beta2) g**2``;
    ``w <- w - learning_rate * (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + epsilon)``,
    t counted from 1.

    A number of a gradient beyond 2**62 (4.6e18; 2**510 in float64) counts as that: its square would make the
    variance infinite, as in optax, and the parameter would never move again. So in every rule that keeps a
    running mean of squares; ``Adagrad`` and others that add them up for ever do come to rest.

    Source: Kingma and Ba, Adam, 2015, algorithm 1 (optax and torch add epsilon in the same place; the
    "epsilon hat" form of TensorFlow and Keras does not).

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.Adam(1e-3).minimize(lambda w: w**2, jnp.float32(1.0))
        >>> [v.name for v in program.state if "/" in v.name]
        ['w/mean', 'w/variance']
    """

    learning_rate: Hyperparameter = 1e-3
    beta1: Hyperparameter = 0.9
    beta2: Hyperparameter = 0.999
    epsilon: Hyperparameter = 1e-8
    below_one: ClassVar[tuple[str, ...]] = ("beta1", "beta2")

    def init(self, parameter: Any) -> Slots:
        return moments(parameter)

    def update(
        self, parameter: Any, gradient: Any, slots: Slots, hyperparameters: SimpleNamespace
    ) -> tuple[Any, Slots]:
        direction, slots = adam(gradient, slots, hyperparameters)
        return parameter - hyperparameters.learning_rate * direction, slots


class AdamW(Optimizer):
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

    learning_rate: Hyperparameter = 1e-3
    beta1: Hyperparameter = 0.9
    beta2: Hyperparameter = 0.999
    epsilon: Hyperparameter = 1e-8
    weight_decay: Hyperparameter = 1e-2
    below_one: ClassVar[tuple[str, ...]] = ("beta1", "beta2")

    def init(self, parameter: Any) -> Slots:
        return moments(parameter)

    def update(
        self, parameter: Any, gradient: Any, slots: Slots, hyperparameters: SimpleNamespace
    ) -> tuple[Any, Slots]:
        h = hyperparameters
        direction, slots = adam(gradient, slots, h)
        return parameter - h.learning_rate * (direction + h.weight_decay * parameter), slots


class AMSGrad(Optimizer):
    """Adam whose step sizes never grow: it divides by the largest variance so far.

    As ``Adam``, with ``u <- max(u, v)`` in place of ``v`` in the step.

    Source: Reddi, Kale and Kumar, On the Convergence of Adam and Beyond, 2018, algorithm 2, which has no
    corrections for the start. They are here, as in torch and Keras, where the maximum is over v as it
    is kept (optax: over the corrected v, so that the first gradients weigh for ever).

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.optimizer.AMSGrad(1e-3).minimize(lambda w: w**2, jnp.float32(1.0))
        >>> [v.name for v in program.state if "/" in v.name]
        ['w/largest', 'w/mean', 'w/variance']
    """

    learning_rate: Hyperparameter = 1e-3
    beta1: Hyperparameter = 0.9
    beta2: Hyperparameter = 0.999
    epsilon: Hyperparameter = 1e-8
    below_one: ClassVar[tuple[str, ...]] = ("beta1", "beta2")

    def init(self, parameter: Any) -> Slots:
        return {**moments(parameter), "largest": jnp.zeros_like(jnp.abs(parameter))}

    def update(
        self, parameter: Any, gradient: Any, slots: Slots, hyperparameters: SimpleNamespace
    ) -> tuple[Any, Slots]:
        h = hyperparameters
        mean, variance = averaged(gradient, slots, h)
        largest = jnp.maximum(slots["largest"], variance)
        new = parameter - h.learning_rate * corrected(mean, largest, h)
        return new, {"mean": mean, "variance": variance, "largest": largest}


class Adamax(Optimizer):
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
    beta1: Hyperparameter = 0.9
    beta2: Hyperparameter = 0.999
    epsilon: Hyperparameter = 1e-8
    below_one: ClassVar[tuple[str, ...]] = ("beta1", "beta2")

    def init(self, parameter: Any) -> Slots:
        return {"mean": jnp.zeros_like(parameter), "largest": jnp.zeros_like(jnp.abs(parameter))}

    def update(
        self, parameter: Any, gradient: Any, slots: Slots, hyperparameters: SimpleNamespace
    ) -> tuple[Any, Slots]:
        h = hyperparameters
        mean = h.beta1 * slots["mean"] + (1 - h.beta1) * gradient
        largest = jnp.maximum(h.beta2 * slots["largest"], jnp.abs(gradient) + h.epsilon)
        rate = h.learning_rate / bias_correction(h.beta1, h.step + 1)
        return parameter - rate * mean / largest, {"mean": mean, "largest": largest}


class LazyAdam(Optimizer):
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
    learning_rate: Hyperparameter = 1e-3
    beta1: Hyperparameter = 0.9
    beta2: Hyperparameter = 0.999
    epsilon: Hyperparameter = 1e-8
    below_one: ClassVar[tuple[str, ...]] = ("beta1", "beta2")

    def init(self, parameter: Any) -> Slots:
        return moments(parameter)

    def update(
        self, parameter: Any, gradient: Any, slots: Slots, hyperparameters: SimpleNamespace
    ) -> tuple[Any, Slots]:
        direction, new = adam(gradient, slots, hyperparameters)
        touched = jnp.any(gradient != 0, axis=tuple(range(1, gradient.ndim)), keepdims=True)
        moved = jnp.where(touched, parameter - hyperparameters.learning_rate * direction, parameter)
        return moved, {name: jnp.where(touched, new[name], slots[name]) for name in slots}


def moments(parameter: Any) -> dict[str, Any]:
    """Zeros for the running means of the gradient and of its square."""
    return {"mean": jnp.zeros_like(parameter), "variance": jnp.zeros_like(jnp.abs(parameter))}


def averaged(gradient: Any, slots: Slots, h: SimpleNamespace) -> tuple[Any, Any]:
    """The running means of the gradient and of its square, one gradient later."""
    gradient = squarable(gradient)
    mean = h.beta1 * slots["mean"] + (1 - h.beta1) * gradient
    variance = h.beta2 * slots["variance"] + (1 - h.beta2) * squared(gradient)
    return mean, variance


def corrected(mean: Any, variance: Any, h: SimpleNamespace) -> Any:
    """The direction of Adam: one mean over the root of the other, each corrected for its start at zero."""
    t = h.step + 1
    scale = jnp.sqrt(variance / bias_correction(h.beta2, t)) + h.epsilon
    return mean / bias_correction(h.beta1, t) / scale


def adam(gradient: Any, slots: Slots, h: SimpleNamespace) -> tuple[Any, Slots]:
    """The direction of Adam, and the moments it leaves."""
    mean, variance = averaged(gradient, slots, h)
    return corrected(mean, variance, h), {"mean": mean, "variance": variance}
