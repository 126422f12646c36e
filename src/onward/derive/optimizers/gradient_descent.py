"""Gradient descent, plain, with momentum, and averaged."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from onward.derive.optimizer import Optimizer
from onward.derive.rule import Hyperparameter, Slots


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

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        return parameter - self.learning_rate * gradient, slots


class HeavyBall(Optimizer):
    """The base of what keeps a ``velocity``, which remembers earlier gradients."""

    learning_rate: Hyperparameter = 1e-2
    momentum: Hyperparameter = 0.9

    def init(self, parameter: Any) -> Slots:
        return {"velocity": jnp.zeros_like(parameter)}


class Momentum(HeavyBall):
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

    nesterov: bool = False

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        velocity = self.momentum * slots["velocity"] + gradient
        direction = gradient + self.momentum * velocity if self.nesterov else velocity
        return parameter - self.learning_rate * direction, {"velocity": velocity}


class Nesterov(HeavyBall):
    """Gradient descent with a velocity, whose gradient is taken where the velocity leads.

    ``v <- momentum * v + g``, then ``w <- w - learning_rate * (g + momentum * v)``; as
    ``Momentum(nesterov=True)``.

    Source: Nesterov, A method of solving a convex programming problem with convergence rate O(1/k**2), 1983,
    in the form of Sutskever et al., On the importance of initialization and momentum in deep learning, 2013,
    section 2, written for the point ahead, as in torch, optax, Keras and Paddle: the parameters that are
    kept are those that the gradient is taken at.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> step = ow.compile(ow.Nesterov(0.5, momentum=0.5).minimize(lambda w: w, jnp.float32(1.0)))
        >>> state, out = step(step.init(jnp.float32(1.0)))
        >>> float(state.parameters)
        0.25
    """

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        velocity = self.momentum * slots["velocity"] + gradient
        return parameter - self.learning_rate * (gradient + self.momentum * velocity), {"velocity": velocity}


class ASGD(Optimizer):
    """Gradient descent with steps that shrink, evaluated at the mean of the weights it passed through.

    ``w <- w - learning_rate * (1 + decay * learning_rate * (t - 1))**-power * g``, t counted from 1;
    ``average <- average + (w - average) / max(1, t - average_after)``.

    Source: Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992, section 2; the
    shrinking steps as in Xu, Towards Optimal One Pass Large Scale Learning with Averaged Stochastic Gradient
    Descent, 2011, section 3, with torch's constants. All weights count in the mean, as in the papers; in
    torch ``average_after`` is called t0 and is 1e6, which most runs never reach, and ``decay``, called lambd,
    makes the weights decay too. With ``decay=0`` the learning rate stays what it is.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> step = ow.compile(ow.optimizer.ASGD(0.5, decay=0.0).minimize(lambda w: w, jnp.float32(0.0)))
        >>> state = step.init(jnp.float32(0.0))
        >>> for _ in range(3):
        ...     state, out = step(state)
        >>> float(state.parameters), float(state["w/average"])
        (-1.5, -1.0)
    """

    learning_rate: Hyperparameter = 1e-2
    decay: Hyperparameter = 1e-4
    power: Hyperparameter = 0.75
    average_after: Hyperparameter = 0

    def init(self, parameter: Any) -> Slots:
        return {"average": parameter}

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        rate = self.learning_rate / (1 + self.decay * self.learning_rate * self.step) ** self.power
        parameter = parameter - rate * gradient
        count = jnp.maximum(1, self.step + 1 - self.average_after)
        return parameter, {"average": slots["average"] + (parameter - slots["average"]) / count}

    def evaluated(self, parameter: Any, slots: Slots) -> Any:
        return slots["average"]
