"""The Program: a straight line of Ops over Variables, frozen, data without behaviour.

A Variable is given a value exactly once. An Op computes Variables from Variables. A Program lists
the Variables it is fed and the state it keeps, the Ops in order, what it returns, and which Variable
replaces each state Variable when the step is over. A transform never changes a Program; it returns
a new one that shares the Ops it left alone.

>>> import jax.numpy as jnp, onward as ow
>>> program = ow.trace(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3))
>>> program["w"]
Variable('w', float32[3], parameter)
>>> [op.type for op in program.ops]
['mul', 'reduce_sum']
"""

from __future__ import annotations

from onward.core.graph import (
    Applied,
    Code,
    Op,
    Origin,
    Phase,
    Program,
    Recipe,
    Target,
    programs_within,
    shown,
)
from onward.core.jaxprs.body import Body
from onward.core.jaxprs.reading import programs_in
from onward.core.show import listing, sentence
from onward.core.variable import SEED, Partition, Replicas, Variable

__all__ = [
    "SEED",
    "Applied",
    "Code",
    "Op",
    "Origin",
    "Partition",
    "Phase",
    "Program",
    "Recipe",
    "Replicas",
    "Target",
    "Variable",
    "programs_within",
]

# The data stands below the functions that tell of it, which are made known to it here.
shown.register(Program, listing)
shown.register(Op, sentence)
programs_within.register(Body, programs_in)
