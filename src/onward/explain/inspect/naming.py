"""The names and kinds of the Variables of an inspected step, by their roles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from onward.core.names import Names
from onward.core.program import Program, Variable
from onward.core.walk import substitute
from onward.core.words import Kind, Pass, Placement


def named(
    program: Program,
    names: Names,
    given: Mapping[Variable, Kind],
    places: Mapping[Placement, Placement] | None = None,
) -> Program:
    """The Program with the kinds of what it is given, gradients and next values named after what they are of.

    Args:
        program: the Program.
        names: those that are taken.
        given: the kinds of state, or of what a turn of a loop is given.
        places: placements of state that are called otherwise.
    """
    places = places or {}
    new = {
        v: replace(v, kind=kind, placement=places.get(v.placement, v.placement)) for v, kind in given.items()
    }
    names_of = _derived_names(program)
    for op in program.ops:
        kind = Kind.GRADIENT if op.made_by is Pass.BACKWARD else Kind.ACTIVATION
        for v in op.outputs:
            name = names_of.get(v)
            if name is not None or kind is not v.kind:
                new[v] = replace(v, name=v.name if name is None else names.new(name), kind=kind)
    return substitute(program, new)


def _derived_names(program: Program) -> dict[Variable, str]:
    """The names of gradients and of next values; what is both is a gradient."""
    found = {new: f"next({old.name})" for old, new in program.next_state.items()}
    found.update({g: f"grad({p.name})" for p, g in program.gradients})
    return found
