"""Whether a batch has any examples.

Which arrays hold the examples is not always to be seen: a graph without edges is one example, and so is an
image without boxes. So a batch is empty only if no array of it has a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from onward.core.errors import ArgumentError
from onward.core.program import Program
from onward.execute.feeds import data_names


class Examples:
    """The data of a Program that may have a row for each example: all but keys and what is declared fixed."""

    def __init__(self, program: Program) -> None:
        fixed = program.recipe.origin.fixed_data if program.recipe is not None else frozenset[str]()
        arrays = [v for v in program.inputs if v.shape and not v.may_be_key]
        self._names = frozenset(v.name for v in arrays) - fixed
        structures = program.signature.data if program.signature is not None else ()
        self._data = list(zip(data_names(program), structures, strict=True))

    def expect_some(self, fed: Mapping[str, Any]) -> None:
        """Raise ``ArgumentError`` for a batch of 0 rows: a mean over it is NaN, as are its gradients."""
        rows: list[tuple[str, int]] = []
        for name, structure in self._data:
            value = fed.get(name)
            whole = jax.tree_util.treedef_is_leaf(structure.treedef)
            leaves = [value] if whole else jax.tree.leaves(value)
            pairs = zip(structure.variables, leaves, strict=False)
            rows += [(v.name, count) for v, x in pairs if v.name in self._names for count in _rows(x)]
        if rows and not any(count for _, count in rows):
            raise ArgumentError(
                f"{rows[0][0]!r} has 0 rows: the batch is empty, and a mean over no examples is NaN, as are "
                "its gradients. Leave it out where it is read: if len(x): yield x, y. For a loss that is a "
                "sum, train with check=False."
            )


def _rows(value: Any) -> list[int]:
    """How many rows an array has; nothing for what is none."""
    if isinstance(value, list | tuple):
        return [len(value)]
    return list(value.shape[:1]) if isinstance(value, np.ndarray | jax.Array) else []
