"""Catch a traced function that keeps a traced array after it has returned.

Such a side effect (appending to a list, setting an attribute) would hold an array without a value. The
arguments of the trace are watched by weak references: they outlive it only if something kept them, or
kept what was computed from them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any

import jax

from onward.core.errors import TraceError


class LeakWatch:
    """Watches the tracers of one trace."""

    def __init__(self) -> None:
        self._watched: list[weakref.ref[Any]] = []

    def begin(self, tracers: Sequence[Any]) -> None:
        """Watch these arguments; called inside the trace."""
        self._watched = [weakref.ref(t) for t in tracers if isinstance(t, jax.core.Tracer)]

    def end(self, name: str) -> None:
        """Raise ``TraceError`` if one of them is still alive; called after the trace."""
        if not self._alive():
            return
        gc.collect()
        if self._alive() and (place := _whereabouts()):
            raise TraceError(
                f"{name} is not pure: it keeps a traced array after it has returned ({place}). Such an "
                "array never gets a value. Return what you need instead of storing it: "
                "`return loss, aux` and trace with has_aux=True."
            )

    def _alive(self) -> bool:
        return any(ref() is not None for ref in self._watched)


def _whereabouts() -> str:
    """Where the user's code stores a tracer; empty if only JAX itself still holds one."""
    for kept in [o for o in gc.get_objects() if isinstance(o, jax.core.Tracer)]:
        for holder in gc.get_referrers(kept):
            if isinstance(holder, dict):
                keys = [k for k, v in holder.items() if v is kept and isinstance(k, str)]
                if keys and not keys[0].startswith("_") and keys[0] not in ("kept", "holder"):
                    return f"{kept.aval} under the name {keys[0]!r}"
            elif isinstance(holder, list) and holder and holder[0] is kept:
                return f"{kept.aval} in a list of {len(holder)}"
    return ""
