"""Which buffers hold the state of a Program between two steps, and how values are read from them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from onward.core.columns import columns
from onward.core.program import Variable
from onward.execute.loop.interrupt import uninterrupted


class BufferForm(StrEnum):
    """How a buffer holds its members."""

    ALONE = "alone"
    STACKED = "stacked"
    FLAT = "end to end"


@dataclass(frozen=True, eq=False)
class Buffer:
    """One array that holds one state Variable, or many small ones.

    Attributes:
        variable: the array, as a state Variable of the packed Program.
        members: the Variables whose values it holds.
        form: ``ALONE`` for one; ``STACKED`` along a new first axis for members of one type; ``FLAT`` for
            members of one dtype, each as a row of numbers, end to end.
        why: the reason for people.
    """

    variable: Variable
    members: tuple[Variable, ...]
    form: BufferForm
    why: str = ""

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each member begins in a flat buffer."""
        return tuple(int(n) for n in np.cumsum([0, *(v.size for v in self.members)]))

    @uninterrupted
    def read(self, array: Any, k: int) -> Any:
        """The value of member ``k``; axes that a transformation has put in front stay in front."""
        if self.form is BufferForm.ALONE:
            return array
        leading = np.ndim(array) - self.variable.ndim
        if self.form is BufferForm.STACKED:
            return _row(array, k, leading)
        v = self.members[k]
        return _piece(array, self.offsets[k], v.size, (*np.shape(array)[:leading], *v.shape), leading)

    def made(self, values: Sequence[Any]) -> Any:
        """The buffer that holds these values."""
        if self.form is BufferForm.ALONE:
            return values[0]
        if any(isinstance(x, jax.core.Tracer) for x in values):
            return stacked(values) if self.form is BufferForm.STACKED else end_to_end(values)
        arrays = [np.asarray(x) for x in values]  # on the host: no program of a thousand arguments to compile
        is_stack = self.form is BufferForm.STACKED
        whole = np.stack(arrays) if is_stack else np.concatenate([x.ravel() for x in arrays])
        # By jnp.array a kernel would be compiled for each shape.
        return jax.device_put(whole.astype(self.variable.dtype, copy=False))


class Storage:
    """The buffers that hold the state of a Program; ``print`` shows them."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self.buffers = tuple(buffers)
        self._parts: dict[tuple[str, ...], tuple[tuple[int, ...], Storage]] = {}

    def part(self, names: tuple[str, ...]) -> tuple[tuple[int, ...], Storage]:
        """The numbers of the buffers that hold these Variables, and the storage of just these buffers."""
        if names not in self._parts:
            places = tuple(sorted({self.place[name][0] for name in names}))
            self._parts[names] = places, Storage([self.buffers[i] for i in places])
        return self._parts[names]

    @cached_property
    def place(self) -> Mapping[str, tuple[int, int]]:
        """For each name the number of its buffer, and its place there."""
        return {v.name: (i, k) for i, buffer in enumerate(self.buffers) for k, v in enumerate(buffer.members)}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of the buffers."""
        return tuple(buffer.variable.name for buffer in self.buffers)

    def is_shared(self, i: int) -> bool:
        """Whether buffer ``i`` holds several Variables."""
        return self.buffers[i].form is not BufferForm.ALONE

    def mixes(self, names: Collection[str]) -> bool:
        """Whether any of these Variables shares a buffer."""
        return any(self.is_shared(self.place[name][0]) for name in names)

    def whole(self, names: Collection[str]) -> frozenset[str]:
        """The names of the buffers that hold nothing but these Variables."""
        return frozenset(b.variable.name for b in self.buffers if all(v.name in names for v in b.members))

    def specs(self, specs: Mapping[str, PartitionSpec]) -> dict[str, PartitionSpec]:
        """How stacks are split over a mesh, by name, of how their members are."""
        stacks = [b for b in self.buffers if b.form is BufferForm.STACKED and b.members[0].name in specs]
        return {b.variable.name: PartitionSpec(None, *specs[b.members[0].name]) for b in stacks}

    def read(self, arrays: Sequence[Any], name: str) -> Any:
        """The value of a Variable."""
        i, k = self.place[name]
        return self.buffers[i].read(arrays[i], k)

    def packed(self, values: Mapping[str, Any]) -> list[Any]:
        """The buffers that hold these values."""
        return [buffer.made([values[v.name] for v in buffer.members]) for buffer in self.buffers]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Storage) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @cached_property
    def _identity(self) -> Hashable:
        return tuple(
            (buffer.form, tuple((v.name, v.shape, v.dtype) for v in buffer.members))
            for buffer in self.buffers
        )

    def __str__(self) -> str:
        shared = [b for b in self.buffers if b.form is not BufferForm.ALONE]
        alone = [b.variable for b in self.buffers if b.form is BufferForm.ALONE]
        count = len(self.place)
        head = f"{count} state Variables in {len(self.buffers)} buffer{'s' if len(self.buffers) > 1 else ''}"
        rows = [(b.variable.name, b.variable.type, f"{len(b.members)} {b.form}", b.why) for b in shared]
        rest = (f"{len(alone)} others", "", "each in its own", "") if alone else None
        return f"{head}\n{columns([*rows, *([rest] if rest else [])])}"

    __repr__ = __str__


def stacked(values: Sequence[Any]) -> Any:
    """Arrays of one type on top of each other.

    Behind a barrier: XLA on a CPU computes into a concatenation number by number otherwise.
    """
    return jax.lax.optimization_barrier(jnp.stack(list(values)))


def end_to_end(values: Sequence[Any]) -> Any:
    """The numbers of all arrays in a row."""
    return jax.lax.optimization_barrier(jnp.concatenate([jnp.ravel(x) for x in values]))


@partial(jax.jit, static_argnums=2)
def _row(array: Any, k: int, axis: int) -> Any:
    return jax.lax.dynamic_index_in_dim(array, k, axis, keepdims=False)


@partial(jax.jit, static_argnums=(2, 3, 4))
def _piece(array: Any, begin: int, size: int, shape: tuple[int, ...], axis: int) -> Any:
    return jax.lax.dynamic_slice_in_dim(array, begin, size, axis).reshape(shape)
