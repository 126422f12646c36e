"""``rewrite``: what a pattern finds in the forward pass is computed by something else.

    rewrite(program, pattern, replacement)

Both are small JAX functions of the same arguments. The gradient is derived of the replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from onward.core.check import expect_program
from onward.core.errors import ArgumentError, GraphError
from onward.core.jaxprs.equations import Type
from onward.core.program import Applied, Phase, Program
from onward.core.recipe import build, recipe_of, resumed, whole_types
from onward.core.structure import describe, is_number
from onward.core.transform import transform
from onward.core.walk import Where, meant, select
from onward.develop.rewrite.agree import expect_equal
from onward.develop.rewrite.match import Match, Nearest
from onward.develop.rewrite.pattern import Pattern
from onward.develop.rewrite.put import Rewriting, occurrences

Function: TypeAlias = Callable[..., Any]

_NOWHERE = "rewrite: nothing in {name!r} is computed as {patterns} does.{closest}{advice}"
_CLOSEST = " Closest is one with {fitting} of its {count} ops: {why}."
_ADVICE = (
    " print(program) shows what is there: the ops of the forward pass, not those of "
    "functions with a rule of their own, into which no pattern looks. Give several spellings as a list."
)


def rewrite(
    program: Program,
    pattern: Function | Sequence[Function],
    replacement: Function,
    *,
    like: Any = None,
    where: Where | Iterable[Where] | None = None,
    tolerance: float | None = None,
) -> Program:
    """The Program in which what a pattern computes is computed by a replacement.

    Pattern and replacement are JAX functions of the same arrays. The pattern is looked for in the forward
    pass as the function computes it, before precision, loops over layers and the like; in loops, branches and
    ``jax.checkpoint`` of the function as well: the same operations with the same parameters and numbers,
    wired alike, with the operands of sums and products in any order. Lengths and dtypes are those of the
    place where it is found: there both are traced again, so that a number may come from a length
    (``q.shape[-1] ** -0.5``). What else reads a value from between is in the way, and such a place stays as
    it is. The gradient is derived of the replacement, or is its own rule (``jax.custom_vjp``).

    Pattern and replacement are first run on random numbers of the types that are found, those of a batch of
    another length as well: results must agree, up to rounding or ``tolerance``, and gradients, but for those
    at zeros and ties. Arrays of more than 16 million numbers are compared at the lengths of ``like``. Bools
    are drawn with a True in each row, whole numbers that look something up as valid places.

    Args:
        program: a Program that was traced, at any stage.
        pattern: what is replaced; or several spellings, of which the first that fits is taken.
        replacement: takes what the pattern takes, and gives arrays of the types that it gives.
        like: what the pattern is called with, arrays of any lengths; float32 numbers, or arrays of one rank,
            unless given, which is enough for arithmetic number by number.
        where: the results to replace, by name (``matches_of`` tells it), pattern or predicate, if not all.
        tolerance: how far the numbers may differ, in parts of the largest of a result, if by more than
            rounding; ``math.inf`` where something else is meant to be computed, which is not compared then.

    Raises:
        ArgumentError: the replacement computes something else, or other types, or has no gradient; a pattern
            of no use; an empty ``where``.
        GraphError: the pattern occurs nowhere: it names the place that came closest.
        RecipeError: the Program was not traced, or its ops were changed by hand.
        TraceError: the pattern or the replacement cannot be traced with such arguments.
        UnknownNameError: ``where`` names nothing that was found.

    Example:
        >>> import jax, jax.numpy as jnp, onward as ow
        >>> def loss(w, x):
        ...     return jnp.sum(jnp.log(jnp.sum(jnp.exp(x @ w), axis=1)))
        >>> program = ow.trace(loss, jnp.ones((4, 3)), jnp.ones((2, 4)))
        >>> stable = ow.rewrite(
        ...     program,
        ...     lambda x: jnp.log(jnp.sum(jnp.exp(x), axis=1)),
        ...     lambda x: jax.nn.logsumexp(x, axis=1),
        ...     like=jnp.ones((2, 3)),
        ... )
        >>> step = ow.compile(stable)
        >>> _, out = step(step.init(jnp.ones((4, 3))), 100 * jnp.ones((2, 4)))
        >>> round(float(out.loss), 3)                            # the sum of exponentials would be inf
        802.197
    """
    expect_program(program, "rewrite")
    _expect_tolerance(tolerance)
    recipe = recipe_of(program, "to be rewritten", "Write it so in the function")
    patterns = _patterns(pattern, like)
    new = Pattern(replacement, patterns[0].types)
    new.expect_called_as(patterns[0])
    forward = build(recipe.until(Phase.ADAPT), whole_types(program))
    names, matches = _found(forward, patterns, where)
    check = _ReplacementCheck(tolerance)
    check.expect_equal(matches, new)
    functions = tuple(p.function for p in patterns)
    told = (functions, replacement, patterns[0].like, names, check)
    step = Applied(rewritten, told, {}, Phase.REWRITE)
    grown = recipe.including(step)
    return resumed(step(forward), grown, len(grown.until(Phase.ADAPT).steps), whole_types(program))


def matches_of(
    program: Program, pattern: Function | Sequence[Function], *, like: Any = None
) -> tuple[Match, ...]:
    """The places where ``rewrite`` would find a pattern: what it reads and gives there, and its ops.

    Example:
        >>> import jax, jax.numpy as jnp, onward as ow
        >>> program = ow.trace(lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2), jnp.ones((4, 3)), jnp.ones((2, 4)))
        >>> match, = ow.graph.matches_of(program, lambda x: jnp.tanh(x) ** 2)
        >>> [op.type for op in match.ops], match.inputs
        (['tanh', 'integer_pow'], (Variable('dot_general', float32[2,3], activation),))
    """
    expect_program(program, "matches_of")
    recipe = recipe_of(program, "to find patterns", "Trace the function")
    forward = build(recipe.until(Phase.ADAPT), whole_types(program))
    return tuple(occurrences(forward, _patterns(pattern, like), Nearest()))


@transform(phase=Phase.REWRITE)
def rewritten(
    program: Program,
    functions: Sequence[Function],
    replacement: Function,
    like: Any,
    names: Sequence[str],
    check: _ReplacementCheck,
) -> Program:
    """A forward Program with the replacement, of these results or all; what is not found stays as it is.

    Lengths that are new, such as those of another batch, are compared as the first ones were.
    """
    chosen = frozenset(names)

    def is_meant(match: Match) -> bool:
        return not chosen or match.name in chosen

    patterns = [Pattern(function, like) for function in functions]
    new = Pattern(replacement, patterns[0].types)
    check.expect_equal([m for m in occurrences(program, patterns, Nearest()) if is_meant(m)], new)
    return Rewriting(patterns, new, is_meant).of(program)


class _ReplacementCheck:
    """The comparisons that one call of ``rewrite`` has made: a batch that is as long needs no others.

    Args:
        tolerance: the part of the largest number by which results may differ.
    """

    def __init__(self, tolerance: float | None) -> None:
        self._tolerance = tolerance
        self._done: set[tuple[Any, ...]] = set()

    def expect_equal(self, matches: Sequence[Match], new: Pattern) -> None:
        """Raise unless the replacement computes what was found, at all of its types."""
        for old, types in {(match.pattern, match.types): None for match in matches}:
            key = id(old.function), *((t.shape, t.dtype) for t in types)
            if key not in self._done:
                expect_equal(old, new, [Type(t.shape, t.dtype) for t in types], self._tolerance)
                self._done.add(key)


def _patterns(given: Any, like: Any) -> tuple[Pattern, ...]:
    """Patterns of functions, each of which is of use."""
    functions = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not functions:
        raise ArgumentError("rewrite was given no pattern; expected a function of arrays, or several.")
    patterns = tuple(Pattern(function, like) for function in functions)
    for pattern in patterns:
        pattern.expect_whole()
    return patterns


def _found(
    program: Program, patterns: Sequence[Pattern], where: Where | Iterable[Where] | None
) -> tuple[tuple[str, ...], list[Match]]:
    """The occurrences that are meant, and the names of their results if not all are."""
    nearest = Nearest()
    matches = occurrences(program, patterns, nearest)
    if not matches:
        shown = " or ".join(pattern.name for pattern in patterns)
        close = _CLOSEST.format(**vars(nearest)) if nearest.fitting else ""
        raise GraphError(_NOWHERE.format(name=program.name, patterns=shown, closest=close, advice=_ADVICE))
    if (wanted := meant(where, "rewrite", "to replace all that is found")) is None:
        return (), matches
    named = {replace(match.outputs[0], name=match.name): match for match in matches}
    chosen = select(tuple(named), wanted, "rewrite, where")
    return tuple(v.name for v in chosen), [named[v] for v in chosen]


def _expect_tolerance(tolerance: Any) -> None:
    if tolerance is not None and not (is_number(tolerance) and tolerance >= 0):
        raise ArgumentError(
            f"rewrite: tolerance is {describe(tolerance)}; expected a part of the largest number, such "
            "as 0.01, or math.inf to compare nothing."
        )
