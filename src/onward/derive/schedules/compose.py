"""Schedules made of values and of other schedules, one after the other in time."""

# ruff: noqa: N801 - a person calls these classes like functions

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY
from typing import Any

import jax
import jax.numpy as jnp

from onward.core.errors import HyperparameterError
from onward.core.structure import describe
from onward.derive.schedules.base import Schedule
from onward.derive.schedules.checks import Steps, Value, increasing, number, sequence
from onward.derive.schedules.curve import part

Step = Callable[[Any], Any]
"""Any function of the step."""


class constant(Schedule):
    """The same value at every step.

    It differs from a number, which becomes a Variable that can be set while training: this is fixed.

    Args:
        value: the value.

    Raises:
        HyperparameterError: the value is negative or not finite.

    Example:
        >>> import onward as ow
        >>> ow.schedule.constant(0.1)([0, 7]).tolist()
        [0.10000000149011612, 0.10000000149011612]
    """

    value: Value

    def _at(self, n: jax.Array) -> Any:
        return self.value


class piecewise(Schedule):
    """One value after the other: ``values[i]`` from step ``boundaries[i - 1]`` until ``boundaries[i]``.

    A boundary is the first step of the next value, as in torch (``MultiStepLR``), Paddle
    (``PiecewiseDecay``) and optax, which take factors in place of values; in Keras
    (``PiecewiseConstantDecay``) it is the last step of the value before.

    Source: He et al., Deep Residual Learning for Image Recognition, 2015, section 3.4 (a tenth whenever the
    error stays).

    Args:
        values: the values, one more than there are boundaries.
        boundaries: steps counted from the beginning, increasing.

    Raises:
        HyperparameterError: not as many values as boundaries and one, boundaries that do not increase, or
            a value that is negative or not finite.

    Example:
        >>> import onward as ow
        >>> ow.schedule.piecewise([1.0, 0.5, 0.25], boundaries=[2, 3])([0, 1, 2, 3, 4]).tolist()
        [1.0, 1.0, 0.5, 0.25, 0.25]
    """

    values: Sequence[float]
    _: KW_ONLY
    boundaries: Sequence[int]

    def _check(self) -> None:
        values = tuple(
            number("piecewise", "a value", v) for v in sequence("piecewise", "values", self.values)
        )
        if not values:
            raise HyperparameterError("piecewise: there are no values; expected at least one: [0.1, 0.01].")
        object.__setattr__(self, "values", values)
        boundaries = increasing("piecewise", self.boundaries, len(values), "values")
        object.__setattr__(self, "boundaries", boundaries)

    def _at(self, n: jax.Array) -> Any:
        value: Any = self.values[0]
        for boundary, following in zip(self.boundaries, self.values[1:], strict=True):
            value = jnp.where(n < boundary, value, following)
        return value


class join(Schedule):
    """One schedule after the other, each counting from 0 when its turn comes.

    As ``optax.join_schedules``, and as torch's ``SequentialLR``, whose schedules are factors.

    Args:
        schedules: schedules, other functions of the step, or numbers.
        boundaries: the first step of each schedule but the first, counted from the beginning, increasing.

    Raises:
        HyperparameterError: no schedules, not one boundary fewer than schedules, or boundaries that do not
            increase.

    Example:
        >>> import onward as ow
        >>> slowly = ow.schedule.join([ow.schedule.linear(0.0, 1.0, steps=2), 0.5], boundaries=[2])
        >>> slowly, slowly([0, 1, 2, 3]).tolist()
        (join((linear(0.0, 1.0, steps=2), constant(0.5)), boundaries=(2,)), [0.0, 0.5, 0.5, 0.5])
    """

    schedules: Sequence[Step | float]
    _: KW_ONLY
    boundaries: Sequence[int]

    def _check(self) -> None:
        given = sequence("join", "schedules", self.schedules)
        if not given:
            raise HyperparameterError("join: there are no schedules; expected at least one.")
        object.__setattr__(self, "schedules", tuple(as_schedule("join", s) for s in given))
        boundaries = increasing("join", self.boundaries, len(given), "schedules")
        object.__setattr__(self, "boundaries", boundaries)

    def _at(self, n: jax.Array) -> Any:
        first, *others = (s for s in self.schedules if callable(s))
        value = first(n)
        for boundary, following in zip(self.boundaries, others, strict=True):
            value = jnp.where(n < boundary, value, following(jnp.maximum(n - boundary, 0)))
        return value


class warmup(Schedule):
    """A line from ``begin`` to where a schedule begins, then that schedule from its step 0.

    ``begin + (schedule(0) - begin) n / steps`` while ``n < steps``, then ``schedule(n - steps)``, as
    Paddle's ``LinearWarmup``. With ``begin=0`` the first update changes nothing. (The schedules with an
    argument ``warmup`` count it as a part of their ``steps``.)

    Source: Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017, section 2.2.

    Args:
        schedule: a schedule, any other function of the step, or a number.
        steps: how long the line is.
        begin: the value at step 0.

    Raises:
        HyperparameterError: a number that is negative or not finite, or a schedule that is none.

    Example:
        >>> import onward as ow
        >>> ow.schedule.warmup(ow.schedule.exponential(1.0, rate=0.5), steps=2)([0, 1, 2, 3, 4]).tolist()
        [0.0, 0.5, 1.0, 0.5, 0.25]
    """

    schedule: Step | float
    _: KW_ONLY
    steps: Steps
    begin: Value = 0.0

    def _check(self) -> None:
        object.__setattr__(self, "schedule", as_schedule("warmup", self.schedule))

    def _at(self, n: jax.Array) -> Any:
        assert callable(self.schedule)
        done, top = jnp.minimum(n, self.steps), self.schedule(jnp.zeros((), jnp.int32))
        rising = self.begin * part(self.steps - done, self.steps) + top * part(done, self.steps)
        rising = jnp.where(n == 0, self.begin, rising)
        return jnp.where(n < self.steps, rising, self.schedule(jnp.maximum(n - self.steps, 0)))


def as_schedule(owner: str, given: Any) -> Step:
    """A function of the step as it is, a number as a constant one."""
    if isinstance(given, type) or not (callable(given) or hasattr(given, "__float__")):
        raise HyperparameterError(
            f"{owner}: {describe(given)} is not a schedule; expected one, such as linear(0.1, steps=100), "
            "another function of the step, or a number."
        )
    return given if callable(given) else constant(given)
