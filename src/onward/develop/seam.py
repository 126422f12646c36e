"""Cutting a training Program along ``program.gradients``: what makes the gradients, and what applies them."""

from __future__ import annotations

from dataclasses import replace

import jax

from onward.core.check import check, expect_program
from onward.core.errors import GraphError
from onward.core.placement import expect_one_device
from onward.core.program import Program, Variable
from onward.core.recipe import undone
from onward.core.structure import Signature, Structure
from onward.core.transform import transform
from onward.core.walk import prune
from onward.core.words import Kind, Pass
from onward.develop.accumulation.accumulate import accumulated, accumulation_of
from onward.develop.watch.watch import unwatched


def forward_pass(program: Program) -> Program:
    """The forward pass alone: what the function returned, and the state that it is given and replaces itself.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3))
        >>> [op.type for op in ow.graph.forward_pass(program).ops]
        ['mul', 'reduce_sum']
    """
    expect_program(program, "forward_pass")
    is_accumulated = accumulation_of(program) is not None
    return _forward_pass(undone(program, accumulated) if is_accumulated else program)


@transform
def _forward_pass(program: Program) -> Program:
    if not any(op.made_by is not Pass.FORWARD for op in program.ops):
        return program
    forward = {v for op in program.ops if op.made_by is Pass.FORWARD for v in op.outputs}
    own = {old: new for old, new in program.next_state.items() if new in forward}
    given = [v for v in _given(program.signature) if v in program.state]
    part = prune(program, [*program.outputs, *own.values(), *given])
    return replace(part, outputs=program.outputs, next_state=own, loss=program.loss)


def _given(signature: Signature | None) -> tuple[Variable, ...]:
    """The parameters and the state that the function is given, read or not."""
    if signature is None:
        return ()
    own = signature.model_state
    return signature.parameters.variables + (() if own is None else own.variables)


def update_pass(program: Program) -> Program:
    """The update pass alone: gradients are fed, parameters and slots are state.

    Raises:
        GraphError: an update reads more of the forward or backward pass than the gradients.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3))
        >>> part = ow.graph.update_pass(program)
        >>> part.inputs, [op.type for op in part.ops]
        ((Variable('grad(w)', float32[3], gradient),), ['count', 'sgd'])
    """
    expect_program(program, "update_pass")
    expect_one_device(program, "a cut along the gradients")
    program = unwatched(program)
    ops = tuple(op for op in program.ops if op.made_by is Pass.UPDATE)
    made = {v for op in ops for v in op.outputs}
    following = {old: new for old, new in program.next_state.items() if new in made}
    fed = (v for op in ops for v in op.inputs if v.kind is Kind.GRADIENT and v not in made)
    gradients = tuple(dict.fromkeys(fed))
    read = {v for op in ops for v in op.inputs} | following.keys()
    known = {*program.state, *program.constants, *made, *gradients}
    if foreign := [(op, v) for op in ops for v in op.inputs if v not in known]:
        op, v = foreign[0]
        raise GraphError(
            f"The update {op.type} of Program {program.name!r} reads {v.name!r} beside the gradients, so it "
            "cannot be cut off from the forward and backward pass: it evaluates the loss again, or checks it."
        )
    state = tuple(v for v in program.state if v in read)
    part = replace(
        program,
        name=f"{program.name}_update",
        inputs=gradients,
        state=state,
        constants={v: c for v, c in program.constants.items() if v in read},
        ops=ops,
        outputs=(),
        next_state=following,
        initializers=tuple(op for op in program.initializers if not read.isdisjoint(op.outputs)),
        loss=None,
        bounds={},
        signature=_signature(state, gradients),
        recipe=None,
    )
    return check(replace(part, gradients=tuple((p, g) for p, g in program.gradients if p in read)))


def _signature(state: tuple[Variable, ...], gradients: tuple[Variable, ...]) -> Signature:
    """How an update pass is called: one argument for each gradient, by name."""
    alone = jax.tree.structure(0)
    parameters = sorted((v for v in state if v.kind is Kind.PARAMETER), key=lambda v: v.name)
    return Signature(
        parameters=Structure(jax.tree.structure({v.name: 0 for v in parameters}), tuple(parameters)),
        model_state=None,
        data=tuple(Structure(alone, (g,)) for g in gradients),
        names=("parameters", *(g.name for g in gradients)),
        result=Structure(jax.tree.structure(()), ()),
        has_aux=False,
    )
