"""Statistics of Variables, gradients and updates, computed by the step itself, in every k-th step only.

    watch(program, gradients=True, updates=True, activations="block_*", every=100)

One op looks at what the forward pass made, one at the rest. In the steps between it does nothing; what it
looks at never leaves the device, only the numbers do: ``out.watched``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from onward.core.check import expect_program
from onward.core.errors import ArgumentError, GraphError
from onward.core.jaxprs.body import body_of
from onward.core.jaxprs.tracing import current_axis
from onward.core.marks import COUNT, WATCH
from onward.core.names import Names
from onward.core.placement import equal_variables
from onward.core.program import Op, Phase, Program, Variable
from onward.core.structure import describe, expect_count
from onward.core.transform import transform
from onward.core.walk import Where
from onward.core.words import Pass, UpdateType
from onward.develop.watch.choice import Choice, Role, WatchEntry, entries_of, variables_of
from onward.develop.watch.look import Look, cells_of, looking
from onward.develop.watch.reading import Watching
from onward.develop.watch.statistics import HERE, SCALARS, Over, Statistic, statistic_of


@dataclass(frozen=True)
class Watch:
    """A request to watch values: entries, their statistics, and the period in steps."""

    entries: tuple[WatchEntry, ...]
    statistics: tuple[Statistic, ...]
    every: int


def watch(
    program: Program,
    patterns: Where | Iterable[Where] = (),
    *,
    gradients: Choice = False,
    updates: Choice = False,
    parameters: Choice = False,
    activations: Choice = False,
    statistics: str | Statistic | Sequence[str | Statistic] = tuple(SCALARS),
    every: int = 10,
    bins: int = 30,
) -> Program:
    """The Program whose every k-th step also tells statistics of what is named here: ``out.watched``.

    Adds ops, changes none; the training is the same. Computed are the first step and every k-th after it, by
    the step counter; the others cost next to nothing. A gradient is the one that the update starts from:
    merged over devices, averaged over micro-batches, without loss scale, before the optimizer's rules. An
    update is what the step adds to a parameter; a parameter is read before it. Values that differ from device
    to device count all together, as do those of micro-batches, of which those without a batch axis are
    averaged first; the gradient of an activation is that of each
    device's own loss. What is watched stays in memory until it is looked at: the forward pass at its end,
    the rest when the parameters are updated; activations of micro-batches are joined for that. Watch after
    ``minimize``; transforms such as ``replicate``, ``accumulate``, ``guard``, ``roll`` may follow or come
    before. Cut by ``split``, trainers look at what they compute and servers at what they merge and update.

    Args:
        program: a training Program, or one without an update and ``every=1``.
        patterns: Variables of any kind, by name, pattern (``"grad(*)"``, ``"block_*/relu"``), Variable or
            predicate. A pattern that fits no name is looked for below the calls of the user's functions,
            which are the scopes that nobody named.
        gradients: True for those of all parameters and for the norm of all together; or which, by the names
            of their parameters.
        updates: likewise.
        parameters: likewise.
        activations: what the forward pass computes: patterns, or True for everything.
        statistics: of ``"norm"``, ``"rms"``, ``"mean"``, ``"std"``, ``"min"``, ``"max"``, ``"zeros"`` and
            ``"nonfinite"`` (shares), ``"ratio"`` (of updates: their norm by that of the parameter),
            ``"histogram"``, or a ``Statistic`` of your own. All but the histogram unless given.
        every: every how many steps.
        bins: how many bins a histogram has, between the smallest and the largest finite number.

    Raises:
        UnknownNameError: a pattern that matches nothing.
        ArgumentError: nothing to watch, an unknown statistic, a bad number.
        GraphError: gradients or updates of a Program without, or no step counter and ``every`` above 1.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SGD(0.5).minimize(lambda w, x: jnp.sum(w * x), jnp.zeros(2), jnp.ones(2))
        >>> step = ow.compile(ow.watch(program, gradients=True, every=2))
        >>> state, out = step(step.init(jnp.zeros(2)), jnp.array([3.0, 4.0]))
        >>> out.watched["grad(w)"]["norm"], out.watched.step
        (5.0, 1)
        >>> state, out = step(state, jnp.array([3.0, 4.0]))
        >>> len(out.watched), out.watched.step
        (0, None)
    """
    expect_program(program, "watch")
    for name, number in (("every", every), ("bins", bins)):
        expect_count(number, f"watch: {name}")
    entries = entries_of(program, patterns, gradients, updates, parameters, activations)
    if not entries:
        raise ArgumentError(
            "watch was given nothing to watch. Name it: watch(program, gradients=True), or "
            'watch(program, "grad(*)", activations="block_*").'
        )
    chosen = [statistics] if isinstance(statistics, str | Statistic) else statistics
    if not isinstance(chosen, Iterable):
        raise ArgumentError(
            f"watch: statistics is {describe(chosen)}; expected names, such as ['norm', 'max']."
        )
    found = tuple(dict.fromkeys(statistic_of(s, int(bins)) for s in chosen))
    if len({s.name for s in found}) < len(found) or not found:
        raise ArgumentError(
            f"watch: the statistics are {[s.name for s in found]}; expected at least one, each name once."
        )
    values = tuple(name for e in entries if e.role is Role.VALUE for name in e.names)
    return watched(program, Watch(entries, found, int(every)), values)


_ADOPTED = (
    ", and look at out.watched when you like: of an update that was adopted it is not known which number "
    "counts the steps, if one does."
)


@transform(phase=Phase.LOOK)
def watched(program: Program, how: Watch, values: tuple[str, ...]) -> Program:
    """The Program with the ops that look; ``values`` are the names of what is watched as it is.

    A test Program, which lacks some of what is trained, watches what it has.
    """
    step = counter_of(program)
    if step is None and how.every > 1:
        adopted = any(p in program.next_state for p, _ in program.gradients)
        instead = _ADOPTED if adopted else "; or minimize first: watch(optimizer.minimize(loss, ...))."
        raise GraphError(
            f"Program {program.name!r} has no step counter, so watch cannot tell every {how.every}th step. "
            f"Watch each step, every=1{instead}"
        )
    return with_looks(program, how, step)


def with_looks(program: Program, how: Watch, step: Variable | None) -> Program:
    """The Program with the ops that look, every so many steps by this counter; see ``watched``."""
    early = {v for op in program.ops if op.made_by is Pass.FORWARD for v in op.outputs}
    early |= {*program.inputs, *program.state, *program.constants}
    looks: dict[bool, list[Look]] = {True: [], False: []}
    equal = equal_variables(program)
    for entry in how.entries:
        read = variables_of(program, entry)
        if read is not None:
            reads = [v for pair in read for v in pair]
            looks[early.issuperset(reads)].append(Look(entry, read, _over(reads, equal)))
        elif program.recipe is None or program.recipe.origin.training:
            raise GraphError(_lost(program, entry))
    names = Names(program.variables)
    told = (group for group in looks.values() if any(cells_of(look.entry, how.statistics) for look in group))
    ops = [_op(group, how, step, names) for group in told]
    if not ops and any(looks.values()):
        raise ArgumentError(
            f"watch: {', '.join(s.name for s in how.statistics)} is of updates only, and none is watched: "
            "watch(program, updates=True, ...)."
        )
    return replace(program, ops=_inserted(program.ops, ops))


def watching_of(program: Program) -> tuple[tuple[Watching, Variable, Variable], ...]:
    """For each op that looks what its numbers mean, the Variable of the step, and that of the numbers."""
    return tuple(
        (op.body, op.outputs[0], op.outputs[1])
        for op in program.ops
        if op.type is WATCH and isinstance(op.body, Watching)
    )


def unwatched(program: Program) -> Program:
    """The Program without the ops that look, for what runs only a part of it.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SGD(0.5).minimize(lambda w: jnp.sum(w**2), jnp.ones(2))
        >>> unwatched(watch(program, gradients=True)).ops == program.ops
        True
    """
    if not any(op.type is WATCH for op in program.ops):
        return program
    return replace(program, ops=tuple(op for op in program.ops if not isinstance(op.body, Watching)))


def _op(looks: Sequence[Look], how: Watch, step: Variable | None, names: Names) -> Op:
    """The op that computes the statistics of all these; every so many steps, if there is a counter."""
    function, cells, inputs = looking(looks, how.statistics, how.every, step)
    body = body_of(function, *(v.aval for v in inputs))
    outputs = tuple(
        Variable(names.new(name), t.shape, t.dtype)
        for name, t in zip(("watched_at", "watched"), body.out_types, strict=True)
    )
    watching = Watching(body.closed, cells, how.every)
    return Op(WATCH, inputs, outputs, watching, Pass.UPDATE, update=UpdateType.ACROSS)


def _over(reads: Iterable[Variable], equal: set[Variable]) -> Over:
    """Over which devices the numbers of these Variables are spread."""
    axis = current_axis()
    return HERE if axis is None or equal.issuperset(reads) else Over(axis.name, axis.count)


def _inserted(ops: Sequence[Op], more: Iterable[Op]) -> tuple[Op, ...]:
    """The ops with these among them, each after the last that it reads from."""
    longer = list(ops)
    for op in more:
        read = set(op.inputs)
        last = max((i for i, before in enumerate(longer) if not read.isdisjoint(before.outputs)), default=-1)
        longer.insert(last + 1, op)
    return tuple(longer)


def counter_of(program: Program) -> Variable | None:
    """The state Variable that counts the updates."""
    counts = (op for op in program.ops if op.type is COUNT and op.made_by is Pass.UPDATE)
    return next((op.inputs[0] for op in counts), None)


def _lost(program: Program, entry: WatchEntry) -> str:
    """The error message for a Program that no longer has the values of an entry to watch."""
    return (
        f"watch: {entry.label!r} exists no more in Program {program.name!r}: layers that became one loop "
        "hand out activations alone, and micro-batches gradients of parameters. Keep the layers apart, "
        "compile(..., roll=False), or watch what the Program still has: print(program)."
    )
