"""The results of a step without those that replace its arguments, and the state that these are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from onward.core.program import Variable
from onward.core.structure import Structure
from onward.explain.inspect.call import CalledStep
from onward.explain.inspect.matching import Pair
from onward.explain.inspect.parts import TreePart, bears_own


def next_values(pairs: Iterable[Pair]) -> Mapping[Variable, Variable]:
    """For every argument that is replaced, the Variable that replaces it; what stays as it is left out."""
    return {
        old: new
        for result, argument in pairs
        for new, old in zip(result.variables, argument.variables, strict=True)
        if new is not old
    }


def carried_places(pairs: Sequence[Pair], call: CalledStep, returned: Any) -> frozenset[int]:
    """The places of the arguments that are carried on from step to step.

    One without arrays, such as the state of an optimizer that keeps nothing, is so beside others if the step
    returns its containers, which are not of Python alone: an empty tuple says nothing.

    Args:
        pairs: the results that replace arguments.
        call: how the step is called.
        returned: the containers of what it returns.
    """
    places = frozenset(argument.place for _, argument in pairs)
    empty = {child for child in returned.children() if not child.num_leaves and bears_own(child)}
    beside = (i for i, s in call.plain.items() if s.treedef in empty)
    return places.union(beside) if places else places


def without(structure: Structure, pairs: Sequence[Pair]) -> Structure:
    """The result of a step, with None in place of every result that replaces an argument."""
    gone = [result for result, _ in pairs]

    def left(treedef: Any, start: int) -> Any:
        leaves = structure.leaves[start : start + treedef.num_leaves]
        part = TreePart(treedef, leaves, 0, start)
        if leaves and any(part.within(other) for other in gone):
            return None
        whole = treedef.unflatten(leaves)
        if jax.tree_util.treedef_is_leaf(treedef):
            return whole
        children = []
        for child in treedef.children():
            children.append(left(child, start))
            start += child.num_leaves
        supply = iter(children)
        return jax.tree.map(lambda _: next(supply), whole, is_leaf=lambda x: x is not whole)

    leaves, treedef = jax.tree.flatten(left(structure.treedef, 0))
    return Structure(treedef, tuple(leaves))
