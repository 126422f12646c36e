"""Gradient descent without a learning rate: each step is the distance travelled over the gradients seen."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp

from onward.core.words import UpdateType
from onward.derive.lengths import length
from onward.derive.optimizer import Optimizer
from onward.derive.optimizers.arithmetic import squared
from onward.derive.optimizers.checks import check_positive
from onward.derive.optimizers.norms import quotient
from onward.derive.rule import Hyperparameter, Slots

Arrays = tuple[Any, ...]
AllSlots = tuple[Slots, ...]


class OverGradients(Optimizer):
    """The base of DoG for all parameters and DoG for each: its fields, its slots, and one step."""

    learning_rate: Hyperparameter = 1.0
    initial_distance: Hyperparameter = 1e-6
    averaging: float | None = 8.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, "initial_distance")
        if self.averaging is not None:
            self.check_hyperparameter("averaging", self.averaging)

    def init(self, parameter: Any) -> Slots:
        zero = jnp.zeros((), jnp.abs(parameter).dtype)  # the squares are the share of this parameter
        slots = {"first": parameter, "squares": zero, "distance": zero}
        return slots if self.averaging is None else {**slots, "average": parameter}

    def moved(self, parameters: Arrays, gradients: Arrays, slots: AllSlots) -> tuple[Arrays, AllSlots]:
        """One step of all parameters whose norms are taken together."""
        first = [s["first"] for s in slots]
        away = length([w - w0 for w, w0 in zip(parameters, first, strict=True)]).norm
        least = self.initial_distance * (1 + length(first).norm)
        distance = jnp.maximum(jnp.maximum(slots[0]["distance"], away), least)
        squares = [s["squares"] + jnp.sum(squared(g)) for g, s in zip(gradients, slots, strict=True)]
        rate = self.learning_rate * quotient(distance, jnp.sqrt(sum(squares)))
        moved = tuple(w - rate * g for w, g in zip(parameters, gradients, strict=True))
        new = [{**s, "squares": q, "distance": distance} for s, q in zip(slots, squares, strict=True)]
        if self.averaging is not None:
            share = (1 + self.averaging) / (self.step + 1 + self.averaging)
            for w, s in zip(moved, new, strict=True):
                s["average"] = s["average"] + share * (w - s["average"])
        return moved, tuple(new)

    def evaluated(self, parameter: Any, slots: Slots) -> Any:
        return parameter if self.averaging is None else slots["average"]


class DoG(OverGradients):
    """Gradient descent with steps as long as the way so far over the root of the sum of squared gradients.

    ``r <- max(r, |w - w0|)`` with the first weights ``w0``, at first ``initial_distance * (1 + |w0|)``;
    ``G <- G + |g|**2``; ``w <- w - learning_rate * r / sqrt(G) * g``, the quotient 0 where G is 0. Norms are
    over all parameters. The weights to evaluate are the running average
    ``x <- x + (1 + averaging) / (t + averaging) * (w - x)``, t counted from 1.

    Source: Ivgi, Hinder and Carmon, DoG is SGD's Best Friend: A Parameter-Free Dynamic Step Size Schedule,
    2023, section 2, with the averaging and the constants of its experiments; for networks with batch
    normalisation the authors advise an ``initial_distance`` of 1e-4. ``averaging=None`` keeps no average,
    as in optax, which adds 1e-8 to G. Torch, Keras and Paddle have none.

    Raises:
        HyperparameterError: the initial distance is 0, from which nothing moves, or averaging is negative.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.optimizer.DoG().minimize(lambda w: w**2, jnp.float32(1.0))
        >>> [v.name for v in program.state if "/" in v.name]
        ['w/average', 'w/distance', 'w/first', 'w/squares']
    """

    type: ClassVar[UpdateType] = UpdateType.ACROSS

    def update(self, parameters: Arrays, gradients: Arrays, slots: AllSlots) -> tuple[Arrays, AllSlots]:
        return self.moved(parameters, gradients, slots)


class LDoG(OverGradients):
    """DoG for each layer by itself: norms are over one parameter, whatever its shape.

    The equations of ``DoG``, with ``r``, ``G`` and the first distance of each parameter its own.

    Source: Ivgi, Hinder and Carmon, DoG is SGD's Best Friend: A Parameter-Free Dynamic Step Size Schedule,
    2023, the layer-wise variant of its experiments, which the authors found to come nearer to tuned Adam.
    Optax, torch, Keras and Paddle have none.

    Raises:
        HyperparameterError: the initial distance is 0, from which nothing moves, or averaging is negative.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.optimizer.LDoG(averaging=None).minimize(lambda w: w**2, jnp.float32(1.0))
        >>> [v.name for v in program.state if "/" in v.name]
        ['w/distance', 'w/first', 'w/squares']
    """

    type: ClassVar[UpdateType] = UpdateType.PER_MATRIX

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        moved, new = self.moved((parameter,), (gradient,), (slots,))
        return moved[0], new[0]
