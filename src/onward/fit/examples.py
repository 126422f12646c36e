"""Whether a batch has any examples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from onward.core.errors import ArgumentError
from onward.core.program import Program
from onward.develop.batch import WEIGHT, batch_names
from onward.execute.feeds import data_names


class Examples:
    """The data of a Program that has a row for each example."""

    def __init__(self, program: Program) -> None:
        fixed = program.recipe.origin.fixed_data if program.recipe is not None else frozenset[str]()
        self._names = frozenset(batch_names(program, (), WEIGHT, fixed))
        structures = program.signature.data if program.signature is not None else ()
        self._data = list(zip(data_names(program), structures, strict=True))

    def expect_some(self, fed: Mapping[str, Any]) -> None:
        """Raise ``ArgumentError`` for a batch of 0 rows: a mean over nothing is NaN, as are its gradients."""
        rows: list[tuple[str, int]] = []
        for name, structure in self._data:
            value = fed.get(name)
            whole = jax.tree_util.treedef_is_leaf(structure.treedef)
            leaves = [value] if whole else jax.tree.leaves(value)
            pairs = zip(structure.variables, leaves, strict=False)
            rows += [(v.name, count) for v, x in pairs if v.name in self._names for count in _rows(x)]
        if rows and not any(count for _, count in rows):
            raise ArgumentError(
                f"{rows[0][0]!r} has 0 rows: the batch is empty. The mean of nothing is NaN, which spoils "
                "all parameters. Leave it out where it is read: if len(x): yield x, y."
            )


def _rows(value: Any) -> list[int]:
    """How many rows an array has; nothing for what is none."""
    shape = (len(value),) if isinstance(value, list | tuple) else np.shape(value)
    return list(shape[:1])
