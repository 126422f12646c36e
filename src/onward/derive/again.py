"""Ops that are marked ``again`` run again for the backward pass, each time that it reads their results.

Else the forward pass would keep all of that. What runs again waits for the gradient that arrives, of which it
asks one number whether it is above infinity: without a question XLA would see the same computation twice and
merge both, and it does not know that the answer is always no.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp

from onward.core.jaxprs.body import Body, body_of
from onward.core.names import Names
from onward.core.program import Op, Variable
from onward.core.words import Kind, Pass


def computed_again(ops: Iterable[Op], backward: Iterable[Op], names: Names) -> Iterator[Op]:
    """The ops of a backward pass, before each those that it reads again of the ones before it."""
    chains = _chains(ops)
    for op in backward:
        gradient = next((v for v in op.inputs if v.kind is Kind.GRADIENT and v.size), None)
        stands: dict[Variable, Variable] = {}
        for v in op.inputs:
            if v in chains and v not in stands and gradient is not None:
                made = _again(chains[v], gradient, names)
                stands[v] = made[-1].outputs[0]
                yield from made
        yield replace(op, inputs=tuple(stands.get(v, v) for v in op.inputs)) if stands else op


def _chains(ops: Iterable[Op]) -> dict[Variable, list[Op]]:
    """For each value that is made of what a marked op computes, and of nothing else, the ops that make it."""
    found: dict[Variable, list[Op]] = {}
    for op in ops:
        before = [] if op.again else found.get(op.inputs[0]) if len(op.inputs) == 1 else None
        if before is not None and len(op.outputs) == 1 and not op.body.has_effects:
            found[op.outputs[0]] = [*before, op]
    return found


def _again(chain: Sequence[Op], gradient: Variable, names: Names) -> list[Op]:
    """The ops of a chain once more, the first of which waits for the gradient."""
    made: list[Op] = []
    for op in chain:
        (output,) = op.outputs
        inputs = made[-1].outputs if made else (*op.inputs, gradient)
        body = op.body if made else body_of(partial(_waiting, op.body), *(v.aval for v in inputs))
        once_more = replace(output, name=names.new(f"again({output.name})"))
        made.append(Op(op.type, inputs, (once_more,), body, Pass.BACKWARD, op.scope, op.source, of=output))
    return made


def _waiting(body: Body, first: Any, *others: Any) -> list[Any]:
    """The same array, which cannot be there before the gradient."""
    *few, gradient = others
    late = gradient.reshape(-1)[0] > jnp.inf
    if few:  # such as scales, of fewer numbers than the array
        return body(first, *(jnp.where(late, 0, x).astype(x.dtype) for x in few))
    (made,) = body(first)
    return [jnp.where(late, 0, made).astype(made.dtype)]
