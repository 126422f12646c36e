"""Which forward ops repeat layer after layer, found by their wiring, so that one layer can stand for all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from onward.core.program import Op, Program
from onward.core.words import Pass
from onward.derive.roll.find import find_runs
from onward.derive.roll.forward import forward_ops
from onward.derive.roll.line import line_of

_LEAST_OPS_SAVED = 12


@dataclass(frozen=True, eq=False)
class Repeat:
    """Layers that are equal; the ops at one place of all layers stand side by side in ``layers``."""

    layers: tuple[tuple[Op, ...], ...]

    @property
    def times(self) -> int:
        """How many layers there are."""
        return len(self.layers)


def repeats_of(program: Program) -> tuple[Repeat, ...]:
    """The repeated layers of a Program's forward pass."""
    ops = tuple(op for op in program.ops if op.made_by is Pass.FORWARD)
    first_form = forward_ops(program)
    original = dict(zip(first_form, ops, strict=True))
    line = line_of(replace(program, ops=first_form), frozenset(), frozenset())
    runs = find_runs(line, lambda run: run.saved >= _LEAST_OPS_SAVED).runs
    return tuple(Repeat(tuple(tuple(original[op] for op in layer) for layer in run.layers)) for run in runs)


def stand_ins(repeats: Iterable[Repeat]) -> Mapping[Op, Op]:
    """For each op of a repeated layer, the op of the first layer that stands for it."""
    return {
        op: first
        for repeat in repeats
        for layer in repeat.layers
        for op, first in zip(layer, repeat.layers[0], strict=True)
    }
