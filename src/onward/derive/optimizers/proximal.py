"""Optimizers that make weights exactly zero: each step ends with the proximal map of an L1 and an L2 term.

The penalty is ``l1 * |w| + l2 / 2 * w**2``, and is part of the rule, not of the loss. Of a complex weight
the absolute value is shrunk and the angle kept.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from onward.derive.optimizer import Optimizer
from onward.derive.optimizers.arithmetic import squared
from onward.derive.optimizers.norms import quotient
from onward.derive.rule import Hyperparameter, Slots


class ProximalGD(Optimizer):
    """Gradient descent, then shrinkage.

    ``p = w - learning_rate * g``;
    ``w <- sign(p) * max(|p| - learning_rate * l1, 0) / (1 + learning_rate * l2)``.

    Source: Duchi and Singer, Efficient Online and Batch Learning Using Forward Backward Splitting, 2009,
    section 5; the same as early Paddle's ``proximal_gd`` and TensorFlow's. Optax and torch have none.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> w = jnp.array([0.25, -1.0])
        >>> step = ow.compile(ow.optimizer.ProximalGD(0.5, l1=1.0).minimize(lambda w: jnp.sum(0 * w), w))
        >>> state, out = step(step.init(w))
        >>> state.parameters.tolist()
        [0.0, -0.5]
    """

    learning_rate: Hyperparameter = 1e-2
    l1: Hyperparameter = 0.0
    l2: Hyperparameter = 0.0

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        moved = parameter - self.learning_rate * gradient
        return _shrunk(moved, self.learning_rate * self.l1) / (1 + self.learning_rate * self.l2), slots


class ProximalAdagrad(Optimizer):
    """Adagrad, then shrinkage.

    ``s <- s + g**2``; ``p = w - learning_rate * g / sqrt(s)``, the quotient 0 where s is 0;
    ``w <- sign(p) * max(|p| - rate * l1, 0) / (1 + rate * l2)`` with ``rate = learning_rate``, or with
    ``rate = learning_rate / sqrt(s)`` for ``scaled_penalty=True``, where a number without a gradient so far
    is not shrunk.

    Source: early Paddle's ``proximal_adagrad``; with ``scaled_penalty`` Duchi, Hazan and Singer, Adaptive
    Subgradient Methods, 2011, section 5.1, which is TensorFlow's ``ProximalAdagrad``. The sum begins at
    ``initial_accumulator``: 0 as in the paper (TensorFlow: 0.1). Optax and torch have none.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> w = jnp.array([0.125, 1.0])
        >>> step = ow.compile(ow.optimizer.ProximalAdagrad(0.25, l1=1.0).minimize(lambda w: w[1], w))
        >>> state, out = step(step.init(w))
        >>> state.parameters.tolist()
        [0.0, 0.5]
    """

    learning_rate: Hyperparameter = 1e-2
    l1: Hyperparameter = 0.0
    l2: Hyperparameter = 0.0
    initial_accumulator: float = 0.0
    scaled_penalty: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_hyperparameter("initial_accumulator", self.initial_accumulator)

    def init(self, parameter: Any) -> Slots:
        return {"sum": jnp.full_like(jnp.abs(parameter), self.initial_accumulator)}

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        total = slots["sum"] + squared(gradient)
        scaled = quotient(self.learning_rate, jnp.sqrt(total))
        rate = scaled if self.scaled_penalty else self.learning_rate
        moved = parameter - scaled * gradient
        return _shrunk(moved, rate * self.l1) / (1 + rate * self.l2), {"sum": total}


class FTRL(Optimizer):
    """Follow the regularized leader: the weights that would have been best against all gradients so far.

    ``c' = (beta + sqrt(n + g**2)) / learning_rate``; ``z <- z + g - (c' - c) * w``;
    ``w <- -sign(z) * max(|z| - l1, 0) / (c' + l2)``, and w itself where the denominator is 0;
    ``n <- n + g**2``. Before the first step ``z`` and ``c`` are 0, so that the leader starts from the first
    weights; the paper starts from ``w = 0``, where this makes no difference. ``c`` remembers the learning
    rate of its step, which may change; at a learning rate of 0 nothing moves.

    Source: McMahan et al., Ad Click Prediction: a View from the Trenches, 2013, algorithm 1; ``beta`` is the
    1 that it advises, fixed when the Program is derived. Early Paddle's ``ftrl`` and Keras' leave ``beta``
    out unless asked, shrink by twice the ``l2``, and do not remember the learning rate; ``n`` begins at 0 in
    the paper and in Paddle (Keras: 0.1). Optax and torch have none.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> w, g = jnp.array([0.0, 0.0]), jnp.array([0.5, -2.0])
        >>> step = ow.compile(ow.optimizer.FTRL(0.5, beta=0.0, l1=1.0).minimize(lambda w: w @ g, w))
        >>> state, out = step(step.init(w))
        >>> state.parameters.tolist()
        [0.0, 0.25]
    """

    learning_rate: Hyperparameter = 0.1
    beta: float = 1.0
    l1: Hyperparameter = 0.0
    l2: Hyperparameter = 0.0
    initial_accumulator: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_hyperparameter("beta", self.beta)
        self.check_hyperparameter("initial_accumulator", self.initial_accumulator)

    def init(self, parameter: Any) -> Slots:
        total = jnp.full_like(jnp.abs(parameter), self.initial_accumulator)
        return {"linear": jnp.zeros_like(parameter), "sum": total, "rate": jnp.zeros((), total.dtype)}

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        total = slots["sum"] + squared(gradient)
        before = quotient(self.beta + jnp.sqrt(slots["sum"]), slots["rate"])
        now = quotient(self.beta + jnp.sqrt(total), self.learning_rate)
        linear = slots["linear"] + gradient - (now - before) * parameter
        leader = jnp.where(now + self.l2 > 0, quotient(_shrunk(-linear, self.l1), now + self.l2), parameter)
        new = {"linear": linear, "sum": total, "rate": self.learning_rate}
        moves = self.learning_rate > 0
        kept = {name: jnp.where(moves, value, slots[name]) for name, value in new.items()}
        return jnp.where(moves, leader, parameter), kept


def _shrunk(x: Any, by: Any) -> Any:
    """Numbers closer to zero by so much, and zero where they are closer already."""
    return jnp.where(jnp.abs(x) > by, x - jnp.sign(x) * by, 0)
