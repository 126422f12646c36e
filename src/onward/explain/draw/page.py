"""A picture as a page to explore: pan, zoom, open and close scopes, click a box to read about it.

The page holds all its pictures, its style and its script, and asks nothing of a network. Where scripts are
not run, the first picture is shown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

from onward.core.program import Op, Program
from onward.explain.draw.details import Details, box_details
from onward.explain.draw.scene import Box
from onward.explain.draw.svg import STYLE, content
from onward.explain.draw.views import Album, View
from onward.explain.style import CSS, page, text

_SCRIPT = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
_STYLE = STYLE + Path(__file__).with_name("page.css").read_text(encoding="utf-8")
_DEEPEST, _MOST_INSIDE = 3, 12


def page_of(album: Album) -> str:
    """A whole page."""
    return page(album.program.name, f'<div class="ow-whole">{_widget(album)}</div>', _STYLE, "")


def notebook_of(album: Album) -> str:
    """The part of a page that a notebook shows below a cell."""
    return f"<style>{CSS}{_STYLE}</style>{_widget(album)}"


def _widget(album: Album) -> str:
    """The element that holds the picture, the data behind it, and the script."""
    first = album.first()
    data = json.dumps(_Book(album).data(), ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    key = sha256(data.encode()).hexdigest()[:12]
    size = f'width="{first.width:.0f}" height="{first.height:.0f}"'
    return (
        f'<div class="onward ow-explorer" data-drawing="{key}"><div class="ow-bar"><nav class="ow-path">'
        f'<b>{text(album.program.name)}</b></nav><span class="ow-tools"></span></div>'
        f'<div class="ow-stage" tabindex="0"><svg class="ow-drawing" {size} '
        f'viewBox="0 0 {first.width:.0f} {first.height:.0f}">{content(first)}</svg></div>'
        f'<script type="application/json" class="ow-data">{data}</script>'
        f"<script>({_SCRIPT.strip()})({json.dumps(key)});</script></div>"
    )


class _Book:
    """The pictures of a Program and of the Programs inside its loops, numbered through."""

    def __init__(self, album: Album) -> None:
        self.album = album
        self.views: list[dict[str, Any]] = []
        self.details: list[Details] = []
        self.inside = 0

    def data(self) -> dict[str, Any]:
        """All that the script needs."""
        self.add(self.album, (), 0)
        return {"views": self.views, "details": self.details}

    def add(self, album: Album, path: tuple[tuple[str, int], ...], depth: int) -> int:
        """The pictures of an album; the number of the first one."""
        first = len(self.views)
        views = album.views()
        self.views.extend({} for _ in views)
        known: dict[tuple[str, tuple[int, ...]], int] = {}
        for i, view in enumerate(views):
            self.views[first + i] = self.view(album, view, first, path, known)
        if depth < _DEEPEST:
            self.look_inside(album, path, first, depth, known)
        return first

    def view(
        self,
        album: Album,
        view: View,
        first: int,
        path: tuple[tuple[str, int], ...],
        known: dict[tuple[str, tuple[int, ...]], int],
    ) -> dict[str, Any]:
        """One picture; what is said about a box is kept once for all pictures that show it."""
        said = {}
        for box in (*view.scene.boxes, *view.scene.frames):
            key = (box.key, box.ops)
            if key not in known:
                known[key] = len(self.details)
                self.details.append(_details(box, album))
            said[box.key] = known[key]
        own = tuple((name, first + number) for name, number in view.path[1 if path else 0 :])
        return {
            "svg": content(view.scene),
            "width": round(view.scene.width),
            "height": round(view.scene.height),
            "path": [*path, *own],
            "goes": {str(node): first + number for node, number in view.goes.items()},
            "says": said,
        }

    def look_inside(
        self,
        album: Album,
        path: tuple[tuple[str, int], ...],
        first: int,
        depth: int,
        known: dict[tuple[str, tuple[int, ...]], int],
    ) -> None:
        """The pictures of the Programs inside of ops, and the ways to them."""
        for (_, ops), number in list(known.items()):
            for name, inner in _inner(album, ops):
                if self.inside < _MOST_INSIDE:
                    self.inside += 1
                    op = album.program.ops[ops[0]]
                    here = (*path, (album.program.name, first))
                    title = f"{op.type} {album.facts.lengths.get(op, '')}".strip()
                    view = self.add(Album(inner), (*here, (f"{title}: {name}", len(self.views))), depth + 1)
                    self.details[number].setdefault("inside", []).append([name, view])


def _inner(album: Album, ops: tuple[int, ...]) -> Iterator[tuple[str, Program]]:
    """The Programs inside of a single op."""
    if len(ops) == 1:
        op: Op = album.program.ops[ops[0]]
        yield from op.subprograms.items()


def _details(box: Box, album: Album) -> Details:
    node = album.tree.by_number.get(box.node)
    title = (
        node.title
        if node is not None and box.form in ("fold", "frame")
        else box.lines[0]
        if box.lines
        else ""
    )
    return box_details(box, title, album.facts)
