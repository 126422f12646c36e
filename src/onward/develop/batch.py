"""Which data is as long as the batch, its types at another length, and the words for a batch filled up."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from onward.core.jaxprs.equations import Type
from onward.core.program import Program, Variable
from onward.core.walk import Where, select

WEIGHT = "example_weight"
"""The data that says how much each example counts, unless another name is given."""


def batch_names(
    program: Program, whole: Iterable[Where], weight: str, fixed: Collection[str]
) -> tuple[str, ...]:
    """The names of the data that is cut with the batch: whatever is as long as the first array of it.

    A raw random key is not, which nothing else is as long as. ``whole`` and what is declared with a length of
    its own (``fixed``) are not; if there is a ``weight``, its length is that of the batch.
    """
    kept = set(select(program.inputs, whole, "whole"))
    arrays = [v for v in program.inputs if v.shape and v not in kept and v.name not in fixed]
    lengths = [v.shape[0] for v in arrays]
    rows = [v for v in arrays if not v.may_be_key or lengths.count(v.shape[0]) > 1] or arrays
    leader = next((v for v in arrays if v.name == weight), rows[0] if rows else None)
    return tuple(v.name for v in arrays if leader is not None and v.shape[0] == leader.shape[0])


def another_batch(program: Program, split: Collection[str], unit: int) -> str:
    """In words, other data that may be the batch where so many parts do not divide that which is cut."""
    divided = (v for v in program.inputs if v.shape and v.name not in split and not v.shape[0] % unit)
    other = next((v for v in divided if v.shape[0] and not v.may_be_key), None)
    leader = next(v.name for v in program.inputs if v.name in split)
    return f" If the batch is {other.name!r} ({other.type}): whole=[{leader!r}]." if other else ""


def rows_of_each(rows: int, parts: int, weight: str | None) -> int:
    """How many rows each of several parts gets: two at least where a ``weight`` lets them be filled up.

    Of one example JAX leaves out axes, so that the function would be another one.

    >>> rows_of_each(5, 4, None), rows_of_each(5, 8, "example_weight"), rows_of_each(8, 8, "example_weight")
    (2, 2, 1)
    """
    each = -(-rows // parts)
    return max(each, 2) if weight is not None and rows % parts else each


def data_types(program: Program, split: Collection[str], rows: int) -> tuple[Any, ...]:
    """The data arguments of the traced function by their types, with so many rows of what is split.

    What a pruned Program reads no more follows the batch if it is as long.
    """
    assert program.signature is not None
    read = set(program.inputs)
    lengths = {v.shape[0] for v in program.inputs if v.name in split}

    def follows(v: Variable) -> bool:
        return v.name in split or (v not in read and bool(v.shape) and v.shape[0] in lengths)

    def kind(v: Variable) -> Type:
        return Type((rows, *v.shape[1:]) if follows(v) else v.shape, v.dtype)

    return tuple(s.unflatten(map(kind, s.variables)) for s in program.signature.data)


def filled_up(name: str, rows: int, parts: str, whys: Sequence[tuple[str, str]]) -> str:
    """The warning for what is misled in a Program of this name, with a batch of so many rows."""
    (what, why), *others = whys
    more = f"; so are {' and '.join(other for other, _ in others)}" if others else ""
    return (
        f"{name}: {rows} examples are filled up with examples of weight 0 for {parts}, and {what} {why}, so "
        f"that it may differ from that of the {rows}{more}. Multiply what is summed of each example by its "
        "weight, and divide by the sum of the weights: jnp.sum(w * e) / jnp.sum(w). A batch that divides "
        "is not filled up."
    )
