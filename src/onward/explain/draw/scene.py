"""The elements of a picture: boxes and edges at their places, as plain data for any format.

Lengths are in pixels, measured from the upper left corner.

>>> Box("a", "op", "forward", 10, 20, 100, 40, ("mul", "f32[3]")).right
110
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

Point = tuple[float, float]

TITLE_SIZE, SMALL_SIZE = 12.0, 10.5
TITLE_WIDTH, SMALL_WIDTH = 7.5, 6.6
"""How wide a character of the monospaced font is, with what the widest such font needs more."""
TITLE = 30  # characters of the title of an open scope


@dataclass(frozen=True)
class Box:
    """A rectangle with lines of text: an op, several ops together, a Variable, or the frame around a scope.

    Attributes:
        key: what edges and the script call it.
        form: ``op``, ``chip`` (a small op), ``gate`` (an op that stands upright across many lines), ``fold``
            (several ops), ``pill`` (a Variable) or ``frame``.
        lane: the pass whose colours it has, or ``state``.
        lines: its text; the first line is its title.
        ops: the places in the Program of the ops it stands for.
        note: what it says in a corner, such as how often its layers repeat.
        variables: the names of the Variables it shows.
        emphasis: whether it is the loss.
    """

    key: str
    form: str
    lane: str
    x: float
    y: float
    width: float
    height: float
    lines: tuple[str, ...] = ()
    ops: tuple[int, ...] = ()
    note: str = ""
    variables: tuple[str, ...] = ()
    emphasis: bool = False
    node: int = -1

    @property
    def right(self) -> float:
        """Where it ends on the right."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """Where it ends below."""
        return self.y + self.height

    @property
    def middle(self) -> Point:
        """Its centre."""
        return self.x + self.width / 2, self.y + self.height / 2

    @property
    def cards(self) -> tuple[float, ...]:
        """How far the cards of equal layers stand out below it and to its right, the lowest first."""
        return (6.0, 3.0) if self.form == "fold" and self.note else ()

    def moved(self, x: float, y: float) -> Box:
        """The same box elsewhere."""
        return replace(self, x=self.x + x, y=self.y + y)


@dataclass(frozen=True)
class Edge:
    """A line from a box to another one, through points.

    Attributes:
        source: the key of the box it begins at.
        target: that of the box it ends at.
        lane: the pass whose colour it has, ``saved`` or ``state``.
        points: where it leads through.
        names: the Variables it stands for.
        sideways: whether it leaves and enters boxes at their sides.
        is_around: whether it goes around what lies between.
    """

    source: str
    target: str
    lane: str
    points: tuple[Point, ...]
    names: tuple[str, ...] = ()
    sideways: bool = False
    is_around: bool = False


@dataclass(frozen=True)
class Lane:
    """A column of the picture, from ``x`` on."""

    name: str
    x: float
    width: float


@dataclass(frozen=True)
class Scene:
    """A whole picture."""

    width: float
    height: float
    lanes: tuple[Lane, ...] = ()
    frames: tuple[Box, ...] = ()
    boxes: tuple[Box, ...] = ()
    edges: tuple[Edge, ...] = ()
    caption: str = ""
    opens: frozenset[int] = field(default_factory=frozenset)


def shortened(text: str, most: int) -> str:
    """A text of at most so many characters; what is left out of its middle is an ellipsis.

    >>> shortened("transformer/layers/0/attention/query", 20)
    'transf…tention/query'
    """
    if len(text) <= most:
        return text
    head = most // 3
    return f"{text[:head]}…{text[len(text) - (most - head - 1) :]}"


def title_width(text: str) -> float:
    """The room that a title needs."""
    return len(text) * TITLE_WIDTH


def small_width(text: str) -> float:
    """The room that a line of small text needs."""
    return len(text) * SMALL_WIDTH
