"""The parameters of an equation in words, as a printed Program shows them."""

from __future__ import annotations

from typing import Any

import numpy as np

from onward.core.jaxprs.equations import jaxprs_in

_TOO_LONG = 60


def attributes_of(eqn: Any) -> dict[str, str]:
    """The parameters that say something, but functions and jaxprs; what is long is cut."""
    shown = {}
    for key, value in eqn.params.items():
        is_nowhere = getattr(getattr(value, "mesh", None), "empty", False)  # how it lies on no mesh
        if not (callable(value) or jaxprs_in(value) or _is_left_open(value) or is_nowhere):
            key, value = ("spec", value.spec) if hasattr(value, "spec") else (key, value)
            text = str(_plain(value))
            shown[key] = text if len(text) <= _TOO_LONG else text[: _TOO_LONG - 3] + "..."
    return shown


def _is_left_open(value: Any) -> bool:
    """Whether a parameter says nothing."""
    return value is None or (isinstance(value, tuple) and len(value) == 1 and value[0] is None)


def _plain(value: Any) -> Any:
    """A parameter without NumPy's way of writing integers."""
    if isinstance(value, tuple | list):
        return tuple(map(_plain, value))
    return int(value) if isinstance(value, np.integer) else value
