"""What has the shape of a parameter and is made for it, so that it can lie as the parameter does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from onward.core.meshes import parameters_of
from onward.core.program import Program, Variable
from onward.develop.accumulation.micro_batches import LoopPlan


def in_shape_of(program: Program, loop: LoopPlan, once: Iterable[Program]) -> Mapping[Variable, Variable]:
    """For all in the shape of a parameter that a pipeline keeps during a step, that parameter.

    Args:
        program: what accumulates over the micro-batches.
        loop: its plan. State has a Variable in a turn too.
        once: what is made of state once a step, such as parameters in a lower precision.
    """
    of = {p: p for p in program.parameters} | {**parameters_of(program)}
    of |= {program.next_state[v]: p for v, p in of.items() if v in program.next_state}
    of |= {g: p for p, g in program.gradients}
    of |= {r.part: of[r.whole] for r in loop.sums if r.whole in of}
    named = {v.name: p for v, p in of.items()}
    of |= {v: named[v.name] for v in loop.turn.state if v.name in named}
    for op in (op for part in once for op in part.ops):
        for v in op.outputs:
            alike = {of[x] for x in op.inputs if x in of and x.shape == v.shape}
            if len(alike) == 1:
                of[v] = alike.pop()
    return {v: p for v, p in of.items() if v.shape == p.shape}
