"""The options by which a Program is transformed before it is compiled, and a plan that tells what was done.

A Step keeps the Program that people gave it, by whose names they fetch. What is compiled is made of that:
attention as one op and a replica for each core where they are asked for, and all that ``develop.tuned`` does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from onward.core.errors import OnwardError
from onward.core.first_use import at_first_call
from onward.core.program import Program
from onward.core.show import human_bytes, nbytes
from onward.core.words import some
from onward.develop.offload import offloaded
from onward.develop.recompute.loops import is_recomputed
from onward.develop.stored import stored_values
from onward.develop.tuned import Tuned, in_loops, reformed, tuned
from onward.execute.cores import Cores
from onward.execute.loop.interrupt import uninterrupted
from onward.execute.storage.storage import Storage

_fuse_attention = at_first_call("onward.develop.attention.fuse", "fuse_attention")
_attentions_of = at_first_call("onward.develop.attention.report", "attentions_of")
_KERNELS = {"blocks": "in blocks", "cudnn": "by cuDNN", None: "as written"}


@dataclass(frozen=True)
class StepPlan:
    """How a Step runs a Program; ``print`` shows it.

    Attributes:
        program: as people gave it.
        compiled: as it is compiled, over buffers.
        notes: what was done to it.
        storage: which buffer holds what; None where each state Variable has one of its own.
    """

    program: Program
    compiled: Program
    notes: tuple[str, ...]
    storage: Storage | None

    def __str__(self) -> str:
        count = len(self.program.state)
        kept = str(self.storage) if self.storage else f"{count} state Variables, each in a buffer of its own"
        head = f"{self.program.name}: {len(self.program.ops):,} ops, compiled as {len(self.compiled.ops):,}"
        return "\n".join([head, *self.notes, *self._offloaded, kept])

    @property
    def _offloaded(self) -> Iterator[str]:
        """A line each for state and activations in host memory, by their bytes."""
        if found := offloaded(self.program):
            there, whole = sum(map(nbytes, found)), sum(map(nbytes, self.program.state))
            names = some([v.name for v in found], 3)
            yield (
                f"offloaded: {names}, {human_bytes(there)} of state in host memory, "
                f"{human_bytes(whole - there)} on the device"
            )
        if found := stored_values(self.program):
            names = some([v.name for v in found], 3)
            yield f"offloaded: {names}, {human_bytes(sum(map(nbytes, found)))} until the backward pass"

    __repr__ = __str__


@dataclass(frozen=True)
class Tuning:
    """Options of the transformations of a Program before it is compiled.

    Attributes:
        is_on: whether anything may be done that is not asked for.
        roll: whether repeated layers become a loop; None: where it gains something.
        fission: whether products leave loops that need not be computed turn by turn.
        cores: those of a CPU that it runs on; None for one device.
        words: what else is done, for the plan.
        attention: whether attention is computed by ``fuse_attention``, where nothing within is fetched.
    """

    is_on: bool = True
    roll: bool | None = None
    fission: bool = True
    cores: Cores | None = None
    words: tuple[str, ...] = ()
    attention: bool = False

    @uninterrupted
    def __call__(self, program: Program, fetch: Sequence[str]) -> Tuned:
        """The Program to compile, of which these names are fetched."""
        if program.code is not None:
            return Tuned(program, (*self.words, *tuned(program).notes))
        program, attention = _attention_fused(program, fetch) if self.attention else (program, "")
        may_split = self.fission and not is_recomputed(program)
        looped = in_loops(program, fetch, self.is_on, self.roll)
        program, cores = self._over_cores(looped.program, fetch)
        found = reformed(program, may_split) if self.is_on else Tuned(program, ())
        notes = [*filter(None, (cores, *self.words, attention)), *looped.notes, *found.notes]
        return Tuned(found.program, tuple(notes))

    def _over_cores(self, program: Program, fetch: Sequence[str]) -> tuple[Program, str]:
        return (program, "") if self.cores is None else self.cores(program, fetch)


def _attention_fused(program: Program, fetch: Sequence[str]) -> tuple[Program, str]:
    """A Program in which attention is one op where that gains something, and the note on it."""
    try:
        fused: Program = _fuse_attention(program)
    except OnwardError as error:
        return program, f"attention as it is written: {error}"
    if missing := [name for name in fetch if name not in fused]:
        return program, f"attention as it is written: {missing[0]!r} is fetched, which stands within it"
    by = Counter(found.kernel for found in _attentions_of(fused))
    return fused, f"attention: {', '.join(f'{by[k]} {w}' for k, w in _KERNELS.items() if by[k])}"
