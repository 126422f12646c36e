"""SOAP: Adam in the eigenbasis that Shampoo finds."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from onward.core.words import UpdateType
from onward.derive.optimizer import Optimizer
from onward.derive.optimizers.arithmetic import bias_correction, squarable, squared
from onward.derive.optimizers.checks import check_counts
from onward.derive.optimizers.matrices import HIGHEST, along, gram
from onward.derive.rule import Hyperparameter, Slots


class SOAP(Optimizer):
    """Adam on rotated gradients; the rotation of every axis follows the eigenvectors of Shampoo's matrices.

    For an axis i: ``L_i <- shampoo_beta * L_i + (1 - shampoo_beta) * G_i G_i^H``, where ``G_i`` has axis i as
    rows and everything else as columns, and ``Q_i`` its eigenvectors. ``rotated(X)`` is X multiplied by
    ``Q_i^H`` along every axis i (of a matrix: ``Q_L^T X Q_R``). ``M <- beta1 M + (1 - beta1) G``;
    ``V <- beta2 V + (1 - beta2) rotated(G)**2``; then, of t updates,
    ``N = rotated(M) / (1 - beta1**t) / (sqrt(V / (1 - beta2**t)) + epsilon)`` and
    ``W <- W - learning_rate * (N rotated back)``. After every ``every``-th step one round of power
    iteration follows: ``Q_i <- the Q of qr(L_i Q_i)``.

    The first step only finds the first ``Q_i``, with the largest eigenvalue first, and moves nothing, as a
    basis that is made from the gradient it rotates would distort V; t counts the steps after it. Axes
    longer than ``max_size``, vectors and scalars are not rotated: for a vector this is Adam. Eigenvectors
    of equal eigenvalues are arbitrary, so where a gradient leaves more than one direction of an axis empty,
    two machines may take different, equally good steps.

    Source: Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam, 2024, algorithms 3 and 4; the
    first step, the bias correction and the defaults are those of the authors' code, which besides sorts
    the eigenvectors before each qr and decays weights. optax, torch and Keras have no SOAP.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SOAP(3e-3).minimize(lambda w: jnp.sum(w**2), jnp.ones((2, 3)))
        >>> [v.name for v in program.state if "basis" in v.name]
        ['w/basis_0', 'w/basis_1']
    """

    type: ClassVar[UpdateType] = UpdateType.PER_MATRIX
    learning_rate: Hyperparameter = 3e-3
    beta1: Hyperparameter = 0.95
    beta2: Hyperparameter = 0.95
    shampoo_beta: Hyperparameter = 0.95
    epsilon: Hyperparameter = 1e-8
    every: int = 10
    max_size: int = 10_000
    below_one: ClassVar[tuple[str, ...]] = ("beta1", "beta2", "shampoo_beta")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_counts(self, "every", "max_size")

    def init(self, parameter: Any) -> Slots:
        factors = {}
        for axis in self.rotating(parameter):
            one = jnp.eye(parameter.shape[axis], dtype=parameter.dtype)
            factors[f"statistics_{axis}"] = jnp.zeros_like(one)
            factors[f"basis_{axis}"] = one
        variance = jnp.zeros_like(jnp.abs(parameter))
        return {"mean": jnp.zeros_like(parameter), "variance": variance, **factors}

    def rotating(self, parameter: Any) -> list[int]:
        """The axes that are rotated."""
        if parameter.ndim < 2 or parameter.size == 0:
            return []
        return [axis for axis, length in enumerate(parameter.shape) if length <= self.max_size]

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        bases = {axis: slots[f"basis_{axis}"] for axis in self.rotating(parameter)}
        direction, moments = self.adam(gradient, slots, bases)
        is_first = self.step == 0
        moments = {name: jnp.where(is_first, slots[name], value) for name, value in moments.items()}
        moved = jnp.where(is_first, parameter, parameter - self.learning_rate * direction)
        return moved, {**moments, **self.factors(gradient, slots, bases)}

    def adam(self, gradient: Any, slots: Slots, bases: dict[int, Any]) -> tuple[Any, dict[str, Any]]:
        """The direction of Adam, found in the bases and rotated back, and the moments it leaves."""
        gradient = squarable(gradient)
        mean = self.beta1 * slots["mean"] + (1 - self.beta1) * gradient
        square = squared(squarable(_rotated(gradient, bases)))
        variance = self.beta2 * slots["variance"] + (1 - self.beta2) * square
        t = jnp.maximum(self.step, 1)
        scale = jnp.sqrt(variance / bias_correction(self.beta2, t)) + self.epsilon
        direction = _rotated(mean, bases) / bias_correction(self.beta1, t) / scale
        for axis, basis in bases.items():
            direction = along(basis, direction, axis)
        return direction, {"mean": mean, "variance": variance}

    def factors(self, gradient: Any, slots: Slots, bases: dict[int, Any]) -> dict[str, Any]:
        """The statistics with this gradient, and the bases for the next."""
        statistics = {
            axis: self.shampoo_beta * slots[f"statistics_{axis}"]
            + (1 - self.shampoo_beta) * gram(gradient, axis)
            for axis in bases
        }
        when = jnp.where(self.step == 0, 2, jnp.where(self.step % self.every == 0, 1, 0))
        new = lax.switch(when, (lambda *_: bases, _turned, _eigenvectors), statistics, bases)
        kept = {f"statistics_{axis}": matrix for axis, matrix in statistics.items()}
        return kept | {f"basis_{axis}": basis for axis, basis in new.items()}


def _rotated(array: Any, bases: dict[int, Any]) -> Any:
    for axis, basis in bases.items():
        array = along(basis.conj().T, array, axis)
    return array


def _turned(statistics: dict[int, Any], bases: dict[int, Any]) -> dict[int, Any]:
    """One round of power iteration, of all eigenvectors at once."""
    products = {i: jnp.matmul(statistics[i], basis, precision=HIGHEST) for i, basis in bases.items()}
    return {i: jnp.linalg.qr(product)[0] for i, product in products.items()}


def _eigenvectors(statistics: dict[int, jax.Array], bases: dict[int, Any]) -> dict[int, Any]:
    """The eigenvectors themselves, that of the largest eigenvalue first."""
    return {i: jnp.linalg.eigh(matrix)[1][:, ::-1] for i, matrix in statistics.items()}
