"""Factors beside the products within loops and ``jax.checkpoint``, which are given them as further operands.

A loop over stacked weights gets factors stacked as these are, each turn those of its layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from onward.core.jaxprs.body import body_of
from onward.core.jaxprs.edited import call_with_inner
from onward.core.jaxprs.joining import joined
from onward.core.jaxprs.loops import result_of
from onward.core.names import Names
from onward.core.program import Op, Program, Variable
from onward.core.turn import ScanTurn
from onward.core.words import Kind
from onward.derive.low_rank.adapters import Adapter
from onward.derive.low_rank.beside import beside
from onward.derive.low_rank.readers import Product, Reader, ReadingRun


@dataclass(frozen=True)
class AdapterWithin:
    """An adapter of a weight that is read by what an op runs."""

    adapter: Adapter
    run: ReadingRun


def woven(
    ops: Iterable[Op], pairs: Sequence[tuple[Reader, Adapter]], scale: float, names: Names
) -> Iterator[Op]:
    """The ops with factors beside the products that read weights, however deep.

    Args:
        ops: of a Program, or of what an op runs.
        pairs: what reads an adapted weight there, with its adapter.
        scale: by which a product of factors is multiplied.
        names: the names that are taken.
    """
    products: dict[Op, tuple[Product, Adapter]] = {}
    within: dict[Op, list[AdapterWithin]] = {}
    for reader, adapter in pairs:
        if isinstance(reader, Product):
            products[reader.op] = reader, adapter
        else:
            within.setdefault(reader.op, []).append(AdapterWithin(adapter, reader))
    for op in ops:
        if op in within:
            yield _with_factors(op, within[op], scale)
        elif op in products:
            yield from beside(*products[op], scale, names)
        else:
            yield op


def _with_factors(op: Op, within: Sequence[AdapterWithin], scale: float) -> Op:
    """The op that takes the factors of these weights as well, behind all else: those for all turns first."""
    within = sorted(within, key=lambda one: one.run.is_stacked)
    turn, program = within[0].run.turn, within[0].run.program
    names = Names(program.variables)
    pairs: list[tuple[Reader, Adapter]] = []
    parts: list[Variable] = []
    for one in within:
        a, b = (_part(v, one.run.is_stacked, names) for v in (one.adapter.a, one.adapter.b))
        parts += [a, b]
        axes = one.run.axes if one.run.is_stacked else one.adapter.axes
        adapter = Adapter(one.run.weight, axes, a, b, ())
        pairs += [(reader, adapter) for reader in one.run.readers]
    ops = tuple(woven(program.ops, pairs, scale, names))
    program = replace(program, inputs=(*program.inputs, *parts), ops=ops)
    factors = [v for one in within for v in (one.adapter.a, one.adapter.b)]
    same = 2 * sum(not one.run.is_stacked for one in within)
    results = [result_of(op.body, j) for j in range(len(op.outputs))]

    def run(*values: Any) -> list[Any]:
        own, more = values[: len(op.inputs)], values[len(op.inputs) :]
        made = _run_once(op, program, own, more) if turn is None else _loop(turn, program, own, more, same)
        return [made[j] for j in results]

    inputs = (*op.inputs, *factors)
    return replace(op, inputs=inputs, body=body_of(run, *(v.aval for v in inputs)))


def _run_once(op: Op, program: Program, own: Sequence[Any], more: Sequence[Any]) -> list[Any]:
    """The results of ``jax.checkpoint`` that runs this, given factors behind all else."""
    ((name, _),) = op.subprograms.items()
    body = joined(program.ops, program.inputs, program.outputs, is_inner=True)
    return call_with_inner(op.body, name, body)(own, more)


def _loop(turn: ScanTurn, program: Program, own: Sequence[Any], more: Sequence[Any], same: int) -> list[Any]:
    """The results of a loop that gets factors behind all else: so many as they are, the others cut."""
    begin, end = turn.first_carried, turn.first_carried + turn.count_carried
    given, fixed, cut = turn.given(own), more[:same], more[same:]
    count, changed = len(given) - begin, replace(turn, program=program)

    def once(*now: Any) -> list[Any]:
        return changed.once(*given[:begin], *now[:count], *fixed, *now[count:])

    return turn.loop(once, given[begin:end], [*given[end:], *cut])


def _part(factor: Variable, is_stacked: bool, names: Names) -> Variable:
    """The part of a factor that one turn gets."""
    shape = factor.shape[1:] if is_stacked else factor.shape
    return Variable(names.new(factor.name), shape, factor.dtype, Kind.DATA)
