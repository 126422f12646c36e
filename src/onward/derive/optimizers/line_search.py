"""Line search: how far to go along a direction downhill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax


class Point(NamedTuple):
    """A point on the graph of a function of one variable: where it is, its value and its slope."""

    step: Any
    value: Any
    slope: Any


class _Search(NamedTuple):
    """Where a search stands: the step lies between ``low``, the best one yet, and ``high``.

    ``high.step`` is infinite as long as no step was too long. ``extra`` belongs to ``low``.
    """

    low: Point
    high: Point
    extra: Any
    trial: Any
    tried: Any
    found: Any


def strong_wolfe(
    evaluate: Callable[[Any], tuple[Point, Any]],
    start: Point,
    extra: Any,
    first: Any,
    decrease: float = 1e-4,
    curvature: float = 0.9,
    evaluations: int = 20,
) -> tuple[Point, Any]:
    """A step that satisfies the strong Wolfe conditions, or else the best one found.

    With f(0) and f'(0) < 0 at ``start``: ``f(a) <= f(0) + decrease * a * f'(0)`` and
    ``|f'(a)| <= curvature * |f'(0)|``. A step that is too long, by its value (NaN included) or by its slope,
    ends the doubling and begins to shrink an interval, by cubic interpolation kept off its ends. Values
    that differ by rounding alone count as equal, without which no step near a minimum would be taken.

    Source: Nocedal and Wright, Numerical Optimization, 2006, algorithms 3.5 and 3.6, as one loop: the
    interval is unbounded until a step was too long. The interpolation is equation 3.59.

    Args:
        evaluate: from a step to the Point there, and whatever else is wanted of the step that is chosen.
        start: the Point at step 0.
        extra: what ``evaluate`` would return besides, at step 0.
        first: the first step to try.
        decrease: how much of the promised decrease must come.
        curvature: how much of the slope may remain.
        evaluations: how often ``evaluate`` is called at most.

    Example:
        >>> import jax.numpy as jnp
        >>> def evaluate(a):
        ...     return Point(a, (a - 3) ** 2, 2 * (a - 3)), ()
        >>> point, _ = strong_wolfe(evaluate, evaluate(jnp.float32(0))[0], (), jnp.float32(0.1))
        >>> abs(float(point.slope)) <= 0.9 * 6
        True
    """
    rounding = 4 * float(np.finfo(start.value.dtype).eps) * jnp.abs(start.value)

    def proceed(search: _Search) -> _Search:
        low, high = search.low, search.high
        at, more = evaluate(search.trial)
        wanted = jnp.minimum(start.value + decrease * at.step * start.slope, low.value)
        is_better = at.value <= wanted + rounding
        is_past = at.slope * (high.step - low.step) >= 0
        new_high = _choose(is_better, _choose(is_past, low, high), at)
        new_low = _choose(is_better, at, low)
        return _Search(
            low=new_low,
            high=new_high,
            extra=_choose(is_better, more, search.extra),
            trial=_next_trial(new_low, new_high),
            tried=search.tried + 1,
            found=is_better & (jnp.abs(at.slope) <= -curvature * start.slope),
        )

    infinite = Point(*(jnp.full_like(x, jnp.inf) for x in start))
    search = _Search(start, infinite, extra, first, jnp.int32(0), jnp.bool_(False))
    end = lax.while_loop(lambda s: ~s.found & (s.tried < evaluations), proceed, search)
    return end.low, end.extra


def _next_trial(low: Point, high: Point) -> Any:
    """Twice the step until one was too long, then the minimum of the cubic between the ends."""
    width = high.step - low.step
    mean = low.slope + high.slope - 3 * (low.value - high.value) / (low.step - high.step)
    root = jnp.sign(width) * jnp.sqrt(mean**2 - low.slope * high.slope)
    share = 1 - (high.slope + root - mean) / (high.slope - low.slope + 2 * root)
    share = jnp.where(jnp.isfinite(share), jnp.clip(share, 0.1, 0.9), 0.5)
    return jnp.where(jnp.isinf(high.step), 2 * low.step, low.step + share * width)


def _choose(condition: Any, yes: Any, no: Any) -> Any:
    """``jnp.where`` for tuples, which may be nested."""
    if isinstance(yes, tuple):
        chosen = [_choose(condition, a, b) for a, b in zip(yes, no, strict=True)]
        return Point(*chosen) if isinstance(yes, Point) else tuple(chosen)
    return jnp.where(condition, yes, no)
