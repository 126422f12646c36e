"""Pictures as files: SVG and HTML as they are, PNG where cairosvg is installed."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from onward.core.errors import ArgumentError
from onward.core.extras import require
from onward.explain.style import dark_only, page

ENDINGS = (".svg", ".html", ".png")


def write_picture(
    path: str | PathLike[str], svg: str, title: str, dark: bool = False, html: str = ""
) -> Path:
    """Write a picture to a file, as its name ends: ``.svg``, ``.html`` or ``.png``.

    Args:
        path: the file to write.
        svg: the picture, in plain colours.
        title: of the page.
        dark: with the colours of a dark page, wherever it is shown.
        html: the body of the page; the picture unless given.

    Raises:
        ArgumentError: the name ends otherwise.
        MissingExtraError: a PNG without cairosvg.
    """
    made = Path(path)
    if made.suffix not in ENDINGS:
        raise ArgumentError(
            f"A picture cannot be saved as {made.name!r}: the name ends in {made.suffix!r}. "
            f"End it in one of {', '.join(ENDINGS)}."
        )
    shown = dark_only(svg) if dark else svg
    if made.suffix == ".png":
        made.write_bytes(require("cairosvg", "png").svg2png(bytestring=shown.encode(), scale=2))
    else:
        made.write_text(shown if made.suffix == ".svg" else page(title, html or shown), encoding="utf-8")
    return made
