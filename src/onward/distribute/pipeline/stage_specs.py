"""How the values of a stage are split over its devices: examples, and parameters with their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from jax.sharding import PartitionSpec

from onward.core.meshes import axes_of, parameters_of
from onward.core.program import Partition, Program, Variable
from onward.develop.accumulation.loop import LoopPlan
from onward.distribute.pipeline.stages import is_gradient_sum

Specs = Mapping[Variable, PartitionSpec]
STAGES = "all stages"
"""The axis, over the devices of all stages, that splits what is stacked along layers."""


def stacked(spec: PartitionSpec) -> PartitionSpec:
    """How a stack is split over the devices of all stages that each stage splits so.

    >>> stacked(PartitionSpec("data", None)), stacked(PartitionSpec())
    (P(('all stages', 'data'), None), P('all stages',))
    """
    first, *rest = axes_of(spec) or ((),)
    return PartitionSpec((STAGES, *first) if first else STAGES, *rest)


def state_specs(how: Partition, program: Program, loop: LoopPlan, once: Iterable[Program]) -> Specs:
    """How state is split, and all that a step keeps in the shape of a parameter, such as its gradient.

    Args:
        how: of state and data, by name.
        program: what accumulates over the micro-batches.
        loop: its plan. State has a Variable in a turn too.
        once: what is made of state once a step, such as parameters in a lower precision.
    """
    state = (*program.state, *loop.turn.state)
    told = {v: how.specs[v.name] for v in state if v.name in how.specs}
    told = {program.next_state[v]: spec for v, spec in told.items() if v in program.next_state} | told
    alike = _in_shape_of(program, loop, once).items()
    return {v: how.specs[p.name] for v, p in alike if p.name in how.specs} | told


def _in_shape_of(program: Program, loop: LoopPlan, once: Iterable[Program]) -> Mapping[Variable, Variable]:
    """For all in the shape of a parameter that belongs to it, that parameter."""
    of = {p: p for p in program.parameters} | {**parameters_of(program)}
    of |= {program.next_state[v]: p for v, p in of.items() if v in program.next_state}
    of |= {g: p for p, g in program.gradients}
    for op in reversed(program.ops):
        if is_gradient_sum(op) and op.outputs[0] in of:  # of what several stages have a part of
            of |= dict.fromkeys(op.inputs, of[op.outputs[0]])
    of |= {r.part: of[r.whole] for r in loop.sums if r.whole in of}
    named = {v.name: p for v, p in of.items()}
    of |= {v: named[v.name] for v in loop.turn.state if v.name in named}
    for op in (op for part in once for op in part.ops):
        for v in op.outputs:
            alike = {of[x] for x in op.inputs if x in of and x.shape == v.shape}
            if len(alike) == 1:
                of[v] = alike.pop()
    return {v: p for v, p in of.items() if v.shape == p.shape}


def stack_specs(specs: Specs, once: Iterable[Program]) -> Specs:
    """How the parameters of repeated layers are split that a stage stacks once a step: each as on its own."""
    found = {}
    for op in (op for part in once for op in part.ops):
        kinds = {(v.shape, specs.get(v)) for v in op.inputs}
        if len(kinds) == len(op.outputs) == 1:
            ((shape, spec),), (stack,) = kinds, op.outputs
            if spec is not None and stack.shape == (len(op.inputs), *shape):
                found[stack] = PartitionSpec(None, *spec)
    return found


def data_specs(how: Partition, program: Program, loop: LoopPlan) -> Specs:
    """How data is split, and what has an axis of examples along it."""
    told = {v: how.specs[v.name] for v in (*program.inputs, *loop.turn.inputs) if v.name in how.specs}
    axes = batch_axes(how, loop.how.split)
    split = prod(how.mesh[axis] for axis in axes)
    ops = zip(loop.whole.loop, loop.part.loop, strict=False)
    pairs = [(v, p) for op, part in ops for v, p in zip(op.outputs, part.outputs, strict=False)]
    rows: dict[Variable, int] = {}
    for v, p in pairs:
        grown = [i for i, (n, m) in enumerate(zip(v.shape, p.shape, strict=False)) if n != m]
        rows |= {p: grown[0]} if grown else {}
    along = {v: PartitionSpec(*[None] * i, axes) for v, i in rows.items() if v.shape[i] % split == 0}
    return (along if axes else {}) | told


def result_specs(how: Partition, loop: LoopPlan) -> Specs:
    """How results are split that have an axis of examples."""
    axes = batch_axes(how, loop.how.split)
    split = prod(how.mesh[axis] for axis in axes)
    rows = {r.whole: r.axis for r in loop.joined if r.axis is not None}
    return {v: PartitionSpec(*[None] * i, axes) for v, i in rows.items() if axes and v.shape[i] % split == 0}


def batch_axes(how: Partition, names: Iterable[str]) -> tuple[str, ...]:
    """The axes of the mesh that split the examples of data of these names."""
    specs = (how.specs.get(name) for name in names)
    return next((axes[0] for spec in specs if spec is not None and (axes := axes_of(spec)) and axes[0]), ())


def without_axes(spec: PartitionSpec, axes: Iterable[str]) -> PartitionSpec:
    """How a value is split by the other axes.

    >>> without_axes(PartitionSpec(("data", "model"), "data"), ["data"])
    P('model', None)
    """
    free, out = PartitionSpec.UNCONSTRAINED, set(axes)
    left = (tuple(a for a in of if a not in out) for of in axes_of(spec))
    pairs = zip(left, spec, strict=True)
    return PartitionSpec(
        *(free if was is free else of[0] if len(of) == 1 else of or None for of, was in pairs)
    )
