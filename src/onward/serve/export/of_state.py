"""The values of a State as a Program of one device keeps them, so that a file holds what its graph says."""

from __future__ import annotations

from typing import Any

import numpy as np

from onward.core.errors import ArgumentError
from onward.core.program import Program, Variable
from onward.core.words import Placement
from onward.execute.layout import Layout
from onward.execute.processes import gathered
from onward.execute.restore import laid_out
from onward.execute.state import State

_SPREAD = (Placement.SHARDED, Placement.PER_REPLICA)


def values_of(program: Program, state: State) -> dict[Variable, Any]:
    """The values that the Program keeps; of those that lie in parts over several devices, the whole.

    Raises:
        ArgumentError: a value of another shape or dtype, as in the State of another Program.
        UnknownNameError: the State holds nothing of a name.
        StateError: it was given to a step.
    """
    layout, found = Layout.of(program), {v: state[v.name] for v in program.state}
    was = {v.name: v.placement for v in state.layout.variables}
    values = {v: _whole(x, v, layout, was[v.name]) for v, x in found.items()}
    if misfits := [v for v, x in values.items() if x is None]:
        told = "; ".join(
            f"{v.name!r} is {found[v].dtype}{list(found[v].shape)}, expected {v.type}" for v in misfits[:5]
        )
        raise ArgumentError(
            f"This State is of another Program than {program.name!r}: {told}"
            f"{', and others' * (len(misfits) > 5)}. Nothing was saved. Save the step that returned the "
            "State; or one of the same network and optimizer, for one device."
        )
    return values


def _whole(value: Any, v: Variable, layout: Layout, was: Placement) -> Any:
    """The value as the Program keeps it; None if it is none of this Variable."""
    if value.dtype == v.dtype and value.shape == v.shape:
        return value
    if was not in _SPREAD or value.dtype != v.dtype:
        return None
    return laid_out(np.asarray(gathered(value)), v, layout, was)
