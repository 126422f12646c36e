"""``compare``: two Programs on the same numbers, and the first op that makes something else of them.

>>> import jax.numpy as jnp, onward as ow
>>> def loss(w, x):
...     return jnp.mean(jnp.tanh(x * w) ** 2)
>>> def other(w, x):
...     return jnp.mean(jnp.tanh(x * w) ** 3)
>>> w, x = jnp.arange(1.0, 4.0), jnp.ones((6, 3))
>>> a, b = (ow.SGD(0.1).minimize(f, w, x) for f in (loss, other))
>>> found = compare(a, b, w, x)
>>> found.equal, found.op.type, found.before.attributes["y"], found.after.attributes["y"]
(False, 'integer_pow', '2', '3')
>>> compare(a, ow.accumulate(a, 3), w, x).equal
True
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from onward.core.errors import ArgumentError
from onward.core.program import Program
from onward.core.structure import describe
from onward.develop.mixed.mixed_precision import held_in, lowered
from onward.execute.pieces import Compiled
from onward.execute.state import State
from onward.execute.step import Step
from onward.explain.compare.beside import SideBySide
from onward.explain.compare.found import Comparison
from onward.explain.compare.rounding import epsilon_of
from onward.explain.compare.search import PartingSearch, whose_ops_run
from onward.explain.compare.values import AllValues, begun_alike, count_of, is_by_name, state_of


def compare(
    a: Program | Step,
    b: Program | Step,
    state: Any,
    /,
    *batch: Any,
    other_state: Any = None,
    precision: str | None = None,
) -> Comparison:
    """Run two Programs on the same numbers, and name the first op that makes something else of them.

    The Programs may be one before and after a transform, of one device and of several, in two precisions,
    ours and one that ``inspect`` opened, or loaded from files. Values are paired by name, structure and what
    they are, else by their numbers. Each op of one is run on what its twin in the other read: what it gives
    may differ from what the twin gave by the rounding of its dtype, of its sums as long as they are, and by
    what the rounding of what it read makes of these very numbers. What transforms mean to compute otherwise
    is not blamed unless results, the loss, gradients or the next state differ.

    Loops are compared by what leaves them. Of two Programs from files neither has ops that can be run alone:
    their values are compared, with a thousandth of the largest number as the bound.

    Args:
        a: a Program, or what ``compile`` made of one.
        b: another.
        state: before the step: a State or a dict of values by name, which both take; or what ``init`` takes,
            from which each begins the rest of its state. It stays usable.
        batch: the data of one step, as a step takes it, over all devices together.
        other_state: that of b, if it is not that of a by the same names.
        precision: a dtype whose rounding is admitted throughout, such as ``"bfloat16"``; that of
            ``mixed_precision`` where one of the Programs is made so.

    Returns:
        A ``Comparison``: ``found.equal``, ``found.op``, ``found.line``; it prints as a page.

    Raises:
        ArgumentError: no Program, or two of several devices, of which one has others than the other.
        StateError: a State that was given to a step, or state that nothing gives.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> def loss(w, x):
        ...     return jnp.mean(jnp.tanh(x * w) ** 2)
        >>> a = ow.Adam(0.1).minimize(loss, jnp.ones(3), jnp.ones((6, 3)))
        >>> found = compare(a, ow.accumulate(a, 3), jnp.ones(3), jnp.ones((6, 3)))
        >>> found.equal, bool(found)
        (True, True)

    Source: bounds by Higham and Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019.
    """
    both = ComparedPrograms(a, b, batch, precision)
    return both(*both.states(state, other_state), batch)


class ComparedPrograms:
    """Two Programs compiled to be compared on any number of steps."""

    def __init__(
        self, a: Program | Step, b: Program | Step, batch: Sequence[Any], precision: str | None = None
    ) -> None:
        programs = [_program(x) for x in (a, b)]
        _expect_comparable(*programs)
        compiled: Compiled = {}
        self.a, self.b = (AllValues(p, batch, compiled) for p in programs)
        self.is_swapped = whose_ops_run(self.a.program, self.b.program)
        _expect_float(precision)
        dtypes = [precision] if precision else [d for p in programs for d in _low(p)]
        admitted = [jnp.dtype(held_in(d)) for d in dtypes]
        self.epsilon = max(map(epsilon_of, admitted), default=0.0)
        self.rounding = _coarsest([*admitted, *_computed_in(self.a.program), *_computed_in(self.b.program)])

    def states(self, state: Any, other: Any = None) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The state of both before the first step, by name."""
        mine = state_of(self.a.program, state, "a")
        is_begun = isinstance(state, State) or is_by_name(self.a.program, state)
        theirs = other if other is not None else mine if is_begun else state
        begun = begun_alike(self.a.program, self.b.program, mine)
        return mine, state_of(self.b.program, theirs, "b", begun)

    def __call__(
        self,
        mine: Mapping[str, Any],
        theirs: Mapping[str, Any],
        batch: Sequence[Any],
        step: int | None = None,
    ) -> Comparison:
        """Compare them on one step."""
        of_a, of_b = self.a(mine, batch), self.b(theirs, batch)
        self.following = self.a.following(of_a), self.b.following(of_b)
        a, b = self.a.program, self.b.program
        sides = (b, a, of_b, of_a) if self.is_swapped else (a, b, of_a, of_b)
        verdict = PartingSearch(SideBySide(*sides, self.epsilon), begins=not step).run()
        return Comparison(a, b, verdict, self.is_swapped, step, self.rounding)


def _program(given: Program | Step) -> Program:
    if not isinstance(given, Step | Program):
        raise ArgumentError(
            f"compare was given {describe(given)}; expected two Programs, or steps that compile made: "
            "compare(a, b, state, *batch). inspect(step, *arguments) opens somebody else's step."
        )
    return given if isinstance(given, Program) else given.program


def _expect_float(precision: str | None) -> None:
    """Raise ``ArgumentError`` for a word that names no dtype of floats."""
    try:
        is_float = precision is None or jnp.issubdtype(jnp.dtype(held_in(precision)), jnp.floating)
    except (TypeError, ValueError):
        is_float = False
    if not is_float:
        raise ArgumentError(
            f"compare: precision is {describe(precision)}; expected a dtype of floats by its name, such as "
            "'bfloat16', 'float16' or 'float32'."
        )


def _expect_comparable(a: Program, b: Program) -> None:
    counts = count_of(a), count_of(b)
    if counts[0] != counts[1] and a.replicas is not None and b.replicas is not None:
        raise ArgumentError(
            f"compare was given Programs for {counts[0]} and for {counts[1]} devices; expected the same "
            "number, or one that is not replicated. Compare each with the Program before replicate."
        )


def _low(program: Program) -> list[str]:
    """The dtypes that mixed_precision was asked for."""
    steps = () if program.recipe is None else program.recipe.of(lowered)
    return [str(step.arguments[0]) for step in steps if step.arguments]


def _computed_in(program: Program) -> set[Any]:
    """The dtypes that ops give."""
    return {v.dtype for op in program.ops for v in op.outputs}


def _coarsest(dtypes: Sequence[Any]) -> str:
    """The name of the dtype that rounds most, where that is more than float32 does; else nothing."""
    coarsest = max(dtypes, key=epsilon_of, default=jnp.dtype(jnp.float32))
    return str(coarsest) if epsilon_of(coarsest) > epsilon_of(jnp.float32) else ""
