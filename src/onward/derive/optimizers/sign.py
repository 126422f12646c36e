"""Optimizers that follow the sign of every number of a gradient, and nothing of its size.

A complex number has no sign: these rules take real parameters only.
"""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp

from onward.core.errors import HyperparameterError
from onward.derive.optimizer import Optimizer
from onward.derive.optimizers.arithmetic import expect_real
from onward.derive.rule import Hyperparameter, Slots


class SignSGD(Optimizer):
    """Steps of one size along the sign of the gradient: ``w <- w - learning_rate * sign(g)``.

    Source: Bernstein, Wang, Azizzadenesheli and Anandkumar, signSGD: Compressed Optimisation for Non-Convex
    Problems, 2018, algorithm 1. The default is the authors' learning rate for ImageNet (optax has none).

    Raises:
        HyperparameterError: a complex parameter.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> step = ow.compile(ow.optimizer.SignSGD(0.25).minimize(lambda w: w**2, jnp.float32(1.0)))
        >>> state, out = step(step.init(jnp.float32(1.0)))
        >>> float(state.parameters)
        0.75
    """

    learning_rate: Hyperparameter = 1e-4

    def init(self, parameter: Any) -> Slots:
        expect_real(self, parameter, "SGD")
        return {}

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        return parameter - self.learning_rate * jnp.sign(gradient), slots


class Signum(Optimizer):
    """Steps of one size along the sign of a running mean of the gradients.

    ``m <- beta * m + (1 - beta) * g``, then ``w <- w - learning_rate * sign(m)``.

    Source: Bernstein, Wang, Azizzadenesheli and Anandkumar, signSGD: Compressed Optimisation for Non-Convex
    Problems, 2018, algorithm 2. The defaults are the authors' for ImageNet, ``beta`` also that of optax.

    Raises:
        HyperparameterError: a complex parameter.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.optimizer.Signum(0.25).minimize(lambda w: w**2, jnp.float32(1.0))
        >>> [v.name for v in program.state]
        ['w', 'learning_rate', 'beta', 'step', 'w/mean']
    """

    learning_rate: Hyperparameter = 1e-4
    beta: Hyperparameter = 0.9
    below_one: ClassVar[tuple[str, ...]] = ("beta",)

    def init(self, parameter: Any) -> Slots:
        expect_real(self, parameter, "Momentum")
        return {"mean": jnp.zeros_like(parameter)}

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        mean = self.beta * slots["mean"] + (1 - self.beta) * gradient
        return parameter - self.learning_rate * jnp.sign(mean), {"mean": mean}


class Lion(Optimizer):
    """The sign of a running mean that weighs the newest gradient more than the mean it keeps does.

    ``w <- w - learning_rate * (sign(beta1 * m + (1 - beta1) * g) + weight_decay * w)``, then
    ``m <- beta2 * m + (1 - beta2) * g``.

    Source: Chen et al., Symbolic Discovery of Optimization Algorithms, 2023, algorithm 2. Defaults as there;
    the decay of 0 is that of the authors' code and of Keras (optax: 1e-3). The learning rate wants to be 3 to
    10 times smaller than Adam's, the decay larger by as much.

    Raises:
        HyperparameterError: a complex parameter.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> step = ow.compile(ow.Lion(0.25, weight_decay=1.0).minimize(lambda w: w**2, jnp.float32(1.0)))
        >>> state, out = step(step.init(jnp.float32(1.0)))
        >>> float(state.parameters)
        0.5
    """

    learning_rate: Hyperparameter = 1e-4
    beta1: Hyperparameter = 0.9
    beta2: Hyperparameter = 0.99
    weight_decay: Hyperparameter = 0.0
    below_one: ClassVar[tuple[str, ...]] = ("beta1", "beta2")

    def init(self, parameter: Any) -> Slots:
        expect_real(self, parameter, "AdamW")
        return {"mean": jnp.zeros_like(parameter)}

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        mean = slots["mean"]
        direction = jnp.sign(self.beta1 * mean + (1 - self.beta1) * gradient)
        new = parameter - self.learning_rate * (direction + self.weight_decay * parameter)
        return new, {"mean": self.beta2 * mean + (1 - self.beta2) * gradient}


class Rprop(Optimizer):
    """Every number has a step size, which grows while its gradient keeps its sign; for whole batches.

    With ``c = sign(g) * sign(previous g)``: ``size <- clip(size * eta_plus, smallest, largest)`` where
    ``c > 0``; ``size <- clip(size * eta_minus, smallest, largest)`` and ``g <- 0`` where ``c < 0``; then
    ``w <- w - size * sign(g)``. The first sizes are the learning rate.

    Source: Riedmiller and Braun, A Direct Adaptive Method for Faster Backpropagation Learning: The RPROP
    Algorithm, 1993, section 3, in the variant iRprop- of Igel and Huesken, Improving the Rprop Learning
    Algorithm, 2000, section 2, as torch has it: a step that went too far is not taken back. (optax takes each
    step one step later.) Defaults as in the papers and both libraries, the learning rate that of torch.

    Raises:
        HyperparameterError: ``eta_plus`` below 1, ``eta_minus`` not below 1, or a complex parameter.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> step = ow.compile(ow.optimizer.Rprop(0.5, eta_plus=2.0).minimize(lambda w: w, jnp.float32(0.0)))
        >>> state = step.init(jnp.float32(0.0))
        >>> for _ in range(3):
        ...     state, out = step(state)
        >>> float(state.parameters), float(state["w/size"])
        (-3.5, 2.0)
    """

    learning_rate: Hyperparameter = 1e-2
    eta_minus: Hyperparameter = 0.5
    eta_plus: Hyperparameter = 1.2
    smallest: Hyperparameter = 1e-6
    largest: Hyperparameter = 50.0
    below_one: ClassVar[tuple[str, ...]] = ("eta_minus",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.eta_plus) and self.eta_plus < 1:
            raise HyperparameterError(f"Rprop: eta_plus is {self.eta_plus}. It must be at least 1.")

    def init(self, parameter: Any) -> Slots:
        expect_real(self, parameter, "Adam")
        return {"gradient": jnp.zeros_like(parameter), "size": jnp.zeros_like(parameter)}

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        size = jnp.where(slots["size"] == 0, self.learning_rate, slots["size"])
        sameness = jnp.sign(gradient) * jnp.sign(slots["gradient"])
        changed = jnp.clip(
            size * jnp.where(sameness > 0, self.eta_plus, self.eta_minus), self.smallest, self.largest
        )
        size = jnp.where(sameness == 0, size, changed)
        gradient = jnp.where(sameness < 0, 0, gradient)
        return parameter - size * jnp.sign(gradient), {"gradient": gradient, "size": size}
