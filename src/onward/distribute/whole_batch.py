"""The forward pass of one device, so that what devices compute together is what one would of the whole batch.

A loss that is a mean over examples is right by itself once the devices' are averaged. A sum is scaled up, and
a statistic of the batch that something not linear reads (normalization, a root, a quotient) is merged first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from onward.core.builder import Builder
from onward.core.errors import OnwardError
from onward.core.placement import equal_variables
from onward.core.primitives.table import of
from onward.core.program import Op, Program, Replicas, Variable
from onward.core.source import user_level
from onward.core.walk import with_results
from onward.core.words import Pass
from onward.develop.over_batch.known import CanHave, Following, How, Need
from onward.develop.over_batch.meeting import same_draws
from onward.develop.over_batch.reading import reading, times
from onward.develop.over_batch.walk import follow, where_parted
from onward.distribute.merge import Devices


class OfWholeBatch(NamedTuple):
    """The forward Program of one device, with the facts known about it.

    Attributes:
        program: it computes its share of what the whole batch gives.
        told: how its results follow those of the whole, and what is drawn at random for each example; None
            where nothing is known.
        seen: the Program that was looked at for that, and how all of its values follow.
    """

    program: Program
    told: Following | None = None
    seen: tuple[Program, Following] | None = None


def of_whole_batch(
    trace: Callable[[int], Program],
    local: Program,
    rows: int,
    split: Collection[str],
    replicas: Replicas,
    is_sum: bool,
) -> OfWholeBatch:
    """The forward Program of one device that computes its share of what the whole batch gives.

    Args:
        trace: the function's forward Program for so many examples on one device.
        local: the same for the part of each of several.
        rows: how many examples that are.
        split: the names of the data that is split.
        replicas: how many devices, and whether what comes back to the examples is merged.
        is_sum: whether gradients are merged as those of a loss that is a sum.

    Warns:
        UserWarning: examples see each other in a way that no merging makes right, a result lays them out in
            another order, or the function is another one for a part of the batch.
    """

    def can_have(v: Variable, need: Need, reaches: bool) -> bool:
        return replicas.syncs or not reaches

    devices = Devices(replicas.name, replicas.count)
    whole = trace(rows * devices.size)
    following = follow(whole, local, devices.size, split, can_have)
    if following is None:
        two = _of_two(trace, split, devices.size, can_have) if rows == 1 else None
        if two is not None and (told := _of_one(local, two)) is not None:
            made = _scaled(_with_statistics(local, told, devices), told, devices, is_sum)
            return OfWholeBatch(made, told, (two.part, two.following))
        if replicas.syncs:
            warnings.warn(_other_graph(whole, local, rows, devices.size), stacklevel=user_level())
        return OfWholeBatch(local)
    told = following.reaching(local, [*local.outputs, *local.next_state.values()])
    if told.mixing and replicas.syncs:
        warnings.warn(_said(local, *told.mixing[0], devices.size), stacklevel=user_level())
    for found in same_draws(local, following) if replicas.syncs else ():
        found.warn(local, f"{devices.size} devices", "replicate(..., sync_batch_norm=False)")
    for v in _out_of_order(whole, local, following)[: bool(replicas.syncs)]:
        warnings.warn(
            f"{local.name}: the result {v.name!r} ({v.type} on each of {devices.size} devices) is laid end "
            "to end along its first axis, and holds the examples several times or along another axis, or "
            "counts them from 0: it differs from that of one device. Return each array once, with the "
            "examples first, and count them outside.",
            stacklevel=user_level(),
        )
    made = _scaled(_with_statistics(local, following, devices), following, devices, is_sum)
    return OfWholeBatch(made, following, (local, following))


def expect_own_gradients(local: Program, following: Following, devices: int) -> None:
    """Warn of a derivative rule in which examples see each other, as no derivative would let them."""
    for op, why in following.rules_of_loss(local)[:1]:
        warnings.warn(_said(local, op, why, devices), stacklevel=user_level())


def _out_of_order(whole: Program, local: Program, following: Following) -> list[Variable]:
    """The results that are not the devices' laid end to end along their first axis."""
    pairs = zip(whole.outputs, local.outputs, strict=True)
    elsewhere = [mine for theirs, mine in pairs if theirs.shape[1:] != mine.shape[1:]]
    return [*elsewhere, *following.out_of_order(local.outputs)]


class _OfTwo(NamedTuple):
    """The Programs for two examples on each device and for all of these, and how one follows from the other.

    Of one example JAX leaves out axes, so that the function may look like another one.
    """

    part: Program
    whole: Program
    following: Following


def _of_two(
    trace: Callable[[int], Program], split: Collection[str], count: int, can_have: CanHave
) -> _OfTwo | None:
    """None where examples meet, or are counted, or the function does not take two."""
    try:
        part, whole = trace(2), trace(2 * count)
        following = follow(whole, part, count, split, can_have)
    except OnwardError:
        return None
    if following is None or following.counting(part) or following.mixing or following.group > 1:
        return None
    is_known = all(following.found[v].kind is not How.OWN for v in _results(part))
    return _OfTwo(part, whole, following) if is_known else None


def _results(program: Program) -> list[Variable]:
    return [*program.outputs, *program.next_state.values()]


def _of_one(local: Program, two: _OfTwo) -> Following | None:
    """How the results of one example on each device follow, and what its ops need, as told of two.

    None where more differs than how numbers are moved, as for a function that branches on its length.
    """
    if not _computes_as_two(local, two):
        return None
    pairs = zip(_results(local), _results(two.part), strict=True)
    drawn = {local[v.name] for v in two.following.drawn if v.name in local}
    made = {tuple(v.name for v in op.outputs): op for op in local.ops}
    needs = {}
    for op, needed in two.following.needs.items():
        mine = made.get(tuple(v.name for v in op.outputs))
        if mine is None or not _is_same(mine, op, needed):
            return None
        needs[mine] = {local[v.name]: need for v, need in needed.items()}
    return Following({mine: two.following.found[theirs] for mine, theirs in pairs}, needs, drawn=drawn)


def _computes_as_two(one: Program, two: _OfTwo) -> bool:
    """Whether one example is computed as two are, but for how arrays are moved in between.

    All that is computed has the same parameters and numbers, in the same line, of arrays whose axis of the
    examples is there and has length 1.
    """
    programs = (one, two.part, two.whole)
    shapes = [[v.shape for v in _results(program)] for program in programs]
    lines = [_computing(program) for program in programs]
    return _goes_on(*shapes) and _goes_on(*lines)


def _computing(program: Program) -> list[tuple[Any, ...]]:
    """For all that a Program runs, however deep, and that does more than to move numbers, how it does so."""
    calls = ((call, op.at) for op in program.ops for call in op.body.calls_within)
    return [
        (
            *(call.primitive, at, *(t.shape for t in (*call.operands, *call.results))),
            *(None if x is None else np.asarray(x).tolist() for x in call.numbers),
            *(x for _, x in sorted(call.params.items())),
        )
        for call, at in calls
        if of(call.primitive).moves is None
    ]


def _goes_on(one: Any, two: Any, more: Any) -> bool:
    """Whether something for one example is that for two, if it is so for more of them, or else the half."""
    if isinstance(two, tuple | list):
        are_alike = isinstance(one, tuple | list) and isinstance(more, tuple | list)
        return are_alike and len(one) == len(two) == len(more) and all(map(_goes_on, one, two, more))
    if isinstance(two, int | float) and isinstance(one, int | float):
        return bool(one == two if two == more else 2 * one == two)
    return one == two if isinstance(two, str | None) else True  # a function or a jaxpr, whose calls follow


def _is_same(mine: Op, op: Op, needed: Collection[Variable]) -> bool:
    """Whether an op stands where another one does, and reads the same statistics."""
    if mine.type != op.type or mine.at != op.at or len(mine.inputs) != len(op.inputs):
        return False
    pairs = zip(mine.inputs, op.inputs, strict=True)
    return all(x.name == v.name and (v not in needed or x.aval == v.aval) for x, v in pairs)


def _with_statistics(local: Program, following: Following, devices: Devices) -> Program:
    """Let ops that are not linear in a statistic read the statistic of the whole batch."""

    def made(builder: Builder, v: Variable, need: Need) -> Variable:
        if need.merged is How.MEAN:
            return _merged(builder, v, need.power, devices)
        if need.merged is not How.SAME:
            return _extreme(builder, v, need.merged, devices)
        return times(builder, v, float(devices.size) ** need.power)

    return reading(local, following.needs, made, Pass.COLLECTIVE, following.numbers, following.constants)


def _merged(builder: Builder, v: Variable, power: int, devices: Devices) -> Variable:
    """The mean over the devices, times a power of their number."""
    scale = float(devices.size) ** (power - 1)

    def merge(x: Any) -> list[Any]:
        if power == 0:
            return [devices.mean(x)]
        total = devices.sum(x)
        return [total if power == 1 else (total * scale).astype(x.dtype)]

    return builder.behind(v, "all_sum" if power else "all_mean", merge)


def _extreme(builder: Builder, v: Variable, which: How, devices: Devices) -> Variable:
    """The largest or the smallest over the devices; its gradient goes to the devices that have it."""
    over_devices = devices.maximum if which is How.MOST else devices.minimum

    @jax.custom_jvp
    def extreme(x: Any) -> Any:
        return over_devices(x.astype(int)).astype(bool) if x.dtype == bool else over_devices(x)

    @extreme.defjvp
    def _(given: Any, tangents: Any) -> Any:
        found = extreme(*given)
        has = (given[0] == found).astype(found.dtype)
        return found, devices.sum(has * tangents[0]) / devices.sum(has)

    return builder.behind(v, "all_max" if which is How.MOST else "all_min", lambda x: [extreme(x)])


def _scaled(program: Program, following: Following, devices: Devices, is_sum: bool) -> Program:
    """Sums over examples that are returned or kept, so that their mean over the devices is the whole's.

    So it is with what each example has of such a sum, as ``e / sum(e)``.
    """
    builder = Builder(program, program.ops, made_by=Pass.COLLECTIVE)
    equal = equal_variables(program)

    def new(v: Variable) -> Variable:
        how = following.found.get(v)
        if how is not None and how.kind in (How.MOST, How.LEAST):
            extreme: Variable = builder.once(v, lambda: _extreme(builder, v, how.kind, devices))
            return extreme
        summed = v is program.loss and is_sum
        if how is None or not how.power or summed or how.kind is How.OWN:
            return v
        if how.kind is How.MEAN and not v.is_float and v not in equal:  # an integer is added up
            return v
        scaled: Variable = builder.once(v, lambda: times(builder, v, float(devices.size) ** how.power))
        return scaled

    returning = with_results(program, new)
    state = {old: new(v) for old, v in program.next_state.items()}
    return replace(returning, next_state=state, ops=builder.ops)


def _other_graph(whole: Program, local: Program, rows: int, devices: int) -> str:
    if rows == 1:
        return (
            f"{local.name}: each device takes one example at a time, for which the function builds another "
            f"graph than for the whole batch{where_parted(whole, local)}, as JAX leaves out axes of length "
            "1. So it is not known whether the devices compute together what one would. Let each take two "
            "examples or more at a time, of a short last batch too (ow.batches(..., drop_last=True)); or "
            f"take ow.partition(program, {{'data': {devices}}}, {{}}, batch='data') in place of replicate, "
            "which computes what one device would; or, if every device's own graph is meant: "
            "replicate(..., sync_batch_norm=False)."
        )
    return (
        f"{local.name}: for the examples of one device the function builds another graph than for the whole "
        f"batch{where_parted(whole, local)}, so the devices may not compute together what one would. Let it "
        "branch on no length of its data; or, if every device's own graph is meant: "
        "replicate(..., sync_batch_norm=False)."
    )


def _said(program: Program, op: Op, why: str, devices: int) -> str:
    return (
        f"{program.name}: {op.type!r}{op.at} {why}, and each of {devices} "
        "devices sees only its own. The result differs from that of one device with the whole batch. To have "
        f"the examples of all: ow.partition(program, {{'data': {devices}}}, {{}}, batch='data') in place of "
        "replicate; or trace with axis_name='replicas' and use jax.lax.all_gather(x, 'replicas', tiled=True) "
        "there. If every device's own examples are meant: replicate(..., sync_batch_norm=False)."
    )
