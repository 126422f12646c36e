"""The pictures that a reader comes to by opening and closing scopes, and the ways between them.

Every picture is complete in itself. From the first one each click on a closed scope leads to the picture in
which it is open, each click on the title of an open one to that in which it is closed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from onward.core.program import Program
from onward.explain.draw.facts import facts_of
from onward.explain.draw.fold import Node, Tree, tree_of
from onward.explain.draw.place import scene_of
from onward.explain.draw.scene import Scene
from onward.explain.draw.sight import visible

COMFORTABLE, READABLE = 24, 400
"""How many leaves a picture opens by itself, and how many it opens when asked to."""

_MOST_BOXES, _VAST = 12_000, 3_000


@dataclass(frozen=True)
class View:
    """One picture of an album.

    Attributes:
        scene: what it shows.
        path: the groups around what it shows, outermost first, with the views to go back to.
        goes: for a node that can be opened or closed, the number of the view to go to.
    """

    scene: Scene
    path: tuple[tuple[str, int], ...]
    goes: Mapping[int, int]


class Album:
    """A Program, its tree, and the pictures of it."""

    def __init__(self, program: Program, depth: int | None = None) -> None:
        self.program = program
        self.tree: Tree = tree_of(program)
        self.level = levels(self.tree)
        self.facts = facts_of(program)
        self.opened = self.by_depth(depth) if depth is not None else self.by_size()

    def by_depth(self, depth: int) -> frozenset[Node]:
        """The groups above a level; fewer where these are too many to read."""
        while True:
            opened = self.above(depth)
            if depth <= 1 or len(list(visible(self.tree.root, opened))) <= READABLE:
                return opened
            depth -= 1

    def by_size(self) -> frozenset[Node]:
        """The groups that can be opened, level by level, with a picture that is still read at a glance."""
        opened = self.above(1)
        for depth in range(2, max(self.level.values(), default=0) + 2):
            deeper = self.above(depth)
            if len(list(visible(self.tree.root, deeper))) > COMFORTABLE:
                break
            opened = deeper
        return opened

    def above(self, depth: int) -> frozenset[Node]:
        """The groups above a level."""
        return frozenset(n for n in self.tree.nodes if n.children and self.level[n] < max(depth, 1))

    def first(self) -> Scene:
        """The picture to begin with."""
        return self.scene(self.opened)

    def scene(self, opened: frozenset[Node], root: Node | None = None) -> Scene:
        """The picture with these groups open, of the whole or of one group."""
        return scene_of(self.tree, self.facts, opened, self.caption(opened), root)

    def caption(self, opened: frozenset[Node]) -> str:
        """How many ops the closed groups of a picture hide, as text; empty if no group is closed."""
        seen = list(visible(self.tree.root, opened))
        closed = [node for node in seen if node.children]
        if not closed:
            return ""
        hidden, total = sum(len(node.ops) for node in closed), len(self.program.ops)
        return f"{hidden:,} of {total:,} ops are in {len(closed)} folded box{'es' * (len(closed) > 1)}"

    def views(self) -> list[View]:
        """All pictures, the first one first."""
        return _AlbumWalk(self).views()


class _AlbumWalk:
    """The way through all pictures, nearest first, until there are enough."""

    def __init__(self, album: Album) -> None:
        self.album, self.tree = album, album.tree
        groups = [node for node in self.tree.nodes if node.children]
        size = len(list(visible(self.tree.root, album.opened)))
        self.is_vast = size * len(groups) > _VAST

    def views(self) -> list[View]:
        """All of them."""
        start = self.album.opened, self.tree.root
        number = {start: 0}
        waiting = deque([start])
        made: list[tuple[Scene, tuple[tuple[str, int], ...], dict[int, tuple[frozenset[Node], Node]]]] = []
        boxes = 0
        while waiting and boxes < _MOST_BOXES:
            opened, root = waiting.popleft()
            scene = self.album.scene(opened, root)
            boxes += len(scene.boxes)
            ways = dict(self.ways(opened, root))
            made.append((scene, self.path(root, number), ways))
            for state in ways.values():
                if state not in number:
                    number[state] = len(number)
                    waiting.append(state)
        return [
            View(scene, path, {n: number[state] for n, state in ways.items() if number[state] < len(made)})
            for scene, path, ways in made
        ]

    def ways(self, opened: frozenset[Node], root: Node) -> Iterator[tuple[int, tuple[frozenset[Node], Node]]]:
        """For each group on a picture, what a click on it leads to."""
        for node in visible(root, opened | {root}):
            if node.children:
                yield node.number, self.with_open(node, opened)
        for node in sorted(opened, key=lambda n: n.number):
            if node is not root and root in self.around(node) and all(n in opened for n in self.around(node)):
                yield node.number, (self.without(node), root)

    def with_open(self, node: Node, opened: frozenset[Node]) -> tuple[frozenset[Node], Node]:
        """The picture in which a group is open; a group of a vast Program fills it alone."""
        if self.is_vast and node not in self.album.opened:
            return self.album.opened | {node}, node
        return self.album.opened | {node, *self.around(node)}, self.tree.root

    def without(self, node: Node) -> frozenset[Node]:
        """The open groups of the picture in which a group is closed."""
        inside = {n for n in self.album.opened if node in self.around(n)}
        return (self.album.opened | set(self.around(node))) - inside - {node}

    def around(self, node: Node) -> list[Node]:
        """The groups around a node, innermost first."""
        found: list[Node] = []
        while node in self.tree.parent:
            node = self.tree.parent[node]
            found.append(node)
        return found

    def path(
        self, root: Node, number: Mapping[tuple[frozenset[Node], Node], int]
    ) -> tuple[tuple[str, int], ...]:
        """The groups around a root, each with the picture that shows it."""
        chain = [root, *self.around(root)][::-1]
        views = [number.get(self.with_open(n, self.album.opened), 0) if i else 0 for i, n in enumerate(chain)]
        return tuple((_name(n), view) for n, view in zip(chain, views, strict=True))


def levels(tree: Tree) -> dict[Node, int]:
    """How many groups are around each node."""
    found = {tree.root: 0}
    waiting = [tree.root]
    for node in waiting:
        found.update((child, found[node] + 1) for child in node.children)
        waiting.extend(node.children)
    return found


def _name(node: Node) -> str:
    return node.title + (f" × {node.times}" if node.times > 1 else "")
