"""Optimizers that take averages in place of a schedule that decays the learning rate.

Three sequences: ``z`` takes the steps, ``x`` is the average of the ``z`` so far, weighted by the square of
the learning rates, and gradients are taken at ``y = (1 - beta) z + beta x``. The parameters of a Program are
``y``; the weights to evaluate and to keep are ``x``, which ``evaluated`` finds from ``y`` and ``z``, so that
no more is kept than for momentum. That is why ``beta`` is fixed when the Program is derived.

A learning rate that warms up is a schedule like any other: small first rates weigh little in the average.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import jax.numpy as jnp

from onward.core.errors import HyperparameterError
from onward.derive.optimizer import Optimizer
from onward.derive.optimizers.arithmetic import bias_correction, squarable, squared
from onward.derive.optimizers.norms import quotient
from onward.derive.rule import Hyperparameter, Slots


class ScheduleFreeSGD(Optimizer):
    """Gradient descent, evaluated at an average that needs no schedule.

    ``z' = z - learning_rate * g(y)``; ``x' = (1 - c) x + c z'`` with
    ``c = learning_rate**2 / (sum of learning_rate**2 so far)``; ``y' = (1 - beta) z' + beta x'``.

    Source: Defazio et al., The Road Less Scheduled, 2024, equations 3 to 5 with the weights of algorithm 1;
    the learning rate is that of the authors' code. Optax and that code weigh by the largest rate so far,
    which is the same unless the rate falls. Torch, Keras and Paddle have none.

    Raises:
        HyperparameterError: ``beta`` is 0 or greater than 1.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.optimizer.ScheduleFreeSGD(0.1).minimize(lambda w: w**2, jnp.float32(1.0))
        >>> [v.name for v in program.state if "/" in v.name]
        ['w/base', 'w/weights']
    """

    learning_rate: Hyperparameter = 1.0
    beta: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_share(self, "beta", self.beta)

    def init(self, parameter: Any) -> Slots:
        return {"base": parameter, "weights": jnp.zeros((), jnp.abs(parameter).dtype)}

    def update(
        self, parameter: Any, gradient: Any, slots: Slots, hyperparameters: SimpleNamespace
    ) -> tuple[Any, Slots]:
        return _averaged(parameter, gradient, slots, hyperparameters.learning_rate, self.beta)

    def evaluated(self, parameter: Any, slots: Slots, hyperparameters: SimpleNamespace) -> Any:
        return _average(parameter, slots["base"], self.beta)


class ScheduleFreeAdamW(Optimizer):
    """AdamW whose momentum is an average of the weights, and that needs no schedule.

    ``v <- beta2 v + (1 - beta2) g**2``, ``g`` taken at y;
    ``z' = z - learning_rate * (g / (sqrt(v / (1 - beta2**t)) + epsilon) + weight_decay * y)``, t counted
    from 1; ``x`` and ``y`` follow as for ``ScheduleFreeSGD``, with ``beta1`` in place of ``beta``.

    Source: Defazio et al., The Road Less Scheduled, 2024, algorithm 1; the learning rate is that of the
    authors' code and of optax, and there is no decay unless asked, as in both. Both weigh by the largest
    rate so far, which is the same unless the rate falls. Torch, Keras and Paddle have none.

    Raises:
        HyperparameterError: ``beta1`` is 0 or greater than 1.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> warm = lambda step: 1e-2 * jnp.minimum(1, (step + 1) / 100)
        >>> program = ow.optimizer.ScheduleFreeAdamW(warm).minimize(lambda w: w**2, jnp.float32(1.0))
        >>> [v.name for v in program.state if "/" in v.name]
        ['w/base', 'w/variance', 'w/weights']
    """

    learning_rate: Hyperparameter = 2.5e-3
    beta1: float = 0.9
    beta2: Hyperparameter = 0.999
    epsilon: Hyperparameter = 1e-8
    weight_decay: Hyperparameter = 0.0
    below_one: ClassVar[tuple[str, ...]] = ("beta2",)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_share(self, "beta1", self.beta1)

    def init(self, parameter: Any) -> Slots:
        magnitude = jnp.abs(parameter)
        return {
            "base": parameter,
            "weights": jnp.zeros((), magnitude.dtype),
            "variance": jnp.zeros_like(magnitude),
        }

    def update(
        self, parameter: Any, gradient: Any, slots: Slots, hyperparameters: SimpleNamespace
    ) -> tuple[Any, Slots]:
        h, gradient = hyperparameters, squarable(gradient)
        variance = h.beta2 * slots["variance"] + (1 - h.beta2) * squared(gradient)
        scale = jnp.sqrt(variance / bias_correction(h.beta2, h.step + 1)) + h.epsilon
        direction = gradient / scale + h.weight_decay * parameter
        parameter, new = _averaged(parameter, direction, slots, h.learning_rate, self.beta1)
        return parameter, {**new, "variance": variance}

    def evaluated(self, parameter: Any, slots: Slots, hyperparameters: SimpleNamespace) -> Any:
        return _average(parameter, slots["base"], self.beta1)


def _average(y: Any, z: Any, beta: float) -> Any:
    """The average x that y lies this share of the way to, from z."""
    return (y - (1 - beta) * z) / beta


def _averaged(y: Any, direction: Any, slots: Slots, rate: Any, beta: float) -> tuple[Any, dict[str, Any]]:
    """The next y, after a step of z and a share of it in the average."""
    z = slots["base"] - rate * direction
    weights = slots["weights"] + rate**2
    x = _average(y, slots["base"], beta)
    x = x + quotient(rate**2, weights) * (z - x)
    return (1 - beta) * z + beta * x, {"base": z, "weights": weights}


def _check_share(optimizer: Optimizer, name: str, value: float) -> None:
    optimizer.check_hyperparameter(name, value)
    if not 0 < value <= 1:
        raise HyperparameterError(
            f"{type(optimizer).__name__}: {name} is {value}. It must be greater than 0 and at most 1: it is "
            "the share of the average in the point where gradients are taken."
        )
