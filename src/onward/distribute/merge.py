"""How the gradients of all devices become one: merge strategies, each a small class.

A strategy looks like an optimizer: ``init`` makes what it keeps for a gradient from step to step, ``merge``
takes the gradient of this device and returns the one that all devices share.

>>> import jax.numpy as jnp, onward as ow
>>> class Largest(ow.Merge):
...     def merge(self, gradient, kept, devices):
...         return devices.maximum(gradient), kept
>>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.mean(x * w), jnp.ones(3), jnp.ones((8, 3)))
>>> [op.type for op in ow.replicate(program, devices=1, merge=Largest()).ops if op.made_by == "collective"]
['largest', 'all_mean']
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any, ClassVar, dataclass_transform

import jax
import jax.numpy as jnp
from jax import lax

from onward.core.builder import Builder
from onward.core.errors import ArgumentError, GraphError
from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.collected import body_over
from onward.core.jaxprs.equations import Type
from onward.core.program import Applied, Program, Variable
from onward.core.show import nbytes
from onward.core.structure import expect_count
from onward.core.words import Pass, Placement
from onward.derive.update.groups import Routing
from onward.derive.update.update import append_update

Kept = Mapping[str, Any]
"""What each device keeps for a merge from step to step, by name."""

_MOST = 2**31  # numbers of a vector, whose places are int32


@dataclass(frozen=True)
class Devices:
    """The devices that run a Program, as a merge strategy sees them."""

    axis: str
    size: int

    def sum(self, x: Any) -> Any:
        """The sum over all devices."""
        return lax.psum(x, self.axis)

    def mean(self, x: Any) -> Any:
        """The mean over all devices."""
        return lax.pmean(x, self.axis)

    def maximum(self, x: Any) -> Any:
        """The largest of all devices, number by number."""
        return lax.pmax(x, self.axis)

    def minimum(self, x: Any) -> Any:
        """The smallest of all devices, number by number."""
        return lax.pmin(x, self.axis)

    def gather(self, x: Any) -> Any:
        """The arrays of all devices, along a new first axis."""
        return lax.all_gather(x, self.axis)

    def scatter_mean(self, x: Any) -> Any:
        """Of the mean over all devices, this device's part: one of ``size`` along the first axis."""
        return lax.psum_scatter(x, self.axis, tiled=True) / self.size

    def exchange(self, x: Any) -> Any:
        """This device's part of the array of every device, one below the other: ``[size, part]``."""
        return lax.all_to_all(self.padded(x).reshape(self.size, -1), self.axis, 0, 0)

    def join(self, part: Any, shape: tuple[int, ...]) -> Any:
        """The array of this shape that the parts of all devices make."""
        return self.gather(part).ravel()[: prod(shape)].reshape(shape)

    def alone(self, part: Any, shape: tuple[int, ...]) -> Any:
        """The array of this shape that holds this device's part, and zeros where the others' belong."""
        whole = jnp.zeros((self.size, part.size), part.dtype).at[self.index].set(part)
        return whole.ravel()[: prod(shape)].reshape(shape)

    def padded(self, x: Any) -> Any:
        """The numbers of an array as a vector that falls into equal parts, one for each device."""
        return jnp.pad(x.ravel(), (0, self.size * self.part_length(x.size) - x.size))

    def part_length(self, count: int) -> int:
        """How many of so many numbers each device has."""
        return -(-count // self.size)

    @property
    def index(self) -> Any:
        """The number of this device, from 0."""
        return lax.axis_index(self.axis)


@dataclass_transform(frozen_default=True, kw_only_default=False)
@dataclass(frozen=True)
class Merge:
    """The base of every merge strategy; a subclass becomes a frozen dataclass by itself.

    ``exact`` says whether the result is the mean (or sum) up to rounding; ``any_layout`` whether each number
    is merged by itself and nothing is kept, so that it is the same however they lie in arrays.
    """

    exact: ClassVar[bool] = True
    any_layout: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        says, merges = (next(c for c in cls.__mro__ if n in vars(c)) for n in ("any_layout", "merge"))
        if not issubclass(says, merges):  # it is said of another merge
            cls.any_layout = False
        dataclass(frozen=True)(cls)

    def init(self, gradient: Any) -> Kept:
        """The state that a device keeps for a gradient, by name, before the first step; none by default."""
        return {}

    def merge(self, gradient: Any, kept: Kept, devices: Devices) -> tuple[Any, Kept]:
        """The merged gradient, equal on all devices, and what this device keeps."""
        raise NotImplementedError(f"{type(self).__name__} does not say how to merge a gradient")

    def groups(self, gradients: Sequence[Variable]) -> list[list[Variable]]:
        """Which gradients are merged together, as one vector; each by itself unless overridden."""
        return [[g] for g in gradients]

    def apply(self, program: Program, devices: Devices, steps: Sequence[Applied]) -> Program:
        """The Program with every gradient merged before anything reads it; ``steps`` are yet to come."""
        return with_merged_gradients(program, self, devices)

    def update(self, program: Program, optimizer: Any, *, devices: Devices) -> Program:
        """The Program with the update pass: every device makes the whole of it."""
        if self.is_sum:
            Routing.of(optimizer, program.parameters).expect_gradients_only(
                "again, as the mean over the devices, and "
                f"{type(self).__name__} adds gradients. Let the loss be a mean over examples, and merge with "
                "Average()."
            )
        return append_update(program, optimizer)

    @property
    def is_sum(self) -> bool:
        """Whether the loss is a sum over examples: that of the whole batch is then the sum, not the mean."""
        return False

    @property
    def period(self) -> int:
        """How many steps lie between two exchanges of what is not exchanged at every step."""
        return 1

    @property
    def name(self) -> str:
        """The type of its ops: the class name in lower case."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(self).__name__).lower()


class Average(Merge):
    """The mean over all devices: the gradient of the whole batch, if the loss is a mean over examples."""

    any_layout = True

    def merge(self, gradient: Any, kept: Kept, devices: Devices) -> tuple[Any, Kept]:
        """The mean."""
        return devices.mean(gradient), kept

    @property
    def name(self) -> str:
        """The type of its ops."""
        return "all_mean"


class Sum(Merge):
    """The sum over all devices: the gradient of the whole batch, if the loss is a sum over examples."""

    any_layout = True

    def merge(self, gradient: Any, kept: Kept, devices: Devices) -> tuple[Any, Kept]:
        """The sum."""
        return devices.sum(gradient), kept

    @property
    def is_sum(self) -> bool:
        """Yes."""
        return True

    @property
    def name(self) -> str:
        """The type of its ops."""
        return "all_sum"


class Bucketed(Merge):
    """Gradients are sent in buckets of at least so many bytes, each laid end to end as one message.

    Buckets are filled in the order in which the backward pass makes the gradients, so that the first can be
    sent while the rest is computed. Which gradient is in which bucket depends on the Program alone. XLA
    joins small messages of ``Average()`` by itself, at a size that its flags set: measure which is faster.

    Source: Li et al., PyTorch Distributed, 2020, section 3.2.3.
    """

    bytes: int = 25 * 2**20
    inner: Merge = Average()

    def __post_init__(self) -> None:
        expect_count(self.bytes, "Bucketed: bytes", of="a number such as 25 * 2**20")
        expect_way("Bucketed", self.inner)
        object.__setattr__(self, "exact", self.inner.exact)
        is_inner = type(self).merge is Bucketed.merge
        object.__setattr__(self, "any_layout", is_inner and self.inner.any_layout)

    def init(self, gradient: Any) -> Kept:
        """The state that the inner strategy keeps."""
        return self.inner.init(gradient)

    @property
    def is_sum(self) -> bool:
        """As the inner strategy has it."""
        return self.inner.is_sum

    def merge(self, gradient: Any, kept: Kept, devices: Devices) -> tuple[Any, Kept]:
        """As the inner strategy does."""
        return self.inner.merge(gradient, kept, devices)

    def groups(self, gradients: Sequence[Variable]) -> list[list[Variable]]:
        """Runs of gradients of one dtype, each of at least ``bytes``; several hold less than 2**31."""
        buckets: list[list[Variable]] = []
        for g in gradients:
            last = buckets[-1] if buckets else None
            if last is None or self._is_full(last, g):
                buckets.append([])
            buckets[-1].append(g)
        return buckets

    def _is_full(self, bucket: Sequence[Variable], g: Variable) -> bool:
        """Whether a gradient begins a bucket of its own."""
        together = sum(v.size for v in (*bucket, g))
        return bucket[0].dtype != g.dtype or sum(map(nbytes, bucket)) >= self.bytes or together >= _MOST


def with_merged_gradients(program: Program, strategy: Merge, devices: Devices) -> Program:
    """The Program with a merging op after the op that makes the last gradient of each group.

    Adds ops and what the strategy keeps; ``program.gradients`` holds the merged ones.
    """
    builder = Builder(program, made_by=Pass.COLLECTIVE)
    position = {v: i for i, op in enumerate(program.ops) for v in op.outputs}
    numbers = dict.fromkeys(g for _, g in program.gradients if g.size)
    gradients = sorted(numbers, key=lambda g: position.get(g, -1))
    due: dict[int, list[list[Variable]]] = {}
    for group in strategy.groups(gradients):
        due.setdefault(max(position.get(g, -1) for g in group), []).append(group)
    merged: dict[Variable, Variable] = {}
    for i, op in enumerate(program.ops):
        builder.append(op)
        for group in due.get(i, ()):
            merged.update(zip(group, _merged(builder, strategy, group, devices), strict=True))
    pairs = tuple((p, merged.get(g, g)) for p, g in program.gradients)
    return builder.program(gradients=pairs)


def _merged(
    builder: Builder, strategy: Merge, group: Sequence[Variable], devices: Devices
) -> Sequence[Variable]:
    """One op that merges a group of gradients as one vector, or one alone as it is."""
    like = _vector_type(group)
    kinds = jax.eval_shape(lambda g: dict(strategy.init(g)), like)
    kept = [
        builder.carry(f"{group[0].name}/{name}", _begin(strategy, name, like), "init", Placement.PER_REPLICA)
        for name in kinds
    ]

    def merge(gradients: Sequence[Any], *states: Any) -> list[Any]:
        vector = gradients[0] if len(gradients) == 1 else _joined(gradients)
        result, following = strategy.merge(vector, dict(zip(kinds, states, strict=True)), devices)
        return [*_parts(result, [g.shape for g in gradients]), *(following[name] for name in kinds)]

    body = body_over(merge, [g.aval for g in group], *(v.aval for v in kept))
    if len(group) == 1 or not strategy.any_layout:
        body.collected = None
    names = [f"{strategy.name}({g.name})" for g in group]
    return builder.add(strategy.name, [*group, *kept], names, body, replaces=kept)[: len(group)]


def expect_way(what: str, merge: object) -> None:
    """Raise ``ArgumentError`` unless this strategy says how one array of all devices becomes one."""
    if not isinstance(merge, Merge) or type(merge).merge is Merge.merge:
        found = type(merge).__name__ if isinstance(merge, Merge) else repr(merge)
        raise ArgumentError(
            f"{what} was given {found}, which does not say how a single array is merged; expected Average(), "
            "LowPrecision(), TopK() or PowerSGD(), or one of your own with a method merge."
        )


def _begin(strategy: Merge, name: str, like: Type) -> Body:
    """The Body that computes the state of this name of a strategy before the first step."""
    begun = body_of(lambda: [strategy.init(jnp.zeros(like.shape, like.dtype))[name]])
    return begun.restricted([0])[0]


def _vector_type(group: Sequence[Variable]) -> Type:
    if len(group) == 1:
        return Type(group[0].shape, group[0].dtype)
    return Type((sum(prod(g.shape) for g in group),), group[0].dtype)


def _joined(gradients: Sequence[Any]) -> Any:
    """Gradients as one vector; XLA computes what goes into a concatenation again and slowly on a CPU.

    It would make a pad of zeros around the first of them, compute that within the pad, and read for each
    number of the vector what lies behind its end: masked, but slow. So the vector begins as an iota.
    """
    count = sum(g.size for g in gradients)
    if count >= _MOST:
        raise GraphError(
            f"Gradients of {count} numbers would be merged as one vector, too long for int32: 2**31 "
            "or more. Let groups() return smaller groups."
        )
    vector = lax.iota(gradients[0].dtype, count)
    begin = 0
    for g in gradients:
        vector = lax.dynamic_update_slice(vector, g.ravel(), (begin,))
        begin += g.size
    return vector


def _parts(vector: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """The gradients that a vector was made of."""
    if len(shapes) == 1:
        return [vector.reshape(shapes[0])]
    ends = list(accumulate(prod(shape) for shape in shapes))
    pieces = jnp.split(vector, ends[:-1])
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]
