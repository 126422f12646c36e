"""Why nothing repeats: the longest stretch of ops that nearly does, and the op at which it ends."""

from __future__ import annotations

import numpy as np

from onward.core.errors import GraphError
from onward.core.program import Op
from onward.develop.roll.find import FoundRuns, periods, stretches
from onward.develop.roll.line import OpLine

_NOTHING = (
    "roll: none of the {count} ops of the forward pass of {name!r} is part of a layer that repeats. {near} "
    "Layers repeat where they compute the same of arrays of equal types: build them so, or leave roll away."
)
_GIVEN_UP = "The search was given up, for too much of it nearly repeats."
_NO_KIND = "No sequence of two or more types of ops occurs twice in a row."
_SHORT = "What repeats is too small to gain from a loop."


def nothing_repeats(name: str, line: OpLine, found: FoundRuns) -> GraphError:
    """The error for a Program without a run: what was searched, and what came nearest."""
    near = _by_wiring(found) or _by_types(line)
    near = f"{near} {_GIVEN_UP}" if found.is_given_up else near
    return GraphError(_NOTHING.format(count=len(line.ops), name=name, near=near))


def _by_wiring(found: FoundRuns) -> str:
    """The op that computes the same as the one a layer before, but does not read the same."""
    if not found.ends:
        return ""
    times, end = max(found.ends, key=lambda e: e[0])
    return f"What looks like one breaks off after {times}: {_where(end.op)} {end.why}."


def _by_types(line: OpLine) -> str:
    """The op that has the type of the one a layer before, but computes something else."""
    kinds = {kind: i for i, kind in enumerate(dict.fromkeys(op.type for op in line.ops))}
    numbers = np.array([kinds[op.type] for op in line.ops], np.int64)
    found = (
        (end - begin - period, period, begin)
        for period in periods(numbers)
        for begin, end in stretches(numbers, period)
        if period > 1 or line.sizes[begin] > 1
    )
    length, period, begin = max(found, default=(0, 0, 0))
    if not length:
        return _NO_KIND
    pairs = ((line.ops[i], line.ops[i + period]) for i in range(begin, begin + length))
    differs = (pair for i, pair in enumerate(pairs, begin) if line.numbers[i] != line.numbers[i + period])
    before, op = next(differs, (None, None))
    if before is None or op is None:
        return _SHORT
    if op.body.has_effects:
        return f"No loop reaches over {_where(op)}, which has an effect."
    row = f"come {period} ops that follow each other" if period > 1 else "comes 1 op that follows itself"
    return (
        f"Nearest {row} {length // period + 1} times, but {_where(op)} is {_types(op)}, and {_types(before)} "
        "the time before."
    )


def _types(op: Op) -> str:
    """The types that an op reads and those that it makes, as ``(read) -> made``."""
    read, made = (", ".join(v.type for v in group) for group in (op.inputs, op.outputs))
    return f"({read}) -> {made}"


def _where(op: Op) -> str:
    return f"{op.type}{op.at}"
