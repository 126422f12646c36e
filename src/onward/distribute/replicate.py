"""One Program for many devices: each holds the parameters and reads its part of the batch.

    replicate(program, devices=8)

The forward and backward pass are traced again at one device's part of the batch. Collective ops merge each
gradient along ``program.gradients``; every device then makes the same update. What a network draws at random
differs from device to device, what it reports is averaged. Where data named ``example_weight`` says how much
each example counts, a batch is filled up with examples of weight 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.builder import Builder
from onward.core.check import check, expect_program
from onward.core.errors import ArgumentError, GraphError
from onward.core.jaxprs.tracing import along
from onward.core.marks import OWN_KEY
from onward.core.meshes import expect_no_partition
from onward.core.placement import equal_variables, expect_divisible
from onward.core.program import Applied, Op, Phase, Program, Recipe, Replicas, Variable
from onward.core.recipe import build, laid_out, recipe_of, whole_types, with_steps
from onward.core.structure import describe, expect_count, expect_flag, is_word
from onward.core.walk import Where, descendants, listed, select, substitute, with_results
from onward.core.whole import opened
from onward.core.words import Pass, Placement
from onward.derive.backward import append_backward
from onward.derive.update.foreign import append_foreign_update
from onward.derive.update.update import append_update
from onward.develop.accumulation.accumulate import accumulation_of, expect_devices
from onward.develop.batch import WEIGHT, another_batch, batch_names, data_types, rows_of_each
from onward.develop.over_batch.bending import expect_proportional
from onward.develop.over_batch.filled import misled
from onward.develop.over_batch.into import added_apart
from onward.develop.over_batch.known import Following
from onward.develop.over_batch.own_keys import folded
from onward.distribute.merge import Average, Devices, Merge, Sum
from onward.distribute.share import Share, weighed_by
from onward.distribute.whole_batch import OfWholeBatch, expect_own_gradients, of_whole_batch


def replicate(
    program: Program,
    devices: int | None = None,
    merge: Merge | None = None,
    axis_name: str = "replicas",
    sync_batch_norm: bool = True,
    whole: Where | Iterable[Where] = (),
    example_weight: str = WEIGHT,
) -> Program:
    """The Program for several devices at once, which share one set of parameters.

    The global batch is split on its first axis, and the devices compute together what one would: a mean over
    examples, a sum, what is made of such (a root, a quotient, a penalty beside it), and what normalizes by
    statistics of the batch, in whatever library. A result that is an array over examples is joined. What has
    every example look at others (a sort, all pairs) sees those of its device only, which a warning says. Any
    other float is averaged over the devices, an integer is summed. If the function takes
    ``example_weight``, an array [batch] or [batch, ...], a batch that the devices do not divide is filled up
    with examples of weight 0. What adds up numbers that the weights do not make 0 (a sum of its own, the
    statistics of batch normalization), or is divided by the number of rows, may be another number then: the
    step warns of it when it is fed such a batch. Where nothing is known of the loss, it is taken for a mean
    weighed by it.

    Args:
        program: a training Program, or a test Program to evaluate.
        devices: how many; all that JAX shows unless given.
        merge: how gradients become one: ``Average()`` unless given.
        axis_name: the name of the axis that the collectives run along, unless the Program was traced with
            one.
        sync_batch_norm: what comes back to the examples, such as the statistics that they are normalized by,
            is that of the whole batch; if False, of each device's part, and nothing is warned of.
        whole: data that every device gets whole, by name, pattern or predicate, though it may happen to be as
            long as the batch. What has another length than the first array, or is declared with a length of
            its own in place of None, is never split.
        example_weight: the name of the data that says how much each example counts.

    Raises:
        ArgumentError: a batch that the devices do not divide, a ``merge`` that is not a strategy, or a flag
            that is none.
        RecipeError: the Program was not traced, or its ops were changed by hand.
        GraphError: it is replicated already, it has no gradients to merge, the function lays something out
            over a mesh of its own, or the optimizer's rule looks further than the strategy can see.

    Warns:
        UserWarning: an op in which examples see each other, a result that does not hold them once along its
            first axis, or a function that branches on their number.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.mean(x @ w), jnp.ones(3), jnp.ones((8, 3)))
        >>> program = ow.replicate(program, devices=4)
        >>> program["x"], [op.type for op in program.ops if op.made_by == "collective"]
        (Variable('x', float32[2,3], data), ['all_mean', 'all_mean'])
    """
    expect_program(program, "replicate")
    _expect_not_replicated(program)
    instead = "An axis of the mesh that splits the batch does what replicate does: batch='data'."
    expect_no_partition(program, "replicate", instead)
    merge = Average() if merge is None else _strategy(merge)
    instead = "Trace it at that size (a trainer's: split(replicate(program, devices), servers).trainer)"
    recipe = recipe_of(program, "at one device's part of the batch", instead)
    if not program.gradients and recipe.origin.training:
        raise GraphError(
            f"Program {program.name!r} has no gradients to merge. Minimize first, then replicate: "
            "replicate(optimizer.minimize(loss, ...)). To evaluate on many devices, replicate the test "
            "Program: replicate(for_test(program))."
        )
    if not isinstance(axis_name, str) or not axis_name:
        raise ArgumentError(
            f"replicate: axis_name is {describe(axis_name)}; expected a name, such as 'replicas'."
        )
    expect_flag(sync_batch_norm, "replicate: sync_batch_norm")
    count = jax.device_count() if devices is None else _checked(devices)
    whole = listed(whole)
    if (how := accumulation_of(program)) is not None:
        expect_devices(program, count, merge.is_sum)
        whole += [v.name for v in program.inputs if v.name not in how.split]
        example_weight = example_weight if example_weight != WEIGHT else how.weight or WEIGHT
    if not is_word(example_weight, [WEIGHT]):
        select(program.inputs, [example_weight], "example_weight")
    split = batch_names(program, whole, example_weight, recipe.origin.fixed_data)
    weight = example_weight if example_weight in split else None
    name = axis_name if program.replicas is None else program.replicas.name
    replicas = Replicas(count, name, sync_batch_norm, merge.period, weight)
    if replicas.syncs and count > 1 and split and not merge.is_sum:
        each = f"each of {count} devices has those of a mean over fewer examples, which are larger"
        instead = "Take ow.partition; sync_batch_norm=False says that every device's own are meant."
        expect_proportional(program, each, instead)
    is_free = recipe.origin.assumes_batch
    parts = count * (how.steps if how is not None else 1)
    data = data_types(program, split, parts) if is_free else whole_types(program)
    now = None if is_free else partial(_laid_out, program, recipe, replicas, merge, split)
    return laid_out(recipe, devices_step(replicas, merge, split), data, now)


def devices_step(replicas: Replicas, merge: Merge, split: tuple[str, ...]) -> Applied:
    """The step of a recipe that lays out the data of these names over devices."""
    return Applied(replicated, (replicas, merge, split), {}, Phase.DEVICES, lays_out_batch=True)


def replicated(
    recipe: Recipe, data: tuple[Any, ...], replicas: Replicas, merge: Merge, split: tuple[str, ...]
) -> Program:
    """The Program of a recipe for these devices, with the data of these names laid out over them."""
    return _laid_out(build(recipe, data), recipe, replicas, merge, split)


def _expect_not_replicated(program: Program) -> None:
    if program.recipe is not None and program.recipe.of(replicated):
        assert program.replicas is not None
        raise GraphError(
            f"Program {program.name!r} is replicated already, for {program.replicas.count} devices."
        )


def _expect_no_mesh(program: Program) -> None:
    """Raise ``GraphError`` for a function that lays out arrays over devices itself."""
    for op in program.ops:
        if op.body.has_own_mesh:
            raise GraphError(
                f"replicate: {program.name} has a {op.type}{op.at}, over a mesh of its own, and a replicated "
                "Program lays out its arrays itself. Leave out replicate: compile the Program as it is, give "
                "the step a batch that is sharded over an axis of that mesh, jax.device_put(batch, "
                "NamedSharding(mesh, PartitionSpec('data'))), and XLA merges the gradients."
            )


def _expect_update_of_ours(program: Program, recipe: Recipe, merge: Merge) -> None:
    """Raise ``GraphError`` for a strategy that makes the update itself, where that is someone else's."""
    if type(merge).update is not Merge.update and recipe.of(append_foreign_update):
        raise GraphError(
            f"{type(merge).__name__} makes the update itself, for which it has to know the optimizer's rule, "
            f"and that of {program.name!r} was adopted from another library. Merge with a strategy for "
            "gradients, such as Average() or Bucketed(), or take an optimizer of Onward: "
            "optimizer.minimize(loss, ...)."
        )


def _laid_out(
    program: Program, recipe: Recipe, replicas: Replicas, merge: Merge, split: tuple[str, ...]
) -> Program:
    group = Devices(replicas.name, replicas.count)
    _expect_no_mesh(program)
    _expect_update_of_ours(program, recipe, merge)
    _expect_one_batch(program, [program[name] for name in split], replicas)
    with along(replicas):
        local, share, told, misleading = _forward(program, recipe, replicas, merge, split)
        local = check(share.of_loss(local)) if share is not None and not merge.is_sum else local
        for step in recipe.steps:
            if step.function is append_update:
                local = merge.update(local, *step.arguments, **step.options, devices=group)
            else:
                if step.function is append_foreign_update:  # which may read them, as a metric does
                    known = [v for v, is_told in zip(local.outputs, told, strict=False) if is_told]
                    local = _with_merged_results(local, group, known, merge, share)
                local = with_steps(local, [step])
            if step.function is append_backward:
                local = share.of_gradients(local) if share is not None else local
                local = merge.apply(local, group, recipe.steps)
        grown = _grown(program, local)
        results = [v for v in local.outputs if v.name not in grown]
        merged = _with_merged_results(local, group, results, merge, share)
    replicas = replace(replicas, misled=misleading)
    return check(replace(_with_joined_results(merged, program), replicas=replicas))


def _forward(
    program: Program, recipe: Recipe, replicas: Replicas, merge: Merge, split: tuple[str, ...]
) -> tuple[Program, Share | None, list[bool], tuple[tuple[str, str], ...]]:
    """The forward pass of one device, traced at its part of the batch.

    With it how much this part counts, if the graph does not tell; for each result whether that of the whole
    batch is known to follow from the devices'; and the results that padding misleads.
    """
    devices, weight = Devices(replicas.name, replicas.count), replicas.weight
    rows = rows_of_each(program[split[0]].shape[0], devices.size, weight) if split else 0
    local = recipe.origin.trace(data_types(program, split, rows))
    _expect_alike(local)
    local = added_apart(opened(local))
    placed = {v: replace(v, placement=Placement.SHARDED) for v in local.inputs if v.name in split}
    local = substitute(local, placed)
    traced, found = local, OfWholeBatch(local)
    if rows and devices.size > 1:

        def trace(rows: int) -> Program:
            with along(None):
                return added_apart(opened(recipe.origin.trace(data_types(program, split, rows))))

        found = of_whole_batch(trace, local, rows, split, replicas, merge.is_sum)
        if found.seen is not None and replicas.syncs and recipe.of(append_backward):
            expect_own_gradients(*found.seen, devices.size)
    told = found.told
    own = _with_own_keys(found.program, devices, None if told is None else told.drawn)
    merged = check(_with_merged_state(own, devices))
    follows = [told is not None and _is_told(traced, v, told) for v in traced.outputs]
    if weight is None:
        return merged, None, follows, ()
    is_told = told is not None and (traced.loss is None or _is_told(traced, traced.loss, told))
    misleading = () if found.seen is None else misled(*found.seen, weight)
    return merged, None if is_told else Share(own, own[weight], devices), follows, misleading


def _is_told(program: Program, result: Variable, following: Following) -> bool:
    """Whether a result follows from those of the devices, whose ops read the whole batch's numbers."""
    return following.without_numbers(following.numbers, following.constants).is_told(program, result)


def _expect_alike(program: Program) -> None:
    """Raise ``GraphError`` for a Program from a file in which devices had to differ, or to exchange."""
    carried = [v for v in program.state if v in program.next_state or v.is_key]
    updates = any(op.made_by is not Pass.FORWARD for op in program.ops)
    if program.code is None or not (carried or updates):
        return
    what = "holds its update" if updates else f"carries {carried[0].name!r} from step to step"
    raise GraphError(
        f"{program.name!r} was loaded from {program.code.file} and {what}, which is made for one device: "
        "random numbers would be the same on all, statistics those of a part. Trace the code of the network "
        "for that; or train the model as it answers, with a loss of your own: "
        "replicate(minimize(lambda p, x, y: loss(model(p, x), y), model.parameters, x, y))."
    )


def _with_own_keys(program: Program, devices: Devices, drawn: set[Variable] | None) -> Program:
    """Random numbers differ from device to device: what draws is given a key of its device's own.

    Keys that came with the examples of a device are its own already. ``drawn`` is what is drawn for each
    example, if it is known; nothing else differs.
    """
    builder = Builder(program, made_by=Pass.COLLECTIVE)
    equal = {v for v in equal_variables(program) if v.is_key} - descendants(program, drawn or ())

    def own(op: Op) -> Op:
        if all(v.is_key for v in op.outputs) if drawn is None else drawn.isdisjoint(op.outputs):
            return op
        keys = {v: builder.once(v, partial(_own_key, builder, v, devices)) for v in op.inputs if v in equal}
        return replace(op, inputs=tuple(keys.get(v, v) for v in op.inputs)) if keys else op

    for op in program.ops:
        builder.append(own(op))
    return replace(program, ops=builder.ops)


def _own_key(builder: Builder, key: Variable, devices: Devices) -> Variable:
    return builder.behind(key, OWN_KEY, lambda keys: folded(keys, devices.index), f"own({key.name})")


def _with_merged_state(program: Program, devices: Devices) -> Program:
    """Merge the state of the network (running statistics, counters) into that of the whole batch."""
    equal = equal_variables(program)
    builder = Builder(program, program.ops, made_by=Pass.COLLECTIVE)
    following = {}
    for old, new in program.next_state.items():
        differs = old.placement is Placement.REPLICATED and new not in equal
        following[old] = _next(builder, old, new, devices) if differs else new
    return replace(program, ops=builder.ops, next_state=following)


def _next(builder: Builder, old: Variable, new: Variable, devices: Devices) -> Variable:
    """The mean of a float over the devices; of an integer, which counts, the sum of what each one added."""
    if not jnp.issubdtype(new.dtype, np.integer):
        return _reduced(builder, new, devices)
    name = f"{Sum().name}({new.name})"
    return builder.add(Sum().name, [old, new], [name], lambda was, now: [was + devices.sum(now - was)])[0]


def _with_merged_results(
    program: Program, devices: Devices, results: Iterable[Variable], merge: Merge, share: Share | None
) -> Program:
    """Merge these results into numbers of the whole batch; arrays over examples stay on their device."""
    equal = equal_variables(program)
    builder = Builder(program, program.ops, made_by=Pass.COLLECTIVE)
    merged = {
        v: _reduced(builder, v, devices, merge.is_sum and v is program.loss, share)
        for v in results
        if v not in equal
    }
    return replace(with_results(program, lambda v: merged.get(v, v)), ops=builder.ops)


def _with_joined_results(program: Program, whole: Program) -> Program:
    """Results that only grow along their first axis are laid end to end, as data is."""
    merged = {v for op in program.ops if op.made_by is Pass.COLLECTIVE for v in op.outputs}
    pairs = zip(whole.outputs, program.outputs, strict=True)
    equal = equal_variables(program)
    joined = [
        v
        for theirs, v in pairs
        if v.shape and v not in merged and theirs.shape[1:] == v.shape[1:]
        if v not in equal or theirs.shape != v.shape
    ]
    return substitute(program, {v: replace(v, placement=Placement.SHARDED) for v in joined})


def _reduced(
    builder: Builder, v: Variable, devices: Devices, is_sum: bool = False, share: Share | None = None
) -> Variable:
    """The mean over the devices of a float, the sum of an integer (it counts) and of what ``is_sum``."""
    how = Average() if v.is_float and not is_sum else Sum()
    if not jnp.issubdtype(v.dtype, np.number):
        raise GraphError(
            f"{v.name!r} ({v.type}) differs from device to device, and nothing says how to merge it. Return "
            "or carry numbers: a float is averaged, an integer is summed."
        )
    inputs = [v]
    if share is not None and isinstance(how, Average) and share.counts_for(v):
        inputs.append(share.value(builder))

    def reduce(x: Any, *factor: Any) -> list[Any]:
        return [how.merge(weighed_by(x, *factor) if factor else x, {}, devices)[0]]

    return builder.add(how.name, inputs, [f"{how.name}({v.name})"], reduce)[0]


def _expect_one_batch(program: Program, split: Sequence[Variable], replicas: Replicas) -> None:
    """Raise ``ArgumentError`` for a batch that devices do not divide, or that is not one."""
    for v in split:
        if v.shape[0] != split[0].shape[0]:
            raise ArgumentError(
                f"{program.name}: {v.name!r} has {v.shape[0]} rows, {split[0].name!r} {split[0].shape[0]}; "
                "both are split over the devices. What each is to get whole: replicate(..., whole=[name])."
            )
        if replicas.weight is None:
            more = another_batch(program, {v.name for v in split}, replicas.count)
            expect_divisible(program.name, v.shape[0], v.name, replicas.count, more=more)


def _grown(whole: Program, local: Program) -> set[str]:
    """The names of results that grow with the batch: arrays over examples."""
    split = [v for v in zip(whole.inputs, local.inputs, strict=True) if v[1].placement is Placement.SHARDED]
    rows, before = {mine.shape[0] for _, mine in split}, {theirs.shape[0] for theirs, _ in split}
    pairs = zip(whole.outputs, local.outputs, strict=True)
    return {
        mine.name
        for theirs, mine in pairs
        if theirs.shape != mine.shape or (rows == before and mine.shape and mine.shape[0] in rows)
    }


def _strategy(merge: object) -> Merge:
    if not isinstance(merge, Merge):
        found = merge.__name__ if isinstance(merge, type) else repr(merge)
        raise ArgumentError(
            f"replicate: merge is {found}; expected a merge strategy, an object and not its class: "
            "Average(), Bucketed(bytes), or one of your own."
        )
    return merge


def _checked(devices: int) -> int:
    expect_count(devices, "replicate: devices", of="how many")
    return int(devices)
