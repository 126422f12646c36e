"""Repeated layers become one loop over stacked parameters: what is compiled does not grow with depth.

    roll(optimizer.minimize(loss, params, *data))

In the forward pass each run of equal layers becomes ``stack`` ops, a ``scan`` and, where others read what
single layers made, ``unstack`` ops. Backward pass and update are derived of that again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from onward.core.check import expect_program
from onward.core.errors import GraphError, UnknownNameError
from onward.core.marks import ACCUMULATE, UNSTACK
from onward.core.names import Names
from onward.core.program import Applied, Phase, Program, Variable
from onward.core.recipe import recipe_of, resumed, whole_types
from onward.core.transform import transform
from onward.core.walk import Where, listed, prune, select
from onward.core.words import Pass
from onward.derive.backward import append_backward
from onward.develop.recompute.again import keeping
from onward.develop.roll.build import Layers
from onward.develop.roll.cost import Verdict, is_worth, worth_rolling
from onward.develop.roll.find import Accepts, find_runs
from onward.develop.roll.fold import with_loops
from onward.develop.roll.forward import forward_of, separable
from onward.develop.roll.line import line_of, returned_by
from onward.develop.roll.near import nothing_repeats
from onward.develop.roll.run import LayerRun
from onward.develop.watch.watch import watched

_RECOMPUTED = (
    "roll: the layers of {name!r} repeat, but recompute named the activations of each that are kept, and "
    "within a loop they have no names. Roll first: recompute(roll(program), budget)."
)


def roll(program: Program, keep: Where | Iterable[Where] = ()) -> Program:
    """The Program whose repeated layers are one loop each, over stacked parameters.

    Layers are found by comparing ops by type, attributes, types and wiring, so that no name and no hint is
    needed. What all layers read is given to the loop once, what each has of its own is stacked, what one
    hands to the next is carried; numbers in the code that differ, such as the rate of a dropout, are stacked
    as well. Layers within layers become loops within the loop. Parameters, their gradients, state and
    results are the same Variables as before. Ops with effects stay as they are; no loop reaches over them.

    Of what a layer computes, only what others read can still be fetched, and what ``keep`` names. That is for
    reading: its gradient, and what is done to it later, concern its readers outside of the loop alone.

    Args:
        program: a Program that was traced, at any stage, replicated or not.
        keep: activations that should exist: names, patterns, Variables or predicates.

    Raises:
        GraphError: nothing repeats, or only layers of which ``recompute`` keeps some activations by name; or
            ``keep`` names the gradient of an activation within a layer.
        RecipeError: the Program was not traced, or its ops were changed by hand.
        UnknownNameError: ``keep`` names nothing.

    Source: Karp, Miller and Rosenberg, Rapid Identification of Repeated Patterns in Strings, Trees and
    Arrays, 1972, for the search.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> def loss(params, x):
        ...     for w in params:
        ...         x = x + jnp.tanh(x @ w)
        ...     return jnp.mean(x**2)
        >>> program = ow.trace(loss, [jnp.eye(4)] * 6, jnp.ones((2, 4)))
        >>> rolled = roll(program)
        >>> len(program.ops), [op.type for op in rolled.ops]
        (21, ['stack', 'scan', 'integer_pow', 'reduce_sum', 'div'])
        >>> [str(found) for found in rolls_of(rolled)]
        ['6 layers of 3 ops in one loop, 1 parameter of each stacked']
    """
    expect_program(program, "roll")
    return _again(program, tuple(listed(keep)), everything)


def everything(run: LayerRun) -> bool:
    """The rule by which each run becomes a loop."""
    return True


def roll_where_worth(program: Program, keep: Where | Iterable[Where] = ()) -> tuple[Program, Verdict]:
    """The Program with those layers rolled that are worth it, and what was found; see ``worth_rolling``.

    It comes back as it is where nothing is worth it, or where ``keep`` names what a loop could not hand out.

    Args:
        program: as for ``roll``.
        keep: as for ``roll``.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.trace(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3))
        >>> same, verdict = roll_where_worth(program)
        >>> same is program, verdict.reason
        (True, 'no layer repeats')
    """
    within = any(op.type is ACCUMULATE for op in program.ops)  # in there only a trace can tell
    verdict = Verdict(True, "layers within accumulate") if within else worth_rolling(program)
    if not verdict:
        return program, verdict
    try:
        return _again(program, tuple(listed(keep)), is_worth), verdict
    except GraphError as error:
        return program, Verdict(False, str(error).removeprefix("roll: "))


@dataclass(frozen=True)
class Rolled:
    """Layers that became one loop.

    Attributes:
        times: how many layers.
        ops: how many ops each has.
        parameters: how many parameters each has of its own, which are stacked.
        scope: the scope that they stand in, if it is one.
    """

    times: int
    ops: int
    parameters: int
    scope: str

    def __str__(self) -> str:
        of = f" of {self.scope}" if self.scope else ""
        ops, parameters = _counted(self.ops, "op"), _counted(self.parameters, "parameter")
        return f"{self.times} layers of {ops}{of} in one loop, {parameters} of each stacked"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def rolls_of(program: Program) -> tuple[Rolled, ...]:
    """List the layers of a Program that were rolled into loops; see ``roll``.

    Example:
        >>> import functools, jax.numpy as jnp, onward as ow
        >>> def loss(params, x):
        ...     return jnp.sum(functools.reduce(lambda h, w: h + jnp.tanh(h @ w), params, x))
        >>> program = ow.trace(loss, [jnp.eye(4)] * 6, jnp.ones((2, 4)))
        >>> ow.graph.rolls_of(ow.roll(program))[0].times
        6
    """
    expect_program(program, "rolls_of")
    found: list[Rolled] = []
    for op in program.ops:
        body = op.primal or op.body
        if isinstance(body, Layers):
            found.append(Rolled(body.times, body.period, body.parameters, body.scope))
        elif op.made_by is Pass.BACKWARD and "micro_batch" in op.subprograms:
            found.extend(rolls_of(op.subprograms["micro_batch"]))
    return tuple(found)


@separable
@transform(phase=Phase.ROLL)
def rolled(
    program: Program, keep: tuple[Where, ...], apart: tuple[Where, ...], accepts: Accepts = everything
) -> Program:
    """A forward Program with each run as a loop; as it is where nothing repeats.

    ``keep`` names what should exist, ``apart`` what should also be computed outside of every loop; either may
    name nothing here: a test Program lacks some of what is trained.
    """
    variables = tuple(program.variables.values())
    kept = returned_by(program) | chosen(variables, keep)
    return with_loops(program, kept, chosen(variables, apart), Names(program.variables), accepts)


def _again(program: Program, keep: tuple[Where, ...], accepts: Accepts) -> Program:
    """The Program derived again, with the forward pass rolled."""
    recipe = recipe_of(program, "with its layers rolled", "Write the loop yourself, with jax.lax.scan")
    wanted = select(tuple(program.variables.values()), keep, "roll, keep") if keep else ()
    forward = forward_of(program, recipe)
    later = recipe.steps[len(recipe.until(Phase.ROLL).steps) :]
    read, changed = _named_later(forward, later)
    names = tuple(v.name for v in wanted if v.name in forward.variables)
    step = Applied(rolled, ((*names, *read), changed, accepts), {}, Phase.ROLL)
    result = step(forward)
    if not any(isinstance(op.body, Layers) for op in result.ops):
        line = line_of(forward, returned_by(forward), frozenset())
        runs = find_runs(line)
        if runs.runs and recipe.of(keeping):
            raise GraphError(_RECOMPUTED.format(name=program.name))
        raise nothing_repeats(program.name, line, runs)
    folded = _folded(forward, result)
    grown = recipe.including(step)
    result = resumed(result, grown, len(grown.until(Phase.BACKWARD).steps), whole_types(program))
    _expect_kept(program, result, wanted, folded)
    return result


def _named_later(forward: Program, steps: Iterable[Applied]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of the activations but the loss, those that later transforms only read, and those they do more with."""
    computed = tuple(v for op in forward.ops for v in op.outputs if v is not forward.loss)
    read: set[str] = set()
    changed: set[str] = set()
    for step in steps:
        if step.function is append_backward:
            order = ("loss", "parameter_list", "no_grad_set")
            given = dict(zip(order, step.arguments, strict=False)) | dict(step.options)
            changed.update(v.name for v in chosen(computed, listed(given.get("no_grad_set", ()))))
            read.add(str(given.get("loss")))
        else:
            texts = (a for a in (*step.arguments, *step.options.values()) if isinstance(a, str | tuple))
            found = (name for text in texts for name in listed(text) if isinstance(name, str))
            (read if step.function in (prune, watched) else changed).update(found)
    names = [v.name for v in computed]
    return tuple(n for n in names if n in read), tuple(n for n in names if n in changed)


def _matching(variables: tuple[Variable, ...], choice: Where) -> tuple[Variable, ...]:
    """The Variables that are chosen, if there are any."""
    try:
        return select(variables, [choice], "roll")
    except UnknownNameError:
        return ()


def chosen(variables: tuple[Variable, ...], where: Iterable[Where]) -> frozenset[Variable]:
    """The Variables that are named; what names none of them is left out."""
    return frozenset(v for choice in where for v in _matching(variables, choice))


def _folded(forward: Program, result: Program) -> frozenset[str]:
    """The names of what is computed within a loop, and what of it is handed out by ``unstack``."""
    computed = {v for op in result.ops if op.type is not UNSTACK for v in op.outputs}
    return frozenset(v.name for op in forward.ops for v in op.outputs if v not in computed)


def _expect_kept(
    program: Program, result: Program, wanted: Iterable[Variable], folded: frozenset[str]
) -> None:
    """Raise ``GraphError`` for a gradient within a layer that should be kept."""
    within = {f"grad({name})" for name in folded}
    for v in wanted:
        if v.name not in result.variables or v.name in within:
            raise GraphError(
                f"roll: {v.name!r} is computed within layers that would become one loop, and activations "
                "alone can be handed out of that. To fetch it keep the layers apart: compile(..., "
                "roll=False)."
            )
