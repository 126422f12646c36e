"""Values to watch: patterns, and words such as ``gradients=True``, as entries that outlive a new trace.

An entry names Variables and does not hold them: the same Program for another batch, or for many devices, has
others of the same names. A gradient is found by its parameter along ``program.gradients``, wherever on the
way from the backward pass to the update it is merged or divided by a loss scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

from onward.core.errors import ArgumentError, GraphError
from onward.core.homes import scoped_names
from onward.core.marks import UNSCALE
from onward.core.program import Program, Variable
from onward.core.walk import Where, listed, producers, select
from onward.core.words import Pass

Choice = bool | Where | Iterable[Where]


class Role(StrEnum):
    """The quantity that an entry stands for: the value, gradient or update of the Variable it names."""

    VALUE = "value"
    GRADIENT = "gradient"
    UPDATE = "update"


@dataclass(frozen=True)
class WatchEntry:
    """One thing to watch: a Variable, the gradient of a parameter, or what an update adds to one.

    ``names`` are those of Variables; of several it is the norm of all their numbers together.
    """

    label: str
    role: Role
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        """That of the Variable, or ``"all"``."""
        return "all" if self.is_whole else self.names[0]

    @property
    def is_whole(self) -> bool:
        """Whether it stands for all parameters at once."""
        return len(self.names) > 1


def entries_of(
    program: Program,
    patterns: Where | Iterable[Where],
    gradients: Choice,
    updates: Choice,
    parameters: Choice,
    activations: Choice,
) -> tuple[WatchEntry, ...]:
    """The entries to watch, each once, in the order in which the Program computes them.

    Raises:
        UnknownNameError: a pattern that matches nothing.
        GraphError: gradients or updates of a Program that has none.
    """
    trained = tuple(dict.fromkeys(p for p, _ in program.gradients))
    updated = tuple(p for p in program.parameters if program.next_state.get(p, p) is not p)
    forward = tuple(v for op in program.ops if op.made_by is Pass.FORWARD for v in op.outputs if not v.is_key)
    found = [
        *_of(program, parameters, program.parameters, Role.VALUE, "parameters"),
        *_of(program, activations, forward, Role.VALUE, "activations"),
        *_of(program, gradients, trained, Role.GRADIENT, "gradients"),
        *_of(program, updates, updated, Role.UPDATE, "updates"),
    ]
    known = tuple(v for v in program.variables.values() if not v.is_key)
    aliases = seam_of(program)
    for v, label in _chosen(program, known, patterns, "watch"):
        p = aliases.get(v)
        found.append(WatchEntry(label, Role.VALUE, (v.name,)) if p is None else _entry(Role.GRADIENT, p))
    return tuple(dict.fromkeys(found))


def _of(
    program: Program, choice: Choice, among: Sequence[Variable], role: Role, what: str
) -> Iterator[WatchEntry]:
    if choice is False:
        return
    if isinstance(choice, int | float) and choice is not True:
        raise ArgumentError(f"watch: {what} is {choice!r}; expected True, False, a pattern, or several.")
    if not among:
        advice = "They come with minimize: watch(optimizer.minimize(loss, ...), ...)."
        if what == "activations":
            advice = "A loop over micro-batches keeps them within: watch before accumulate."
        raise GraphError(f"watch: Program {program.name!r} has no {what}. {advice}")
    chosen = (
        [(v, v.name) for v in among] if choice is True else _chosen(program, among, choice, f"watch, {what}")
    )
    for p, label in chosen:
        yield _entry(role, p, label)
    if choice is True and what != "activations" and len(chosen) > 1:
        yield WatchEntry(f"all {what}", role, tuple(p.name for p, _ in chosen))


def _chosen(
    program: Program, among: Sequence[Variable], choice: Where | Iterable[Where], what: str
) -> list[tuple[Variable, str]]:
    """The Variables that are picked, and what to call them.

    A pattern that no name fits is looked for among names below the scopes that nobody named, and those found
    are called so.
    """
    asked = listed(choice)
    unknown = [c for c in asked if isinstance(c, str) and not any(fnmatchcase(v.name, c) for v in among)]
    scoped = scoped_names(program) if unknown else {}
    labels = {v: scoped[v] for v in among if v in scoped and any(fnmatchcase(scoped[v], c) for c in unknown)}
    met = [c for c in unknown if any(fnmatchcase(label, c) for label in labels.values())]
    plain = set(select(among, rest, what)) if (rest := [c for c in asked if c not in met]) else set()
    return [(v, labels.get(v, v.name)) for v in among if v in plain or v in labels]


def _entry(role: Role, v: Variable, label: str = "") -> WatchEntry:
    name = label or v.name
    shown = {Role.VALUE: name, Role.GRADIENT: f"grad({name})", Role.UPDATE: f"update({name})"}[role]
    return WatchEntry(shown, role, (v.name,))


def seam_of(program: Program) -> dict[Variable, Variable]:
    """The parameter of each gradient, even if not yet merged over devices or divided by a loss scale."""
    made = producers(program)
    found: dict[Variable, Variable] = {}
    for p, g in program.gradients:
        v: Variable | None = g
        while v is not None:
            found[v] = p
            op = made.get(v)
            passes_on = op is not None and (op.made_by is Pass.COLLECTIVE or op.type is UNSCALE)
            place = op.outputs.index(v) if passes_on and op is not None else -1
            inputs = op.inputs if op is not None else ()
            before = inputs[place] if 0 <= place < len(inputs) else None
            v = before if before is not None and before.shape == v.shape else None
    return found


def variables_of(program: Program, entry: WatchEntry) -> list[tuple[Variable, ...]] | None:
    """For each name the Variables that are read: two for an update, what it was and what it becomes.

    None if the Program computes no such thing, or has no such name.
    """
    known = program.variables
    named = [known.get(name) for name in entry.names]
    if entry.role is Role.VALUE:
        pairs: list[tuple[Variable | None, ...]] = [(v,) for v in named]
    elif entry.role is Role.GRADIENT:
        seam = dict(program.gradients)
        pairs = [(None if p is None else seam.get(p),) for p in named]
    else:
        pairs = [(p, None if p is None else program.next_state.get(p)) for p in named]
    return _all_there(pairs)


def _all_there(pairs: Sequence[tuple[Any, ...]]) -> list[tuple[Variable, ...]] | None:
    return None if any(v is None for pair in pairs for v in pair) else list(pairs)
