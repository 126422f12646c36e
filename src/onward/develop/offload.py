"""State and activations in host memory; here state, which only the update reads, and ``stored`` activations.

An accelerator has less memory than the machine it is in, and what an optimizer keeps takes as much again as
the parameters, or twice that. The forward and the backward pass, in which memory is most needed, do not read
it. So it may lie in the memory of the host between two steps: two ops for each such Variable move it, one
before the op that reads it and one behind the op that makes its next value.

>>> import jax.numpy as jnp, onward as ow
>>> program = ow.Momentum(0.1).minimize(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3))
>>> [op.type for op in offload(program).ops[-4:]]
['count', 'fetch', 'momentum', 'store']
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from onward.core.builder import Builder
from onward.core.check import expect_program
from onward.core.errors import GraphError
from onward.core.marks import FETCH, STORE, WATCH
from onward.core.program import Op, Phase, Program, Variable
from onward.core.transform import transform
from onward.core.walk import Where, consumers, meant, producers, select
from onward.core.words import Pass, UpdateType, some
from onward.develop.stored import HERE, THERE, Saved, moved, picks, stored

_UPDATING = (Pass.UPDATE, Pass.COLLECTIVE)
_EACH = UpdateType.ELEMENTWISE


def offload(program: Program, where: Where | Iterable[Where] | None = None) -> Program:
    """Keep state between the steps, or activations until the backward pass, in host memory.

    Without ``where`` all that only the update reads and writes: what the optimizer keeps. Before the first op
    that reads such a Variable stands an op ``fetch``, which brings it to the device, behind the op that makes
    its next value an op ``store``, which takes that to the host. The update is ordered so that it ends with
    the state of one parameter before it begins with that of the next, as far as one does not read the
    other's. ``compile(..., check_finite=True)`` looks at all next values before it keeps any, so that all of
    them are on the device at the end of a step.

    An activation goes to the host behind the last op of the forward pass that reads it, and comes back before
    the first of the backward pass that does. What a loop saves turn by turn for a loop of the backward pass
    is moved turn by turn, so that the device never holds the stack: call ``roll`` first, and name what it
    saves. A Program that is not rolled is compiled so, for its values have names of their own.

    All numbers stay what they were. Every step moves all of it over the bus twice, in part while it computes:
    this is for what would not fit otherwise. ``memory(program)`` tells what is gained, without running.

    Args:
        program: a training Program. Whatever else is done to it, in whatever order, this acts behind it.
        where: names, patterns such as ``"layers/*/mean"``, Variables or a predicate, of state or of results
            of the forward pass; of an op that saves something else for its gradient, that is meant. None: all
            arrays that only the update reads and writes, such as the moments of Adam and the averages of
            parameters.

    Raises:
        GraphError: state that is chosen is read by the forward or backward pass, which would fetch it for the
            whole step, or is never replaced; an activation is not read by the backward pass, or by the update
            as well, or is a result; there is nothing to offload; it is offloaded already.
        ArgumentError: an empty ``where``.
        UnknownNameError: a name or pattern that no state and no such activation has.

    Source: Ren et al., ZeRO-Offload: Democratizing Billion-Scale Model Training, 2021, of which the update
    stays on the device here; for activations Rhu et al., vDNN: Virtualized Deep Neural Networks for Scalable,
    Memory-Efficient Neural Network Design, 2016.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.Adam(0.1).minimize(lambda w, x: jnp.sum(w * x), jnp.ones(3), jnp.ones(3))
        >>> step = ow.compile(offload(program))
        >>> state, out = step(step.init(jnp.ones(3)), jnp.ones(3))
        >>> state["w/mean"].sharding.memory_kind, state["w"].sharding.memory_kind
        ('pinned_host', 'device')
    """
    expect_program(program, "offload")
    if (wanted := meant(where, "offload", "to offload the state that only the update reads")) is None:
        return state_offloaded(program)
    saved = Saved(program)
    state = [choice for choice in wanted if picks(program.state, choice)]
    activations = [choice for choice in wanted if saved.picks(choice)]
    unknown = [choice for choice in wanted if choice not in state and choice not in activations]
    if unknown and not _is_in_parts(program):
        select((*program.state, *saved.names), unknown, "offload")
    program = state_offloaded(program, state) if state else program
    return stored(program, activations + unknown) if activations or unknown else program


def _is_in_parts(program: Program) -> bool:
    """Whether its activations are those of micro-batches, and have their names in the Program before that."""
    return program.recipe is not None and any(s.phase is Phase.MICRO_BATCHES for s in program.recipe.steps)


@transform(phase=Phase.MEMORY)
def state_offloaded(program: Program, where: Iterable[Where] | None = None) -> Program:
    """The Program whose state, or this part of it, lies in host memory between the steps."""
    if found := offloaded(program):
        raise GraphError(
            f"offload: {program.name!r} is offloaded already: {_some(found)} lie in host memory. Name all in "
            "one call: where=[...]."
        )
    return _moved(program, _chosen(program, where))


def offloaded(program: Program) -> tuple[Variable, ...]:
    """The state Variables that lie in host memory between two steps.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.Momentum(0.1).minimize(lambda w: w @ w, jnp.ones(3))
        >>> ow.graph.offloaded(program), [v.name for v in ow.graph.offloaded(offload(program))]
        ((), ['w/velocity'])
    """
    expect_program(program, "offloaded")
    state = {*program.state}
    return tuple(op.inputs[0] for op in program.ops if op.type is FETCH and op.inputs[0] in state)


_NOTHING = (
    "offload: {name!r} keeps no array that only its update reads and writes. Offload a Program that trains, "
    "by an optimizer that keeps something: offload(onward.Adam(1e-3).minimize(loss, ...))."
)


def _chosen(program: Program, where: Iterable[Where] | None) -> tuple[Variable, ...]:
    """The state Variables to keep in host memory."""
    if where is None:
        if not (chosen := offloadable(program)):
            raise GraphError(_NOTHING.format(name=program.name))
        return chosen
    obstacles = _Obstacles(program)
    chosen = select(program.state, where, "offload")
    for v in chosen:
        if (obstacle := obstacles.of(v)) is not None:
            raise GraphError(f"offload: {v.name!r} of {program.name!r} {obstacle}")
    return chosen


def offloadable(program: Program) -> tuple[Variable, ...]:
    """The state Variables that can lie in host memory between two steps: only the update reads them."""
    obstacles = _Obstacles(program)
    return tuple(v for v in program.state if obstacles.of(v) is None)


class _Obstacles:
    """The obstacles to host memory, for each state Variable of a Program."""

    def __init__(self, program: Program) -> None:
        self.program, self.readers, self.makers = program, consumers(program), producers(program)

    def of(self, v: Variable) -> str | None:
        """Why a Variable cannot lie there between two steps; None if it can."""
        if not v.shape or v in self.program.hyperparameters:
            return "is a single number, for which the device has room. Leave it out of where=."
        if v.is_key:
            return "holds random keys, which stay on the device. Leave it out of where=."
        readers = self.readers.get(v, ())
        early = next((op for op in readers if op.made_by not in _UPDATING and op.type is not WATCH), None)
        if early is not None:
            return (
                f"is read by {early.type}{early.at} in the {early.made_by} pass, so that it has to be on the "
                "device for most of the step. Offload what only the update reads, such as what an optimizer "
                "keeps: that is chosen without where=."
            )
        maker = self.makers.get(self.program.next_state.get(v, v))
        if not readers or maker is None or maker.made_by not in _UPDATING:
            return "is not replaced by what the update computes of it. Leave it out of where=."
        return None


def _some(found: Sequence[Variable]) -> str:
    return some([repr(v.name) for v in found], 3)


def _moved(program: Program, chosen: Sequence[Variable]) -> Program:
    """The Program that fetches these state Variables from host memory, and stores their next values there."""
    builder = Builder(program, made_by=Pass.UPDATE)
    replaces: dict[Variable, list[Variable]] = {}
    for v in chosen:
        replaces.setdefault(program.next_state[v], []).append(v)
    there: dict[Variable, Variable] = {}
    waiting = set(chosen)
    for op in _one_after_the_other(program, waiting):
        for v in op.inputs:
            if v in waiting and v not in there:
                name = f"fetched({v.name})"
                there[v] = builder.behind(v, FETCH, moved(v.shape, v.dtype, HERE), name, update=_EACH)
        is_read = not there.keys().isdisjoint(op.inputs)
        builder.append(replace(op, inputs=tuple(there.get(v, v) for v in op.inputs)) if is_read else op)
        for made in op.outputs:
            for v in replaces.get(made, ()):
                name = f"next({v.name})"
                if made.name == name:
                    builder.rename(made, f"updated({v.name})")
                following = Variable(name if made.name == name else builder.names.new(name), v.shape, v.dtype)
                builder.add(STORE, [made], [following], moved(v.shape, v.dtype, THERE), _EACH)
                builder.follow({v: following})
    return builder.program()


def _one_after_the_other(program: Program, chosen: Container[Variable]) -> Sequence[Op]:
    """The ops in an order in which all that needs one of these Variables stands together.

    First those that need none; then, behind the first op that reads one, what else needs nothing that is
    first read later. An op is never moved before one that it reads from.
    """
    first: dict[Variable, int] = {}
    needs: dict[Variable, int] = {}
    order: list[int] = []
    for i, op in enumerate(program.ops):
        reads = (first.setdefault(v, i) if v in chosen else needs.get(v, -1) for v in op.inputs)
        order.append(max(reads, default=-1))
        needs.update(dict.fromkeys(op.outputs, order[-1]))
    return [program.ops[i] for i in sorted(range(len(order)), key=order.__getitem__)]
