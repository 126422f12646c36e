"""Recomputation by hand: everything within chosen name scopes, from the values that enter them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from onward.core.errors import UnknownNameError, nearest
from onward.core.program import Program, Variable
from onward.develop.recompute.activations import Activations
from onward.develop.recompute.ladder import KeepPlan

Scopes = str | Iterable[str] | Callable[[str], bool]


def plan_of(program: Program, scopes: Scopes, keep: Iterable[Variable]) -> KeepPlan:
    """The plan that keeps what is read outside of the scope that computes it.

    Raises:
        UnknownNameError: no op of the forward pass stands in such a scope.
    """
    found = Activations(program, keep)
    inside = [_scope_of(op.scope, scopes) for op in found.forward]
    if not any(inside):
        names = {prefix for op in found.forward for prefix in _prefixes(op.scope)}
        word = scopes if isinstance(scopes, str) else repr(scopes)
        raise UnknownNameError(
            f"recompute: no op of {program.name!r} stands in a scope {word}. {nearest(str(word), names)} "
            "jax.named_scope opens one."
        )
    made = {v: scope for op, scope in zip(found.forward, inside, strict=True) for v in op.outputs}
    leaving = {
        v for op, scope in zip(found.forward, inside, strict=True) for v in op.inputs if made.get(v) != scope
    }
    chosen = {*keep, *leaving, *(v for v in found.read if not made[v])}
    begins = [
        op.outputs[0].name
        for i, op in enumerate(found.forward)
        if op.outputs and (i == 0 or inside[i] != inside[i - 1])
    ]
    return KeepPlan(tuple(v.name for v in found.position if v in chosen), tuple(begins))


def _scope_of(scope: str, scopes: Scopes) -> str:
    """The outermost scope around an op that is chosen; empty if none is."""
    return next((prefix for prefix in _prefixes(scope) if _is_chosen(prefix, scopes)), "")


def _is_chosen(scope: str, scopes: Scopes) -> bool:
    if callable(scopes):
        return scopes(scope)
    return any(fnmatchcase(scope, pattern) for pattern in ([scopes] if isinstance(scopes, str) else scopes))


def _prefixes(scope: str) -> list[str]:
    parts = scope.split("/") if scope else []
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]
