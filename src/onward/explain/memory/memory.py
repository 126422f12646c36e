"""The bytes that a step takes from its first op to its last, and the arrays that hold them at the peak.

    memory(program)                                    # in a notebook the picture and the table
    memory(program).beside(recompute(program, 0.5))    # both on one scale

The bytes are an estimate from the ops that ``compile`` would run (``develop.tuned``), by the rules of
``core.liveness`` and, for the device at hand, of ``core.kernels``; nothing is compiled. Against what XLA for
CPU reports of the step that ``compile`` makes (arguments, results that are not written over them, temporary
memory) 38 small models are within 15 %, as a test holds; the page *Count cost and memory* has a table.

Where state or activations lie in host memory the ops are taken as they stand: a CPU has one memory, and what
its compiler does there tells nothing of a device that has its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import overload

from onward.core.check import expect_program, expect_switches
from onward.core.errors import ArgumentError
from onward.core.program import Program
from onward.core.show import human_bytes
from onward.develop.offload import offloaded
from onward.develop.stored import stored_values
from onward.distribute.pipeline.cut import Pipeline
from onward.execute.memory.held import MemoryShare
from onward.execute.memory.table import bars, place, rows, side_by_side, text
from onward.execute.memory.use import MemoryUse
from onward.explain.memory.meshed import on_each_device
from onward.explain.memory.plot import Chart, OpPoint, Picture, picture
from onward.explain.memory.stages import PipelineMemory, memory_of_stages


class Memory(MemoryUse):
    """The bytes that a Program takes, op by op; print it, plot it, or put it beside another."""

    @cached_property
    def each_device(self) -> Mapping[MemoryShare, int]:
        """The bytes that one device takes, by what for.

        Of a partitioned Program, whose ops are over whole arrays, it is compiled: parameters, state and feeds
        are those of ``plan(program)``, results and temporaries what XLA plans for a device. Of any other
        Program they are ``shares``.
        """
        return self.shares if self.program.partition is None else on_each_device(self.program)

    def beside(self, other: Memory | Program, labels: tuple[str, str] = ("before", "after")) -> Beside:
        """This and another memory on one scale.

        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3))
        >>> print(str(ow.memory(program).beside(program)).splitlines()[-1])
        all at the peak        36 B   36 B
        """
        return Beside((self, other if isinstance(other, Memory) else Memory(other, *self._options)), labels)

    def chart(self, title: str | None = None) -> Chart:
        """The data of the picture: a title, and the bytes at each op by what they are taken for."""
        points = [
            OpPoint(str(m.op.made_by), place(m.op), m.bytes, {str(s): n for s, n in m.shares.items()})
            for m in self.curve
        ]
        return Chart(title or self._title, tuple(points))

    def plot(self) -> Picture:
        """The picture: bytes over the ops of the step. ``plot().save("memory.svg")`` writes it to a file."""
        return picture([self.chart()])

    def _repr_html_(self) -> str:
        return self.plot().html(rows(self.held, self.names))

    def __repr__(self) -> str:
        return f"Memory({self.program.name!r}, {human_bytes(self.peak)} at the peak)"

    def __str__(self) -> str:
        told = text(self._title, self.peak, self.curve, self.peak_number, self.shares, self.held, self.names)
        there = "state" if not stored_values(self.program) else "activations"
        there = "state and activations" if there != "state" and offloaded(self.program) else there
        told += f"\n\n{human_bytes(self.on_host)} of {there} lie in host memory" if self.on_host else ""
        return told if self.program.partition is None else f"{self._on_mesh}\n\n{told}"

    @property
    def _title(self) -> str:
        over = ", in whole arrays" if self.program.partition is not None else ""
        return f"Memory of {self.program.name}{over}"

    @property
    def _on_mesh(self) -> str:
        most = human_bytes(sum(self.each_device.values()))
        head = f"Each device of {self.program.partition} takes {most} for {self.program.name}, as compiled"
        return f"{head}\n\n{bars(self.each_device)}"


@dataclass(frozen=True, eq=False)
class Beside:
    """Two memories next to each other, such as before and after ``recompute``."""

    memories: tuple[Memory, Memory]
    labels: tuple[str, str]

    def plot(self) -> Picture:
        """The pictures of both on one scale."""
        return picture([m.chart(label) for m, label in zip(self.memories, self.labels, strict=True)])

    def _repr_html_(self) -> str:
        return self.plot().html([])

    def __str__(self) -> str:
        return side_by_side([(m.shares, m.peak, m.on_host) for m in self.memories], self.labels)


@overload
def memory(program: Program, tune: bool = True, roll: bool | None = None) -> Memory: ...


@overload
def memory(program: Pipeline) -> PipelineMemory: ...


def memory(
    program: Program | Pipeline, tune: bool = True, roll: bool | None = None
) -> Memory | PipelineMemory:
    """How much memory a Program takes while it runs: over its ops, and what holds most at the peak.

    It is that of the step that ``compile`` makes for the devices that JAX shows, so its ops are those that
    ``compile`` runs: repeated layers may be one loop. An estimate; how far it is from what XLA makes of it is
    told in ``onward.explain.memory.memory``.

    Of a replicated Program it tells what one device takes. Of a partitioned one the ops are over whole
    arrays, and how far these are split is up to JAX's partitioner: ``each_device`` tells what one device
    takes, and compiles it for that, as printing does. Of a Pipeline it tells what each stage takes, task by
    task: all parts are compiled, and what they find in memory follows from the schedule. Otherwise nothing is
    compiled, and nothing is run.

    Args:
        program: at any stage; or a Pipeline, which needs as many devices as it runs on.
        tune: as in ``compile``; False: the ops of the Program are taken as they stand.
        roll: as in ``compile``: whether repeated layers become a loop; None: where it gains something. A
            Pipeline is compiled as it is, and takes neither.

    Raises:
        ArgumentError: it is neither; a Pipeline in several processes, or with too few devices; an option that
            is none of these, or that a Pipeline does not take.
        GraphError: ``roll=True`` where no layer repeats.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> def loss(w, x):
        ...     return jnp.mean(jnp.tanh(x @ w) @ w)
        >>> program = ow.SGD(0.1).minimize(loss, jnp.ones((8, 8)), jnp.ones((64, 8)))
        >>> found = ow.memory(program)
        >>> found.peak, found.peak_op.type, found.shares["saved for backward"]
        (10760, 'dot_general_grad', 2048)
    """
    expect_switches("memory", tune=tune)
    expect_switches("memory", (True, False, None), roll=roll)
    if isinstance(program, Pipeline):
        given = {"tune": tune is not True, "roll": roll is not None}
        for word in (word for word, is_given in given.items() if is_given):
            raise ArgumentError(_OF_ONE_PROGRAM.format(word=word))
        return memory_of_stages(program)
    expect_program(program, "memory")
    return Memory(program, tune, roll)


_OF_ONE_PROGRAM = (
    "memory: {word} says how compile changes one Program, and a Pipeline is compiled as it was cut. Leave it "
    "out; or ask of the Program before pipeline: memory(program, {word}=...)."
)
