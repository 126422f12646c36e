"""Shampoo: a preconditioner for every axis of a parameter."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax

from onward.core.errors import HyperparameterError
from onward.core.words import UpdateType
from onward.derive.optimizer import Optimizer
from onward.derive.optimizers.arithmetic import squared
from onward.derive.optimizers.checks import check_choice, check_counts
from onward.derive.optimizers.matrices import along, axes_of, gram, inverse_root
from onward.derive.optimizers.norms import norm
from onward.derive.rule import Hyperparameter, Slots


class Shampoo(Optimizer):
    """Gradients multiplied, along every axis, by an inverse root of what was seen along that axis.

    For an array of k axes and its axis i: ``H_i <- H_i + G_i G_i^H``, where ``G_i`` has axis i as rows and
    everything else as columns; at every ``every``-th step ``P_i = (H_i + epsilon I)**(-1 / (2 k))``, by an
    eigendecomposition. ``D`` is G multiplied by every ``P_i`` along axis i (of a matrix:
    ``L**(-1/4) G R**(-1/4)``); ``V <- momentum * V + D``; ``W <- W - learning_rate * V``.

    ``grafting`` gives D the length of another step: "adagrad" (of ``G / sqrt(sum of G**2 + epsilon)``), "sgd"
    (of G), or "none", the paper's. Without it keep ``every`` at 1: roots that are older than the gradient
    multiply what they have not seen by up to ``epsilon**(-1/2)``, and training diverges.

    A scalar is a vector of one number. Of an axis longer than ``max_size`` only the diagonal of ``H_i`` is
    kept (the paper's diagonal variant); there are no blocks. ``decay`` below 1 makes ``H_i`` a running
    mean, ``decay * H_i + (1 - decay) * G_i G_i^H``. ``epsilon`` is added at every root instead of once at the
    start, which is the same while ``decay`` is 1.

    Source: Gupta, Koren and Singer, Shampoo: Preconditioned Stochastic Tensor Optimization, 2018,
    algorithm 2, with the momentum of its experiments; grafting: Agarwal et al., Disentangling Adaptive
    Gradient Methods from Learning Rates, 2020. optax, torch and Keras have no Shampoo.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.Shampoo(0.1).minimize(lambda w: jnp.sum(w**2), jnp.ones((2, 3)))
        >>> [f"{v.name} {v.shape}" for v in program.state if "/statistics" in v.name]
        ['w/statistics_0 (2, 2)', 'w/statistics_1 (3, 3)']
    """

    type: ClassVar[UpdateType] = UpdateType.PER_MATRIX
    learning_rate: Hyperparameter = 0.1
    momentum: Hyperparameter = 0.9
    decay: Hyperparameter = 1.0
    epsilon: Hyperparameter = 1e-4
    every: int = 10
    max_size: int = 1024
    grafting: str = "adagrad"
    below_one: ClassVar[tuple[str, ...]] = ("momentum",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "every", "max_size")
        check_choice(self, "grafting", ("none", "sgd", "adagrad"))

    @classmethod
    def check_hyperparameter(cls, name: str, value: Any) -> None:
        super().check_hyperparameter(name, value)
        if name == "decay" and not 0 < value <= 1:
            raise HyperparameterError(f"{cls.__name__}: decay is {value}. It must be above 0, and at most 1.")

    def init(self, parameter: Any) -> Slots:
        factors = {}
        for axis, length in enumerate(axes_of(parameter)):
            one = jnp.eye(length, dtype=parameter.dtype)
            if length > self.max_size:
                one = jnp.ones(length, jnp.abs(parameter).dtype)
            factors[f"statistics_{axis}"] = jnp.zeros_like(one)
            factors[f"root_{axis}"] = one
        squares = {"squares": jnp.zeros_like(jnp.abs(parameter))} if self.grafting == "adagrad" else {}
        return {"velocity": jnp.zeros_like(parameter), **squares, **factors}

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        if parameter.size == 0:
            return parameter, slots
        array = gradient.reshape(axes_of(parameter))
        statistics, roots = self.factors(array, slots)
        direction = array
        for axis, root in enumerate(roots):
            direction = along(root, direction, axis)
        direction, squares = self.grafted(direction.reshape(parameter.shape), gradient, slots)
        velocity = self.momentum * slots["velocity"] + direction
        kept = {f"statistics_{i}": s for i, s in enumerate(statistics)}
        kept |= {f"root_{i}": r for i, r in enumerate(roots)}
        return parameter - self.learning_rate * velocity, {"velocity": velocity, **squares, **kept}

    def factors(self, array: Any, slots: Slots) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """The statistics of every axis with this gradient, and their roots, new or as they were."""
        axes = range(array.ndim)
        share = jnp.where(self.decay < 1, 1 - self.decay, 1)
        old = [slots[f"statistics_{axis}"] for axis in axes]
        new = tuple(self.decay * s + share * gram(array, i, s.ndim == 1) for i, s in enumerate(old))
        roots = lax.cond(
            self.step % self.every == 0,
            lambda: tuple(inverse_root(s, 2 * array.ndim, self.epsilon) for s in new),
            lambda: tuple(slots[f"root_{axis}"] for axis in axes),
        )
        return new, roots

    def grafted(self, direction: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        """The direction with the length that ``grafting`` asks for, and the slots that took."""
        if self.grafting == "none":
            return direction, {}
        kept, like = {}, gradient
        if self.grafting == "adagrad":
            kept = {"squares": slots["squares"] + squared(gradient)}
            like = gradient / jnp.sqrt(kept["squares"] + self.epsilon)
        length = norm(direction)
        return direction * (norm(like) / jnp.where(length > 0, length, 1)), kept
