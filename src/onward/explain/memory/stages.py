"""The bytes that each stage of a pipeline takes, task by task."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from onward.core.columns import columns
from onward.core.show import human_bytes
from onward.distribute.pipeline.cut import Pipeline
from onward.execute.memory.held import MemoryShare
from onward.execute.processes import expect_all_stages
from onward.explain.memory.planned import StageMoment, planned_moments
from onward.explain.memory.plot import Chart, OpPoint, Picture, picture


@dataclass(frozen=True, eq=False, repr=False)
class PipelineMemory:
    """The bytes that each stage of a Pipeline takes, task by task; print it, or plot it.

    Attributes:
        pipeline: the Pipeline.
        curves: for each stage its tasks, in order, with the bytes of each of its devices.
    """

    pipeline: Pipeline
    curves: tuple[tuple[StageMoment, ...], ...]

    @cached_property
    def peaks(self) -> tuple[StageMoment, ...]:
        """For each stage the task that takes most."""
        return tuple(max(curve, key=lambda moment: moment.bytes) for curve in self.curves)

    @property
    def peak(self) -> int:
        """The most bytes that a device of any stage takes."""
        return max(moment.bytes for moment in self.peaks)

    def plot(self) -> Picture:
        """The picture: for each stage its bytes over the tasks of a step, all on one scale."""
        return picture(
            [Chart(f"stage {i}", tuple(map(_point, curve))) for i, curve in enumerate(self.curves)]
        )

    def _repr_html_(self) -> str:
        return self.plot().html(self._rows)

    def __repr__(self) -> str:
        return f"PipelineMemory({self.pipeline.program.name!r}, {human_bytes(self.peak)} at the peak)"

    def __str__(self) -> str:
        each = "a device" if self.pipeline.partition is None else "each of its devices"
        head = f"Memory of {self.pipeline.program.name} at the peak of each stage, in bytes of {each}"
        return f"{head}\n\n{columns(self._rows, right=range(1, len(self._rows[0]) - 1))}"

    @property
    def _rows(self) -> list[tuple[str, ...]]:
        shown = [share for share in MemoryShare if any(moment.shares[share] for moment in self.peaks)]
        rows = [("stage", *map(str, shown), "all", "at")]
        for stage, moment in enumerate(self.peaks):
            parts = (human_bytes(moment.shares[share]) for share in shown)
            rows.append((str(stage), *parts, human_bytes(moment.bytes), moment.task))
        return rows


def _point(moment: StageMoment) -> OpPoint:
    shares = {str(share): n for share, n in moment.shares.items()}
    task = moment.task if moment.task != moment.made_by else ""
    return OpPoint(str(moment.made_by), task, moment.bytes, shares)


def memory_of_stages(pipeline: Pipeline) -> PipelineMemory:
    """Compile the parts of a Pipeline, and issue a step of it without arrays.

    Raises:
        ArgumentError: too few devices, or several processes.
    """
    expect_all_stages("memory")
    return PipelineMemory(pipeline, planned_moments(pipeline))
