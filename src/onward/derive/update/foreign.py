"""The update of someone else's step as a transform: its ops, behind gradients that are derived here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax.numpy as jnp

from onward.core.builder import Builder
from onward.core.errors import GraphError
from onward.core.jaxprs.tracing import current_axis
from onward.core.placement import equal_variables, expect_one_device
from onward.core.program import Op, Phase, Program, Variable
from onward.core.recipe import whole_types
from onward.core.structure import Structure
from onward.core.transform import transform
from onward.core.words import Kind, Pass, Placement


@dataclass(frozen=True, eq=False)
class ForeignUpdate:
    """The ops of an update, as the step was traced for data of some types.

    Attributes:
        forward: the forward Program of that trace. Its state, data and outputs are what the ops read.
        gradients: the Variables that stand for gradients, by the names of the parameters.
        constants: what the ops read beside.
        ops: in order.
        next_state: by the names of the state, the Variables that replace it.
        result: what the step returns beside its next state.
    """

    forward: Program
    gradients: Mapping[str, Variable]
    constants: Mapping[Variable, Any]
    ops: tuple[Op, ...]
    next_state: Mapping[str, Variable]
    result: Structure


class UpdateSource(Protocol):
    """A step that was taken apart."""

    def update(self, data: tuple[Any, ...]) -> ForeignUpdate:
        """Its update, for data of these types."""


@transform(phase=Phase.UPDATE)
def append_foreign_update(program: Program, source: UpdateSource) -> Program:
    """Add the update of someone's step, as it is for the whole batch.

    It reads the gradients of ``program.gradients``, and zeros where a parameter has none, as ``jax.grad``
    gives them.

    Raises:
        GraphError: on several devices, an update that reads more of the forward pass than all devices share.
    """
    expect_one_device(program, "the update")
    update = source.update(whole_types(replace(program, replicas=current_axis())))
    builder = Builder(program, program.ops, made_by=Pass.UPDATE)
    env = _known(builder, program, update)
    _expect_shared(program, update, env)
    for op in update.ops:
        outputs = tuple(replace(v, name=builder.names.new(v.name)) for v in op.outputs)
        env.update(zip(op.outputs, outputs, strict=True))
        inputs = tuple(env[v] for v in op.inputs)
        builder.append(replace(op, inputs=inputs, outputs=outputs, made_by=Pass.UPDATE, of=None))
    builder.follow({program[name]: env[v] for name, v in update.next_state.items()})
    assert program.signature is not None
    result = update.result.mapped(env.__getitem__)
    return builder.program(
        constants={**program.constants, **{env[v]: value for v, value in update.constants.items()}},
        outputs=tuple(dict.fromkeys((*result.variables, *filter(None, (program.loss,))))),
        signature=replace(program.signature, result=result),
    )


def _known(builder: Builder, program: Program, update: ForeignUpdate) -> dict[Variable, Variable]:
    """The Variables of the Program that stand for those which the update reads."""
    forward = update.forward
    env = {v: program[v.name] for v in (*forward.state, *forward.inputs)}
    env.update(zip(forward.outputs, program.outputs, strict=False))
    for v in update.constants:
        env[v] = program[v.name] if v in forward.constants else replace(v, name=builder.names.new(v.name))
    derived = {p.name: g for p, g in program.gradients}
    for name, v in update.gradients.items():
        env[v] = derived[name] if name in derived else _zeros(builder, v)
    return env


def _zeros(builder: Builder, v: Variable) -> Variable:
    zeros = replace(v, name=builder.names.new(v.name), kind=Kind.GRADIENT)
    return builder.add("zeros", [], [zeros], lambda: [jnp.zeros(v.shape, v.dtype)])[0]


def _expect_shared(program: Program, update: ForeignUpdate, env: Mapping[Variable, Variable]) -> None:
    """Raise ``GraphError`` for an update that reads what differs from device to device."""
    replicas = current_axis()
    if replicas is None or replicas.count == 1:
        return
    equal = equal_variables(program)
    made = {v for op in program.ops if op.made_by is Pass.FORWARD for v in op.outputs} | {*program.inputs}
    for op in update.ops:
        for v in op.inputs:
            if env.get(v) in made and env[v] not in equal:
                raise GraphError(_said(program, op, env[v], replicas.count))


def _said(program: Program, op: Op, read: Variable, devices: int) -> str:
    alone = any(v.placement is Placement.SHARDED and v.shape[0] == 1 for v in program.inputs)
    return (
        f"{program.name}: the update reads {read.name!r} ({op.type}{op.at}) beside the gradients, which "
        "every device has of its own part of the batch, so each would make another update. "
        f"{_ONE_EXAMPLE if alone else _LET_IT_READ}; or take the whole batch: ow.partition(program, "
        f"{{'data': {devices}}}, {{}}, batch='data') in place of replicate."
    )


_LET_IT_READ = "Let the update read gradients and state alone"
_ONE_EXAMPLE = (
    "Each device has one example, of which JAX leaves out axes, so that it is not known how to merge theirs. "
    "Let each have two or more: by a larger batch, by fewer devices, or without a short last batch "
    "(ow.batches(..., drop_last=True))"
)
