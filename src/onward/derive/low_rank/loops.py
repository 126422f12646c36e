"""A loop over layers whose weights are stacked: factors are stacked alike, and stand beside the products within."""

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
from onward.derive.low_rank.readers import Loop


@dataclass(frozen=True)
class StackedAdapter:
    """An adapter of weights that a loop takes layer by layer, with the loop's view of it."""

    adapter: Adapter
    loop: Loop


def looped(op: Op, stacked: Sequence[StackedAdapter], scale: float) -> Op:
    """The loop that takes the factors of these weights as well, each turn those of its layer."""
    turn = stacked[0].loop.turn
    names = Names(turn.program.variables)
    found: dict[Op, tuple[Any, Adapter]] = {}
    slices: list[Variable] = []
    for one in stacked:
        a, b = (_slice(v, names) for v in (one.adapter.a, one.adapter.b))
        slices += [a, b]
        within = Adapter(one.loop.weight, one.loop.axes, a, b, ())
        found |= {product.op: (product, within) for product in one.loop.products}
    ops: list[Op] = []
    for each in turn.program.ops:
        ops += beside(*found[each], scale, names) if each in found else [each]
    program = replace(turn.program, inputs=(*turn.program.inputs, *slices), ops=tuple(ops))
    changed = replace(turn, program=program)
    factors = [v for one in stacked for v in (one.adapter.a, one.adapter.b)]
    count, results = len(op.inputs), [result_of(op.body, j) for j in range(len(op.outputs))]

    def run(*values: Any) -> list[Any]:
        made = _scanned(changed, values[:count], values[count:])
        return [made[j] for j in results]

    inputs = (*op.inputs, *factors)
    return replace(op, inputs=inputs, body=body_of(run, *(v.aval for v in inputs)))


def _scanned(turn: ScanTurn, values: Sequence[Any], factors: Sequence[Any]) -> list[Any]:
    """The results of a loop whose turns get their part of the factors behind all else."""
    given = turn.given(values)
    begin, end = turn.first_carried, turn.first_carried + turn.count_carried
    return turn.loop(
        lambda *inputs: turn.once(*given[:begin], *inputs), given[begin:end], [*given[end:], *factors]
    )


def _slice(factor: Variable, names: Names) -> Variable:
    """The part of a stacked factor that one turn gets."""
    return Variable(names.new(factor.name), factor.shape[1:], factor.dtype, Kind.DATA)
