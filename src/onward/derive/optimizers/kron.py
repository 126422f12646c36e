"""PSGD-Kron: a preconditioner fitted by gradient descent on triangular factors."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.linalg import solve_triangular

from onward.core.errors import HyperparameterError
from onward.core.words import UpdateType
from onward.derive.optimizer import Optimizer
from onward.derive.optimizers.arithmetic import bias_correction
from onward.derive.optimizers.checks import check_counts
from onward.derive.optimizers.matrices import HIGHEST, along, axes_of, fold, gram, unfold
from onward.derive.optimizers.norms import norm
from onward.derive.rule import Hyperparameter, Slots


class PSGDKron(Optimizer):
    """Momentum, whitened by a Kronecker product of one upper triangular factor per axis.

    ``M <- momentum * M + (1 - momentum) * G``, and ``m`` is M corrected for its start at zero. At a refit a
    probe v is drawn from the normal distribution; A is ``m + damping * v`` multiplied by ``Q_i`` along every
    axis i, B is v multiplied by ``Q_i**(-H)``, and
    ``Q_i <- Q_i - fit_rate * triu(A_i A_i^H - B_i B_i^H) Q_i / |A_i A_i^H + B_i B_i^H|``, where ``A_i`` has
    axis i as rows and everything else as columns and ``|.|`` is a lower bound of the largest eigenvalue.
    This descends on ``E[m^H P m + v^H P**-1 v]``, which is least where P whitens m. The direction D is m
    multiplied by ``Q_i^H Q_i`` along every axis, scaled down where the root of its mean square exceeds
    ``clip``; ``W <- W - learning_rate * D``.

    Refits happen at each of the first ``warmup`` steps and at every ``every``-th after them, in place of
    the falling probability of common implementations. The probe depends on ``seed``, the step and the
    shape only, so that a run can be repeated; equal shapes share it. After a refit the factors are
    scaled to equal largest entries, which leaves their product as it was. Vectors, scalars and axes longer
    than ``max_size`` have a diagonal factor.

    Source: Li, Preconditioned Stochastic Gradient Descent, 2018 (the criterion), and Preconditioner on
    Matrix Lie Group for SGD, 2019 (triangular Kronecker factors); the normalised step is that of
    Pooladzandi and Li, Curvature-Informed SGD via General Purpose Lie-Group Preconditioners, 2024. Momentum
    before whitening, clip and rates are those of the kron_torch implementation. optax, torch and Keras
    have no PSGD.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.optimizer.PSGDKron(1e-3).minimize(lambda w: jnp.sum(w**2), jnp.ones((2, 3)))
        >>> [v.name for v in program.state if "/" in v.name]
        ['w/factor_0', 'w/factor_1', 'w/mean']
    """

    type: ClassVar[UpdateType] = UpdateType.PER_MATRIX
    learning_rate: Hyperparameter = 1e-3
    momentum: Hyperparameter = 0.9
    fit_rate: Hyperparameter = 0.1
    damping: Hyperparameter = 1e-9
    clip: Hyperparameter = 1.1
    warmup: int = 500
    every: int = 33
    max_size: int = 8192
    seed: int = 0
    below_one: ClassVar[tuple[str, ...]] = ("momentum", "fit_rate")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "every", "max_size")
        if self.warmup < 0:
            raise HyperparameterError(f"PSGDKron: warmup is {self.warmup}. It must be at least 0.")

    def init(self, parameter: Any) -> Slots:
        factors = {}
        for axis, length in enumerate(axes_of(parameter)):
            if parameter.ndim < 2 or length > self.max_size:
                factors[f"factor_{axis}"] = jnp.ones(length, jnp.abs(parameter).dtype)
            else:
                factors[f"factor_{axis}"] = jnp.eye(length, dtype=parameter.dtype)
        return {"mean": jnp.zeros_like(parameter), **factors}

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        if parameter.size == 0:
            return parameter, slots
        mean = self.momentum * slots["mean"] + (1 - self.momentum) * gradient
        unbiased = (mean / bias_correction(self.momentum, self.step + 1)).reshape(axes_of(parameter))
        factors = self.refitted(unbiased, slots)
        direction = unbiased
        for axis, factor in enumerate(factors):
            direction = along(_adjoint(factor), along(factor, direction, axis), axis)
        size = norm(direction) / direction.size**0.5
        direction = direction * jnp.where(size > self.clip, self.clip / jnp.where(size > 0, size, 1), 1)
        kept = {f"factor_{axis}": factor for axis, factor in enumerate(factors)}
        return parameter - self.learning_rate * direction.reshape(parameter.shape), {"mean": mean, **kept}

    def refitted(self, array: Any, slots: Slots) -> tuple[Any, ...]:
        """The factors, one step closer to whitening the array if a refit is due."""
        factors = tuple(slots[f"factor_{axis}"] for axis in range(array.ndim))

        def refit() -> tuple[Any, ...]:
            v = probe(self.seed, self.step, array.shape, array.dtype)
            return fitted(factors, array + self.damping * v, v, self.fit_rate)

        is_due = (self.step < self.warmup) | (self.step % self.every == 0)
        new: tuple[Any, ...] = lax.cond(is_due, refit, lambda: factors)
        return new


def probe(seed: int, step: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Numbers from the standard normal distribution that depend on the seed, the step and the shape only.

    >>> bool((probe(0, 3, (2,), jnp.float32) == probe(0, 3, (2,), jnp.float32)).all())
    True
    """
    return jax.random.normal(jax.random.fold_in(jax.random.key(seed), step), shape, dtype)


def fitted(factors: tuple[Any, ...], array: Any, v: Any, rate: Any) -> tuple[Any, ...]:
    """The factors after one step of descent on how far they are from whitening the array."""
    whitened, inverse = array, v
    for axis, factor in enumerate(factors):
        whitened = along(factor, whitened, axis)
        inverse = _solved(factor, inverse, axis)
    new = []
    for axis, factor in enumerate(factors):
        a, b = (gram(x, axis, diagonal=factor.ndim == 1) for x in (whitened, inverse))
        if factor.ndim == 1:
            new.append(factor - rate * (a - b) / jnp.max(a + b) * factor)
        else:
            slope = jnp.matmul(jnp.triu(a - b), factor, precision=HIGHEST)
            new.append(factor - rate / _largest_eigenvalue(a + b) * slope)
    largest = jnp.stack([jnp.max(jnp.abs(factor)) for factor in new])
    common = jnp.exp(jnp.mean(jnp.log(largest)))
    return tuple(factor * (common / size) for factor, size in zip(new, largest, strict=True))


def _solved(factor: Any, array: Any, axis: int) -> Any:
    """The array multiplied by the inverse of the factor's adjoint along one axis."""
    if factor.ndim == 1:
        return along(1 / factor, array, axis)
    solution = solve_triangular(factor, unfold(array, axis), trans="C")
    return fold(solution, axis, array.shape)


def _largest_eigenvalue(matrix: Any) -> Any:
    """A lower bound: how much a positive semidefinite matrix stretches its longest column."""
    scale = jnp.max(jnp.abs(matrix))
    scaled = matrix / scale
    column = scaled[:, jnp.argmax(jnp.sum(jnp.abs(scaled) ** 2, axis=0))]
    return scale * norm(jnp.matmul(scaled, column / norm(column), precision=HIGHEST))


def _adjoint(factor: Any) -> Any:
    return factor if factor.ndim == 1 else factor.conj().T
