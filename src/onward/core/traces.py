"""Traces that are found again: a function is traced once for each length, a rule once for a recipe."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Any

from onward.core.jaxprs.tracing import settings_now


class Traces:
    """The traces that were asked for last. In another process there are none.

    Args:
        most: how much is kept; a chain of transforms asks for a function at some lengths of the batch.
    """

    def __init__(self, most: int = 8) -> None:
        self._most = most
        self._known: OrderedDict[Any, Any] = OrderedDict()
        self._lock = Lock()

    def found(self, key: tuple[Any, ...], trace: Callable[[], Any]) -> Any:
        """The trace of this key under JAX's settings of now, made if there is none."""
        try:
            with self._lock:
                known = self._known.get((*key, settings_now()))
        except TypeError:  # data that cannot be compared
            return trace()
        known = trace() if known is None else known
        self.keep(key, known)
        return known

    def among(self, fits: Callable[[tuple[Any, ...]], bool]) -> Any:
        """A trace under JAX's settings of now whose key fits; None if there is none."""
        now = settings_now()
        with self._lock:
            known = [(key[:-1], made) for key, made in self._known.items() if key[-1] == now]
        return next((made for key, made in known if fits(key)), None)

    def keep(self, key: tuple[Any, ...], made: Any) -> None:
        """Let this be found by the key; what nobody asked for longest is let go."""
        now = (*key, settings_now())
        try:
            with self._lock:
                self._known[now] = made
                self._known.move_to_end(now)
                while len(self._known) > self._most:
                    self._known.popitem(last=False)
        except TypeError:
            return

    def __reduce__(self) -> tuple[Any, ...]:
        return Traces, (self._most,)
