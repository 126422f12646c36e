"""Layouts of one training on many devices: proposed, foretold, ranked, and put into code.

layouts = layout(program, devices=64, memory="80GB")
print(layouts)                         # a table, the fastest first
print(layouts[0].explain())            # its bytes, its seconds, what limits it, the code to write
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Any, overload

from jax.sharding import PartitionSpec

from onward.core.errors import UnknownNameError, nearest
from onward.core.program import Program
from onward.develop.accumulation.accumulate import accumulate
from onward.develop.recompute.recompute import recompute
from onward.distribute.layout.accelerators import Accelerator
from onward.distribute.layout.account import Seconds
from onward.distribute.layout.foretold import STAGES, Foretelling, KeptBytes, SentBytes, Spreading
from onward.distribute.layout.placing import DATA, FSDP, TENSOR, StageShare
from onward.distribute.layout.text import code, difference, explanation, table
from onward.distribute.partition import partition
from onward.distribute.pipeline.cut import Pipeline
from onward.distribute.pipeline.pipeline import pipeline


@dataclass(frozen=True, eq=False, repr=False)
class DeviceLayout:
    """One way to spread a training over devices, with what it keeps, sends and takes.

    Attributes:
        choice: the lengths of the axes data, fsdp, tensor and stages, the number of micro-batches, and
            whether layers are computed again.
        device: the kind of device.
        kept: the bytes on the device of most, at its moment of most.
        sent: the bytes that each device of the slowest stage sends at a step, by axis.
        working: the seconds of all micro-batches in the slowest stage: arithmetic, and what waits for memory.
        update: the seconds of the update.
        bubble: the part of the step in which a stage waits for others.
        where: how parameters are split, as ``partition`` takes it.
        names: of all parameters, so that a pattern in ``code`` meets no other.
        fraction: of the memory beside what lies there between steps, the part that recompute leaves.
        turns: of the loop that the layers are, which stages share evenly; None where there is none.
    """

    choice: Spreading
    device: Accelerator
    kept: KeptBytes
    sent: tuple[SentBytes, ...]
    working: Seconds
    update: float
    bubble: float
    where: Mapping[str, PartitionSpec]
    names: tuple[str, ...] = field(default=(), kw_only=True)
    fraction: float = field(default=1.0, kw_only=True)
    turns: int | None = field(default=None, kw_only=True)

    def along(self, axis: str) -> float:
        """The seconds that what is sent along an axis takes."""
        return sum(s.seconds for s in self.sent if s.axis == axis)

    @property
    def seconds(self) -> float:
        """The seconds of a step; see ``explain`` for what is assumed."""
        return max(self._stepwise, self._beside) + self.update

    @property
    def _stepwise(self) -> float:
        """The seconds of what is done in turn: arithmetic, sums of tensor parallelism, other stages."""
        return (self.working.all + self.along(TENSOR)) / (1 - self.bubble)

    @property
    def _beside(self) -> float:
        """The seconds of what is sent while devices compute."""
        return sum(map(self.along, (DATA, FSDP, STAGES)))

    @property
    def limit(self) -> str:
        """The cause of most of a step: compute, memory bandwidth, bubble, or the link of an axis."""
        if self._beside > self._stepwise:
            return f"link of {max((DATA, FSDP, STAGES), key=self.along)}"
        spent = {
            "compute": self.working.compute,
            "memory bandwidth": self.working.memory + self.update,
            f"link of {TENSOR}": self.along(TENSOR),
            "bubble": self.bubble * self._stepwise,
        }
        return max(spent, key=spent.__getitem__)

    @property
    def mesh(self) -> dict[str, int]:
        """The axes of the mesh of each stage, those that are longer than 1."""
        c = self.choice
        axes = {DATA: c.data, FSDP: c.fsdp, TENSOR: c.tensor}
        return {axis: n for axis, n in axes.items() if n > 1} or {DATA: 1}

    @property
    def batch(self) -> tuple[str, ...]:
        """The axes of the mesh that split the batch."""
        return tuple(axis for axis in (DATA, FSDP) if axis in self.mesh)

    @property
    def budget(self) -> float | None:
        """The budget of ``recompute``; None if nothing is computed again."""
        return min(0.95, max(0.05, ceil(20 * self.fraction) / 20)) if self.choice.recompute else None

    @property
    def runs(self) -> bool:
        """Whether its ``code`` makes a step; else it is foretold only, and the code says why."""
        return self.turns is None or self.turns % self.choice.stages == 0

    @property
    def code(self) -> str:
        """The calls to write to have a Program laid out so."""
        return code(self)

    def explain(self) -> str:
        """The layout in words: bytes, seconds, what is assumed, the code to write."""
        return explanation(self)

    def diff(self, other: DeviceLayout) -> str:
        """List what differs from this layout to another one, line by line."""
        return difference(self, other)

    def apply(self, program: Program) -> Program | Pipeline:
        """The Program in this layout, or the Pipeline if it has stages, for ``compile``: what ``code`` says.

        Args:
            program: what the layout was made for, or one with the same parameters.

        Raises:
            ArgumentError: ``runs`` is False.
        """
        choice = self.choice
        if self.budget is not None:
            program = recompute(program, self.budget)
        if choice.micro_batches > 1 and choice.stages == 1:
            program = accumulate(program, choice.micro_batches)
        lanes = choice.data if choice.stages > 1 and choice.fsdp * choice.tensor == 1 else 1
        if lanes < choice.copies * choice.tensor:
            where: dict[Any, PartitionSpec] = dict(self.where)
            program = partition(program, self.mesh, where, batch=self.batch or None)
        if choice.stages == 1:
            return program
        return pipeline(program, choice.stages, choice.micro_batches, data=lanes)

    def __str__(self) -> str:
        return self.explain()

    def __repr__(self) -> str:
        return f"DeviceLayout({self.choice}, {self.seconds:.3g} s)"


class DeviceLayouts(Sequence[DeviceLayout]):
    """Layouts that fit, the fastest first; print them.

    Attributes:
        program: the Program's name.
        devices: how many.
        device: their kind.
        tried: how many layouts there were.
        notes: what was left out, and why.
    """

    def __init__(
        self,
        found: Sequence[DeviceLayout],
        *,
        program: str,
        devices: int,
        device: Accelerator,
        tried: int,
        notes: Sequence[str],
    ) -> None:
        self._found = tuple(found)
        self.program, self.devices, self.device = program, devices, device
        self.tried, self.notes = tried, tuple(notes)

    @overload
    def __getitem__(self, at: int) -> DeviceLayout: ...

    @overload
    def __getitem__(self, at: slice) -> tuple[DeviceLayout, ...]: ...

    def __getitem__(self, at: Any) -> Any:
        return self._found[at]

    def __len__(self) -> int:
        return len(self._found)

    def find(self, **wanted: int | bool) -> DeviceLayout:
        """The fastest layout with these lengths of axes, such as ``find(tensor=8, stages=16)``."""
        known = Spreading.__dataclass_fields__
        if unknown := [name for name in wanted if name not in known]:
            raise UnknownNameError(f"layout: a layout has no {unknown[0]!r}. {nearest(unknown[0], known)}")
        for one in self:
            if all(getattr(one.choice, name) == value for name, value in wanted.items()):
                return one
        raise UnknownNameError(f"layout: none of the {len(self)} layouts that fit has {wanted}.")

    def __str__(self) -> str:
        return table(self)

    __repr__ = __str__


def foretold(about: Foretelling, choice: Spreading) -> DeviceLayout:
    """One layout with its bytes and seconds."""
    stages = about.stages(choice.tensor, choice.stages)
    return DeviceLayout(
        choice,
        about.device,
        max(_kept(about, choice, stages), key=lambda kept: kept.all),
        *_slowest(about, choice, stages),
        bubble=(choice.stages - 1) / (choice.micro_batches + choice.stages - 1),
        where=about.placing.specs(choice.tensor, choice.fsdp),
        names=tuple(v.name for v in about.program.parameters),
        turns=about.layers.turns,
        fraction=about.left(choice) if choice.recompute else 1.0,
    )


def _kept(about: Foretelling, choice: Spreading, stages: Sequence[StageShare]) -> Iterator[KeptBytes]:
    """The bytes of each kind of stage: by 1F1B the first has a micro-batch in flight for each stage."""
    for number, stage in enumerate(stages):
        behind = 1 if stage.ends else choice.stages - number
        yield about.kept(choice, stage, min(behind, choice.micro_batches))


def _slowest(
    about: Foretelling, choice: Spreading, stages: Sequence[StageShare]
) -> tuple[tuple[SentBytes, ...], Seconds, float]:
    """Tell what the stage that takes longest sends, computes, and updates."""
    found = []
    for stage in stages:
        sent = about.sent(choice, stage)
        working = about.stage_seconds(choice, stage) * choice.micro_batches
        waits = sum(s.seconds for s in sent if s.axis == TENSOR)
        found.append((working.all + waits, (sent, working, about.update_seconds(choice, stage).all)))
    return max(found, key=lambda pair: pair[0])[1]
