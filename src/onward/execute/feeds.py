"""From the data arguments of a step to the flat arrays of a Program's inputs, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from onward.core.errors import ArgumentError
from onward.core.program import Program, Variable
from onward.core.structure import describe
from onward.define.arguments import Type, type_of
from onward.execute.state import fits

Key = tuple[tuple[tuple[int, ...], Any], ...]


class Feeds:
    """Reads the data arguments of a traced function, but not those that a pruned Program reads no more."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.inputs = set(program.inputs)
        signature = program.signature
        self.structures = signature.data if signature is not None else ()
        names = signature.names[len(signature.names) - len(self.structures) :] if signature else ()
        self.taken = tuple(
            (structure, name)
            for structure, name in zip(self.structures, names, strict=True)
            if not structure.variables or not self.inputs.isdisjoint(structure.variables)
        )
        self.flat = all(jax.tree_util.treedef_is_leaf(s.treedef) for s, _ in self.taken)

    def read(self, data: tuple[Any, ...]) -> Sequence[Any]:
        """The arrays in the order of ``program.inputs``; their types are not looked at."""
        if len(data) != len(self.taken):
            raise ArgumentError(
                f"{self.program.name} takes {len(self.taken)} data arguments "
                f"({', '.join(name for _, name in self.taken)}); {len(data)} were given."
            )
        if self.flat and len(self.program.inputs) == len(data):
            return data
        values: list[Any] = []
        for (structure, name), argument in zip(self.taken, data, strict=True):
            arrays = structure.flatten(argument, f"{self.program.name}: {name}")
            values.extend(x for v, x in zip(structure.variables, arrays, strict=True) if v in self.inputs)
        return values

    def types(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Every data argument of the traced function by its types, those that are not taken included.

        What is not taken has the length of the batch if it had that length when it was traced.
        """
        inputs = self.program.inputs
        batch = {v.shape[0]: x.shape[0] for v, x in zip(inputs, values, strict=True) if v.shape and x.shape}
        given = {v: Type(x.shape, x.dtype) for v, x in zip(inputs, values, strict=True)}

        def kind(v: Variable) -> Type:
            if v in given:
                return given[v]
            return Type((*(batch.get(n, n) for n in v.shape[:1]), *v.shape[1:]), v.dtype)

        return tuple(s.unflatten(map(kind, s.variables)) for s in self.structures)

    def convert(self, values: Sequence[Any]) -> list[Any]:
        """The values as arrays of the Program's dtypes.

        Raises:
            ArgumentError: a value that is no array, or of another dtype.
        """
        return [self._converted(value, v) for value, v in zip(values, self.program.inputs, strict=True)]

    def _stacked(self, value: Sequence[Any], v: Variable) -> Any:
        try:
            array = np.asarray(value)
            whole = array.dtype.kind in "bi" and jax.numpy.issubdtype(v.dtype, np.floating)
            return array.astype(v.dtype) if whole else array
        except ValueError as error:
            raise ArgumentError(
                f"{self.program.name}: {v.name!r} is {describe(value)} that is no array ({error}); expected "
                f"{v.type}."
            ) from error

    def _converted(self, value: Any, v: Variable) -> Any:
        if isinstance(value, list | tuple):
            value = self._stacked(value, v)
        found = type_of(value)
        if found is None:
            raise ArgumentError(
                f"{self.program.name}: {v.name!r} is {describe(value)}; expected an array {v.type}."
            )
        if not fits(found, v):
            raise ArgumentError(
                f"{self.program.name}: {v.name!r} is {found.dtype}{list(found.shape)}; expected {v.type}. "
                f"{_conversion(v)}, or trace with that dtype."
            )
        if len(found.shape) != len(v.shape):
            raise ArgumentError(
                f"{self.program.name}: {v.name!r} is {found.dtype}{list(found.shape)}, of {len(found.shape)} "
                f"axes; expected {len(v.shape)}, as in {v.type}. Another batch size is fine; for another "
                "number of axes, trace the function anew."
            )
        if isinstance(value, jax.Array):
            return value
        return np.asarray(value, v.dtype)


def _conversion(v: Variable) -> str:
    name = v.name.rpartition("/")[2]
    if jax.numpy.issubdtype(v.dtype, jax.dtypes.prng_key):
        return f"Make it a typed key, jax.random.wrap_key_data({name}) or jax.random.key(seed)"
    return f"Convert it, {name}.astype({str(v.dtype)!r})"


def key_of(values: Sequence[Any]) -> Key:
    """What tells one compiled shape from another."""
    return tuple((v.shape, v.dtype) for v in values)
