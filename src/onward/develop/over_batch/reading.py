"""A Program whose ops read something else in place of values: what they need of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from onward.core.builder import Builder
from onward.core.jaxprs.body import Body
from onward.core.marks import SCALE
from onward.core.program import Op, Program, Variable
from onward.core.words import Pass


def reading(
    program: Program,
    needs: Mapping[Op, Mapping[Variable, Hashable]],
    made: Callable[[Builder, Variable, Any], Variable],
    made_by: Pass,
    bodies: Mapping[Op, Body] | None = None,
    constants: Mapping[Variable, Any] | None = None,
) -> Program:
    """The Program whose ops read what is made of these values, each made once.

    Args:
        program: the Program.
        needs: for an op, what it needs in place of the values that it reads.
        made: adds the op that makes what is needed of a value.
        made_by: the pass of the ops that are added.
        bodies: what ops compute from now on, where that changes.
        constants: the values that constants have from now on.
    """
    builder = Builder(program, made_by=made_by)
    for op in program.ops:
        mine = needs.get(op, {})
        met = {v: builder.once((v, need), partial(made, builder, v, need)) for v, need in mine.items()}
        read = tuple(met.get(v, v) for v in op.inputs)
        builder.append(replace(op, inputs=read, body=(bodies or {}).get(op, op.body)))
    return replace(program, ops=builder.ops, constants={**program.constants, **(constants or {})})


def times(builder: Builder, v: Variable, factor: float) -> Variable:
    """A value times a number, as an op of the forward pass."""

    def multiply(x: Any) -> list[Any]:
        whole = jnp.issubdtype(x.dtype, np.integer) and float(factor).is_integer()
        return [x * jnp.asarray(factor).astype(x.dtype) if whole else (x * factor).astype(x.dtype)]

    return builder.behind(v, SCALE, multiply, f"scaled({v.name})", made_by=Pass.FORWARD)
