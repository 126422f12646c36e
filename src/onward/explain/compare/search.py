"""The first op that makes other results of the same numbers.

The ops of one Program are run on what those of the other read. So what their inputs differ by plays no part,
however far two trainings drifted, and each op answers for itself alone: what it gives may differ from what
its twin gave by its own rounding and no more. Ops that compute the same by their code, of twins, and results
that agree but for the last bit need no run.

Between twins there may be ops that the other Program has not, or has in another form: they are run in a row,
as a region. A value that nobody sees may well be another one, if a transform meant so and what must agree
does: results, the loss, gradients, the next state. So what differs is a suspect first; it is blamed only if
one of these differs too, when it is computed from what lies before all suspects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onward.core.described import DescribedBody
from onward.core.primitives.table import of
from onward.core.program import Op, Program, Variable
from onward.execute.pieces import Compiled
from onward.explain.compare.beside import SideBySide
from onward.explain.compare.disagreement import Disagreement, excess
from onward.explain.compare.rounding import BoundedValue, bounded, epsilon_of
from onward.explain.compare.twins import (
    MustAgree,
    far,
    is_key,
    laid_out,
    largest,
    widened,
)
from onward.explain.compare.values import count_of
from onward.explain.diff.match import Matching

_ROUNDS = 3
_PLAIN = 1e-3  # of the largest number: what rounding hardly makes of a loss or a gradient
_EPSILONS = 64


@dataclass(frozen=True, eq=False)
class Parting:
    """The outcome of a search.

    Attributes:
        first: where the Programs part; None if they do not.
        reaches: what must agree and does not.
        forgiven: values that differ without any effect on what must agree.
        largest: the largest difference of what must agree, as a part of its largest number; and of what.
        compared: how many ops of the one and of the other have a twin.
        region: the ops from which the first disagreement may come, of the one and of the other.
    """

    first: Disagreement | None
    reaches: tuple[MustAgree, ...]
    forgiven: tuple[Disagreement, ...]
    largest: tuple[float, str]
    compared: tuple[int, int]
    matching: Matching
    region: tuple[tuple[Op, ...], tuple[Op, ...]] = ((), ())


@dataclass
class PartingSearch:
    """One comparison of two Programs on the values of one step of both.

    Attributes:
        both: the values of one step, side by side.
        begins: whether the state is that before training, and has to be the same.
    """

    both: SideBySide
    begins: bool = False
    noisy: Compiled = field(default_factory=dict)

    def run(self) -> Parting:
        """Look for the first disagreement."""
        suspects = self._suspects(self.both.doubtful())
        blamed, reached = self._blamed(suspects)
        if not blamed and not reached and self.both.is_adrift():
            everything = [v for v in self.both.makers if v in self.both.beside]
            suspects = self._suspects(everything)
            blamed, reached = self._blamed(suspects)
        stale = self._stale()
        blamed, reached = (
            blamed or stale,
            reached or [x for x in self.both.anchors if x.mine in {d.mine for d in stale}],
        )
        blamed = [*self._given_apart(), *blamed]
        first = blamed[0] if blamed else None
        return Parting(
            first=first,
            reaches=tuple(reached),
            forgiven=() if first else tuple(suspects),
            largest=self.both.largest_difference(),
            compared=self.both.compared(),
            matching=self.both.matching,
            region=((), ()) if first is None else self.both.region(first.mine, first.theirs),
        )

    def _stale(self) -> list[Disagreement]:
        """Next values of state that a leaves as it was and b does not."""
        found = []
        for anchor in (
            x for x in self.both.anchors if x.mine not in self.both.makers and x.what.startswith("next ")
        ):
            value = self.both.of_anchor(anchor)
            if value is not None:
                expected = BoundedValue(self.both.beside.get(anchor.mine, self.both.of_a[anchor.mine]), 0.0)
                found.append(Disagreement(anchor.mine, anchor.theirs, expected, value))
        return [d for d in found if d.excess.any()]

    def _given_apart(self) -> list[Disagreement]:
        """Data and state that is not the same before anything is computed."""
        given = [
            v
            for v in (*self.both.a.inputs, *(self.both.a.state if self.begins else ()))
            if v in self.both.beside
        ]
        epsilons = {
            v: max(self.both.epsilon, epsilon_of(v.dtype), epsilon_of(self.both.beside[v].dtype))
            for v in given
        }
        found = (
            Disagreement(
                v,
                self.both.of_twin[v],
                BoundedValue(
                    self.both.of_a[v],
                    None if is_key(self.both.of_a[v]) else epsilons[v] * np.abs(widened(self.both.of_a[v])),
                ),
                self.both.beside[v],
            )
            for v in given
        )
        return [d for d in found if d.excess.any()]

    def _suspects(self, doubtful: Sequence[Variable]) -> list[Disagreement]:
        """Those whose ops give others, on what the other Program reads."""
        for _ in range(_ROUNDS):
            suspects = self._disagreeing(doubtful, self.both.beside)
            again = {s.mine for s in suspects if self._is_found_elsewhere(s)}
            if not again:
                return suspects
            readers = self.both.reached(again, stops=self.both.beside)
            left = {s.mine for s in suspects} - again
            doubtful = [
                v for v in self.both.makers if v in left or (v in readers - again and v in self.both.beside)
            ]
        return suspects

    def _is_found_elsewhere(self, suspect: Disagreement) -> bool:
        """Whether another value of b is what was expected; then that is the twin."""
        if suspect.mine in {anchor.mine for anchor in self.both.anchors} or suspect.expected.value.size < 2:
            return False
        for theirs in self.both.their_makers:
            if theirs in self.both.of_twin.values() and self.both.of_twin.get(suspect.mine) is not theirs:
                continue
            value = laid_out(self.both.a, self.both.b, suspect.expected.value, self.both.of_b[theirs])
            fits = value is not None and value.dtype == suspect.expected.value.dtype
            if fits and value is not None and not excess(suspect.expected, value).any():
                self.both.lay(suspect.mine, theirs, value)
                return True
        return False

    def _disagreeing(self, wanted: Iterable[Variable], beside: Mapping[Variable, Any]) -> list[Disagreement]:
        """The values that the ops of a give otherwise than b, reading what stands beside, in their order."""
        wanted = set(wanted)
        ops = self.both.needed(wanted, beside)
        asked = [v for op in ops for v in op.outputs if v in wanted]
        if any(isinstance(op.body, DescribedBody) for op in ops):
            return self._far_apart(asked)
        if not ops:
            return []
        read = dict.fromkeys(v for op in ops for v in op.inputs)
        made = {v for op in ops for v in op.outputs}
        given = {
            v: beside[v] if v in beside else self.both.of_a[v] for v in read if v in beside or v not in made
        }
        given = {v: self._as_mine(v, x) for v, x in given.items()}
        expected = bounded(self.both.a, ops, given, asked, self.both.epsilon, self.noisy)
        found = (Disagreement(v, self.both.of_twin[v], expected[v], self.both.beside[v]) for v in asked)
        return [d for d in found if d.excess.any()]

    def _far_apart(self, asked: Iterable[Variable]) -> list[Disagreement]:
        """The values that rounding hardly explains, where neither Program has ops that can be run."""
        most = max(_PLAIN, _EPSILONS * self.both.epsilon)
        bounds = {v: most * largest(self.both.of_a[v]) if epsilon_of(v.dtype) else None for v in asked}
        found = (
            Disagreement(
                v, self.both.of_twin[v], BoundedValue(self.both.of_a[v], bounds[v]), self.both.beside[v]
            )
            for v in asked
        )
        return [d for d in found if d.excess.any()]

    def _as_mine(self, v: Variable, value: Any) -> Any:
        return value if is_key(value) or value.dtype == v.dtype else value.astype(v.dtype)

    def _blamed(self, suspects: Sequence[Disagreement]) -> tuple[list[Disagreement], list[MustAgree]]:
        """The suspects from which what must agree goes wrong, the worst first; and what does."""
        if not suspects:
            return [], []
        spoilt = {d.mine for d in suspects}
        reached = self.both.reached(spoilt)
        must = {anchor.mine: anchor for anchor in self.both.anchors if anchor.mine in self.both.beside}
        gradients = {g for _, g in self.both.a.gradients}
        clean = {
            v: x for v, x in self.both.beside.items() if v not in reached or (v in must and v in gradients)
        }
        judged = [v for v in must if v in reached]
        wrong = self._plainly_wrong(judged, gradients)
        if not wrong:
            others = [v for v in judged if not self.both.is_same(v)]
            wrong = {d.mine for d in self._disagreeing(others, clean)}
        if not wrong:
            return [], []
        shares = [self._share(d, judged, wrong, gradients) for d in suspects]
        blamed = [d for d, share in zip(suspects, shares, strict=True) if share >= max(shares) / 2]
        return blamed, [must[v] for v in must if v in wrong]

    def _plainly_wrong(self, judged: Iterable[Variable], gradients: set[Variable]) -> set[Variable]:
        """The values so far apart that it need not be asked what rounding explains.

        A gradient of nearly nothing may be all rounding: gradients are measured by the largest of all, and
        what updates make of them is not judged so.
        """
        behind = self.both.reached(gradients) - gradients
        most = max(_PLAIN, _EPSILONS * self.both.epsilon)
        steepest = max((largest(self.both.of_a[g]) for g in gradients if g in self.both.beside), default=0.0)
        least = {v: steepest if v in gradients else 0.0 for v in judged if v not in behind}
        return {v for v, scale in least.items() if far(self.both.of_a[v], self.both.beside[v], scale) > most}

    def _share(
        self, d: Disagreement, judged: Sequence[Variable], wrong: set[Variable], stops: set[Variable]
    ) -> float:
        """Which part of what must agree and depends on a suspect is wrong."""
        behind = self.both.reached({d.mine}, stops)
        of_it = [v for v in judged if v in behind]
        return sum(v in wrong for v in of_it) / len(of_it) if of_it else 0.0


def whose_ops_run(a: Program, b: Program) -> bool:
    """Whether the ops of b are run rather than those of a: one device before several, code before none."""
    return _fitness(b) < _fitness(a)


def _fitness(program: Program) -> tuple[bool, int, int, int]:
    is_described = any(isinstance(op.body, DescribedBody) for op in program.ops)
    low = sum(
        epsilon_of(v.dtype) > epsilon_of(np.dtype(np.float32)) for op in program.ops for v in op.outputs
    )
    loops = sum(any(of(name).is_loop for name in op.body.primitives) for op in program.ops)
    return is_described, count_of(program), low, loops
