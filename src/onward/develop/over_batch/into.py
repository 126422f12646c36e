"""Sums over examples that are added into what all parts have alike, such as a table of counts in the state.

Each part would add its own examples into all of it. As ``table + zeros.at[...].add(...)`` the sum stands by
itself, and is merged like any other before it is added.

>>> import jax.numpy as jnp, onward as ow
>>> def count(table, y):
...     return table.at[y].add(1.0)
>>> program = ow.trace(count, jnp.zeros(3), jnp.zeros(4, int))
>>> [op.type for op in added_apart(program).ops][-3:]
['zeros', 'scatter-add', 'add']
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

from onward.core.builder import Builder
from onward.core.jaxprs.body import body_of
from onward.core.program import Op, Program, Variable
from onward.core.walk import descendants
from onward.develop.over_batch.apart import adds_by_index


def added_apart(program: Program) -> Program:
    """The Program in which what examples add into a value that none of them made stands by itself."""
    of_examples = descendants(program, program.inputs)
    into: set[Variable] = set()
    empty = {v for op in program.ops if _is_zero(op) for v in op.outputs}
    builder = Builder(program)
    for op in program.ops:
        if op.inputs and op.inputs[0] not in empty and _adds_into(op, of_examples, into):
            into.update(op.outputs)
            _add_apart(builder, op)
        else:
            builder.append(op)
    return replace(program, ops=builder.ops) if into else program


def _adds_into(op: Op, of_examples: Collection[Variable], into: Collection[Variable]) -> bool:
    """Whether examples are added by index into what is the same for all of them, or was made so before."""
    calls = list(op.body.calls)
    if len(calls) != 1 or not adds_by_index(calls[0]):
        return False
    table, *added = op.inputs
    is_known = table in into or table not in of_examples
    return is_known and any(v in of_examples for v in added)


def _is_zero(op: Op) -> bool:
    numbers = op.body.numbers
    return len(numbers) == 1 and numbers[0] is not None and not np.any(numbers[0])


def _add_apart(builder: Builder, op: Op) -> None:
    (v,), (table, *added) = op.outputs, op.inputs
    zeros, summed = builder.named("zeros", v), builder.named(f"sum({v.name})", v)
    empty = body_of(lambda: [jnp.zeros(v.shape, v.dtype)])
    both = body_of(lambda table, found: [table + found], table.aval, v.aval)
    builder.append(replace(op, type="zeros", inputs=(), outputs=(zeros,), body=empty))
    builder.append(replace(op, inputs=(zeros, *added), outputs=(summed,)))
    builder.append(replace(op, type="add", inputs=(table, summed), body=both))
