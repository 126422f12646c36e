"""One Program for many devices: each holds the parameters and reads its part of the batch.

    replicate(program, devices=8)

The forward and backward pass are traced again at one device's part of the batch. Collective ops merge each
gradient along ``program.gradients``; every device then makes the same update. What a network draws at random
differs from device to device, what it reports is averaged.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.check import check
from onward.core.errors import ArgumentError, GraphError
from onward.core.jaxprs import Axis, Type, along, body_of
from onward.core.placement import equal_variables
from onward.core.program import Op, Program, Replicas, Variable
from onward.core.transform import Origin, recipe_of, transform
from onward.core.walk import substitute
from onward.core.words import Placement
from onward.derive.backward import append_backward
from onward.derive.update import append_update
from onward.distribute.merge import Average, Devices, Merge, Sum
from onward.distribute.weave import Weave


@transform
def replicate(
    program: Program,
    devices: int | None = None,
    merge: Merge | None = None,
    axis_name: str = "replicas",
    sync_batch_norm: bool = True,
) -> Program:
    """The Program for several devices at once, which share one set of parameters.

    Args:
        program: a training Program, or a forward one.
        devices: how many; all that JAX shows unless given.
        merge: how gradients become one: ``Average()`` unless given.
        axis_name: the name of the axis that the collectives run along.
        sync_batch_norm: normalize by the statistics of the whole batch rather than of each device's part.

    Raises:
        ArgumentError: a batch that the devices do not divide, or a ``merge`` that is no strategy.
        RecipeError: the Program was not traced, or its ops were changed by hand.
        GraphError: it is replicated already.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.mean(x @ w), jnp.ones(3), jnp.ones((8, 3)))
        >>> program = ow.replicate(program, devices=4)
        >>> program["x"], [op.type for op in program.ops if op.made_by == "collective"]
        (Variable('x', float32[2,3], data), ['all_mean', 'all_mean'])
    """
    if program.replicas is not None:
        raise GraphError(
            f"Program {program.name!r} is replicated already, for {program.replicas.count} devices."
        )
    merge = Average() if merge is None else _strategy(merge)
    group = Devices(axis_name, jax.device_count() if devices is None else _checked(devices))
    recipe = recipe_of(program, "at one device's part of the batch", "Trace it at that size")
    with along(Axis(axis_name, group.size, sync_batch_norm)):
        local = _forward(program, recipe.origin, group)
        for step in recipe.steps:
            if step.function is append_update:
                local = merge.update(local, *step.arguments, **step.options, devices=group)
            else:
                local = step.function(local, *step.arguments, **step.options)
            if step.function is append_backward:
                local = merge.apply(local, group, recipe.steps)
        return _with_merged_results(local, group, _grown(program, local), merge)


def _forward(program: Program, origin: Origin, devices: Devices) -> Program:
    """The forward pass of one device, traced at its part of the batch."""
    signature = program.signature
    assert signature is not None
    split = _split(program, devices.size)
    local = origin.trace(
        tuple(s.unflatten(_local(v, v in split, devices.size) for v in s.variables) for s in signature.data)
    )
    placed = {
        mine: replace(mine, placement=Placement.SHARDED)
        for mine, theirs in zip(local.inputs, program.inputs, strict=False)
        if theirs in split
    }
    draft = substitute(replace(local, replicas=Replicas(devices.size, devices.axis)), placed)
    return check(_with_merged_state(_with_own_keys(draft, devices), devices))


def _with_own_keys(program: Program, devices: Devices) -> Program:
    """Random numbers differ from device to device: what draws is given a key of its device's own."""
    weave = Weave(program)

    def own(op: Op) -> Op:
        if all(map(_is_key, op.outputs)):
            return op
        keys = {v: weave.once(v, partial(_own_key, weave, v, devices)) for v in op.inputs if _is_key(v)}
        return replace(op, inputs=tuple(keys.get(v, v) for v in op.inputs)) if keys else op

    for op in program.ops:
        weave.append(own(op))
    return replace(program, ops=weave.ops)


def _own_key(weave: Weave, key: Variable, devices: Devices) -> Variable:
    body = body_of(lambda k: [jax.random.fold_in(k, devices.index)], Type(key.shape, key.dtype))
    return weave.collective("own_key", [key], [f"own({key.name})"], body)[0]


def _with_merged_state(program: Program, devices: Devices) -> Program:
    """What the network itself carries (running statistics, counters) becomes that of the whole batch."""
    equal = equal_variables(program)
    weave = Weave(program)
    for op in program.ops:
        weave.append(op)
    following = {}
    for old, new in program.next_state.items():
        differs = old.placement is Placement.REPLICATED and new not in equal
        following[old] = _next(weave, old, new, devices) if differs else new
    return replace(program, ops=weave.ops, next_state=following)


def _next(weave: Weave, old: Variable, new: Variable, devices: Devices) -> Variable:
    """The mean of a float over the devices; of an integer, which counts, the sum of what each one added."""
    if not jnp.issubdtype(new.dtype, np.integer):
        return _reduced(weave, new, devices)
    types = (Type(v.shape, v.dtype) for v in (old, new))
    body = body_of(lambda was, now: [was + devices.sum(now - was)], *types)
    return weave.collective(Sum().name, [old, new], [f"{Sum().name}({new.name})"], body)[0]


def _with_merged_results(program: Program, devices: Devices, grown: set[str], merge: Merge) -> Program:
    """What the function returns: numbers of the whole batch; arrays over examples stay with their device."""
    equal = equal_variables(program)
    weave = Weave(program)
    for op in program.ops:
        weave.append(op)
    merged = {
        v: _reduced(weave, v, devices, merge.is_sum and v is program.loss)
        for v in program.outputs
        if v not in equal and v.name not in grown
    }

    def new(v: Variable) -> Variable:
        return merged.get(v, v)

    signature = program.signature
    assert signature is not None
    return replace(
        program,
        ops=weave.ops,
        outputs=tuple(map(new, program.outputs)),
        loss=program.loss and new(program.loss),
        signature=replace(signature, result=signature.result.mapped(new)),
    )


def _reduced(weave: Weave, v: Variable, devices: Devices, is_sum: bool = False) -> Variable:
    """The mean over the devices of a float, the sum of an integer (it counts) and of what ``is_sum``."""
    how = Average() if jnp.issubdtype(v.dtype, np.inexact) and not is_sum else Sum()
    if not jnp.issubdtype(v.dtype, np.number):
        raise GraphError(
            f"{v.name!r} ({v.type}) differs from device to device, and nothing says how to merge it. Return "
            "or carry numbers: a float is averaged, an integer is summed."
        )
    body = body_of(lambda x: [how.merge(x, {}, devices)[0]], Type(v.shape, v.dtype))
    return weave.collective(how.name, [v], [f"{how.name}({v.name})"], body)[0]


def _split(program: Program, count: int) -> set[Variable]:
    """The data that is laid out over the devices: whatever is as long as the batch.

    Raises:
        ArgumentError: a batch that the devices do not divide.
    """
    arrays = [v for v in program.inputs if v.shape]
    if not arrays:
        return set()
    batch = arrays[0].shape[0]
    if batch % count:
        below = batch // count * count
        sizes = f"{below} or {below + count}" if below else f"{count}"
        raise ArgumentError(
            f"{program.name}: the batch has {batch} rows ({arrays[0].name!r}), which {count} devices do not "
            f"divide. Feed {sizes}."
        )
    return {v for v in arrays if v.shape[0] == batch}


def _local(v: Variable, is_split: bool, count: int) -> Type:
    """The type of data on one device."""
    return Type((v.shape[0] // count, *v.shape[1:]) if is_split else v.shape, v.dtype)


def _grown(whole: Program, local: Program) -> set[str]:
    """The names of results that grow with the batch: arrays over examples."""
    pairs = zip(whole.outputs, local.outputs, strict=True)
    return {mine.name for theirs, mine in pairs if theirs.shape != mine.shape}


def _is_key(v: Variable) -> bool:
    return bool(jnp.issubdtype(v.dtype, jax.dtypes.prng_key))


def _strategy(merge: object) -> Merge:
    if not isinstance(merge, Merge):
        found = merge.__name__ if isinstance(merge, type) else repr(merge)
        raise ArgumentError(
            f"replicate: merge is {found}; expected a merge strategy, an object and not its class: "
            "Average(), Bucketed(bytes), or one of your own."
        )
    return merge


def _checked(devices: int) -> int:
    if isinstance(devices, bool) or not isinstance(devices, int | np.integer) or devices < 1:
        raise ArgumentError(f"replicate: devices is {devices!r}; expected how many, at least 1.")
    return int(devices)
