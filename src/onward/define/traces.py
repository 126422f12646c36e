"""The forward Programs of one function, so that what builds a Program traces it once for each length."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Any

from onward.core.jaxprs.tracing import settings_now
from onward.core.program import Program

_MOST = 8  # lengths of a batch that one chain of transforms may take, and some more


class Traces:
    """The Programs of a function that were asked for last. In another process it begins empty."""

    def __init__(self) -> None:
        self._known: OrderedDict[Any, Program] = OrderedDict()
        self._lock = Lock()

    def found(self, key: tuple[Any, ...], trace: Callable[[], Program]) -> Program:
        """The Program that is known by this key, and under JAX's settings of now; else it is traced."""
        try:
            with self._lock:
                known = self._known.get((*key, settings_now()))
        except TypeError:  # data that cannot be compared
            return trace()
        known = trace() if known is None else known
        self.keep(key, known)
        return known

    def keep(self, key: tuple[Any, ...], program: Program) -> None:
        """Let the Program be found by this key; the one that nobody asked for longest is let go."""
        now = (*key, settings_now())
        try:
            with self._lock:
                self._known[now] = program
                self._known.move_to_end(now)
                while len(self._known) > _MOST:
                    self._known.popitem(last=False)
        except TypeError:
            return

    def __reduce__(self) -> tuple[Any, ...]:
        return Traces, ()
