"""Gradients from where the loss is highest nearby."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from onward.core.words import UpdateType
from onward.derive.lengths import length
from onward.derive.rule import GradientRule, Hyperparameter, Slots
from onward.derive.update.loss import Loss


class SAM(GradientRule):
    """Sharpness-aware minimization: the gradients at ``w + radius g / |g|`` in place of those at w.

    The norm is that of all gradients together; with ``adaptive`` the way is ``w**2 g / |w g|`` (ASAM). The
    forward and backward pass run a second time inside the op, on the same batch.

    Source: Foret et al., Sharpness-Aware Minimization for Efficiently Improving Generalization, 2021,
    algorithm 1; Kwon et al., ASAM, 2021, algorithm 1 (radius 0.5 to 1 there).

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SGD(0.1, rules=[ow.SAM(0.5)]).minimize(lambda w: jnp.sum(w**2), jnp.ones(1))
        >>> step = ow.compile(program)
        >>> state, _ = step(step.init(jnp.ones(1)))
        >>> [round(x, 3) for x in state.parameters.tolist()]         # 1 - 0.1 * 2 * 1.5
        [0.7]
    """

    type: ClassVar[UpdateType] = UpdateType.ACROSS
    evaluates_loss: ClassVar[bool] = True
    radius: Hyperparameter = 0.05
    adaptive: bool = False

    def update(  # type: ignore[override]
        self,
        parameter: Sequence[Any],
        gradient: Sequence[Any],
        slots: Sequence[Slots],
        loss: Loss,
    ) -> tuple[Sequence[Any], Sequence[Slots]]:
        """The gradients of the same batch at the perturbed parameters."""
        scales = [jnp.abs(p) if self.adaptive else jnp.ones_like(jnp.abs(p)) for p in parameter]
        steep = [s * g for s, g in zip(scales, gradient, strict=True)]
        its = length(steep)
        factor = self.radius / jnp.maximum(its.scaled, np.finfo(its.scaled.dtype).tiny)
        way = [g * its.down.astype(s.dtype) for s, g in zip(scales, steep, strict=True)]
        top = [p + (factor.astype(s.dtype) * s) * g for p, s, g in zip(parameter, scales, way, strict=True)]
        return loss.value_and_gradient(*top)[1], slots
