"""Optimizers with a step size of its own for every number."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import jax.numpy as jnp

from onward.derive.optimizer import Hyperparameter, Optimizer, Slots
from onward.derive.optimizers.dtypes import accumulator


class Adagrad(Optimizer):
    """Steps that shrink with the sum of the squared gradients seen so far.

    ``s <- s + g**2``, then ``w <- w - learning_rate * g / (sqrt(s) + epsilon)``.

    Source: Duchi, Hazan and Singer, Adaptive Subgradient Methods, 2011, figure 1. The sum begins at
    ``initial_accumulator``: 0 as in the paper, torch and Paddle (optax and Keras: 0.1).

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.Adagrad(0.5).minimize(lambda w: w**2, jnp.float32(1.0))
        >>> step = ow.compile(program)
        >>> state, out = step(step.init(jnp.float32(1.0)))
        >>> float(state.parameters)
        0.5
    """

    learning_rate: Hyperparameter = 1e-2
    epsilon: Hyperparameter = 1e-10
    initial_accumulator: float = 0.0

    def init(self, parameter: Any) -> Slots:
        dtype = accumulator(jnp.abs(parameter).dtype)
        return {"sum": jnp.full(parameter.shape, self.initial_accumulator, dtype)}

    def update(
        self, parameter: Any, gradient: Any, slots: Slots, hyperparameters: SimpleNamespace
    ) -> tuple[Any, Slots]:
        h = hyperparameters
        total = slots["sum"] + _square(gradient, slots["sum"].dtype)
        step = gradient / (jnp.sqrt(total) + h.epsilon)
        return parameter - h.learning_rate * step, {"sum": total}


class Adam(Optimizer):
    """Running means of the gradient and of its square, corrected for their start at zero.

    ``m <- beta1 m + (1 - beta1) g``; ``v <- beta2 v + (1 - beta2) g**2``;
    ``w <- w - learning_rate * (m / (1 - beta1**t)) / (sqrt(v / (1 - beta2**t)) + epsilon)``,
    t counted from 1.

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
        return _moments(parameter)

    def update(
        self, parameter: Any, gradient: Any, slots: Slots, hyperparameters: SimpleNamespace
    ) -> tuple[Any, Slots]:
        direction, slots = _adam(gradient, slots, hyperparameters)
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
        return _moments(parameter)

    def update(
        self, parameter: Any, gradient: Any, slots: Slots, hyperparameters: SimpleNamespace
    ) -> tuple[Any, Slots]:
        h = hyperparameters
        direction, slots = _adam(gradient, slots, h)
        return parameter - h.learning_rate * (direction + h.weight_decay * parameter), slots


def _moments(parameter: Any) -> Slots:
    """Zeros for the running means of the gradient and of its square."""
    kept = accumulator(parameter.dtype)
    squared = accumulator(jnp.abs(parameter).dtype)
    return {
        "mean": jnp.zeros(parameter.shape, kept),
        "variance": jnp.zeros(parameter.shape, squared),
    }


def _adam(gradient: Any, slots: Slots, h: SimpleNamespace) -> tuple[Any, Slots]:
    """The direction of Adam, and the moments it leaves."""
    mean = h.beta1 * slots["mean"] + (1 - h.beta1) * gradient
    variance = h.beta2 * slots["variance"] + (1 - h.beta2) * _square(gradient, slots["variance"].dtype)
    t = h.step + 1
    unbiased = mean / (1 - h.beta1**t)
    scale = jnp.sqrt(variance / (1 - h.beta2**t)) + h.epsilon
    return unbiased / scale, {"mean": mean, "variance": variance}


def _square(gradient: Any, dtype: Any) -> Any:
    """The square of the absolute value, computed in the dtype it is accumulated in."""
    if jnp.iscomplexobj(gradient):
        return (jnp.real(gradient) ** 2 + jnp.imag(gradient) ** 2).astype(dtype)
    return jnp.square(gradient.astype(dtype))
