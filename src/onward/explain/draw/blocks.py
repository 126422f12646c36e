"""Where leaves stand in a group, and groups in groups: sizes from the inside out, in rows.

Every place counts from the anchor of the block it is in: the middle of a leaf's main box, or where the first
line enters a group, at its upper border.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onward.explain.draw.fold import Node
from onward.explain.draw.layers import centres, order_of, rows_of
from onward.explain.draw.scene import TITLE, Point, shortened, title_width
from onward.explain.draw.shapes import GAP, SMALL, Shape
from onward.explain.draw.sight import Flow

HEADER, PADDING, ROW_GAP, BETWEEN = 34.0, 14.0, 26.0, 11.0
_LINE = (5.0, 5.0)
_UNIT = 160.0


@dataclass(eq=False)
class Block:
    """A leaf or an open group with its size, and what is inside.

    ``lines`` leads, for each leaf that a line begins in and each node it goes to (None: out of the group),
    through these points.
    """

    node: Node
    shape: Shape | None
    left: float
    right: float
    height: float
    inside: list[tuple[Block, float, float]] = field(default_factory=list)
    lines: dict[tuple[Node, Node | None], list[Point]] = field(default_factory=dict)


def block_of(
    node: Node,
    shapes: Mapping[Node, Shape],
    flows: Sequence[Flow],
    above: Mapping[Node, Sequence[Node]],
    is_root: bool = False,
) -> Block:
    """The block of a node.

    Args:
        node: a leaf, a closed group or an open one.
        shapes: those of all visible leaves and closed groups.
        flows: the lines between these.
        above: for each of these the groups around it, itself first.
        is_root: whether it has no frame.
    """
    if node in shapes:
        shape = shapes[node]
        return Block(node, shape, shape.reach, shape.half, shape.height)
    children = [block_of(child, shapes, flows, above) for child in node.children]
    return _Arrangement(node, children, flows, above, is_root).block()


class _Arrangement:
    """The rows of one open group. Vertices are its children, then ports and bends of lines."""

    def __init__(
        self,
        node: Node,
        children: list[Block],
        flows: Sequence[Flow],
        above: Mapping[Node, Sequence[Node]],
        is_root: bool,
    ) -> None:
        self.node, self.children, self.is_root = node, children, is_root
        self.at = {child.node: i for i, child in enumerate(children)}
        self.targets = self.lines_within(flows, above)
        self.rows = self.child_rows()
        self.edges: list[tuple[int, int, float]] = []
        self.bends: dict[tuple[Node, int | None], list[int]] = {}

    def lines_within(
        self, flows: Sequence[Flow], above: Mapping[Node, Sequence[Node]]
    ) -> dict[tuple[Node, int | None], list[int | None]]:
        """For each leaf that lines begin in, with the child it is in, where they go to; None is outside."""
        found: dict[tuple[Node, int | None], list[int | None]] = {}
        for a, b in flows:
            start = next((self.at[n] for n in above[a] if n in self.at), None)
            end = next((self.at[n] for n in above[b] if n in self.at), None)
            if start != end:
                ends = found.setdefault((a, start), [])
                if end not in ends:
                    ends.append(end)
        return found

    def child_rows(self) -> list[int]:
        """The row of each child; row 0 is the upper border."""
        pairs = [
            (s, e) for (_, s), ends in self.targets.items() for e in ends if s is not None and e is not None
        ]
        high = {e for (_, s), ends in self.targets.items() if s is None for e in ends if e is not None}
        return [row + 1 for row in rows_of(len(self.children), list(dict.fromkeys(pairs)), high)]

    def block(self) -> Block:
        """The group with everything in its place."""
        self.last = max(self.rows, default=0) + 1
        for key, ends in self.targets.items():
            self.trunk(key, ends)
        rows: list[list[int]] = [[] for _ in range(self.last + 1)]
        guess = order_of(self.rows, [(a, b) for a, b, _ in self.edges])
        for vertex in sorted(range(len(self.rows)), key=lambda v: guess[v]):
            rows[self.rows[vertex]].append(vertex)
        widths = {v: self.extent(v) for v in range(len(self.rows))}
        start = {v: x * _UNIT for v, x in enumerate(guess)}
        return self.placed(rows, centres(rows, widths, self.edges, start), widths)

    def extent(self, vertex: int) -> tuple[float, float]:
        """How far a vertex reaches to the left and to the right."""
        if vertex >= len(self.children):
            return _LINE
        child = self.children[vertex]
        return child.left + BETWEEN, child.right + BETWEEN

    def vertex(self, row: int) -> int:
        """One more bend or port."""
        self.rows.append(row)
        return len(self.rows) - 1

    def trunk(self, key: tuple[Node, int | None], ends: Sequence[int | None]) -> None:
        """The bends of the lines of one leaf: one line down, from which all that go far branch off."""
        start = key[1]
        first = self.vertex(0) if start is None else start
        goals = {end: self.vertex(self.last) if end is None else end for end in ends}
        line = [first]
        lowest = max(self.rows[goal] for goal in goals.values())
        for row in range(self.rows[first] + 1, lowest):
            line.append(self.vertex(row))
            self.edges.append((line[-2], line[-1], 4.0 if len(line) > 2 else 1.5))
        for end, goal in goals.items():
            reach = self.rows[goal] - self.rows[first]
            if reach > 0:
                self.edges.append((line[reach - 1], goal, 3.0 if end is None or reach == 1 else 0.5))
            entry, exit_ = [first] * (start is None), [goal] * (end is None)
            self.bends[key[0], end] = [*entry, *line[1 : max(reach, 1)], *exit_]

    def placed(
        self, rows: Sequence[Sequence[int]], x: Mapping[int, float], widths: Mapping[int, tuple[float, float]]
    ) -> Block:
        """The block, once it is known where everything stands from left to right."""
        self.align(rows, x)
        tops, heights, total = self.row_heights(rows)
        left = min((x[v] - widths[v][0] for v in x), default=0.0) - PADDING + BETWEEN
        right = max((x[v] + widths[v][1] for v in x), default=0.0) + PADDING - BETWEEN
        missing = 0 if self.is_root else title_width(shortened(self.node.title, TITLE)) + 70 - (right - left)
        left, right = left - max(missing, 0) / 2, right + max(missing, 0) / 2
        anchor = self.anchor(rows, x)
        made = Block(self.node, None, anchor - left, right - anchor, total)
        made.inside = [(c, x[i] - anchor, tops[self.rows[i]]) for i, c in enumerate(self.children)]
        for (leaf, end), bends in self.bends.items():
            points: list[Point] = []
            for v in bends:
                row = self.rows[v]
                points.append((x[v] - anchor, tops[row]))
                if heights[row]:
                    points.append((x[v] - anchor, tops[row] + heights[row]))
            made.lines[leaf, None if end is None else self.children[end].node] = points
        return made

    def align(self, rows: Sequence[Sequence[int]], x: Mapping[int, float]) -> None:
        """Make open groups that have a row for themselves equally wide, border below border."""
        alone = [row[0] for row in rows if len(row) == 1 and row[0] < len(self.children)]
        groups = [(x[v], self.children[v]) for v in alone if self.children[v].shape is None]
        left = min((place - block.left for place, block in groups), default=0.0)
        right = max((place + block.right for place, block in groups), default=0.0)
        for place, block in groups:
            block.left, block.right = place - left, right - place

    def anchor(self, rows: Sequence[Sequence[int]], x: Mapping[int, float]) -> float:
        """Where lines from above should meet the group."""
        first = next((row for row in rows if row), [])
        return sum(x[v] for v in first) / len(first) if first else 0.0

    def row_heights(self, rows: Sequence[Sequence[int]]) -> tuple[list[float], list[float], float]:
        """Where each row begins, how high it is, and how high all are together."""
        tops, heights = [0.0], [0.0]
        y = 0.0 if self.is_root else HEADER
        for row in rows[1:-1]:
            children = [self.children[v] for v in row if v < len(self.children)]
            updates = sum(len(c.shape.update) for c in children if c.shape)
            height = max([0.0, updates * (SMALL + GAP), *(c.height for c in children)])
            tops.append(y)
            heights.append(height)
            y += height + ROW_GAP
        total = y - ROW_GAP + (0 if self.is_root else PADDING)
        return [*tops, total], [*heights, 0.0], total
