"""The shape of a leaf or a closed group: its boxes around the middle of the main one, lane by lane."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from onward.core.program import Op, Variable
from onward.core.show import human_number, short_type
from onward.core.words import Kind, Pass
from onward.explain.draw.facts import Facts, together
from onward.explain.draw.fold import Node
from onward.explain.draw.scene import Box, shortened, small_width, title_width

ROW, SMALL, GAP = 40.0, 20.0, 4.0
FOLDED = 58.0
BESIDE = 16.0
_ARROW = 12.0
_PADDING = 20.0
_LONGEST_TITLE, _LONGEST_SMALL, _LONGEST_NAME = 24, 30, 16
_NARROWEST = 96.0
_MOST_PILLS, _MOST_CHIPS = 3, 3


@dataclass
class Shape:
    """The boxes of a leaf; those of forward and backward count from the middle of its main box.

    ``reach``: how far it extends to the outer side. ``half``: how far to the inner side.
    """

    forward: list[Box] = field(default_factory=list)
    backward: list[Box] = field(default_factory=list)
    collective: list[Box] = field(default_factory=list)
    update: list[tuple[Box, Box | None]] = field(default_factory=list)
    half: float = 0.0
    reach: float = 0.0
    height: float = 0.0
    top: float = 0.0
    box_of: dict[Op, str] = field(default_factory=dict)
    links: list[tuple[str, str]] = field(default_factory=list)

    def beside(self, made_by: Pass) -> list[tuple[Box, Box | None]]:
        """The boxes for the collective or the update lane, each with the pill that follows it."""
        return self.update if made_by is Pass.UPDATE else [(box, None) for box in self.collective]


def shape_of(node: Node, facts: Facts, is_first: bool) -> Shape:
    """The boxes of a leaf, or of a group that is closed.

    Args:
        node: what to draw.
        facts: about its Program.
        is_first: whether nothing leads to it, so that its feed may stand above it.
    """
    return _Shaper(node, facts, is_first).shape()


class _Shaper:
    """The making of one shape."""

    def __init__(self, node: Node, facts: Facts, is_first: bool) -> None:
        self.node, self.facts, self.is_first = node, facts, is_first
        self.made = Shape()
        self.by_pass: dict[Pass, list[Op]] = {made_by: [] for made_by in Pass}
        own = node.ops if node.children else (*node.side, *([node.main] if node.main else ()), *node.beside)
        for op in own:
            self.by_pass[op.made_by].append(op)
        self.spine = node.main.made_by if node.main else Pass.FORWARD

    def shape(self) -> Shape:
        """All boxes in their places."""
        main = [self.fold(Pass.FORWARD)] if self.node.children else self.main_boxes()
        facing = [self.fold(Pass.BACKWARD)] if self.node.children else self.gradient_boxes()
        main, facing = [b for b in main if b], [b for b in facing if b]
        width = max((box.width for box in (*main, *facing)), default=_NARROWEST)
        self.made.half = width / 2
        above = self.feed_above()
        self.made.top = SMALL + 18 if above else 0.0
        self.stack(self.made.forward, main, width)
        self.stack(self.made.backward, facing, width)
        self.column(self.made.forward, self.pills(above), -1)
        self.column(self.made.backward, self.side_gradients(), 1)
        self.made.forward.extend(above)
        self.link()
        self.updates()
        reach = max((max(-b.x, b.right) for b in (*self.made.forward, *self.made.backward)), default=0.0)
        self.made.reach = max(reach, self.made.half)
        lanes = (*self.made.forward, *self.made.backward)
        rows = max(len(self.made.update), len(self.made.collective))
        self.made.height = max([0.0, *(b.bottom for b in lanes), rows * (SMALL + GAP)])
        return self.made

    def stack(self, into: list[Box], boxes: Sequence[Box], width: float) -> None:
        """Boxes below each other, all of one width."""
        y = self.made.top
        for box in boxes:
            into.append(replace(box, x=-width / 2, y=y, width=width))
            y += box.height + _ARROW

    def column(self, into: list[Box], boxes: Sequence[Box], side: int) -> None:
        """Small boxes below each other, on the left (-1) or on the right (1) of the main one."""
        width = max((box.width for box in boxes), default=0.0)
        inner = self.made.half + BESIDE
        y = self.made.top + (0 if len(boxes) > 1 else (ROW - SMALL) / 2)
        for box in boxes:
            x = inner if side > 0 else -inner - box.width
            into.append(replace(box, x=x if side > 0 else -inner - width + (width - box.width), y=y))
            y += SMALL + GAP

    def link(self) -> None:
        """Lines from what is read to the main box; a small op beside it has its own."""
        aside = {v.name for op in self.node.side for v in op.inputs}
        mains = [box.key for box in (*self.made.forward, *self.made.backward) if box.form in ("op", "fold")]
        for box in self.made.forward if mains else ():
            if box.form == "pill" and not aside.issuperset(box.variables):
                self.made.links.append((box.key, mains[0]))

    def main_boxes(self) -> list[Box]:
        """The op of the spine."""
        op = self.node.main
        if op is None or op.made_by is not Pass.FORWARD:
            return []
        return [self.op_box("f", op, "forward", self.makes_loss((op, *self.by_pass[Pass.COLLECTIVE])))]

    def makes_loss(self, ops: Iterable[Op]) -> bool:
        """Whether one of these ops computes the loss, or its mean over devices."""
        return any(self.facts.program.loss in op.outputs for op in ops)

    def gradient_boxes(self) -> list[Box]:
        """The gradient op that faces the main op, on top of the sums of what it reads."""
        ops = [op for op in self.by_pass[Pass.BACKWARD] if not self.is_beside(op)]
        facing = self.facing() or ops[-1:]
        rest = [op for op in reversed(ops) if op not in facing]
        boxes = [self.op_box(f"b{i}", op, "backward") for i, op in enumerate(facing[:2])]
        return [*boxes, *self.chips("c", [*facing[2:], *rest], "backward")]

    def facing(self) -> list[Op]:
        """The gradient ops of the main op."""
        main = self.node.main
        ops = self.by_pass[Pass.BACKWARD]
        return [op for op in ops if main is not None and (op is main or op.of in main.outputs)]

    def is_beside(self, op: Op) -> bool:
        """Whether a gradient op belongs to a small op beside the main one, or follows on what faces that."""
        if op.of is None and (facing := self.facing()):
            return self.facts.index[op] > self.facts.index[facing[-1]]
        return any(op.of in side.outputs for side in self.node.side if op.of is not None)

    def side_gradients(self) -> list[Box]:
        """The gradients of the small ops."""
        if self.node.children:
            return []
        return self.chips("g", [op for op in self.by_pass[Pass.BACKWARD] if self.is_beside(op)], "backward")

    def feeds(self) -> list[Variable]:
        """The data that is read here."""
        ops = self.by_pass[self.spine]
        return list(dict.fromkeys(v for op in ops for v in op.inputs if v in set(self.facts.program.inputs)))

    def feed_above(self) -> list[Box]:
        """The feed of the first op, above it."""
        feeds = self.feeds()
        if not self.is_first or not feeds:
            return []
        pill = self.pill("d", feeds[0], "forward")
        return [replace(pill, x=-pill.width / 2, y=0)]

    def pills(self, above: Sequence[Box]) -> list[Box]:
        """The boxes of the feeds and state that are read here, and of the small ops that prepare them."""
        shown = {name for box in above for name in box.variables}
        feeds = [v for v in self.feeds() if v.name not in shown]
        ops = self.by_pass[self.spine]
        read = dict.fromkeys(v for op in ops for v in op.inputs)
        known = {*self.facts.program.state, *self.facts.program.constants} - self.facts.hyperparameters
        state = [v for v in read if v in known]
        boxes = self.some("i", feeds, "forward", "feeds") + self.some("p", state, "state", "parameters")
        side = [] if self.node.children else self.chips("s", list(self.node.side), "forward")
        return boxes + side

    def some(self, key: str, variables: Sequence[Variable], lane: str, noun: str) -> list[Box]:
        """A pill for each Variable; one for all where they are many."""
        most = 1 if self.node.children else _MOST_PILLS
        if len(variables) <= most:
            return [self.pill(f"{key}{i}", v, lane) for i, v in enumerate(variables)]
        if any(v.kind is not Kind.PARAMETER for v in variables) and noun == "parameters":
            noun = "arrays"
        size = human_number(sum(v.size for v in variables))
        text = (f"{len(variables)} {noun}", size)
        return [self.small(key, lane, text, variables=tuple(v.name for v in variables), form="pill")]

    def pill(self, key: str, v: Variable, lane: str) -> Box:
        """A Variable."""
        text = (shortened(v.name, _LONGEST_NAME), shortened(short_type(v), _LONGEST_NAME))
        return self.small(key, lane, text, variables=(v.name,), form="pill")

    def small(
        self,
        key: str,
        lane: str,
        lines: tuple[str, ...],
        ops: tuple[int, ...] = (),
        variables: tuple[str, ...] = (),
        form: str = "chip",
    ) -> Box:
        """A box of one line."""
        width = sum(map(small_width, lines)) + small_width(" ") * (len(lines) - 1) + 16
        return Box(
            f"{self.node.number}{key}", form, lane, 0, 0, width, SMALL, lines, ops, variables=variables,
            node=self.node.number,
        )  # fmt: skip

    def chips(self, key: str, ops: Sequence[Op], lane: str) -> list[Box]:
        """Small boxes for these ops; one for all where they are many."""
        if len(ops) > _MOST_CHIPS:
            return [self.gathered(key, ops, lane)]
        boxes = []
        for i, op in enumerate(ops):
            boxes.append(self.small(f"{key}{i}", lane, (shortened(op.type, 22),), self.facts.places([op])))
            self.made.box_of[op] = boxes[-1].key
        return boxes

    def op_box(self, key: str, op: Op, lane: str, emphasis: bool = False) -> Box:
        """A box of two lines: what the op is, and the type of what it computes."""
        title = shortened(op.type, _LONGEST_TITLE)
        types = [short_type(v) for v in op.outputs[: len(op.primal.out_avals) if op.primal else None]]
        below = shortened(types[0], 20) + (f" +{len(types) - 1}" if len(types) > 1 else "") if types else ""
        below += " · loss" if emphasis else ""
        note = self.facts.lengths.get(op, "")
        wide = title_width(title) + (title_width(note) + 12 if note else 0)
        width = max(wide, small_width(below), _NARROWEST - _PADDING)
        box = Box(
            f"{self.node.number}{key}", "op", lane, 0, 0, width + _PADDING, ROW, (title, below),
            self.facts.places([op]), note, emphasis=emphasis, node=self.node.number,
        )  # fmt: skip
        self.made.box_of[op] = box.key
        return box

    def fold(self, made_by: Pass) -> Box | None:
        """The box of a closed group in a lane."""
        ops = self.by_pass[made_by]
        if not ops:
            return None
        key = f"{self.node.number}{made_by.value[0]}"
        title = shortened(self.node.title, _LONGEST_SMALL)
        words = f"{len(ops):,} ops" if len(ops) > 1 else "1 op"
        flops = sum(self.facts.costs[op].flops for op in ops)
        lines = (title, words, f"{human_number(flops)} FLOPs")
        times = f"× {self.node.times}" if self.node.times > 1 else ""
        width = max(
            title_width(title) + title_width(times) + (16 if times else 0), *map(small_width, lines[1:])
        )
        emphasis = made_by is Pass.FORWARD and self.makes_loss((*ops, *self.by_pass[Pass.COLLECTIVE]))
        self.made.box_of.update((op, key) for op in ops)
        return Box(
            key, "fold", str(made_by), 0, 0, max(width + _PADDING + 16, 130), FOLDED, lines,
            self.facts.places(ops), times, emphasis=emphasis, node=self.node.number,
        )  # fmt: skip

    def updates(self) -> None:
        """Collective and update ops, each update with the next value it makes."""
        self.made.collective = self.outer("x", Pass.COLLECTIVE)
        for i, box in enumerate(self.outer("u", Pass.UPDATE)):
            made = [v for place in box.ops for v in self.facts.program.ops[place].outputs]
            self.made.update.append((box, self.next_pill(f"n{i}", made)))

    def outer(self, key: str, made_by: Pass) -> list[Box]:
        """The chips of a lane; a closed group has but one."""
        ops = self.by_pass[made_by]
        is_one = self.node.children and len(ops) > 1
        return [self.gathered(key, ops, str(made_by))] if is_one else self.chips(key, ops, str(made_by))

    def gathered(self, key: str, ops: Sequence[Op], lane: str) -> Box:
        """One chip for several ops."""
        box = self.small(key, lane, (together(ops),), self.facts.places(ops))
        self.made.box_of.update((op, box.key) for op in ops)
        return box

    def next_pill(self, key: str, made: Sequence[Variable]) -> Box | None:
        """The next values of state among these Variables; parameters first."""
        old = [(self.facts.following[v], v) for v in made if v in self.facts.following]
        parameters = [new for before, new in old if before.kind is Kind.PARAMETER] or [new for _, new in old]
        if not parameters:
            return None
        names = tuple(v.name for _, v in old)
        many = f"{len(parameters)} next values"
        text = shortened(parameters[0].name, 20) if len(parameters) == 1 else many
        return self.small(key, "state", (text,), variables=names, form="pill")
