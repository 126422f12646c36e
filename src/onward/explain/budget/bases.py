"""The same training with its loss head and its attention whole or in chunks: the bases of a search.

What each has in addition is for ``recompute`` to keep or to compute again. What is kept then lies on the
device, or some of it in host memory until the backward pass reads it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from onward.core.check import expect_program
from onward.core.errors import GraphError
from onward.core.marks import ACCUMULATE
from onward.core.placement import expect_no_axis
from onward.core.program import Program, Variable
from onward.core.show import nbytes
from onward.develop.chunk.chunk import chunk, chunks_of, scores_kept
from onward.develop.offload import offload
from onward.develop.recompute.loops import is_recomputed
from onward.develop.recompute.measure import estimated
from onward.develop.recompute.replay import is_replayable
from onward.develop.recompute.search import Rungs
from onward.develop.roll.roll import roll_where_worth
from onward.develop.stored import Saved, stored_values
from onward.distribute.layout.accelerators import Accelerator
from onward.distribute.layout.foretold import Foretelling
from onward.execute.tuning import Tuning

_COUNTS = (1, 8, 64)
_ALL_COUNTS = (1, 8, 16, 32, 64)
_PARTS = 4  # of a ladder, between which its estimates are looked at
HOST_PARTS = 2  # of what is kept for the backward pass, that lie in host memory together
_LEAST = 20  # an array that is less than this part of the peak is not worth a loop


@dataclass(frozen=True)
class Chunking:
    """The chunks of the loss head, and of the attention, of a Program; 1: it is whole.

    ``host`` says how many parts of what is kept for the backward pass lie in host memory.
    """

    head: int = 1
    attention: int = 1
    host: int = 0

    def __le__(self, other: Chunking) -> bool:
        """Whether neither of the two is in more chunks than in the other, nor more in host memory."""
        return self.head <= other.head and self.attention <= other.attention and self.host <= other.host

    def leads(self, other: Chunking, further: Chunking) -> bool:
        """Whether another is on the way from this to one of more chunks, or on one beside it.

        Beside are those where the other of the two is in fewer chunks: there it hides more.
        """
        if self in (other, further) or not self <= further:
            return False
        on_way = self <= other <= further
        is_alike = self.host == other.host == further.host
        head = is_alike and self.attention == further.attention >= other.attention
        attention = is_alike and self.head == further.head >= other.head
        return (
            on_way
            or (head and self.head < other.head <= further.head)
            or (attention and self.attention < other.attention <= further.attention)
        )

    @property
    def kind(self) -> tuple[bool, bool, bool]:
        """Which of the two are in chunks, and whether something is kept in host memory."""
        return self.head > 1, self.attention > 1, self.host > 0

    @property
    def near(self) -> Iterator[Chunking]:
        """The same with more or fewer chunks of one of the two, if it is in chunks."""
        for count in _ALL_COUNTS[1:]:
            if self.head > 1:
                yield replace(self, head=count)
            if self.attention > 1:
                yield replace(self, attention=count)


class Base:
    """A Program with its head and its attention chunked so, and what can be computed again of it.

    A rung is a choice of what it keeps for the backward pass: 0 what ``compile`` keeps, then less and less.
    """

    def __init__(self, program: Program, chunking: Chunking, device: Accelerator) -> None:
        self.program, self.chunking, self.device = program, chunking, device
        self.rolled = _as_rolled(program)
        self._rungs = Rungs(self.rolled, ()) if _may_recompute(program) else None
        self._tuned = Tuning()(program, ()).program

    def at(self, rung: int) -> Program:
        """The Program at a rung."""
        return self.program if rung == 0 or self._rungs is None else self._rungs.program(rung)

    def estimate(self, rung: int) -> int:
        """The bytes of temporary memory as far as the ops tell."""
        return self._whole if rung == 0 or self._rungs is None else self._rungs.estimate(rung)

    @cached_property
    def _whole(self) -> int:
        return estimated(self._tuned).bytes

    @property
    def last(self) -> int:
        """The rung that keeps the least."""
        return len(self._rungs.plans) - 1 if self._rungs is not None else 0

    @cached_property
    def leanest(self) -> int:
        """The rung of the least memory, of some, as far as the ops tell; 0 where there is no other.

        What is computed again may take more than what was kept, such as a transposed copy for a convolution.
        """
        some = sorted({max(1, self.last * part // _PARTS) for part in range(_PARTS + 1)}, reverse=True)
        return min(some, key=self.estimate) if self.last else 0

    def seconds(self, rung: int = 0) -> float:
        """The seconds of a step at a rung."""
        if rung == 0 or self._rungs is None:
            return self._seconds
        again = 2 * self._rungs.plans[rung].effort / self.device.flops_of(4)
        return max(self._seconds_keeping_all + again, self._seconds)

    @cached_property
    def _seconds(self) -> float:
        return seconds_of(self._tuned, self.device)

    @cached_property
    def _seconds_keeping_all(self) -> float:
        return seconds_of(self.rolled, self.device)


def _may_recompute(program: Program) -> bool:
    return is_replayable(program) and not is_recomputed(program)


def _as_rolled(program: Program) -> Program:
    """The Program that ``recompute`` starts from."""
    return roll_where_worth(program)[0] if _may_recompute(program) else program


class HostBase(Base):
    """A base of which some of what is kept for the backward pass lies in host memory until then."""

    def __init__(self, whole: Base, chunking: Chunking) -> None:
        self.whole, self.program, self.chunking, self.device = whole, whole.program, chunking, whole.device
        self._stored: dict[int, Program] = {}
        self._estimates: dict[int, int] = {}

    def at(self, rung: int) -> Program:
        """The Program at a rung; one that repeats layers moves what these keep turn by turn."""
        if rung not in self._stored:
            program = self.whole.at(rung) if rung else self.whole.rolled
            names = [v.name for v in _part(program, self.chunking.host)]
            self._stored[rung] = offload(program, names) if names else program
        return self._stored[rung]

    def estimate(self, rung: int) -> int:
        """The bytes of temporary memory as far as the ops tell."""
        if rung not in self._estimates:
            self._estimates[rung] = estimated(self.at(rung)).bytes
        return self._estimates[rung]

    @property
    def last(self) -> int:
        """The rung that keeps the least."""
        return self.whole.last

    def seconds(self, rung: int = 0) -> float:
        """The seconds of a step at a rung, none of the way to the host and back behind the arithmetic."""
        return (
            self.whole.seconds(rung) + 2 * sum(map(nbytes, stored_values(self.at(rung)))) / self.device.host
        )


def _part(program: Program, parts: int) -> tuple[Variable, ...]:
    """The largest of what a Program keeps for its backward pass, so many parts of it by bytes."""
    found = sorted(movable(program), key=nbytes, reverse=True)
    room, chosen = sum(map(nbytes, found)) * parts // HOST_PARTS, list[Variable]()
    for v in found:
        if nbytes(v) <= room:
            chosen.append(v)
            room -= nbytes(v)
    return tuple(chosen)


def movable(program: Program) -> tuple[Variable, ...]:
    """The values that loops keep for loops of the backward pass and could have in host memory.

    Of others a compiler may bring back too many too early, and take more memory than without.
    """
    saved = Saved(program)
    return () if stored_values(program) else tuple(filter(saved.is_moved_by_turns, saved.candidates))


def seconds_of(program: Program, device: Accelerator) -> float:
    """The seconds of a step at the published peak of a device, without what host memory takes."""
    return Foretelling(program, device).account(1).step.all


class Chunkings:
    """The ways to cut the head and the attention of a Program into chunks that would matter to its peak."""

    def __init__(self, program: Program, peak: int) -> None:
        self.program, self.peak = program, peak
        self.scores = self._large(scores_kept(program))
        self.has_kept = _LEAST * sum(map(nbytes, movable(_as_rolled(program)))) > peak
        self.has_head = any(_LEAST * head.before > peak for head in chunks_of(self._headed(_COUNTS[1])))

    def __iter__(self) -> Iterator[Chunking]:
        """Each of the two whole, in many and in a few chunks; first both whole, last both in chunks.

        Where one in many chunks takes too much, it does so in fewer.
        """
        heads = _COUNTS if self.has_head else (1,)
        some = _COUNTS if self.scores else (1,)
        hosts = range(HOST_PARTS + 1 if self.has_kept else 1)
        ways = [Chunking(*way) for way in product(heads, some, hosts)]
        yield from sorted(ways, key=lambda c: (sum(c.kind), -c.head, -c.attention, -c.host))

    @property
    def finest(self) -> Chunking:
        """Both in as many chunks as are tried, as far as they matter."""
        head, attention = (_COUNTS[-1] if there else 1 for there in (self.has_head, self.scores))
        return Chunking(head, attention, HOST_PARTS if self.has_kept else 0)

    def made(self, chunking: Chunking) -> Program:
        """The Program with these chunks."""
        program = self._headed(chunking.head)
        if chunking.attention == 1:
            return program
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return chunk(program, chunking.attention, where=[v.name for v in self.scores])

    def _headed(self, count: int) -> Program:
        """The Program with its head in chunks; as it is where it has none, or none that can be cut."""
        if count == 1 or chunks_of(self.program):
            return self.program
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                return chunk(self.program, count)
        except GraphError:
            return self.program

    def _large(self, scores: Iterable[tuple[Variable, int]]) -> tuple[Variable, ...]:
        there = tuple(scores)
        is_large = _LEAST * sum(nbytes(v) * kept for v, kept in there) > self.peak
        return tuple(v for v, _ in there) if is_large and not chunks_of(self.program) else ()


def expect_one_device(program: Program, what: str) -> None:
    """Raise an error for what is no Program of one device and one batch, in the words of who asks."""
    expect_program(program, what)
    expect_no_axis(program, what)
    if any(op.type is ACCUMULATE for op in program.ops):
        word = "accumulate"
    elif program.replicas is not None:
        word = "replicate"
    elif program.partition is not None:
        word = "partition"
    else:
        return
    raise GraphError(
        f"{what}: {program.name!r} went through {word} already, and its bytes are those of a part. Give "
        f"{what} the Program before that, and {word} what it returns."
    )
