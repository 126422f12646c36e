"""Rules that look at the way an optimizer went, and take less of it, or go back."""

from __future__ import annotations

from typing import Any, ClassVar

import jax.numpy as jnp

from onward.core.words import UpdateType
from onward.derive.rule import Hyperparameter, ParameterRule, Slots, expect_steps


class Lookahead(ParameterRule):
    """At every ``every``-th step the parameters go back a part of the way they went since the last time.

    ``slow <- slow + share (w - slow)`` and ``w <- slow``. The slots of the inner optimizer stay as they are.

    Source: Zhang et al., Lookahead Optimizer: k steps forward, 1 step back, 2019, algorithm 1.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> optimizer = ow.SGD(1.0, rules=[ow.rule.Lookahead(0.5, every=2)])
        >>> step = ow.compile(optimizer.minimize(lambda w: -w, jnp.float32(0)))
        >>> state = step.init(jnp.float32(0))
        >>> ways = []
        >>> for _ in range(4):
        ...     state, _ = step(state)
        ...     ways.append(float(state.parameters))
        >>> ways
        [1.0, 1.0, 2.0, 2.0]
    """

    share: Hyperparameter = 0.5
    every: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        expect_steps(self, "every")

    def init(self, parameter: Any) -> Slots:
        """Where the parameter was when it last went back."""
        return {"slow": parameter}

    def update(self, parameter: Any, updated: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        """The parameter, gone back if it is time."""
        slow = slots["slow"]
        now = (self.step + 1) % self.every == 0
        met = slow + self.share * (updated - slow)
        return jnp.where(now, met, updated), {"slow": jnp.where(now, met, slow)}


class Cautious(ParameterRule):
    """Numbers that the optimizer would move against their gradient stay where they are.

    With ``mask = (w - w') g > 0`` (w' is what the optimizer made of w):
    ``w <- w + (w' - w) mask / max(mean(mask), epsilon)``. Put it before a decoupled weight decay, which is
    not to be masked.

    Source: Liang et al., Cautious Optimizers: Improving Training with One Line of Code, 2024, algorithm 1.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> optimizer = ow.AdamW(1e-3, rules=[ow.rule.Cautious()])
        >>> program = optimizer.minimize(lambda w: jnp.sum(w**2), jnp.ones(2))
        >>> [target.op.type for target in program.updates]
        ['count', 'adam_w', 'cautious']
    """

    type: ClassVar[UpdateType] = UpdateType.PER_MATRIX
    epsilon: Hyperparameter = 1e-3

    def update(self, parameter: Any, updated: Any, gradient: Any, slots: Slots) -> tuple[Any, Slots]:
        """The parameter, moved where the gradient agrees."""
        way = updated - parameter
        agrees = jnp.real(jnp.conj(gradient) * way) < 0
        share = jnp.mean(agrees, dtype=jnp.abs(way).dtype) if way.size else jnp.ones((), jnp.abs(way).dtype)
        return parameter + jnp.where(agrees, way, 0) / jnp.maximum(share, self.epsilon), slots
