"""One training Program becomes stages on devices of their own, each with its part of the parameters.

A model that does not fit one device is cut where the forward pass goes on; a batch goes through the stages in
micro-batches, so that they work at the same time. The Program has forward, backward and update as ops, so the
work of each stage is a choice of them, and a schedule is nothing but an order.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence

from jax.sharding import PartitionSpec

from onward.core.check import expect_program
from onward.core.errors import ArgumentError, GraphError
from onward.core.marks import ACCUMULATE
from onward.core.partitioned import partitioned
from onward.core.placement import expect_no_axis
from onward.core.program import Partition, Phase, Program, Recipe
from onward.core.recipe import build, called, recipe_of, whole_types
from onward.core.structure import expect_count
from onward.core.walk import Where, listed
from onward.core.words import Pass
from onward.develop.accumulation.accumulate import accumulate
from onward.develop.batch import WEIGHT, batch_names
from onward.develop.mixed.loss_scale import adjust_scale
from onward.distribute.partition import constrained
from onward.distribute.pipeline.cut import Pipeline, cut, homes_of, loops_of
from onward.distribute.pipeline.lanes import Lanes, in_lane, lanes_of
from onward.distribute.pipeline.loops import StageLoops, loop_of
from onward.distribute.pipeline.rolled import is_rolled, rolled_within, without_loops
from onward.distribute.pipeline.schedule import schedule_of

_REFUSED = {
    Phase.KEEP: (
        "chose what the loops of layers keep that roll made, and those of stages are others. Leave roll out: "
        "pipeline(recompute(program, budget), stages, micro_batches)"
    ),
    Phase.HOST: "keeps activations in host memory, and those of stages are others. Leave it out",
    Phase.LOOK: "looks at values of a whole step, which stages compute apart. Leave it out",
    Phase.DEVICES: "lays it out over devices already. Leave it out, and say data= for more devices a stage",
    Phase.MICRO_BATCHES: "takes its batch in parts already. Leave it out, and say micro_batches=",
    Phase.STEP: "decides about a step as a whole, of which each stage sees a part. Leave it out",
    Phase.MEMORY: "keeps state in host memory, where stages do not look for it. Leave it out",
}
_SCALED = "scales the loss of float16, and leaves out steps as a whole. Take bfloat16"


def pipeline(
    program: Program,
    stages: int,
    micro_batches: int,
    schedule: str = "1f1b",
    at: Iterable[str] = (),
    whole: Where | Iterable[Where] = (),
    is_sum: bool | None = None,
    data: int = 1,
) -> Pipeline:
    """Cut a training Program into stages, each on a device of its own, that work on micro-batches at once.

    Each stage holds a part of the parameters, with what the optimizer keeps of them, and a batch goes through
    the stages in micro-batches, forward and back. The numbers are those of ``accumulate(program,
    micro_batches * data)``, whatever the schedule, and for a loss that is a mean or a sum over examples those
    of the whole batch on one device. ``compile`` makes a step of it; ``print`` shows what each stage holds
    and sends, and what it does when.

    The forward pass is cut where the stages cost about the same, counted in operations and bytes, and of such
    cuts where the fewest bytes are sent. A parameter lies in the first stage that reads it; if others read it
    too, such as an embedding that is also the last layer, that stage sends it to them at each step, and they
    send it their part of its gradient, added up over all micro-batches. Rules that look at all gradients,
    such as ``ClipByGlobalNorm``, exchange numbers, not arrays.

    Layers that are the turns of a ``jax.lax.scan`` over stacks of parameters are shared out evenly: each
    stage loops over some of them, and has their part of each stack, whose home is all stages together.

    Of a Program that was rolled (``roll``), the repeated layers of each stage are one loop, so that compiling
    takes no longer the more layers a stage has. It is cut where it would be without loops.

    Args:
        program: a training Program, as ``minimize`` makes it, for one device.
        stages: how many.
        micro_batches: how many a stage works on, one after the other; at least as many as stages, better
            four times.
        schedule: ``"gpipe"``, ``"1f1b"`` or ``"zero_bubble"``: the order of the work of each stage, which
            decides how long stages wait and how many micro-batches they hold. The results are equal to the
            bit.
        at: the scopes with which all stages but the first begin (``jax.named_scope``), as names or patterns.
        whole: data that every micro-batch gets whole, as in ``accumulate``.
        is_sum: the loss is a sum over examples, as in ``accumulate``; as the graph tells unless given.
        data: how many devices each stage has. Each works on micro-batches of its own, so that a batch is cut
            into ``micro_batches * data``, and has all of the stage's parameters; what they add up of
            gradients is summed once a step. To split parameters too, partition the Program: its mesh is that
            of each stage, and along axes that split examples and nothing else it is as with ``data``.

    Raises:
        ArgumentError: an unknown schedule; more stages than the forward pass can be cut into; stages that do
            not divide the turns of a loop over layers; micro-batches that do not divide the batch, or fewer
            than 2; more devices a stage than divide a micro-batch; a Program over a mesh that has devices, or
            with ``data`` beside a mesh.
        GraphError: no update; a stage without parameters; statistics of a batch that are carried on (batch
            norm, delayed scales of float8); a Program that is replicated, accumulated, watched, guarded or
            offloaded.
        UnknownNameError: no op stands in a scope of ``at``.
        RecipeError: the Program was not traced, or its ops were changed by hand.

    Warns:
        UserWarning: examples see each other, or the loss is neither a mean nor a sum: see ``accumulate``.

    Source: Huang et al., GPipe, 2019; Narayanan et al., Efficient Large-Scale Language Model Training on GPU
    Clusters Using Megatron-LM, 2021, section 2.2; Qi et al., Zero Bubble Pipeline Parallelism, 2023.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> def loss(params, x):
        ...     return jnp.mean((jnp.tanh(x @ params["w1"]) @ params["w2"]) ** 2)
        >>> params = {"w1": jnp.ones((3, 8)), "w2": jnp.ones((8, 2))}
        >>> program = ow.SGD(0.1).minimize(loss, params, jnp.ones((8, 3)))
        >>> cut = ow.pipeline(program, stages=2, micro_batches=4)
        >>> [op.type for op in cut.parts[0, "F"].ops], [v.name for v in cut.parts[1, "F"].state]
        (['dot_general', 'tanh'], ['w2'])
        >>> print(cut.schedule)
        1f1b: 2 stages, 4 micro-batches, idle 20 %
                 1  2  3  4  5  6  7  8  9  10 11 12 13 14 15  holds  idle
        stage 0  F0 F1       B0 .  F2 B1 .  F3 B2 .     B3 .       2   20 %
        stage 1     F0 B0 .  F1 B1 .  F2 B2 .  F3 B3 .             1   20 %
    """
    expect_program(program, "pipeline")
    order = schedule_of(schedule, stages, micro_batches)
    expect_count(micro_batches, "pipeline: micro_batches", least=2, of="how many")
    expect_count(data, "pipeline: data", of="how many devices of each stage")
    at = _scopes(at)
    whole = listed(whole)
    recipe = recipe_of(program, "at the size of a micro-batch", "Compile it for one device")
    names = batch_names(program, whole, WEIGHT, recipe.origin.fixed_data)
    mesh = _mesh(program, data, names)
    lanes = lanes_of(mesh, recipe.of(constrained), names)
    steps = micro_batches * lanes.count
    if lanes.axes and WEIGHT not in names and not recipe.origin.assumes_batch:
        _expect_divided(program, micro_batches, names, lanes)
    program = _of_lane(program, recipe, lanes)
    recipe = recipe_of(program, "at the size of a micro-batch", "Compile it for one device")
    _expect_fit(program, recipe)
    plain = without_loops(program) if is_rolled(program) else program
    accumulated = accumulate(plain, steps, whole=whole, is_sum=is_sum)
    if not any(op.type is ACCUMULATE for op in accumulated.ops):
        raise ArgumentError(f"pipeline: the batch of {program.name!r} has one row, which cannot be cut.")
    loops = loops_of(plain, accumulated, stages, at)
    homes = homes_of(loops, stages, at)
    if plain is not program and not loops.begins:
        program = rolled_within(program, plain, homes)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the same was said of the Program without loops
            accumulated = accumulate(program, steps, whole=whole, is_sum=is_sum)
        loops = StageLoops(loop_of(accumulated))
    return cut(program, accumulated, loops, order, homes, lanes)


def _mesh(program: Program, data: int, names: Sequence[str]) -> Partition | None:
    """The mesh of each stage, and what its devices share."""
    how = program.partition
    if how is None:
        examples = dict.fromkeys(names, PartitionSpec("data"))
        return Partition({"data": data}, examples) if data > 1 else None
    if data > 1:
        raise ArgumentError(
            f"pipeline: data={data}, and {program.name!r} is partitioned over {how}, which says what devices "
            "each stage has. Say it there: partition(program, {'data': 2, ...}, ...)."
        )
    if how.devices:
        raise ArgumentError(
            f"pipeline: {program.name!r} is partitioned over a mesh with devices, and each stage has its "
            f"own. Give partition the lengths of the axes, {dict(how.mesh)}."
        )
    return how


def _expect_divided(program: Program, micro_batches: int, names: Sequence[str], lanes: Lanes) -> None:
    """Raise ``ArgumentError`` for a batch that the micro-batches of all lanes do not divide."""
    steps = micro_batches * lanes.count
    rows = max(v.shape[0] for v in program.inputs if v.name in names)
    if rows % steps:
        raise ArgumentError(
            f"pipeline: the batch of {program.name!r} has {rows} rows, which {micro_batches} micro-batches "
            f"for each of {' x '.join(lanes.axes)}={lanes.count} do not divide. Feed {steps} rows or a "
            "multiple, or take fewer micro-batches or devices."
        )


def _of_lane(program: Program, recipe: Recipe, lanes: Lanes) -> Program:
    """The Program for one device, or, with its constraints, for those of a lane."""
    if program.partition is None:
        return program
    return build(in_lane(recipe.without(partitioned), lanes), whole_types(program))


def _scopes(at: Iterable[str]) -> Sequence[str]:
    found = (at,) if isinstance(at, str) else tuple(at)
    if not all(isinstance(scope, str) for scope in found):
        raise ArgumentError(f"pipeline: at is {found!r}; expected names of scopes, such as ['block_2'].")
    return found


def _expect_fit(program: Program, recipe: Recipe) -> None:
    """Raise ``GraphError`` for what no pipeline can be made of."""
    expect_no_axis(program, "pipeline")
    for step in recipe.steps:
        if step.phase is Phase.KEEP and not is_rolled(program):
            continue  # of the user's own loops, which keep the same in stages
        why = _SCALED if step.function is adjust_scale else _REFUSED.get(step.phase)
        if why is not None:
            raise GraphError(f"pipeline: {called(step)} of {program.name!r} {why}.")
    given = () if program.signature is None else program.signature.parameters.variables
    if held := [v.name for v in given if v not in program.state]:
        raise GraphError(
            f"pipeline: {program.name!r} keeps {held[0]!r} in fewer bits, which stages do not know. Leave "
            "base= of low_rank away."
        )
    updated = {p for p, _ in program.gradients} & program.next_state.keys()
    if not updated or not any(op.made_by is Pass.UPDATE for op in program.ops):
        raise GraphError(
            f"pipeline: {program.name!r} has no update. Make a training Program first: "
            "optimizer.minimize(loss, params, *batch)."
        )
    if odd := [op for op in program.ops if op.body.has_effects]:
        raise GraphError(
            f"pipeline: {odd[0]!r}{odd[0].at} prints or calls back, in an order that stages on several "
            "devices do not keep. Leave it out, and return the value beside the loss (has_aux=True)."
        )
