"""What lies in memory while a step runs: one walk over its ops that counts what a compiler would keep.

``walk.liveness`` tells which Variables are alive behind each op; this tells which arrays exist for that, and
how long. A compiler writes far fewer arrays than a Program has Variables, by rules that hold on any device:

* a reshape, a name or a barrier is another view of the same array;
* arithmetic number by number that one reader of its kind (or a reduction) reads is done within that, and
  never written down; what is cheap to do twice, such as a broadcast, is done within each such reader;
* such arithmetic, a loop and a scatter write over an operand that nobody reads later, if it is as large;
* the next value of state is written over the old one, once that was read for the last time;
* what nobody reads is not computed.

An op whose body is several equations is looked into; a loop takes what its own turn takes at most.

>>> import jax.numpy as jnp, onward as ow
>>> program = ow.trace(lambda w, x: jnp.sum(jnp.exp(x @ w) * 2), jnp.ones((8, 8)), jnp.ones((4, 8)))
>>> lives = lifetimes(program)
>>> [(v.name, array.bytes) for array in lives.arrays for v in array.variables]
[('w', 256), ('x', 128), ('dot_general', 128), ('reduce_sum', 4)]
>>> lives.bytes[lives.peak]
516
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import jax

from onward.core.program import Program, Variable
from onward.core.steps import Step, Steps

_VIEWS = {"name", "optimization_barrier", "reshape", "squeeze", "expand_dims", "bitcast_convert_type", "copy"}
_CHEAP = {
    "abs", "add", "add_any", "and", "broadcast_in_dim", "clamp", "convert_element_type", "eq", "ge", "gt",
    "imag", "iota", "is_finite", "le", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pad", "real",
    "reduce_precision", "rev", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical",
    "sign", "slice", "square", "sub", "transpose", "xor",
}  # fmt: skip
_DEAR = {
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil", "cos", "cosh", "digamma",
    "div", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "integer_pow", "lgamma", "log", "log1p",
    "logistic", "nextafter", "pow", "rem", "round", "rsqrt", "sin", "sinh", "sqrt", "tan", "tanh",
}  # fmt: skip
_ARITHMETIC = _CHEAP | _DEAR
_REDUCTIONS = {f"reduce_{how}" for how in ("sum", "max", "min", "prod", "and", "or")} | {"argmax", "argmin"}
_OVER_OPERANDS = _ARITHMETIC | {"scan", "while", "cond", "dynamic_update_slice", "scatter", "scatter-add"}


@dataclass(eq=False)
class Array:
    """A piece of memory: who uses it, its bytes, and between which steps, both included, it is taken.

    What is there before the step begins at -1; what stays after it ends behind the last step.
    """

    variables: list[Variable]
    bytes: int
    begin: int
    end: int


@dataclass(frozen=True, eq=False)
class Lifetimes:
    """The arrays of a step.

    Attributes:
        program: what runs.
        steps: its ops, those of several equations taken apart.
        arrays: what lies in memory, in the order in which it comes there.
    """

    program: Program
    steps: tuple[Step, ...]
    arrays: tuple[Array, ...]

    @cached_property
    def bytes(self) -> tuple[int, ...]:
        """What is taken at each step, with what a loop takes within."""
        change = [0] * (len(self.steps) + 2)
        for array in self.arrays:
            change[max(array.begin, 0)] += array.bytes
            change[min(array.end, len(self.steps)) + 1] -= array.bytes
        taken = list(accumulate(change))
        return tuple(now + step.within for now, step in zip(taken, self.steps, strict=False)) or (taken[0],)

    @property
    def peak(self) -> int:
        """The step of most bytes, the first of several."""
        return max(range(len(self.bytes)), key=self.bytes.__getitem__)

    def alive(self, step: int) -> tuple[Array, ...]:
        """What lies in memory at a step, the largest first."""
        there = (array for array in self.arrays if array.begin <= step <= array.end and array.bytes)
        return tuple(sorted(there, key=lambda array: -array.bytes))
