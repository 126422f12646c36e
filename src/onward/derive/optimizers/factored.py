"""Optimizers that keep the second moment of a matrix as one vector for each of its axes."""

from __future__ import annotations

from functools import reduce
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from onward.core.errors import HyperparameterError
from onward.core.words import UpdateType
from onward.derive.optimizer import Optimizer
from onward.derive.optimizers.arithmetic import squarable, squared
from onward.derive.optimizers.norms import quotient, root_mean_square
from onward.derive.rule import Hyperparameter, Slots


class SM3(Optimizer):
    """Adagrad with an upper bound of the sum of squares, made from one vector for each axis.

    Number i of a parameter lies in one slice of each axis. With ``s`` the sums of the slices,
    ``b_i = min(s of the slices of i) + g_i**2``; ``s = max(b_i in the slice)``; ``d = g / sqrt(b)``, 0 where
    b is 0; ``v <- momentum * v + (1 - momentum) * d``; ``w <- w - learning_rate * v``.
    A vector's slices are its numbers, so for vectors and single numbers this is Adagrad; a convolution
    kernel keeps four vectors.

    Source: Anil, Gupta, Koren and Singer, Memory-Efficient Adaptive Optimization, 2019, algorithm SM3-II;
    the momentum is that of its experiments, as in optax (which also adds 1e-8 to b). The momentum is fixed
    when the Program is derived; at 0 there is no velocity to keep. Torch, Keras and Paddle have no SM3.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.optimizer.SM3(0.1, momentum=0.0).minimize(lambda w: jnp.sum(w**2), jnp.ones((3, 2)))
        >>> [(v.name, v.shape) for v in program.state if "/" in v.name]
        [('w/axis0', (3,)), ('w/axis1', (2,))]
    """

    type: ClassVar[UpdateType] = UpdateType.PER_MATRIX
    learning_rate: Hyperparameter = 0.1
    momentum: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_momentum(self, self.momentum)

    def init(self, parameter: Any) -> Slots:
        real = jnp.abs(parameter).dtype
        sums = {f"axis{i}": jnp.zeros(n, real) for i, n in enumerate(parameter.shape or (1,))}
        return {**sums, "velocity": jnp.zeros_like(parameter)} if self.momentum else sums

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        shape = gradient.shape or (1,)
        others = [tuple(a for a in range(len(shape)) if a != axis) for axis in range(len(shape))]
        sums = [jnp.expand_dims(slots[f"axis{i}"], rest) for i, rest in enumerate(others)]
        bound = reduce(jnp.minimum, sums) + squared(gradient).reshape(shape)
        new = {f"axis{i}": jnp.max(bound, axis=rest, initial=0) for i, rest in enumerate(others)}
        direction = quotient(gradient, jnp.sqrt(bound).reshape(gradient.shape))
        if self.momentum:
            direction = self.momentum * slots["velocity"] + (1 - self.momentum) * direction
            new["velocity"] = direction
        return parameter - self.learning_rate * direction, new


def relative_step(step: jax.Array) -> jax.Array:
    """The learning rate of ``Adafactor`` in its paper: ``min(0.01, 1 / sqrt(t))``, t counted from 1.

    Source: Shazeer and Stern, Adafactor, 2018, algorithm 6.

    Example:
        >>> [round(float(relative_step(step)), 4) for step in (0, 39_999)]
        [0.01, 0.005]
    """
    return jnp.minimum(1e-2, 1 / jnp.sqrt(jnp.asarray(step + 1, jnp.result_type(float))))


class Adafactor(Optimizer):
    """Adam without momentum, its second moment kept as sums of rows and of columns, steps relative to ``w``.

    ``beta = 1 - t**-decay_exponent``, t counted from 1;
    ``r <- beta r + (1 - beta) mean over the columns of (g**2 + epsilon)``; ``c`` the same over the rows;
    ``u = g / sqrt(r c / mean(r))``; ``u <- u / max(1, RMS(u) / clipping_threshold)``;
    ``w <- w - learning_rate * max(minimum_scale, RMS(w)) * u``.
    Of an array with more axes the two largest are rows and columns (of equal ones the last), and there are
    sums for every place on the other axes. Vectors, single numbers and arrays whose second largest axis is
    shorter than ``smallest_axis`` keep their second moment whole.

    Source: Shazeer and Stern, Adafactor: Adaptive Learning Rates with Sublinear Memory Cost, 2018,
    algorithms 4 and 5 with the constants of algorithm 6; the learning rate follows ``relative_step``.
    Give a number for another, and ``parameter_scale=False`` for steps that do not depend on ``w``. Every
    matrix is factored, as in the paper, torch and Keras (optax: ``smallest_axis`` 128). Momentum is fixed
    when the Program is derived and averages the steps, scale included, as in optax; at 0, the paper's
    choice, there is nothing to keep. Optax and torch decay the weights too; Paddle has no Adafactor.

    Raises:
        HyperparameterError: the clipping threshold is 0, or the momentum is not in [0, 1).

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.Adafactor().minimize(lambda w: jnp.sum(w**2), jnp.ones((3, 2)))
        >>> [(v.name, v.shape) for v in program.state if "/" in v.name]
        [('w/columns', (2,)), ('w/rows', (3,))]
    """

    type: ClassVar[UpdateType] = UpdateType.PER_MATRIX
    learning_rate: Hyperparameter = relative_step
    decay_exponent: Hyperparameter = 0.8
    epsilon: Hyperparameter = 1e-30
    minimum_scale: Hyperparameter = 1e-3
    clipping_threshold: Hyperparameter = 1.0
    parameter_scale: bool = True
    momentum: float = 0.0
    smallest_axis: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_momentum(self, self.momentum)
        if self.clipping_threshold == 0:
            raise HyperparameterError(
                "Adafactor: clipping_threshold is 0, which clips every step to nothing. It must be greater "
                "than 0; give a large number not to clip."
            )

    def init(self, parameter: Any) -> Slots:
        real = jnp.abs(parameter).dtype
        axes = self._axes(parameter.shape)
        if axes is None:
            slots = {"variance": jnp.zeros(parameter.shape, real)}
        else:
            rows, columns = axes
            slots = {
                "rows": jnp.zeros(_without(parameter.shape, columns), real),
                "columns": jnp.zeros(_without(parameter.shape, rows), real),
            }
        return {**slots, "velocity": jnp.zeros_like(parameter)} if self.momentum else slots

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        direction, new = self._normalised(gradient, slots)
        direction = direction / jnp.maximum(1, root_mean_square(direction) / self.clipping_threshold)
        scale = jnp.maximum(self.minimum_scale, root_mean_square(parameter)) if self.parameter_scale else 1
        step = self.learning_rate * scale * direction
        if self.momentum:
            step = self.momentum * slots["velocity"] + (1 - self.momentum) * step
            new["velocity"] = step
        return parameter - step, new

    def _normalised(self, gradient: Any, slots: Slots) -> tuple[Any, dict[str, Any]]:
        """The gradient over the root of its running second moment, and that moment."""
        gradient = squarable(gradient)
        beta = 1 - (self.step + 1.0) ** -self.decay_exponent
        energy = squared(gradient) + self.epsilon
        axes = self._axes(gradient.shape)
        if axes is None:
            variance = beta * slots["variance"] + (1 - beta) * energy
            return gradient * jax.lax.rsqrt(variance), {"variance": variance}
        row, column = axes
        rows = beta * slots["rows"] + (1 - beta) * _mean(energy, column)
        columns = beta * slots["columns"] + (1 - beta) * _mean(energy, row)
        # Two roots and not one of r * c: with epsilon alone in both, their product is too small for float32.
        wide = jnp.expand_dims(rows, column)
        share = jax.lax.rsqrt(wide / _mean(wide, row, keepdims=True))
        direction = gradient * share * jax.lax.rsqrt(jnp.expand_dims(columns, row))
        return direction, {"rows": rows, "columns": columns}

    def _axes(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """The axes of rows and of columns; None where the second moment is kept whole."""
        largest = sorted(range(len(shape)), key=lambda axis: (shape[axis], axis))[-2:]
        if len(largest) < 2 or shape[largest[0]] < self.smallest_axis:
            return None
        row, column = sorted(largest)
        return row, column


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def _mean(x: Any, axis: int, keepdims: bool = False) -> Any:
    """The mean along an axis; 0 where that has no places."""
    return jnp.sum(x, axis, keepdims=keepdims) / max(x.shape[axis], 1)


def _check_momentum(optimizer: Optimizer, momentum: float) -> None:
    optimizer.check_hyperparameter("momentum", momentum)
    if momentum >= 1:
        raise HyperparameterError(
            f"{type(optimizer).__name__}: momentum is {momentum}. It must be less than 1."
        )
