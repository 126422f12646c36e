"""The arrays in memory while a step runs: one walk over its ops counts those a compiler would keep.

``walk.liveness`` tells which Variables are alive behind each op; this tells which arrays exist for that, and
how long. A compiler writes far fewer arrays than a Program has Variables, by rules that hold on any device:

* a reshape, a name or a barrier is another view of the same array;
* arithmetic number by number that is read by one op of its kind, or by a reduction, is done within that and
  never written down; where it is cheap and reads one array, it is done within each such reader;
* such arithmetic, a loop and a scatter write over an operand that nobody reads later, if it is as large, and
  if arithmetic reads of it the number in whose place it writes;
* the next value of state is written over the old one, once that was read for the last time;
* random bits of Threefry are two words for each number, of which readers make one, and two more while they
  are drawn;
* what nobody reads is not computed.

``core.kernels`` says which op needs an array of its own, and in which order they run.

An op whose body is several equations is looked into; a loop takes what its own turn takes at most.

>>> import jax.numpy as jnp, onward as ow
>>> program = ow.trace(lambda w, x: jnp.sum(jnp.exp(x @ w) * 2), jnp.ones((8, 8)), jnp.ones((4, 8)))
>>> lives = lifetimes(program)
>>> [(v.name, array.bytes) for array in lives.arrays for v in array.variables]
[('x', 128), ('w', 256), ('dot_general', 128), ('reduce_sum', 4)]
>>> lives.bytes[lives.peak]
516
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import jax

from onward.core.cost import size
from onward.core.kernels.expanded import expanded
from onward.core.kernels.fused import FusedSteps
from onward.core.kernels.rules import AS_WRITTEN, KernelRules
from onward.core.memories import moves_memory, on_host
from onward.core.primitives.table import of
from onward.core.primitives.traits import Work
from onward.core.program import Program, Variable
from onward.core.steps import Equation, steps

_THREEFRY = 2  # words in a key


@dataclass(eq=False)
class Array:
    """A piece of memory: the Variables in it, its bytes, and its first and last step, both included.

    An array that is there before the first step begins at -1; one that stays ends behind the last step. One
    in host memory takes nothing of the device.
    """

    variables: list[Variable]
    bytes: int
    begin: int
    end: int
    is_on_host: bool = False
    is_written_over: bool = False

    @property
    def read_last(self) -> int:
        """The step that reads it last, which may write its result there."""
        return self.end + self.is_written_over


@dataclass(frozen=True, eq=False)
class Lifetimes:
    """The arrays of a Program that runs.

    Attributes:
        program: what runs.
        steps: its ops, those of several equations taken apart.
        arrays: what lies in memory, in the order in which it comes there.
        within: for each step what it takes and gives back while it runs: a loop for its turns.
        within_on_host: the most bytes that one takes and gives back in host memory.
    """

    program: Program
    steps: tuple[Equation, ...]
    arrays: tuple[Array, ...]
    within: tuple[int, ...]
    within_on_host: int = 0

    @property
    def on_device(self) -> Iterator[Array]:
        """The arrays in the memory of the device."""
        return (array for array in self.arrays if not array.is_on_host)

    @property
    def on_host(self) -> int:
        """The bytes in host memory."""
        return self.within_on_host + sum(array.bytes for array in self.arrays if array.is_on_host)

    @cached_property
    def bytes(self) -> tuple[int, ...]:
        """The bytes taken at each step."""
        change = [0] * (len(self.steps) + 2)
        for array in self.on_device:
            change[max(array.begin, 0)] += array.bytes
            change[min(array.end, len(self.steps)) + 1] -= array.bytes
        return tuple(taken + more for taken, more in zip(accumulate(change), self.within, strict=False))

    @property
    def peak(self) -> int:
        """The step of most bytes, the first of several."""
        return max(range(len(self.bytes)), key=self.bytes.__getitem__, default=0)

    def alive(self, step: int) -> tuple[Array, ...]:
        """The arrays in memory at a step, the largest first."""
        there = (array for array in self.on_device if array.begin <= step <= array.end and array.bytes)
        return tuple(sorted(there, key=lambda array: -array.bytes))


def lifetimes(
    program: Program, results: Iterable[Variable] = (), rules: KernelRules = AS_WRITTEN
) -> Lifetimes:
    """Compute which arrays are in memory while a Program runs.

    Args:
        program: a Program; of a replicated one the arrays on one device are counted.
        results: what is handed out beside the outputs and the next state.
        rules: how kernels are made of its equations, and in which order these run; as written by default.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3))
        >>> lives = lifetimes(program)
        >>> [program.ops[step.op].type for step in lives.steps][lives.peak], lives.bytes[lives.peak]
        ('reduce_sum', 36)
    """
    return _LivenessWalk(program, results, rules, {}).lifetimes()


class _LivenessWalk:
    """``read[v]`` are the arrays that are read to read v: its own, or those it is made of on the way."""

    def __init__(
        self,
        program: Program,
        results: Iterable[Variable],
        rules: KernelRules,
        turns: dict[Program, tuple[int, int]],
    ) -> None:
        self.program, self.rules, self.turns = program, rules, turns
        self.results = {*program.outputs, *program.next_state.values(), *results}
        written = steps(program)
        self.fused = FusedSteps(
            program, tuple(expanded(written)) if rules.expands else written, self.results, rules
        )
        self.order = self.fused.order
        self.steps = tuple(self.fused.steps[i] for i in self.order)
        self.read: dict[Variable, tuple[Array, ...]] = {}
        self.arrays: list[Array] = []

    def lifetimes(self) -> Lifetimes:
        """The arrays: first what is made and how long it is read, then what is written over what."""
        there = {v for step in self.steps if _fetches(step) for v in step.inputs}
        for v in (*self.program.inputs, *self.program.state, *self.program.constants):
            self._new(v, -1, len(self.steps), v in there)
        last: dict[Array, int] = {}
        for i, step in enumerate(self.steps):
            self._run(i, step, last)
        for v in self.results:
            for array in self.read.get(v, ()):
                array.end = len(self.steps)
        self._over_state(last)
        self._over_operands()
        turns = [[*map(self._turn, step.programs)] for step in self.steps]
        within = (
            max((n for n, _ in of), default=_drawing(s)) for s, of in zip(self.steps, turns, strict=True)
        )
        hosted = max((n for of in turns for _, n in of), default=0)
        return Lifetimes(self.program, self.steps, tuple(self.arrays), tuple(within), hosted)

    def _new(self, v: Variable, begin: int, end: int, is_on_host: bool = False) -> None:
        bytes_ = size(v) if begin < 0 else _drawing(self.steps[begin]) or size(v)
        array = Array([v], bytes_, begin, end, is_on_host)
        self.arrays.append(array)
        self.read[v] = (array,)

    def _run(self, i: int, step: Equation, last: dict[Array, int]) -> None:
        """Record the arrays that a step makes, and that those it reads are needed until then."""
        outputs = [v for v in step.outputs if v in self.fused.used]
        if step.outputs and not outputs:
            return
        if self.fused.is_view(step):
            for source, v in zip(step.inputs, step.outputs, strict=False):
                self._view(source, v)
            outputs = [v for v in outputs if v not in self.read]
        elif self.order[i] in self.fused.within:
            return
        there = on_host(step.body) if outputs else ()
        for at, v in enumerate(step.outputs):
            if v in outputs:
                self._new(v, i, i, at in there)
        for array in (array for v in self.fused.sources[self.order[i]] for array in self._arrays(v)):
            last[array] = i
            array.end = max(array.end, i)

    def _view(self, source: Variable, v: Variable) -> None:
        if v.size == source.size or size(v) == size(source):
            self.read[v] = self._arrays(source)
            if len(self.read[v]) == 1:
                self.read[v][0].variables.append(v)

    def _arrays(self, v: Variable) -> tuple[Array, ...]:
        return self.read.get(v, ())

    def _over_state(self, last: dict[Array, int]) -> None:
        """Write the next value of state over the old one, if that is not read any more."""
        taken = set()
        for old, new in self.program.next_state.items():
            (array,) = self.read[old]
            made = self._arrays(new)
            is_here = len(made) == 1 and made[0].is_on_host == array.is_on_host
            if is_here and made[0] not in taken and made[0].begin >= max(last.get(array, 0), 0):
                taken.add(made[0])
                array.variables += made[0].variables
                made[0].bytes = 0
        self.arrays = [array for array in self.arrays if array not in taken]

    def _over_operands(self) -> None:
        """End an array one step earlier where a result as large begins that may be written over it."""
        ending: dict[tuple[int, int], list[Array]] = {}
        here = [array for array in self.arrays if not array.is_on_host]
        for array in here:
            if 0 <= array.begin < array.end < len(self.steps):
                ending.setdefault((array.end, array.bytes), []).append(array)
        for array in here:
            source = self._overwritten(array, ending.get((array.begin, array.bytes), []))
            if source is not None:
                source.end -= 1
                source.is_written_over = True

    def _overwritten(self, array: Array, ending: list[Array]) -> Array | None:
        """Of the arrays as large as one that end where it begins that which it is written over.

        What is read at other places than those that are written is still needed.
        """
        if not ending or not of(self.steps[array.begin].kind).may_overwrite:
            return None
        elsewhere = self.fused.displaced.get(self.order[array.begin], frozenset())
        source = next((a for a in reversed(ending) if elsewhere.isdisjoint(a.variables)), None)
        if source is not None:
            ending.remove(source)
        return source

    def _turn(self, program: Program) -> tuple[int, int]:
        """The bytes that a turn of a loop takes at most, besides its inputs and constants; and on the host.

        What it hands out lies in host memory as part of what the loop gives.
        """
        if program not in self.turns:
            inside = _LivenessWalk(program, (), self.rules, self.turns).lifetimes()
            given = sum(array.bytes for array in inside.on_device if array.begin < 0)
            own = (a for a in inside.arrays if a.is_on_host and a.begin >= 0 and a.end < len(inside.steps))
            there = inside.within_on_host + sum(array.bytes for array in own)
            self.turns[program] = max((taken - given for taken in inside.bytes), default=0), there
        return self.turns[program]


def _fetches(step: Equation) -> bool:
    """Whether it brings what it reads from host memory to the device."""
    return moves_memory(step.body) and not on_host(step.body)


def _drawing(step: Equation) -> int:
    """The bytes of random bits of Threefry; 0 for anything else.

    They are two words of 32 bits for each number, of which readers make one. The loop that makes them holds
    as many again.
    """
    kind = of(step.kind)
    if not kind.draws or kind.work is not Work.RANDOM or not any(v.is_key for v in step.inputs[:1]):
        return 0
    words = jax.eval_shape(jax.random.key_data, step.inputs[0].aval).shape[-1]
    return sum(8 * v.size for v in step.outputs) if words == _THREEFRY else 0
