"""Muon: momentum whose matrices are made orthogonal."""

from __future__ import annotations

import math
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import jax.numpy as jnp
from jax import lax

from onward.core.errors import HyperparameterError
from onward.core.program import Variable
from onward.core.words import UpdateType
from onward.derive.optimizer import Optimizer
from onward.derive.optimizers.adam import AdamW
from onward.derive.optimizers.checks import check_choice, check_counts
from onward.derive.optimizers.matrices import rows_and_columns
from onward.derive.optimizers.norms import norm
from onward.derive.rule import Hyperparameter, Slots

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(Optimizer):
    """Momentum with the nearest orthogonal matrix as its step, for matrices; another rule for the rest.

    ``B <- momentum * B + G``; ``M = G + momentum * B`` with ``nesterov``, else ``B``;
    ``O = newton_schulz(M)``, about ``U V^T`` of the singular value decomposition ``M = U S V^T``;
    ``W <- W - learning_rate * scale * O``. For a matrix of n rows (inputs) and m columns (outputs),
    ``scale`` is ``sqrt(max(1, m / n))`` with "original", and ``0.2 sqrt(max(m, n))`` with "match_rms", after
    which the step is as large as one of Adam and takes learning rates meant for Adam.

    An array of more axes is flattened to (everything else, last axis), as convolution kernels of JAX have
    their outputs last. So a stack of layers in one array is taken for one tall matrix: keep such layers
    apart. ``route`` sends to ``fallback`` what is not a matrix (fewer than two axes longer than 1) and what
    is an embedding or a head, which the patterns ``aside`` tell by name, in lower case. Given to ``update``
    all the same, a vector is a matrix of one row.

    Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024 (algorithm,
    coefficients, "original"); Liu et al., Muon is Scalable for LLM Training, 2025, equation 4
    ("match_rms"). Defaults are Jordan's, as in optax, which corrects the momentum for its start at zero, and
    updates the rest by NAdamW; torch: learning rate 1e-3, weight decay 0.1.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> params = {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}
        >>> program = ow.trace(lambda p: jnp.sum(p["w"] * p["b"]), params)
        >>> [ow.Muon().route(p).name for p in program.parameters]
        ['adam_w', 'muon']
    """

    type: ClassVar[UpdateType] = UpdateType.PER_MATRIX
    learning_rate: Hyperparameter = 0.02
    momentum: Hyperparameter = 0.95
    nesterov: bool = True
    scale: str = "original"
    steps: int = 5
    aside: tuple[str, ...] = (
        "*embed*",
        "head",
        "head/*",
        "*/head",
        "*/head/*",
        "*lm_head*",
        "*wte*",
        "*wpe*",
        "*logits*",
    )
    fallback: Optimizer = AdamW()
    below_one: ClassVar[tuple[str, ...]] = ("momentum",)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice(self, "scale", ("original", "match_rms"))
        check_counts(self, "steps")
        if not isinstance(self.aside, tuple):
            raise HyperparameterError(f"Muon: aside is {self.aside!r}. Write a tuple of patterns.")
        if getattr(self.fallback, "groups", ()):
            raise HyperparameterError("Muon: fallback has groups. Give them to Muon itself.")
        if not isinstance(self.fallback, Optimizer):
            raise HyperparameterError(
                f"Muon: fallback is {self.fallback!r}. Give an optimizer, such as AdamW(1e-3)."
            )

    def init(self, parameter: Any) -> Slots:
        return {"momentum": jnp.zeros_like(parameter)}

    def update(self, parameter: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        if parameter.size == 0:
            return parameter, slots
        buffer = self.momentum * slots["momentum"] + gradient
        direction = gradient + self.momentum * buffer if self.nesterov else buffer
        matrix = direction.reshape(rows_and_columns(parameter.shape))
        step = self.factor(matrix.shape) * newton_schulz(matrix, self.steps)
        return parameter - self.learning_rate * step.reshape(parameter.shape), {"momentum": buffer}

    def factor(self, shape: tuple[int, ...]) -> float:
        """The factor by which the orthogonal matrix is scaled, from its numbers of rows and columns."""
        rows, columns = shape
        if self.scale == "match_rms":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1, columns / rows))

    def route(self, parameter: Variable) -> Optimizer:
        """This rule for the matrices inside a network, ``fallback`` for everything else."""
        is_matrix = sum(length > 1 for length in parameter.shape) > 1
        is_aside = any(fnmatchcase(parameter.name.lower(), pattern) for pattern in self.aside)
        return self if is_matrix and not is_aside else self.fallback


def newton_schulz(matrix: Any, steps: int = 5) -> Any:
    """The matrix with its singular values moved to about 1, between 0.7 and 1.2, by products alone.

    ``X <- a X + b (X X^H) X + c (X X^H)^2 X``, begun at ``X / |X|``. A matrix of zeros stays.

    Source: Jordan et al., Muon, 2024, "NewtonSchulz5", with its coefficients for (a, b, c).

    Example:
        >>> import jax.numpy as jnp
        >>> x = newton_schulz(jnp.array([[3.0, 0.0], [0.0, 0.02]]))
        >>> [bool(0.65 < s < 1.25) for s in jnp.linalg.svd(x)[1]]
        [True, True]
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.conj().T if is_tall else matrix

    def iterate(_: Any, x: Any) -> Any:
        products = x @ x.conj().T
        return a * x + (b * products + c * products @ products) @ x

    size = norm(wide)
    result = lax.fori_loop(0, steps, iterate, wide / jnp.where(size > 0, size, 1))
    return result.conj().T if is_tall else result
