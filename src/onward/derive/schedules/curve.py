"""Curves from one value to another over a number of steps, exact at both ends.

A shape says how much of each value there is, given which part of the way is ``left`` and which ``gone``.
Both come from differences of integers, so neither a late step nor a small value loses digits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import pi
from typing import Any, NamedTuple

import jax.numpy as jnp

Shape = Callable[[Any, Any], tuple[Any, Any]]


class CurvePhase(NamedTuple):
    """So many steps on the way from one value to another."""

    steps: int
    begin: float
    end: float
    shape: Shape


def real() -> Any:
    """The dtype that schedules compute in: float32, float64 under ``jax_enable_x64``."""
    return jnp.result_type(float)


def along(n: Any, *phases: CurvePhase) -> Any:
    """The values at steps ``n`` of phases one after the other; the last value stays.

    >>> along(jnp.arange(6), CurvePhase(2, 0.0, 1.0, straight), CurvePhase(2, 1.0, 0.5, straight)).tolist()
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.5]
    """
    long = [phase for phase in phases if phase.steps]
    value, start = _between(n, long[0]), long[0].steps
    for phase in long[1:]:
        value = jnp.where(n < start, value, _between(n - start, phase))
        start += phase.steps
    return value


def _between(n: Any, phase: CurvePhase) -> Any:
    """The values of one phase, whatever ``n``; a division by a constant is inexact when compiled."""
    steps, begin, end, shape = phase
    if begin == end:
        return jnp.full(n.shape, begin, real())
    done = jnp.clip(n, 0, steps)
    value = mixed(begin, end, shape((steps - done).astype(real()) / steps, part(done, steps)))
    return jnp.where(done == 0, begin, jnp.where(done == steps, end, value))


def mixed(begin: Any, end: Any, weights: tuple[Any, Any]) -> Any:
    """So much of one value and so much of the other."""
    return begin * weights[0] + end * weights[1]


def part(n: Any, steps: Any) -> Any:
    """Which part of the steps ``n`` are, as a real number."""
    return n.astype(real()) / steps


def straight(left: Any, gone: Any) -> tuple[Any, Any]:
    """A line."""
    return left, gone


def half_wave(left: Any, gone: Any) -> tuple[Any, Any]:
    """Half a period of a cosine: ``(1 + cos(pi gone)) / 2``, as a square, which keeps the digits near 0."""
    return jnp.square(jnp.sin(pi / 2 * left)), jnp.square(jnp.sin(pi / 2 * gone))


def root(left: Any, gone: Any) -> tuple[Any, Any]:
    """``1 - sqrt(gone)``: steep first."""
    return left / (1 + jnp.sqrt(gone)), jnp.sqrt(gone)


def powered(shape: Shape, power: float) -> Shape:
    """The weight of the first value to a power."""
    if power == 1:
        return shape

    def weights(left: Any, gone: Any) -> tuple[Any, Any]:
        rest = shape(left, gone)[0] ** power
        return rest, 1 - rest

    return weights


SHAPES: Mapping[str, Shape] = {"linear": straight, "cosine": half_wave, "sqrt": root}
"""The shapes by the name that a person writes."""
