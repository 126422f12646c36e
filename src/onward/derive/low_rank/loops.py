"""Loops whose turns read weights: factors stand beside the products within, stacked as the weights are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from onward.core.jaxprs.body import body_of
from onward.core.jaxprs.loops import result_of
from onward.core.names import Names
from onward.core.program import Op, Variable
from onward.core.turn import ScanTurn
from onward.core.words import Kind
from onward.derive.low_rank.adapters import Adapter
from onward.derive.low_rank.beside import beside
from onward.derive.low_rank.readers import Product, ReadingLoop


@dataclass(frozen=True)
class AdapterInLoop:
    """An adapter of a weight that the turns of a loop read."""

    adapter: Adapter
    loop: ReadingLoop


def looped(op: Op, within: Sequence[AdapterInLoop], scale: float) -> Op:
    """The loop that takes the factors of these weights as well, each turn all or those of its layer."""
    turn = within[0].loop.turn
    within = sorted(within, key=lambda one: one.loop.is_stacked)
    names = Names(turn.program.variables)
    found: dict[Op, tuple[Product, Adapter]] = {}
    parts: list[Variable] = []
    for one in within:
        a, b = (_part(v, one.loop.is_stacked, names) for v in (one.adapter.a, one.adapter.b))
        parts += [a, b]
        adapter = Adapter(one.loop.weight, one.loop.axes, a, b, ())
        found |= {product.op: (product, adapter) for product in one.loop.products}
    ops: list[Op] = []
    for each in turn.program.ops:
        ops += beside(*found[each], scale, names) if each in found else [each]
    program = replace(turn.program, inputs=(*turn.program.inputs, *parts), ops=tuple(ops))
    factors = [v for one in within for v in (one.adapter.a, one.adapter.b)]
    same = 2 * sum(not one.loop.is_stacked for one in within)
    return _with_factors(op, replace(turn, program=program), factors, same)


def _with_factors(op: Op, turn: ScanTurn, factors: Sequence[Variable], same: int) -> Op:
    """The loop of this turn, which gets factors behind all else: so many as they are, the others cut."""
    count, results = len(op.inputs), [result_of(op.body, j) for j in range(len(op.outputs))]
    begin, end = turn.first_carried, turn.first_carried + turn.count_carried

    def run(*values: Any) -> list[Any]:
        given, fixed, cut = turn.given(values[:count]), values[count : count + same], values[count + same :]
        own = len(given) - begin

        def once(*now: Any) -> list[Any]:
            return turn.once(*given[:begin], *now[:own], *fixed, *now[own:])

        made = turn.loop(once, given[begin:end], [*given[end:], *cut])
        return [made[j] for j in results]

    inputs = (*op.inputs, *factors)
    return replace(op, inputs=inputs, body=body_of(run, *(v.aval for v in inputs)))


def _part(factor: Variable, is_stacked: bool, names: Names) -> Variable:
    """The part of a factor that one turn gets."""
    shape = factor.shape[1:] if is_stacked else factor.shape
    return Variable(names.new(factor.name), shape, factor.dtype, Kind.DATA)
