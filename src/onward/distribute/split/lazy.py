"""Updates of a table row by row: the rows that were sent change, with their slots, and no others.

An optimizer with momentum would move the other rows too, at a cost in proportion to the whole table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from onward.core.builder import op_of
from onward.core.jaxprs.body import body_of
from onward.core.program import Op, Program, Variable
from onward.core.words import Kind, Pass
from onward.derive.update.groups import OptimizerRule
from onward.derive.update.update import with_update
from onward.distribute.split.shares import times


def with_lazy(
    program: Program,
    table: Variable,
    sent: Sequence[tuple[Variable, Variable]],
    shares: Variable | None,
    optimizer: OptimizerRule,
) -> Program:
    """The update of one table, row by row."""
    dense = dict(program.gradients)[table]
    count = sum(at.shape[0] for at, _ in sent)
    touched = Variable(f"touched({table.name})", (count,), np.dtype(np.int32))
    few = Variable(f"rows_of_grad({table.name})", (count, *table.shape[1:]), table.dtype, Kind.GRADIENT)
    merge = _rows_merged(sent, shares, (touched, few), table.shape[0])
    *turning, rule = _ops_for_rows(table, few, optimizer)
    read = turning[-1].outputs[0] if turning else few
    ops: list[Op] = []
    for op in program.ops:
        if dense in op.outputs:
            ops += [_without(op, dense), merge, *turning]
        elif table in op.inputs and op.update is optimizer.type:
            ops.append(_row_update(op, program, table, (touched, read), rule))
        elif dense not in op.inputs:
            ops.append(op)
    gradients = tuple((p, g) for p, g in program.gradients if p is not table)
    return replace(program, ops=tuple(ops), gradients=gradients)


def _rows_merged(
    sent: Sequence[tuple[Variable, Variable]],
    shares: Variable | None,
    made: tuple[Variable, Variable],
    rows: int,
) -> Op:
    """Rows that several trainers sent, each once, with the sum of its gradients."""
    inputs = [v for pair in sent for v in pair] + ([shares] if shares else [])
    count = made[0].shape[0]

    def merge(*values: Any) -> list[Any]:
        weights = values[-1] if shares else None
        at = jnp.concatenate(values[0 : 2 * len(sent) : 2])
        gradients = [times(g, weights, t) for t, g in enumerate(values[1 : 2 * len(sent) : 2])]
        touched, place = jnp.unique(at, size=count, fill_value=rows, return_inverse=True)
        total = jnp.zeros(made[1].shape, made[1].dtype).at[place].add(jnp.concatenate(gradients))
        return [touched, total]

    return op_of("merge_rows", inputs, made, merge, Pass.COLLECTIVE)


def _row_update(op: Op, program: Program, table: Variable, made: tuple[Variable, Variable], rule: Op) -> Op:
    """The optimizer's rule on the touched rows of a table and of its slots."""
    touched, few = made
    old_of = {new: old for old, new in program.next_state.items()}
    olds = [old_of[v] for v in op.outputs]
    dense = op.inputs[rule.inputs.index(few)]
    inputs = (*(v for v in op.inputs if v is not dense), touched, few)
    by_row = {v for v in olds if v.shape[:1] == table.shape[:1]}

    def update(*values: Any) -> list[Any]:
        env = dict(zip(inputs, values, strict=True))
        at = env[touched]
        taken = {v: env[v].at[at].get(mode="clip") if v in by_row else env[v] for v in inputs} | {
            dense: env[few]
        }
        new = rule.body(*(taken[v] for v in op.inputs))
        return [
            env[old].at[at].set(value, mode="drop") if old in by_row else value
            for old, value in zip(olds, new, strict=True)
        ]

    return replace(op, inputs=inputs, body=body_of(update, *(v.aval for v in inputs)))


def _ops_for_rows(table: Variable, few: Variable, optimizer: OptimizerRule) -> list[Op]:
    """The update op of a parameter that is as long as the rows are many, behind what turns their gradient."""
    part = replace(table, shape=few.shape)
    alone = replace(optimizer, rules=(), groups=())
    draft = with_update(Program("rows", (few,), (part,), gradients=((part, few),)), alone)
    turning = [op for op in draft.ops if few in op.inputs and part not in op.inputs]
    update = next(op for op in draft.ops if part in op.inputs and op.update is optimizer.type)
    return [*turning, update]


def _without(op: Op, output: Variable) -> Op:
    """The op without one of its outputs, and without the inputs that only this one read."""
    places = [k for k, v in enumerate(op.outputs) if v is not output]
    body, kept = op.body.restricted(places)
    return replace(
        op,
        inputs=tuple(op.inputs[k] for k in kept),
        outputs=tuple(op.outputs[k] for k in places),
        body=body,
    )
