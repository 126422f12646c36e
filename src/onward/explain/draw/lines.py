"""The lines of a scene: down, up, across, and around what lies between."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from onward.core.program import Op, Variable
from onward.core.words import Pass
from onward.explain.draw.blocks import Block
from onward.explain.draw.fold import Node
from onward.explain.draw.scene import Box, Edge, Point
from onward.explain.draw.shapes import Shape
from onward.explain.draw.sight import Sight

_CLOSE = 12.0
Standing = Mapping[Node, tuple[Block, float, float]]
"""Where each block stands."""


def boxes_of(sight: Sight, shapes: Mapping[Node, Shape]) -> dict[Op, str]:
    """The box of every op; that of an op of one of equal layers stands for all."""
    found = {op: key for shape in shapes.values() for op, key in shape.box_of.items()}
    for leaf in sight.above:
        if leaf.children or leaf.main is None:
            continue
        own = (leaf.main, *leaf.side, *leaf.beside)
        by_type = {(op.made_by, op.type): found[op] for op in reversed(own) if op in found}
        known = ((op, by_type.get((op.made_by, op.type))) for op in leaf.ops if op not in found)
        found.update((op, key) for op, key in known if key is not None)
    return found


@dataclass(eq=False)
class Lines:
    """The making of the lines between the boxes of a scene.

    Attributes:
        sight: which op reads of which.
        shapes: the boxes that stand for ops.
        blocks: where the leaves and groups stand.
        boxes: all boxes in their places.
        mirror: the sum of a place in the forward lane and its mirror image in the backward lane.
        box_of: the box that stands for each op.
        edges: the lines that were made, by the boxes they join and their kind.
    """

    sight: Sight
    shapes: Mapping[Node, Shape]
    blocks: Standing
    boxes: Mapping[str, Box]
    mirror: float
    box_of: Mapping[Op, str]
    edges: dict[tuple[str, str, str], Edge] = field(default_factory=dict)

    def all(self) -> tuple[Edge, ...]:
        """The lines, one for all that go from one box to another."""
        for shape in self.shapes.values():
            for source, target in shape.links:
                self.across(source, target, "state", ())
            for box, pill in shape.update:
                if pill is not None:
                    self.across(box.key, pill.key, "update", pill.variables)
        gates = [op for op in self.sight.tree.loose if op in self.box_of]
        for op in gates:
            self.through(op, self.box_of[op])
        for maker, op, v in self.sight.read(self.sight.program.ops):
            begin, end = self.box_of.get(maker), self.box_of.get(op)
            if begin and end and begin != end:
                self.line(maker, op, v, begin, end)
        return tuple(self.edges.values())

    def through(self, gate: Op, key: str) -> None:
        """The lines into an op that stands upright, and out of it, each straight ahead."""
        made = set(gate.outputs)
        for v in gate.inputs:
            if source := self.box_of.get(self.sight.makers[v]) if v in self.sight.makers else None:
                self.straight(source, key, self.boxes[source], v)
        for op in self.sight.cell:
            for v in made.intersection(op.inputs):
                if target := self.box_of.get(op):
                    self.straight(key, target, self.boxes[target], v)

    def straight(self, source: str, target: str, level: Box, v: Variable) -> None:
        """A line at the height of one of its boxes, of which the other stands upright."""
        start, end = self.boxes[source], self.boxes[target]
        gate = start if level is end else end
        middle = level.middle[1]
        within = min(max(middle, gate.y + _CLOSE), gate.bottom - _CLOSE)
        heights = (within, middle) if gate is start else (middle, within)
        points = (start.right, heights[0]), (end.x, heights[1])
        lane = "update" if gate is start else start.lane
        self.add(Edge(source, target, lane, points, (v.name,), sideways=True))

    def line(self, maker: Op, reader: Op, v: Variable, source: str, target: str) -> None:
        """The line from one op to another."""
        passes = maker.made_by, reader.made_by
        a, b = self.sight.cell[maker], self.sight.cell[reader]
        if self.sight.tree.spine.issuperset((maker, reader)):
            if a is b:
                self.across(source, target, str(maker.made_by), (v.name,))
            else:
                self.upright(source, target, str(maker.made_by), (v.name,), self.path(a, b))
        elif passes == (Pass.FORWARD, Pass.BACKWARD):
            self.across(source, target, "saved", (v.name,))
        elif passes == (Pass.BACKWARD, Pass.BACKWARD):
            self.upwards(a, b, source, target, (v.name,))
        elif passes != (Pass.UPDATE, Pass.UPDATE) or a is b:
            self.across(source, target, str(maker.made_by), (v.name,))

    def upwards(self, a: Node, b: Node, source: str, target: str, names: tuple[str, ...]) -> None:
        """The line of a gradient: along the mirror image of a line down, if there is one."""
        start, end = self.boxes[source], self.boxes[target]
        if (b, a) in self.sight.flows:
            mirrored = [(self.mirror - x, y) for x, y in reversed(self.path(b, a))]
            self.upright(source, target, "backward", names, mirrored)
        elif a is not b:
            points = (start.right, start.middle[1]), (end.right, end.middle[1])
            self.add(Edge(source, target, "backward", points, names, is_around=True))
        elif start.x > end.right or end.x > start.right:
            self.across(source, target, "backward", names)
        else:
            self.upright(source, target, "backward", names, [])

    def path(self, a: Node, b: Node) -> list[Point]:
        """The bends of a line down: out of the groups around its begin, into those around its end."""
        up, down = self.sight.above[a], self.sight.above[b]
        shared = next(node for node in up if node in down)
        meeting = down.index(shared)
        steps: Iterable[tuple[Node, Node | None]] = [
            *((group, None) for group in up[1 : up.index(shared)]),
            *((down[i], down[i - 1]) for i in range(meeting, 0, -1)),
        ]
        return [point for group, target in steps for point in self.bends(group, a, target)]

    def bends(self, group: Node, a: Node, target: Node | None) -> Iterator[Point]:
        """The bends within one group."""
        block, x, y = self.blocks[group]
        return ((x + dx, y + dy) for dx, dy in block.lines.get((a, target), ()))

    def upright(
        self, source: str, target: str, lane: str, names: tuple[str, ...], bends: list[Point]
    ) -> None:
        """A line from the lower border of a box to the upper one of another, or the other way round."""
        start, end = self.boxes[source], self.boxes[target]
        is_up = bends[0][1] < start.y if bends else start.y > end.y
        first = start.middle[0], start.y if is_up else start.bottom
        last = end.middle[0], end.bottom + max(end.cards, default=0.0) if is_up else end.y
        if not bends and abs(first[1] - last[1]) < _CLOSE:
            both = (max(start.x, end.x) + min(start.right, end.right)) / 2
            first, last = (both, first[1]), (both, last[1])
        self.add(Edge(source, target, lane, (first, *bends, last), names))

    def across(self, source: str, target: str, lane: str, names: tuple[str, ...]) -> None:
        """A line from one side of a box to the facing side of another."""
        start, end = self.boxes[source], self.boxes[target]
        left, right = (start.x, start.middle[1]), (start.right, start.middle[1])
        if end.x >= start.right:
            points = right, (end.x, end.middle[1])
        elif end.right <= start.x:
            points = left, (end.right, end.middle[1])
        else:
            self.upright(source, target, lane, names, [])
            return
        self.add(Edge(source, target, lane, points, names, sideways=True))

    def add(self, edge: Edge) -> None:
        """One more line; several between the same boxes are one."""
        key = edge.source, edge.target, edge.lane
        before = self.edges.get(key)
        names = edge.names if before is None else tuple(dict.fromkeys((*before.names, *edge.names)))
        self.edges[key] = replace(before or edge, names=names)
