"""A Program for one device as one that runs on several cores, under the same names.

``replicate`` makes it, and proves what comes of the parts of a batch. What it warns of is refused here: who
asks for cores asks for speed, not for another training.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace

from onward.core.check import check
from onward.core.errors import GraphError, TraceError
from onward.core.placement import equal_variables, whole_shape
from onward.core.program import Program, Variable
from onward.core.walk import substitute
from onward.core.words import Placement
from onward.develop.watch.watch import watching_of
from onward.distribute.merges import Bucketed
from onward.distribute.replicate import replicate

_ANOTHER = (
    "compile: on {count} cores, each with its part of the data cut along the first axis, it would be another "
    "training. Let that axis be the one of the examples, or leave out cores=. As replicate says it: {seen}"
)
_NOT_TRACED = (
    "compile: on {count} cores each takes {part} of the {rows} rows of {names}, cut along the first axis, "
    "and of these nothing can be traced. Let the first axis of all data be the one of the examples, or "
    "leave out cores=. {seen}"
)


def over_cores(program: Program, count: int, rows: int, fetch: Sequence[str] = ()) -> Program:
    """The Program replicated over cores, whose results, gradients and state are named as before.

    Adds collectives, changes what each core computes to its part of the batch.

    Raises:
        GraphError: what one device computes cannot be had from the parts of its batch.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.mean(x @ w), jnp.ones(3), jnp.ones((8, 3)))
        >>> on_two = over_cores(program, 2, 8)
        >>> on_two["x"], on_two.loss.name == program.loss.name
        (Variable('x', float32[4,3], data), True)
    """
    if watching_of(program):
        raise GraphError(
            f"compile: {program.name!r} is watched, and each core would see its part of the batch. Compile "
            "it for one device, or without watch."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        try:
            local = replicate(program, count, Bucketed())
        except UserWarning as seen:
            raise GraphError(_ANOTHER.format(count=count, seen=seen)) from None
        except TraceError as seen:
            names = ", ".join(repr(v.name) for v in program.inputs if v.shape[:1] == (rows,))
            words = _NOT_TRACED.format(count=count, part=rows // count, rows=rows, names=names, seen=seen)
            raise GraphError(words) from seen
    same = dict(_corresponding(program, local))
    _expect_fetched(program, fetch, set(same))
    made = _named(local, same)
    _expect_as_one(program, made, rows)
    return check(made)


def _corresponding(whole: Program, local: Program) -> Iterator[tuple[str, Variable]]:
    """The name of each result, gradient and next state, and the Variable that it is on several cores."""
    yield from zip((v.name for v in whole.outputs), local.outputs, strict=True)
    found = {p.name: g for p, g in local.gradients}
    yield from ((g.name, found[p.name]) for p, g in whole.gradients)
    following = {old.name: new for old, new in local.next_state.items()}
    yield from ((new.name, following[old.name]) for old, new in whole.next_state.items())


def _expect_fetched(program: Program, fetch: Sequence[str], same: set[str]) -> None:
    """Raise ``GraphError`` for what is fetched and differs from core to core."""
    given = {v.name for v in program.state}
    if wrong := [name for name in fetch if name not in same and name not in given]:
        raise GraphError(
            f"compile: fetch has {wrong[0]!r}, of which each core has something else. Return it beside the "
            "loss (has_aux=True), where it is put together; or compile for one device."
        )


def _named(local: Program, same: dict[str, Variable]) -> Program:
    """The Program with these names for these Variables; what had one of them gives it up."""
    renamed = {v: replace(v, name=name) for name, v in same.items() if v.name != name}
    if len(renamed) < sum(v.name != name for name, v in same.items()):
        raise GraphError(
            f"compile: results of {local.name!r} are one on several cores. Compile for one device."
        )
    for name in [v.name for v in renamed.values()]:
        former = local.variables.get(name)
        if former is not None and former not in renamed:
            renamed[former] = replace(former, name=f"{name} on a core")
    return substitute(local, renamed)


def _expect_as_one(program: Program, made: Program, rows: int) -> None:
    """Raise ``GraphError`` unless results and state are of one device: the same, or a row an example."""
    equal = equal_variables(made)
    for theirs, mine in zip(program.outputs, made.outputs, strict=True):
        is_joined = mine.placement is Placement.SHARDED and theirs.shape[0] == rows
        if not (mine in equal or is_joined) or whole_shape(mine, made.replicas) != theirs.shape:
            raise GraphError(
                f"compile: the result {theirs.name!r} ({theirs.type}) cannot be put together of what each "
                "core has of it. Let the first axis of a result be that of the examples, once; or compile "
                "for one device."
            )
    kept = [(v.name, whole_shape(v, made.replicas), v.dtype) for v in made.state]
    if kept != [(v.name, v.shape, v.dtype) for v in program.state]:
        raise GraphError(f"compile: {program.name!r} would keep another State on several cores.")
