"""The parts of a tree: the containers and leaves that may replace one another from step to step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from onward.core.program import Variable
from onward.core.structure import Static, Structure, path_keys, same_static


@dataclass(frozen=True, eq=False)
class TreePart:
    """A container or a leaf in a tree, with everything in it.

    Attributes:
        treedef: how it is built.
        leaves: the Variables and static values in it.
        place: at which argument or result of the step it lies.
        start: at which leaf of the tree it begins.
        around: where the container begins and ends that it lies in; None for what is an argument or one of
            several results.
        path: the keys and positions that lead to it, of results alone, and of no more than two containers.
    """

    treedef: Any
    leaves: tuple[Variable | Static, ...]
    place: int
    start: int
    around: tuple[int, int] | None = None
    path: tuple[int | str, ...] | None = None

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The Variables in it."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, Variable))

    @property
    def form(self) -> tuple[Any, ...]:
        """The types of all leaves, which must be equal for one part to replace another."""
        return tuple((v.shape, v.dtype) if isinstance(v, Variable) else None for v in self.leaves)

    @property
    def is_numbers(self) -> bool:
        """Whether it is a number, or several in a row, that no key or field tells from other numbers."""
        single = all(not v.shape and not jnp.issubdtype(v.dtype, jax.dtypes.prng_key) for v in self.variables)
        return single and not self.bears_keys

    @property
    def is_keyed(self) -> bool:
        """Whether it is a container with keys or fields."""
        return _is_keyed(self.treedef)

    @property
    def bears_keys(self) -> bool:
        """Whether there is a container with keys or fields in it."""
        return _bears_keys(self.treedef)

    @property
    def bears_own(self) -> bool:
        """Whether there is a container of somebody's own in it."""
        return bears_own(self.treedef)

    def is_accompanied(self, others: Iterable[TreePart]) -> bool:
        """Whether one of these parts lies in the container that it lies in, if that is one."""
        if self.around is None:
            return True
        begin, end = self.around
        return any(begin <= other.start and other.start + len(other.leaves) <= end for other in others)

    def is_built_as(self, other: TreePart) -> bool:
        """Whether both have the same containers and the same static values."""
        statics = zip(self.leaves, other.leaves, strict=True)
        return bool(self.treedef == other.treedef) and all(
            same_static(a.value, b.value)
            for a, b in statics
            if isinstance(a, Static) and isinstance(b, Static)
        )

    def is_alike(self, other: TreePart) -> bool:
        """Whether both are built of the same containers, types and static values."""
        return self.form == other.form and self.is_built_as(other)

    def within(self, other: TreePart) -> bool:
        """Whether it is a part of that part, or that part itself."""
        begin, end = other.start, other.start + len(other.leaves)
        return begin <= self.start and self.start + len(self.leaves) <= end

    def overlaps(self, other: TreePart) -> bool:
        """Whether one is a part of the other."""
        return self.within(other) or other.within(self)


def _is_keyed(treedef: Any) -> bool:
    """Whether it is a container with keys or fields."""
    kind, _ = treedef.node_data() or (None, None)
    return kind not in (None, type(None), tuple, list)


def _bears_keys(treedef: Any) -> bool:
    """Whether there is a container with keys or fields in it."""
    return _is_keyed(treedef) or any(map(_bears_keys, treedef.children()))


def bears_own(treedef: Any) -> bool:
    """Whether there is a container of somebody's own in it, which are not of Python alone."""
    kind, _ = treedef.node_data() or (None, None)
    return kind not in (None, type(None), tuple, list, dict) or any(map(bears_own, treedef.children()))


def parts_of(structure: Structure, place: int | None, start: int = 0) -> Iterator[TreePart]:
    """The tree itself and every part of it that holds arrays, larger ones first.

    ``place`` None: the tree is what a step returns, its parts are the results.
    """

    def walk(
        treedef: Any,
        begin: int,
        place: int | None,
        around: tuple[int, int] | None,
        path: tuple[int | str, ...] | None,
    ) -> Iterator[TreePart]:
        leaves = structure.leaves[begin : begin + treedef.num_leaves]
        if any(isinstance(leaf, Variable) for leaf in leaves):
            yield TreePart(treedef, leaves, place or 0, start + begin, around, path)
        several = place is None and not _is_keyed(treedef)
        inside = None if several else (start + begin, start + begin + len(leaves))
        ways = _ways(treedef, leaves) if path is not None and len(path) < 2 else None
        for i, child in enumerate(treedef.children()):
            way = None if ways is None or path is None else (*path, ways[i])
            yield from walk(child, begin, i if place is None else place, inside, way)
            begin += child.num_leaves

    yield from walk(structure.treedef, 0, place, None, () if place is None else None)


def _ways(treedef: Any, leaves: Sequence[Any]) -> Sequence[int | str]:
    """The keys or fields of a container, or the positions in it."""
    children = treedef.children()
    if not _is_keyed(treedef):
        return range(len(children))
    whole = treedef.unflatten(leaves)
    paths = jax.tree_util.tree_leaves_with_path(whole, is_leaf=lambda x: x is not whole)
    return ["/".join(path_keys(path)) for path, _ in paths]
