"""Attention among ops, in any spelling: softmax(scale q k^T, masked, with a bias) v, proved op by op.

A walk (``walk``) begins at each product; what comes of it is attention, or not, and then why not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from onward.core.primitives.traits import Work
from onward.core.program import Op, Program, Variable
from onward.core.walk import consumers, producers
from onward.core.words import Pass
from onward.develop.attention.axes import AxisCut
from onward.develop.attention.operands import KnownInputs
from onward.develop.attention.parts import Attention, AttentionPart, AxisCutError, NoPartError
from onward.develop.attention.walk import AttentionWalk
from onward.develop.chunk.numbered import operands_of


def attentions(
    program: Program,
    missed: list[tuple[int, NoPartError]] | None = None,
    outside: KnownInputs | None = None,
) -> Iterator[Attention]:
    """Attention in the forward pass of a Program, but not in the loops within.

    ``missed`` gets what came close, with the number of ops that fit.
    """
    readers, makers = consumers(program), producers(program)
    kept = {*program.outputs, *program.next_state.values(), *program.losses}
    kept |= {v for pair in program.gradients for v in pair}
    taken: set[Op] = set()
    for i, op in enumerate(program.ops):
        if op.made_by is Pass.FORWARD and op not in taken and _is_product(op):
            walks = _Walks(program, op, makers, outside)
            try:
                found = walks.over(program.ops[i + 1 :], readers, kept)
            except NoPartError as why:
                if missed is not None and any(
                    p is not AttentionPart.SCORES for p in walks.last.part.values()
                ):
                    missed.append((len(walks.last.ops), why))
                continue
            taken.update(found.ops)
            yield found


class _Walks:
    """Walks from one product, with the axes apart that the one before would have cut."""

    def __init__(
        self, program: Program, product: Op, makers: Mapping[Variable, Op], outside: KnownInputs | None
    ) -> None:
        self.pieces: list[tuple[int, ...]] = [(n,) for n in product.outputs[0].shape]
        self.begin = partial(AttentionWalk, program, product, makers, outside=outside)
        self.last = self.begin(self.pieces)

    def over(
        self, ops: Sequence[Op], readers: Mapping[Variable, tuple[Op, ...]], kept: set[Variable]
    ) -> Attention:
        """The attention that begins with the product, its operands as small as may be."""
        best: Attention | None = None
        while True:
            try:
                best = self.last.over(ops, readers, kept)
                cuts = [cut for cut in self.last.own.cuts if cut.axis != best.source]
            except AxisCutError as why:
                cuts = [why.cut]
            except NoPartError:
                if best is None:
                    raise
                return best
            if not cuts:
                assert best is not None
                return best
            self._apart(cuts[0])

    def _apart(self, cut: AxisCut) -> None:
        """Begin again, with this axis in two."""
        at = next(i for i, axes in enumerate(self.last.dimensions) if cut.axis in axes)
        place = self.last.dimensions[at].index(cut.axis)
        piece = self.pieces[at]
        self.pieces[at] = (*piece[:place], *cut.parts, *piece[place + 1 :])
        self.last = self.begin(tuple(self.pieces))


def _is_product(op: Op) -> bool:
    """Whether an op multiplies two values of lengths that are known, not those of an export for any batch."""
    values = operands_of(op) if op.primitive.work is Work.PRODUCT else []
    is_known = all(isinstance(n, int) for v in (*op.inputs, *op.outputs) for n in v.shape)
    return len(values) == 2 and None not in values and op.outputs[0].is_float and is_known
