"""The repeated layers of each stage as loops: what is compiled of a stage does not grow with its depth.

``roll`` makes one loop of all layers, which no stage can be cut out of. So the Program is cut as it was
before, and rolled again with loops that end where a stage does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from onward.core.cost import size
from onward.core.names import Names
from onward.core.program import Applied, Op, Phase, Program, Variable
from onward.core.recipe import build, recipe_of, whole_types
from onward.core.transform import transform
from onward.core.walk import Where, descendants, needed_ops
from onward.core.words import Pass
from onward.develop.roll.find import Accepts
from onward.develop.roll.fold import with_loops
from onward.develop.roll.forward import forward_of, separable
from onward.develop.roll.line import returned_by
from onward.develop.roll.roll import chosen, rolled
from onward.distribute.pipeline.cut import Homes
from onward.distribute.pipeline.stages import place_forward


def is_rolled(program: Program) -> bool:
    """Whether the layers of a Program are loops."""
    return program.recipe is not None and bool(program.recipe.of(rolled))


def without_loops(program: Program) -> Program:
    """The Program before it was rolled."""
    recipe = recipe_of(program, "with its layers apart", "Leave roll out")
    return build(recipe.without(rolled), whole_types(program))


def rolled_within(program: Program, plain: Program, homes: Homes) -> Program:
    """A rolled Program, which is ``plain`` without, with other loops: none goes on from stage to stage."""
    recipe = recipe_of(program, "with a loop for each stage", "Leave roll out")
    line = (op.outputs[0].name for op in _line(forward_of(plain, recipe.without(rolled))))
    known = [name for name in line if name in homes]
    begins = tuple(name for before, name in pairwise(known) if homes[before] < homes[name])
    steps = tuple(
        Applied(rolled_in_stages, (*step.arguments, begins), {}, Phase.ROLL)
        if step.function is rolled
        else step
        for step in recipe.steps
    )
    return build(replace(recipe, steps=steps), whole_types(program))


@separable
@transform(phase=Phase.ROLL)
def rolled_in_stages(
    program: Program,
    keep: tuple[Where, ...],
    apart: tuple[Where, ...],
    accepts: Accepts,
    begins: tuple[str, ...],
) -> Program:
    """A forward Program with the runs of each stage as loops; stages begin with the ops that make these."""
    variables = tuple(program.variables.values())
    kept = returned_by(program) | chosen(variables, keep)
    alone, names = chosen(variables, apart) | _prepared(program), Names(program.variables)
    ops: list[Op] = []
    constants = dict(program.constants)
    for stage in _by_stage(program, begins):
        inside = set(stage)
        elsewhere = {v for op in program.ops if op not in inside for v in op.inputs}
        made = with_loops(replace(program, ops=tuple(stage)), kept | elsewhere, alone, names, accepts)
        ops += made.ops
        constants |= made.constants
    used = {v for op in ops for v in op.inputs} | kept
    return replace(program, ops=tuple(ops), constants={v: c for v, c in constants.items() if v in used})


def _prepared(program: Program) -> frozenset[Variable]:
    """The values made of state alone that take no more bytes than it, such as parameters in bfloat16.

    A stage makes it once a step. Within a loop it would be kept for the backward pass of each micro-batch.
    """
    given = {v for v in program.state if v not in program.next_state}
    made: set[Variable] = set()
    for op in program.ops:
        from_state = op.inputs and (given | made).issuperset(op.inputs)
        if from_state and sum(map(size, op.outputs)) <= sum(map(size, op.inputs)):
            made.update(op.outputs)
    return frozenset(made)


def _by_stage(program: Program, begins: Sequence[str]) -> list[list[Op]]:
    """The forward ops of each stage; first of all those of what micro-batches hand on."""
    ahead = needed_ops(program, program.next_state.values())
    found: dict[Op, int] = {}
    stage = 0
    for op in _line(program):
        stage += any(v.name in begins for v in op.outputs)
        found[op] = stage
    place_forward(program, ahead, found)
    return [ahead, *([op for op in program.ops if found.get(op) == s] for s in range(len(begins) + 1))]


def _line(program: Program) -> list[Op]:
    """The forward ops that depend on data, in order."""
    fed = descendants(program, program.inputs)
    ahead = set(needed_ops(program, program.next_state.values()))
    forward = (op for op in program.ops if op.made_by is Pass.FORWARD and op not in ahead)
    return [op for op in forward if not fed.isdisjoint(op.outputs)]
