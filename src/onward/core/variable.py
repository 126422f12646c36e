"""A Variable: a value in a Program, by its name and type; and the devices over which its parts may lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from onward.core.words import Kind, Placement


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Variable:
    """A value in a Program: compared by identity, named for people.

    A state Variable of two Programs (train and test, another batch size, a checkpoint) is the same
    one when name, shape and dtype agree.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    kind: Kind = Kind.ACTIVATION
    placement: Placement = Placement.REPLICATED

    @property
    def type(self) -> str:
        """Dtype and shape in one word, as the listing shows it: ``float32[8,10]``."""
        return f"{self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        """Its shape and dtype, as JAX takes them."""
        return jax.ShapeDtypeStruct(self.shape, self.dtype)

    @property
    def is_float(self) -> bool:
        """Whether it holds real or complex floating point numbers."""
        return bool(jnp.issubdtype(self.dtype, np.inexact))

    @property
    def is_key(self) -> bool:
        """Whether it holds typed random keys."""
        return holds_keys(self.dtype)

    @property
    def may_be_key(self) -> bool:
        """Whether it holds typed random keys, or is built as a raw one: two numbers in uint32."""
        return self.is_key or (self.dtype == np.uint32 and self.shape == (2,))

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return prod(self.shape)

    def __repr__(self) -> str:
        return f"Variable({self.name!r}, {self.type}, {self.kind})"


def holds_keys(dtype: Any) -> bool:
    """Whether this is the dtype of typed random keys, which are not numbers."""
    return bool(jnp.issubdtype(dtype, jax.dtypes.prng_key))


limits_of: Any = jnp.finfo
"""The limits of a dtype of floats: JAX's knows bfloat16 and the like, and has no annotation of its own."""

SEED = Variable("seed", (), np.dtype(np.uint32), Kind.DATA)
"""What the initializers of every Program may read: the number that a person chose."""


@dataclass(frozen=True)
class Replicas:
    """The devices that run a Program at once, each on its part of the batch.

    Attributes:
        count: how many.
        name: that of the axis which collectives run along.
        syncs: whether what is normalized by its batch is normalized by the batch of all devices.
        every: how many steps lie between two exchanges of what is not exchanged at every step.
        weight: the data that says how much each example counts; what it leaves out can be padding.
        misled: what padding may change, and why, in words.
    """

    count: int
    name: str
    syncs: bool = True
    every: int = 1
    weight: str | None = None
    misled: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Partition:
    """The mesh of devices over which JAX's partitioner splits the arrays of a Program.

    Attributes:
        mesh: the lengths of its axes by name.
        specs: the axes that split the dimensions of state and data, by the name of the Variable.
        devices: those of the mesh in its order; the first ones that JAX shows if there are none.
    """

    mesh: Mapping[str, int]
    specs: Mapping[str, PartitionSpec]
    devices: tuple[Any, ...] = ()

    @property
    def count(self) -> int:
        """How many devices there are."""
        return prod(self.mesh.values())

    def __str__(self) -> str:
        return " x ".join(f"{name} {size}" for name, size in self.mesh.items())
