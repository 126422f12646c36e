"""Steps whose loss or gradients are not finite: leave them out, or stop.

Beside the update pass stands one op that looks at the loss and all gradients, and for each state Variable one
that keeps its old value where that found NaN or infinity. All of it is part of the step: nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from onward.core.builder import Builder
from onward.core.errors import ArgumentError, GraphError
from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.collected import body_over
from onward.core.jaxprs.equations import Type
from onward.core.jaxprs.tracing import current_axis
from onward.core.marks import CHECK, COUNT, FINITE, KEEP, SCHEDULE, STOP, UNSCALE, Mark
from onward.core.placement import equal_variables
from onward.core.program import Op, Phase, Program, Variable
from onward.core.recipe import is_replay
from onward.core.structure import is_word
from onward.core.transform import transform
from onward.core.walk import producers
from onward.core.words import Kind, Pass, UpdateType, some
from onward.develop.own_guard import warn_of_own_guard


@transform(phase=Phase.STEP)
def guard(program: Program, action: str = "skip") -> Program:
    """Change nothing in a step whose loss or gradients are not finite.

    Adds ops, changes none. With ``"skip"`` such a step is left out, and the state Variable ``skipped`` counts
    these (what optax calls apply-if-finite); only random keys move on. With ``"stop"`` all state stays as it
    was before the first such step, whether more steps are run or not: ``stopped`` is then True, and the
    caller of the steps raises ``NonFiniteError``.

    The gradients are looked at as the backward pass and the merge of many devices give them, and once more as
    the update reads them, where rules such as clipping stand in between. Hyperparameters and what schedules
    make of the step are looked at, too. On parameter servers (``split``) all leave out what
    any trainer's loss or gradients spoil; what one of several servers alone finds ends the training.

    Args:
        program: a training Program, replicated or not.
        action: ``"skip"`` or ``"stop"``.

    Raises:
        ArgumentError: another word.
        GraphError: there is no update to leave out yet, it is guarded already, or it is from a file.

    Warns:
        UserWarning: an update of another library keeps something by whether a step is finite, such as a loss
            scale of its own, which would never move: such a step guards itself.

    Source: Micikevicius et al., Mixed Precision Training, 2018, section 3.2, which skips such steps.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.sum(w * x), jnp.ones(2), jnp.ones(2))
        >>> step = ow.compile(guard(program))
        >>> state, out = step(step.init(jnp.ones(2)), jnp.array([1.0, jnp.inf]))
        >>> state.parameters.tolist(), int(state["skipped"]), int(state["step"])
        ([1.0, 1.0], 1, 0)
    """
    if not is_word(action, ("skip", "stop")):
        raise ArgumentError(f"guard: action is {action!r}; expected 'skip' or 'stop'.")
    if not is_replay():
        warn_of_own_guard(program)
    return _stopping(program) if action == "stop" else skipping(program)[0]


def skipping(program: Program) -> tuple[Program, Variable]:
    """The Program that leaves out steps which are not finite, and the Variable that tells whether one is."""
    _expect_unguarded(program)
    guarded = Guard(program)
    finite = guarded.look(watched_by_update(program))
    skipped = guarded.number("skipped", (), np.int32)
    guarded.count("count_skipped", (skipped, finite), (skipped,), lambda n, ok: [n + ~ok])
    guarded.keep(finite, lambda v: not v.is_key)
    return guarded.program(), finite


def _stopping(program: Program) -> Program:
    """The Program whose state stays the same from the first step on that is not finite."""
    _expect_unguarded(program)
    guarded = Guard(program)
    watched = watched_by_update(program)
    finite = guarded.look(watched, each=True)
    stopped = guarded.number("stopped", (), np.bool_)
    culprits = guarded.number("culprits", (len(watched),), np.bool_)
    goes_on = guarded.named("goes_on", stopped)

    def stop(stopped: Any, culprits: Any, finite: Any) -> list[Any]:
        now = stopped | ~jnp.all(finite)
        return [now, jnp.where(stopped, culprits, ~finite), ~now]

    guarded.count(STOP, (stopped, culprits, finite), (stopped, culprits), stop, (goes_on,))
    guarded.keep(goes_on, lambda v: True)
    return guarded.program()


class Stop(NamedTuple):
    """The Variables of a Program with ``guard(program, "stop")`` that tell whether and why it stopped.

    ``stopped`` and ``culprits`` are state Variables, the latter one bool for each of ``watched``: the loss
    and the gradients, with the ops that make them. ``step`` counts the updates.
    """

    stopped: Variable
    culprits: Variable
    step: Variable | None
    watched: tuple[tuple[Variable, Op | None], ...]

    def message(self, culprits: Sequence[bool], step: int | None) -> str:
        """The error message: which values were not finite, in which step, and what to do about it."""
        guilty = [pair for pair, is_culprit in zip(self.watched, culprits, strict=True) if is_culprit]
        first = [(v, op) for v, op in guilty if op is None or op.made_by is not Pass.UPDATE]
        found = [f"{v.name!r}{_place(op)}" for v, op in first or guilty]
        when = "" if step is None else f" in the step after {step} updates"
        return (
            f"{some(found, 3)} held NaN or infinity{when}, and training stopped: the state is "
            "the one before that step. Look at the data of that step and at the learning rate. To go on from "
            f"this state: state.replace({{{self.stopped.name!r}: False}})."
        )


def stop_of(program: Program) -> Stop | None:
    """The Variables that tell whether and why a Program stopped; None if it never does so."""
    made = {op.type: op for op in program.ops if isinstance(op.type, Mark)}
    if STOP not in made:
        return None
    by_maker = producers(program)
    stopped, culprits, _ = made[STOP].inputs
    step = made[COUNT].inputs[0] if COUNT in made else None
    return Stop(stopped, culprits, step, tuple((v, by_maker.get(v)) for v in made[FINITE].inputs))


def _place(op: Op | None) -> str:
    """The user's line behind an op, in brackets."""
    return f" ({op.type}{op.at})" if op is not None and op.at else ""


def watched_by_update(program: Program) -> tuple[Variable, ...]:
    """The loss, the gradients as derived, merged, and read by the update; and the update's numbers."""
    made = producers(program)
    read = [g for _, g in program.gradients]
    derived = [raw for g in read for raw in _derived(g, made)]
    updating = (op for op in program.ops if op.made_by is Pass.UPDATE)
    ruled = [v for op in updating for v in op.outputs if v.kind is Kind.GRADIENT]
    loss = [program.loss] if program.loss is not None else []
    scheduled = (v for op in program.ops if op.type is SCHEDULE for v in op.outputs)
    numbers = (*program.hyperparameters, *scheduled)
    return tuple(dict.fromkeys((*loss, *derived, *read, *ruled, *numbers)))


def _expect_unguarded(program: Program) -> None:
    """Raise ``GraphError`` unless there is an update to leave out, which nothing leaves out yet."""
    if not any(p in program.next_state for p, _ in program.gradients):
        raise GraphError(
            f"Program {program.name!r} has no update to leave out. Minimize first: "
            "guard(optimizer.minimize(loss, ...))."
        )
    if is_guarded(program):
        raise GraphError(
            f"Program {program.name!r} is guarded already: guard it once, with 'skip' or 'stop'. "
            "Mixed precision in float16 leaves out the steps that overflow by itself."
        )
    if program.code is not None:
        raise GraphError(
            f"guard: {program.name!r} was loaded from {program.code.file}, whose State counts no steps left "
            "out. Guard before save; or compile(program, check_finite=True), which stops at such a step."
        )


class Guard(Builder):
    """The guard of a Program as it grows."""

    def __init__(self, source: Program) -> None:
        super().__init__(source, source.ops, made_by=Pass.UPDATE)

    def look(self, watched: Sequence[Variable], each: bool = False) -> Variable:
        """The op that tells whether all of these, or ``each`` of them, are finite; the same everywhere."""

        def finite_of(arrays: Sequence[Any]) -> list[Any]:
            found = jnp.stack(list(map(all_finite, arrays)))
            return [found if each else jnp.all(found)]

        types = [v.aval for v in watched]
        body = body_of(lambda *xs: finite_of(xs), *types) if each else body_over(finite_of, types)
        return self.told(FINITE, watched, body)

    def told(self, kind: str, watched: Sequence[Variable], body: Body) -> Variable:
        """Add an op that checks these Variables; a check that fails on one device fails on all."""
        (finite,) = self.add(kind, watched, [FINITE], body, UpdateType.ACROSS)
        if equal_variables(self.source).issuperset(watched):
            return finite
        axis = current_axis()
        assert axis is not None, "what differs from device to device runs on several"
        least = body_of(lambda x: [lax.pmin(x.astype(jnp.int32), axis.name) > 0], finite.aval)
        return self.add("all_min", [finite], [f"all_min({FINITE})"], least, made_by=Pass.COLLECTIVE)[0]

    def number(self, name: str, shape: tuple[int, ...], dtype: Any, value: float = 0) -> Variable:
        """A state Variable that begins with this number everywhere."""
        return self.carry(name, lambda: jnp.full(shape, value, dtype))

    def count(
        self,
        kind: str,
        inputs: Sequence[Variable],
        replaced: Sequence[Variable],
        function: Callable[..., list[Any]],
        others: tuple[Variable, ...] = (),
    ) -> None:
        """An op that gives state Variables their next values, and others after these."""
        outputs: list[str | Variable] = [*(f"next({v.name})" for v in replaced), *others]
        following = self.add(kind, inputs, outputs, function, UpdateType.BOOKKEEPING)
        self.follow(dict(zip(replaced, following, strict=False)))

    def keep(self, goes_on: Variable, chosen: Callable[[Variable], bool]) -> None:
        """For each state Variable of the Program, the op that keeps its old value unless the step counts."""
        made = producers(self.source)
        for old, new in self.source.next_state.items():
            if chosen(old) and new is not old:
                name = f"next({old.name})"
                renames = new.name == name and self.source.code is None  # a file knows its values by name
                if renames:
                    self.rename(new, f"proposed({old.name})")
                kept = Variable(name if renames else self.names.new(name), old.shape, old.dtype)
                how = _type_of_update(made.get(new))
                self.add(KEEP, (goes_on, new, old), [kept], _choice(old.shape, old.dtype), how)
                self.follow({old: kept})


def is_guarded(program: Program) -> bool:
    """Whether steps that are not finite change nothing."""
    return any((op.type is FINITE or op.type is CHECK) and op.made_by is Pass.UPDATE for op in program.ops)


def _derived(gradient: Variable, made: Mapping[Variable, Op]) -> Iterable[Variable]:
    """The gradients, not made by a rule, from which rules made this one."""
    maker = made.get(gradient)
    if maker is None or maker.made_by is not Pass.UPDATE or maker.type is UNSCALE:
        return [gradient]
    return [raw for v in maker.inputs if v.kind is Kind.GRADIENT for raw in _derived(v, made)]


def _type_of_update(maker: Op | None) -> UpdateType:
    """How far an op looks that passes on what this one made: what moves along by itself still does."""
    if maker is None or maker.made_by is Pass.FORWARD:
        return UpdateType.BOOKKEEPING
    return maker.update or UpdateType.ELEMENTWISE


def all_finite(x: Any) -> Any:
    """NaN and infinity times 0 are NaN: a sum, which is faster than to ask each number."""
    return jnp.sum(x * 0) == 0


@lru_cache(maxsize=1024)
def _choice(shape: tuple[int, ...], dtype: Any) -> Body:
    kind = Type(shape, dtype)
    return body_of(lambda ok, new, old: [jnp.where(ok, new, old)], Type((), np.bool_), kind, kind)
