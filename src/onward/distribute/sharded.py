"""Every device updates its part of each parameter, and keeps the slots of that part only (ZeRO)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from jax import lax

from onward.core.builder import Builder
from onward.core.errors import GraphError
from onward.core.marks import PART
from onward.core.placement import equal_variables
from onward.core.program import Applied, Op, Program, Variable
from onward.core.words import Pass, Placement, UpdateType
from onward.derive.backward import append_backward
from onward.derive.rule import GradientRule, ParameterRule
from onward.derive.update.groups import Routing
from onward.derive.update.growing import Pair, StandIns
from onward.derive.update.update import append_update, optimizer_of, with_update
from onward.distribute.merge import Average, Devices, Merge


class Sharded(Merge):
    """Gradients are averaged part by part, each device updates one part, and the parts are gathered.

    The slots of an optimizer then take one n-th of their memory on each device, and no more is sent than by
    an average. Only for rules that look at each number by itself.

    Source: Rajbhandari et al., ZeRO, 2020, sections 5.1 and 5.2 (stages 1 and 2).

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.Adam(0.1).minimize(lambda w, x: jnp.mean(x @ w), jnp.ones(8), jnp.ones((4, 8)))
        >>> program = ow.replicate(program, devices=2, merge=ow.Sharded())
        >>> program["w/mean"].type, program["w/mean"].placement
        ('float32[4]', <Placement.SHARDED: 'sharded'>)
    """

    def apply(self, program: Program, devices: Devices, steps: Sequence[Applied]) -> Program:
        """Gradients are left as they are for the update, unless a rule before it needs them whole."""
        functions = [s.function for s in steps]
        begin = functions.index(append_backward) + 1 if append_backward in functions else 0
        end = functions.index(append_update) if append_update in functions else len(steps)
        whole = begin < end or any(s.function is append_update and _sees_whole(s, program) for s in steps)
        return Average().apply(program, devices, steps) if whole else program

    def update(self, program: Program, optimizer: Any, *, devices: Devices) -> Program:
        """The update pass on parts."""
        routing = Routing.of(optimizer, program.parameters, program)
        rules = [*(route.optimizer for route in routing.routes), *routing.rules(ParameterRule)]
        for rule in rules:
            if rule.type is not UpdateType.ELEMENTWISE:
                raise GraphError(
                    f"Sharded cuts parameters into parts, and {rule.title} looks at them "
                    f"{rule.type}. Merge with Average() or Bucketed(), or take what works number by number."
                )
            if getattr(rule, "slot_dtype", None) == "int8":
                raise GraphError(
                    "Sharded cuts parameters into parts, and slots of int8 are kept in blocks of the whole. "
                    "Merge with Average(), or keep slots as bfloat16."
                )
        last = _looks_further(routing)
        draft = with_update(
            program,
            optimizer,
            routing,
            StandIns(partial(_parts, devices), Placement.SHARDED, devices.size, last),
        )
        return _gathered(draft, program, devices)


def _sees_whole(step: Applied, program: Program) -> bool:
    """Whether rules before the update look at more than single numbers of a gradient."""
    return _looks_further(Routing.of(optimizer_of(step), program.parameters))


def _looks_further(routing: Routing) -> bool:
    return any(rule.type is not UpdateType.ELEMENTWISE for rule in routing.rules(GradientRule))


def _parts(devices: Devices, program: Program) -> tuple[tuple[Op, ...], dict[Variable, Pair]]:
    """The ops that cut parameters and gradients, and this device's part of each."""
    builder = Builder(program, made_by=Pass.COLLECTIVE)
    equal = equal_variables(program)
    pairs = {
        p: (_part(builder, p, devices), _scattered(builder, g, devices, g in equal))
        for p, g in program.gradients
    }
    return builder.ops, pairs


def _part(builder: Builder, p: Variable, devices: Devices) -> Variable:
    """This device's part of a parameter."""
    size = devices.part_length(p.size)

    def part(x: Any) -> list[Any]:
        rows = devices.padded(x).reshape(devices.size, size)  # as a vector its places may not fit an int32
        return [lax.dynamic_index_in_dim(rows, devices.index, keepdims=False)]

    return builder.behind(p, PART, part, f"part({p.name})")


def _scattered(builder: Builder, g: Variable, devices: Devices, merged: bool) -> Variable:
    """This device's part of the mean of a gradient."""
    if merged:
        return _part(builder, g, devices)

    return builder.behind(g, "scatter_mean", lambda x: [devices.scatter_mean(devices.padded(x))])


def _gathered(draft: Program, before: Program, devices: Devices) -> Program:
    """The parameters, put together of their updated parts."""
    builder = Builder(draft, draft.ops, made_by=Pass.COLLECTIVE)
    parts = {op.outputs[0]: op.inputs[0] for op in draft.ops if op.type is PART}
    following = dict(draft.next_state)
    for part, p in parts.items():
        if part in following:
            following[p] = _whole(builder, following.pop(part), p, devices)
    return replace(draft, ops=builder.ops, next_state=following, gradients=before.gradients)


def _whole(builder: Builder, part: Variable, p: Variable, devices: Devices) -> Variable:
    return builder.behind(part, "all_gather", lambda x: [devices.join(x, p.shape)], f"next({p.name})")
