"""Whether an equation keeps the examples apart: whether each of its result is computed of that one alone.

The dimensions that an equation ties together tell (``core/wiring.py``). What only lays numbers out otherwise
is told by its layout; what finds examples by index, by what the index is.
"""

from __future__ import annotations

from collections.abc import Mapping

from onward.core.jaxprs.body import Call
from onward.core.primitives.table import of
from onward.core.primitives.traits import Moves, Primitive
from onward.core.wiring import wiring
from onward.develop.over_batch.known import Follows, How

_BY_LAYOUT = (Moves.RESHAPES, Moves.REPEATS, Moves.JOINS, Moves.CUTS)
_CUTS = "takes some of the examples, or adds to them"


def mixing(call: Call, values: list[Follows], rows: Mapping[int, int], axis: int) -> str:
    """How an equation computes examples of others; empty if it does not, as far as anything is known of it.

    Args:
        call: the equation, whose first result has the examples along ``axis``.
        values: how its operands follow the whole's.
        rows: the axis of the examples of each operand that has them.
        axis: that of the result.
    """
    row = of(call.primitive)
    if is_opaque(call.primitive) or (row.moves in _BY_LAYOUT and not row.update):
        return ""
    if "dimension_numbers" in call.params and (row.update or row.moves is Moves.LOOKS_UP):
        return _finding(call, values[1], rows)
    if row.update and rows.get(1) != axis:
        return _CUTS
    if any(call.params.get("padding_config", {axis: ()})[axis]):
        return _CUTS
    kept = {place for place, made in wiring(call).ties if made[0] >= len(call.operands)}
    if call.params.get("feature_group_count", 1) > 1:  # examples as groups, each with a kernel of its own
        numbers = call.params["dimension_numbers"]
        kept |= {(0, numbers.lhs_spec[1]), (1, numbers.rhs_spec[0])} if axis == numbers.out_spec[1] else set()
    if kept.issuperset(rows.items()):
        return ""
    return _CUTS if row.moves is Moves.CUTS_AT else "runs along the examples"


def is_own(call: Call, values: list[Follows]) -> bool:
    """Whether an equation takes the one example whose number a loop over all of them is at."""
    first, *indices = values
    layout = first.layout
    if layout is None or layout.blocks != 1 or layout.each != 1 or first.counts:
        return False
    moves = of(call.primitive).moves
    if moves is Moves.CUTS_AT:
        index = indices[layout.axis]
    elif moves is Moves.LOOKS_UP and call.params["dimension_numbers"].start_index_map == (layout.axis,):
        index = indices[0]
    else:
        return False
    return index == Follows(How.SAME, counts=True) and call.params["slice_sizes"][layout.axis] == 1


def adds_by_index(call: Call) -> bool:
    """Whether an equation adds into its first operand where an index says."""
    return call.primitive == "scatter-add"


def adds_each(call: Call, rows: Mapping[int, int]) -> bool:
    """Whether a scatter adds each example where an index says, not in their order."""
    return adds_by_index(call) and rows.get(2) not in call.params["dimension_numbers"].update_window_dims


def has_part(call: Call, lengths: Mapping[int, int | None], count: int, axis: int) -> bool:
    """Whether numbers of some of the examples are laid beside those of others.

    Args:
        call: the equation, whose first result has the examples along ``axis``.
        lengths: for each operand that has examples how many numbers lie along them, None if it is known how.
        count: how many examples there are.
        axis: that of the result.
    """
    moves = of(call.primitive).moves
    is_joined = moves is Moves.JOINS and call.params.get("dimension") == axis
    is_laid = moves is Moves.RESHAPES and None not in lengths.values()
    return (is_joined or is_laid) and any(n is not None and n % count for n in lengths.values())


def is_opaque(primitive: str) -> bool:
    """Whether nothing is known of what a primitive computes, as of one that calls what stands in a file."""
    row = of(primitive)
    return row == Primitive(row.name)


def _finding(call: Call, index: Follows, rows: Mapping[int, int]) -> str:
    """The same of a lookup or an update by index: one that counts all examples finds each its own."""
    axis = rows.get(0)
    lengths = [call.operands[i].shape[rows[i]] for i in (0, 1) if i in rows]
    numbers = call.params["dimension_numbers"]
    at = "start_index_map" if call.primitive == "gather" else "scatter_dims_to_operand_dims"
    if axis not in getattr(numbers, at) or (index.counts and len(set(lengths)) == 1):
        return ""
    return "finds examples by numbers that stand in data, which count those of the whole batch"
