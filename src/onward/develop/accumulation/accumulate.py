"""A big batch as micro-batches one after the other: the memory of one, the gradient of all.

    accumulate(program, steps=8)

Forward and backward pass run in a loop with one buffer for each gradient. What merges gradients, what changes
them and what updates runs once, after the loop, on the gradient of the whole batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import Any

from onward.core.check import check, expect_program
from onward.core.errors import ArgumentError, GraphError, OnwardError
from onward.core.marks import OF_WHOLE_BATCH
from onward.core.program import Applied, Op, Phase, Program, Recipe
from onward.core.recipe import build, laid_out, recipe_of
from onward.core.source import user_level
from onward.core.structure import expect_count, expect_flag, is_word
from onward.core.walk import Where, listed, producers, select
from onward.core.words import Placement
from onward.develop.accumulation.carried import State, keys_in, made_of, untold
from onward.develop.accumulation.differing import expect_apart, expect_merged, expect_moved_on
from onward.develop.accumulation.loop import with_loop
from onward.develop.accumulation.micro_batches import Accumulation
from onward.develop.accumulation.statistics import KnownOfWhole, OfMicroBatch, own_keys
from onward.develop.batch import WEIGHT, another_batch, batch_names, data_types, filled_up
from onward.develop.over_batch.alike import has_same_ops, otherwise
from onward.develop.over_batch.bending import expect_proportional, expect_proportional_in_sums
from onward.develop.over_batch.filled import misled
from onward.develop.over_batch.known import SAME, Following, Follows, How
from onward.develop.over_batch.loss import is_sum as is_sum_of
from onward.develop.over_batch.walk import follow, where_parted

_PURPOSE = "at the size of a micro-batch", "Feed smaller batches"


def accumulate(
    program: Program,
    steps: int,
    whole: Where | Iterable[Where] = (),
    example_weight: str = WEIGHT,
    is_sum: bool | None = None,
) -> Program:
    """The Program that takes its batch in micro-batches, one after the other, and updates once.

    The batch is cut along the first axis. For a loss that is a mean over examples or a sum, which the graph
    tells, the step is that of the big batch, and so are the results beside the loss: a mean, a sum, a count,
    the largest, and what is computed of them, such as a perplexity, which runs once, after the loop. An array
    over examples is joined; where nothing is known of a result, floats are averaged and integers summed.
    State that the forward pass carries is that of the big batch too, wherever the graph tells: a count of
    steps and a random key move on once, a running mean is that of the whole batch. Other state goes from one
    micro-batch to the next, which is warned of. What is drawn for no example is the same in all of them; for
    its examples each draws numbers of its own. A statistic of data alone, such as how
    many tokens a mask lets count, is computed before the loop, and ``of_whole_batch`` in the printout. If the
    function takes ``example_weight``, an array [batch] or [batch, ...], a batch that does not divide is
    filled up with examples of weight 0. Where nothing is known of the loss, it is taken for a mean weighed by
    it. What normalizes by statistics of activations sees one micro-batch at a time, which is warned of.

    Only what the loop hands out can be fetched: gradients, the loss, the outputs. The Program that it runs
    is ``op.subprograms["micro_batch"]`` of the op ``accumulate``.

    Args:
        program: a Program with a backward pass, with or without its update, replicated or not.
        steps: how many micro-batches.
        whole: data that every micro-batch gets whole, by name, pattern or predicate, though it may happen to
            be as long as the batch. What has another length than the first array, or is declared with a
            length of its own in place of None, is never cut.
        example_weight: the name of the data that says how much each example counts.
        is_sum: the loss is a sum over examples, not a mean, and so are its gradients; as the graph tells
            unless given. Where it is given, and there is ``example_weight``, means are weighed by that.

    Raises:
        ArgumentError: ``steps`` is not a number of at least 1, or does not divide the batch.
        GraphError: there are no gradients, it is accumulated already or was loaded from the file of a step,
            an update evaluates the loss again, or a value cannot be put together from those of micro-batches.
        RecipeError: the Program was not traced, its ops were changed by hand, or at the length of a
            micro-batch the function has no op that reads a statistic as it does at others.

    Warns:
        UserWarning: the loss is neither (the root of a mean, a quotient by a sum of activations, a sum times
            a number that counts the batch otherwise than a mean does), so that the mean over micro-batches is
            not the loss of the big batch; state of which that is so; examples see each other, as in a graph
            whose nodes are the batch, by batch normalization, or in a derivative rule of its own; a result
            holds all of them several times, numbers them, or is divided by how many they are; the function is
            another one for a micro-batch; a rule of its own clips gradients on their way back, which are
            larger for a mean over fewer examples; or a batch is filled up, which
            may change the loss, a result or state: it adds up what the weights do not make 0, or is divided
            by the number of rows.

    Source: Huang et al., GPipe, 2019, section 2.2 (micro-batches whose gradients are summed before one
    update).

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.mean(x @ w), jnp.ones(3), jnp.ones((8, 3)))
        >>> [op.type for op in accumulate(program, 4).ops]
        ['accumulate', 'count', 'sgd']
    """
    expect_program(program, "accumulate")
    recipe = recipe_of(program, *_PURPOSE)
    _expect_fit(program, recipe, steps)
    if is_sum is not None:
        expect_flag(is_sum, "accumulate: is_sum")
    if not is_word(example_weight, [WEIGHT]):
        select(program.inputs, [example_weight], "example_weight")
    whole = listed(whole)
    split = batch_names(program, whole, example_weight, recipe.origin.fixed_data)
    told = True if is_sum or _is_merged_by_sum(recipe) else is_sum
    weight = example_weight if example_weight in split else None
    how = Accumulation(int(steps), split, weight, is_sum=told)
    if any(v.placement is Placement.SHARDED for v in program.inputs):
        kept = select(program.inputs, whole, "whole")
        names = tuple(v.name for v in program.inputs if v not in kept)
        how = replace(how, split=names).on_devices(program)
    if not how.split:
        raise ArgumentError(
            f"accumulate: {program.name!r} takes no data with a batch as its first axis, so there is nothing "
            "to cut into micro-batches."
        )
    count = 1 if program.replicas is None else program.replicas.count
    is_free = recipe.origin.assumes_batch
    if not is_free:
        expect_rows(program, how, count)
    data = data_types(program, how.split, count * how.steps if is_free else how.whole_rows(program))
    how = _told(recipe, program, data, how)
    if is_sum is None and how.steps > 1:
        each = f"each of {how.steps} micro-batches has those of"
        meant = f"is_sum={bool(how.is_sum)} says that it is meant so."
        if how.is_sum:
            expect_proportional_in_sums(program, how.split, f"{each} its own examples. {meant}")
        else:
            instead = f"Return a sum over examples; {meant}"
            expect_proportional(program, f"{each} a mean over fewer examples, which are larger", instead)
    step = Applied(accumulated, (how,), {}, Phase.MICRO_BATCHES, lays_out_batch=True)
    is_other = is_free or how.stand_ins or how.is_filled(program)
    return laid_out(recipe, step, data, None if is_other else lambda: _looped(program, recipe, how))


def accumulated(recipe: Recipe, data: tuple[Any, ...], how: Accumulation) -> Program:
    """The Program of a recipe that takes its batch in these micro-batches."""
    program = build(recipe, data)
    if how.is_filled(program):
        _expect_filled(program, how)
    if not how.stand_ins or _is_one(program, how):
        return _looped(program, recipe, how)
    recipe = replace(recipe, origin=OfMicroBatch(recipe.origin, how.stand_ins))
    return _looped(build(recipe, data), recipe, how)


def _is_one(program: Program, how: Accumulation) -> bool:
    """Whether there is nothing to run in a loop."""
    return how.steps == 1 or how.rows(program) == 1


def _looped(program: Program, recipe: Recipe, how: Accumulation) -> Program:
    count = 1 if program.replicas is None else program.replicas.count
    how = how.on_devices(program) if count > 1 else how
    expect_rows(program, how, count)
    if _is_one(program, how):
        return program
    rows = count * -(-how.rows(program) // how.steps)
    return check(with_loop(program, build(recipe, data_types(program, how.split, rows)), how))


def _told(recipe: Recipe, program: Program, data: tuple[Any, ...], how: Accumulation) -> Accumulation:
    """Tell from the graph what the loop has to know of it.

    Whether the loss is a sum over examples, which other results are, and what is read of the whole batch.
    """
    if how.steps == 1:
        return how
    whole = recipe.origin.trace(data)
    rows = -(-how.rows(whole) // how.steps)
    whole, part = _both(recipe, program, whole, how)
    is_left = how.is_sum is not None
    by_share = replace(how, by_share=how.weight is not None)
    told, following = _walked(whole, part, by_share if is_left else how, is_left)
    if following is None and not is_left:
        warnings.warn(_other_graph(whole, part), stacklevel=user_level())
    if following is None or part.signature is None or is_left:
        return told if is_left else by_share
    results = [v for v in part.signature.result.variables if v is not part.loss]
    if rows % following.group:
        following.cut_groups()
    elif rows == 1 and (op := _other_for_one(recipe, program, whole, part, how)):
        warnings.warn(_ONE_EACH.format(name=part.name, type=op.type, at=op.at), stacklevel=user_level())
    expect_apart(part, following, how)
    expect_merged(part, following, results)
    told = replace(told, is_sum=is_sum_of(part, following, "accumulate takes the mean over micro-batches"))
    if how.weight is not None and part.loss is not None and not following.is_told(part, part.loss):
        told = _by_share(whole, part, by_share, told)
    expect_moved_on(part, following, told)
    return told


def _walked(
    whole: Program, part: Program, how: Accumulation, is_left: bool
) -> tuple[Accumulation, Following | None]:
    """How results follow from those of the micro-batches; nothing if they are not the same ops."""
    of_data = made_of(part, how.split, part.next_state)
    handed, every_key = dict(of_data if how.by_share else {}), keys_in(part, part.next_state)
    while True:
        known = KnownOfWhole(whole, part, is_left, handed)
        following = follow(whole, part, how.steps, how.split, known.can_have, in_turn=True)
        if following is None or part.signature is None:
            return how, following
        after, read = known.after_the_loop(whole, part, following)
        following = following.without(after)
        keys = _keys(part, following, handed)
        merged = {old: new for old, new in of_data.items() if old not in handed}
        results = (*part.signature.result.variables, *merged.values(), *keys.values())
        counts = known.known_counts(following).difference(map(producers(part).get, results))
        exact = following.without_numbers(counts, known.values)
        others = {old: new for old, new in every_key.items() if old not in keys and old not in handed}
        if not (left := {**untold(part, exact, after, merged), **others}):
            break
        handed |= left
    told = {v.name: following.found[v] for v in (*results, *read)}
    stand_ins = known.stand_ins(part, following, how.steps, [*part.outputs, *merged.values()])
    how = replace(
        how,
        stand_ins=(*stand_ins, *own_keys(part, following, how.split, handed)),
        merged=frozenset(old.name for old in (*merged, *keys)),
        behind=frozenset(op.outputs[0].name for op in after),
        told=tuple((name, f) for name, f in told.items() if not (how.by_share and f == Follows(How.MEAN))),
    )
    if how.weight is not None:
        of_whole = {(one.op, one.value) for one in stand_ins if one.read is OF_WHOLE_BATCH}
        how = replace(how, misled=misled(part, following, how.weight, after, of_whole))
    return how, exact


def _keys(part: Program, following: Following, handed: State) -> State:
    """The random keys that are state and move on once, as those of the whole batch; none that is handed on.

    What is drawn for examples has keys of its own then. Where one is drawn from that is hidden in an op, as a
    raw key is in a loop, all go from one micro-batch to the next.
    """
    state = {} if following.hidden_draws else keys_in(part, part.next_state)
    return {old: new for old, new in state.items() if following.found[new] == SAME and old not in handed}


def _by_share(whole: Program, part: Program, how: Accumulation, told: Accumulation) -> Accumulation:
    """How a batch is cut whose micro-batches count as much as the weights of their examples."""
    found, _ = _walked(whole, part, how, is_left=True)
    return replace(found, is_sum=told.is_sum, misled=told.misled)


def _both(recipe: Recipe, program: Program, whole: Program, how: Accumulation) -> tuple[Program, Program]:
    """The forward Programs of all micro-batches together, and of one.

    For one example JAX leaves out ops, so that two are looked at where the function takes as many.
    """

    def at(rows: int) -> tuple[Program, Program]:
        size = rows * how.steps
        types = data_types(program, how.split, size)
        return (
            whole if size == how.rows(whole) else recipe.origin.trace(types),
            recipe.origin.trace(data_types(program, how.split, rows)),
        )

    rows = -(-how.rows(whole) // how.steps)
    try:
        return at(max(rows, 2))
    except OnwardError:
        return at(rows)


def _other_for_one(
    recipe: Recipe, program: Program, whole: Program, part: Program, how: Accumulation
) -> Op | None:
    """The op that computes something else for one example than for the two that were looked at."""
    try:
        one = recipe.origin.trace(data_types(program, how.split, 1))
    except OnwardError:
        return None
    longer = Fraction(1, how.rows(part))
    same = has_same_ops(part, one)
    return otherwise(zip(part.ops, whole.ops, one.ops, strict=False), longer) if same else None


_ONE_EACH = (
    "{name}: {type!r}{at} computes something else for one example than for two, and each micro-batch has "
    "one. The result differs from that of the whole batch. Accumulate over fewer micro-batches."
)


def _other_graph(whole: Program, part: Program) -> str:
    return (
        f"{part.name}: for the examples of a micro-batch the function builds another graph than for the "
        f"whole batch{where_parted(whole, part)}, so that nothing is known of how the loss and the results "
        "of the whole batch follow from theirs, and means are taken. Let it branch on no length of its data, "
        "and cut none off at a number of its own (e[:8]). If it is meant so: is_sum=False, or True for a sum "
        "over examples."
    )


def _expect_filled(program: Program, how: Accumulation) -> None:
    """Warn of results that are other ones where the batch is filled up."""
    if how.misled:
        count = 1 if program.replicas is None else program.replicas.count
        parts = f"{how.steps} micro-batches{_on(count)}"
        told = filled_up(program.name, how.whole_rows(program), parts, how.misled)
        warnings.warn(told, stacklevel=user_level())


def accumulation_of(program: Program) -> Accumulation | None:
    """How a Program accumulates; None if it does not."""
    steps = () if program.recipe is None else program.recipe.of(accumulated)
    return steps[0].arguments[0] if steps else None


def weighed_batch(program: Program) -> tuple[tuple[str, ...], str | None]:
    """The names of the data that is as long as the batch, and of that of it which weighs examples, if any."""
    assert program.recipe is not None
    how = accumulation_of(program)
    weight = WEIGHT if how is None or how.weight is None else how.weight
    names = batch_names(program, (), weight, program.recipe.origin.fixed_data)
    return names, weight if weight in names else None


def expect_devices(program: Program, devices: int, is_sum: bool) -> None:
    """Raise ``ArgumentError`` unless devices can each take their part of the batch in micro-batches.

    ``is_sum``: whether they merge gradients as of a loss that is a sum over examples.
    """
    how = accumulation_of(program)
    assert how is not None
    assert program.recipe is not None
    if how.is_sum is not None and is_sum > how.is_sum:
        raise ArgumentError(
            "replicate: the merge strategy is for a loss that is a sum over examples, and accumulate took it "
            "for a mean. Write accumulate(..., is_sum=True), or take the strategy Average()."
        )
    if not program.recipe.origin.assumes_batch:
        expect_rows(program, how, devices)


def expect_rows(program: Program, how: Accumulation, devices: int) -> None:
    """Raise ``ArgumentError`` for data that is not one batch, or that the steps do not divide."""
    lengths = {v.name: v.shape[0] for v in program.inputs if v.name in how.split}
    (leader, rows), *others = lengths.items()
    for name, length in others:
        if length != rows:
            raise ArgumentError(
                f"{program.name}: {name!r} has {length} rows, {leader!r} {rows}; both are cut into "
                "micro-batches. What each is to get whole: accumulate(..., whole=[name])."
            )
    size, unit = how.whole_rows(program), devices * how.steps
    if how.weight is None and size % unit:
        below = size // unit * unit
        sizes = f"{below} or {below + unit}" if below else f"{unit}"
        raise ArgumentError(
            f"{program.name}: the batch has {size} rows ({leader!r}), which {how.steps} "
            f"micro-batches{_on(devices)} do not divide. Feed {sizes}; or let the loss take example_weight, "
            "an array [batch] that weighs its mean, and batches are filled up with examples of weight 0."
            f"{another_batch(program, how.split, unit)}"
        )


def _expect_fit(program: Program, recipe: Recipe, steps: Any) -> None:
    """Raise unless this Program can be accumulated over so many steps."""
    expect_count(steps, "accumulate: steps", of="how many micro-batches")
    if (how := accumulation_of(program)) is not None:
        raise GraphError(
            f"Program {program.name!r} is accumulated already, over {how.steps} micro-batches. Accumulate "
            "once, over the product of both numbers."
        )
    if not program.gradients:
        raise GraphError(
            f"Program {program.name!r} has no gradients to accumulate. Derive the backward pass first: "
            "accumulate(optimizer.minimize(loss, ...), steps)."
        )
    if program.code is not None:
        raise GraphError(
            f"{program.name!r} was loaded from {program.code.file}, which computes loss, gradients and "
            "update of the whole batch at once, so that nothing is left to do in micro-batches. Accumulate "
            f"before save: step = compile(accumulate(program, {steps})); save(step, path, state). Or train a "
            f"model from a file: save(model, path, trainable=True); accumulate(minimize(loss, ...), {steps})."
        )


def _is_merged_by_sum(recipe: Recipe) -> bool:
    """Whether a strategy that merges gradients takes the loss for a sum over examples."""
    return any(getattr(argument, "is_sum", False) for step in recipe.steps for argument in step.arguments)


def _on(devices: int) -> str:
    return f" on each of {devices} devices" if devices > 1 else ""
