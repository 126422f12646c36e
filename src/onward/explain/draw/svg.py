"""A scene as SVG: text for people and browsers, with the colours of a light and of a dark page within."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from onward.explain.draw.scene import SMALL_SIZE, TITLE_SIZE, Box, Edge, Lane, Point, Scene
from onward.explain.style import FONT, MONO, colour, text, with_plain_colours

STYLE = f"""
.ow-drawing text {{ font-family: {MONO}; font-size: {SMALL_SIZE}px; fill: var(--ow-text); }}
.ow-drawing .title {{ font-size: {TITLE_SIZE}px; font-weight: 600; }}
.ow-drawing .name {{ font-weight: 600; }}
.ow-drawing .faint {{ fill: var(--ow-faint); }}
.ow-drawing .head {{ font-family: {FONT}; font-size: 13px; font-weight: 650; letter-spacing: .02em; }}
.ow-drawing .caption {{ font-family: {FONT}; font-size: 12px; fill: var(--ow-faint); }}
.ow-drawing .edge {{ fill: none; stroke-width: 1.4; opacity: .75; }}
.ow-drawing .far {{ opacity: .4; }}
.ow-drawing .saved {{ stroke-dasharray: 3 4; stroke-width: 1.1; opacity: .5; }}
"""


def svg_of(scene: Scene) -> str:
    """The scene as a whole SVG file."""
    size = f'width="{_n(scene.width)}" height="{_n(scene.height)}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ow-drawing" role="img" {size} '
        f'viewBox="0 0 {_n(scene.width)} {_n(scene.height)}">'
        f"{with_plain_colours(STYLE, content(scene), 'ow-drawing')}</svg>\n"
    )


def content(scene: Scene) -> str:
    """The markup inside the ``svg`` element."""
    parts = (
        f'<rect class="page" width="{_n(scene.width)}" height="{_n(scene.height)}" rx="10" '
        'style="fill:var(--ow-page)"/>',
        *map(_lane, scene.lanes),
        *map(_frame, scene.frames),
        *_edges(scene.edges),
        *map(_box, scene.boxes),
        _caption(scene),
    )
    return "".join(parts)


def _n(x: float) -> str:
    """A length without needless digits."""
    return f"{x:.1f}".removesuffix(".0")


def _lane(lane: Lane) -> str:
    """The header of a lane, and a line below it."""
    ink = colour(lane.name)
    return (
        f'<text class="head" x="{_n(lane.x + lane.width / 2)}" y="27" text-anchor="middle" '
        f'style="fill:{ink}">{text(lane.name)}</text>'
        f'<path d="M{_n(lane.x)} 38H{_n(lane.x + lane.width)}" style="stroke:{ink}" stroke-width="2" '
        'stroke-linecap="round" opacity=".45"/>'
    )


def _rect(box: Box, fill: str, radius: float, more: str = "", shift: float = 0.0) -> str:
    """The rectangle of a box."""
    place = f'x="{_n(box.x + shift)}" y="{_n(box.y + shift)}"'
    size = f'width="{_n(box.width)}" height="{_n(box.height)}" rx="{_n(radius)}"'
    return f'<rect {place} {size} style="fill:{fill};stroke:{colour(box.lane)}"{more}/>'


def _frame(box: Box) -> str:
    """The rounded frame around an open scope."""
    title = box.lines[0] if box.lines else ""
    note = f'<tspan dx="8" style="fill:{colour(box.lane)}">{text(box.note)}</tspan>' if box.note else ""
    place = f'x="{_n(box.x + 12)}" y="{_n(box.y + 20)}"'
    label = f'<text class="title" {place}>{text(title)}{note}</text>' if title else ""
    faint = ' fill-opacity=".38" stroke-opacity=".45"'
    rect = _rect(box, colour(box.lane, soft=True), 11, faint)
    return f'<g class="frame" data-key="{box.key}" data-node="{box.node}">{rect}{label}</g>'


def _edges(edges: Iterable[Edge]) -> Iterator[str]:
    """The lines, those of saved values at the back."""
    for edge in sorted(edges, key=lambda e: e.lane != "saved"):
        lane = "forward" if edge.lane == "saved" else edge.lane
        kind = " saved" if edge.lane == "saved" else " far" if edge.is_around else ""
        yield (
            f'<path class="edge{kind}" data-from="{edge.source}" data-to="{edge.target}" '
            f'style="stroke:{colour(lane)}" d="{_curve(edge)}"/>{_head(edge, lane)}'
        )


def _curve(edge: Edge) -> str:
    """A smooth line through the points of an edge, which begins and ends upright, or lying."""
    points = list(edge.points)
    if edge.is_around:
        (x0, y0), (x1, y1) = points
        far = max(x0, x1) + 36 + abs(y0 - y1) * 0.04
        return f"M{_n(x0)} {_n(y0)}C{_n(far)} {_n(y0)} {_n(far)} {_n(y1)} {_n(x1)} {_n(y1)}"
    d = [f"M{_n(points[0][0])} {_n(points[0][1])}"]
    for (x0, y0), (x1, y1) in pairwise(points):
        if abs(x0 - x1) < 0.5 or (edge.sideways and abs(y0 - y1) < 0.5):
            d.append(f"L{_n(x1)} {_n(y1)}")
        elif edge.sideways:
            middle = (x0 + x1) / 2
            d.append(f"C{_n(middle)} {_n(y0)} {_n(middle)} {_n(y1)} {_n(x1)} {_n(y1)}")
        else:
            middle = (y0 + y1) / 2
            d.append(f"C{_n(x0)} {_n(middle)} {_n(x1)} {_n(middle)} {_n(x1)} {_n(y1)}")
    return "".join(d)


def _head(edge: Edge, lane: str) -> str:
    """The point of the arrow."""
    if edge.lane in ("saved", "state"):
        return ""
    (x0, y0), (x, y) = edge.points[-2:]
    if edge.sideways or edge.is_around:
        s = -4 if x < x0 or edge.is_around else 4
        corners: tuple[Point, ...] = ((x - s * 1.4, y - 3.2), (x, y), (x - s * 1.4, y + 3.2))
    else:
        s = 4 if y >= y0 else -4
        corners = ((x - 3.2, y - s * 1.4), (x, y), (x + 3.2, y - s * 1.4))
    d = "L".join(f"{_n(a)} {_n(b)}" for a, b in corners)
    return (
        f'<path class="edge head-of" data-from="{edge.source}" data-to="{edge.target}" '
        f'style="stroke:{colour(lane)}" stroke-linecap="round" stroke-linejoin="round" d="M{d}"/>'
    )


def _box(box: Box) -> str:
    """An op, several ops, or a Variable."""
    soft = colour(box.lane, soft=True)
    fill = colour(box.lane) if box.emphasis else "var(--ow-page)" if box.form in ("chip", "gate") else soft
    radius = {"pill": box.height / 2, "chip": 6, "fold": 10}.get(box.form, 7)
    more = ' stroke-opacity=".55"' if box.form == "pill" else ' stroke-width="1.6"' * (box.form == "fold")
    under = "".join(_rect(box, soft, radius, ' stroke-opacity=".5"', shift) for shift in box.cards)
    write = {"pill": _small_words, "chip": _small_words, "gate": _upright_words}.get(box.form, _words)
    return (
        f'<g class="box {box.form}" data-key="{box.key}" data-node="{box.node}">'
        f"{under}{_rect(box, fill, radius, more)}{write(box)}</g>"
    )


def _line(kind: str, x: float, y: float, inside: str, style: str = "") -> str:
    """A line of text around its middle; what is inside is markup."""
    return f'<text class="{kind}" x="{_n(x)}" y="{_n(y)}" text-anchor="middle"{style}>{inside}</text>'


def _small_words(box: Box) -> str:
    """The one line of text in a small box: a name, and its type."""
    x, y = box.middle
    name, *rest = box.lines
    more = "".join(f'<tspan class="faint">&#160;{text(word)}</tspan>' for word in rest)
    bold = ' class="name"' if box.form == "pill" else ""
    return _line("small", x, y + 3.7, f"<tspan{bold}>{text(name)}</tspan>{more}")


def _upright_words(box: Box) -> str:
    """The line of text in a box that stands upright."""
    x, y = box.middle
    turned = f' transform="rotate(90 {_n(x)} {_n(y)})"'
    return _line("small", x, y + 3.7, text(box.lines[0]), turned)


def _words(box: Box) -> str:
    """The lines of text in a large box, the title first."""
    page = ' style="fill:var(--ow-page)"' if box.emphasis else ""
    ink = page or f' style="fill:{colour(box.lane)}"'
    x, y = box.middle
    title, *below = (line for line in box.lines if line)
    note = f"<tspan{ink}>&#160;{text(box.note)}</tspan>" if box.note else ""
    top = y - (len(below) * 14 - 8) / 2
    rest = (_line("faint", x, top + 14 * (i + 1), text(line), page) for i, line in enumerate(below))
    return _line("title", x, top, text(title) + note, page) + "".join(rest)


def _caption(scene: Scene) -> str:
    """The line below the picture."""
    if not scene.caption:
        return ""
    return f'<text class="caption" x="22" y="{_n(scene.height - 16)}">{text(scene.caption)}</text>'
