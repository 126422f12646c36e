"""The Variables that are equal on all devices of a Program: a proof by one walk over the ops.

State that is placed ``replicated`` begins equal. An op of equal inputs gives equal outputs, a merging
collective (a sum or mean over all devices) gives equal outputs whatever it reads, everything else differs.
"""

from __future__ import annotations

from onward.core.errors import ArgumentError, GraphError
from onward.core.marks import LOCAL
from onward.core.program import Phase, Program, Replicas, Variable
from onward.core.words import Pass, Placement


def equal_variables(program: Program) -> set[Variable]:
    """The Variables that have the same value on every device, as all without a number have."""
    if program.replicas is not None and program.replicas.count == 1:
        return set(program.variables.values())
    given = (*program.inputs, *program.state)
    equal = {v for v in given if v.placement is Placement.REPLICATED} | set(program.constants)
    for op in program.ops:
        same = op.body.same_everywhere(frozenset(i for i, v in enumerate(op.inputs) if v in equal))
        equal.update(v for j, v in enumerate(op.outputs) if j in same or v.size == 0)
    return equal


def check_placement(program: Program) -> None:
    """Raise ``GraphError`` if what is called replicated may come to differ from device to device."""
    if program.replicas is None:
        return
    equal = equal_variables(program)
    for old, new in program.next_state.items():
        if old.placement is Placement.REPLICATED and new not in equal:
            raise GraphError(
                f"{program.name}: {old.name!r} is placed replicated, but {new.name!r}, which replaces it, "
                f"differs from device to device: {_why(program, new, equal)}. Merge it over the axis "
                f"{program.replicas.name!r} first."
            )


def expect_no_axis(program: Program, what: str) -> None:
    """Raise ``GraphError`` for a function that talks to other devices, where no device runs it by itself."""
    replicas, recipe = program.replicas, program.recipe
    is_spread = recipe is None or any(step.phase is Phase.DEVICES for step in recipe.steps)
    if replicas is not None and not is_spread:
        raise GraphError(
            f"{what}: {program.name!r} was traced with axis_name={replicas.name!r}, for collectives of its "
            "own (psum, all_gather), which only replicate spreads. Leave axis_name= and these away: on many "
            "devices statistics are those of the whole batch without them, too."
        )


def expect_one_device(program: Program, what: str) -> None:
    """Raise ``GraphError`` if a Program is replicated already, and this has to come before that."""
    if program.replicas is not None and program.replicas.count > 1:
        raise GraphError(
            f"Program {program.name!r} is replicated for {program.replicas.count} devices, and {what} comes "
            f"before that. Replicate last: replicate(optimizer.minimize(loss, ...), "
            f"{program.replicas.count})."
        )


def expect_divisible(program: str, rows: int, name: str, count: int, where: str = "", more: str = "") -> None:
    """Raise ``ArgumentError`` with the nearest sizes that fit, if devices do not divide a batch."""
    if rows % count:
        below = rows // count * count
        sizes = f"{below} or {below + count}" if below else f"{count}"
        raise ArgumentError(
            f"{program}: the batch has {rows} rows ({name!r}), which {count} devices{where} do not divide. "
            f"Feed {sizes}; or let the loss take example_weight, an array [batch] that weighs its mean, and "
            f"batches are filled up with examples of weight 0.{more}"
        )


def local_copies(program: Program) -> dict[Variable, Variable]:
    """For each parameter the state that holds every device's own copy of it, if there is one."""
    made = (op for op in program.initializers if op.type is LOCAL and op.made_by is Pass.COLLECTIVE)
    return {op.inputs[0]: op.outputs[0] for op in made}


def whole_shape(v: Variable, replicas: Replicas | None) -> tuple[int, ...]:
    """The shape of a Variable over all devices together, as people feed it and see it."""
    if replicas is None or v.placement is Placement.REPLICATED:
        return v.shape
    if v.placement is Placement.PER_REPLICA:
        return (replicas.count, *v.shape)
    return (replicas.count * v.shape[0], *v.shape[1:])


def _why(program: Program, v: Variable, equal: set[Variable]) -> str:
    """The op that computes a Variable, and those of its inputs that differ between devices, in words."""
    for op in program.ops:
        if v in op.outputs:
            differing = [x.name for x in op.inputs if x not in equal]
            return (
                f"{op.type} computes it from {', '.join(map(repr, differing[:3]))}" if differing else op.type
            )
    return "it is not computed from what is equal"
