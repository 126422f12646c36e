"""How long a step over several processes may take."""

from __future__ import annotations

import os
from math import isinf, nan
from typing import Any

from onward.core.errors import ArgumentError

_SECONDS = 300.0


def deadline_of(seconds: float | None) -> float | None:
    """How long a step over several processes may take; infinity for no end."""
    chosen: Any = os.environ.get("ONWARD_DEADLINE", _SECONDS) if seconds is None else seconds
    try:
        found = float(chosen)
    except (TypeError, ValueError):
        found = nan
    if not found > 0:
        raise ArgumentError(f"deadline is {chosen!r}; expected a number of seconds above 0, or math.inf.")
    return None if isinf(found) else found
