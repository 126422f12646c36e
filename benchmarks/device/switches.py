"""What compile does by itself, each of it on and off: were it tuned for a CPU only, it would show here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax

import onward as ow
from onward.core.errors import GraphError
from onward.develop.recompute.lean import lean
from onward.develop.rewrite.rewrite import rewrite
from onward.develop.roll.roll import roll_where_worth
from onward.execute.step import Step
from onward.execute.tuning import Tuned

NAMES = ("tune", "roll", "lean", "rewrite", "fence", "storage")


@dataclass(frozen=True)
class Switches:
    """What may be done to a Program, as ``Tuning`` of the library, each thing by itself.

    ``roll`` is None where compile decides; ``storage`` lets small Variables share a buffer.
    """

    roll: bool | None
    lean: bool
    rewrite: bool
    fence: bool
    storage: bool = True

    def __call__(self, program: ow.Program, fetch: Sequence[str] = ()) -> Tuned:
        if self.roll is not False:
            program = ow.roll(program) if self.roll else roll_where_worth(program)[0]
        if self.lean and ow.graph.rolls_of(program):
            program = lean(program)
        if self.rewrite:
            program = rewrite(program, "cpu")
        return Tuned(ow.fence(program, "cpu") if self.fence else program, ())


def default() -> Switches:
    """As compile has them on this device."""
    is_cpu = jax.default_backend() == "cpu"
    return Switches(roll=None, lean=is_cpu, rewrite=is_cpu, fence=is_cpu)


def flipped(program: ow.Program, name: str) -> tuple[str, Step | None]:
    """What the side is called, and its step with one thing other than compile has it.

    None where that changes nothing here.
    """
    if name == "tune":
        return "onward, tune=False", ow.compile(program, tune=False)
    usual = default()
    before = usual(program).program
    is_on = bool(ow.graph.rolls_of(before)) if name == "roll" else getattr(usual, name)
    label, changed = f"onward, {name} {'off' if is_on else 'on'}", replace(usual, **{name: not is_on})
    try:
        after = changed(program).program
    except GraphError:
        return label, None
    step = Step(program, (), True, ahead=False, tuning=changed, apart=() if changed.storage else None)
    if name == "storage":
        shares = Step(program, (), True, ahead=False, tuning=usual, apart=()).storage is not None
        return label, step if shares else None
    return label, None if _same(before, after) else step


def _same(a: ow.Program, b: ow.Program) -> bool:
    pairs = zip(a.ops, b.ops, strict=False)
    return len(a.ops) == len(b.ops) and all(x.body.signature == y.body.signature for x, y in pairs)
