"""Loops: one turn, the values carried from it to the next, and the transforms inside; branches alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from onward.core.jaxprs.body import Body
from onward.core.jaxprs.equations import carry_of_scan, equations_within, function_run_by, jaxprs_in
from onward.core.jaxprs.scopes import transforms_around
from onward.core.primitives.table import of
from onward.core.primitives.traits import Runs


def carries_of(body: Body) -> list[tuple[int, int]]:
    """For a loop the positions (input, output) of what one turn hands to the next.

    >>> import jax, jax.numpy as jnp, onward as ow
    >>> def loop(a, x):
    ...     return jax.lax.scan(lambda x, _: (a * x, x), x, length=3)
    >>> carries_of(ow.graph.body_of(loop, jnp.float32(1.0), jnp.float32(2.0)))
    [(1, 0)]
    """
    runs = of(body.equations[0].primitive.name).runs if len(body.equations) == 1 else None
    if runs not in (Runs.SCAN, Runs.WHILE):
        return []
    (eqn,) = body.equations
    if runs is Runs.WHILE:
        begin, count = eqn.params["cond_nconsts"] + eqn.params["body_nconsts"], len(eqn.outvars)
    else:
        begin, count = carry_of_scan(eqn)
    given, made = list(body.closed.jaxpr.invars), list(body.closed.jaxpr.outvars)
    pairs = zip(eqn.invars[begin : begin + count], eqn.outvars[:count], strict=True)
    return [(given.index(old), made.index(new)) for old, new in pairs if old in given and new in made]


def carry_of(body: Body) -> tuple[int, int]:
    """For a ``scan`` at which operand begins what one turn hands to the next, and how much it is.

    >>> import jax, jax.numpy as jnp, onward as ow
    >>> def loop(a, x):
    ...     return jax.lax.scan(lambda x, _: (a * x, x), x, length=3)
    >>> carry_of(ow.graph.body_of(loop, jnp.float32(1.0), jnp.float32(2.0)))
    (1, 1)
    """
    (eqn,) = body.equations
    return carry_of_scan(eqn)


def gives_results(body: Body) -> bool:
    """Whether all that a Body gives are results of its one equation, none an input that is passed on.

    >>> import jax, jax.numpy as jnp, onward as ow
    >>> loop = lambda x: jax.lax.scan(lambda c, _: (c + 1, None), x, None, 2)[0]
    >>> x = jnp.float32(1.0)
    >>> gives_results(ow.graph.body_of(loop, x)), gives_results(ow.graph.body_of(lambda x: [loop(x), x], x))
    (True, False)
    """
    if len(body.equations) != 1:
        return False
    results = set(map(id, body.equations[0].outvars))
    return all(id(v) in results for v in body.closed.jaxpr.outvars)


def result_of(body: Body, output: int) -> int:
    """Which result of its one equation an output of a Body is.

    >>> import jax, jax.numpy as jnp, onward as ow
    >>> function = lambda x: jax.lax.scan(lambda c, _: (c + x, c), x, None, 2)[::-1]
    >>> swapped = ow.graph.body_of(function, jnp.ones(3))
    >>> result_of(swapped, 0), result_of(swapped, 1)
    (1, 0)
    """
    (eqn,) = body.equations
    return list(map(id, eqn.outvars)).index(id(body.closed.jaxpr.outvars[output]))


@dataclass(frozen=True, eq=False)
class LoopTurn:
    """One turn of a loop, what each device does, or a branch of a condition that trains.

    It is told where what it is given and gives stands outside.

    Attributes:
        part: the parameter of the loop that holds it.
        function: the name of the user's function that it is; a word for it if that is unknown.
        body: its computation.
        given: for each of its inputs the position among the inputs of the loop; None for a number.
        carried: the positions (input, output) of what it hands to the next one.
        results: for each output of the loop the output of the turn that it is, or is stacked of.
    """

    part: str
    function: str
    body: Body
    given: tuple[int | None, ...]
    carried: tuple[tuple[int, int], ...]
    results: tuple[int, ...]


def turns_of(body: Body) -> list[LoopTurn]:
    """One turn of a loop, what ``shard_map`` runs on each device, or the branches that compute gradients.

    >>> import jax, jax.numpy as jnp, onward as ow
    >>> def loop(a, x):
    ...     return jax.lax.fori_loop(0, 3, lambda i, x: a * x, x)
    >>> (turn,) = turns_of(ow.graph.body_of(lambda a, x: [loop(a, x)], jnp.float32(1.0), jnp.float32(2.0)))
    >>> turn.given, turn.carried
    ((0, None, 1), ((1, 0), (2, 1)))
    """
    if len(body.equations) != 1:
        return []
    (eqn,) = body.equations
    params, runs = eqn.params, of(eqn.primitive.name).runs
    if runs is Runs.SCAN:
        return [_turn(body, "jaxpr", params["jaxpr"], "turn", 0, *carry_of_scan(eqn))]
    if runs is Runs.WHILE:
        begin, count = params["body_nconsts"], len(eqn.outvars)
        return [_turn(body, "body_jaxpr", params["body_jaxpr"], "turn", params["cond_nconsts"], begin, count)]
    if runs is Runs.DEVICES:
        return [_turn(body, "jaxpr", params["jaxpr"], "each device", 0)]
    branches = enumerate(params["branches"] if runs is Runs.BRANCH else ())
    return [_turn(body, f"branches[{i}]", x, "branch", 1) for i, x in branches if _trains(x)]


def _turn(
    body: Body, part: str, jaxpr: Any, word: str, asked: int, begin: int = 0, count: int = 0
) -> LoopTurn:
    """A turn that is given the operands behind those that are ``asked`` whether to go on, or where."""
    return LoopTurn(
        part,
        function_run_by(body.equations[0]) or word,
        Body(*jaxprs_in(jaxpr)),
        tuple(x if isinstance(x, int) else None for x in body.operands[asked:]),
        tuple((begin + i, i) for i in range(count)),
        tuple(result_of(body, j) for j in range(len(body.out_avals))),
    )


def _trains(jaxpr: Any) -> bool:
    """Whether gradients are computed in a branch."""
    eqns = (eqn for closed in jaxprs_in(jaxpr) for eqn in closed.jaxpr.eqns)
    return any("transpose" in _transforms_in(eqn) for eqn in eqns)


def transforms_within(body: Body) -> frozenset[str]:
    """The transforms that the equations inside of a loop, branch or call stand under, however deep.

    >>> import jax, jax.numpy as jnp, onward as ow
    >>> def twice(x):
    ...     return [jax.lax.fori_loop(0, 2, lambda i, x: jax.grad(lambda x: x**3)(x), x)]
    >>> sorted(transforms_within(ow.graph.body_of(twice, jnp.float32(1.0))))
    ['jvp', 'transpose']
    """
    inner = (e for eqn in body.equations for e in equations_within(eqn))
    return frozenset[str]().union(*map(_transforms_in, inner))


def _transforms_in(eqn: Any) -> frozenset[str]:
    return transforms_around(eqn).union(*map(_transforms_in, equations_within(eqn)))
