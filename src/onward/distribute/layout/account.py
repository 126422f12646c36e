"""An account of one step of a Program: what it computes, moves, sums and holds, split in one way.

Every amount is one of two kinds: what is as long as the batch, and shrinks with the rows that a device reads,
and what does not. So an account that was made once tells the amounts for any number of devices and
micro-batches, and a loop over layers is one layer times its number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from onward.core.cost import size
from onward.core.flops import flops
from onward.core.liveness import Array, Lifetimes
from onward.core.marks import STACK, gradient_type
from onward.core.primitives.table import of
from onward.core.primitives.traits import Moves
from onward.core.program import Program, Variable
from onward.core.words import Kind, Pass
from onward.distribute.layout.accelerators import Accelerator
from onward.distribute.layout.families import Dimension, Families, WalkedStep
from onward.distribute.layout.layers import LayerPart, RepeatedLayers

Numbers = np.ndarray[Any, np.dtype[np.float64]]
_STACKS = (STACK, gradient_type(STACK))
_CUTS = (Moves.LOOKS_UP, Moves.CUTS, Moves.CUTS_AT)


@dataclass(frozen=True)
class Seconds:
    """The seconds that one micro-batch takes in one part and pass, by what they are spent on."""

    compute: float = 0.0
    memory: float = 0.0

    def __add__(self, other: Seconds) -> Seconds:
        return Seconds(self.compute + other.compute, self.memory + other.memory)

    def __mul__(self, times: float) -> Seconds:
        return Seconds(times * self.compute, times * self.memory)

    @property
    def all(self) -> float:
        """All of them."""
        return self.compute + self.memory


class Account:
    """The amounts of a Program whose families ``split`` are in ``parts`` parts.

    Args:
        found: the families of its dimensions.
        layers: its repeated layers.
        split: the families that tensor parallelism splits.
        parts: over how many devices.
        batch: the data whose rows devices share out.
        device: where it runs.
    """

    def __init__(
        self,
        found: Families,
        layers: RepeatedLayers,
        split: Iterable[Dimension],
        parts: int,
        batch: Iterable[Variable],
        device: Accelerator,
    ) -> None:
        self.found, self.layers, self.parts, self.device = found, layers, parts, device
        self.program = found.program
        self._split = frozenset(map(found.find, split))
        self._rows = frozenset(found.find((v, 0)) for v in batch)
        self._kept: dict[Variable, tuple[float, float]] = {}
        self.seconds = cache(self._seconds)
        self.curve = cache(self._curve)
        self.within = cache(self._within_all)

    # How much of a Variable a device has: of what is whole, and of what is as long as the batch.

    def held(self, v: Variable) -> tuple[float, float]:
        """The bytes of a Variable on a device: those that stay, and those that shrink with its rows."""
        if v not in self._kept:
            families = self.found.of(v)
            bytes_ = size(v) / (self.parts if not self._split.isdisjoint(families) else 1)
            has_rows = not self._rows.isdisjoint(families)
            self._kept[v] = (0.0, bytes_) if has_rows else (bytes_, 0.0)
        return self._kept[v]

    def _sum(self, variables: Iterable[Variable]) -> tuple[float, float]:
        pairs = [self.held(v) for v in variables]
        return sum(a for a, _ in pairs), sum(b for _, b in pairs)

    # Time.

    def _seconds(self, rows: int, part: LayerPart, made_by: Pass) -> Seconds:
        """The time of one micro-batch in a part and pass, with the batch in so many ``rows``-fold parts."""
        table = self._tables.get((part, made_by))
        if table is None:
            return Seconds()
        compute = (table[0] + table[1] / rows) * table[4]
        memory = (table[2] + table[3] / rows) * table[4]
        is_bound = compute > memory
        return Seconds(float(compute[is_bound].sum()), float(memory[~is_bound].sum()))

    @property
    def step(self) -> Seconds:
        """The time of a whole step whose batch is in one part."""
        return sum((self.seconds(1, *key) for key in self._tables), Seconds())

    @cached_property
    def _tables(self) -> Mapping[tuple[LayerPart, Pass], Numbers]:
        """For each part and pass a column for each equation: seconds of both kinds, and how often."""
        columns: dict[tuple[LayerPart, Pass], list[tuple[float, ...]]] = {}
        existing = {id(lives): _existing(lives) for lives in {step.lives for step in self.found.steps}}
        for step in self.found.steps:
            if step.call is not None and step.step.outputs:
                key = self._part(step), step.made_by
                columns.setdefault(key, []).append(self._column(step, existing[id(step.lives)]))
        return {key: np.array(rows).T for key, rows in columns.items()}

    def _part(self, step: WalkedStep) -> LayerPart:
        return self.layers.part(self.program.ops[step.op])

    def _column(self, step: WalkedStep, existing: set[Variable]) -> tuple[float, ...]:
        assert step.call is not None
        row, values = of(step.step.kind), [v for v in (*step.operands, *step.step.outputs) if v is not None]
        families = {self.found.find((v, i)) for v in values for i in range(v.ndim)}
        width = min(int(getattr(v.dtype, "itemsize", 4)) for v in step.step.outputs)
        work = flops(step.call) / self.device.flops_of(width if row.is_product else 8 if width > 4 else 4)
        work /= self.parts if not self._split.isdisjoint(families) else 1
        work_pair = (0.0, work) if not self._rows.isdisjoint(families) else (work, 0.0)
        moved = self._sum(v for v in _moved(step) if v in existing)
        if row.is_view or self.program.ops[step.op].type in _STACKS:
            return 0.0, 0.0, 0.0, 0.0, step.times
        return (*work_pair, *(n / self.device.bandwidth for n in moved), step.times)

    # What tensor parallelism sends.

    @cached_property
    def _sums(self) -> Mapping[tuple[LayerPart, Pass], tuple[float, float, int]]:
        """For each part and pass the bytes that devices sum, and in how many sums."""
        partial: dict[Variable, WalkedStep] = {}
        for step in self.found.steps:
            contracted = {self.found.find(d) for group in step.sums for d in group}
            if not self._split.isdisjoint(contracted):
                partial.update((v, step) for v in step.step.outputs)
            elif of(step.step.kind).adds or of(step.step.kind).is_view or step.call is None:
                read = [v for v in step.operands if v is not None]
                if read and all(v in partial for v in read) and not step.step.programs:
                    for v in read:
                        partial.pop(v, None)  # summed once, behind the addition
                    partial.update((v, step) for v in step.step.outputs)
        found: dict[tuple[LayerPart, Pass], tuple[float, float, int]] = {}
        for v, step in partial.items():
            key, (whole, rows) = (self._part(step), step.made_by), self.held(v)
            known = found.get(key, (0.0, 0.0, 0))
            more = (known[0] + step.times * whole, known[1] + step.times * rows, known[2] + step.times)
            found[key] = more
        return found

    def summed(self, rows: int, part: LayerPart, made_by: Pass) -> tuple[float, int]:
        """The bytes that devices sum for one micro-batch, and in how many sums."""
        whole, by_rows, count = self._sums.get((part, made_by), (0.0, 0.0, 0))
        return whole + by_rows / rows, count

    # Memory.

    @cached_property
    def _curves(self) -> Mapping[str, Numbers]:
        """The bytes held at each step, those that stay and those by rows, by what they are held for."""
        lives = self.found.lives[self.program]
        curves: dict[str, Numbers] = {}
        gradients = {g for _, g in self.program.gradients}
        for array in lives.arrays:
            if array.begin >= 0 and self._is_written(array, lives):
                kind = self._held_for(array, lives, gradients)
                curve = curves.setdefault(kind, np.zeros((2, len(lives.steps) + 2)))
                amount = np.array(self.held(array.variables[0])) if array.bytes else np.zeros(2)
                curve[:, array.begin] += amount
                curve[:, min(array.end, len(lives.steps)) + 1] -= amount
        return {kind: curve.cumsum(1)[:, : len(lives.steps)] for kind, curve in curves.items()}

    def _is_written(self, array: Array, lives: Lifetimes) -> bool:
        """Whether an array is made: something reads it, and it is not a stored stack of parameters."""
        made = self.program.ops[lives.steps[array.begin].op]
        return made.type not in _STACKS and not self.found.read.isdisjoint(array.variables)

    def _held_for(self, array: Array, lives: Lifetimes, gradients: set[Variable]) -> str:
        made = self.program.ops[lives.steps[array.begin].op]
        if not gradients.isdisjoint(array.variables):
            return GRADIENTS
        if made.made_by is Pass.FORWARD:
            end = min(array.end, len(lives.steps) - 1)
            late = self.program.ops[lives.steps[end].op].made_by is not Pass.FORWARD
            return f"{SAVED} {self.layers.part(made)}" if late else WORKING
        is_of_parameter = made.made_by is Pass.BACKWARD and self.held(array.variables[0])[0] > 0
        return GRADIENTS if is_of_parameter or made.made_by is Pass.UPDATE else WORKING

    def _curve(self, kind: str, rows: int) -> Numbers | float:
        """The bytes held for something, step by step."""
        found = self._curves.get(kind)
        return 0.0 if found is None else found[0] + found[1] / rows

    def most(self, kind: str, rows: int) -> float:
        """The most bytes that are held for something."""
        return float(np.max(self.curve(kind, rows), initial=0.0))

    def _within_all(self, rows: int) -> Numbers:
        """The bytes that each step takes while it runs: a loop for one turn."""
        return self._within(self.found.lives[self.program], rows)

    def _within(self, lives: Lifetimes, rows: int) -> Numbers:
        turns = [max((self._turn(p, rows) for p in step.programs), default=0.0) for step in lives.steps]
        return np.array(turns or [0.0])

    def _turn(self, program: Program, rows: int) -> float:
        lives = self.found.lives[program]
        given = {*program.inputs, *program.constants}
        change = np.zeros(len(lives.steps) + 2)
        for array in lives.arrays:
            if array.variables[0] not in given and array.bytes:
                whole, by_rows = self.held(array.variables[0])
                change[max(array.begin, 0)] += whole + by_rows / rows
                change[min(array.end, len(lives.steps)) + 1] -= whole + by_rows / rows
        taken = change.cumsum()[: len(lives.steps)]
        return float(np.max(taken + self._within(lives, rows)[: len(taken)], initial=0.0))

    @cached_property
    def passes(self) -> np.ndarray[Any, Any]:
        """The part of each step of the whole Program, as text."""
        lives = self.found.lives[self.program]
        return np.array([str(self.layers.part(self.program.ops[step.op])) for step in lives.steps])

    def carried(self, rows: int) -> float:
        """The bytes that one layer hands to the next."""
        whole, by_rows = self._sum(self.layers.handed)
        return whole + by_rows / rows


GRADIENTS, SAVED, WORKING = "gradients", "saved", "working"


def _existing(lives: Lifetimes) -> set[Variable]:
    """The Variables that are written into memory."""
    return {v for array in lives.arrays for v in array.variables}


def _moved(step: WalkedStep) -> list[Variable]:
    """The Variables that an equation reads from memory and writes."""
    row, read = of(step.step.kind), list(step.operands)
    written: list[Variable | None] = list(step.step.outputs)
    if row.moves in _CUTS:
        read = read[1:]
    elif row.update:
        read, written = read[1:], read[row.update : row.update + 1]
    return [v for v in (*read, *written) if v is not None and v.kind is not Kind.CONSTANT]
