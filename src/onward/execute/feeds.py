"""From the data arguments of a step to the flat arrays of a Program's inputs, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from onward.core.errors import ArgumentError
from onward.core.program import Program, Variable
from onward.define.arguments import type_of
from onward.execute.state import fits

Key = tuple[tuple[tuple[int, ...], Any], ...]


class Feeds:
    """Reads the data arguments of one traced function."""

    def __init__(self, program: Program) -> None:
        self.program = program
        signature = program.signature
        self.structures = signature.data if signature is not None else ()
        self.names = signature.names[len(signature.names) - len(self.structures) :] if signature else ()
        self.flat = all(jax.tree_util.treedef_is_leaf(s.treedef) for s in self.structures)

    def read(self, data: tuple[Any, ...]) -> Sequence[Any]:
        """The arrays in the order of ``program.inputs``; their types are not looked at."""
        if len(data) != len(self.structures):
            raise ArgumentError(
                f"{self.program.name} takes {len(self.structures)} data arguments "
                f"({', '.join(self.names)}); {len(data)} were given."
            )
        if self.flat and len(self.program.inputs) == len(data):
            return data
        values: list[Any] = []
        for structure, name, argument in zip(self.structures, self.names, data, strict=True):
            values.extend(structure.flatten(argument, f"{self.program.name}: {name}"))
        return values

    def convert(self, values: Sequence[Any]) -> list[Any]:
        """The values as arrays of the Program's dtypes.

        Raises:
            ArgumentError: a value that is no array, or of another dtype.
        """
        return [self._converted(value, v) for value, v in zip(values, self.program.inputs, strict=True)]

    def _converted(self, value: Any, v: Variable) -> Any:
        if isinstance(value, list | tuple):
            value = np.asarray(value)
        found = type_of(value)
        if found is None:
            raise ArgumentError(f"{self.program.name}: {v.name!r} is {value!r}; expected an array {v.type}.")
        if not fits(found, v):
            raise ArgumentError(
                f"{self.program.name}: {v.name!r} is {found.dtype}{list(found.shape)}; expected {v.type}. "
                f"Convert it, {v.name.replace('/', '_')}.astype({str(v.dtype)!r}), or trace with that dtype."
            )
        if isinstance(value, jax.Array):
            return value
        return np.asarray(value, v.dtype)


def key_of(values: Sequence[Any]) -> Key:
    """What tells one compiled shape from another."""
    return tuple((v.shape, v.dtype) for v in values)
