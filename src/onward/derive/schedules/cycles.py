"""Schedules that rise and fall: once, or again and again."""

# ruff: noqa: N801 - a person calls these classes like functions

from __future__ import annotations

import math
from dataclasses import KW_ONLY
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.errors import HyperparameterError
from onward.derive.schedules.base import Schedule
from onward.derive.schedules.checks import LAST, Count, Factor, Steps, Value, fits, one_of
from onward.derive.schedules.curve import SHAPES, CurvePhase, along, half_wave, mixed, part, real, straight


class restarts(Schedule):
    """Half a period of a cosine from ``peak`` towards ``end``, again and again.

    ``end + (peak_k - end) (1 + cos(pi x)) / 2`` where ``x`` is the part of the cycle that is gone. Cycle
    ``k`` has ``every growth^k`` steps and begins at ``peak_k = max(end, peak rate^k)``.

    As torch's ``CosineAnnealingWarmRestarts`` (``T_0``, ``T_mult``; its peaks do not fall) and Keras'
    ``CosineDecayRestarts`` (``t_mul``, by default 2, and ``m_mul``). Optax' ``sgdr_schedule`` lists every
    cycle, each with a warm-up. For one warm-up in front write ``warmup(restarts(...), steps=...)``.

    Source: Loshchilov and Hutter, SGDR: Stochastic Gradient Descent with Warm Restarts, 2017, equation 5.

    Args:
        peak: the value at step 0.
        every: how many steps the first cycle has.
        growth: how many times as long each cycle is as the one before, a whole number.
        rate: what the peak is multiplied by at each restart, at most 1.
        end: the value that every cycle falls to.

    Raises:
        HyperparameterError: a number that is negative or not finite, a ``growth`` below 1, a ``rate`` above
            1.

    Example:
        >>> import onward as ow
        >>> ow.schedule.restarts(1.0, every=2, growth=2, rate=0.5)([0, 1, 2, 4, 6, 10, 14]).round(4).tolist()
        [1.0, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125]
    """

    peak: Value
    _: KW_ONLY
    every: Steps
    growth: Steps = 1
    rate: Factor = 1.0
    end: Value = 0.0

    def _check(self) -> None:
        _check_rate(self)

    def _at(self, n: jax.Array) -> Any:
        place, length, scale = self._equal(n) if self.growth == 1 else self._growing(n)
        gone = part(place, length)
        return mixed(jnp.maximum(self.peak * scale, self.end), self.end, half_wave(1 - gone, gone))

    def _equal(self, n: jax.Array) -> tuple[Any, Any, Any]:
        """Place in the cycle, length and height of it, where all are of one length."""
        return n % self.every, self.every, _faded(self.rate, n // self.every)

    def _growing(self, n: jax.Array) -> tuple[Any, Any, Any]:
        """The same where they grow: there are at most 32 of them before the last step."""
        starts, lengths = [0], [self.every]
        while starts[-1] + lengths[-1] <= LAST:
            starts.append(starts[-1] + lengths[-1])
            lengths.append(lengths[-1] * self.growth)
        k = jnp.sum(n[..., None] >= jnp.asarray(starts[1:], jnp.int32), axis=-1)
        heights = np.float64(self.rate) ** np.arange(len(starts))
        start, length, height = (
            jnp.asarray(table, dtype)[k]
            for table, dtype in ((starts, jnp.int32), (lengths, real()), (heights, real()))
        )
        return n - start, length, height


class one_cycle(Schedule):
    """Up to ``peak`` and down again, far below where it began: one cycle for a whole training.

    From ``begin`` to ``peak`` in ``warmup`` steps, then to ``end``, each along a half wave or a line. With
    ``decay`` it comes down to ``begin`` first, and to ``end`` in the last ``decay`` steps.

    As torch's ``OneCycleLR`` (``pct_start`` 0.3, ``div_factor`` 25, ``final_div_factor`` 1e4; it is at
    ``end`` one step earlier) and optax' ``cosine_onecycle_schedule``; optax' linear one is ``shape="linear"``
    with a ``decay`` of the last 15 %. Let the momentum follow ``cyclic`` or another one the other way round,
    as the paper does.

    Source: Smith and Topin, Super-Convergence: Very Fast Training of Neural Networks Using Large Learning
    Rates, 2018; the half waves from fast.ai.

    Args:
        peak: the largest value.
        steps: how many steps it is to ``end``.
        warmup: how many of them it rises; three tenths unless given.
        decay: how many of them, at the end, it falls from ``begin`` to ``end``.
        begin: the value at step 0; ``peak / 25`` unless given.
        end: the value from step ``steps`` on; ``begin / 10000`` unless given.
        shape: ``"cosine"`` or ``"linear"``.

    Raises:
        HyperparameterError: a number that is negative or not finite, a warm-up and a decay that are not
            shorter than the whole, or an unknown shape.

    Example:
        >>> import onward as ow
        >>> cycle = ow.schedule.one_cycle(1.0, steps=10, warmup=4, begin=0.5, end=0.0, shape="linear")
        >>> cycle([0, 2, 4, 7, 10]).tolist()
        [0.5, 0.75, 1.0, 0.5, 0.0]
    """

    peak: Value
    _: KW_ONLY
    steps: Steps
    warmup: Count | None = None
    decay: Count = 0
    begin: Value | None = None
    end: Value | None = None
    shape: str = "cosine"

    def _check(self) -> None:
        one_of("one_cycle", "shape", self.shape, ("cosine", "linear"))
        fits("one_cycle", self.steps, 1, warmup=self._rise, decay=self.decay)

    @property
    def _rise(self) -> int:
        return 3 * self.steps // 10 if self.warmup is None else self.warmup

    def _at(self, n: jax.Array) -> Any:
        begin = self.peak / 25 if self.begin is None else self.begin
        end = begin / 10_000 if self.end is None else self.end
        shape, down = SHAPES[self.shape], self.steps - self._rise - self.decay
        return along(
            n,
            CurvePhase(self._rise, begin, self.peak, shape),
            CurvePhase(down, self.peak, begin if self.decay else end, shape),
            CurvePhase(self.decay, begin, end, shape),
        )


class cyclic(Schedule):
    """A line from ``begin`` to ``peak`` and back, again and again.

    ``begin + (peak - begin) h s``, where ``h`` rises from 0 to 1 and falls to 0 in each cycle, and ``s`` is 1
    (``mode="triangular"``), ``1 / 2^k`` in cycle ``k`` (``"triangular2"``) or ``rate^n`` (``"exp_range"``).

    The paper's stepsize is half of ``every``. Torch's ``CyclicLR`` takes ``step_size_up`` and
    ``step_size_down``, here ``warmup`` and the rest of ``every``, and moves the momentum the other way too;
    give the optimizer ``momentum=cyclic(0.95, 0.85, every=...)`` for that. Optax and Keras do not have it.

    Source: Smith, Cyclical Learning Rates for Training Neural Networks, 2017, section 3.

    Args:
        begin: the value at the beginning of each cycle.
        peak: the value in the middle of the first.
        every: how many steps a cycle has.
        warmup: how many of them it goes towards ``peak``; half of them unless given.
        mode: what becomes of the height.
        rate: with ``"exp_range"``, what the height is multiplied by at each step, at most 1.

    Raises:
        HyperparameterError: a number that is negative or not finite, an unknown mode, a ``rate`` above 1 or
            with another mode, or a ``warmup`` that is not shorter than ``every``.

    Example:
        >>> import onward as ow
        >>> ow.schedule.cyclic(0.0, 1.0, every=4, mode="triangular2")([0, 1, 2, 3, 4, 6, 8]).tolist()
        [0.0, 0.5, 1.0, 0.5, 0.0, 0.5, 0.0]
    """

    begin: Value
    peak: Value
    _: KW_ONLY
    every: Steps
    warmup: Count | None = None
    mode: str = "triangular"
    rate: Factor = 1.0

    def _check(self) -> None:
        one_of("cyclic", "mode", self.mode, ("triangular", "triangular2", "exp_range"))
        _check_rate(self)
        if self.rate != 1 and self.mode != "exp_range":
            raise HyperparameterError(
                f"cyclic: rate is {self.rate} and mode is {self.mode!r}, which has no rate; write "
                "mode='exp_range'."
            )
        if self._rise >= self.every:
            raise HyperparameterError(
                f"cyclic: warmup is {self.warmup} and every is {self.every}; expected a warmup that leaves "
                f"at least one step of a cycle to fall: at most {self.every - 1}."
            )

    @property
    def _rise(self) -> int:
        return self.every // 2 if self.warmup is None else self.warmup

    def _at(self, n: jax.Array) -> Any:
        rise = CurvePhase(self._rise, 0.0, 1.0, straight)
        height = along(n % self.every, rise, CurvePhase(self.every - self._rise, 1.0, 0.0, straight))
        if self.mode == "triangular2":
            height *= jnp.exp2(-(n // self.every).astype(real()))
        elif self.mode == "exp_range":
            height *= _faded(self.rate, n)
        return mixed(self.begin, self.peak, (1 - height, height))


def _faded(rate: float, n: Any) -> Any:
    """``rate`` to the power of a count."""
    return jnp.exp(math.log(rate) * n.astype(real()))


def _check_rate(schedule: restarts | cyclic) -> None:
    if schedule.rate > 1:
        raise HyperparameterError(
            f"{type(schedule).__name__}: rate is {schedule.rate}, with which it grows without bound; "
            "expected a number above 0 and at most 1."
        )
