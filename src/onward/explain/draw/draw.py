"""The drawing of a Program: forward, backward and update side by side.

>>> import jax.numpy as jnp, onward as ow
>>> from onward.explain.draw.draw import draw
>>> draw(ow.SGD(0.1).minimize(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3), name="dot"))
Drawing of Program 'dot': all 7 ops
"""

from __future__ import annotations

from functools import cached_property
from os import PathLike
from pathlib import Path

from onward.core.check import expect_program
from onward.core.errors import ArgumentError
from onward.core.program import Program
from onward.explain.draw.dot import dot_of
from onward.explain.draw.page import notebook_of, page_of
from onward.explain.draw.scene import Scene
from onward.explain.draw.svg import svg_of
from onward.explain.draw.views import Album
from onward.explain.files import picture_path, save_picture

_ENDINGS = (".svg", ".html", ".png", ".dot")


class Drawing:
    """A picture of a Program in every form; a notebook shows it as a page to explore.

    >>> import jax.numpy as jnp, onward as ow
    >>> from onward.explain.draw.draw import draw
    >>> program = ow.trace(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3), name="dot")
    >>> drawing = draw(program)
    >>> drawing.svg[:5], drawing.dot.splitlines()[0]
    ('<svg ', 'digraph "dot" {')
    """

    def __init__(self, program: Program, depth: int | None = None) -> None:
        self._album = Album(program, depth)

    @cached_property
    def scene(self) -> Scene:
        """The boxes and lines of the picture, with their places."""
        return self._album.first()

    @cached_property
    def svg(self) -> str:
        """The picture as SVG, light or dark as the reader's system is."""
        return svg_of(self.scene)

    @cached_property
    def dot(self) -> str:
        """Every op as text for Graphviz, scopes as clusters."""
        return dot_of(self._album.program)

    @cached_property
    def html(self) -> str:
        """A whole page to explore, which needs nothing from elsewhere."""
        return page_of(self._album)

    def _repr_html_(self) -> str:
        return notebook_of(self._album)

    def save(self, path: str | PathLike[str], dark: bool = False) -> Path:
        """Write the picture to a file, as its name ends: ``.svg``, ``.html``, ``.dot`` or ``.png``.

        >>> import jax.numpy as jnp, onward as ow, tempfile
        >>> from onward.explain.draw.draw import draw
        >>> drawing = draw(ow.trace(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3)))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     drawing.save(f"{folder}/dot.svg").name
        'dot.svg'

        Args:
            path: the file to write.
            dark: a picture with the colours of a dark page wherever it is shown.

        Returns:
            The path.

        Raises:
            ArgumentError: the name ends otherwise, or is none.
            MissingExtraError: a PNG, and resvg_py is not installed.
        """
        made = picture_path(path)
        if made.suffix not in _ENDINGS:
            raise ArgumentError(
                f"A drawing cannot be saved as {made.name!r}: the name ends in {made.suffix!r}. "
                f"End it in one of {', '.join(_ENDINGS)}."
            )
        if made.suffix != ".dot":
            return save_picture(self, made, dark)
        made.write_text(self.dot, encoding="utf-8")
        return made

    def __repr__(self) -> str:
        program = self._album.program
        shown = self.scene.caption or f"all {len(program.ops):,} ops"
        return f"Drawing of Program {program.name!r}: {shown}"


def draw(program: Program, depth: int | None = None) -> Drawing:
    """Draw a Program: each gradient op faces its forward op, each update stands where its parameter is read.

    Scopes are boxes that can be opened; layers that repeat, whatever their names, are one box that says how
    often. In a notebook the drawing can be explored; ``.svg`` and ``.dot`` hold it as text, ``.save`` writes
    it to a file.

    Args:
        program: a Program at any stage.
        depth: how many levels of boxes are drawn: 1 leaves all scopes closed, 2 opens the outermost ones.
            By default as many levels are open as can be read at a glance.

    Raises:
        ArgumentError: ``depth`` is not a whole number above 0.
        MissingExtraError: igraph is not installed, which orders the boxes.

    Example:
        >>> import jax, jax.numpy as jnp, onward as ow
        >>> from onward.explain.draw.draw import draw
        >>> def loss(params, x):
        ...     for w in params:
        ...         with jax.named_scope("layer"):
        ...             x = x + jnp.tanh(x @ w)
        ...     return jnp.mean(x**2)
        >>> program = ow.Adam(1e-3).minimize(loss, [jnp.eye(4)] * 24, jnp.ones((2, 4)))
        >>> draw(program, depth=1)
        Drawing of Program 'loss': 191 of 199 ops are in 1 folded box
    """
    expect_program(program, "draw")
    if depth is not None and (not isinstance(depth, int) or isinstance(depth, bool) or depth < 1):
        raise ArgumentError(
            f"draw: depth is {depth!r}; it must be a whole number above 0, or None to open what can be read."
        )
    return Drawing(program, depth)
