"""An update pass that works on something in place of each parameter: a part of it, or a copy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from onward.core.errors import GraphError
from onward.core.program import Op, Program, Variable
from onward.core.walk import substitute
from onward.core.words import Placement
from onward.derive.update import with_update

Pair = tuple[Variable, Variable]


def update_stand_ins(
    program: Program, optimizer: Any, pairs: Mapping[Variable, Pair], placement: Placement
) -> Program:
    """The Program with an update of these stand-ins by these gradients.

    ``pairs`` gives for each parameter what stands in for it, and its gradient. The slots are named after the
    parameter, and placed as told. What replaces a stand-in is in ``next_state``.
    """
    aliases = {p: replace(stand_in, name=p.name) for p, (stand_in, _) in pairs.items()}
    gradients = tuple((aliases[p], g) for p, (_, g) in pairs.items())
    draft = with_update(replace(program, gradients=gradients), optimizer)
    added = draft.initializers[len(program.initializers) :]
    slots = [v for op in added if op.type == "init" for v in op.outputs]
    back: dict[Variable, Variable] = {aliases[p]: stand_in for p, (stand_in, _) in pairs.items()}
    for alias, stand_in in list(back.items()):
        following = draft.next_state[alias]
        back[following] = replace(following, name=f"next({stand_in.name})")
    if placement is Placement.SHARDED:
        slots = [v for v in slots if v.shape]  # a single number is no part of anything
    back |= {v: replace(v, placement=placement) for v in slots}
    initializers = tuple(_from_parameter(op, program, aliases) for op in draft.initializers)
    return substitute(replace(draft, initializers=initializers, gradients=program.gradients), back)


def _from_parameter(op: Op, program: Program, aliases: Mapping[Variable, Variable]) -> Op:
    """The initializer of a slot, which reads the parameter itself."""
    of = {alias: p for p, alias in aliases.items()}
    inputs = tuple(of.get(v, v) for v in op.inputs)
    if any(p.shape != alias.shape for p, alias in zip(inputs, op.inputs, strict=True)):
        raise GraphError(
            f"{program.name}: {op.outputs[0].name!r} begins with the value of its parameter, and each device "
            "has a part of it only. Merge with Average() or Bucketed()."
        )
    return replace(op, inputs=inputs)
