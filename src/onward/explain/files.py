"""Pictures and tables as files: SVG and HTML, and PNG where resvg_py is installed."""

from __future__ import annotations

import re
from os import PathLike
from pathlib import Path
from typing import Any

from onward.core.errors import ArgumentError
from onward.core.extras import require
from onward.core.structure import describe
from onward.distribute.pipeline.schedule import PipelineSchedule
from onward.explain.schedule_picture import schedule_svg
from onward.explain.style import MONO, dark_only, page, text, with_plain_colours

ENDINGS = (".svg", ".html", ".png")
_STYLE = f".ow-text text {{ font-family: {MONO}; font-size: 12px; fill: var(--ow-text); }}"
_ACROSS, _DOWN, _EDGE = 7.22, 17, 14
_WORD = re.compile(r"\S+(?: \S+)*")


def save_picture(shown: Any, path: str | PathLike[str], dark: bool = False) -> Path:
    """Write what Onward draws or prints to a file, as its name ends: ``.svg``, ``.html`` or ``.png``.

    Drawings, memory, the curves of ``Live`` and the schedule of a pipeline are pictures; a ``Summary``, a
    ``Diff``, a ``Plan``, a ``Profile`` and all else that prints are their text, and on a page the table that
    a notebook shows. An SVG has the colours of a light page, and of a dark one where the reader's system is.

    Args:
        shown: the picture or table.
        path: the file to write; its folder is made if there is none.
        dark: with the colours of a dark page wherever it is shown.

    Returns:
        The path.

    Raises:
        ArgumentError: the name ends otherwise, or is none.
        MissingExtraError: a PNG, and resvg_py is not installed.

    Example:
        >>> import jax.numpy as jnp, onward as ow, tempfile
        >>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     ow.save_picture(ow.summary(program), f"{folder}/costs.svg").name
        'costs.svg'
    """
    made = picture_path(path)
    ending = made.suffix.lower()
    if ending not in ENDINGS:
        raise ArgumentError(
            f"{describe(shown)} cannot be saved as {made.name!r}: the name ends in {made.suffix!r}. "
            f"End it in one of {', '.join(ENDINGS)}."
        )
    found = _page(shown) if ending == ".html" else _svg(shown)
    found = dark_only(found) if dark else found
    made.parent.mkdir(parents=True, exist_ok=True)
    if ending == ".png":
        made.write_bytes(require("resvg_py", "png").svg_to_bytes(svg_string=found, zoom=2))
    else:
        made.write_text(found, encoding="utf-8")
    return made


def picture_path(path: object) -> Path:
    """The path of a picture; raises ``ArgumentError`` for what is none."""
    if not isinstance(path, str | PathLike):
        raise ArgumentError(
            f"A picture cannot be saved as {describe(path)}; expected the name of a file, such as 'step.svg'."
        )
    return Path(path)


def _page(shown: Any) -> str:
    """Its own page, or one with the table of a notebook, the picture or the text."""
    if isinstance(own := getattr(shown, "html", None), str):
        return own
    if hasattr(shown, "_repr_html_"):
        body = str(shown._repr_html_())
    else:
        drawn = hasattr(shown, "svg") or isinstance(shown, PipelineSchedule)
        body = _svg(shown) if drawn else f"<pre>{text(shown)}</pre>"
    return page(type(shown).__name__, f"<main>{body}</main>", "main { padding: 1rem 1.4rem; }")


def _svg(shown: Any) -> str:
    if isinstance(shown, PipelineSchedule):
        return schedule_svg(shown)
    picture = shown.plot() if hasattr(shown, "plot") else shown
    return str(picture.svg) if hasattr(picture, "svg") else text_svg(str(shown))


def text_svg(written: str) -> str:
    """A text in letters of one width, as a picture.

    >>> text_svg("one line").count("<text ")
    1
    """
    lines = written.split("\n")
    width = round(max(map(len, lines)) * _ACROSS + 2 * _EDGE)
    height = len(lines) * _DOWN + 2 * _EDGE
    rows = "".join(_words(line, _EDGE + _DOWN * i + 12) for i, line in enumerate(lines))
    ground = f'<rect width="{width}" height="{height}" style="fill:var(--ow-page)"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="ow-text" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img">{with_plain_colours(_STYLE, ground + rows, "ow-text")}'
        "</svg>\n"
    )


def _words(line: str, y: int) -> str:
    """The words of a line, each as wide as its letters are of one width: so columns are kept in any font."""
    return "".join(
        f'<text x="{_EDGE + found.start() * _ACROSS:.1f}" y="{y}" textLength="{len(found[0]) * _ACROSS:.1f}">'
        f"{text(found[0])}</text>"
        for found in _WORD.finditer(line)
    )
