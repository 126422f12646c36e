"""What a step carries on to the next one: which results replace which arguments.

A result replaces an argument if it is built as that is, container for container and type for type, and is
computed from it otherwise than by differentiation: by the update, or in the forward pass as statistics are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from onward.core.jaxprs import carries_of
from onward.core.program import Op, Variable
from onward.core.structure import Static, Structure, same_static
from onward.core.words import Pass


@dataclass(frozen=True, eq=False)
class Part:
    """A container or a leaf in a tree, with everything in it.

    Attributes:
        treedef: how it is built.
        leaves: the Variables and static values in it.
        place: at which argument or result of the step it lies.
        start: at which leaf of the tree it begins.
    """

    treedef: Any
    leaves: tuple[Variable | Static, ...]
    place: int
    start: int

    @property
    def variables(self) -> tuple[Variable, ...]:
        """The Variables in it."""
        return tuple(leaf for leaf in self.leaves if isinstance(leaf, Variable))

    @property
    def form(self) -> tuple[Any, ...]:
        """What two parts must have in common: the types of all leaves."""
        return tuple((v.shape, v.dtype) if isinstance(v, Variable) else None for v in self.leaves)

    def is_built_as(self, other: Part) -> bool:
        """Whether both have the same containers and the same static values."""
        statics = zip(self.leaves, other.leaves, strict=True)
        return bool(self.treedef == other.treedef) and all(
            same_static(a.value, b.value)
            for a, b in statics
            if isinstance(a, Static) and isinstance(b, Static)
        )

    def within(self, other: Part) -> bool:
        """Whether it is a part of that part, or that part itself."""
        begin, end = other.start, other.start + len(other.leaves)
        return begin <= self.start and self.start + len(self.leaves) <= end


def parts_of(structure: Structure, place: int | None, start: int = 0) -> Iterator[Part]:
    """The tree itself and every part of it that holds arrays, larger ones first.

    ``place`` None: the tree is what a step returns, its parts are the results.
    """

    def walk(treedef: Any, start: int, place: int | None, first: int) -> Iterator[Part]:
        leaves = structure.leaves[start : start + treedef.num_leaves]
        if any(isinstance(leaf, Variable) for leaf in leaves):
            yield Part(treedef, leaves, 0 if place is None else place, first + start)
        for i, child in enumerate(treedef.children()):
            yield from walk(child, start, i if place is None else place, first)
            start += child.num_leaves

    yield from walk(structure.treedef, 0, place, start)


_RESHAPING = ("convert_element_type", "copy", "pvary", "reshape", "squeeze")


class Flow:
    """From which arguments a Variable is computed by updating ops alone, or by forward ops alone.

    A loop that trains for several steps makes what it carries from what was carried into it.
    """

    def __init__(self, ops: Iterable[Op], given: Sequence[Variable]) -> None:
        self.bits = {v: 1 << i for i, v in enumerate(given)}
        self.updated = dict(self.bits)
        self.forward = dict(self.bits)
        self.made_by: dict[Variable, Pass] = {}
        for op in ops:
            updated = forward = 0
            for v in op.inputs:
                updated |= self.updated.get(v, 0)
                forward |= self.forward.get(v, 0)
            for v in op.outputs:
                self.made_by[v] = op.made_by
                passes_on = op.made_by in (Pass.UPDATE, Pass.COLLECTIVE) or op.type in _RESHAPING
                self.updated[v] = updated if passes_on else 0
                self.forward[v] = forward if op.made_by is Pass.FORWARD else 0
            for old, new in carries_of(op.body) if op.made_by is Pass.BACKWARD else ():
                self.updated[op.outputs[new]] = self.updated.get(op.inputs[old], 0)

    def is_updated(self, new: Variable, old: Variable) -> bool:
        """Whether the update makes one from the other."""
        made = self.made_by.get(new, Pass.FORWARD) is not Pass.FORWARD
        return made and bool(self.updated[new] & self.bits[old])

    def is_kept(self, new: Variable, old: Variable) -> bool:
        """Whether it is the argument itself, or what the forward pass makes of it."""
        return new is old or bool(self.forward.get(new, 0) & self.bits[old])

    def share(self, new: Part, old: Part) -> int:
        """How many arrays of a part the update makes from those of another; -1 if it does not replace it."""
        pairs = [*zip(new.variables, old.variables, strict=True)]
        updated = sum(self.is_updated(n, o) for n, o in pairs)
        if updated:
            return updated
        changed = [(n, o) for n, o in pairs if n is not o]
        gradients = any(self.made_by.get(n) is Pass.BACKWARD for n, _ in changed)
        if gradients or not any(self.is_kept(n, o) for n, o in changed):
            return -1
        surely = not jax.tree_util.treedef_is_leaf(new.treedef) or new.place == old.place
        return 0 if surely or _is_key(old.variables[0]) else -1


def _is_key(v: Variable) -> bool:
    """Whether it is a random key, or a number that is counted on."""
    return bool(jax.numpy.issubdtype(v.dtype, jax.dtypes.prng_key)) or (
        v.dtype == np.uint32 and v.shape == (2,)
    )


def carried(
    arguments: Iterable[Part], results: Sequence[Part], share: Callable[[Part, Part], int]
) -> list[tuple[Part, Part]]:
    """The pairs (result, argument) of parts where the result is the next value of the argument.

    The largest parts are matched first; what has the fewest candidates is decided first; among several
    candidates the one that most of the update reads, then the one that stands in the same place.
    """
    by_form: dict[Any, list[Part]] = {}
    for part in arguments:
        by_form.setdefault(part.form, []).append(part)
    choices: list[tuple[Part, list[Part]]] = []
    for new in results:
        if choices and new.within(choices[-1][0]):
            continue
        fitting = [old for old in by_form.get(new.form, ()) if old.is_built_as(new) and share(new, old) >= 0]
        if fitting:
            choices.append((new, fitting))
    return _decided(choices, share)


def _decided(
    choices: list[tuple[Part, list[Part]]], share: Callable[[Part, Part], int]
) -> list[tuple[Part, Part]]:
    decided: list[tuple[Part, Part]] = []
    while choices:
        new, fitting = min(choices, key=lambda choice: len(choice[1]))
        best = max(fitting, key=lambda old: (share(new, old), old.place == new.place))
        decided.append((new, best))
        rest = ((n, [o for o in olds if not _overlap(o, best)]) for n, olds in choices if n is not new)
        choices = [(n, olds) for n, olds in rest if olds]
    return decided


def _overlap(a: Part, b: Part) -> bool:
    return a.within(b) or b.within(a)


def next_values(pairs: Iterable[tuple[Part, Part]]) -> Mapping[Variable, Variable]:
    """For every argument that is replaced, the Variable that replaces it; what stays as it is left out."""
    return {
        old: new
        for result, argument in pairs
        for new, old in zip(result.variables, argument.variables, strict=True)
        if new is not old
    }


def without(structure: Structure, pairs: Sequence[tuple[Part, Part]]) -> Structure:
    """What a step returns, with None in place of every result that replaces an argument."""
    gone = [result for result, _ in pairs]

    def left(treedef: Any, start: int) -> Any:
        leaves = structure.leaves[start : start + treedef.num_leaves]
        part = Part(treedef, leaves, 0, start)
        if leaves and any(part.within(other) for other in gone):
            return None
        kind, keys = treedef.node_data() or (None, None)
        if kind not in (tuple, list, dict):
            return treedef.unflatten(leaves)
        children = []
        for child in treedef.children():
            children.append(left(child, start))
            start += child.num_leaves
        return dict(zip(keys or (), children, strict=True)) if kind is dict else kind(children)

    leaves, treedef = jax.tree.flatten(left(structure.treedef, 0))
    return Structure(treedef, tuple(leaves))
