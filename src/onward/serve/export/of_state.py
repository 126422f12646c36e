"""The values of a State as a Program of one device keeps them, so that a file holds what its graph says."""

from __future__ import annotations

from typing import Any

from onward.core.errors import ArgumentError
from onward.core.program import Program, Variable
from onward.execute.layout import Layout
from onward.execute.saved_values import SavedValues
from onward.execute.state import State


def values_of(program: Program, state: State) -> dict[Variable, Any]:
    """The values that the Program keeps; of those that lie in parts over several devices, the whole.

    Of a parameter of which each device has its own (``LocalSGD``) it is their mean.

    Raises:
        ArgumentError: a value of another shape or dtype, as in the State of another Program.
        UnknownNameError: the State holds nothing of a name.
        StateError: it was given to a step.
    """
    layout, saved = Layout.of(program), SavedValues.of_state(state)
    found = {v: state[v.name] for v in program.state}
    values = {v: saved.over(v, layout) for v in found}
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
