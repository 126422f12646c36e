"""Gradient descent, plain and with momentum."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp

from onward.derive.optimizer import Hyperparameter, Optimizer, Slots
from onward.derive.optimizers.dtypes import accumulator


class SGD(Optimizer):
    """Stochastic gradient descent: ``w <- w - learning_rate * g``.

    Source: Robbins and Monro, A Stochastic Approximation Method, 1951.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SGD(0.1).minimize(lambda w: w**2, jnp.float32(1.0))
        >>> step = ow.compile(program)
        >>> state, out = step(step.init(jnp.float32(1.0)))
        >>> float(state.parameters)
        0.800000011920929
    """

    learning_rate: Hyperparameter = 1e-2

    def update(
        self, parameter: Any, gradient: Any, slots: Slots, hyperparameters: SimpleNamespace
    ) -> tuple[Any, Slots]:
        return parameter - hyperparameters.learning_rate * gradient, slots


class Momentum(Optimizer):
    """Gradient descent with a velocity that remembers earlier gradients.

    ``v <- momentum * v + g``, then ``w <- w - learning_rate * v``; with ``nesterov``,
    ``w <- w - learning_rate * (g + momentum * v)``.

    Source: Polyak 1964 (heavy ball); Nesterov 1983, in the form of Sutskever et al., On the importance
    of initialization and momentum in deep learning, 2013, section 2. The learning rate multiplies the
    velocity, as in torch and Paddle, so changing it acts at once on the whole velocity.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.Momentum(0.1, nesterov=True).minimize(lambda w: w**2, jnp.float32(1.0))
        >>> [v.name for v in program.state]
        ['w', 'learning_rate', 'momentum', 'step', 'w/velocity']
    """

    learning_rate: Hyperparameter = 1e-2
    momentum: Hyperparameter = 0.9
    nesterov: bool = False

    def init(self, parameter: Any) -> Slots:
        return {"velocity": jnp.zeros(parameter.shape, accumulator(parameter.dtype))}

    def update(
        self, parameter: Any, gradient: Any, slots: Slots, hyperparameters: SimpleNamespace
    ) -> tuple[Any, Slots]:
        h = hyperparameters
        velocity = h.momentum * slots["velocity"] + gradient
        direction = gradient + h.momentum * velocity if self.nesterov else velocity
        return parameter - h.learning_rate * direction, {"velocity": velocity}
