"""Bytes over the ops of a step as a stacked area, drawn as SVG: one chart, or several on one scale.

The picture needs nothing from elsewhere and no script: what is read off when a pointer stands on an op is
drawn with it and shown by CSS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import ceil
from os import PathLike
from pathlib import Path

from onward.core.show import human_bytes
from onward.explain.files import save_picture
from onward.explain.style import CSS, FONT, MONO, colour, text, with_plain_colours

_COLOURS = {
    "parameters": "var(--ow-state)",
    "other state": "var(--ow-state-mid)",
    "feeds": "var(--ow-faint-mid)",
    "constants": "var(--ow-line)",
    "results": "var(--ow-update)",
    "saved for backward": "var(--ow-forward)",
    "gradients": "var(--ow-backward)",
    "temporaries": "var(--ow-forward-mid)",
}
_LEFT, _TOP, _HEIGHT, _WIDTH, _BETWEEN = 78, 78, 260, 880, 36
_PLACES = 300
_CSS = f"""
.ow-memory text {{ font-family: {FONT}; font-size: 12px; fill: var(--ow-text); }}
.ow-memory .faint {{ fill: var(--ow-faint); }}
.ow-memory .title {{ font-size: 14px; font-weight: 600; }}
.ow-memory .read {{ font-family: {MONO}; font-size: 11.5px; }}
.ow-memory .spot {{ fill: transparent; }}
.ow-memory .at .told {{ visibility: hidden; }}
.ow-memory .at:hover .told {{ visibility: visible; }}
.ow-memory .chart:has(.at:hover) .most {{ visibility: hidden; }}
.ow-memory .at:hover .spot {{ fill: var(--ow-text); opacity: 0.18; }}
.ow-memory-table {{ border-collapse: collapse; font-size: 12px; margin: 4px 0 8px; }}
.ow-memory-table th, .ow-memory-table td {{ text-align: left; padding: 3px 12px 3px 0;
  border-bottom: 1px solid var(--ow-line); color: var(--ow-text); background: none; white-space: nowrap; }}
.ow-memory-table th {{ color: var(--ow-faint); font-weight: 500; }}
.ow-memory-table td:first-child, .ow-memory-table th:first-child {{ text-align: right; }}
"""


@dataclass(frozen=True)
class OpPoint:
    """One op: the pass that made it, how people find it, its bytes in all and by what they are for."""

    made_by: str
    place: str
    bytes: int
    shares: Mapping[str, int]


@dataclass(frozen=True)
class Chart:
    """A title, and one point for each op."""

    title: str
    points: tuple[OpPoint, ...]


@dataclass(frozen=True)
class Picture:
    """An SVG that a notebook shows and that can be saved."""

    markup: str
    size: tuple[int, int]

    @property
    def svg(self) -> str:
        """The picture as a file of its own, in plain colours for light and dark."""
        ground = '<rect width="100%" height="100%" style="fill:var(--ow-page)"/>'
        inside = with_plain_colours(_CSS, ground + self.markup, "ow-memory")
        return self._element(inside, 'width="{}" height="{}"'.format(*self.size))

    def _element(self, inside: str, size: str) -> str:
        width, height = self.size
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="ow-memory" viewBox="0 0 {width} {height}" '
            f'role="img" {size}>{inside}</svg>'
        )

    def _repr_html_(self) -> str:
        return self.html([])

    def html(self, rows: Sequence[Sequence[str]]) -> str:
        """The picture with a table below it, whose first row is its head."""
        size = f'style="max-width: {self.size[0]}px; width: 100%; height: auto"'
        picture = self._element(self.markup, size)
        return f'<div class="onward"><style>{CSS}{_CSS}</style>{picture}{_html_table(rows)}</div>'

    def save(self, path: str | PathLike[str], dark: bool = False) -> Path:
        """Write it to a file, as its name ends: ``.svg``, ``.html`` or ``.png``; see ``save_picture``."""
        return save_picture(self, path, dark)


def picture(charts: Sequence[Chart]) -> Picture:
    """The charts next to each other, on one scale of bytes.

    Args:
        charts: one or several.
    """
    most = max((point.bytes for chart in charts for point in chart.points), default=1) or 1
    step = _tick(most)
    top = step * ceil(most / step)
    width = (_WIDTH - _BETWEEN * (len(charts) - 1)) // len(charts)
    parts = [_axis(top, step)]
    for i, chart in enumerate(charts):
        parts.append(f'<g transform="translate({_LEFT + i * (width + _BETWEEN)} {_TOP})">')
        parts += [*_chart(chart, width, top, step), "</g>"]
    parts.append(_legend(charts))
    return Picture("".join(parts), (_LEFT + _WIDTH + 20, _TOP + _HEIGHT + 104))


def _tick(most: int) -> int:
    """A round number of bytes, a power of two or half of one, that goes some four times into the most."""
    step = 1
    while step * 4 < most:
        step *= 2
    return step


def _axis(top: int, step: int) -> str:
    marks = []
    for n in range(0, top + 1, step):
        y = _TOP + _HEIGHT * (1 - n / top)
        at = f'x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end"'
        marks.append(f'<text class="faint" {at}>{_size(n)}</text>')
    return "".join(marks)


def _size(n: int) -> str:
    return "0" if not n else human_bytes(n).replace(".0 ", " ")


def _chart(chart: Chart, width: int, top: int, step: int) -> Iterator[str]:
    points = _folded(chart.points)
    across, up = width / max(len(points), 1), _HEIGHT / top
    yield f'<g class="chart"><text class="title" x="0" y="-52">{text(chart.title)}</text>'
    for n in range(0, top + 1, step):
        y = _HEIGHT - n * up
        yield f'<path d="M0 {y:.1f}H{width}" style="stroke:var(--ow-line)" stroke-width="1" fill="none"/>'
    yield from _areas(points, across, up)
    yield from _lanes(points, across)
    if points:
        yield from _peak(points, across, up, width)
        yield from (_spot(i, point, across, width) for i, point in enumerate(points))
    yield "</g>"


def _folded(points: Sequence[OpPoint]) -> Sequence[OpPoint]:
    """At most so many points as can be told apart: of neighbours that of the most bytes."""
    size = ceil(len(points) / _PLACES) or 1
    groups = (points[i : i + size] for i in range(0, len(points), size))
    return [max(group, key=lambda point: point.bytes) for group in groups]


def _areas(points: Sequence[OpPoint], across: float, up: float) -> Iterator[str]:
    below = [0] * len(points)
    for share, ink in _COLOURS.items():
        above = [n + point.shares.get(share, 0) for n, point in zip(below, points, strict=True)]
        if above != below:
            edge = [f"{i * across:.1f} {_HEIGHT - n * up:.1f}" for i, n in _corners(above)]
            back = [f"{i * across:.1f} {_HEIGHT - n * up:.1f}" for i, n in reversed(_corners(below))]
            yield f'<path d="M{"L".join([*edge, *back])}Z" style="fill:{ink}"/>'
        below = above


def _corners(heights: Sequence[int]) -> list[tuple[int, int]]:
    """The corners of a line of steps."""
    corners: list[tuple[int, int]] = []
    start = 0
    for n, run in groupby(heights):
        end = start + len(list(run))
        corners += [(start, n), (end, n)]
        start = end
    return corners


def _lanes(points: Sequence[OpPoint], across: float) -> Iterator[str]:
    """Below the area the passes, each in its colour."""
    start = 0
    for made_by, run in groupby(point.made_by for point in points):
        count = len(list(run))
        x, width = start * across, count * across
        yield (
            f'<rect x="{x:.1f}" y="{_HEIGHT + 4}" width="{max(width - 1, 1):.1f}" height="6" rx="2" '
            f'style="fill:{colour(made_by)}"/>'
        )
        if width > 7 * len(made_by):
            yield (
                f'<text x="{x + width / 2:.1f}" y="{_HEIGHT + 25}" text-anchor="middle" '
                f'style="fill:{colour(made_by)}">{text(made_by)}</text>'
            )
        start += count


def _peak(points: Sequence[OpPoint], across: float, up: float, width: int) -> Iterator[str]:
    at = max(range(len(points)), key=lambda i: points[i].bytes)
    x, y = (at + 0.5) * across, _HEIGHT - points[at].bytes * up
    yield f'<path d="M{x:.1f} {y:.1f}V{_HEIGHT}" style="stroke:var(--ow-alarm)" stroke-dasharray="3 3"/>'
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" style="fill:var(--ow-alarm)"/>'
    yield f'<g class="most">{_told(points[at], "peak", width)}</g>'


def _spot(i: int, point: OpPoint, across: float, width: int) -> str:
    """The hover target of one op, with the text about it that appears above the area."""
    rect = f'<rect class="spot" x="{i * across:.2f}" y="0" width="{across:.2f}" height="{_HEIGHT}"/>'
    return f'<g class="at">{rect}<g class="told">{_told(point, "here", width)}</g></g>'


def _told(point: OpPoint, word: str, width: int) -> str:
    first = f"{word} {human_bytes(point.bytes)} at {point.made_by} {point.place}".rstrip()
    largest = sorted(point.shares.items(), key=lambda pair: -pair[1])[: max(width // 200, 1)]
    second = ", ".join(f"{human_bytes(n)} {share}" for share, n in largest if n)
    return (
        f'<text class="read" y="-32">{text(first)}</text>'
        f'<text class="read faint" y="-15">{text(second)}</text>'
    )


def _legend(charts: Sequence[Chart]) -> str:
    points = [point for chart in charts for point in chart.points]
    least = max((point.bytes for point in points), default=0) / _HEIGHT
    used = {share for point in points for share, n in point.shares.items() if n > least}
    x, parts = _LEFT, []
    for share, ink in _COLOURS.items():
        if share in used:
            y = _TOP + _HEIGHT + 50
            parts.append(f'<rect x="{x}" y="{y}" width="11" height="11" rx="2" style="fill:{ink}"/>')
            parts.append(f'<text x="{x + 16}" y="{y + 10}">{share}</text>')
            x += 34 + round(6.4 * len(share))
    return "".join(parts)


def _html_table(rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{text(cell)}</th>" for cell in rows[0])
    body = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in rows[1:])
    return f'<table class="ow-memory-table"><tr>{head}</tr>{body}</table>'
