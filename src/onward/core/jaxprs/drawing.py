"""Which random numbers a Body draws, and what decides them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend import core as jex

from onward.core.jaxprs.body import Body
from onward.core.jaxprs.equations import called_by, carry_of_scan, jaxprs_in
from onward.core.primitives.table import of
from onward.core.primitives.traits import Runs

Deciding = frozenset[Any] | None  # what alone decides a value; None where data or what is replaced does too


def draws(body: Body) -> bool:
    """Whether random numbers are drawn in it, however deep.

    >>> import jax, jax.numpy as jnp, onward as ow
    >>> draws(ow.graph.body_of(lambda key: [jax.random.normal(key)], jax.random.key(0)))
    True
    """
    return any(of(name).draws for name in body.primitives)


class DrawsAlike:
    """One walk over bodies that follows what alone decides each value, and notes what decides a draw.

    >>> import jax, jax.numpy as jnp, onward as ow
    >>> key, x = jax.random.key(0), jnp.float32(1.0)
    >>> body = ow.graph.body_of(lambda key, x: [x * jax.random.normal(key)], key, x)
    >>> walk = DrawsAlike()
    >>> walk.run(body, [frozenset({"key"}), None]), walk.decided
    ([None], {'key'})
    """

    def __init__(self) -> None:
        self.decided: set[Any] = set()

    def run(self, body: Body, given: Sequence[Deciding]) -> list[Deciding]:
        """For each output what alone decides it, given the same for each input."""
        jaxpr = body.closed.jaxpr
        env: dict[Any, Deciding] = dict.fromkeys(jaxpr.constvars, frozenset())
        env.update(zip(jaxpr.invars, given, strict=True))

        def read(v: Any) -> Deciding:
            return frozenset() if isinstance(v, jex.Literal) else env[v]

        for eqn in jaxpr.eqns:
            env.update(zip(eqn.outvars, self._results(eqn, [*map(read, eqn.invars)]), strict=True))
        return [*map(read, jaxpr.outvars)]

    def _results(self, eqn: Any, given: list[Deciding]) -> Sequence[Deciding]:
        row = of(eqn.primitive.name)
        if row.runs is Runs.SCAN:
            body = Body(jaxprs_in(eqn.params["jaxpr"])[0])
            return self._loop(body, given, *carry_of_scan(eqn))
        if row.runs is Runs.WHILE:
            asked, begin = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            condition, body = (Body(jaxprs_in(eqn.params[name])[0]) for name in ("cond_jaxpr", "body_jaxpr"))
            after = self._loop(body, given[asked:], begin, len(eqn.outvars))
            [turns] = DrawsAlike().run(condition, [*given[:asked], *after])
            return [_both([turns, decided]) for decided in after]
        if row.runs is Runs.BRANCH:
            branches = [self.run(Body(branch), given[1:]) for branch in eqn.params["branches"]]
            return [_both([given[0], *results]) for results in zip(*branches, strict=True)]
        called = called_by(eqn)
        if len(called) == 1 and len(called[0].jaxpr.invars) == len(given):
            return self.run(Body(called[0]), given)
        together = _both(given)
        if row.draws:
            self.decided |= together or set()
        return [together] * len(eqn.outvars)

    def _loop(self, body: Body, given: list[Deciding], begin: int, count: int) -> Sequence[Deciding]:
        """The results of a loop: what is carried is decided by what decides it after any turn."""
        while True:
            turn = DrawsAlike()
            after = turn.run(body, given)
            carried = [_both(pair) for pair in zip(given[begin : begin + count], after, strict=False)]
            if carried == given[begin : begin + count]:
                self.decided |= turn.decided
                return after
            given = [*given[:begin], *carried, *given[begin + count :]]


def _both(deciding: Sequence[Deciding]) -> Deciding:
    """The union of what decides several values; None if that of any is None."""
    known = [d for d in deciding if d is not None]
    return frozenset[Any]().union(*known) if len(known) == len(deciding) else None
