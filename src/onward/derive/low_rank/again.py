"""Weights that are kept in few bits are made again for the backward pass, one at a time.

Else the forward pass would keep all of them, in the dtype in which it computes. What is made again waits for
the gradient that arrives, of which it asks one number whether it is above infinity: without a question XLA
would see the same computation twice and merge both, and it does not know that the answer is always no.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from onward.core.jaxprs.body import Body, body_of
from onward.core.marks import DEQUANTIZE
from onward.core.names import Names
from onward.core.program import Op, Program, Variable
from onward.core.words import Pass


def dequantized_again(program: Program) -> Program:
    """The Program whose backward pass makes such weights again, each where it is read.

    Adds ops, and changes which of two equal Variables ops of the backward pass read.
    """
    chains = _chains(program)
    if not chains:
        return program
    names = Names(program.variables)
    arrived: set[Variable] = set()
    ops: list[Op] = []
    for op in program.ops:
        if op.made_by is Pass.BACKWARD:
            gradient = next((v for v in op.inputs if v in arrived and v.is_float and v.size), None)
            instead: dict[Variable, Variable] = {}
            for v in op.inputs:
                if v in chains and gradient is not None:
                    made = _again(chains[v], gradient, names)
                    ops += made
                    instead[v] = made[-1].outputs[0]
            op = replace(op, inputs=tuple(instead.get(v, v) for v in op.inputs)) if instead else op
            arrived.update(op.outputs)
        ops.append(op)
    return replace(program, ops=tuple(ops))


def _chains(program: Program) -> dict[Variable, list[Op]]:
    """For each value that is made of such a weight alone, the ops that make it."""
    found: dict[Variable, list[Op]] = {}
    for op in program.ops:
        if op.type is DEQUANTIZE:
            found[op.outputs[0]] = [op]
        elif op.made_by is Pass.FORWARD and len(op.inputs) == len(op.outputs) == 1 and op.inputs[0] in found:
            found[op.outputs[0]] = [*found[op.inputs[0]], op]
    return found


def _again(chain: Sequence[Op], gradient: Variable, names: Names) -> list[Op]:
    """The ops of a chain once more, the first of which waits for the gradient."""
    made: list[Op] = []
    for op in chain:
        outputs = tuple(replace(v, name=names.new(f"again({v.name})")) for v in op.outputs)
        inputs = made[-1].outputs if made else (*op.inputs, gradient)
        body = op.body if made else _waiting(op.body, inputs)
        again = Op(op.type, inputs, outputs, body, Pass.BACKWARD, op.scope, op.source, of=op.outputs[0])
        made.append(again)
    return made


def _waiting(body: Body, inputs: Sequence[Variable]) -> Body:
    return body_of(partial(_made, body), *(v.aval for v in inputs))


def _made(body: Body, kept: Any, *others: Any) -> list[Any]:
    """The same weight, which cannot be there before the gradient."""
    *scales, gradient = others
    late = gradient.reshape(-1)[0] > jnp.inf
    if scales:  # few numbers
        return body(kept, *(jnp.where(late, 0, scale).astype(scale.dtype) for scale in scales))
    (weight,) = body(kept)
    return [jnp.where(late, 0, weight).astype(weight.dtype)]
