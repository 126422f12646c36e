"""The visible nodes with some groups open: leaves and closed groups, and which of them reads from which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from onward.core.program import Op, Program, Variable
from onward.core.walk import producers
from onward.explain.draw.fold import Node, Tree

Flow = tuple[Node, Node]
"""A line down from one visible leaf to another."""


class Sight:
    """The visible part of a tree.

    Attributes:
        above: for each visible leaf the groups around it, itself first, the root last.
        cell: the visible leaf that each op is in.
        makers: the op that makes each Variable.
        flows: the lines down.
    """

    def __init__(self, tree: Tree, program: Program, opened: frozenset[Node], root: Node) -> None:
        self.tree, self.program, self.root = tree, program, root
        self.opened = opened | {root}
        self.above = {node: self._chain(node) for node in visible(root, self.opened)}
        self.cell = {op: leaf for leaf in self.above for op in leaf.ops}
        self.makers = producers(program)
        self.flows = self._forward_flows()

    def _chain(self, node: Node) -> tuple[Node, ...]:
        """A node and the groups around it."""
        found = [node]
        while found[-1] is not self.root:
            found.append(self.tree.parent[found[-1]])
        return tuple(found)

    def _forward_flows(self) -> dict[Flow, None]:
        """Which visible leaf reads of which other one, in the order of the ops."""
        found: dict[Flow, None] = {}
        for maker, op, _ in self.read(op for op in self.program.ops if op in self.tree.spine):
            a, b = self.cell[maker], self.cell[op]
            if maker in self.tree.spine and a is not b:
                found[a, b] = None
        return found

    def read(self, ops: Iterable[Op]) -> Iterator[tuple[Op, Op, Variable]]:
        """All that ops read of others, as maker, reader and Variable; of equal layers, what one reads."""
        for op in ops:
            for v in op.inputs if op in self.cell else ():
                maker = self.makers.get(v)
                if maker is not None and maker in self.cell and not self._is_among_layers(maker, op):
                    yield maker, op, v

    def _is_among_layers(self, maker: Op, reader: Op) -> bool:
        """Whether this is read among equal layers, and not within the one that is drawn for all."""
        a, b = self.tree.layer.get(maker), self.tree.layer.get(reader)
        return a is not None and b is not None and a[0] is b[0] and (a[1], b[1]) != (0, 0)


def visible(node: Node, opened: frozenset[Node]) -> Iterator[Node]:
    """The leaves and the closed groups that one sees."""
    if node in opened and node.children:
        for child in node.children:
            yield from visible(child, opened)
    elif node.children or node.main is not None:
        yield node
