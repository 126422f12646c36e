"""Optimizers that take averages in place of a schedule that decays the learning rate.

Three sequences: ``z`` takes the steps, ``x`` is the average of the ``z`` so far, weighted by the square of
the learning rates, and gradients are taken at ``y = (1 - beta) z + beta x``. The parameters of a Program are
``y``; the weights to evaluate and to keep are ``x``, which ``evaluated`` finds from ``y`` and ``z``, so that
no more is kept than for momentum. That is why ``beta`` is fixed when the Program is derived.

A learning rate that warms up is a schedule like any other: small first rates weigh little in the average.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp

from onward.core.errors import HyperparameterError
from onward.derive.optimizer import Optimizer
from onward.derive.optimizers.arithmetic import bias_correction, squarable, squared
from onward.derive.optimizers.norms import quotient
from onward.derive.rule import Hyperparameter, Slots


class ScheduleFree(Optimizer):
    """The base of what keeps ``z``, called base, and the sum of the weights, and is evaluated at the average.

    ``share_field`` names the field that is beta: the share of the average in y.
    """

    share_field: ClassVar[str] = "beta"
    learning_rate: Hyperparameter = 1.0

    @property
    def share(self) -> float:
        """The share of the average in the point where gradients are taken."""
        return float(getattr(self, self.share_field))

    def __post_init__(self) -> None:
        super().__post_init__()
        name, value = self.share_field, getattr(self, self.share_field)
        self.check_hyperparameter(name, value)
        if not 0 < value <= 1:
            raise HyperparameterError(
                f"{type(self).__name__}: {name} is {value}. It must be greater than 0 and at most 1: it is "
                "the share of the average in the point where gradients are taken."
            )

    def init(self, parameter: Any) -> Slots:
        return {"base": parameter, "weights": jnp.zeros((), jnp.abs(parameter).dtype)}

    def evaluated(self, parameter: Any, slots: Slots) -> Any:
        return (parameter - (1 - self.share) * slots["base"]) / self.share

    def averaged(self, y: Any, direction: Any, slots: Slots) -> tuple[Any, dict[str, Any]]:
        """The next y, after a step of z and a share of it in the average."""
        z = slots["base"] - self.learning_rate * direction
        weights = slots["weights"] + self.learning_rate**2
        x = self.evaluated(y, slots)
        x = x + quotient(self.learning_rate**2, weights) * (z - x)
        return (1 - self.share) * z + self.share * x, {"base": z, "weights": weights}


class ScheduleFreeSGD(ScheduleFree):
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

    beta: float = 0.9

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        return self.averaged(parameter, gradient, slots)


class ScheduleFreeAdamW(ScheduleFree):
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

    share_field: ClassVar[str] = "beta1"
    learning_rate: Hyperparameter = 2.5e-3
    beta1: float = 0.9
    beta2: Hyperparameter = 0.999
    epsilon: Hyperparameter = 1e-8
    weight_decay: Hyperparameter = 0.0
    below_one: ClassVar[tuple[str, ...]] = ("beta2",)

    def init(self, parameter: Any) -> Slots:
        return {**super().init(parameter), "variance": jnp.zeros_like(jnp.abs(parameter))}

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        gradient = squarable(gradient)
        variance = self.beta2 * slots["variance"] + (1 - self.beta2) * squared(gradient)
        scale = jnp.sqrt(variance / bias_correction(self.beta2, self.step + 1)) + self.epsilon
        direction = gradient / scale + self.weight_decay * parameter
        parameter, new = self.averaged(parameter, direction, slots)
        return parameter, {**new, "variance": variance}
