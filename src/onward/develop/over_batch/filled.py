"""Whether a batch that is filled up with examples of weight 0 gives what its own examples would.

It does where every sum over examples is of numbers that were multiplied by the weights, or chosen by them,
and no number of examples that the function was traced with is read, as a mean does.

>>> import jax.numpy as jnp, onward as ow
>>> from onward.develop.over_batch.walk import follow
>>> def losses(w, x, example_weight):
...     each = (x @ w) ** 2
...     return jnp.mean(each * example_weight), jnp.sum(each), jnp.sum(each * example_weight)
>>> traced = [ow.trace(losses, jnp.ones(3), jnp.ones((n, 3)), jnp.ones(n)) for n in (8, 4)]
>>> following = follow(*traced, 2, {"x", "example_weight"})
>>> for what, why in misled(traced[1], following, "example_weight"):
...     print(what, why)
the result 'div' is divided by the number of rows
the result 'reduce_sum_1' adds up examples without their weight
"""

from __future__ import annotations

from onward.core.program import Program, Variable
from onward.core.walk import ancestors
from onward.develop.over_batch.known import Following, How

_COUNTED = "is divided by the number of rows"
_PLAIN = "adds up examples without their weight"


def misled(part: Program, following: Following, weight: str) -> tuple[tuple[str, str], ...]:
    """The loss and results that are other numbers where the batch is filled up, in words, and why.

    Args:
        part: the forward Program of a part of the batch.
        following: how it follows that of the whole.
        weight: the name of the data that says how much each example counts.
    """
    results = dict.fromkeys([*filter(None, [part.loss]), *part.outputs])
    whys = {v: _why(part, following, weight, v) for v in results if v in following.found}
    return tuple(
        ("the loss" if v is part.loss else f"the result {v.name!r}", why) for v, why in whys.items() if why
    )


def _why(part: Program, following: Following, weight: str, result: Variable) -> str:
    needed = ancestors(part, [result])
    weighed = {part[weight]} if weight in part else set()
    for op in part.ops:
        rows = [v for v in op.inputs if following.found[v].kind is How.ROWS]
        is_sum = any(following.found[v].kind is How.MEAN for v in op.outputs)
        if not weighed.isdisjoint(rows):
            weighed.update(v for v in op.outputs if following.found[v].kind is How.ROWS)
        elif rows and is_sum and not needed.isdisjoint(op.outputs):
            return _PLAIN
        if op in following.counted and not needed.isdisjoint(op.outputs):
            return _COUNTED
    return ""
