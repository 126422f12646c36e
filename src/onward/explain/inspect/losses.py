"""The losses of a step: the numbers from which its gradients begin, returned or not.

``jax.grad`` begins with the number 1, which the first equation of the backward pass reads in place of a
gradient; it faces the term of the loss that it differentiates. An addition hands the 1 on without an equation
of its own, so what terms add up to is the loss.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from onward.core.primitives.traits import Linear, Moves, Reduces
from onward.core.program import Op, Variable
from onward.core.words import Pass
from onward.explain.inspect.passes import is_mixed

Pair = tuple[Variable, Variable]
_LAID = (Moves.RESHAPES, Moves.JOINS, Moves.PERMUTES, Moves.CUTS)


@dataclass(frozen=True, eq=False)
class StepLosses:
    """The losses of a step.

    Attributes:
        loss: the one that all gradients are of; None if there is none, or several.
        several: if there are several, each with the parameters that it trains.
        made: what is made of them by sums, means and factors alone, such as those of all turns of a loop.
    """

    loss: Variable | None = None
    several: Mapping[Variable, tuple[Variable, ...]] = field(default_factory=dict)
    made: frozenset[Variable] = frozenset()


def losses_of(
    ops: Sequence[Op],
    differentiated: Collection[Variable],
    outputs: Iterable[Variable],
    gradients: Sequence[Pair],
    within: Collection[Variable] = (),
    carried: Collection[Variable] = (),
) -> StepLosses:
    """The losses of a step, by where its gradients begin.

    Args:
        ops: those of the step.
        differentiated: what is computed under ``jax.grad``.
        outputs: its results. One that is made of the loss, as its mean over devices is, is taken for it.
        gradients: the pairs (parameter, gradient).
        within: what loops make of the losses of their turns.
        carried: what a turn of a loop is given by the turn before, on which it adds up losses.
    """
    place = {v: i for i, op in enumerate(ops) for v in op.outputs}
    outputs = [*outputs]
    begins = _Begins(ops, set(differentiated), outputs)
    trained = begins.trained(gradients)
    if not trained:
        made = made_of(ops, [*within], carried)
        loss = _first([v for v in outputs if v in made and _is_number(v)], place)
        return StepLosses(loss, made=frozenset(made))
    made = made_of(ops, [*trained, *within], carried)
    every = (1 << len(trained)) - 1
    whole = [v for v in outputs if _is_number(v) and made.get(v, 0) & every == every]
    if len(trained) > 1 and len({frozenset(parameters) for parameters in trained.values()}) > 1:
        whole = []
    told = [v for v in whole if v in trained] or whole
    loss = _first(told, place) or (next(iter(trained)) if len(trained) == 1 else None)
    several = {} if loss is not None else {v: tuple(ps) for v, ps in trained.items()}
    return StepLosses(loss, several, frozenset(made))


def _is_number(v: Variable) -> bool:
    return not v.shape and v.is_float


def _first(variables: Iterable[Variable], place: Mapping[Variable, int]) -> Variable | None:
    return min((v for v in variables if v in place), key=place.__getitem__, default=None)


def _bits(of: Mapping[Variable, int], variables: Iterable[Variable]) -> int:
    """The bits of all of these together."""
    found = 0
    for v in variables:
        found |= of.get(v, 0)
    return found


def _is_zero(op: Op) -> bool:
    """Whether an op only makes zeros, as what a loop adds gradients to."""
    return not op.inputs and all(x is not None and not np.any(x) for x in op.body.numbers)


def _hands_on(op: Op) -> bool:
    """Whether the backward pass of an op hands on the gradient as it is: a sum, or a move."""
    row = op.primitive
    adds = row.linear is Linear.TOGETHER and row.is_elementwise and not row.chooses
    return adds or row.keeps_places or row.moves is Moves.RESHAPES


class _Begins:
    """The terms of losses at which the backward pass begins, and the gradients that come of each."""

    def __init__(
        self, ops: Sequence[Op], differentiated: set[Variable], results: Collection[Variable]
    ) -> None:
        self.ops, self.results = ops, results
        self.differentiated = differentiated
        self.terms: list[Variable] = []
        self.behind: dict[Variable, int] = {}
        self.inner: dict[Variable, int] = {}
        makers = {v: op for op in ops for v in op.outputs}
        for op in ops:
            reached = _bits(self.behind, op.inputs)
            if op.made_by in (Pass.BACKWARD, Pass.COLLECTIVE):
                if not reached and op.made_by is Pass.BACKWARD and op.of is not None and not _is_zero(op):
                    reached = self._begin(makers[op.of].outputs)
                self.behind.update(dict.fromkeys(op.outputs, reached))
            elif self.differentiated.issuperset(op.outputs):  # reads gradients, and is differentiated itself
                reached |= _bits(self.inner, op.inputs)
                self.inner.update(dict.fromkeys(op.outputs, reached))

    def _begin(self, faced: Iterable[Variable]) -> int:
        """The bits of the numbers among what the first op of a backward pass faces."""
        found = 0
        for v in filter(_is_number, faced):
            if v not in self.terms:
                self.terms.append(v)
            found |= 1 << self.terms.index(v)
        return found

    def trained(self, gradients: Sequence[Pair]) -> dict[Variable, list[Variable]]:
        """Every loss with the parameters that have a gradient of it; without those that train none."""
        pairs = [(p, self.behind.get(g, 0)) for p, g in gradients]
        used = _bits(self.behind, [g for _, g in gradients] or self.behind) & ~_bits(self.inner, self.terms)
        return {v: [p for p, bits in pairs if bits & mine] for v, mine in self._sums(used)}

    def _sums(self, used: int) -> Iterator[tuple[Variable, int]]:
        """Yield the sums of these terms, that of most of them first, with the bits of its terms."""
        sums = {v: 1 << i for i, v in enumerate(self.terms)}
        for op in self.ops:
            if op.made_by is Pass.FORWARD and _hands_on(op):
                reached = _bits(sums, op.inputs)
                for v in op.outputs:
                    if v in self.differentiated and _is_number(v) and reached:
                        sums[v] = sums.get(v, 0) | reached
        while used:
            best = max(sums, key=lambda v: (sums[v] & used).bit_count())
            if not (mine := sums[best] & used):
                return
            yield self._last(best), mine
            used &= ~mine

    def _last(self, v: Variable) -> Variable:
        """The number that a sum is with constants added, which only the loss itself is: nothing reads it."""
        read = {x for op in self.ops for x in op.inputs}
        for op in self.ops:
            if op.inputs == (v,) and _hands_on(op) and self.differentiated.issuperset(op.outputs):
                end = self._last(op.outputs[0])
                if v not in self.results and end not in read:
                    return end
        return v


def made_of(
    ops: Sequence[Op], losses: Collection[Variable], carried: Collection[Variable]
) -> dict[Variable, int]:
    """Map whatever is made of losses alone, or of them and factors, to the bits of the losses."""
    found = {v: 1 << i for i, v in enumerate(losses)}
    for op in ops:
        if not is_mixed(op) and (bits := _of_losses(op, found, carried)):
            found.update((v, bits | found.get(v, 0)) for v in op.outputs if v.is_float)
    return found


def _of_losses(op: Op, found: Mapping[Variable, int], carried: Collection[Variable]) -> int:
    """The bits of the losses that an op adds up, scales or hands on; 0 for any other op."""
    row, bits = op.primitive, _bits(found, op.inputs)
    reads = [found.get(v, 0) for v in op.inputs]
    alone = all(each or v in carried for v, each in zip(op.inputs, reads, strict=True))
    lays = row.keeps_places or row.moves in _LAID or row.exchanges is not None or row.reduces is Reduces.SUM
    if alone and (lays or (row.linear is Linear.TOGETHER and row.is_elementwise)):
        return bits
    numbers = all(not v.shape for v in op.inputs)
    if row.linear is Linear.EACH and row.is_elementwise and numbers and sum(map(bool, reads)) == 1:
        return bits
    above = op.body.operands[0] if row.divides and numbers else None
    return bits if isinstance(above, int) and bits == reads[above] and sum(map(bool, reads)) == 1 else 0
