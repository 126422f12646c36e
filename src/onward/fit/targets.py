"""Resolve the targets of a Session, of all kinds, to a Program and names in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from onward.core.errors import GraphError
from onward.core.program import Op, Program, Target, Variable
from onward.core.structure import describe
from onward.core.walk import ancestors, find, prune
from onward.core.words import Kind, Pass, UpdateType
from onward.define.deferred import Deferred
from onward.define.lazy import Lazy

_SHARED = (Kind.PARAMETER, Kind.STATE, Kind.DATA)  # the same in two Programs if name and type are


@dataclass(frozen=True)
class Aim:
    """A Program, the names of what it should compute, and those of what it should return."""

    program: Program
    targets: tuple[str, ...]
    fetch: tuple[str, ...]

    def pruned(self) -> Program:
        """Only what the targets need."""
        return prune(self.program, [*self.targets, *self.fetch])


def listed(choice: Any) -> list[Any]:
    """Targets as a list; one alone as a list of one, none as an empty one."""
    if choice is None:
        return []
    return list(choice) if isinstance(choice, list | tuple) else [choice]


def aim(program: Program, targets: Sequence[Any], fetch: Sequence[Any]) -> Aim:
    """List what to compute for these targets; with an update also the step counter, keys and statistics.

    Raises:
        GraphError: a target of another Program.
        UnknownNameError: a name that no Variable of the Program has.
    """
    wanted = [v for target in targets for v in _variables(program, target)]
    names = tuple(_found(program, f).name for f in fetch)
    needed = ancestors(program, [*wanted, *(program[n] for n in names)])
    along = [new for old, new in program.next_state.items() if _goes_along(program, old, new, wanted, needed)]
    return Aim(program, tuple(dict.fromkeys(v.name for v in (*wanted, *along))), names)


def program_in(targets: Iterable[Any]) -> Program | Deferred | None:
    """The Program that the targets bring along.

    Raises:
        GraphError: they bring several.
    """
    found: list[Program | Deferred] = []
    for target in targets:
        own = target.program if isinstance(target, Target) else target
        if isinstance(own, Program | Deferred) and not any(own is p for p in found):
            found.append(own)
    if len(found) > 1:
        raise GraphError(
            f"The targets belong to {len(found)} Programs ({', '.join(_name(p) for p in found)}). One run is "
            "of one Program: run them one after the other."
        )
    return found[0] if found else None


def belongs(program: Program, target: Any) -> bool:
    """Whether an op or a Variable is part of a Program, or a name is known in it."""
    if isinstance(target, Op):
        return any(target is op for op in program.ops)
    if isinstance(target, Variable):
        return program.variables.get(target.name) is target
    if isinstance(target, Lazy):
        return target.name in program.variables
    return isinstance(target, str) and (target in program.variables or target == "loss")


def _name(program: Program | Deferred) -> str:
    return repr(program.name) if isinstance(program, Program) else "one to come"


def _variables(program: Program, target: Any) -> tuple[Variable, ...]:
    """The Variables that a target stands for."""
    if isinstance(target, Program | Deferred):
        return tuple(program.next_state.values()) or program.outputs
    if isinstance(target, Target | Op):
        op = target.op if isinstance(target, Target) else target
        if not belongs(program, op):
            raise GraphError(f"The target {op!r} belongs to another Program than {program.name!r}.")
        return op.outputs
    if isinstance(target, Variable) and target.kind not in _SHARED and not belongs(program, target):
        raise GraphError(
            f"The target {target!r} belongs to another Program than {program.name!r}. Run that one, or say "
            f"by its name which Variable of this one is meant: {target.name!r}."
        )
    return (_found(program, target),)


def _found(program: Program, target: Any) -> Variable:
    if isinstance(target, Op):
        target = _variables(program, target)[0]
    if isinstance(target, Variable) and not belongs(program, target):
        same = program.variables.get(target.name)
        if same is None or (same.shape, same.dtype) != (target.shape, target.dtype):
            raise GraphError(
                f"{target!r} belongs to another Program than {program.name!r}, which has no such Variable."
            )
    if not isinstance(target, str | Variable | Lazy | Target):
        raise GraphError(
            f"The target is {describe(target)}: give a Program, an op, a Variable, its name, or what a layer "
            "returned."
        )
    return find(program, target)


def _goes_along(
    program: Program, old: Variable, new: Variable, wanted: Sequence[Variable], needed: set[Variable]
) -> bool:
    """Whether a run also updates this state Variable, though no target names it."""
    if old.is_key:
        return old in needed
    maker = next(op for op in program.ops if new in op.outputs) if new not in program.state else None
    trains = any(op.made_by is Pass.UPDATE for op in program.ops if not needed.isdisjoint(op.outputs))
    return (
        trains
        and maker is not None
        and (maker.update is UpdateType.BOOKKEEPING or maker.made_by in (Pass.FORWARD, Pass.BACKWARD))
    )
