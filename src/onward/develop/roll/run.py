"""A run: ops that repeat, layer after layer, and where each input of a layer comes from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from onward.core.program import Op, Variable
from onward.core.words import Kind

Place = tuple[int, int]
"""Which op of a layer, and which of its outputs."""

Made = Mapping[Variable, tuple[int, Place]]
"""Which layer makes a Variable, and where in it."""

_LONGEST_DELAY = 3
_OTHER_SOURCE = "reads {name!r}, which comes from elsewhere than in the layers before"
_LATE = "reads {name!r}, which an op that does not repeat makes of the layers before"


class From(StrEnum):
    """Where the ops at one place of all layers have an input from."""

    LAYER = "the layer itself"
    CARRY = "a layer before"
    SHARED = "one Variable for all layers"
    STACKED = "a Variable for each layer"


@dataclass(frozen=True)
class LayerRead:
    """One input of the ops at one place of all layers.

    ``place``: what gives it, in this layer or one before. ``values``: what is read from outside: by the first
    layers if it is carried, as many as lie between, by every one if it is stacked, by all if it is shared.
    """

    source: From
    place: Place | None = None
    values: tuple[Variable, ...] = ()


@dataclass(frozen=True, eq=False)
class LayerRun:
    """Equal layers, one after the other.

    ``reads[i][q]`` is where op ``i`` of a layer has its input ``q`` from.
    """

    layers: tuple[tuple[Op, ...], ...]
    reads: tuple[tuple[LayerRead, ...], ...]

    @property
    def times(self) -> int:
        """How many layers there are."""
        return len(self.layers)

    @property
    def period(self) -> int:
        """How many ops a layer has."""
        return len(self.reads)

    @cached_property
    def saved(self) -> int:
        """How many equations fewer there are to compile if they are one loop."""
        return sum(op.body.size for layer in self.layers[1:] for op in layer)

    @property
    def is_chain(self) -> bool:
        """Whether a layer reads what one before it made."""
        return any(read.source is From.CARRY for reads in self.reads for read in reads)

    @property
    def parameters(self) -> int:
        """How many parameters each layer has of its own."""
        found = {read for reads in self.reads for read in reads if read.source is From.STACKED}
        return sum(read.values[0].kind is Kind.PARAMETER for read in found)


@dataclass(frozen=True)
class Break:
    """Where a run ends: the op of the next layer that does not fit, and why."""

    op: Op
    why: str


def run_of(layers: Sequence[Sequence[Op]], between: Sequence[Op]) -> tuple[LayerRun, Break | None]:
    """The run that as many of these layers make as fit, from the first on, and what ends it.

    Args:
        layers: ops that compute the same, layer by layer.
        between: all ops from the first to the last of them in order, others among them.
    """
    made = {
        v: (t, (i, k))
        for t, ops in enumerate(layers)
        for i, op in enumerate(ops)
        for k, v in enumerate(op.outputs)
    }
    times, end = _until_late(layers, between, made)
    for i in range(len(layers[0])):
        for values in _inputs_at(layers[:times], i):
            if (fit := _fitting(values, made)) < times:
                times, end = fit, Break(layers[fit][i], _OTHER_SOURCE.format(name=values[fit].name))
    fitting = tuple(map(tuple, layers[:times]))
    reads = (tuple(_read(values, made) for values in _inputs_at(fitting, i)) for i in range(len(layers[0])))
    return LayerRun(fitting, tuple(reads)), end


def _inputs_at(layers: Sequence[Sequence[Op]], i: int) -> list[tuple[Variable, ...]]:
    """For each input of op ``i`` of a layer, what every layer reads there."""
    return list(zip(*(ops[i].inputs for ops in layers), strict=True))


def _until_late(
    layers: Sequence[Sequence[Op]], between: Sequence[Op], made: Made
) -> tuple[int, Break | None]:
    """How many layers come before one that reads what other ops make of the layers before."""
    inside = {op: t for t, ops in enumerate(layers) for op in ops}
    late: set[Variable] = set()
    for op in between:
        of_late = [v for v in op.inputs if v in late] if late else []
        if op in inside and of_late:
            return inside[op], Break(op, _LATE.format(name=of_late[0].name))
        if op not in inside and (of_late or any(v in made for v in op.inputs)):
            late.update(op.outputs)
    return len(layers), None


def _fitting(values: Sequence[Variable], made: Made) -> int:
    """In how many layers, from the first on, these inputs come from one kind of source."""
    found = [made.get(v) for v in values]
    delay = _delay(found)
    if delay is None:
        return next((t for t, at in enumerate(found) if at is not None), len(values))
    place = found[delay]
    assert place is not None
    wrong = (t for t in range(delay, len(values)) if found[t] != (t - delay, place[1]))
    return next(wrong, len(values))


def _delay(found: Sequence[tuple[int, Place] | None]) -> int | None:
    """How many layers before it a layer reads from; None where all layers read from outside.

    A value read from outside by more than a few layers before the first reads a layer is not a beginning.
    """
    first = next(((t, at) for t, at in enumerate(found) if at is not None), None)
    if first is None or first[0] > _LONGEST_DELAY or first[1][0] != 0:
        return None
    return first[0]


def _read(values: tuple[Variable, ...], made: Made) -> LayerRead:
    """Where the layers have an input from."""
    found = [made.get(v) for v in values]
    delay = _delay(found)
    if delay is not None and (at := found[delay]) is not None:
        return LayerRead(From.CARRY if delay else From.LAYER, at[1], values[:delay])
    if all(v is values[0] for v in values):
        return LayerRead(From.SHARED, None, values[:1])
    return LayerRead(From.STACKED, None, values)
