"""The loops of a pipeline: over micro-batches, and over layers, which the stages share out.

A ``scan`` over layers is one op, and its parameters are stacks of those of all layers. Here it becomes as
many loops as there are stages, each handing on what it carries to the next, and so does its backward pass, in
the other order. Each stage has its piece of every stack.

>>> import jax, jax.numpy as jnp, onward as ow
>>> def loss(w, x):
...     return jnp.sum(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0])
>>> program = ow.SGD(0.1).minimize(loss, jnp.ones((4, 3, 3)), jnp.ones((8, 3)))
>>> found = shared_out(StageLoops(loop_of(ow.accumulate(program, 2))), 2)
>>> [op.type for op in found.loop.turn.ops if "scan" in op.type]
['scan', 'scan', 'scan_grad', 'scan_grad']
>>> [v.name for v in found.loop.turn.state]
['w[0:2]', 'w[2:4]']
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from onward.core.errors import ArgumentError
from onward.core.marks import ACCUMULATE
from onward.core.program import Op, Program, Variable
from onward.core.walk import needed_ops
from onward.develop.accumulation.loop import LoopPlan, LoopResult
from onward.distribute.pipeline.layer_loop import LayerCut, layer_loop
from onward.distribute.pipeline.stage_specs import Specs

Pieces = Mapping[Variable, tuple[Variable, ...]]


@dataclass(frozen=True, eq=False)
class StageLoops:
    """The loop over micro-batches, with a loop over layers for each stage within.

    Attributes:
        loop: that over micro-batches.
        begins: the loops over layers, with which the stages begin; none where layers stand one by one.
        pieces: for each stack of a Program that accumulates, in its state or its sums, the piece of each
            stage.
        alike: for each Variable of a turn that is a piece of another or stands in its place, that one.
    """

    loop: LoopPlan
    begins: tuple[Op, ...] = ()
    pieces: Pieces = field(default_factory=dict)
    alike: Mapping[Variable, Variable] = field(default_factory=dict)

    @cached_property
    def ahead(self) -> Sequence[Op]:
        """The ops that make what a micro-batch hands on to the next one."""
        return needed_ops(self.loop.turn, [new for _, new, _ in self.loop.threaded])

    @property
    def layers(self) -> int:
        """How many layers the stacks are of; 0 where there are none."""
        return next((v.shape[0] for v in self.pieces), 0)

    @cached_property
    def stage(self) -> Mapping[str, int]:
        """The stage where each piece of a stack lies, by its name."""
        return {v.name: k for pieces in self.pieces.values() for k, v in enumerate(pieces)}

    def with_pieces(self, specs: Specs) -> Specs:
        """How values are split over devices, with those of a turn that are parts of others."""
        return {**specs, **{new: specs[v] for new, v in self.alike.items() if v in specs}}


def loop_of(accumulated: Program) -> LoopPlan:
    """The plan of the loop over micro-batches of a Program that accumulates."""
    op: Any = next(op for op in accumulated.ops if op.type is ACCUMULATE)
    plan: LoopPlan = op.body.plan
    return plan


def shared_out(whole: StageLoops, stages: int) -> StageLoops:
    """The loop over micro-batches with a loop over layers for each stage, where most of the work is in one.

    Raises:
        ArgumentError: the stages cannot share its turns evenly.
    """
    loop = whole.loop
    layers = layer_loop(loop.turn, whole.ahead)
    if layers is None or stages == 1:
        return whole
    if layers.count % stages:
        fit = [str(n) for n in range(2, layers.count + 1) if layers.count % n == 0]
        raise ArgumentError(
            f"pipeline: the layers of {loop.whole.program.name!r} are the {layers.count} turns of "
            f"a {layers.op.type}{layers.op.at}, which {stages} stages cannot share evenly. Take "
            f"{' or '.join(fit)} stages, or begin stages at scopes around it (at=)."
        )
    cut = LayerCut(loop.turn, layers, stages)
    program = loop.whole.program
    pieces = {program[v.name]: cut.pieces[v] for v in layers.stacks}
    sums: list[LoopResult] = []
    for r in loop.sums:
        parts = cut.pieces.get(r.part)
        sums += [r] if parts is None else [replace(r, whole=v, part=v) for v in parts]
        pieces |= {} if parts is None else {r.whole: parts}
    turn = cut.turn((*(r.part for r in sums), *(r.part for r in loop.joined)))
    return StageLoops(loop.with_turn(turn, tuple(sums)), tuple(cut.begins), pieces, cut.alike)
