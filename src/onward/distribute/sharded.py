"""Every device updates its part of each parameter, and keeps the slots of that part only (ZeRO)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

from jax import lax

from onward.core.errors import GraphError
from onward.core.jaxprs import Type, body_of
from onward.core.placement import equal_variables
from onward.core.program import Program, Variable
from onward.core.transform import Step
from onward.core.words import Placement, UpdateType
from onward.derive.update import append_update
from onward.distribute.merge import Average, Devices, Merge
from onward.distribute.stand_in import update_stand_ins
from onward.distribute.weave import Weave


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

    def apply(self, program: Program, devices: Devices, steps: Sequence[Step]) -> Program:
        """Gradients are left as they are for the update; with rules in between they are averaged whole."""
        following = [s.function for s in steps]
        between = following[: following.index(append_update)] if append_update in following else following
        return Average().apply(program, devices, steps) if len(between) > 1 else program

    def update(self, program: Program, optimizer: Any, *, devices: Devices) -> Program:
        """The update pass on parts."""
        if optimizer.type is not UpdateType.ELEMENTWISE:
            raise GraphError(
                f"Sharded cuts parameters into parts, and {type(optimizer).__name__} looks at them "
                f"{optimizer.type}. Merge with Average() or Bucketed(), or take an elementwise optimizer."
            )
        weave = Weave.after(program)
        equal = equal_variables(program)
        parts = [
            (_part(weave, p, devices), _scattered(weave, g, devices, g in equal))
            for p, g in program.gradients
        ]
        pairs = {p: part for (p, _), part in zip(program.gradients, parts, strict=True)}
        draft = update_stand_ins(weave.program(), optimizer, pairs, Placement.SHARDED)
        return _gathered(draft, program, [part for part, _ in parts], devices)


def _part(weave: Weave, p: Variable, devices: Devices) -> Variable:
    """This device's part of a parameter."""
    size = _length(p, devices)

    def part(x: Any) -> list[Any]:
        return [lax.dynamic_slice(devices.padded(x), (devices.index * size,), (size,))]

    return weave.collective("part", [p], [f"part({p.name})"], body_of(part, Type(p.shape, p.dtype)))[0]


def _scattered(weave: Weave, g: Variable, devices: Devices, merged: bool) -> Variable:
    """This device's part of the mean of a gradient."""
    if merged:
        return _part(weave, g, devices)

    def scatter(x: Any) -> list[Any]:
        return [devices.scatter_mean(devices.padded(x))]

    body = body_of(scatter, Type(g.shape, g.dtype))
    return weave.collective("scatter_mean", [g], [f"scatter_mean({g.name})"], body)[0]


def _gathered(draft: Program, before: Program, parts: Sequence[Variable], devices: Devices) -> Program:
    """The parameters, put together of their updated parts."""
    weave = Weave.after(draft)
    following = dict(draft.next_state)
    for part, (p, _) in zip(parts, before.gradients, strict=True):
        new = following.pop(part)
        following[p] = _whole(weave, new, p, devices)
    return replace(draft, ops=weave.ops, next_state=following, gradients=before.gradients)


def _whole(weave: Weave, part: Variable, p: Variable, devices: Devices) -> Variable:
    def gather(x: Any) -> list[Any]:
        return [devices.join(x, p.shape)]

    body = body_of(gather, Type(part.shape, part.dtype))
    return weave.collective("all_gather", [part], [f"next({p.name})"], body)[0]


def _length(v: Variable, devices: Devices) -> int:
    """How many numbers of a Variable one device holds."""
    return -(-prod(v.shape) // devices.size)
