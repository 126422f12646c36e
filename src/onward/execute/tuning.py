"""Transform a Program before it is compiled: the same results with less work.

A Step keeps the Program that people gave it, by whose names they fetch. What is compiled is made of that:
repeated layers are a loop where this gains something, products leave a loop that need not be computed turn
by turn, bodies are others where the device is slow at these, and fences stand where a compiler would compute
a value again and again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax

from onward.core.errors import GraphError, OnwardError, RecipeError
from onward.core.first_use import at_first_call
from onward.core.program import Program
from onward.core.show import human_bytes, nbytes
from onward.core.words import some
from onward.develop.fence import fence, worth_fencing
from onward.develop.fission.fission import fission, fissions
from onward.develop.offload import offloaded
from onward.develop.recompute.lean import lean
from onward.develop.recompute.loops import is_recomputed
from onward.develop.rewrite.formulations import reformulated, reformulated_ops
from onward.develop.roll.roll import roll, roll_where_worth, rolls_of
from onward.execute.cores import Cores
from onward.execute.loop.interrupt import uninterrupted
from onward.execute.storage.storage import Storage

_fuse_attention = at_first_call("onward.develop.attention.fuse", "fuse_attention")
_attentions_of = at_first_call("onward.develop.attention.report", "attentions_of")
_KERNELS = {"blocks": "in blocks", "cudnn": "by cuDNN", None: "as written"}


@dataclass(frozen=True)
class Tuned:
    """A Program as it is compiled, and what was done to it, in words."""

    program: Program
    notes: tuple[str, ...]


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
        """The state in host memory, if there is any, by its bytes."""
        if found := offloaded(self.program):
            there, whole = sum(map(nbytes, found)), sum(map(nbytes, self.program.state))
            names = some([v.name for v in found], 3)
            yield (
                f"offloaded: {names}, {human_bytes(there)} of state in host memory, "
                f"{human_bytes(whole - there)} on the device"
            )

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
            return Tuned(program, (*self.words, "loaded from a file: compiled as it was saved"))
        program, attention = _attention_fused(program, fetch) if self.attention else (program, "")
        program, cores = (program, "") if self.cores is None else self.cores(program, fetch)
        program, note = self._rolled(program, fetch)
        notes = [*filter(None, (cores, *self.words, attention)), note]
        if self.is_on:
            platform = jax.default_backend()
            if platform == "cpu" and rolls_of(program) and not is_recomputed(program):
                leaner = lean(program)
                if leaner is not program:
                    notes.append("lean: the backward pass computes again what is cheaper than to keep")
                program = leaner
            if self.fission and (loops := fissions(program)) and not is_recomputed(program):
                program = fission(program)
                notes.append(f"fission: {'; '.join(loops)}")
            if found := Counter(op.type for op in reformulated_ops(program, platform)):
                program = reformulated(program, platform)
                notes.append(f"rewritten for {platform}: {_counted(found)}")
            if (is_worth := worth_fencing(program, platform))[0]:
                program = fence(program, platform)
                notes.append(f"fenced: {is_worth[1]}")
        return Tuned(program, tuple(notes))

    def _rolled(self, program: Program, fetch: Sequence[str]) -> tuple[Program, str]:
        if is_recomputed(program):
            loops = "" if rolls_of(program) else "; a budget in place of scopes would roll repeated layers"
            return program, f"recomputed: print(recomputed(program)) tells what{loops}"
        if rolls_of(program):
            return program, _words(program)
        if self.roll:
            result = roll(program, keep=fetch)
            return result, _words(result)
        if self.roll is not None or not self.is_on:
            return program, "not rolled: switched off"
        try:
            result, verdict = roll_where_worth(program, keep=fetch)
        except (GraphError, RecipeError) as error:
            return program, f"not rolled: {error}"
        return result, _words(result) if verdict else f"not rolled: {verdict.reason}"


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


def _counted(found: Counter[str]) -> str:
    return ", ".join(f"{kind} {count}" for kind, count in found.items())


def _words(rolled: Program) -> str:
    return "rolled: " + "; ".join(map(str, rolls_of(rolled)))
