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

import jax.numpy as jnp
import numpy as np

from onward.core.described import DescribedBody
from onward.core.primitives.table import of
from onward.core.program import Op, Program, Variable
from onward.core.walk import producers
from onward.execute.pieces import Compiled
from onward.explain.compare.rounding import BoundedValue, bounded, epsilon_of
from onward.explain.compare.twins import (
    MustAgree,
    anchors,
    by_value,
    far,
    is_key,
    is_near,
    laid_out,
    largest,
    matched,
    widened,
)
from onward.explain.compare.values import Values, count_of
from onward.explain.diff.compare import same_array
from onward.explain.diff.match import Matching

_ROUNDS = 3
_PLAIN = 1e-3  # of the largest number: what rounding hardly makes of a loss or a gradient
_EPSILONS = 64
_SUBNORMAL = 16 * float(np.finfo(np.float32).tiny)  # what compilers take for 0
_ADRIFT = 1e-2  # of the largest number: what rounding hardly explains


@dataclass(frozen=True, eq=False)
class Disagreement:
    """A value that ops of one Program give otherwise than those of the other, of the same numbers.

    Attributes:
        mine: the Variable of the Program whose ops were run.
        theirs: that of the other; None where it has none.
        expected: what the ops gave, and how far rounding can lead from it.
        found: what the other Program has there.
    """

    mine: Variable
    theirs: Variable | None
    expected: BoundedValue
    found: Any

    @property
    def excess(self) -> np.ndarray:
        """For each number the difference; 0 where rounding explains it."""
        return excess(self.expected, self.found)


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


def excess(expected: BoundedValue, found: Any) -> np.ndarray:
    """For each number its difference from what was expected; 0 where that is within the bound."""
    if is_key(expected.value) or not jnp.issubdtype(expected.value.dtype, jnp.inexact):
        differs = widened(expected.value) != widened(found)
        may = False if expected.bound is None else np.asarray(expected.bound) > 0
        return np.where(may, 0.0, differs.astype(float))
    x, y = widened(expected.value), widened(found)
    with np.errstate(all="ignore"):
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        difference = np.where(same, 0.0, np.abs(x - y))
        difference = np.where(np.isnan(difference), np.inf, difference)
        return np.where(difference <= expected.bound + _SUBNORMAL, 0.0, difference)


@dataclass
class PartingSearch:
    """One comparison of two Programs on the values of one step of both.

    Attributes:
        a: the Program whose ops are run.
        b: the other.
        of_a: all values of the one.
        of_b: all values of the other.
        epsilon: the least that is taken for the rounding of a dtype.
        begins: whether the state is that before training, and has to be the same.
    """

    a: Program
    b: Program
    of_a: Values
    of_b: Values
    epsilon: float = 0.0
    begins: bool = False
    twins: dict[Variable, Variable] = field(default_factory=dict)  # of b to a
    beside: dict[Variable, Any] = field(default_factory=dict)  # for Variables of a the value of b
    noisy: Compiled = field(default_factory=dict)

    def run(self) -> Parting:
        """Look for the first disagreement."""
        self.matching = matched(self.a, self.b, self.of_a, self.of_b)
        self.twins = dict(self.matching.variables)
        self.of_twin: dict[Variable, Variable] = {}
        self.makers, self.their_makers = producers(self.a), producers(self.b)
        self.anchors = anchors(self.a, self.b, self.twins)
        self._stand_beside()
        suspects = self._suspects(self._doubtful())
        blamed, reached = self._blamed(suspects)
        if not blamed and not reached and self._is_adrift():
            everything = [v for v in self.makers if v in self.beside]
            suspects = self._suspects(everything)
            blamed, reached = self._blamed(suspects)
        stale = self._stale()
        blamed, reached = (
            blamed or stale,
            reached or [x for x in self.anchors if x.mine in {d.mine for d in stale}],
        )
        blamed = [*self._given_apart(), *blamed]
        first = blamed[0] if blamed else None
        return Parting(
            first=first,
            reaches=tuple(reached),
            forgiven=() if first else tuple(suspects),
            largest=self._largest(),
            compared=self._compared(),
            matching=self.matching,
            region=((), ()) if first is None else self._region(first),
        )

    def _stand_beside(self) -> None:
        """Lay out the values of b beside those of a."""
        for anchor in self.anchors:
            self.twins.setdefault(anchor.theirs, anchor.mine)
        self.twins |= by_value(self.a, self.b, self.of_a, self.of_b, self.twins)
        for theirs, mine in self.twins.items():
            if mine in self.a.constants:
                continue
            value = laid_out(self.a, self.b, self.of_a[mine], self.of_b[theirs])
            if value is not None and mine not in self.beside:
                self.beside[mine], self.of_twin[mine] = value, theirs
        for anchor in self.anchors:
            value = self._of_anchor(anchor)
            if value is not None and anchor.mine in self.makers:
                self.beside[anchor.mine], self.of_twin[anchor.mine] = value, anchor.theirs

    def _of_anchor(self, anchor: MustAgree) -> Any | None:
        is_told = not anchor.what.startswith("gradient of ")  # the gradients of parts may be merged later
        return laid_out(self.a, self.b, self.of_a[anchor.mine], self.of_b[anchor.theirs], must=is_told)

    def _stale(self) -> list[Disagreement]:
        """Next values of state that a leaves as it was and b does not."""
        found = []
        for anchor in (x for x in self.anchors if x.mine not in self.makers and x.what.startswith("next ")):
            value = self._of_anchor(anchor)
            if value is not None:
                expected = BoundedValue(self.beside.get(anchor.mine, self.of_a[anchor.mine]), 0.0)
                found.append(Disagreement(anchor.mine, anchor.theirs, expected, value))
        return [d for d in found if d.excess.any()]

    def _given_apart(self) -> list[Disagreement]:
        """Data and state that is not the same before anything is computed."""
        given = [v for v in (*self.a.inputs, *(self.a.state if self.begins else ())) if v in self.beside]
        epsilons = {
            v: max(self.epsilon, epsilon_of(v.dtype), epsilon_of(self.beside[v].dtype)) for v in given
        }
        found = (
            Disagreement(
                v,
                self.of_twin[v],
                BoundedValue(
                    self.of_a[v],
                    None if is_key(self.of_a[v]) else epsilons[v] * np.abs(widened(self.of_a[v])),
                ),
                self.beside[v],
            )
            for v in given
        )
        return [d for d in found if d.excess.any()]

    def _doubtful(self) -> list[Variable]:
        """Computed values that are not the same but for the last bit, nor computed alike from twins."""
        return [v for v in self.makers if v in self.beside and not self._is_same(v) and not self._is_alike(v)]

    def _is_same(self, v: Variable) -> bool:
        """Whether both have the same numbers but for the last bit, which rounding always explains."""
        x, y = self.of_a[v], self.beside[v]
        if x.dtype != y.dtype:
            return False
        epsilon = 0.0 if is_key(x) else max(epsilon_of(x.dtype), self.epsilon)
        return same_array(x, y) or bool(epsilon and is_near(x, y, 2 * epsilon))

    def _is_alike(self, v: Variable) -> bool:
        """Whether twins compute it by the same code from twins."""
        mine, theirs = self.makers[v], self.their_makers.get(self.of_twin[v])
        if theirs is None or len(mine.inputs) != len(theirs.inputs):
            return False
        if mine.body is not theirs.body and mine.body.signature is not theirs.body.signature:
            return False
        if mine.outputs.index(v) != theirs.outputs.index(self.of_twin[v]):
            return False
        return all(map(self._are_twins, mine.inputs, theirs.inputs))

    def _are_twins(self, x: Variable, y: Variable) -> bool:
        if x in self.a.constants and y in self.b.constants:
            return same_array(self.a.constants[x], self.b.constants[y])
        return self.of_twin.get(x) is y

    def _suspects(self, doubtful: Sequence[Variable]) -> list[Disagreement]:
        """Those whose ops give others, on what the other Program reads."""
        for _ in range(_ROUNDS):
            suspects = self._disagreeing(doubtful, self.beside)
            again = {s.mine for s in suspects if self._is_found_elsewhere(s)}
            if not again:
                return suspects
            readers = self._reached(again, stops=self.beside)
            left = {s.mine for s in suspects} - again
            doubtful = [v for v in self.makers if v in left or (v in readers - again and v in self.beside)]
        return suspects

    def _is_found_elsewhere(self, suspect: Disagreement) -> bool:
        """Whether another value of b is what was expected; then that is the twin."""
        if suspect.mine in {anchor.mine for anchor in self.anchors} or suspect.expected.value.size < 2:
            return False
        for theirs in self.their_makers:
            if theirs in self.of_twin.values() and self.of_twin.get(suspect.mine) is not theirs:
                continue
            value = laid_out(self.a, self.b, suspect.expected.value, self.of_b[theirs])
            fits = value is not None and value.dtype == suspect.expected.value.dtype
            if fits and value is not None and not excess(suspect.expected, value).any():
                self.beside[suspect.mine], self.of_twin[suspect.mine] = value, theirs
                return True
        return False

    def _disagreeing(self, wanted: Iterable[Variable], beside: Mapping[Variable, Any]) -> list[Disagreement]:
        """The values that the ops of a give otherwise than b, reading what stands beside, in their order."""
        wanted = set(wanted)
        ops = self._needed(wanted, beside)
        asked = [v for op in ops for v in op.outputs if v in wanted]
        if any(isinstance(op.body, DescribedBody) for op in ops):
            return self._far_apart(asked)
        if not ops:
            return []
        read = dict.fromkeys(v for op in ops for v in op.inputs)
        made = {v for op in ops for v in op.outputs}
        given = {v: beside[v] if v in beside else self.of_a[v] for v in read if v in beside or v not in made}
        given = {v: self._as_mine(v, x) for v, x in given.items()}
        expected = bounded(self.a, ops, given, asked, self.epsilon, self.noisy)
        found = (Disagreement(v, self.of_twin[v], expected[v], self.beside[v]) for v in asked)
        return [d for d in found if d.excess.any()]

    def _far_apart(self, asked: Iterable[Variable]) -> list[Disagreement]:
        """The values that rounding hardly explains, where neither Program has ops that can be run."""
        most = max(_PLAIN, _EPSILONS * self.epsilon)
        bounds = {v: most * largest(self.of_a[v]) if epsilon_of(v.dtype) else None for v in asked}
        found = (
            Disagreement(v, self.of_twin[v], BoundedValue(self.of_a[v], bounds[v]), self.beside[v])
            for v in asked
        )
        return [d for d in found if d.excess.any()]

    def _as_mine(self, v: Variable, value: Any) -> Any:
        return value if is_key(value) or value.dtype == v.dtype else value.astype(v.dtype)

    def _needed(self, wanted: set[Variable], beside: Mapping[Variable, Any]) -> list[Op]:
        """The ops that give what is wanted, from what stands beside."""
        needed, ops = set(wanted), []
        for op in reversed(self.a.ops):
            if not needed.isdisjoint(op.outputs):
                ops.append(op)
                needed.update(v for v in op.inputs if v not in beside)
        return ops[::-1]

    def _blamed(self, suspects: Sequence[Disagreement]) -> tuple[list[Disagreement], list[MustAgree]]:
        """The suspects from which what must agree goes wrong, the worst first; and what does."""
        if not suspects:
            return [], []
        spoilt = {d.mine for d in suspects}
        reached = self._reached(spoilt)
        must = {anchor.mine: anchor for anchor in self.anchors if anchor.mine in self.beside}
        gradients = {g for _, g in self.a.gradients}
        clean = {v: x for v, x in self.beside.items() if v not in reached or (v in must and v in gradients)}
        judged = [v for v in must if v in reached]
        wrong = self._plainly_wrong(judged, gradients)
        if not wrong:
            others = [v for v in judged if not self._is_same(v)]
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
        behind = self._reached(gradients) - gradients
        most = max(_PLAIN, _EPSILONS * self.epsilon)
        steepest = max((largest(self.of_a[g]) for g in gradients if g in self.beside), default=0.0)
        least = {v: steepest if v in gradients else 0.0 for v in judged if v not in behind}
        return {v for v, scale in least.items() if far(self.of_a[v], self.beside[v], scale) > most}

    def _share(
        self, d: Disagreement, judged: Sequence[Variable], wrong: set[Variable], stops: set[Variable]
    ) -> float:
        """Which part of what must agree and depends on a suspect is wrong."""
        behind = self._reached({d.mine}, stops)
        of_it = [v for v in judged if v in behind]
        return sum(v in wrong for v in of_it) / len(of_it) if of_it else 0.0

    def _reached(self, sources: set[Variable], stops: Iterable[Variable] = ()) -> set[Variable]:
        """All that depends on these, themselves included; not through what stops it."""
        reached, stops = set(sources), set(stops)
        for op in self.a.ops:
            if any(v in reached and (v not in stops or v in sources) for v in op.inputs):
                reached.update(op.outputs)
        return reached

    def _is_adrift(self) -> bool:
        """Whether what must agree differs by what rounding hardly explains, though each op is the same."""
        most = max(_ADRIFT, _EPSILONS * self.epsilon)
        return any(
            far(self.of_a[anchor.mine], self.beside[anchor.mine]) > most
            for anchor in self.anchors
            if anchor.mine in self.beside
        )

    def _largest(self) -> tuple[float, str]:
        found = [
            (far(self.of_a[x.mine], self.beside[x.mine]), x.what)
            for x in self.anchors
            if x.mine in self.beside
        ]
        return max(found, default=(0.0, ""))

    def _compared(self) -> tuple[int, int]:
        mine = [op for op in self.a.ops if any(v in self.of_twin for v in op.outputs)]
        theirs = set(self.of_twin.values())
        return len(mine), sum(not theirs.isdisjoint(op.outputs) for op in self.b.ops)

    def _region(self, first: Disagreement) -> tuple[tuple[Op, ...], tuple[Op, ...]]:
        """The ops of both between the values that agree and the one that does not."""
        mine = (
            []
            if first.mine not in self.makers
            else self._needed({first.mine}, {v: x for v, x in self.beside.items() if v is not first.mine})
        )
        stands = set(self.of_twin.values()) - {first.theirs}
        needed, theirs = {first.theirs}, []
        for op in reversed(self.b.ops):
            if not needed.isdisjoint(op.outputs):
                theirs.append(op)
                needed.update(v for v in op.inputs if v not in stands)
        return tuple(mine), tuple(theirs[::-1])


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
