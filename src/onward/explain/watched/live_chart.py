"""The curves of a training, one small panel each, as SVG for a notebook or a file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil, log10
from typing import Any, NamedTuple

import numpy as np

from onward.explain.style import FONT, colour, text, with_plain_colours

_WIDTH, _HEIGHT, _LEFT, _TOP, _ACROSS = 280, 130, 60, 30, 3
_PLACES = 280
_STYLE = f"""
.ow-live text {{ font-family: {FONT}; font-size: 10px; fill: var(--ow-faint); }}
.ow-live .title {{ font-size: 12px; fill: var(--ow-text); }}
"""


class Curve(NamedTuple):
    """A number over the steps at which it was measured."""

    name: str
    steps: Any
    values: Any

    def add(self, step: int, value: float) -> None:
        """Append one measurement."""
        self.steps.append(float(step))
        self.values.append(value)

    def measured(self, always: bool = False) -> Curve:
        """The same without the steps in which it was not measured, as arrays; with all, if it always was."""
        steps, values = np.asarray(self.steps, float), np.asarray(self.values, float)
        here = ~np.isnan(values) | always
        return Curve(self.name, steps[here], values[here])


class LiveChart:
    """Curves in rows of three panels, with a line of facts below; a notebook shows it."""

    def __init__(self, curves: Sequence[Curve], facts: str) -> None:
        self.curves, self.facts = tuple(curves), facts

    @property
    def svg(self) -> str:
        """The picture, in colours for light and dark."""
        across = min(_ACROSS, max(len(self.curves), 1))
        width = across * (_WIDTH + _LEFT) + 16
        height = ceil(len(self.curves) / _ACROSS) * (_HEIGHT + _TOP + 22) + 26
        with np.errstate(all="ignore"):  # of infinities and their differences
            panels = "".join(
                f'<g transform="translate({_LEFT + i % across * (_WIDTH + _LEFT)} '
                f'{_TOP + i // across * (_HEIGHT + _TOP + 22)})">{"".join(_panel(curve))}</g>'
                for i, curve in enumerate(self.curves)
            )
        ground = f'<rect width="{width}" height="{height}" style="fill:var(--ow-page)"/>'
        below = f'<text x="{_LEFT}" y="{height - 10}">{text(self.facts)}</text>'
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="ow-live" width="{width}" height="{height}" '
            f'viewBox="0 0 {width} {height}" role="img">'
            f"{with_plain_colours(_STYLE, ground + panels + below, 'ow-live')}</svg>\n"
        )

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"image/svg+xml": self.svg, "text/plain": self.facts}


def _panel(curve: Curve) -> Iterator[str]:
    """One curve between its least and its largest value; logarithmic where it is positive and spans much."""
    steps, values = _thinned(curve)
    good = values[np.isfinite(values)]
    low, high = (float(good.min()), float(good.max())) if len(good) else (0.0, 1.0)
    logarithmic = low > 0 and high > 20 * low
    floor, top = (
        (log10(low), log10(high)) if logarithmic else (low, high) if high > low else (low - 1, low + 1)
    )
    heights = np.log10(values) if logarithmic else values
    up = _HEIGHT / (top - floor)
    across = _WIDTH / max(float(steps[-1] - steps[0]), 1.0)
    points = [
        f"{(x - steps[0]) * across:.1f} {_HEIGHT - (y - floor) * up:.1f}"
        for x, y in zip(steps, heights, strict=True)
        if np.isfinite(y)
    ]
    yield f'<text class="title" y="-10">{text(curve.name)} {curve.values[-1]:.4g}</text>'
    yield f'<path d="M0 0V{_HEIGHT}H{_WIDTH}" style="stroke:var(--ow-line)" fill="none"/>'
    if high > low:
        yield f'<text x="-6" y="8" text-anchor="end">{high:.3g}</text>'
        yield f'<text x="-6" y="{_HEIGHT}" text-anchor="end">{low:.3g}</text>'
    yield f'<text x="0" y="{_HEIGHT + 13}">{steps[0]:,.0f}</text>'
    yield f'<text x="{_WIDTH}" y="{_HEIGHT + 13}" text-anchor="end">step {steps[-1]:,.0f}</text>'
    if points:
        yield (
            f'<path d="M{"L".join(points)}" style="stroke:{colour("forward")}" fill="none" '
            'stroke-width="1.6" stroke-linejoin="round" stroke-linecap="round"/>'
        )


def _thinned(curve: Curve) -> tuple[np.ndarray, np.ndarray]:
    """At most as many points as can be told apart."""
    places = np.unique(np.linspace(0, len(curve.steps) - 1, _PLACES).astype(int))
    return np.asarray(curve.steps)[places], np.asarray(curve.values)[places]
