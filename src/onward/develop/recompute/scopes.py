"""Recomputation by hand: everything within chosen name scopes, from the values that enter them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase

from onward.core.errors import GraphError, OnwardError, UnknownNameError, nearest
from onward.core.marks import CHUNK
from onward.core.program import Op, Program, Variable
from onward.core.source import function_name
from onward.core.words import Pass
from onward.develop.recompute.activations import Activations, may_run_again
from onward.develop.recompute.ladder import KeepPlan
from onward.develop.roll.roll import rolls_of

Scopes = str | Iterable[str] | Callable[[str], bool]


def plan_of(program: Program, scopes: Scopes, keep: Iterable[Variable]) -> KeepPlan:
    """The plan that keeps what is read outside of the scope that computes it.

    Raises:
        GraphError: such scopes are within a loop alone.
        UnknownNameError: no op of the forward pass stands in such a scope.
    """
    found = Activations(program, keep)
    inside = [_scope_of(op.scope, scopes) for op in found.forward]
    if not any(inside):
        raise _unknown(program, found, scopes)
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


def scopes_in_words(scopes: Scopes) -> str:
    """The scopes as an error message names them.

    >>> scopes_in_words("block_*"), scopes_in_words(["a", "b"]), scopes_in_words(str.isupper)
    ("'block_*'", "'a', 'b'", 'chosen by isupper')
    """
    if callable(scopes):
        return f"chosen by {function_name(scopes)}"
    return ", ".join(map(repr, [scopes] if isinstance(scopes, str) else scopes))


def nothing_again(program: Program, scopes: Scopes) -> str:
    """The message where nothing in these scopes is computed again, with the reason."""
    loops = (op for op in program.ops if op.type is CHUNK and op.made_by is Pass.FORWARD)
    chunks = next((op for op in loops if any(_scope_of(o.scope, scopes) for o in (op, *_inner([op])))), None)
    if chunks is not None:
        count = (chunks.primal or chunks.body).attributes["chunks"]
        why = (
            f"They are in {count} chunks{chunks.at}, a loop that keeps only what enters it and that the "
            "backward pass runs again as it is. Leave them out."
        )
    elif fixed := _fixed(program, scopes):
        why = (
            f"{fixed[0].type}{fixed[0].at} reads nothing that the step is given, so that it is the same in "
            "each step and counts as a constant. Feed what it is computed of, such as the random key."
        )
    elif rolls_of(program):
        why = "In layers that are one loop a budget chooses: recompute(program, 0.5)."
    else:
        why = (
            "The backward pass reads nothing of them but what enters or leaves a scope, which is kept. "
            "Choose scopes of several ops, or let a budget choose: recompute(program, 0.5)."
        )
    return (
        f"recompute: nothing in the scopes {scopes_in_words(scopes)} of {program.name!r} is kept that could "
        f"be computed again. {why}"
    )


def _fixed(program: Program, scopes: Scopes) -> list[Op]:
    """The ops in these scopes that make, of constants alone, what the backward pass reads."""
    found = Activations(program)
    inside = (op for op in found.forward if _scope_of(op.scope, scopes) and may_run_again(op))
    return [
        op for op in inside if not found.read.isdisjoint(op.outputs) and found.depends.isdisjoint(op.outputs)
    ]


def _unknown(program: Program, found: Activations, scopes: Scopes) -> OnwardError:
    """The error for scopes in which no op stands, or only ops within a loop."""
    if any(_scope_of(op.scope, scopes) for op in _inner(found.forward)):
        return GraphError(nothing_again(program, scopes))
    names = {prefix for op in found.forward for prefix in _prefixes(op.scope)}
    word = scopes if isinstance(scopes, str) else scopes_in_words(scopes)
    return UnknownNameError(
        f"recompute: no op of {program.name!r} stands in a scope {word}. {nearest(word, names)} "
        "jax.named_scope opens one."
    )


def _inner(ops: Iterable[Op]) -> Iterator[Op]:
    """The ops within these: those of the turns of loops."""
    return (op for outer in ops for part in outer.subprograms.values() for op in part.ops)


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
