"""The collectives of a compiled step: what each exchanges, along which axes, how often, and why.

A reason is given where the text shows it: an exchange that is written in the user's code has its name;
parts of a sum are added up where the product or the reduction that makes them is what the sum is for; an
argument that is gathered was split. Of all others it is said what they do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from onward.core.primitives.table import of
from onward.core.primitives.traits import Exchanges, Primitive, Work
from onward.core.program import Op
from onward.core.words import Pass
from onward.explain.collectives.groups import axes_of, groups_of, pairs_of
from onward.explain.collectives.hlo_text import CompiledText, Instruction

_ALL_REDUCE, _GATHER, _SCATTER = "all-reduce", "all-gather", "reduce-scatter"
_PERMUTE, _SWAP = "collective-permute", "all-to-all"
KINDS = (_ALL_REDUCE, _GATHER, _SCATTER, _PERMUTE, _SWAP, "ragged-all-to-all", "collective-broadcast")
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z\d]*)\[([\d,]*)\]")
_SAME_ARRAY = re.compile("copy|bitcast|convert|reshape|transpose")  # instructions of XLA
_PRODUCTS = (Work.PRODUCT, Work.RAGGED_PRODUCT, Work.CONVOLUTION)
_BACKWARD = "transpose("
_WRITTEN = {
    Exchanges.SUM: _ALL_REDUCE,
    Exchanges.EXTREME: _ALL_REDUCE,
    Exchanges.GATHER: _GATHER,
    Exchanges.SCATTER: _SCATTER,
    Exchanges.SWAP: _SWAP,
    Exchanges.SHIFT: _PERMUTE,
}
_ACTS = {
    _ALL_REDUCE: "what the devices along {axes} have is reduced to one",
    _GATHER: "an array that is split along {axes} is needed whole",
    _SCATTER: "what the devices along {axes} have is reduced, and each keeps its part",
    _PERMUTE: "each device gets what another one has: the parts lie otherwise than they are needed",
    _SWAP: "each device gets a part of what each other along {axes} has",
}


@dataclass(frozen=True)
class ExchangedValue:
    """One array of those that a collective exchanges.

    Attributes:
        type: on one device, as ``f32[4,16]``.
        op: the primitive of JAX that it is for; of a Program, the op and what it makes.
        made_by: ``"forward"``, ``"backward"`` or another pass; empty where that is not known.
        line: the user's ``file:line``; empty where none is known.
        why: the reason, or what the collective does.
    """

    type: str
    op: str
    made_by: str
    line: str
    why: str


@dataclass(frozen=True)
class CompiledCollective:
    """A collective in a compiled step.

    Attributes:
        kind: as XLA calls it: ``"all-reduce"``, ``"all-gather"``, ``"reduce-scatter"``,
            ``"collective-permute"``, ``"all-to-all"``.
        name: of the instruction.
        bytes: of what goes in or comes out on one device, whichever is more; one time.
        axes: the axes of the mesh along which devices exchange; empty where they are not told.
        devices: how many exchange with each other; 0 where that is not known.
        times: how often it runs in a step; None in a loop whose length is not known.
        values: what it exchanges.
        part: of a pipeline, the stage and its work, as ``"F of stage 0"``; else empty.
    """

    kind: str
    name: str
    bytes: int
    axes: tuple[str, ...]
    devices: int
    times: int | None
    values: tuple[ExchangedValue, ...]
    part: str = ""


def collectives_in(
    text: CompiledText, mesh: Mapping[str, int], count: int, marks: Mapping[str, Op]
) -> Iterator[CompiledCollective]:
    """The collectives of a compiled step, in the order of its text.

    Args:
        text: of the step.
        mesh: the names and lengths of its axes; empty where there is none.
        count: how many devices there are.
        marks: the ops of a Program by the scope that each was lowered in.
    """
    for instruction in text.instructions.values():
        kind = instruction.kind.removesuffix("-start")
        if kind in KINDS:
            yield _Finder(text, mesh, count, marks, instruction, kind).found()


@dataclass(frozen=True)
class _Finder:
    """The search for the facts about one collective."""

    text: CompiledText
    mesh: Mapping[str, int]
    count: int
    marks: Mapping[str, Op]
    instruction: Instruction
    kind: str

    def found(self) -> CompiledCollective:
        pairs = pairs_of(self.instruction.rest)
        groups = None if pairs else groups_of(self.instruction.rest, self.count)
        axes = axes_of(groups, pairs, self.mesh)
        width = len(next(iter(groups))) if groups else 0
        arrays = self.arrays()
        whole = sum(map(_bytes, arrays)) * (width or 1 if self.kind == _SCATTER else 1)
        told = arrays[:1] if self.kind == _SWAP else arrays
        values = tuple(self.value(i, array, axes) for i, array in enumerate(told))
        times = self.text.times.get(self.instruction.computation, 1)
        return CompiledCollective(self.kind, self.instruction.name, whole, axes, width, times, values)

    def arrays(self) -> list[str]:
        """The types of the results; one that was only started holds its operands too."""
        found = [m[0] for m in _ARRAY.finditer(self.instruction.type)]
        if self.instruction.kind.endswith("-start") and self.kind != _ALL_REDUCE:
            operands = len(self.instruction.operands)
            return found[operands : 2 * operands] or found
        return found

    def value(self, i: int, array: str, axes: tuple[str, ...]) -> ExchangedValue:
        """One of the arrays; those that were combined into one collective are told apart by their takers."""
        taker = self.takers.get(i)
        operands = self.instruction.operands
        source = operands[i] if i < len(operands) else ""
        told = taker if taker is not None and taker.place else self.instruction
        place = told.place
        op = self.marked(place) or self.marked(self.text.place_of(source))
        name = place.rpartition("/")[2]
        made_by = op.made_by if op is not None else _pass_of(place)
        return ExchangedValue(
            array,
            name if op is None else _told(op),
            str(made_by or ""),
            self.text.line_of(told) if op is None else str(op.source or ""),
            self.why(name, place, source, axes, op),
        )

    @property
    def takers(self) -> Mapping[int, Instruction]:
        """The instructions that take one of several results."""
        readers = self.text.instructions.values()
        return {
            i.index: i
            for i in readers
            if i.kind == "get-tuple-element" and i.index is not None and self.instruction.name in i.operands
        }

    def marked(self, place: str) -> Op | None:
        """The op of the Program that was lowered in this place."""
        return next((self.marks[word] for word in place.split("/") if word in self.marks), None)

    def why(self, name: str, place: str, source: str, axes: tuple[str, ...], op: Op | None) -> str:
        """The reason where the text shows it; else what the collective does."""
        along = ", ".join(axes) or "its axes"
        act = _ACTS.get(self.kind, "devices exchange numbers").format(axes=along)
        primitive = of(name)
        if op is not None and op.made_by is Pass.COLLECTIVE:
            return f"the Program merges it: {act}"
        if primitive.exchanges is not None:
            is_written = _BACKWARD not in place and _WRITTEN.get(primitive.exchanges) == self.kind
            return "written there" if is_written else f"made of {name} or its derivative there: {act}"
        is_part = self.kind in (_ALL_REDUCE, _SCATTER) and self.text.place_of(source) == place
        if is_part and (part := _part_of_sum(primitive)):
            keeps = "; each keeps its part" if self.kind == _SCATTER else ""
            return f"{part} is split along {along}: each device has a part of the result{keeps}"
        if self.kind == _GATHER and (argument := self.argument(source)):
            return f"argument {argument} is split along {along} and needed whole"
        if not place:
            return f"{act}; XLA names no op for it"
        return f"asked for by its sharding constraint: {act}" if primitive.on_mesh else act

    def argument(self, name: str) -> str:
        """The argument of the step that an instruction hands on as it is; empty if it is none."""
        while (instruction := self.text.instructions.get(name)) is not None:
            if instruction.kind == "parameter":
                is_entry = instruction.computation not in self.text.times
                return instruction.place if is_entry and "/" not in instruction.place else ""
            if not _SAME_ARRAY.fullmatch(instruction.kind) or len(instruction.operands) != 1:
                return ""
            name = instruction.operands[0]
        return ""


def _told(op: Op) -> str:
    """An op of a Program: a merge by what it makes, any other by its type."""
    if op.made_by is not Pass.COLLECTIVE:
        return op.type
    first, *others = (v.name for v in op.outputs)
    return f"{first} and {len(others)} more" if others else first


def _part_of_sum(primitive: Primitive) -> str:
    """The dimension that has to be split so that each device has a part of the result; empty for others."""
    if primitive.work in _PRODUCTS:
        return "the dimension that the product sums over"
    return "the axis that is reduced" if primitive.reduces is not None else ""


def _pass_of(place: str) -> str:
    """The pass of an instruction of a function that JAX differentiated."""
    if _BACKWARD in place:
        return str(Pass.BACKWARD)
    words = [str(p) for p in Pass if f"/{p}/" in place]
    return words[0] if words else str(Pass.FORWARD) if "jvp(" in place else ""


def _bytes(array: str) -> int:
    """The bytes of an array by its type.

    >>> _bytes("bf16[4,8]"), _bytes("pred[3]"), _bytes("f32[]")
    (64, 3, 4)
    """
    (kind, shape) = _ARRAY.findall(array)[0]
    width = re.search(r"\d+", kind)
    bits = 8 if width is None else int(width[0])
    count = 1
    for n in filter(None, shape.split(",")):
        count *= int(n)
    return -(-count * bits // 8)
