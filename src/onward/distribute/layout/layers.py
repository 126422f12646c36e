"""The repeated layers of a Program, which stages share out: one loop, or equal ops one after the other.

>>> import functools, jax.numpy as jnp, onward as ow
>>> def loss(params, x):
...     return jnp.sum(functools.reduce(lambda h, w: h + jnp.tanh(h @ w), params, x))
>>> program = ow.SGD(0.1).minimize(loss, [jnp.eye(4)] * 6, jnp.ones((2, 4)))
>>> found = layers_of(program)
>>> found.count, found.carried, [str(found.part(op)) for op in program.ops if op.type == "reduce_sum"]
(6, 32, ['after'])
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from onward.core.cost import cost, size
from onward.core.jaxprs.loops import carry_of
from onward.core.program import Op, Program, Variable
from onward.core.turn import ScanTurn
from onward.core.walk import producers
from onward.core.words import Pass, Words
from onward.develop.roll.find import find_runs
from onward.develop.roll.forward import forward_ops
from onward.develop.roll.line import line_of
from onward.develop.roll.run import From, LayerRun
from onward.distribute.pipeline.layer_loop import layer_loop, main_loop


class LayerPart(Words):
    """Where an op stands: before the layers, in one of them, or behind them."""

    BEFORE = "before"
    LAYERS = "layers"
    AFTER = "after"


@dataclass(frozen=True, eq=False)
class RepeatedLayers:
    """The layers of a Program.

    Attributes:
        count: how many; 1 where nothing repeats.
        handed: what the first layer is handed, as each hands it to the next.
        parts: the part of each op of forward and backward pass.
        turns: of the loop that they are, which stages share evenly; 1 of a loop that stages cannot share,
            None where they are not in a loop.
    """

    count: int
    handed: tuple[Variable, ...]
    parts: Mapping[Op, LayerPart]
    turns: int | None = None

    @property
    def carried(self) -> int:
        """The bytes that one layer hands to the next."""
        return sum(map(size, self.handed))

    def part(self, op: Op) -> LayerPart:
        """The part of an op; an update stands behind all."""
        return self.parts.get(op, LayerPart.AFTER)


def layers_of(program: Program, weights: Container[Variable] = ()) -> RepeatedLayers:
    """Find the layers that do most of the work.

    Args:
        program: a training Program.
        weights: what holds numbers of parameters, beside these: of a loop each turn reads some of its own.
    """
    forward = [op for op in program.ops if op.made_by is Pass.FORWARD]
    main = main_loop(forward)
    if main is not None:
        count, inside, handed = _loop(main, {*program.parameters}, weights)
    else:
        count, inside, handed = _run(program, forward)
    turns = None
    if main is not None and main in inside:
        turns = 1 if layer_loop(program) is None else count
    return RepeatedLayers(count, handed, _parts(program, forward, inside), turns)


def _loop(
    op: Op, parameters: Container[Variable], weights: Container[Variable]
) -> tuple[int, set[Op], tuple[Variable, ...]]:
    """The turns of a loop, unless all read the same parameters, as those over time do."""
    turn = ScanTurn.of(op.primal or op.body)
    if turn is None:
        return 1, set(), ()
    first, count = carry_of(op.primal or op.body)
    cut = [op.inputs[x] for x in turn.operands[first + count :] if isinstance(x, int)]
    if not any(v in parameters or v in weights for v in cut):
        return 1, set(), ()
    handed = (op.inputs[x] for x in turn.operands[first : first + count] if isinstance(x, int))
    return turn.length, {op}, tuple(v for v in handed if v.ndim)


def _run(program: Program, forward: list[Op]) -> tuple[int, set[Op], tuple[Variable, ...]]:
    line = line_of(replace(program, ops=forward_ops(program)), frozenset(), frozenset())
    runs = [run for run in find_runs(line).runs if run.is_chain and run.parameters]
    if not runs:
        return 1, set(), ()
    run = max(runs, key=lambda run: sum(cost(op).flops for layer in run.layers for op in layer))
    made = {op.outputs[0] for layer in run.layers for op in layer if op.outputs}
    return run.times, {op for op in forward if op.outputs and op.outputs[0] in made}, _handed(run)


def _handed(run: LayerRun) -> tuple[Variable, ...]:
    places = {read.place for reads in run.reads for read in reads if read.source is From.CARRY}
    return tuple(run.layers[0][i].outputs[k] for i, k in sorted(p for p in places if p is not None))


def _parts(program: Program, forward: list[Op], inside: set[Op]) -> Mapping[Op, LayerPart]:
    """The part of each op: of a gradient that of its op, of a sum of gradients the one before."""
    numbers = [i for i, op in enumerate(forward) if op in inside]
    last = numbers[-1] if numbers else len(forward)
    parts = {
        op: LayerPart.LAYERS if op in inside else LayerPart.AFTER if i > last else LayerPart.BEFORE
        for i, op in enumerate(forward)
    }
    made, now = producers(program), LayerPart.AFTER
    for op in program.ops:
        if op.made_by is Pass.BACKWARD:
            of = made.get(op.of) if op.of is not None else None
            now = parts.get(of, now) if of is not None else now
            parts[op] = now
    return parts
