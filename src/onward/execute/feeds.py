"""From the data arguments of a step to the flat arrays of a Program's inputs, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from onward.core.errors import ArgumentError, nearest
from onward.core.program import Program, Variable
from onward.core.structure import describe
from onward.define.arguments import Type, expect_unmasked, type_of
from onward.execute.loop.interrupt import uninterrupted
from onward.execute.state import fits

_FIXED = (jax.Array, np.generic, bool, int, float, complex)  # nobody can change their numbers
Key = tuple[tuple[tuple[int, ...], Any], ...]


class Feeds:
    """Reads the data arguments of a traced function, but not those that a pruned Program reads no more."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.inputs = set(program.inputs)
        signature = program.signature
        self.structures = signature.data if signature is not None else ()
        self.taken = tuple(
            (structure, name)
            for structure, name in zip(self.structures, data_names(program), strict=True)
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
            self._expect_unmasked(data)
            return data
        values: list[Any] = []
        for (structure, name), argument in zip(self.taken, data, strict=True):
            arrays = structure.flatten(argument, f"{self.program.name}: {name}")
            values.extend(x for v, x in zip(structure.variables, arrays, strict=True) if v in self.inputs)
        self._expect_unmasked(values)
        return values

    def _expect_unmasked(self, values: Sequence[Any]) -> None:
        """Raise ``ArgumentError`` for masked arrays, also where their types are known already."""
        for v, value in zip(self.program.inputs, values, strict=True):
            if isinstance(value, np.ma.MaskedArray):
                expect_unmasked(value, f"{self.program.name}: {v.name!r}")
            elif isinstance(value, list | tuple):
                for x in value:
                    expect_unmasked(x, f"An element of {self.program.name}: {v.name!r}")

    def named(self, data: tuple[Any, ...], feed: Mapping[str, Any]) -> tuple[Any, ...]:
        """The data arguments in order, some of them given by name.

        Raises:
            ArgumentError: a name that is not data, is given twice, or is missing.
        """
        names = [name for _, name in self.taken]
        rest = names[len(data) :]
        for name in feed:
            if name not in names:
                raise ArgumentError(
                    f"{self.program.name} takes no data named {name!r}. {nearest(name, names)}"
                )
            if name not in rest:
                raise ArgumentError(f"{self.program.name} was given {name!r} by place and by name.")
        if missing := [name for name in rest if name not in feed]:
            raise ArgumentError(
                f"{self.program.name} was not fed {', '.join(map(repr, missing))}; it takes "
                f"{', '.join(names)}."
            )
        return (*data, *(feed[name] for name in rest))

    def check_bounds(self, values: Sequence[Any]) -> None:
        """Raise ``ArgumentError`` for a label or an id out of range, which devices read as something else.

        Arrays that lie on an accelerator already are not looked at, for that would wait for them: the layers
        make NaN of what is out of range.
        """
        for v, value in zip(self.program.inputs, values, strict=True):
            if v in self.program.bounds and is_on_host(value):
                _check_bound(self.program.name, v, _integers(value), *self.program.bounds[v])

    def types(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """Every data argument of the traced function by its types, those that are not taken included.

        What is not taken has the length of the batch if it had that length when it was traced; where lengths
        have names, it has those of the data that is taken.
        """
        pairs = list(zip(self.program.inputs, values, strict=True))
        batch = {v.shape[0]: x.shape[0] for v, x in pairs if v.shape and x.shape}
        given = {v: Type(x.shape, x.dtype) for v, x in pairs}
        free = {} if self.program.recipe is None else self.program.recipe.origin.free_lengths
        sizes = {n: size for v, x in pairs for n, size in zip(free.get(v.name, ()), x.shape, strict=False)}

        def kind(v: Variable) -> Type:
            if v in given:
                return given[v]
            if v.name in free:
                named = zip(free[v.name], v.shape, strict=True)
                return Type(tuple(sizes.get(n, m) if isinstance(n, str) else m for n, m in named), v.dtype)
            return Type((*(batch.get(n, n) for n in v.shape[:1]), *v.shape[1:]), v.dtype)

        return tuple(s.unflatten(map(kind, s.variables)) for s in self.structures)

    @uninterrupted
    def convert(self, values: Sequence[Any]) -> list[Any]:
        """The values as arrays of the Program's dtypes.

        Raises:
            ArgumentError: a value that is not an array, or of another dtype.
        """
        arrays = [self._converted(value, v) for value, v in zip(values, self.program.inputs, strict=True)]
        for v, array in zip(self.program.inputs, arrays, strict=True):
            self._expect_axes(array, v)
        return arrays

    @uninterrupted
    def converted(self, values: Sequence[Any]) -> list[Any]:
        """The values as ``convert`` gives them, of any number of axes: for a function of plain arrays.

        Raises:
            ArgumentError: what no step takes: no array, a masked one, another dtype, or a label out of range.
        """
        self._expect_unmasked(values)
        self.check_bounds(values)
        return [self._converted(value, v) for value, v in zip(values, self.program.inputs, strict=True)]

    def _stacked(self, value: Sequence[Any], v: Variable) -> Any:
        try:
            array = np.asarray(value)
            whole = array.dtype.kind in "bi" and jax.numpy.issubdtype(v.dtype, np.floating)
            return self._narrowed(array, v) if whole else array
        except ValueError as error:
            raise ArgumentError(
                f"{self.program.name}: {v.name!r} is {describe(value)} that is not an array ({error}); "
                f"expected {v.type}."
            ) from error

    def _converted(self, value: Any, v: Variable) -> Any:
        if isinstance(value, list | tuple):
            value = self._stacked(value, v)
        try:
            found = type_of(value)
        except (ArgumentError, OverflowError):
            raise ArgumentError(self._no_numbers(np.asarray(value, object), v)) from None
        if found is None:
            raise ArgumentError(
                f"{self.program.name}: {v.name!r} is {describe(value)}; expected an array {v.type}."
            )
        if not fits(found, v) and not (is_weak(value) and fits(found.update(weak_type=True), v)):
            raise ArgumentError(
                f"{self.program.name}: {v.name!r} is {found.dtype}{list(found.shape)}; expected {v.type}. "
                f"{_conversion(v)}, or trace with that dtype."
            )
        if isinstance(value, jax.core.Tracer):
            return value if value.dtype == v.dtype else value.astype(v.dtype)
        if isinstance(value, jax.Array) and value.dtype == v.dtype:
            return value
        return self._narrowed(np.asarray(value), v)

    def _expect_axes(self, array: Any, v: Variable) -> None:
        if len(array.shape) != len(v.shape):
            raise ArgumentError(
                f"{self.program.name}: {v.name!r} is {array.dtype}{list(array.shape)}, of "
                f"{len(array.shape)} axes; expected {len(v.shape)}, as in {v.type}. Another batch size is "
                "fine; for another number of axes, trace the function again."
            )

    def _no_numbers(self, value: Any, v: Variable) -> str:
        """The error message for an array of strings, objects or Python integers that no device can hold."""
        large = next((x for x in value.flat if isinstance(x, int) and abs(x) >= 2**63), None)
        if large is not None:
            return (
                f"{self.program.name}: {v.name!r} holds an integer of {large.bit_length()} bits, which no "
                f"array can hold; expected {v.type}. Bring the numbers into range, or write them as floats."
            )
        return (
            f"{self.program.name}: {v.name!r} holds {describe(next(iter(value.flat), None))} in an array "
            f"that is none of numbers, which no device can hold; expected {v.type}. Encode it as numbers "
            "first."
        )

    def _narrowed(self, value: Any, v: Variable) -> Any:
        """The array in the dtype of its Variable; refused where that would change numbers beyond rounding."""
        if value.dtype == v.dtype or value.dtype.kind not in "iuf":
            return value.astype(v.dtype)
        with np.errstate(over="ignore", invalid="ignore"):
            narrow = value.astype(v.dtype)
            if jax.numpy.issubdtype(v.dtype, np.integer):
                lost = narrow.astype(value.dtype) != value
            else:
                lost = np.isinf(narrow.astype(np.float64)) & np.isfinite(value)
        if np.any(lost):
            raise ArgumentError(
                f"{self.program.name}: {v.name!r} holds {value[lost].flat[0]!r} ({value.dtype}), which "
                f"{v.dtype} cannot hold; JAX would change it in silence. Bring the numbers into range, or "
                "trace with a wider dtype (jax_enable_x64)."
            )
        return narrow


def is_weak(value: Any) -> bool:
    """Whether an array of JAX stands for a Python number, as ``jnp.asarray(2)`` and a number under jit do."""
    return isinstance(value, jax.Array) and bool(value.weak_type)


def is_on_host(value: Any) -> bool:
    """Whether NumPy reads the numbers where they lie: an array of its own, or of JAX on a CPU."""
    if not isinstance(value, jax.Array):
        return True
    if isinstance(value, jax.core.Tracer) or not value.is_fully_addressable:
        return False
    return all(device.platform == "cpu" for device in value.devices())


def _integers(value: Any) -> Any:
    """The integers that are fed; none, if it is something else, which ``convert`` refuses."""
    try:
        array = np.asarray(value)
    except ValueError:  # a ragged list
        return np.zeros(0, int)
    return array if array.dtype.kind in "iub" else np.zeros(0, int)


def _check_bound(program: str, v: Variable, value: Any, size: int, what: str) -> None:
    if value.size and (value.min() < 0 or value.max() >= size):
        wrong = np.argwhere((value < 0) | (value >= size))[0]
        raise ArgumentError(
            f"{program}: {v.name!r} holds {value[tuple(wrong)]} at {wrong.tolist()}; {what} must lie from 0 "
            f"to {size - 1}, and a device would not tell. For padding feed 0, and give it weight 0."
        )


def _conversion(v: Variable) -> str:
    name = v.name.rpartition("/")[2]
    if v.is_key:
        return f"Make it a typed key, jax.random.wrap_key_data({name}) or jax.random.key(seed)"
    return f"Convert it, {name}.astype({str(v.dtype)!r})"


def data_names(program: Program) -> tuple[str, ...]:
    """The names of the data arguments of a traced function, those that are declared included."""
    signature = program.signature
    return signature.names[len(signature.names) - len(signature.data) :] if signature is not None else ()


def key_of(values: Sequence[Any]) -> Key:
    """The key of a compiled computation: the shape and dtype of each value."""
    return tuple((v.shape, v.dtype) for v in values)


def unshared(value: Any) -> Any:
    """The data, its NumPy arrays copied, because who feeds them may fill them with other numbers meanwhile.

    JAX may compute on the very memory of a NumPy array, and later than it was called.

    >>> row = np.zeros(2)
    >>> mine = unshared({"x": row})
    >>> row[:] = 7
    >>> mine
    {'x': array([0., 0.])}
    """
    if isinstance(value, np.ndarray):
        return value.copy()
    return value if isinstance(value, _FIXED) else jax.tree.map(_copied_leaf, value)


def _copied_leaf(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, np.ndarray) else leaf
