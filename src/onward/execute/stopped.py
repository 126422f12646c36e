"""Whether training stopped in a State, seen without waiting for the steps that are still computing."""

from __future__ import annotations

import jax
import numpy as np

from onward.core.errors import NonFiniteError
from onward.core.program import Program
from onward.derive.guard import Stop, stop_of
from onward.execute.state import State

_AT_LEAST = 64


class Stopped:
    """Looks at the State that a step is given: whenever it is there already, and at every 64th step."""

    def __init__(self, stop: Stop) -> None:
        self.stop = stop
        self._calls = 0

    @classmethod
    def of(cls, program: Program) -> Stopped | None:
        """One for a Program that stops; None for another."""
        stop = stop_of(program)
        return None if stop is None else cls(stop)

    def look(self, state: State, wait: bool = False) -> None:
        """Raise ``NonFiniteError`` if this State is one in which training stopped."""
        self._calls += 1
        if state.is_spent or isinstance(flag := state[self.stop.stopped.name], jax.core.Tracer):
            return
        is_there = wait or not hasattr(flag, "is_ready") or flag.is_ready()
        if (is_there or self._calls % _AT_LEAST == 0) and bool(flag):
            step = None if self.stop.step is None else int(state[self.stop.step.name])
            culprits = np.asarray(state[self.stop.culprits.name])
            raise NonFiniteError(self.stop.message(culprits.tolist(), step))
