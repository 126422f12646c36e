"""The details that the panel of a page shows for a clicked box, as plain data for the script."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from onward.core.cost import Cost
from onward.core.program import Op, Program, Variable
from onward.core.show import human_bytes, human_number, nbytes, short_type
from onward.core.source import named
from onward.explain.draw.facts import Facts
from onward.explain.draw.scene import Box

_MOST_OPS, _MOST_VARIABLES, _MOST_TYPES = 24, 24, 14

Details = dict[str, Any]


def box_details(box: Box, title: str, facts: Facts) -> Details:
    """The details of a box: those of its op, of its several ops, or of its Variables."""
    ops = [facts.program.ops[place] for place in box.ops]
    if len(ops) == 1:
        return op_details(ops[0], facts)
    if ops:
        return several(ops, title, box, facts)
    return variables_details([facts.program.variables[name] for name in box.variables], facts.program)


def op_details(op: Op, facts: Facts) -> Details:
    """An op: where it comes from, what it reads and computes, what it costs."""
    source = op.source
    place = f"{named(source.file)}:{source.line} in {source.function}" if source and source.file else ""
    rows = [("pass", str(op.made_by)), ("scope", facts.scopes[op]), ("line", place), *_costs(facts.costs[op])]
    if op.update is not None:
        rows.append(("update", str(op.update)))
    return {
        "title": op.type,
        "lane": str(op.made_by),
        "rows": [row for row in rows if row[1]],
        "lists": _lists(
            ("reads", op.inputs),
            ("computes", op.outputs),
            attributes=[list(a) for a in op.attributes.items()],
        ),
    }


def several(ops: Sequence[Op], title: str, box: Box, facts: Facts) -> Details:
    """Several ops together; each one if they are few."""
    total = sum((facts.costs[op] for op in ops), Cost())
    rows = [
        ("pass", box.lane),
        ("ops", f"{len(ops):,}"),
        ("layers", box.note.removeprefix("× ")),
        *_costs(total),
    ]
    found: Details = {"title": title, "lane": box.lane, "rows": [row for row in rows if row[1]], "lists": []}
    if len(ops) <= _MOST_OPS and box.form == "chip":
        found["ops"] = [op_details(op, facts) for op in ops]
        return found
    common = Counter(op.type for op in ops).most_common()
    census = [[kind, f"{n:,}"] for kind, n in common[:_MOST_TYPES]]
    rest = sum(n for _, n in common[_MOST_TYPES:])
    found["lists"].append(["ops", census + ([["others", f"{rest:,}"]] if rest else [])])
    parameters = set(facts.program.parameters)
    state = dict.fromkeys(v for op in ops for v in op.inputs if v in parameters)
    found["lists"] += _lists(("parameters", tuple(state)))
    return found


def variables_details(variables: Sequence[Variable], program: Program) -> Details:
    """Variables: what they are for, and how large."""
    first = variables[0] if variables else None
    rows = [("bytes", human_bytes(sum(map(nbytes, variables))))] if variables else []
    if len(variables) == 1 and first is not None:
        rows = [("type", first.type), ("kind", str(first.kind)), ("placed", str(first.placement)), *rows]
    title = first.name if first is not None and len(variables) == 1 else f"{len(variables)} Variables"
    lane = "forward" if first in program.inputs else "state"
    lists = _lists(("Variables", tuple(variables))) if len(variables) > 1 else []
    return {"title": title, "lane": lane, "rows": rows, "lists": lists}


def _lists(
    *named: tuple[str, Sequence[Variable]], attributes: list[list[str]] | None = None
) -> list[list[Any]]:
    """Tables of Variables with their types, and one of attributes."""
    found: list[list[Any]] = []
    for name, variables in named:
        shown = [[v.name, short_type(v)] for v in variables[:_MOST_VARIABLES]]
        if len(variables) > _MOST_VARIABLES:
            shown.append([f"{len(variables) - _MOST_VARIABLES:,} more", ""])
        if shown:
            found.append([name, shown])
    if attributes:
        found.append(["attributes", attributes])
    return found


def _costs(cost: Cost) -> list[tuple[str, str]]:
    rows = [("FLOPs", human_number(cost.flops) if cost.flops else "")]
    rows += [("reads", human_bytes(cost.read)), ("writes", human_bytes(cost.written))]
    return [*rows, ("exchanges", human_bytes(cost.exchanged) if cost.exchanged else "")]
