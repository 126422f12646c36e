"""A loop computed in three parts: before its turns, turn by turn, and after them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from onward.core.program import Op, Variable
from onward.develop.fission.parts import Parts, Term

Values = Mapping[Variable, Any]


class LoopApart:
    """A loop of which parts are computed before and after its turns."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.turn = parts, parts.turn
        self.totals = {total.carried: total for total in parts.totals}
        dropped = {i for i, total in self.totals.items() if not total.kept}
        self.carried = [i for i in range(len(self.turn.carried)) if i not in dropped]

    def run(self, values: Sequence[Any]) -> list[Any]:
        """The results of the loop, as ``scan`` gives them."""
        turn, parts = self.turn, self.parts
        given = dict(zip(turn.program.inputs, turn.given(values), strict=True))
        fixed = self._same_in_all({v: given[v] for v in turn.fixed})
        stacked = self._early(fixed, {v: given[v] for v in turn.cut})
        start = [given[turn.carried[i]] for i in self.carried]
        results = turn.loop(self._turn(fixed, [*stacked]), start, [*stacked.values()])
        behind = len(start) + len(turn.stacked)
        stacked.update(zip(parts.stacks, results[behind:], strict=True))
        last = {i: given[v] for i, v in enumerate(turn.carried)}
        last.update(zip(self.carried, results, strict=False))
        for i, total in self.totals.items():
            last[i] = sum((self._sum(term, stacked) for term in total.terms), last[i])
        return [*last.values(), *results[len(start) : behind]]

    def _same_in_all(self, fixed: Values) -> Values:
        """All that is the same in all turns, and that is computed of it."""
        once = self.parts.once
        return {**fixed, **dict(zip(once, self.turn.computed([*fixed], once)(*fixed.values()), strict=True))}

    def _early(self, fixed: Values, cut: Values) -> dict[Variable, Any]:
        """The values cut for the turns, and the products of them, those of all turns at once."""
        early = self.parts.early
        if not early:
            return dict(cut)
        of_one = self.turn.computed([*fixed, *cut], early)
        of_all = jax.vmap(lambda *now: of_one(*fixed.values(), *now))(*cut.values())
        return {**cut, **dict(zip(early, of_all, strict=True))}

    def _turn(self, fixed: Values, stacked: Sequence[Variable]) -> Callable[..., list[Any]]:
        """One turn, from what is carried and cut to what is carried and stacked."""
        turn, parts = self.turn, self.parts
        carried = [turn.carried[i] for i in self.carried]
        kept = [self.totals[i].kept if i in self.totals else (turn.program.outputs[i],) for i in self.carried]
        wanted = [v for group in kept for v in group]
        results = [*wanted, *turn.stacked, *parts.stacks]
        compute = self.turn.computed([*fixed, *carried, *stacked], results, effects=True)

        def once(*values: Any) -> list[Any]:
            found = iter(compute(*fixed.values(), *values))
            now = [[next(found) for _ in group] for group in kept]
            adds = [i in self.totals for i in self.carried]
            following = [
                sum(new, old) if add else new[0] for new, old, add in zip(now, values, adds, strict=False)
            ]
            return [*following, *found]

        return once

    def _sum(self, term: Term, stacked: Values) -> Any:
        """The sum of a term over all turns."""
        operands = [stacked[v] for v in term.operands]
        if term.product is None:
            source, total = term.operands[0], jnp.sum(operands[0], axis=0)
        else:
            source, total = term.product.outputs[0], _long_product(term.product, *operands)
        (found,) = self.turn.computed([source], [term.added])(total)
        return found


def _long_product(op: Op, one: Any, other: Any) -> Any:
    """The sum over the turns of the products of two stacks, as one product."""
    (call,) = op.body.calls
    contracted, batched = call.params["dimension_numbers"]
    told = {key: call.params[key] for key in ("precision", "preferred_element_type")}
    left, right = (_with_turns(x, *dims) for x, *dims in zip((one, other), contracted, batched, strict=True))
    beside = tuple(range(1, 1 + len(batched[0])))
    return lax.dot_general(left, right, (((0,), (0,)), (beside, beside)), **told)


def _with_turns(x: Any, contracted: Sequence[int], batched: Sequence[int]) -> Any:
    """A stack over the turns with one dimension in place of the turns and of what is contracted.

    XLA's compiler for CPU would copy an operand of several such dimensions number by number.
    """
    along, beside = [0, *(d + 1 for d in contracted)], [d + 1 for d in batched]
    rest = [d for d in range(x.ndim) if d not in (*along, *beside)]
    ordered = jnp.transpose(x, (*along, *beside, *rest))
    count = len(along)
    return ordered.reshape(prod(ordered.shape[:count]), *ordered.shape[count:])
