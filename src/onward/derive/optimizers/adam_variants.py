"""Adam with one part exchanged: the momentum, the start, the variance, or the order of the two."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from onward.derive.optimizers.adam import AdamLike
from onward.derive.optimizers.arithmetic import bias_correction, squarable, squared
from onward.derive.rule import Hyperparameter, Slots


class NAdam(AdamLike):
    """Adam with Nesterov's momentum, which grows while it trains.

    ``mu_t = beta1 * (1 - 0.96**(t * momentum_decay) / 2)``, t counted from 1; ``m <- mu_t m + (1 - mu_t) g``;
    ``v <- beta2 v + (1 - beta2) g**2``; with ``p_t`` the product of ``mu_1`` to ``mu_t``,
    ``d = mu_(t+1) m / (1 - p_(t+1)) + (1 - mu_t) g / (1 - p_t)``;
    ``w <- w - learning_rate * d / (sqrt(v / (1 - beta2**t)) + epsilon)``.

    Source: Dozat, Incorporating Nesterov Momentum into Adam, 2016, algorithm 2, without the factor beta2 that
    it gives the corrected v, and section 3. Defaults as in torch; in Keras momentum_decay is 1. Both keep m
    with beta1 where the paper, as here, has mu_t. In optax the momentum does not grow: its b1 is beta1 / 2
    here, with a momentum_decay of 0.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.optimizer.NAdam().minimize(lambda w: w**2, jnp.float32(1.0))
        >>> [v.name for v in program.state if "/" in v.name]
        ['w/mean', 'w/product', 'w/variance']
    """

    learning_rate: Hyperparameter = 2e-3
    momentum_decay: Hyperparameter = 4e-3

    def init(self, parameter: Any) -> Slots:
        return {**super().init(parameter), "product": jnp.ones((), jnp.abs(parameter).dtype)}

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        gradient = squarable(gradient)
        t = self.step + 1
        mu, following = (self.beta1 * (1 - 0.5 * 0.96 ** (n * self.momentum_decay)) for n in (t, t + 1))
        product = slots["product"] * mu
        mean = mu * slots["mean"] + (1 - mu) * gradient
        variance = self.beta2 * slots["variance"] + (1 - self.beta2) * squared(gradient)
        ahead = following / (1 - product * following) * mean + (1 - mu) / (1 - product) * gradient
        scale = jnp.sqrt(variance / bias_correction(self.beta2, t)) + self.epsilon
        new = parameter - self.learning_rate * ahead / scale
        return new, {"mean": mean, "variance": variance, "product": product}


class RAdam(AdamLike):
    """Adam that waits with its step sizes until enough gradients were seen to trust them.

    With ``r = 2 / (1 - beta2) - 1`` and ``r_t = r - 2 t beta2**t / (1 - beta2**t)``, t counted from 1: where
    ``r_t > threshold``, the step of ``Adam`` times ``sqrt((r_t - 4) (r_t - 2) r / ((r - 4) (r - 2) r_t))``;
    before that, ``w <- w - learning_rate * m / (1 - beta1**t)``, with the m of ``Adam``.

    Source: Liu et al., On the Variance of the Adaptive Learning Rate and Beyond, 2020, algorithm 2. The
    threshold is 4 there, and 5 in the authors' code, torch and optax, as here.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> step = ow.compile(ow.optimizer.RAdam(0.5, beta1=0.0).minimize(lambda w: w, jnp.float32(0.0)))
        >>> state, out = step(step.init(jnp.float32(0.0)))
        >>> float(state.parameters)
        -0.5
    """

    threshold: Hyperparameter = 5.0

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        t = self.step + 1
        mean, variance = self.averaged(gradient, slots)
        trusted, factor = _rectification(self.beta2, t, self.threshold)
        plain = mean / bias_correction(self.beta1, t)
        direction = jnp.where(trusted, factor * self.corrected(mean, variance), plain)
        return parameter - self.learning_rate * direction, {"mean": mean, "variance": variance}


class Yogi(AdamLike):
    """Adam whose variance moves by no more than the newest squared gradient weighs.

    ``m <- beta1 m + (1 - beta1) g``; ``v <- v - (1 - beta2) * sign(v - g**2) * g**2``;
    ``w <- w - learning_rate * m / (sqrt(v) + epsilon)``.

    Source: Zaheer, Reddi, Sachan, Kale and Kumar, Adaptive Methods for Nonconvex Optimization, 2018,
    algorithm 2, with its epsilon and learning rate. No correction for the start, as there: v begins at
    ``initial_accumulator``, 1e-6 as in optax (which corrects, and begins m at 1e-6 too).

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> step = ow.compile(ow.optimizer.Yogi().minimize(lambda w: w, jnp.float32(0.0)))
        >>> round(float(step.init(jnp.float32(0.0))["w/variance"]), 9)
        1e-06
    """

    learning_rate: Hyperparameter = 1e-2
    epsilon: Hyperparameter = 1e-3
    initial_accumulator: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_hyperparameter("initial_accumulator", self.initial_accumulator)

    def init(self, parameter: Any) -> Slots:
        size = jnp.abs(parameter)
        return {"mean": jnp.zeros_like(parameter), "variance": jnp.full_like(size, self.initial_accumulator)}

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        gradient = squarable(gradient)
        square = squared(gradient)
        mean = self.beta1 * slots["mean"] + (1 - self.beta1) * gradient
        variance = slots["variance"] + (1 - self.beta2) * jnp.sign(square - slots["variance"]) * square
        new = parameter - self.learning_rate * mean / (jnp.sqrt(variance) + self.epsilon)
        return new, {"mean": mean, "variance": variance}


class AdaBelief(AdamLike):
    """Adam that divides by how far gradients are from what their mean led to expect.

    As ``Adam``, with ``v <- beta2 v + (1 - beta2) (g - m)**2 + epsilon``, m being the new one.

    Source: Zhuang et al., AdaBelief Optimizer: Adapting Stepsizes by the Belief in Observed Gradients, 2020,
    algorithm 2. Defaults as in the authors' code and optax (the paper: epsilon 1e-8).

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.optimizer.AdaBelief().minimize(lambda w: w**2, jnp.float32(1.0))
        >>> [v.name for v in program.state if "/" in v.name]
        ['w/mean', 'w/variance']
    """

    epsilon: Hyperparameter = 1e-16

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        gradient = squarable(gradient)
        mean = self.beta1 * slots["mean"] + (1 - self.beta1) * gradient
        variance = self.beta2 * slots["variance"] + (1 - self.beta2) * squared(gradient - mean) + self.epsilon
        new = parameter - self.learning_rate * self.corrected(mean, variance)
        return new, {"mean": mean, "variance": variance}


class ADOPT(AdamLike):
    """Adam in another order: divided by the variance of earlier gradients first, averaged then.

    The first step only sets ``v <- g**2``. From then on, t counted from 1,
    ``m <- beta1 m + (1 - beta1) clip(g / max(sqrt(v), epsilon), t**clip_power)``;
    ``w <- w - learning_rate * m``; ``v <- beta2 v + (1 - beta2) g**2``. The clip is of the absolute value.

    Source: Taniguchi et al., ADOPT: Modified Adam Can Converge with Any beta2 with the Optimal Rate, 2024,
    algorithm 1, clipped as in its later versions and in the authors' code; defaults as there and in optax.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> step = ow.compile(ow.optimizer.ADOPT(0.5, beta1=0.0).minimize(lambda w: w, jnp.float32(0.0)))
        >>> state = step.init(jnp.float32(0.0))
        >>> for _ in range(3):
        ...     state, out = step(state)
        >>> float(state.parameters)
        -1.0
    """

    beta2: Hyperparameter = 0.9999
    epsilon: Hyperparameter = 1e-6
    clip_power: Hyperparameter = 0.25

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        gradient = squarable(gradient)
        t = self.step
        first, square = t == 0, squared(gradient)
        scaled = gradient / jnp.maximum(jnp.sqrt(slots["variance"]), self.epsilon)
        limit = jnp.maximum(t, 1) ** self.clip_power
        clipped = scaled * (limit / jnp.maximum(jnp.abs(scaled), limit))
        mean = jnp.where(first, 0, self.beta1 * slots["mean"] + (1 - self.beta1) * clipped)
        variance = jnp.where(first, square, self.beta2 * slots["variance"] + (1 - self.beta2) * square)
        return parameter - self.learning_rate * mean, {"mean": mean, "variance": variance}


def _rectification(beta2: Any, t: Any, threshold: Any) -> tuple[Any, Any]:
    """Whether the variance can be trusted after t gradients, and the factor of Adam's step if so."""
    seen = bias_correction(beta2, t)
    most = 2 / (1 - beta2) - 1
    length = most - 2 * t * (1 - seen) / seen
    factor = jnp.sqrt(jnp.maximum((length - 4) * (length - 2) * most / ((most - 4) * (most - 2) * length), 0))
    return length > threshold, factor
