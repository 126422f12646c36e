"""The tree that a picture opens and closes: scopes within scopes, equal layers as one, ops as leaves.

A leaf is one op of the spine together with all that is drawn beside it: small ops that only prepare one
of its inputs, its gradient ops, collectives and updates. What stands for several layers holds the ops of all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, groupby

from onward.core.cost import cost
from onward.core.homes import homes, scopes, spine_of
from onward.core.program import Op, Program, Variable
from onward.core.walk import consumers
from onward.explain.draw.repeats import Repeat, common, repeats_of, stand_ins

MOST_IN_ONE = 60
"""How many boxes one scope shows; more are folded to parts."""

_MOST_STEPS, _LITTLE = 2, 4
_Key = str | Repeat
_Path = tuple[_Key, ...]


@dataclass(frozen=True, eq=False)
class Node:
    """A leaf or a group of the tree.

    Attributes:
        number: its place in the tree, counted from the root, which is 0.
        title: the name of the scope, or the type of the op.
        main: the op of the spine that a leaf is about.
        side: ops that prepare an input of it from state alone.
        beside: the other ops drawn beside it: gradients, collectives and updates, in order.
        children: what a group opens to.
        ops: all ops it stands for.
        times: how many equal layers it stands for.
        is_part: whether it was made only because there is too much to draw.
    """

    number: int
    title: str
    main: Op | None = None
    side: tuple[Op, ...] = ()
    beside: tuple[Op, ...] = ()
    children: tuple[Node, ...] = ()
    ops: tuple[Op, ...] = ()
    times: int = 1
    is_part: bool = False


@dataclass(frozen=True)
class Tree:
    """A Program as a tree.

    Attributes:
        root: the whole Program.
        stands: for each op of a repeated layer, the op that is drawn in its place.
        leaf: the leaf that every op is drawn in; ops that belong nowhere have none.
        parent: the group that each node is in.
        loose: the ops that belong to no op of the spine, such as counting the steps.
        nodes: every node.
        spine: the ops in whose order the picture goes down.
        layer: for each op of repeated layers, which these are, and the number of its layer.
    """

    root: Node
    stands: Mapping[Op, Op]
    leaf: Mapping[Op, Node]
    parent: Mapping[Node, Node]
    loose: tuple[Op, ...]
    nodes: tuple[Node, ...]
    spine: frozenset[Op]
    layer: Mapping[Op, tuple[Repeat, int]]

    @cached_property
    def by_number(self) -> Mapping[int, Node]:
        """Every node by its number."""
        return {node.number: node for node in self.nodes}


def tree_of(program: Program) -> Tree:
    """The tree of a Program."""
    return _TreeBuilder(program).tree()


class _TreeBuilder:
    """The making of a tree, with what is known of the Program's ops."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.spine = spine_of(program)
        named = scopes(program)
        self.scopes = {op: tuple(named[op].split("/")) if named[op] else () for op in self.spine}
        self.repeats = repeats_of(program, named)
        self.stands = stand_ins(self.repeats)
        self.homes = homes(program)
        self.shown = [op for op in self.spine if self.stands.get(op, op) is op]
        self.paths = self.all_paths()
        self.sides = self.side_ops()
        self.beside, self.standing, self.loose = self.members()
        self.numbers = count()
        self.nodes: list[Node] = []
        self.parent: dict[Node, Node] = {}

    def tree(self) -> Tree:
        """The whole tree."""
        inside = {op for ops in self.sides.values() for op in ops}
        leaves = [(self.paths[op], op) for op in self.shown if op not in inside]
        next(self.numbers)
        children = tuple(self.level(leaves, 0))
        root = self.group(0, self.program.name, children)
        self.nodes.sort(key=lambda node: node.number)
        leaf = {op: node for node in self.nodes if not node.children for op in node.ops}
        return Tree(
            root,
            self.stands,
            leaf,
            self.parent,
            self.loose,
            tuple(self.nodes),
            frozenset(self.spine),
            self.layers(),
        )

    def layers(self) -> dict[Op, tuple[Repeat, int]]:
        """The layer that each op of repeated layers lives in."""
        own = {op: (r, i) for r in self.repeats for i, layer in enumerate(r.layers) for op in layer}
        return {op: own[home] for op, home in self.homes.items() if home is not None and home in own}

    def members(self) -> tuple[dict[Op, list[Op]], dict[Op, list[Op]], tuple[Op, ...]]:
        """Group the ops: those beside each spine op, those that it stands for, and those without a home."""
        beside: dict[Op, list[Op]] = {}
        standing: dict[Op, list[Op]] = {}
        loose: list[Op] = []
        for op in self.program.ops:
            home = self.homes.get(op)
            if home is None:
                loose.append(op)
                continue
            standing.setdefault(self.stands.get(home, home), []).append(op)
            if home is not op:
                beside.setdefault(home, []).append(op)
        return beside, standing, tuple(loose)

    def all_paths(self) -> dict[Op, _Path]:
        """For each drawn op the scopes and repeated layers around it, outermost first."""
        paths: dict[Op, _Path] = {op: self.scopes[op] for op in self.shown}
        for repeat in self.repeats:
            shared = common([self.scopes[op] for layer in repeat.layers for op in layer])
            own = common([self.scopes[op] for op in repeat.layers[0]])
            for op in repeat.layers[0]:
                paths[op] = (*shared, repeat, *self.scopes[op][len(own) :])
        return paths

    def side_ops(self) -> dict[Op, list[Op]]:
        """For each op, the small ones that only prepare an input of it, from state alone."""
        found: dict[Op, list[Op]] = {}
        belongs: dict[Op, Op] = {}
        for op, reader in reversed(self.preparations().items()):
            belongs[op] = belongs.get(reader, reader)
            found.setdefault(belongs[op], []).insert(0, op)
        return found

    def preparations(self) -> dict[Op, Op]:
        """The ops that compute little, from state or what another one made, each with its one reader."""
        readers, spine = consumers(self.program), set(self.spine)
        found: dict[Op, Op] = {}
        steps: dict[Variable, int] = dict.fromkeys((*self.program.state, *self.program.constants), 0)
        for op in self.shown:
            reading = [r for v in op.outputs for r in readers.get(v, ()) if r in spine]
            depth = max((steps.get(v, _MOST_STEPS) for v in op.inputs), default=0) + 1
            is_near = len(reading) == 1 and self.paths.get(reading[0]) == self.paths[op]
            if is_near and depth <= _MOST_STEPS and _is_little(op):
                found[op] = reading[0]
                steps.update(dict.fromkeys(op.outputs, depth))
        return found

    def level(self, leaves: Sequence[tuple[_Path, Op]], depth: int) -> Iterator[Node]:
        """The nodes of one scope; a scope that is left and entered again makes two."""
        parts = list(self.split(leaves, depth))
        if len(parts) <= MOST_IN_ONE:
            for key, members in parts:
                yield from self.nodes_of(key, members, depth)
            return
        size = max(MOST_IN_ONE // 2, -(-len(parts) // MOST_IN_ONE))
        for i, begin in enumerate(range(0, len(parts), size)):
            yield self.part(parts[begin : begin + size], f"part {i + 1}", depth)

    def part(
        self, parts: Sequence[tuple[_Key | None, list[tuple[_Path, Op]]]], title: str, depth: int
    ) -> Node:
        """A group of neighbours of which there are too many."""
        number = next(self.numbers)
        children = tuple(n for key, members in parts for n in self.nodes_of(key, members, depth))
        return self.group(number, title, children, is_part=True)

    def split(
        self, leaves: Sequence[tuple[_Path, Op]], depth: int
    ) -> Iterator[tuple[_Key | None, list[tuple[_Path, Op]]]]:
        """Neighbours of the same scope together; the ops of a repeated layer are never torn apart."""
        together: dict[Repeat, list[tuple[_Path, Op]]] = {}
        for path, op in leaves:
            if isinstance(layers := _key(path, depth), Repeat):
                together.setdefault(layers, []).append((path, op))
        seen: set[Repeat] = set()
        for key, run in groupby(leaves, lambda leaf: _key(leaf[0], depth)):
            if isinstance(key, Repeat):
                if key not in seen:
                    seen.add(key)
                    yield key, together[key]
            elif key is None:
                yield from ((None, [leaf]) for leaf in run)
            else:
                yield key, list(run)

    def nodes_of(self, key: _Key | None, leaves: Sequence[tuple[_Path, Op]], depth: int) -> Iterator[Node]:
        """A leaf, or a group around several."""
        if key is None or (len(leaves) == 1 and isinstance(key, str)):
            for _, op in leaves:
                yield self.one(op)
            return
        number = next(self.numbers)
        children = tuple(self.level(leaves, depth + 1))
        if isinstance(key, str) and len(children) == 1 and children[0].times == 1:
            (inner,) = children
            yield self.group(number, f"{key}/{inner.title}", inner.children, remove=inner)
        else:
            times = key.times if isinstance(key, Repeat) else 1
            yield self.group(number, key if isinstance(key, str) else self.title(key), children, times)

    def title(self, repeat: Repeat) -> str:
        """The scopes of the first and the last layer, or what to call layers that have none."""
        shared = len(common([self.scopes[op] for layer in repeat.layers for op in layer]))
        names = ["/".join(common([self.scopes[op] for op in layer])[shared:]) for layer in repeat.layers]
        if not names[0]:
            return "layer"
        return names[0] if names[0] == names[-1] else f"{names[0]} … {names[-1]}"

    def one(self, op: Op) -> Node:
        """The leaf of an op."""
        side = tuple(self.sides.get(op, ()))
        beside = tuple(b for o in (op, *side) for b in self.beside.get(o, ()))
        order = {o: i for i, o in enumerate(beside)}
        ops = tuple(o for s in (*side, op) for o in self.standing.get(s, ()))
        node = Node(
            next(self.numbers), op.type, op, side, tuple(sorted(beside, key=order.__getitem__)), (), ops
        )
        self.nodes.append(node)
        return node

    def group(
        self,
        number: int,
        title: str,
        children: tuple[Node, ...],
        times: int = 1,
        is_part: bool = False,
        remove: Node | None = None,
    ) -> Node:
        """A group of these nodes."""
        ops = tuple(op for child in children for op in child.ops)
        node = Node(number, title, None, (), (), children, ops, times, is_part)
        self.parent.update((child, node) for child in children)
        if remove is not None:
            self.nodes.remove(remove)
        self.nodes.append(node)
        return node


def _is_little(op: Op) -> bool:
    """Whether an op does but a few operations for each number it makes."""
    return cost(op).flops <= _LITTLE * sum(v.size for v in op.outputs)


def _key(path: _Path, depth: int) -> _Key | None:
    return path[depth] if len(path) > depth else None
