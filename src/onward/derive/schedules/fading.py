"""Schedules that fade forever: they need not know how long the training is."""

# ruff: noqa: N801 - a person calls these classes like functions

from __future__ import annotations

import math
from dataclasses import KW_ONLY
from typing import Any

import jax
import jax.numpy as jnp

from onward.core.errors import HyperparameterError
from onward.derive.schedules.base import Schedule
from onward.derive.schedules.checks import Factor, Steps, Value
from onward.derive.schedules.curve import part, real


class exponential(Schedule):
    """Multiplied by ``rate`` every so many steps: ``begin rate^(n / every)``.

    With ``staircase``, ``n / every`` is rounded down, so that the value changes at once. As optax's
    ``exponential_decay``, Keras' ``ExponentialDecay``, the early Paddle's ``exponential_decay``; torch's
    ``ExponentialLR`` has ``every=1``, its ``StepLR`` is the staircase. A ``rate`` above 1 grows, for finding
    a learning rate. ``rate`` enters as its logarithm: 0.999999 rounded to float32 would be 3 % off after a
    million steps.

    Source: Krizhevsky, Sutskever and Hinton, ImageNet Classification with Deep Convolutional Neural Networks,
    2012, section 5, who took the steps of a staircase by hand.

    Args:
        begin: the value at step 0.
        rate: the factor.
        every: after how many steps the factor has acted once.
        staircase: change only every so many steps.
        end: a value that it does not pass.

    Raises:
        HyperparameterError: a number that is negative or not finite, an ``end`` on the wrong side of
            ``begin``, or a ``rate`` above 1 without an ``end``.

    Example:
        >>> import onward as ow
        >>> ow.schedule.exponential(1.0, rate=0.25, every=2, end=0.125)([0, 1, 2, 4]).round(4).tolist()
        [1.0, 0.5, 0.25, 0.125]
        >>> ow.schedule.exponential(1.0, rate=0.25, every=2, staircase=True)([0, 1, 2, 3]).round(4).tolist()
        [1.0, 1.0, 0.25, 0.25]
    """

    begin: Value
    _: KW_ONLY
    rate: Factor
    every: Steps = 1
    staircase: bool = False
    end: Value | None = None

    def _check(self) -> None:
        if self.rate > 1 and self.end is None:
            raise HyperparameterError(
                f"exponential: rate is {self.rate}, with which it grows without bound; expected at most 1, "
                f"or an end to stop at: end={10 * self.begin or 1.0:g}."
            )
        _check_end(self, self.rate > 1)

    def _at(self, n: jax.Array) -> Any:
        value = self.begin * jnp.exp(math.log(self.rate) * _elapsed(self, n))
        return _stopped(self, value, self.rate > 1)


class _FadingByRate(Schedule):
    """The base of what fades at a rate, which may be any."""

    begin: Value
    _: KW_ONLY
    rate: Value
    every: Steps = 1
    staircase: bool = False
    end: Value | None = None

    def _check(self) -> None:
        _check_end(self)


class natural_exp(_FadingByRate):
    """The natural exponential: ``begin exp(-rate n / every)``.

    The ``natural_exp_decay`` of the early Paddle and of TensorFlow 1; elsewhere it is written as an
    exponential.

    Source: the early Paddle's ``natural_exp_decay``.

    Args:
        begin: the value at step 0.
        rate: how fast it fades.
        every: what ``rate`` is counted by.
        staircase: change only every so many steps.
        end: a value that it does not pass.

    Raises:
        HyperparameterError: a number that is negative or not finite, or an ``end`` above ``begin``.

    Example:
        >>> import onward as ow
        >>> [f"{x:.4f}" for x in ow.schedule.natural_exp(1.0, rate=0.5)([0, 1, 2])]
        ['1.0000', '0.6065', '0.3679']
    """

    def _at(self, n: jax.Array) -> Any:
        return _stopped(self, self.begin * jnp.exp(-self.rate * _elapsed(self, n)))


class inverse_time(_FadingByRate):
    """The inverse of time: ``begin / (1 + rate n / every)``.

    As Keras' ``InverseTimeDecay`` and the early Paddle's ``inverse_time_decay``. It is the rate for which
    Robbins and Monro prove convergence: its sum diverges, that of its squares does not.

    Source: Robbins and Monro, A Stochastic Approximation Method, 1951.

    Args:
        begin: the value at step 0.
        rate: how fast it fades.
        every: what ``rate`` is counted by.
        staircase: change only every so many steps.
        end: a value that it does not pass.

    Raises:
        HyperparameterError: a number that is negative or not finite, or an ``end`` above ``begin``.

    Example:
        >>> import onward as ow
        >>> ow.schedule.inverse_time(1.0, rate=0.5, every=10)([0, 20, 60]).tolist()
        [1.0, 0.5, 0.25]
    """

    def _at(self, n: jax.Array) -> Any:
        return _stopped(self, self.begin / (1 + self.rate * _elapsed(self, n)))


class noam(Schedule):
    """A line up, then down with the root of the step: ``scale d_model^-0.5 min(t^-0.5, t warmup^-1.5)``.

    The paper counts steps from 1, so ``t`` is ``n + 1``, and the first value is not 0. The largest is
    ``scale / sqrt(d_model warmup)``, at step ``warmup - 1``. Paddle's ``NoamDecay`` begins at ``t = 0`` with
    0; optax, torch and Keras do not have it.

    Source: Vaswani et al., Attention Is All You Need, 2017, section 5.3.

    Args:
        d_model: the width of the model.
        warmup: how many steps it rises.
        scale: a factor, such as 2 in later versions of the authors' code.

    Raises:
        HyperparameterError: a ``d_model`` or a ``warmup`` that is not a whole number of at least 1.

    Example:
        >>> import onward as ow
        >>> ow.schedule.noam(4, warmup=4, scale=4.0)([0, 1, 3, 15, 63]).tolist()
        [0.25, 0.5, 1.0, 0.5, 0.25]
    """

    d_model: Steps
    _: KW_ONLY
    warmup: Steps
    scale: Value = 1.0

    def _at(self, n: jax.Array) -> Any:
        t = n.astype(real()) + 1
        peak = self.scale / math.sqrt(self.d_model * self.warmup)
        return peak * jnp.minimum(t / self.warmup, jnp.sqrt(self.warmup / t))


_Fading = exponential | _FadingByRate


def _elapsed(schedule: _Fading, n: jax.Array) -> Any:
    """How often ``every`` steps have gone by."""
    if schedule.staircase:
        return (n // schedule.every).astype(real())
    return part(n, schedule.every)


def _stopped(schedule: _Fading, value: Any, grows: bool = False) -> Any:
    """The value, not beyond ``end``."""
    if schedule.end is None:
        return value
    return jnp.minimum(value, schedule.end) if grows else jnp.maximum(value, schedule.end)


def _check_end(schedule: _Fading, grows: bool = False) -> None:
    """Raise ``HyperparameterError`` if it would begin beyond its ``end``."""
    begin, end = schedule.begin, schedule.end
    if end is not None and (end < begin if grows else end > begin):
        raise HyperparameterError(
            f"{type(schedule).__name__}: end is {end} and begin is {begin}, from which it "
            f"{'grows' if grows else 'falls'}; expected an end {'above' if grows else 'below'} begin."
        )
