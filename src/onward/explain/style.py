"""How everything Onward draws looks: one set of colours for text, tables, SVG and HTML, light and dark.

Pictures name their colours by CSS variables, which ``CSS`` defines for whatever stands inside an element of
the class ``onward``: light, dark where the reader's system is, and as JupyterLab's own theme says.

>>> print(page("Sizes", "<p>2 &lt; 3</p>")[:15])
<!DOCTYPE html>
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape

from onward.core.words import Pass

LIGHT: Mapping[str, str] = {
    "page": "#ffffff",
    "text": "#1f2430",
    "faint": "#6b7280",
    "line": "#d5d9e0",
    "panel": "#f6f7f9",
    "forward": "#2563eb",
    "forward-soft": "#e3ecfd",
    "backward": "#c2570c",
    "backward-soft": "#fdebdc",
    "collective": "#8b3fd9",
    "collective-soft": "#f1e6fc",
    "update": "#15803d",
    "update-soft": "#def3e5",
    "state": "#475569",
    "state-soft": "#e6e9ee",
    "alarm": "#dc2626",
    "state-mid": "#9aa2ad",  # mixed with the page
    "faint-mid": "#bcc0c6",
    "forward-mid": "#b3c8f8",
}
DARK: Mapping[str, str] = {
    "page": "#14171d",
    "text": "#e6e9ef",
    "faint": "#9aa3b2",
    "line": "#3a414d",
    "panel": "#1d222b",
    "forward": "#7aa7ff",
    "forward-soft": "#1c2a47",
    "backward": "#f7a55c",
    "backward-soft": "#402a17",
    "collective": "#c79bf5",
    "collective-soft": "#33224a",
    "update": "#63cf8c",
    "update-soft": "#16351f",
    "state": "#aab4c3",
    "state-soft": "#2a303b",
    "alarm": "#f87171",
    "state-mid": "#676d78",
    "faint-mid": "#505660",
    "forward-mid": "#38496c",
}
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, 'SF Mono', Menlo, Consolas, 'DejaVu Sans Mono', monospace"


_PLAIN = re.compile(r"#[0-9a-f]{6}\b")
_NO_TEXT = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")  # which XML cannot have
_VARIABLE = re.compile(r"var\(--ow-([\w-]+)\)")


def variables(theme: Mapping[str, str]) -> str:
    """The colours of a theme as CSS variables: ``--ow-text: #1f2430; ...``."""
    return " ".join(f"--ow-{name}: {value};" for name, value in theme.items())


CSS = f"""
.onward table {{ color: inherit; }}
.onward {{ {variables(LIGHT)} color: var(--ow-text); background: var(--ow-page); font-family: {FONT}; }}
@media (prefers-color-scheme: dark) {{ .onward {{ {variables(DARK)} }} }}
[data-jp-theme-light="true"] .onward {{ {variables(LIGHT)} }}
[data-jp-theme-light="false"] .onward {{ {variables(DARK)} }}
"""


def colour(made_by: Pass | str, soft: bool = False) -> str:
    """The CSS colour of a pass (``forward``, ``backward``, ``collective``, ``update``) or of ``state``.

    >>> colour("forward"), colour("update", soft=True)
    ('var(--ow-forward)', 'var(--ow-update-soft)')
    """
    return f"var(--ow-{made_by}{'-soft' if soft else ''})"


def with_plain_colours(css: str, markup: str, root: str) -> str:
    """Markup and its style sheet for a file of its own: plain colours in place of CSS variables.

    Not every program that shows SVG knows CSS variables (librsvg, Inkscape, converters to PDF): each element
    has the colour of the light theme, and a media query, which these skip, the colours of the dark one.

    Args:
        css: the style sheet.
        markup: elements whose colours are variables in ``style=``.
        root: the class of the element around them.

    >>> print(with_plain_colours("", '<path style="stroke:var(--ow-update)"/>', "ow-drawing")[-38:])
    </style><path style="stroke:#15803d"/>
    """
    by_colour = "".join(
        f'.{root} [style*="{what}:{LIGHT[name]}"] {{ {what}: {dark} !important; }}'
        for name, dark in DARK.items()
        for what in ("fill", "stroke")
        if f"{what}:var(--ow-{name})" in markup
    )
    dark = f"@media (prefers-color-scheme: dark) {{ {_plain(css, DARK)}{by_colour} }}"
    return f"<style>{_plain(css, LIGHT)}{dark}</style>{_plain(markup, LIGHT)}"


def dark_only(svg: str) -> str:
    """A picture in plain colours as it is on a dark page, wherever it is shown.

    >>> dark_only('<path style="stroke:#15803d"/>')
    '<path style="stroke:#63cf8c"/>'
    """
    names = {value: name for name, value in LIGHT.items()}
    return _PLAIN.sub(lambda found: DARK[names[found[0]]] if found[0] in names else found[0], svg)


def _plain(markup: str, theme: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda found: theme[found[1]], markup)


def text(value: object) -> str:
    """A value as text within HTML or SVG.

    >>> text("a < b")
    'a &lt; b'
    """
    return escape(_NO_TEXT.sub("\ufffd", str(value)))


def page(title: str, body: str, css: str = "", script: str = "") -> str:
    """A whole HTML page that needs nothing from elsewhere."""
    code = f"<script>{script}</script>" if script else ""
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>'
        f"<style>{CSS}{css} body {{ margin: 0; }}</style></head>"
        f'<body class="onward">{body}{code}</body></html>\n'
    )
