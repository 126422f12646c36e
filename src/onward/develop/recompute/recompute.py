"""Less memory for more arithmetic: activations that the backward pass computes again.

    recompute(program, budget=0.5)

The activations to keep are chosen so that the compiled step takes no more temporary memory than the budget,
with the least arithmetic done twice; what is not kept is computed again just before the backward pass needs
it.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax
import numpy as np

from onward.core.amounts import whole_bytes
from onward.core.check import expect_program
from onward.core.cost import size
from onward.core.errors import ArgumentError, GraphError
from onward.core.marks import ACCUMULATE, CHUNK
from onward.core.placement import expect_no_axis
from onward.core.program import Program, Variable
from onward.core.walk import Where, listed, producers, select
from onward.core.words import Pass
from onward.develop.recompute.activations import where
from onward.develop.recompute.lean import lean
from onward.develop.recompute.loops import is_recomputed
from onward.develop.recompute.measure import compiled, estimated
from onward.develop.recompute.replay import is_replayable
from onward.develop.recompute.report import again_ops
from onward.develop.recompute.scopes import Scopes, nothing_again, plan_of
from onward.develop.recompute.search import Rungs
from onward.develop.roll.roll import roll as rolled
from onward.develop.roll.roll import roll_where_worth, rolls_of


def recompute(
    program: Program,
    budget: int | float | str | None = None,
    *,
    scopes: Scopes | None = None,
    keep: Where | Iterable[Where] = (),
    roll: bool | None = None,
) -> Program:
    """Keep fewer activations for the backward pass, and compute the others again when it needs them.

    Gradients stay what they are. Ops are added, behind an ``optimization_barrier`` that waits for the
    gradient which arrives, so that XLA neither merges both computations nor begins the second one early. Ops
    with effects and collectives are never run twice; random draws are, and give the same numbers. What
    ``jax.checkpoint`` in the function already computes again stays as it is.

    With a budget the Program is compiled up to eight times, to find the choice that does the least arithmetic
    twice and fits; a smaller budget keeps part of what a larger one keeps. The choice becomes part of the
    recipe: for another batch, and under transforms that come later, it holds by name and is not searched
    again.

    Args:
        program: a Program with a backward pass, not yet accumulated nor replicated: these come after.
        budget: the temporary memory of the compiled step: bytes, a whole number or such as ``"12GB"``, or a
            fraction between 0 and 1 of what it takes if everything is kept.
        scopes: instead of a budget, the name scopes to recompute from what enters them: a pattern
            (``"block_*"``), several, or a predicate of the scope's name.
        keep: what is kept whatever the budget, by name, pattern or Variable, such as values named by
            ``jax.ad_checkpoint.checkpoint_name``.
        roll: make repeated layers one loop first; what is computed within a layer has no name of its own
            then. None: where ``compile`` would do so, unless ``scopes`` or ``keep`` name such values.

    Raises:
        ArgumentError: neither or both of budget and scopes, or a budget that is no such number.
        GraphError: no backward pass, recomputed already, accumulated or replicated; nothing in the scopes
            could be computed again; or nothing fits the budget: it says the least that was reached and what
            holds it.
        UnknownNameError: ``scopes`` or ``keep`` that names nothing.

    Source: Chen et al., Training deep nets with sublinear memory cost, 2016; Jain et al., Checkmate, 2020.

    Example:
        >>> import jax, jax.numpy as jnp, onward as ow
        >>> def loss(w, x):
        ...     with jax.named_scope("block"):
        ...         h = jnp.tanh(jnp.sin(x @ w))
        ...     return jnp.sum(h)
        >>> program = ow.SGD(0.1).minimize(loss, jnp.ones((3, 3)), jnp.ones((4, 3)))
        >>> less = recompute(program, scopes="block")
        >>> [name for name in less.variables if name.startswith("again")][:2]
        ['again(block/dot_general)', 'again(block/sin)']
    """
    _expect_fit(program)
    if roll is None and scopes is None and not keep and is_replayable(program):
        program, _ = roll_where_worth(program)
    elif roll:
        program = rolled(program, keep)
    kept = _kept(program, keep)
    if (budget is None) == (scopes is None):
        raise ArgumentError("recompute takes one of the two: a budget, or scopes to recompute.")
    if scopes is not None:
        return _in_scopes(
            program, scopes if isinstance(scopes, str) or callable(scopes) else tuple(scopes), kept
        )
    return _within(program, _checked(budget), kept)


def _in_scopes(program: Program, scopes: Scopes, kept: tuple[Variable, ...]) -> Program:
    """The Program that computes again what is in these scopes."""
    result = plan_of(program, scopes, kept).applied(program)
    again = again_ops(result)
    in_chunks = [op for op in again if op.type is CHUNK]  # its inputs are handed on, nothing is computed
    numbers = [op for op in again if any(v.is_float for v in op.outputs)]
    is_nothing = not again or len(numbers) == len(in_chunks) > 0
    if is_nothing or (rolls_of(program) and not is_recomputed(result)):
        raise GraphError(nothing_again(program, scopes))
    return result


def _within(program: Program, budget: int | float, kept: tuple[Variable, ...]) -> Program:
    """The Program that fits the budget at the least effort."""
    rungs = Rungs(program, kept)
    limit = budget if isinstance(budget, int) else int(budget * rungs.temporary(0))
    if rolls_of(program) and not kept and jax.default_backend() == "cpu":
        usual = lean(program)  # which is faster than what keeps more
        if compiled(usual) <= limit:
            return usual
    fitting = rungs.first_within(limit)
    if fitting is None:
        raise GraphError(_too_little(program, limit, rungs))
    return rungs.program(fitting)


def _too_little(program: Program, limit: int, rungs: Rungs) -> str:
    """The error message for a limit that is too low: the least memory reached, and what holds it."""
    least = rungs.least()
    peak = estimated(rungs.program(least))
    makers = producers(rungs.program(least))
    if rungs.temporary(least) >= rungs.temporary(0):
        return (
            f"recompute: {program.name!r} takes {rungs.temporary(0):,} bytes of temporary memory, and "
            "computing "
            f"activations again frees none of it; {limit:,} were allowed. Feed smaller batches: "
            "accumulate(program, steps)."
        )
    shown = (f"{v.name!r}{where(makers.get(v))} {size(v):,} bytes" for v in peak.holders[:4])
    return (
        f"recompute: {program.name!r} does not fit {limit:,} bytes of temporary memory. As it is it takes "
        f"{rungs.temporary(0):,}; the least that was reached is {rungs.temporary(least):,}. There most is "
        f"held by {', '.join(shown)}. Give it at least that budget, or smaller batches: "
        "accumulate(program, steps)."
    )


def _kept(program: Program, keep: Where | Iterable[Where]) -> tuple[Variable, ...]:
    """The values chosen to be kept; for one that only names another value, the other as well."""
    if not (wanted := listed(keep)):
        return ()
    made = producers(program)
    forward = [v for op in program.ops if op.made_by is Pass.FORWARD for v in op.outputs]
    chosen = select(forward, wanted, "keep")
    named = (made[v].inputs[0] for v in chosen if made[v].primitive.names)
    return tuple(dict.fromkeys((*chosen, *(v for v in named if v in made))))


def _checked(budget: int | float | str | None) -> int | float:
    count = whole_bytes(budget)
    if count is not None and count >= 2:
        return count
    if isinstance(budget, float | np.floating) and 0 < budget < 1:
        return float(budget)
    raise ArgumentError(
        f"recompute: budget is {budget!r}; expected bytes above 1, a whole number or such as '12GB', or a "
        "fraction between 0 and 1 of the temporary memory without it, such as 0.5."
    )


def _expect_fit(program: Program) -> None:
    expect_program(program, "recompute")
    name = program.name
    made = {v for op in program.ops if op.made_by is Pass.FORWARD for v in op.outputs}
    if any(op.type is ACCUMULATE for op in program.ops):
        raise GraphError(
            f"Program {name!r} is accumulated: its forward and backward pass are one op. Recompute first: "
            "accumulate(recompute(program, ...), steps)."
        )
    expect_no_axis(program, "recompute")
    if program.replicas is not None:
        raise GraphError(
            f"Program {name!r} is replicated for {program.replicas.count} devices. Recompute first: "
            f"replicate(recompute(program, ...), {program.replicas.count})."
        )
    if not any(op.made_by is Pass.BACKWARD and not made.isdisjoint(op.inputs) for op in program.ops):
        raise GraphError(
            f"Program {name!r} has no backward pass that reads activations. Derive it first: "
            "recompute(optimizer.minimize(loss, ...), budget)."
        )
    if is_recomputed(program):
        raise GraphError(f"Program {name!r} is recomputed already: give one budget, or all scopes at once.")
