"""How much the part of each device counts, where data says how much each example counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from onward.core.jaxprs import Type, body_of
from onward.core.program import Op, Program, Variable
from onward.core.walk import descendants
from onward.distribute.merge import Devices
from onward.distribute.weave import Weave


class Share:
    """The share of a device in the weights of all, 1 on the average: its factor in a weighted mean.

    What the network itself adds up over the devices, as costs with ``weights`` do, is right already.
    """

    def __init__(self, program: Program, weight: Variable, devices: Devices) -> None:
        self.weight, self.devices = weight, devices
        reached = descendants(program, [weight])
        summed = (op for op in program.ops if op.body.collectives and not reached.isdisjoint(op.inputs))
        self._settled = descendants(program, [v for op in summed for v in op.outputs])
        self._value: Variable | None = None

    def counts_for(self, v: Variable) -> bool:
        """Whether the mean of this Variable over the devices is still to be weighted."""
        return v not in self._settled

    def value(self, weave: Weave) -> Variable:
        """The factor; the op that makes it is added when it is first asked for."""
        if self._value is None:
            w = self.weight
            body = body_of(lambda weights: [_share(weights, self.devices)], Type(w.shape, w.dtype))
            self._value = weave.collective("share", [w], [f"share({w.name})"], body)[0]
        return self._value

    def of_loss(self, program: Program) -> Program:
        """The Program with the loss times this factor, and so all gradients."""
        loss, signature = program.loss, program.signature
        if loss is None or not self.counts_for(loss):
            return program
        assert signature is not None
        weave = Weave.after(program)
        factor = self.value(weave)
        weighed = Variable(weave.names.new(f"weighed({loss.name})"), loss.shape, loss.dtype)
        types = (Type(v.shape, v.dtype) for v in (loss, factor))
        times = body_of(lambda x, f: [(x * f).astype(x.dtype)], *types)
        weave.append(Op("weigh", (loss, factor), (weighed,), times))
        self._settled = {*self._settled, weighed}

        def new(v: Variable) -> Variable:
            return weighed if v is loss else v

        return weave.program(
            outputs=tuple(map(new, program.outputs)),
            loss=weighed,
            signature=replace(signature, result=signature.result.mapped(new)),
        )


def _share(weights: Any, devices: Devices) -> Any:
    mine = jnp.sum(weights, dtype=jnp.promote_types(weights.dtype, np.float32))
    return mine / jnp.maximum(devices.mean(mine), np.finfo(mine.dtype).tiny)
