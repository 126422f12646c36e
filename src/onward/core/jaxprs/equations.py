"""The parts of a jaxpr: equations, literals, and the jaxprs inside an equation."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.extend import core as jex

from onward.core.primitives.table import of
from onward.core.primitives.traits import Runs
from onward.core.source import is_library

Type = jax.ShapeDtypeStruct
_BY_NAME = (Runs.AGAIN, Runs.SCAN, Runs.WHILE)  # of which a function of the user may be the body
_JAXPRS = (jex.Jaxpr, jex.ClosedJaxpr)  # type: ignore[attr-defined, unused-ignore]


def close(jaxpr: Any, consts: Sequence[Any]) -> Any:
    """A closed jaxpr; since jax 0.11 that is a Jaxpr with its constants inside."""
    return jex.ClosedJaxpr(jaxpr, list(consts))  # type: ignore[attr-defined, unused-ignore]


def closed_of(jaxpr: Any) -> Any:
    """A jaxpr with its constants, of which an open one has none."""
    return jaxpr if hasattr(jaxpr, "consts") else close(jaxpr, [])


def is_jaxpr(value: Any) -> bool:
    """Whether it is a jaxpr, closed or not."""
    return isinstance(value, _JAXPRS)


def jaxprs_in(value: Any) -> list[Any]:
    """The jaxprs, closed, that a parameter of an equation is or holds."""
    values = value if isinstance(value, tuple | list) else (value,)
    return [closed_of(v) for v in values if is_jaxpr(v)]


def is_inlined(eqn: Any) -> bool:
    """Whether an equation only calls a function, whose equations may stand in its place."""
    return of(eqn.primitive.name).runs is Runs.CALL


def has_rule_of_its_own(eqn: Any) -> bool:
    """Whether an equation calls a ``custom_jvp`` or ``custom_vjp`` function."""
    return of(eqn.primitive.name).runs is Runs.RULE


def function_run_by(eqn: Any) -> str:
    """The name of the user's function that a loop or ``jax.checkpoint`` runs; empty for other equations."""
    if of(eqn.primitive.name).runs not in _BY_NAME:
        return ""
    told = [inner.jaxpr.debug_info for value in eqn.params.values() for inner in jaxprs_in(value)]
    mine = [d for d in told if d.func_filename and not is_library(d.func_filename)]
    if len(mine) != 1 or not mine[0].func_name.isidentifier():
        return ""
    name = mine[0].func_name
    return name if name != "__call__" else _class_called(eqn, mine[0].func_filename)


def _class_called(eqn: Any, file: str) -> str:
    """The name of the class in this file whose objects an equation calls, as the stacks within it tell."""
    tracebacks = (e.source_info.traceback for e in equations_within(eqn))
    codes = (code for t in tracebacks if t is not None for code in t.raw_frames()[0])
    called = (c.co_qualname for c in codes if c.co_name == "__call__" and c.co_filename == file)
    return next((name.split(".")[-2] for name in called if "." in name), "")


def equations_within(eqn: Any) -> Iterator[Any]:
    """The equations of the jaxprs that an equation runs, not those deeper."""
    return (e for value in eqn.params.values() for closed in jaxprs_in(value) for e in closed.jaxpr.eqns)


def called_by(eqn: Any) -> list[Any]:
    """The jaxpr that a call runs when nothing is differentiated."""
    return jaxprs_in(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")))


@cache
def nothing() -> Any:
    """A small closed jaxpr without names, for its source and debug info."""
    closed = jax.make_jaxpr(jax.lax.neg)(Type((), np.float32))
    return close(closed.jaxpr.replace(debug_info=closed.jaxpr.debug_info.with_unknown_names()), [])


def nowhere() -> Any:
    """A source_info without scope."""
    return nothing().jaxpr.eqns[0].source_info


def numbers_of(eqn: Any) -> tuple[Any, ...]:
    """For each operand of an equation the number that stands there; None for what is read."""
    return tuple(v.val if isinstance(v, jex.Literal) else None for v in eqn.invars)


def type_of(aval: Any) -> Type:
    """Shape and dtype, to trace another function with."""
    return Type(aval.shape, aval.dtype, weak_type=bool(getattr(aval, "weak_type", False)))


def shape_of(aval: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype, as a Variable has them."""
    return tuple(aval.shape), aval.dtype


def literal_value(literal: Any) -> Any:
    """The number that stands in an equation, in its dtype."""
    return np.asarray(literal.val, literal.aval.dtype)


def inputs_of(eqn: Any) -> list[Any]:
    """The operands of an equation, each once, without the numbers that stand there."""
    return list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, jex.Literal)))


def names_within(eqn: Any) -> Iterator[str]:
    """The names of the primitives in an equation, its own first, however deep."""
    yield eqn.primitive.name
    for inner in equations_within(eqn):
        yield from names_within(inner)


def results_within(eqn: Any) -> Iterator[Any]:
    """The types of what an equation gives, and of what those in it give, however deep."""
    yield from (v.aval for v in eqn.outvars)
    for inner in equations_within(eqn):
        yield from results_within(inner)


def size_of(eqn: Any) -> int:
    """How many equations there are in one, however deep, that run no others; at least 1."""
    return sum(map(size_of, equations_within(eqn))) or 1


def calls_custom_rule(eqn: Any) -> bool:
    """Whether a ``custom_jvp`` or ``custom_vjp`` function is called in it, however deep."""
    return has_rule_of_its_own(eqn) or any(map(calls_custom_rule, equations_within(eqn)))


def carry_of_scan(eqn: Any) -> tuple[int, int]:
    """At which operand begins what a loop carries, and how much it is."""
    (inner,) = jaxprs_in(eqn.params["jaxpr"])
    count = _of_equal_rank(eqn.outvars, inner.jaxpr.outvars)  # what is stacked has one axis more outside
    return _of_equal_rank(eqn.invars, inner.jaxpr.invars) - count, count


def _of_equal_rank(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    return sum(v.aval.ndim == w.aval.ndim for v, w in zip(outside, inside, strict=True))
