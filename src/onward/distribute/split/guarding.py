"""A step that is not finite, in the parts of a cut: trainers tell, servers leave it out or refuse it.

A trainer looks at the loss and at its own gradients, and tells every server whether all is finite. So all
servers leave out the same updates, without asking each other. A server looks, too, at what it makes of them.

>>> import jax.numpy as jnp, onward as ow
>>> program = ow.SGD(0.1).minimize(lambda w, x: jnp.sum(w * x), jnp.ones(2), jnp.ones(2))
>>> cut = ow.split(ow.guard(program), servers=2)
>>> [op.type for op in cut.servers[1].ops]
['recv', 'sgd', 'finite', 'judge', 'keep', 'send']
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from onward.core.builder import Builder
from onward.core.errors import GraphError
from onward.core.marks import CHECK, FINITE, SCALE_LOSS
from onward.core.program import Applied, Program, Variable
from onward.core.words import Pass, UpdateType
from onward.develop.check_finite import check_finite, looked_at
from onward.develop.guard import Guard, guard, watched_by_update
from onward.develop.mixed.loss_scale import adjust_scale, scale_loss, with_adjusted_scale

GUARDS = (guard, adjust_scale, check_finite)
"""The transforms that may follow the update of a Program that is cut."""


@dataclass(frozen=True)
class Guarding:
    """The handling of steps that are not finite in a Program.

    Attributes:
        skips: it is left out.
        stops: training ends before it.
        checks: the same, and what the update makes is looked at, too.
        growth: after how many good steps the loss scale grows, and by which factor; None: nothing is scaled.
        scale: the first loss scale.
        servers: how many servers there are.
    """

    skips: bool
    stops: bool
    checks: bool
    growth: tuple[int, float] | None
    scale: float
    servers: int

    @classmethod
    def of(cls, steps: Sequence[Applied], servers: int) -> Guarding | None:
        """The handling that a recipe asks for; None if it asks for none."""
        made = {step.function: step for step in steps}
        if not any(function in made for function in GUARDS):
            return None
        action = _first(made[guard], "action", "skip") if guard in made else None
        growth = made[adjust_scale].arguments if adjust_scale in made else None
        return cls(
            skips=action == "skip" or growth is not None,
            stops=action == "stop",
            checks=check_finite in made,
            growth=None if growth is None else (growth[0], growth[1]),
            scale=made[scale_loss].arguments[0] if growth is not None else 1.0,
            servers=servers,
        )

    @property
    def ends(self) -> bool:
        """Whether a trainer whose gradients are not finite ends the training."""
        return not self.skips


def _first(step: Applied, name: str, default: str) -> str:
    return str(step.arguments[0] if step.arguments else step.options.get(name, default))


@dataclass(frozen=True)
class Guarded:
    """The Program of a server that looks at what it makes.

    Attributes:
        program: the Program.
        fails: whether the update is one that it can neither make nor leave out; None where nothing looks.
        skipped: the state Variable that counts what was left out; on the first server.
        watched: what is looked at.
    """

    program: Program
    fails: Variable | None = None
    skipped: Variable | None = None
    watched: tuple[Variable, ...] = ()


def looking(base: Program) -> Program:
    """Forward and backward pass with the op that tells whether the loss and all gradients are finite."""
    looks = Guard(base)
    looks.look(watched_by_update(base))
    return looks.program()


def verdict_of(base: Program) -> Variable:
    """The Variable that tells whether the loss and all gradients are finite."""
    return next(op.outputs[0] for op in base.ops if op.type is FINITE)


def scale_of(base: Program) -> Variable:
    """The loss scale that the backward pass begins with."""
    found = [op.inputs[0] for op in base.ops if op.type is SCALE_LOSS]
    if not found:
        raise GraphError(
            f"split: the loss of {base.name!r} is scaled inside of its micro-batches, where no server "
            "can give it another scale. Take bfloat16, or leave accumulate out."
        )
    return found[0]


def guarded(program: Program, told: Variable, scale: Variable | None, how: Guarding, index: int) -> Guarded:
    """The Program of a server that changes nothing in an update that is not finite.

    Args:
        program: the update.
        told: whether all that the trainers sent is finite.
        scale: the loss scale, on the first server.
        how: what is done about a step that is not finite.
        index: which server it is.
    """
    if not (how.skips or how.stops):
        return _checked(program, told)
    looks = Guard(program)
    watched = watched_by_update(program)
    alone = how.servers == 1

    def judge(told: jnp.ndarray, here: jnp.ndarray) -> list[jnp.ndarray]:
        bad = told & ~here if how.skips else ~(told & here)
        return [told & here, bad & (not (how.skips and alone))]

    reads = told, looks.look(watched)
    counts, fails = _judge(looks, reads, ["counts", "fails"], judge)
    skipped = None
    if how.skips and index == 0:
        skipped = looks.number("skipped", (), np.int32)
        looks.count("count_skipped", (skipped, counts), (skipped,), lambda n, ok: [n + ~ok])
    looks.keep(counts, lambda v: not (how.skips and v.is_key))
    made = looks.program()
    if scale is not None and how.growth is not None:
        made = with_adjusted_scale(made, scale, counts, how.scale, *how.growth)
    if how.checks:
        return _both(_checked(made, told), fails, skipped, watched)
    return Guarded(made, fails, skipped, watched)


def _checked(program: Program, told: Variable) -> Guarded:
    """The Program that looks at what the update made as well."""
    looks = Guard(program)
    watched, body = looked_at(program)
    skips = any(op.type is FINITE for op in program.ops)

    def judge(told: jnp.ndarray, here: jnp.ndarray) -> list[jnp.ndarray]:
        good = (told | skips) & here
        return [good, ~good]

    reads = told, looks.told(CHECK, watched, body)
    checked, fails = _judge(looks, reads, ["checked", "fails"], judge)
    looks.keep(checked, lambda v: True)
    return Guarded(looks.program(), fails, None, tuple(looks.renamed.get(v, v) for v in watched))


def _both(
    checked: Guarded, fails: Variable, skipped: Variable | None, watched: tuple[Variable, ...]
) -> Guarded:
    """A Program that is guarded and checked: it fails where one of the two says so."""
    builder = Builder(checked.program, checked.program.ops, made_by=Pass.UPDATE)
    assert checked.fails is not None, "it looks at what the update made"
    (either,) = _judge(builder, (fails, checked.fails), ["fails either way"], lambda a, b: [a | b])
    program = builder.program()
    known = set(program.variables.values())
    shown = dict.fromkeys(v for v in (*watched, *checked.watched) if v in known)
    return Guarded(program, either, skipped, tuple(shown))


def _judge(
    builder: Builder,
    told: Sequence[Variable],
    verdicts: Sequence[str],
    judge: Callable[..., list[jnp.ndarray]],
) -> tuple[Variable, ...]:
    """The op that says of what it is told, each a bool, what becomes of the update."""
    return builder.add("judge", told, verdicts, judge, UpdateType.BOOKKEEPING)
