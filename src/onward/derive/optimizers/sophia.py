"""Sophia: momentum divided by an estimate of the curvature, and clipped."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from onward.core.words import UpdateType
from onward.derive.optimizer import Optimizer
from onward.derive.optimizers.arithmetic import expect_real
from onward.derive.optimizers.checks import check_counts
from onward.derive.rule import Hyperparameter, Slots
from onward.derive.update.loss import Loss


class Sophia(Optimizer):
    """Steps of momentum over the diagonal of the Hessian, no number moving more than the learning rate.

    ``m <- beta1 m + (1 - beta1) g``; at every ``every``-th step, with u from the standard normal
    distribution, ``h <- beta2 h + (1 - beta2) u * (H u)``; then ``w <- w - learning_rate * weight_decay * w``
    and ``w <- w - learning_rate * clip(m / max(gamma * h, epsilon), -1, 1)``.

    H is the Hessian of the loss on the batch of this step (of all devices together); ``H u`` costs about two
    gradients, and at the other steps nothing. u depends on ``seed``, the step and the place of the
    parameter among all, so that a run can be repeated. It takes real parameters of any shape.

    Source: Liu et al., Sophia: A Scalable Stochastic Second-order Optimizer for Language Model
    Pre-training, 2023, algorithms 1 (Hutchinson) and 3, and its defaults for Sophia-H. optax has it in
    contrib with ``beta1=0.965``, ``epsilon=1e-8`` and a weight decay of 1e-4; torch and Keras do not.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.optimizer.Sophia(0.1, weight_decay=0.0).minimize(lambda w: w**2, jnp.float32(1.0))
        >>> step = ow.compile(program)
        >>> state, out = step(step.init(jnp.float32(1.0)))
        >>> round(float(state.parameters), 6)
        0.9
    """

    type: ClassVar[UpdateType] = UpdateType.ACROSS
    evaluates_loss: ClassVar[bool] = True
    learning_rate: Hyperparameter = 1e-3
    beta1: Hyperparameter = 0.96
    beta2: Hyperparameter = 0.99
    gamma: Hyperparameter = 0.01
    epsilon: Hyperparameter = 1e-12
    weight_decay: Hyperparameter = 0.2
    every: int = 10
    seed: int = 0
    below_one: ClassVar[tuple[str, ...]] = ("beta1", "beta2")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "every")

    def init(self, parameter: Any) -> Slots:
        expect_real(self, parameter, "AdamW")
        return {"mean": jnp.zeros_like(parameter), "curvature": jnp.zeros_like(parameter)}

    def update(  # type: ignore[override]
        self,
        parameters: tuple[Any, ...],
        gradients: tuple[Any, ...],
        slots: tuple[Slots, ...],
        loss: Loss,
    ) -> tuple[tuple[Any, ...], tuple[Slots, ...]]:
        old = tuple(s["curvature"] for s in slots)
        curvatures = lax.cond(
            self.step % self.every == 0,
            lambda: tuple(
                self.beta2 * kept + (1 - self.beta2) * seen
                for kept, seen in zip(old, hutchinson(loss, parameters, self.seed, self.step), strict=True)
            ),
            lambda: old,
        )
        moved, states = [], []
        for p, g, s, curvature in zip(parameters, gradients, slots, curvatures, strict=True):
            mean = self.beta1 * s["mean"] + (1 - self.beta1) * g
            step = jnp.clip(mean / jnp.maximum(self.gamma * curvature, self.epsilon), -1, 1)
            moved.append(p - self.learning_rate * self.weight_decay * p - self.learning_rate * step)
            states.append({"mean": mean, "curvature": curvature})
        return tuple(moved), tuple(states)


def hutchinson(loss: Loss, parameters: tuple[Any, ...], seed: int, step: Any) -> tuple[Any, ...]:
    """An estimate of the diagonal of the Hessian: ``u * (H u)`` for random u, right on average.

    Source: Hutchinson, A Stochastic Estimator of the Trace of the Influence Matrix, 1989; Liu et al.,
    Sophia, 2023, algorithm 1.

    Example:
        >>> import jax.numpy as jnp
        >>> loss = Loss(lambda w: jnp.sum(w**2))
        >>> [(d >= 0).all().item() for d in hutchinson(loss, (jnp.ones(3),), 0, 0)]
        [True]
    """
    key = jax.random.fold_in(jax.random.key(seed), step)
    probes = tuple(
        jax.random.normal(jax.random.fold_in(key, i), p.shape, p.dtype) for i, p in enumerate(parameters)
    )
    products = loss.hessian_times(parameters, probes)
    return tuple(u * product for u, product in zip(probes, products, strict=True))
