"""Which equations need no kernel of their own, and in which order the others run.

A view is another name of an array. Arithmetic number by number is done within the kernels that read it. If
it is cheap and reads one array, each reader that can does it, and that array is kept in its place. On several
arrays it is done within all readers or none; what is dear is done once.

Source: the instruction fusion and the breadth-first scheduler of XLA, as its compiled steps show them.

>>> import jax.numpy as jnp, onward as ow
>>> from onward.core.kernels.rules import AS_WRITTEN
>>> from onward.core.steps import steps
>>> program = ow.trace(lambda w: (jnp.exp(w @ w + 1) @ w).T, jnp.ones((2, 2)))
>>> found = FusedSteps(program, steps(program), set(program.outputs), AS_WRITTEN)
>>> [step.kind for i, step in enumerate(found.steps) if i in found.kernels]
['dot_general', 'exp', 'dot_general', 'transpose']
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, reduce
from operator import or_
from typing import TypeAlias

from onward.core.kernels.expanded import is_along_rows
from onward.core.kernels.rules import KernelRules
from onward.core.memories import moves_memory
from onward.core.primitives.table import of
from onward.core.primitives.traits import Linear, Moves, OnCpu
from onward.core.program import Program, Variable
from onward.core.steps import Equation

_HANDED_OUT = _GIVEN = -1
_ELSEWHERE = (Moves.REPEATS, Moves.CUTS, Moves.CUTS_AT, Moves.LOOKS_UP, Moves.PADS, Moves.JOINS)
_MANY = 20_000  # steps, of which a bit is kept for each pair
Wire: TypeAlias = tuple[Variable, int]


class FusedSteps:
    """Steps, each of which is a kernel, a view, done within kernels, or left out since nothing reads it.

    Attributes:
        steps: all of them, in an order in which they may run.
        kernels: the numbers of those that are kernels.
        within: for the number of each that is done within kernels only, the numbers of these.
        again: for the number of a kernel the readers that compute its result once more.
        used: for each Variable that is read or handed out the kernels that read it.
    """

    def __init__(
        self, program: Program, steps: Sequence[Equation], results: set[Variable], rules: KernelRules
    ) -> None:
        self.program, self.steps, self.rules = program, steps, rules
        self.kernels: set[int] = set()
        self.within: dict[int, set[int]] = {}
        self.again: dict[int, set[int]] = {}
        self._done_in: dict[int, set[int]] = {}
        self.used: dict[Variable, set[int]] = {v: {_HANDED_OUT} for v in results}
        self._readers: dict[Variable, list[int]] = {}
        self._number = {v: i for i, step in enumerate(steps) for v in step.outputs}
        for i in reversed(range(len(steps))):
            self._sort(i, steps[i])

    def _sort(self, i: int, step: Equation) -> None:
        if step.outputs and not any(v in self.used for v in step.outputs):
            return
        if self.is_view(step):
            for v, out in zip(step.inputs, step.outputs, strict=False):
                self._read(v, self.used.get(out, set()), self._readers.get(out, []))
            return
        self._done_in[i] = self._computed_in(i, step)
        for v in step.inputs:
            self._read(v, self._done_in[i], [i])

    def _read(self, v: Variable, kernels: set[int], readers: list[int]) -> None:
        if kernels:
            self.used.setdefault(v, set()).update(kernels)
            self._readers.setdefault(v, []).extend(readers)

    def _computed_in(self, i: int, step: Equation) -> set[int]:
        """The kernels in which a step is computed: its own, or those that read its result, or both."""
        takers = self._takers(step)
        kernels = {k for r in takers for k in self._done_in[r]}
        may_again, is_all = of(step.kind).on_cpu is OnCpu.AGAIN, self._is_all(takers, step)
        reads_one = may_again and self._reads_one(step)
        if is_all and (len(kernels) == 1 or reads_one or (may_again and self._is_read_once(i, step))):
            self.within[i] = kernels
            return kernels
        self.kernels.add(i)
        if reads_one and takers:
            self.again[i] = set(takers)
            return {i} | kernels
        return {i}

    def _takers(self, step: Equation) -> list[int]:
        """The readers of its result that can compute it themselves."""
        if not of(step.kind).is_fusible or len(step.outputs) != 1:
            return []
        return [r for r in self._readers.get(step.outputs[0], ()) if self._takes(r, step)]

    def _is_all(self, takers: list[int], step: Equation) -> bool:
        is_kept = any(_HANDED_OUT in self.used.get(v, ()) for v in step.outputs)
        return bool(takers) and not is_kept and len(takers) == len(self._readers[step.outputs[0]])

    def is_view(self, step: Equation) -> bool:
        """Whether its result is another view of the same array; not one in another memory."""
        return of(step.kind).is_view and not moves_memory(step.body)

    def _takes(self, i: int, step: Equation) -> bool:
        """Whether a reader may compute a step itself."""
        reader = of(self.steps[i].kind)
        if reader.reduces is not None:
            return not self.rules.reduces_apart or self._is_reducible(step)
        is_inside = self.rules.reduces_apart and i in self.within
        reduces = is_inside and any(of(self.steps[k].kind).reduces is not None for k in self.within[i])
        return reader.is_fusible and not reduces

    def _is_reducible(self, step: Equation) -> bool:
        """Whether a library can reduce its result: of a product, or of what is linear in one array.

        A product with what was a bool is none, but a choice.
        """
        kind = of(step.kind)
        makers = (self.steps[self._number[v]] for v in step.inputs if v in self._number)
        was_bool = any(of(m.kind).moves is Moves.ROUNDS and m.inputs[0].dtype == bool for m in makers)
        return (kind.multiplies and not was_bool) or (kind.is_elementwise and kind.linear is Linear.FIRST)

    def _reads_one(self, step: Equation) -> bool:
        """Whether at most one array as large as its result has to be read for it."""
        large = (v for v in dict.fromkeys(step.inputs) if 2 * v.size > step.outputs[0].size)
        return sum(not self._is_repeated(v) for v in large) <= 1

    def _is_read_once(self, i: int, step: Equation) -> bool:
        """Whether each reader needs its result for no other of its operands that stands in memory."""
        readers = self._readers[step.outputs[0]]
        return len(self.steps) < _MANY and not any(
            self._before[self._number[v]] >> i & 1 for r in readers for v in self._others(r, step)
        )

    def _others(self, reader: int, step: Equation) -> Iterator[Variable]:
        return (v for v in self.steps[reader].inputs if v in self._number and v not in step.outputs)

    @cached_property
    def _before(self) -> list[int]:
        """For each step those it needs, if only through something that no kernel does on the way, as bits."""
        need: list[int] = []
        before: list[int] = []
        for i, step in enumerate(self.steps):
            makers = {self._number[v] for v in step.inputs if v in self._number}
            need.append(reduce(or_, (need[m] for m in makers), 1 << i))
            is_passed = of(step.kind).is_fusible or self.is_view(step)
            before.append(reduce(or_, (before[m] for m in makers), 0 if is_passed else need[i]))
        return before

    def _is_repeated(self, v: Variable) -> bool:
        i = self._number.get(v)
        return i is not None and of(self.steps[i].kind).moves in (Moves.REPEATS, Moves.MAKES)

    @cached_property
    def _origin(self) -> dict[Variable, Variable]:
        """The Variable that each view is a view of."""
        origin: dict[Variable, Variable] = {}
        for step in filter(self.is_view, self.steps):
            for v, out in zip(step.inputs, step.outputs, strict=False):
                origin[out] = origin.get(v, v)
        return origin

    def computes(self, i: int, v: Variable) -> bool:
        """Whether a step that reads a Variable computes it itself though it has a kernel of its own."""
        return i in self.again.get(self._number.get(self._origin.get(v, v), _HANDED_OUT), ())

    @cached_property
    def sources(self) -> dict[int, tuple[Variable, ...]]:
        """For the number of each step what it reads that is in memory."""
        return {i: tuple(dict.fromkeys(v for v, _ in read)) for i, read in self._wires.items()}

    @cached_property
    def needs(self) -> dict[int, tuple[int, ...]]:
        """For the number of each step the kernels and barriers that have to be done before it."""
        return {i: tuple(dict.fromkeys(k for _, k in read if k >= 0)) for i, read in self._wires.items()}

    @cached_property
    def _wires(self) -> dict[int, tuple[Wire, ...]]:
        """For each step what it reads in memory, each with the number of what has to be done before."""
        made: dict[Variable, tuple[Wire, ...]] = {}
        within: dict[Variable, tuple[Wire, ...]] = {}
        wires = {}
        for i, step in enumerate(self.steps):
            read = [(within if self.computes(i, v) else made).get(v, ((v, _GIVEN),)) for v in step.inputs]
            wires[i] = tuple(dict.fromkeys(wire for group in read for wire in group))
            if i in self.kernels:
                made |= {v: ((v, i),) for v in step.outputs}
            elif self.is_view(step):
                for source, v in zip(step.inputs, step.outputs, strict=False):
                    for known in (made, within):
                        found = known.get(source, ((source, _GIVEN),))
                        known[v] = tuple((u, i) for u, _ in found) if self._holds(step) else found
                continue
            else:
                made |= dict.fromkeys(step.outputs, wires[i])
            within |= dict.fromkeys(step.outputs, wires[i])
        return wires

    @cached_property
    def displaced(self) -> dict[int, frozenset[Variable]]:
        """For the number of each kernel what it reads in memory at other places than those it writes."""
        found: dict[int, frozenset[Variable]] = {}
        moved: dict[Variable, frozenset[Variable]] = {}
        for i, step in enumerate(self.steps):
            before = frozenset(u for v in step.inputs for u in moved.get(v, ()))
            here = frozenset(self.sources[i]) if self._displaces(step) else before
            if i in self.kernels:
                found[i] = here
            if i not in self.kernels or i in self.again:
                moved |= dict.fromkeys(step.outputs, here)
        return found

    def _displaces(self, step: Equation) -> bool:
        """Whether it puts numbers elsewhere than where they stood; one that cuts nothing off does not."""
        if not step.outputs:  # such as a callback
            return False
        moves = of(step.kind).moves
        is_whole = all(v.size == step.outputs[0].size for v in step.inputs)
        return moves is Moves.PERMUTES or (moves in _ELSEWHERE and not is_whole)

    def _holds(self, step: Equation) -> bool:
        return self.rules.keeps_barriers and of(step.kind).moves is Moves.HOLDS

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The numbers of the steps in the order in which they run."""
        if not self.rules.in_waves:
            return tuple(range(len(self.steps)))
        place = {k: n for n, k in enumerate(self._waves())}

        def key(i: int) -> tuple[int, int]:
            return (place[i], -1) if i in place else (max((place[k] for k in self.needs[i]), default=-1), i)

        return tuple(sorted(range(len(self.steps)), key=key))

    def _is_put_last(self, i: int) -> bool:
        """Whether XLA wrote it in place of another step, and so behind all that read the same."""
        return self.rules.expands and is_along_rows(self.steps[i])

    def _waves(self) -> Iterator[int]:
        """The kernels and barriers, each as soon as the last of what it needs is there."""
        nodes = [i for i, step in enumerate(self.steps) if i in self.kernels or self._holds(step)]
        users: dict[int, list[int]] = {i: [] for i in nodes}
        missing = {i: len(self.needs[i]) for i in nodes}
        for i in nodes:
            for k in self.needs[i]:
                users[k].append(i)
        # XLA notes a kernel of several steps as a reader when it makes it, and makes the last ones first.
        fused = {k for kernels in self.within.values() for k in kernels}
        if self.rules.expands:  # a transpose is two steps, of which one writes the new layout down
            fused |= {i for i in nodes if of(self.steps[i].kind).moves is Moves.PERMUTES}
        for group in users.values():
            group.sort(key=lambda i: (self._is_put_last(i), i in fused, -i if i in fused else i))
        ready = [i for i in nodes if not missing[i]]
        for i in ready:
            yield i
            for user in users[i]:
                missing[user] -= 1
                if not missing[user]:
                    ready.append(user)
