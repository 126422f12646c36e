"""Optimizers that divide the gradient of every number by the size its gradients have had."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp

from onward.derive.optimizer import Optimizer
from onward.derive.optimizers.arithmetic import squarable, squared
from onward.derive.rule import Hyperparameter, Slots


class Adagrad(Optimizer):
    """Steps that shrink with the sum of the squared gradients seen so far.

    ``s <- s + g**2``, then ``w <- w - learning_rate * g / (sqrt(s) + epsilon)``.

    Source: Duchi, Hazan and Singer, Adaptive Subgradient Methods, 2011, figure 1. The sum begins at
    ``initial_accumulator``: 0 as in the paper, torch and Paddle (optax and Keras: 0.1). optax has epsilon in
    the root.

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

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_hyperparameter("initial_accumulator", self.initial_accumulator)

    def init(self, parameter: Any) -> Slots:
        return {"sum": jnp.full_like(jnp.abs(parameter), self.initial_accumulator)}

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        total = slots["sum"] + squared(gradient)
        step = gradient / (jnp.sqrt(total) + self.epsilon)
        return parameter - self.learning_rate * step, {"sum": total}


class MeanSquare(Optimizer):
    """The base of what keeps a running mean of the squared gradients, ``variance``."""

    learning_rate: Hyperparameter = 1e-2
    decay: Hyperparameter = 0.95
    epsilon: Hyperparameter = 1e-6
    below_one: ClassVar[tuple[str, ...]] = ("decay",)

    def init(self, parameter: Any) -> Slots:
        return {"variance": jnp.zeros_like(jnp.abs(parameter))}

    def averaged(self, gradient: Any, slots: Slots) -> Any:
        """The mean, one gradient later."""
        return self.decay * slots["variance"] + (1 - self.decay) * squared(gradient)


class DecayedAdagrad(MeanSquare):
    """Adagrad with a running mean of the squared gradients in place of their sum.

    ``v <- decay * v + (1 - decay) * g**2``, then ``w <- w - learning_rate * g / (sqrt(v) + epsilon)``.

    Source: the operator ``decayed_adagrad`` of Paddle, 2017, with its defaults (it has none for the learning
    rate); the rule of Tieleman and Hinton, Neural Networks for Machine Learning, lecture 6.5, 2012. Unlike
    in ``RMSProp``, epsilon stands outside of the root, where torch's RMSprop has it.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.optimizer.DecayedAdagrad(0.1).minimize(lambda w: w**2, jnp.float32(1.0))
        >>> [v.name for v in program.state]
        ['w', 'learning_rate', 'decay', 'epsilon', 'step', 'w/variance']
    """

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        gradient = squarable(gradient)
        variance = self.averaged(gradient, slots)
        step = gradient / (jnp.sqrt(variance) + self.epsilon)
        return parameter - self.learning_rate * step, {"variance": variance}


class Adadelta(Optimizer):
    """Steps as large as earlier steps were, in proportion to the gradient: no learning rate is needed.

    ``v <- rho * v + (1 - rho) * g**2``; ``d = g * sqrt(u + epsilon) / sqrt(v + epsilon)``;
    ``u <- rho * u + (1 - rho) * d**2``; ``w <- w - learning_rate * d``.

    Source: Zeiler, ADADELTA: An Adaptive Learning Rate Method, 2012, algorithm 1. ``rho`` and ``epsilon`` as
    in its section 4 and in Paddle (torch and optax: rho 0.9; Keras: epsilon 1e-7); the paper has no learning
    rate, which 1 stands for, as in torch (Keras and Paddle: 1e-3).

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.optimizer.Adadelta().minimize(lambda w: w**2, jnp.float32(1.0))
        >>> [v.name for v in program.state if "/" in v.name]
        ['w/steps', 'w/variance']
    """

    learning_rate: Hyperparameter = 1.0
    rho: Hyperparameter = 0.95
    epsilon: Hyperparameter = 1e-6
    below_one: ClassVar[tuple[str, ...]] = ("rho",)

    def init(self, parameter: Any) -> Slots:
        zeros = jnp.zeros_like(jnp.abs(parameter))
        return {"variance": zeros, "steps": zeros}

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        gradient = squarable(gradient)
        variance = self.rho * slots["variance"] + (1 - self.rho) * squared(gradient)
        step = gradient * jnp.sqrt(slots["steps"] + self.epsilon) / jnp.sqrt(variance + self.epsilon)
        steps = self.rho * slots["steps"] + (1 - self.rho) * squared(step)
        return parameter - self.learning_rate * step, {"variance": variance, "steps": steps}


class RMSProp(MeanSquare):
    """The gradient divided by the root of a running mean of its square.

    ``v <- decay * v + (1 - decay) * g**2``, then ``w <- w - learning_rate * g / sqrt(v + epsilon)``.
    With ``centered``, ``m <- decay * m + (1 - decay) * g`` and ``v - m**2`` in place of ``v`` in the root.
    With ``momentum``, ``u <- momentum * u + g / sqrt(...)`` and ``w <- w - learning_rate * u``.

    Source: Tieleman and Hinton, Neural Networks for Machine Learning, lecture 6.5, 2012; centered and with
    momentum, Graves, Generating Sequences With Recurrent Neural Networks, 2013, equations 38 to 41. Epsilon
    stands in the root as in Graves, optax, Keras and Paddle (torch: outside). ``decay`` is that of the
    lecture, optax and Keras (torch: 0.99; Paddle: 0.95), epsilon that of optax (Keras: 1e-7; Paddle: 1e-6).
    The learning rate multiplies the velocity as in torch (Graves, Keras and Paddle: the gradient).

    A momentum of 0 keeps no velocity, and is then no hyperparameter that could be changed later.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.RMSProp(0.1, momentum=0.9, centered=True).minimize(lambda w: w**2, jnp.float32(1.0))
        >>> [v.name for v in program.state if "/" in v.name]
        ['w/mean', 'w/variance', 'w/velocity']
    """

    decay: Hyperparameter = 0.9
    epsilon: Hyperparameter = 1e-8
    momentum: Hyperparameter = 0.0
    centered: bool = False

    @property
    def hyperparameters(self) -> Mapping[str, Hyperparameter]:
        return {k: v for k, v in super().hyperparameters.items() if k != "momentum" or callable(v) or v != 0}

    def init(self, parameter: Any) -> Slots:
        slots = dict(super().init(parameter))
        if self.centered:
            slots["mean"] = jnp.zeros_like(parameter)
        if "momentum" in self.hyperparameters:
            slots["velocity"] = jnp.zeros_like(parameter)
        return slots

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        gradient = squarable(gradient)
        spread = self.averaged(gradient, slots)
        new = {"variance": spread}
        if "mean" in slots:
            new["mean"] = self.decay * slots["mean"] + (1 - self.decay) * gradient
            spread = jnp.maximum(spread - squared(new["mean"]), 0)
        step = gradient / jnp.sqrt(spread + self.epsilon)
        if "velocity" in slots:
            step = new["velocity"] = self.momentum * slots["velocity"] + step
        return parameter - self.learning_rate * step, new
