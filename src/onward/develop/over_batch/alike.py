"""Whether a function computes the same for another number of examples, but for how many there are.

>>> import jax, jax.numpy as jnp, onward as ow
>>> def loss(w, x):
...     return jnp.mean(jax.lax.top_k(x @ w, min(len(x), 3))[0])
>>> part, whole, other = (ow.trace(loss, jnp.ones((5, 4)), jnp.ones((n, 5))) for n in (4, 8, 2))
>>> has_same_ops(part, other), otherwise(zip(part.ops, whole.ops, other.ops), Fraction(2, 4)).type
(True, 'top_k')
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from onward.core.program import Op, Program


def has_same_ops(program: Program, other: Program) -> bool:
    """Whether two Programs have ops of the same types, with results of the same names."""
    return _lines(program) == _lines(other)


def otherwise(ops: Iterable[tuple[Op, Op, Op]], longer: Fraction) -> Op | None:
    """The first op of which a number or a length is another that several times as many do not change.

    Args:
        ops: those of a part, of several times as many examples, and of another length.
        longer: how many times as long as the part that is.
    """
    for same in ops:
        for calls in zip(*(op.body.calls_within for op in same), strict=False):
            params = [tuple(call.params.values()) for call in calls]
            sizes = [tuple(t.shape for t in call.results) for call in calls]
            if not _goes_on(params) or not _goes_on(sizes, longer):
                return same[0]
        if not _goes_on([tuple(map(_number, op.body.numbers)) for op in same]):
            return same[0]
        for run in zip(*(op.subprograms.values() for op in same), strict=False):
            if otherwise(zip(*(program.ops for program in run), strict=False), longer):
                return same[0]
    return None


def _number(literal: Any) -> Any:
    return None if literal is None else np.asarray(literal).item()


def _goes_on(same: Sequence[Any], longer: Fraction | None = None) -> bool:
    """Whether a number, or each of several, changes where it changes for twice as many examples.

    Of one example JAX leaves out axes, so that there are fewer.
    """
    mine, more, other = same
    if isinstance(mine, tuple):
        is_one_each = isinstance(other, tuple) and len(mine) == len(other)
        return not is_one_each or all(_goes_on(one, longer) for one in zip(mine, more, other, strict=True))
    if not isinstance(number := mine, int | float):
        return True
    return bool(other == number if number == more else longer is None or other == mine * longer)


def _lines(program: Program) -> list[tuple[str, tuple[str, ...]]]:
    return [(op.type, tuple(v.name for v in op.outputs)) for op in program.ops]
