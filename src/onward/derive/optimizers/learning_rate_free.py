"""Optimizers that find the size of their steps by themselves, from an estimate of the distance to go.

They look at all parameters together. What they know of all of them, such as that estimate, is the same
number in the slots of every parameter; what is a sum over all of them lies there in shares. The learning
rate is a factor of their steps: leave it 1, or let a schedule warm it up and let it fall.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp

from onward.core.words import UpdateType
from onward.derive.lengths import length
from onward.derive.optimizer import Optimizer
from onward.derive.optimizers.arithmetic import squarable, squared
from onward.derive.optimizers.checks import check_positive
from onward.derive.optimizers.norms import inner, quotient
from onward.derive.rule import Hyperparameter, Slots

Arrays = tuple[Any, ...]
AllSlots = tuple[Slots, ...]


class DAdaptSGD(Optimizer):
    """Gradient descent with momentum whose step size comes from a growing estimate of the distance to go.

    ``rate = learning_rate * d / |first gradient|``; ``r <- r + rate * <g, s>``; ``s <- s + rate * g``;
    ``w <- momentum * w + (1 - momentum) * (w0 - s)``; ``d <- max(d, 2 r / |s|)``. Norms and the inner product
    are over all parameters, ``w0`` are the first weights, the first gradient is the first that is not 0.

    Source: Defazio and Mishchenko, Learning-Rate-Free Learning by D-Adaptation, 2023, the algorithm for SGD
    in its section on deep learning. ``d`` begins at ``initial_estimate``, as in the paper. Optax has only the
    Adam variant; torch, Keras and Paddle have none.

    Raises:
        HyperparameterError: the initial estimate is 0, from which nothing moves.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.optimizer.DAdaptSGD().minimize(lambda w: w**2, jnp.float32(1.0))
        >>> [v.name for v in program.state if "/" in v.name]
        ['w/estimate', 'w/first', 'w/product', 'w/squares', 'w/sum']
    """

    type: ClassVar[UpdateType] = UpdateType.ACROSS
    learning_rate: Hyperparameter = 1.0
    momentum: Hyperparameter = 0.9
    initial_estimate: float = 1e-6
    below_one: ClassVar[tuple[str, ...]] = ("momentum",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "initial_estimate")

    def init(self, parameter: Any) -> Slots:
        zero = jnp.zeros((), jnp.abs(parameter).dtype)
        return {
            "first": parameter,
            "sum": jnp.zeros_like(parameter),
            "squares": zero,
            "product": zero,
            "estimate": zero + self.initial_estimate,
        }

    def update(self, parameters: Arrays, gradients: Arrays, slots: AllSlots) -> tuple[Arrays, AllSlots]:
        d = slots[0]["estimate"]
        began = sum(s["squares"] for s in slots) > 0
        first = [
            jnp.where(began, s["squares"], jnp.sum(squared(g))) for g, s in zip(gradients, slots, strict=True)
        ]
        rate = self.learning_rate * quotient(d, jnp.sqrt(sum(first)))
        product = [s["product"] + rate * inner(g, s["sum"]) for g, s in zip(gradients, slots, strict=True)]
        sums = [s["sum"] + rate * g for g, s in zip(gradients, slots, strict=True)]
        estimate = jnp.maximum(d, quotient(2 * sum(product), length(sums).norm))
        moved = tuple(
            self.momentum * w + (1 - self.momentum) * (s["first"] - x)
            for w, s, x in zip(parameters, slots, sums, strict=True)
        )
        return moved, tuple(
            {"first": s["first"], "sum": x, "squares": q, "product": r, "estimate": estimate}
            for s, x, q, r in zip(slots, sums, first, product, strict=True)
        )


class AdamOfEstimate(Optimizer):
    """The base of Adams whose learning rate is an estimate of the distance to go."""

    type: ClassVar[UpdateType] = UpdateType.ACROSS
    learning_rate: Hyperparameter = 1.0
    beta1: Hyperparameter = 0.9
    beta2: Hyperparameter = 0.999
    epsilon: Hyperparameter = 1e-8
    initial_estimate: float = 1e-6
    below_one: ClassVar[tuple[str, ...]] = ("beta1", "beta2")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "initial_estimate")

    def init(self, parameter: Any) -> Slots:
        magnitude = jnp.abs(parameter)
        zero = jnp.zeros((), magnitude.dtype)
        return {
            "mean": jnp.zeros_like(parameter),
            "variance": jnp.zeros_like(magnitude),
            "sum": jnp.zeros_like(parameter),
            "product": zero,
            "estimate": zero + self.initial_estimate,
        }


class DAdaptAdam(AdamOfEstimate):
    """Adam whose learning rate is a growing estimate of the distance to go.

    ``m <- beta1 m + (1 - beta1) rate g`` with ``rate = learning_rate * d``;
    ``v <- beta2 v + (1 - beta2) g**2``; ``w <- w - m / a`` with ``a = sqrt(v) + epsilon``;
    with ``b = sqrt(beta2)``: ``r <- b r + (1 - b) rate <g, s / a>``; ``s <- b s + (1 - b) rate g``;
    ``d <- max(d, r / ((1 - b) * sum|s|))``. The inner product and the sum are over all parameters.

    Source: Defazio and Mishchenko, Learning-Rate-Free Learning by D-Adaptation, 2023, the algorithm for Adam
    in its section on deep learning. ``d`` begins at ``initial_estimate``, as in the paper. Optax corrects
    the moments' start at zero, and takes ``a`` of the step before. Torch, Keras and Paddle have none.

    Raises:
        HyperparameterError: the initial estimate is 0, from which nothing moves.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.optimizer.DAdaptAdam().minimize(lambda w: w**2, jnp.float32(1.0))
        >>> [v.name for v in program.state if "/" in v.name]
        ['w/estimate', 'w/mean', 'w/product', 'w/sum', 'w/variance']
    """

    def update(self, parameters: Arrays, gradients: Arrays, slots: AllSlots) -> tuple[Arrays, AllSlots]:
        d = slots[0]["estimate"]
        pairs = [self._gathered(g, s, d) for g, s in zip(gradients, slots, strict=True)]
        new = [s for s, _ in pairs]
        length = (1 - jnp.sqrt(self.beta2)) * sum(jnp.sum(jnp.abs(s["sum"])) for s in new)
        estimate = jnp.maximum(d, quotient(sum(s["product"] for s in new), length))
        moved = tuple(w - s["mean"] / a for w, (s, a) in zip(parameters, pairs, strict=True))
        return moved, tuple({**s, "estimate": estimate} for s in new)

    def _gathered(self, g: Any, slots: Slots, d: Any) -> tuple[dict[str, Any], Any]:
        """The slots of one parameter with this gradient in them, and the scale of its step."""
        g, b, rate = squarable(g), jnp.sqrt(self.beta2), self.learning_rate * d
        variance = self.beta2 * slots["variance"] + (1 - self.beta2) * squared(g)
        scale = jnp.sqrt(variance) + self.epsilon
        product = rate * inner(g, slots["sum"] / scale)
        return {
            "mean": self.beta1 * slots["mean"] + (1 - self.beta1) * rate * g,
            "variance": variance,
            "sum": b * slots["sum"] + (1 - b) * rate * g,
            "product": b * slots["product"] + (1 - b) * product,
        }, scale


class Prodigy(AdamOfEstimate):
    """Adam whose learning rate is an estimate of the distance to go that grows faster than D-Adaptation's.

    ``m <- beta1 m + (1 - beta1) d g``; ``v <- beta2 v + (1 - beta2) d**2 g**2``;
    with ``b = sqrt(beta2)`` and the first weights ``w0``:
    ``r <- b r + (1 - b) learning_rate d**2 <g, w0 - w>``; ``s <- b s + (1 - b) learning_rate d**2 g``;
    ``w <- w - learning_rate * d * m / (sqrt(v) + d * epsilon)``; ``d <- max(d, r / sum|s|)``. The inner
    product and the sum are over all parameters.

    Source: Mishchenko and Defazio, Prodigy: An Expeditiously Adaptive Parameter-Free Learner, 2024, the
    variant for Adam. ``d`` begins at ``initial_estimate``, as in the paper. Optax multiplies the learning
    rate by ``sqrt(1 - beta2**t) / (1 - beta1**t)``, which a schedule can do here. Torch, Keras and Paddle
    have none.

    Raises:
        HyperparameterError: the initial estimate is 0, from which nothing moves.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.optimizer.Prodigy().minimize(lambda w: w**2, jnp.float32(1.0))
        >>> [v.name for v in program.state if "/" in v.name]
        ['w/estimate', 'w/first', 'w/mean', 'w/product', 'w/sum', 'w/variance']
    """

    def init(self, parameter: Any) -> Slots:
        return {**super().init(parameter), "first": parameter}

    def update(self, parameters: Arrays, gradients: Arrays, slots: AllSlots) -> tuple[Arrays, AllSlots]:
        d = slots[0]["estimate"]
        new = [self._gathered(w, g, s, d) for w, g, s in zip(parameters, gradients, slots, strict=True)]
        length = sum(jnp.sum(jnp.abs(s["sum"])) for s in new)
        estimate = jnp.maximum(d, quotient(sum(s["product"] for s in new), length))
        moved = tuple(
            w - self.learning_rate * d * s["mean"] / (jnp.sqrt(s["variance"]) + d * self.epsilon)
            for w, s in zip(parameters, new, strict=True)
        )
        return moved, tuple({**s, "estimate": estimate} for s in new)

    def _gathered(self, w: Any, g: Any, slots: Slots, d: Any) -> dict[str, Any]:
        """The slots of one parameter with this gradient in them."""
        g, b = squarable(g), jnp.sqrt(self.beta2)
        weight = (1 - b) * self.learning_rate * d**2
        return {
            "mean": self.beta1 * slots["mean"] + (1 - self.beta1) * d * g,
            "variance": self.beta2 * slots["variance"] + (1 - self.beta2) * squared(d * g),
            "sum": b * slots["sum"] + weight * g,
            "product": b * slots["product"] + weight * inner(g, slots["first"] - w),
            "first": slots["first"],
        }
