"""Adam with one memory more: of how the gradient changes, or of gradients long past."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp

from onward.core.words import UpdateType
from onward.derive.optimizers.adam import AdamLike, Moments
from onward.derive.optimizers.arithmetic import bias_correction, squarable, squared
from onward.derive.optimizers.norms import norm
from onward.derive.rule import Hyperparameter, Slots


class Adan(Moments):
    """Adam with Nesterov's momentum, from a running mean of the differences of successive gradients.

    With ``d = g - previous g``, 0 in the first step: ``m <- beta1 m + (1 - beta1) g``;
    ``u <- beta2 u + (1 - beta2) d``; ``v <- beta3 v + (1 - beta3) (g + beta2 d)**2``;
    ``w <- w - learning_rate * (m' + beta2 u') / (sqrt(v') + epsilon)``, where m', u' and v' are corrected for
    their start at zero as in ``Adam``; then ``w <- w / (1 + learning_rate * weight_decay)``.

    Source: Xie et al., Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep Models, 2022,
    algorithm 1, whose betas are 1 minus these; corrected for the start as in the authors' code and in optax,
    whose betas these are. No restarts. optax weighs ``d`` and ``u'`` by ``1 - beta2``, not ``beta2``, in the
    step and in the square; it adds 1e-8 in the root too, and decays as ``AdamW``.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.optimizer.Adan().minimize(lambda w: w**2, jnp.float32(1.0))
        >>> [v.name for v in program.state if "/" in v.name]
        ['w/difference', 'w/gradient', 'w/mean', 'w/variance']
    """

    beta1: Hyperparameter = 0.98
    beta2: Hyperparameter = 0.92
    beta3: Hyperparameter = 0.99
    epsilon: Hyperparameter = 1e-8
    weight_decay: Hyperparameter = 0.0
    below_one: ClassVar[tuple[str, ...]] = ("beta1", "beta2", "beta3")

    def init(self, parameter: Any) -> Slots:
        zeros = jnp.zeros_like(parameter)
        return {**super().init(parameter), "difference": zeros, "gradient": zeros}

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        gradient = squarable(gradient)
        t = self.step + 1
        change = _change(gradient, slots, self.step)
        mean = self.beta1 * slots["mean"] + (1 - self.beta1) * gradient
        difference = self.beta2 * slots["difference"] + (1 - self.beta2) * change
        variance = self.beta3 * slots["variance"] + (1 - self.beta3) * squared(gradient + self.beta2 * change)
        ahead = mean / bias_correction(self.beta1, t)
        ahead += self.beta2 * difference / bias_correction(self.beta2, t)
        scale = jnp.sqrt(variance / bias_correction(self.beta3, t)) + self.epsilon
        new = (parameter - self.learning_rate * ahead / scale) / (1 + self.learning_rate * self.weight_decay)
        return new, {"mean": mean, "variance": variance, "difference": difference, "gradient": gradient}


class AdEMAMix(Moments):
    """Adam with a second mean of the gradients, which forgets very slowly.

    m and v as in ``Adam``; ``s <- b s + (1 - b) g``;
    ``w <- w - learning_rate * ((m' + a s) / (sqrt(v') + epsilon) + weight_decay * w)``, where m' and v' are
    corrected for their start at zero, and s is not. a is alpha and b is beta3; over the first ``warmup``
    steps a grows linearly from 0, and the half-life of b from that of beta1.

    Source: Pagliardini, Ablin and Grangier, The AdEMAMix Optimizer: Better, Faster, Older, 2024, algorithm 1
    and section 3. Defaults as in the authors' code and optax (the paper: alpha from 4 to 10), which leave
    the warmup out too; the paper warms up over all steps of a run, and diverges without for large alpha.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.optimizer.AdEMAMix(warmup=1000).minimize(lambda w: w**2, jnp.float32(1.0))
        >>> [v.name for v in program.state if "/" in v.name]
        ['w/mean', 'w/slow', 'w/variance']
    """

    beta3: Hyperparameter = 0.9999
    alpha: Hyperparameter = 5.0
    epsilon: Hyperparameter = 1e-8
    weight_decay: Hyperparameter = 0.0
    warmup: Hyperparameter = 0
    below_one: ClassVar[tuple[str, ...]] = ("beta1", "beta2", "beta3")

    def init(self, parameter: Any) -> Slots:
        return {**super().init(parameter), "slow": jnp.zeros_like(parameter)}

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        t = self.step + 1
        done = jnp.minimum(t / jnp.maximum(self.warmup, 1), 1)
        beta3, rest = _between(self.beta1, self.beta3, done)
        slow = beta3 * slots["slow"] + rest * gradient
        mean, variance = self.averaged(gradient, slots)
        scale = jnp.sqrt(variance / bias_correction(self.beta2, t)) + self.epsilon
        direction = (mean / bias_correction(self.beta1, t) + done * self.alpha * slow) / scale
        new = parameter - self.learning_rate * (direction + self.weight_decay * parameter)
        return new, {"mean": mean, "variance": variance, "slow": slow}


class MARS(AdamLike):
    """AdamW on gradients with less variance: each is carried on in the direction in which it changed.

    ``c = g + gamma * beta1 / (1 - beta1) * (g - previous g)``, the difference 0 in the first step;
    ``c <- c / max(1, |c|)``, the norm over the parameter as a whole, of whatever shape; then ``AdamW`` on c.

    Source: Yuan et al., MARS: Unleashing the Power of Variance Reduction for Training Large Models, 2024,
    algorithm 2 (MARS-AdamW) in its approximate form, MARS-approx: the previous gradient is the one of the
    previous batch, not the gradient of this batch at the previous parameters, which would have to be computed
    beside. Defaults as in the authors' code, which leaves vectors to AdamW.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.optimizer.MARS().minimize(lambda w: w**2, jnp.float32(1.0))
        >>> [v.name for v in program.state if "/" in v.name]
        ['w/gradient', 'w/mean', 'w/variance']
    """

    type: ClassVar[UpdateType] = UpdateType.PER_MATRIX
    learning_rate: Hyperparameter = 3e-3
    beta1: Hyperparameter = 0.95
    beta2: Hyperparameter = 0.99
    gamma: Hyperparameter = 0.025
    weight_decay: Hyperparameter = 0.0

    def init(self, parameter: Any) -> Slots:
        return {**super().init(parameter), "gradient": jnp.zeros_like(parameter)}

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        reduced = gradient + self.gamma * self.beta1 / (1 - self.beta1) * _change(gradient, slots, self.step)
        reduced = reduced / jnp.maximum(1, norm(reduced))
        direction, new = self.direction(reduced, slots)
        parameter = parameter - self.learning_rate * (direction + self.weight_decay * parameter)
        return parameter, {**new, "gradient": gradient}


def _change(gradient: Any, slots: Slots, step: Any) -> Any:
    """How the gradient differs from the one before; not at all in the first step."""
    return jnp.where(step == 0, 0, gradient - slots["gradient"])


def _between(start: Any, end: Any, done: Any) -> tuple[Any, Any]:
    """The beta whose half-life is that part of the way between those of two others; and 1 minus it."""
    inverse = (1 - done) / jnp.log1p(start - 1) + done / jnp.log1p(end - 1)
    return jnp.exp(1 / inverse), -jnp.expm1(1 / inverse)
