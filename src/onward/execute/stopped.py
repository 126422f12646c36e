"""Whether training stopped in a State, seen without waiting for the steps that are still computing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from onward.core.errors import NonFiniteError
from onward.core.program import Program
from onward.derive.guard import Stop, stop_of
from onward.execute.state import Layout, is_deleted

_AT_LEAST = 64


class Stopped:
    """Looks at the State that a step is given: whenever it is there already, and at every 64th step."""

    def __init__(self, stop: Stop, layout: Layout) -> None:
        self.stop = stop
        self._flag, self._culprits = (layout.position[v.name] for v in (stop.stopped, stop.culprits))
        self._step = None if stop.step is None else layout.position[stop.step.name]
        self._calls = 0

    @classmethod
    def of(cls, program: Program, layout: Layout) -> Stopped | None:
        """One for a Program that stops; None for another."""
        stop = stop_of(program)
        return None if stop is None else cls(stop, layout)

    def look(self, values: Sequence[Any], wait: bool = False) -> None:
        """Raise ``NonFiniteError`` if the State of these values is one in which training stopped."""
        flag: Any = values[self._flag]
        self._calls += 1
        if isinstance(flag, jax.core.Tracer) or is_deleted(flag):
            return
        is_there = wait or not hasattr(flag, "is_ready") or flag.is_ready()
        if (is_there or self._calls % _AT_LEAST == 0) and bool(flag):
            step = None if self._step is None else int(values[self._step])
            raise NonFiniteError(self.stop.message(np.asarray(values[self._culprits]).tolist(), step))
