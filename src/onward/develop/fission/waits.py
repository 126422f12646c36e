"""What each value of a loop's turn waits for: nothing, what is cut for the turn, or the turn before."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum

from onward.core.primitives.table import of
from onward.core.program import Op, Variable
from onward.core.turn import ScanTurn


class Waits(IntEnum):
    """The latest of all that a value of a turn is computed of."""

    NOTHING = 0  # only of what is the same in all turns
    CUT = 1  # of what is cut for each turn as well
    CARRIED = 2  # of what the turn before has made, or it does more than compute


def waits_of(turn: ScanTurn) -> Mapping[Variable, Waits]:
    """For each value of a turn, what it waits for."""
    found = dict.fromkeys((*turn.program.constants, *turn.fixed), Waits.NOTHING)
    found.update(dict.fromkeys(turn.cut, Waits.CUT))
    found.update(dict.fromkeys(turn.carried, Waits.CARRIED))
    for op in turn.program.ops:
        latest = max((found[v] for v in op.inputs), default=Waits.NOTHING)
        found.update(dict.fromkeys(op.outputs, Waits.CARRIED if stays(op) else latest))
    return found


def stays(op: Op) -> bool:
    """Whether an op does more than compute, or would be another one for all turns at once."""
    random = any(of(p).draws or of(p).makes_keys for p in op.body.primitives)
    return bool(op.body.has_effects or op.body.collectives or op.primitive.is_loop or random)


def factors(op: Op) -> tuple[Variable, ...]:
    """The operands of a product of matrices, in order; empty if it is something else."""
    operands = op.body.operands
    (call,) = op.body.calls
    plain = call.primitive == "dot_general" and call.params.get("out_sharding") is None
    return tuple(op.inputs[x] for x in operands if isinstance(x, int)) if plain else ()
