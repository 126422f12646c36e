"""Gradient descent without a learning rate: each step is the distance travelled over the gradients seen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import jax.numpy as jnp

from onward.core.words import UpdateType
from onward.derive.lengths import length
from onward.derive.optimizer import Optimizer
from onward.derive.optimizers.arithmetic import squared
from onward.derive.optimizers.checks import check_positive
from onward.derive.optimizers.norms import quotient
from onward.derive.rule import Hyperparameter, Slots


class DoG(Optimizer):
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
    learning_rate: Hyperparameter = 1.0
    initial_distance: Hyperparameter = 1e-6
    averaging: float | None = 8.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, self.averaging)

    def init(self, parameter: Any) -> Slots:
        return _start(parameter, self.averaging)

    def update(
        self,
        parameters: tuple[Any, ...],
        gradients: tuple[Any, ...],
        slots: tuple[Slots, ...],
        hyperparameters: SimpleNamespace,
    ) -> tuple[tuple[Any, ...], tuple[Slots, ...]]:
        return _update(parameters, gradients, slots, hyperparameters, self.averaging)

    def evaluated(self, parameter: Any, slots: Slots, hyperparameters: SimpleNamespace) -> Any:
        return parameter if self.averaging is None else slots["average"]


class LDoG(Optimizer):
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
    learning_rate: Hyperparameter = 1.0
    initial_distance: Hyperparameter = 1e-6
    averaging: float | None = 8.0

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self, self.averaging)

    def init(self, parameter: Any) -> Slots:
        return _start(parameter, self.averaging)

    def update(
        self, parameter: Any, gradient: Any, slots: Slots, hyperparameters: SimpleNamespace
    ) -> tuple[Any, Slots]:
        moved, new = _update((parameter,), (gradient,), (slots,), hyperparameters, self.averaging)
        return moved[0], new[0]

    def evaluated(self, parameter: Any, slots: Slots, hyperparameters: SimpleNamespace) -> Any:
        return parameter if self.averaging is None else slots["average"]


def _start(parameter: Any, averaging: float | None) -> Slots:
    """The slots before the first step; the sum of squares is the share of this parameter."""
    zero = jnp.zeros((), jnp.abs(parameter).dtype)
    slots = {"first": parameter, "squares": zero, "distance": zero}
    return slots if averaging is None else {**slots, "average": parameter}


def _update(
    parameters: tuple[Any, ...],
    gradients: tuple[Any, ...],
    slots: tuple[Slots, ...],
    h: SimpleNamespace,
    averaging: float | None,
) -> tuple[tuple[Any, ...], tuple[Slots, ...]]:
    """One step of all parameters whose norms are taken together."""
    first = [s["first"] for s in slots]
    away = _norm([w - w0 for w, w0 in zip(parameters, first, strict=True)])
    least = h.initial_distance * (1 + _norm(first))
    distance = jnp.maximum(jnp.maximum(slots[0]["distance"], away), least)
    squares = [s["squares"] + jnp.sum(squared(g)) for g, s in zip(gradients, slots, strict=True)]
    rate = h.learning_rate * quotient(distance, jnp.sqrt(sum(squares)))
    moved = tuple(w - rate * g for w, g in zip(parameters, gradients, strict=True))
    new = [{**s, "squares": q, "distance": distance} for s, q in zip(slots, squares, strict=True)]
    if averaging is not None:
        share = (1 + averaging) / (h.step + 1 + averaging)
        for w, s in zip(moved, new, strict=True):
            s["average"] = s["average"] + share * (w - s["average"])
    return moved, tuple(new)


def _norm(arrays: list[Any]) -> Any:
    return length(arrays).norm


def _check(optimizer: Optimizer, averaging: float | None) -> None:
    check_positive(optimizer, "initial_distance")
    if averaging is not None:
        optimizer.check_hyperparameter("averaging", averaging)
