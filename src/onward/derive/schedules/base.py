"""A schedule is a frozen dataclass that computes a number from an int32 step.

>>> import onward as ow
>>> decay = ow.schedule.linear(1.0, 0.0, steps=4)
>>> decay(1), decay([0, 1, 2, 3, 4, 5]).tolist()
(Array(0.75, dtype=float32), [1.0, 0.75, 0.5, 0.25, 0.0, 0.0])
"""

# ruff: noqa: N801 - a person calls these classes like functions: schedule.cosine(...)

from __future__ import annotations

from dataclasses import MISSING, dataclass, fields
from typing import Any, Self, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.errors import ArgumentError, HyperparameterError, known_as
from onward.core.structure import describe
from onward.derive.schedules.checks import LAST, Factor, checked

_LAST_FLOAT = 2**31 - 128  # the largest float32 that is an int32


@dataclass_transform(frozen_default=True)
@dataclass(frozen=True, repr=False)
class Schedule:
    """The base of every schedule, which is a function of the step.

    A subclass is a frozen dataclass without being told so. Its numbers are checked by their annotation (see
    ``checks``), what must hold between them by ``_check``; ``_at`` computes.

    Example:
        >>> import onward as ow
        >>> isinstance(ow.schedule.constant(0.1), Schedule), 0.5 * ow.schedule.constant(0.1)
        (True, 0.5 * constant(0.1))

    Raises:
        HyperparameterError: a number that is not finite, negative, or does not fit the others.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(frozen=True, repr=False)(cls)

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Refuse an argument that does not exist, and offer the nearest."""
        for name in options:
            if name not in (known := cls.__dataclass_fields__):
                raise HyperparameterError(f"{cls.__name__} has no argument {name!r}. {known_as(name, known)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for f in fields(self):
            value = checked(type(self).__name__, f.name, str(f.type), getattr(self, f.name))
            object.__setattr__(self, f.name, value)
        self._check()

    def __call__(self, step: Any) -> jax.Array:
        """The value at a step, float32; at each of an array of steps, to plot it.

        Under ``jax_enable_x64`` it is float64. A step below 0 counts as 0, and of a step that is not a whole
        number the whole part.

        Raises:
            ArgumentError: the step is not a number.
        """
        n = _whole(step)
        return jnp.broadcast_to(jnp.asarray(self._at(n), jnp.result_type(float)), n.shape)

    def __mul__(self, factor: float) -> Schedule:
        """The schedule whose values are ``factor`` times as large."""
        return scaled(factor, self)

    __rmul__ = __mul__

    def __repr__(self) -> str:
        given = (f for f in fields(self) if f.default is MISSING or getattr(self, f.name) != f.default)
        shown = (
            f"{f.name}={getattr(self, f.name)!r}" if f.kw_only else repr(getattr(self, f.name)) for f in given
        )
        return f"{type(self).__name__}({', '.join(shown)})"

    def _check(self) -> None:
        """Raise ``HyperparameterError`` unless the fields fit together."""

    def _at(self, n: jax.Array) -> Any:
        """The values at int32 steps of at least 0."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its values are")


class scaled(Schedule):
    """A number times a schedule; written ``2 * schedule``."""

    factor: Factor
    schedule: Schedule

    def _at(self, n: jax.Array) -> Any:
        return self.factor * self.schedule(n)

    def __repr__(self) -> str:
        return f"{self.factor} * {self.schedule!r}"


def _whole(step: Any) -> jax.Array:
    """Steps as int32 of at least 0; what lies beyond the last int32 becomes the last."""
    x = step if isinstance(step, jax.Array) else np.asarray(step)
    real = jnp.issubdtype(x.dtype, jnp.floating)
    if not real and not jnp.issubdtype(x.dtype, jnp.integer):
        raise ArgumentError(
            f"A schedule was called with {describe(step)}; expected a step, int32, or an array of them."
        )
    most = _LAST_FLOAT if real else min(LAST, np.iinfo(x.dtype).max)
    clip = jnp.clip if isinstance(x, jax.Array) else np.clip
    return jnp.asarray(clip(x, 0, most).astype(np.int32))
