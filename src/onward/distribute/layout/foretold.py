"""The bytes and the seconds of one layout, foretold from the account of a Program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import ceil

import numpy as np

from onward.core.cost import size
from onward.core.program import Program, Variable
from onward.core.words import Pass
from onward.develop.batch import WEIGHT, batch_names
from onward.develop.recompute.loops import is_recomputed
from onward.distribute.layout.accelerators import Accelerator
from onward.distribute.layout.account import GRADIENTS, SAVED, WORKING, Account, Seconds
from onward.distribute.layout.families import families
from onward.distribute.layout.layers import LayerPart, layers_of
from onward.distribute.layout.placing import DATA, FSDP, TENSOR, Placing, StageShare
from onward.distribute.layout.tensor import split_families

STAGES = "stages"
_PASSES = (Pass.FORWARD, Pass.BACKWARD)


@dataclass(frozen=True, order=True)
class Spreading:
    """One way to spread a step: the lengths of the axes, how many micro-batches, what is computed again."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    stages: int = 1
    micro_batches: int = 1
    recompute: bool = False

    @property
    def copies(self) -> int:
        """Over how many devices the rows of a batch are split."""
        return self.data * self.fsdp

    @property
    def rows(self) -> int:
        """Into how many parts the batch is split, over devices and one after the other."""
        return self.copies * self.micro_batches


@dataclass(frozen=True)
class KeptBytes:
    """The bytes that a device keeps at the moment of most memory.

    Attributes:
        parameters: its part of the parameters.
        state: its part of the optimizer's state.
        data: its part of the batch.
        gradients: its part of the gradients, those added up, and what the update makes of them.
        activations: kept for the backward pass.
        temporaries: all else: what a step works on, parameters that are gathered for one layer.
    """

    parameters: float
    state: float
    data: float
    gradients: float
    activations: float
    temporaries: float

    @property
    def arguments(self) -> float:
        """The bytes that are in memory between steps, with the data."""
        return self.parameters + self.state + self.data

    @property
    def all(self) -> float:
        """All of it."""
        return self.arguments + self.gradients + self.activations + self.temporaries


@dataclass(frozen=True)
class SentBytes:
    """The bytes that each device sends along one axis in one way at a step, and the seconds it takes."""

    axis: str
    by: str
    bytes: float
    seconds: float


class Foretelling:
    """A Program as the planner sees it, on one kind of device.

    Args:
        program: a training Program for one device.
        device: the kind of device.
    """

    def __init__(self, program: Program, device: Accelerator) -> None:
        self.program, self.device = program, device
        self.found = families(program)
        self.layers = layers_of(program, self.found.weights)
        self.families = split_families(self.found)
        self.placing = Placing(self.found, self.layers, self.families)
        self.account = cache(self._account)
        self.stages = cache(self._stages)

    @cached_property
    def batch(self) -> tuple[Variable, ...]:
        """The data whose rows devices share out."""
        fixed = self.program.recipe.origin.fixed_data if self.program.recipe else ()
        return tuple(self.program.variables[n] for n in batch_names(self.program, (), WEIGHT, fixed))

    @property
    def rows(self) -> int:
        """How many rows a batch has; 1 where no data has any."""
        return self.batch[0].shape[0] if self.batch else 1

    def _account(self, tensor: int) -> Account:
        """The account with the layers split over so many devices."""
        split = (one.family for one in self.placing.split(tensor))
        return Account(self.found, self.layers, split, tensor, self.batch, self.device)

    # Stages.

    def _stages(self, tensor: int, count: int) -> tuple[StageShare, ...]:
        """The shares of the first, a middle and the last stage, so that the slowest takes the least time."""
        layers = self.layers.count
        if count == 1:
            return (StageShare(layers),)
        before, each, after = (self._seconds(tensor, 1, part).all for part in LayerPart)
        each /= layers
        best = min(
            self._shares(count),
            key=lambda s: (max(before + s[0] * each, s[1] * each, after + s[2] * each), s[1]),
        )
        first, middle, last = best
        ends = (StageShare(first, ends=False), StageShare(last, begins=False))
        return ends if count == 2 else (ends[0], StageShare(middle, False, False), ends[1])

    def _shares(self, count: int) -> Iterator[tuple[int, int, int]]:
        """Numbers of layers of the first, each middle, and the last stage."""
        layers = self.layers.count
        if count == 2:
            yield from ((i, 0, layers - i) for i in range(1, layers))
            return
        most = ceil(layers / count) + 1
        for first in range(1, most + 1):
            for last in range(1, most + 1):
                if (rest := layers - first - last) >= count - 2:
                    yield first, ceil(rest / (count - 2)), last

    def _seconds(self, tensor: int, rows: int, part: LayerPart) -> Seconds:
        account = self.account(tensor)
        return account.seconds(rows, part, Pass.FORWARD) + account.seconds(rows, part, Pass.BACKWARD)

    def stage_seconds(self, choice: Spreading, stage: StageShare) -> Seconds:
        """The seconds of one micro-batch in a stage, but for what is sent."""
        account, total = self.account(choice.tensor), Seconds()
        for part in LayerPart:
            share = stage.of({part}, self.layers.count)
            total += self._seconds(choice.tensor, choice.rows, part) * share
            if choice.recompute and part is LayerPart.LAYERS:
                total += account.seconds(choice.rows, part, Pass.FORWARD) * share
        return total

    def update_seconds(self, choice: Spreading, stage: StageShare) -> Seconds:
        """The seconds of the update."""
        whole = self.placing.kept(choice.tensor, 1, StageShare(self.layers.count))[0]
        part = self.placing.kept(choice.tensor, choice.fsdp, stage)[0]
        all_ = sum(
            (self.account(choice.tensor).seconds(1, p, Pass.UPDATE) for p in LayerPart),
            Seconds(),
        )
        return all_ * (part / whole if whole else 0.0)

    # What is sent.

    def sent(self, choice: Spreading, stage: StageShare) -> tuple[SentBytes, ...]:
        """The bytes that each device of a stage sends at a step, axis by axis."""
        return tuple(s for s in self._all_sent(choice, stage) if s.bytes)

    def _all_sent(self, choice: Spreading, stage: StageShare) -> Iterator[SentBytes]:
        d, f, t, m = choice.data, choice.fsdp, choice.tensor, choice.micro_batches
        parameters, _, gradients = self.placing.kept(t, f, stage)
        whole, _, whole_gradients = self.placing.kept(t, 1, stage)
        arrays = stage.layers + stage.begins + stage.ends
        amount, count = self._summed(choice, stage)
        yield self._ring(TENSOR, "all-reduce", t, 1, 2 * m * amount, 2 * m * count)
        left = (whole * f - parameters * f) / (f - 1) if f > 1 else 0.0  # bytes of what fsdp does split
        left_gradients = (whole_gradients * f - gradients * f) / (f - 1) if f > 1 else 0.0
        yield self._ring(FSDP, "all-gather", f, t, 2 * m * left, 2 * m * arrays)
        yield self._ring(FSDP, "reduce-scatter", f, t, m * left_gradients, m * arrays)
        yield self._ring(FSDP, "all-reduce", f, t, 2 * (whole_gradients - left_gradients), 2)
        times = m if choice.stages == 1 else 1
        yield self._ring(DATA, "all-reduce", d, t * f, 2 * times * gradients, 2 * times * arrays)
        yield self._handed(choice, stage)

    def _ring(self, axis: str, by: str, length: int, stride: int, amount: float, times: int) -> SentBytes:
        """The bytes that a device sends on a ring for whole arrays of so many, in so many rounds."""
        if length == 1 or amount < 1:
            return SentBytes(axis, by, 0.0, 0.0)
        link = self.device.link(stride, length)
        sent = (length - 1) / length * amount
        return SentBytes(axis, by, sent, sent / link.bandwidth + times * (length - 1) * link.latency)

    def _handed(self, choice: Spreading, stage: StageShare) -> SentBytes:
        """Activations that a stage hands on, and their gradients that it hands back."""
        ways = 2 - stage.begins - stage.ends
        amount = choice.micro_batches * ways * self.account(choice.tensor).carried(choice.rows)
        link = self.device.link(choice.copies * choice.tensor, choice.stages)
        return SentBytes(
            STAGES,
            "activations",
            amount,
            amount / link.bandwidth + choice.micro_batches * ways * link.latency if amount else 0.0,
        )

    def _summed(self, choice: Spreading, stage: StageShare) -> tuple[float, int]:
        """The bytes that tensor parallelism sums for one micro-batch, and in how many sums."""
        account, amount, count = self.account(choice.tensor), 0.0, 0.0
        for part in LayerPart:
            share = stage.of({part}, self.layers.count)
            again = (Pass.FORWARD,) if choice.recompute and part is LayerPart.LAYERS else ()
            for made_by in (*_PASSES, *again):
                more, sums = account.summed(choice.rows, part, made_by)
                amount, count = amount + share * more, count + share * sums
        return amount, round(count)

    # Memory.

    def kept(self, choice: Spreading, stage: StageShare, in_flight: int) -> KeptBytes:
        """The bytes that a device of a stage keeps at its moment of most memory."""
        account, rows = self.account(choice.tensor), choice.rows
        parameters, state, gradients = self.placing.kept(choice.tensor, choice.fsdp, stage)
        whole = self.placing.kept(choice.tensor, 1, StageShare(self.layers.count))[2]
        saved = sum(
            (self._saved(choice, stage, part, in_flight) for part in LayerPart), np.zeros(len(account.passes))
        )
        slopes = account.curve(GRADIENTS, rows) * (gradients / whole if whole else 0.0)
        working = account.curve(WORKING, rows) + account.within(rows) + self._gathered(choice)
        there = np.isin(account.passes, [str(p) for p in LayerPart if stage.of({p}, 1)])
        total = np.where(there, saved + slopes + working, 0.0)
        at = int(np.argmax(total))
        added_up = gradients if choice.micro_batches > 1 else 0.0
        found = (float(np.broadcast_to(x, total.shape)[at]) for x in (slopes, saved, working))
        slope, save, work = found
        return KeptBytes(parameters, state, self._data(choice), slope + added_up, save, work)

    def _saved(
        self, choice: Spreading, stage: StageShare, part: LayerPart, in_flight: int
    ) -> np.ndarray | float:
        account, rows = self.account(choice.tensor), choice.rows
        share = stage.of({part}, self.layers.count) * in_flight
        curve = account.curve(f"{SAVED} {part}", rows) * share
        if not choice.recompute or part is not LayerPart.LAYERS:
            return curve
        most = account.most(f"{SAVED} {part}", rows)
        return curve * min(1.0, self._fraction(choice)) + most / self.layers.count

    def _fraction(self, choice: Spreading) -> float:
        """Of what layers save, the part that they save if they keep but what enters them."""
        account = self.account(choice.tensor)
        most = account.most(f"{SAVED} {LayerPart.LAYERS}", choice.rows)
        return self.layers.count * account.carried(choice.rows) / most if most else 1.0

    def saves_by_recompute(self, tensor: int) -> bool:
        """Whether layers that keep but what enters them keep less."""
        if is_recomputed(self.program):
            return False
        return self.layers.count > 1 and self._fraction(Spreading(tensor=tensor)) < 0.9

    def left(self, choice: Spreading) -> float:
        """Of the memory that a step takes beside its arguments, the part that is left by recompute."""
        whole = StageShare(self.layers.count)
        plain = self.kept(replace(choice, recompute=False), whole, 1)
        less = self.kept(replace(choice, recompute=True), whole, 1)
        return (less.all - less.arguments) / max(plain.all - plain.arguments, 1.0)

    def _gathered(self, choice: Spreading) -> float:
        """Parameters that FSDP has gathered: of this layer and the next, and this layer's gradients."""
        if choice.fsdp == 1:
            return 0.0
        inside, outside = self.placing.one_layer(choice.tensor)
        return max(3 * inside, 2 * outside) if self.layers.count > 1 else inside + outside

    def _data(self, choice: Spreading) -> float:
        return sum(size(v) / (choice.copies if v in self.batch else 1) for v in self.program.inputs)
