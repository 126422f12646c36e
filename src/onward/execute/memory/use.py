"""The bytes that a step takes from its first op to its last, by the rules of ``core.liveness``.

``onward.memory`` shows them; at an out-of-memory error the step tells them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate

from onward.core.homes import scoped_names
from onward.core.kernels.rules import AS_WRITTEN, KernelRules, rules_at_hand
from onward.core.liveness import Array, lifetimes
from onward.core.program import Op, Program, Variable
from onward.core.words import Kind, Pass
from onward.develop.offload import offloaded
from onward.develop.recompute.measure import results
from onward.develop.stored import stored_values
from onward.develop.tuned import tuned
from onward.execute.memory.held import Held, MemoryShare, PeakMoment


class MemoryUse:
    """The bytes that a Program takes, op by op of what ``compile`` makes of it.

    Args:
        program: as people gave it.
        tune: whether ``compile`` may do what is not asked for, as it does by default; False: the ops of the
            Program as they stand.
        roll: whether repeated layers become a loop, as in ``compile``.

    Attributes:
        program: as people gave it.
        compiled: as it is compiled, whose ops are those of the curve.
    """

    def __init__(self, program: Program, tune: bool = True, roll: bool | None = None) -> None:
        self.program, self._options = program, (tune, roll)
        self.compiled = tuned(program, tune=tune, roll=roll).program
        self._lives = lifetimes(self.compiled, results(self.compiled), _rules(self.compiled))
        self._gradients = {g for _, g in self.compiled.gradients}

    @cached_property
    def curve(self) -> tuple[PeakMoment, ...]:
        """One moment for each op, in order."""
        most: dict[int, int] = {}
        for i, step in enumerate(self._lives.steps):
            if step.op not in most or self._lives.bytes[i] > self._lives.bytes[most[step.op]]:
                most[step.op] = i
        moments, at = [], 0
        for number, op in enumerate(self.compiled.ops):
            at = most.get(number, at)
            shares = {share: taken[at] for share, taken in self._taken.items()}
            moments.append(PeakMoment(op, sum(shares.values()), shares))
        return tuple(moments)

    @cached_property
    def _taken(self) -> Mapping[MemoryShare, Sequence[int]]:
        """For each share its bytes at each step."""
        count = max(len(self._lives.steps), 1)
        change = {share: [0] * (count + 2) for share in MemoryShare}
        for array in self._lives.on_device:
            row = change[self._share(array)]
            row[max(array.begin, 0)] += array.bytes
            row[min(array.end, count) + 1] -= array.bytes
        taken = {share: list(accumulate(row))[:count] for share, row in change.items()}
        more = zip(taken[MemoryShare.TEMPORARIES], self._lives.within or (0,), strict=True)
        return {**taken, MemoryShare.TEMPORARIES: [own + within for own, within in more]}

    def _share(self, array: Array) -> MemoryShare:
        first = array.variables[0]
        if array.begin < 0:
            given = {
                Kind.PARAMETER: MemoryShare.PARAMETERS,
                Kind.FROZEN: MemoryShare.PARAMETERS,
                Kind.DATA: MemoryShare.FEEDS,
                Kind.CONSTANT: MemoryShare.CONSTANTS,
            }
            return given.get(first.kind, MemoryShare.STATE)
        if not self._gradients.isdisjoint(array.variables):
            return MemoryShare.GRADIENTS
        if array.end >= len(self._lives.steps):
            return MemoryShare.RESULTS
        made, read = (self._op(step).made_by for step in (array.begin, array.read_last))
        if made is Pass.FORWARD:
            return MemoryShare.TEMPORARIES if read is Pass.FORWARD else MemoryShare.SAVED
        return (
            MemoryShare.GRADIENTS if made is not read and made is not Pass.UPDATE else MemoryShare.TEMPORARIES
        )

    def _op(self, step: int) -> Op:
        return self.compiled.ops[self._lives.steps[step].op]

    @property
    def on_host(self) -> int:
        """The bytes in host memory, of state and of activations, which are part of no share."""
        return self._lives.on_host

    @property
    def peak(self) -> int:
        """The most bytes that are taken at once, on the device."""
        return max(self._lives.bytes, default=0) or sum(self.shares.values())

    @property
    def peak_op(self) -> Op | None:
        """The op at the peak; None if the Program has no ops."""
        return self.curve[self.peak_number].op if self.curve else None

    @cached_property
    def peak_number(self) -> int:
        """The number of the op at the peak, counted from 0."""
        return max(range(len(self.curve)), key=lambda i: self.curve[i].bytes, default=0)

    @property
    def shares(self) -> Mapping[MemoryShare, int]:
        """The bytes at the peak by what they are taken for."""
        return {share: taken[self._lives.peak] for share, taken in self._taken.items()}

    @cached_property
    def held(self) -> tuple[Held, ...]:
        """The arrays in memory at the peak, the largest first; without those inside of a loop."""
        known = set(self.compiled.variables.values())
        return tuple(self._held(array, known) for array in self._lives.alive(self._lives.peak))

    @cached_property
    def names(self) -> Mapping[Variable, str]:
        """The names of what was computed in scopes that nobody named."""
        return scoped_names(self.compiled)

    def _held(self, array: Array, known: set[Variable]) -> Held:
        shown = next((v for v in array.variables if v in known), array.variables[0])
        maker = self._op(array.begin) if array.begin >= 0 else None
        reader = self._op(array.read_last) if array.end < len(self._lives.steps) else None
        return Held(shown, array.bytes, self._share(array), maker, reader)


def _rules(program: Program) -> KernelRules:
    """Those of the compiler at hand; as written where something lies in a memory that only others have."""
    return AS_WRITTEN if offloaded(program) or stored_values(program) else rules_at_hand()
