"""Attention among ops, in any spelling: softmax(scale q k^T, masked, with a bias) v, proved op by op.

A walk (``walk``) begins at each product; what comes of it is attention, or not, and then why not.
"""

from __future__ import annotations

from collections.abc import Iterator

from onward.core.primitives.traits import Work
from onward.core.program import Op, Program
from onward.core.walk import consumers, producers
from onward.core.words import Pass
from onward.develop.attention.parts import Attention, AttentionPart, NoPartError
from onward.develop.attention.walk import AttentionWalk
from onward.develop.chunk.numbered import operands_of


def attentions(program: Program, missed: list[tuple[int, NoPartError]] | None = None) -> Iterator[Attention]:
    """Attention in the forward pass of a Program, but not in the loops within.

    ``missed`` gets what came close, with the number of ops that fit.
    """
    readers, makers = consumers(program), producers(program)
    kept = {*program.outputs, *program.next_state.values(), *program.losses}
    kept |= {v for pair in program.gradients for v in pair}
    taken: set[Op] = set()
    for i, op in enumerate(program.ops):
        if op.made_by is Pass.FORWARD and op not in taken and _is_product(op):
            walk = AttentionWalk(program, op, makers)
            try:
                found = walk.over(program.ops[i + 1 :], readers, kept)
            except NoPartError as why:
                if missed is not None and any(p is not AttentionPart.SCORES for p in walk.part.values()):
                    missed.append((len(walk.ops), why))
                continue
            taken.update(found.ops)
            yield found


def _is_product(op: Op) -> bool:
    """Whether an op multiplies two values of lengths that are known, not those of an export for any batch."""
    values = operands_of(op) if op.primitive.work is Work.PRODUCT else []
    is_known = all(isinstance(n, int) for v in (*op.inputs, *op.outputs) for n in v.shape)
    return len(values) == 2 and None not in values and op.outputs[0].is_float and is_known
