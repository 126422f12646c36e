"""The whole scene of a Program: three or four lanes next to each other, every box and line in its place.

The backward lane is the mirror image of the forward lane: a gradient op stands where its forward op does, and
the gradient of a value flows up along the line on which the value flows down.
"""

from __future__ import annotations

from dataclasses import replace

from onward.core.program import Op, Variable
from onward.core.words import Pass
from onward.explain.draw.blocks import Block, block_of
from onward.explain.draw.facts import Facts
from onward.explain.draw.fold import Node, Tree
from onward.explain.draw.lines import Lines, boxes_of
from onward.explain.draw.scene import SMALL_WIDTH, TITLE, Box, Lane, Scene, shortened
from onward.explain.draw.shapes import GAP, SMALL, shape_of
from onward.explain.draw.sight import Sight

_MARGIN, _TOP, _BETWEEN_LANES, _CENTRE = 20.0, 58.0, 34.0, 66.0
_LEAST_LANE = 120.0


def scene_of(
    tree: Tree, facts: Facts, opened: frozenset[Node], caption: str = "", root: Node | None = None
) -> Scene:
    """The scene in which these groups are open.

    Args:
        tree: the Program as a tree.
        facts: about the Program.
        opened: the groups that show what is inside; one inside a closed group is closed.
        caption: a line below the picture.
        root: the group to draw, the whole Program by default.
    """
    return _Stage(tree, facts, opened, caption, root or tree.root).scene()


class _Stage:
    """The making of one scene."""

    def __init__(self, tree: Tree, facts: Facts, opened: frozenset[Node], caption: str, root: Node) -> None:
        self.tree, self.facts, self.caption, self.root = tree, facts, caption, root
        self.sight = Sight(tree, facts.program, opened, root)
        fed = {b for _, b in self.sight.flows}
        self.shapes = {node: shape_of(node, facts, node not in fed) for node in self.sight.above}
        self.boxes: dict[str, Box] = {}
        self.frames: list[Box] = []
        self.blocks: dict[Node, tuple[Block, float, float]] = {}
        self.box_of = boxes_of(self.sight, self.shapes)
        self.gates: dict[Op, str] = {}

    def scene(self) -> Scene:
        """The scene."""
        root = block_of(self.root, self.shapes, tuple(self.sight.flows), self.sight.above, is_root=True)
        width = max(root.left + root.right, _LEAST_LANE)
        spare = (width - root.left - root.right) / 2
        self.anchor = _MARGIN + spare + root.left
        self.mirror = 2 * (_MARGIN + width + _CENTRE / 2)
        self.put(root, self.anchor, _TOP)
        lanes = [Lane("forward", _MARGIN, width)]
        if self.has(Pass.BACKWARD):
            lanes.append(Lane("backward", _MARGIN + width + _CENTRE, width))
        right = lanes[-1].x + width + _BETWEEN_LANES
        for made_by in (Pass.COLLECTIVE, Pass.UPDATE):
            if self.has(made_by):
                lanes.append(self.outer_lane(made_by, right))
                right = lanes[-1].x + lanes[-1].width + _BETWEEN_LANES
        box_of = {**self.box_of, **self.gates}
        edges = Lines(self.sight, self.shapes, self.blocks, self.boxes, self.mirror, box_of).all()
        bottom = max((b.bottom for b in (*self.boxes.values(), *self.frames)), default=_TOP + 20)
        end = lanes[-1].x + lanes[-1].width + _MARGIN
        boxes = tuple(self.boxes.values())
        height = bottom + _MARGIN + (20 if self.caption else 0)
        opens = frozenset(node.number for node in self.sight.opened)
        return Scene(end, height, tuple(lanes), tuple(self.frames), boxes, edges, self.caption, opens)

    def has(self, made_by: Pass) -> bool:
        return any(op.made_by is made_by for op in self.facts.program.ops)

    def put(self, block: Block, x: float, y: float) -> None:
        """The boxes of a block at their places in the forward and the backward lane."""
        self.blocks[block.node] = (block, x, y)
        if block.shape is not None:
            for box in block.shape.forward:
                self.boxes[box.key] = box.moved(x, y)
            for box in block.shape.backward:
                self.boxes[box.key] = box.moved(self.mirror - x, y)
            return
        if block.node is not self.root:
            self.frame(block, x, y)
        for child, dx, dy in block.inside:
            self.put(child, x + dx, y + dy)

    def frame(self, block: Block, x: float, y: float) -> None:
        """The frame around an open group, in each lane that has something of it."""
        node = block.node
        times = f"× {node.times}" if node.times > 1 else ""
        width = block.left + block.right
        for lane, left in (("forward", x - block.left), ("backward", self.mirror - x - block.right)):
            if any(str(op.made_by) == lane for op in node.ops):
                lines = (shortened(node.title, TITLE),) if lane == "forward" else ()
                box = Box(f"{node.number}{lane[0]}", "frame", lane, left, y, width, block.height, lines)
                self.frames.append(replace(box, note=times if lane == "forward" else "", node=node.number))

    def outer_lane(self, made_by: Pass, x: float) -> Lane:
        """The collective or the update lane: each op at the height of what it belongs to, or below."""
        begin, x = x, self.put_gates(x) if made_by is Pass.UPDATE else x
        wanted = [(0.0, pair) for pair in self.loose(made_by)]
        for node in self.sight.above:
            shape, (_, _, y) = self.shapes[node], self.blocks[node]
            pairs = shape.beside(made_by)
            wanted += [(y + shape.top + (10 if len(pairs) == 1 else 0), pair) for pair in pairs]
        wanted.sort(key=lambda entry: entry[0])
        first = max((box.width for _, (box, _) in wanted), default=0)
        second = max((pill.width for _, (_, pill) in wanted if pill), default=0)
        free = _TOP
        for y, (box, pill) in wanted:
            free = max(free, y)
            self.boxes[box.key] = box.moved(x + first - box.width, free)
            if pill is not None:
                self.boxes[pill.key] = pill.moved(x + first + 22, free)
            free += SMALL + GAP
        end = x + first + (22 + second if second else 0)
        return Lane(str(made_by), begin, max(end - begin, _LEAST_LANE))

    def put_gates(self, x: float) -> float:
        """Place ops that read several gradients upright before the updates; returns where these begin."""
        sources = {op: [b for b in map(self.maker_box, op.inputs) if b] for op in self.tree.loose}
        wide = [(op, found) for op, found in sources.items() if len(set(found)) > 1]
        for i, (op, boxes) in enumerate(wide if self.root is self.tree.root else ()):
            top, bottom = min(b.y for b in boxes) - GAP, max(b.bottom for b in boxes) + GAP
            title = shortened(op.type, int((bottom - top - 12) / SMALL_WIDTH))
            key, places = f"gate{i}", self.facts.places([op])
            self.boxes[key] = Box(key, "gate", "update", x, top, SMALL, bottom - top, (title,), places)
            self.gates[op] = key
            x += SMALL + 26
        return x

    def maker_box(self, v: Variable) -> Box | None:
        """The box in which a gradient is made."""
        maker = self.sight.makers.get(v)
        if maker is None or maker.made_by not in (Pass.BACKWARD, Pass.COLLECTIVE):
            return None
        key = self.box_of.get(maker)
        return self.boxes.get(key) if key else None

    def loose(self, made_by: Pass) -> list[tuple[Box, Box | None]]:
        """The boxes of ops that belong to no place of the spine."""
        ops = tuple(op for op in self.tree.loose if op.made_by is made_by and op not in self.gates)
        if not ops or self.root is not self.tree.root:
            return []
        node = Node(-1, "", beside=ops)
        self.shapes[node] = shape_of(node, self.facts, False)
        return self.shapes[node].beside(made_by)
