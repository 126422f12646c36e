"""How much the part of each device counts, where data says how much each example counts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

from onward.core.builder import Builder, op_of
from onward.core.marks import SCALE, WEIGH
from onward.core.program import Op, Program, Variable
from onward.core.walk import descendants, substitute, with_results
from onward.core.words import Pass
from onward.distribute.merge import Devices


class Share:
    """The share of a device in the weights of all, 1 on the average: its factor in a weighted mean.

    What is added up over the devices already, as the sum of the weights that a loss is divided by, is right.
    """

    def __init__(self, program: Program, weight: Variable, devices: Devices) -> None:
        self.weight, self.devices = weight, devices
        reached = descendants(program, [weight])
        summed = (op for op in program.ops if _adds_up(op) and not reached.isdisjoint(op.inputs))
        self._settled = descendants(program, [v for op in summed for v in op.outputs])
        self._value: Variable | None = None
        loss = program.loss
        self._dtype = weight.dtype if loss is None else jnp.promote_types(weight.dtype, loss.dtype)

    def counts_for(self, v: Variable) -> bool:
        """Whether the mean of this Variable over the devices is still to be weighted."""
        return v not in self._settled

    def value(self, builder: Builder) -> Variable:
        """The factor; the op that makes it is added when it is first asked for."""
        if self._value is None:
            share = partial(_share, dtype=self._dtype, devices=self.devices)
            self._value = builder.behind(self.weight, "share", lambda weights: [share(weights)])
        return self._value

    def of_loss(self, program: Program) -> Program:
        """The Program with the loss times this factor, and so all gradients."""
        loss = program.loss
        if loss is None or not self.counts_for(loss):
            return program
        builder = Builder(program, program.ops, made_by=Pass.COLLECTIVE)
        factor = self.value(builder)
        reads, name = (loss, factor), f"weighed({loss.name})"
        (weighed,) = builder.add(WEIGH, reads, [name], lambda x, f: [weighed_by(x, f)], made_by=Pass.FORWARD)
        self._settled = {*self._settled, weighed}
        weighs = with_results(program, lambda v: weighed if v is loss else v)
        return replace(weighs, ops=builder.ops)

    def of_gradients(self, program: Program) -> Program:
        """The Program whose gradients are 0 on a device without any weight, where a mean would be 0 / 0."""
        if self._value is None:
            return program
        gradients = dict.fromkeys(g for _, g in program.gradients)
        raw = {g: replace(g, name=f"raw({g.name})") for g in gradients}
        program = substitute(program, raw)
        made = {v: g for g, v in raw.items()}
        builder = Builder(program, made_by=Pass.COLLECTIVE)
        for op in program.ops:
            builder.append(op)
            for v in op.outputs:
                if v in made:
                    builder.append(_counted(v, made[v], self._value))
        return builder.program(gradients=tuple((p, made[v]) for p, v in program.gradients))


def _adds_up(op: Op) -> bool:
    return op.type is SCALE or bool(op.body.collectives)


def _counted(raw: Variable, gradient: Variable, factor: Variable) -> Op:
    def counted(x: Any, f: Any) -> list[Any]:
        return [jnp.where(f == 0, 0, x).astype(x.dtype)]

    return op_of("count_in", (raw, factor), (gradient,), counted, Pass.COLLECTIVE)


def weighed_by(x: Any, factor: Any) -> Any:
    """A number of this device times its share; 0 if it has none, be the number NaN for want of examples."""
    return jnp.where(factor == 0, 0, x * factor).astype(x.dtype)


def _share(weights: Any, dtype: Any, devices: Devices) -> Any:
    mine = jnp.sum(weights, dtype=jnp.promote_types(dtype, np.float32))
    mean = devices.mean(mine)
    return jnp.where(mean == 0, 1, mine / jnp.where(mean == 0, 1, mean))
