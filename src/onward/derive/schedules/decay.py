"""Schedules that reach their last value after a known number of steps, and stay there."""

# ruff: noqa: N801 - a person calls these classes like functions

from __future__ import annotations

from dataclasses import KW_ONLY
from typing import Any

import jax
import jax.numpy as jnp

from onward.derive.schedules.base import Schedule
from onward.derive.schedules.checks import Count, Factor, Steps, Value, fits, one_of
from onward.derive.schedules.curve import (
    SHAPES,
    CurvePhase,
    along,
    half_wave,
    mixed,
    part,
    powered,
    real,
    straight,
)


class linear(Schedule):
    """A line from ``begin`` to ``end``: ``begin + (end - begin) n / steps``, down or up.

    As ``optax.linear_schedule``. Torch's ``LinearLR`` has factors of the learning rate in place of values,
    and its first one is 1/3.

    Source: as old as the method; see Bottou, Large-Scale Machine Learning with Stochastic Gradient
    Descent, 2010, for why the rate has to fall.

    Args:
        begin: the value at step 0.
        end: the value from step ``steps`` on.
        steps: how many steps lie between.

    Raises:
        HyperparameterError: a number that is negative or not finite.

    Example:
        >>> import onward as ow
        >>> ow.schedule.linear(1.0, 0.5, steps=2)([0, 1, 2, 3]).tolist()
        [1.0, 0.75, 0.5, 0.5]
    """

    begin: Value
    end: Value = 0.0
    _: KW_ONLY
    steps: Steps

    def _at(self, n: jax.Array) -> Any:
        return along(n, CurvePhase(self.steps, self.begin, self.end, straight))


class polynomial(Schedule):
    """A power of the part that is left: ``end + (begin - end) (1 - n / steps)^power``.

    With ``cycle``, ``steps`` is rounded up to the next multiple that is at least ``n``, so that the value
    rises again after each ``steps``, less each time, as in Paddle's and Keras' ``PolynomialDecay``. Their
    ``end`` is 1e-4 by default, and their ``power`` is 1; torch's ``PolynomialLR`` ends at 0; optax has no
    cycle.

    Source: Liu, Rabinovich and Berg, ParseNet: Looking Wider to See Better, 2015, section 4 (``power`` 0.9 in
    Chen et al., DeepLab, 2016).

    Args:
        begin: the value at step 0.
        end: the value from step ``steps`` on; with ``cycle``, at every multiple of it.
        steps: how many steps lie between.
        power: the exponent; 1 is a line.
        cycle: rise again.

    Raises:
        HyperparameterError: a number that is negative or not finite, or a ``power`` of 0.

    Example:
        >>> import onward as ow
        >>> ow.schedule.polynomial(1.0, steps=4, power=2)([0, 1, 2, 3, 4, 5]).tolist()
        [1.0, 0.5625, 0.25, 0.0625, 0.0, 0.0]
    """

    begin: Value
    end: Value = 0.0
    _: KW_ONLY
    steps: Steps
    power: Factor = 1.0
    cycle: bool = False

    def _at(self, n: jax.Array) -> Any:
        shape = powered(straight, self.power)
        if not self.cycle:
            return along(n, CurvePhase(self.steps, self.begin, self.end, shape))
        rounds = jnp.maximum((n - 1) // self.steps + 1, 1).astype(real())
        left = jnp.where(n == 0, self.steps, -n % self.steps)
        value = mixed(
            self.begin, self.end, shape(part(left, self.steps) / rounds, part(n, self.steps) / rounds)
        )
        return jnp.where(n == 0, self.begin, jnp.where(left == 0, self.end, value))


class cosine(Schedule):
    """A line up from ``begin`` to ``peak``, then half a period of a cosine down to ``end``.

    ``end + (peak - end) ((1 + cos(pi x)) / 2)^power``, where ``x`` is the part of the steps after the warm-up
    that is gone.

    ``steps`` counts the warm-up, as ``decay_steps`` of ``optax.warmup_cosine_decay_schedule`` does; Keras'
    ``CosineDecay`` counts it extra. The last value is ``end`` itself, where optax and Keras take ``alpha``,
    its ratio to ``peak``. Torch's ``CosineAnnealingLR`` rises again after ``T_max``; this one stays.

    Source: Loshchilov and Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, 2017, equation 5,
    without restarts; the warm-up from Goyal et al., 2017.

    Args:
        peak: the value after the warm-up; without one, at step 0.
        steps: how many steps it is to ``end``, the warm-up included.
        warmup: how many of them the warm-up takes.
        begin: the value at step 0, where there is a warm-up.
        end: the value from step ``steps`` on.
        power: the exponent of the cosine.

    Raises:
        HyperparameterError: a number that is negative or not finite, or a warm-up that is not shorter than
            the whole.

    Example:
        >>> import onward as ow
        >>> ow.schedule.cosine(1.0, steps=6, warmup=2)([0, 1, 2, 4, 6, 7]).round(3).tolist()
        [0.0, 0.5, 1.0, 0.5, 0.0, 0.0]
    """

    peak: Value
    _: KW_ONLY
    steps: Steps
    warmup: Count = 0
    begin: Value = 0.0
    end: Value = 0.0
    power: Factor = 1.0

    def _check(self) -> None:
        fits("cosine", self.steps, 1, warmup=self.warmup)

    def _at(self, n: jax.Array) -> Any:
        falling = CurvePhase(self.steps - self.warmup, self.peak, self.end, powered(half_wave, self.power))
        return along(n, CurvePhase(self.warmup, self.begin, self.peak, straight), falling)


class wsd(Schedule):
    """Warm-up, stable, decay: up to ``peak``, a long time there, and down to ``end`` in the last steps.

    A line for ``warmup`` steps, ``peak`` until ``steps - decay``, then, with ``x`` the part of the decay that
    is gone, ``end + (peak - end) w(x)`` where ``w`` is ``1 - x`` (linear), ``(1 + cos(pi x)) / 2`` (cosine)
    or ``1 - sqrt(x)`` (sqrt).

    Neither optax, torch nor Keras has it under one name.

    Source: Hu et al., MiniCPM, 2024, section 4; the shape ``sqrt``: Hägele et al., Scaling Laws and
    Compute-Optimal Training Beyond Fixed Training Durations, 2024, section 3.

    Args:
        peak: the value between warm-up and decay.
        steps: how many steps it is to ``end``, warm-up and decay included.
        decay: how many of them, at the end, the decay takes.
        warmup: how many of them, at the beginning, the warm-up takes.
        begin: the value at step 0, where there is a warm-up.
        end: the value from step ``steps`` on.
        shape: the form of the decay: ``"linear"``, ``"cosine"`` or ``"sqrt"``.

    Raises:
        HyperparameterError: a number that is negative or not finite, a warm-up and a decay that are longer
            than the whole, or an unknown shape.

    Example:
        >>> import onward as ow
        >>> ow.schedule.wsd(1.0, steps=10, warmup=2, decay=4)([0, 1, 2, 6, 8, 10, 11]).tolist()
        [0.0, 0.5, 1.0, 1.0, 0.5, 0.0, 0.0]
    """

    peak: Value
    _: KW_ONLY
    steps: Steps
    decay: Steps
    warmup: Count = 0
    begin: Value = 0.0
    end: Value = 0.0
    shape: str = "linear"

    def _check(self) -> None:
        one_of("wsd", "shape", self.shape, tuple(SHAPES))
        fits("wsd", self.steps, 0, warmup=self.warmup, decay=self.decay)

    def _at(self, n: jax.Array) -> Any:
        return along(
            n,
            CurvePhase(self.warmup, self.begin, self.peak, straight),
            CurvePhase(self.steps - self.warmup - self.decay, self.peak, self.peak, straight),
            CurvePhase(self.decay, self.peak, self.end, SHAPES[self.shape]),
        )
