"""Catch a traced function that keeps a traced array after it has returned.

Such a side effect (appending to a list, setting an attribute) would hold an array without a value. The
arguments of the trace are watched by weak references: they outlive it only if something kept them, or
kept what was computed from them.
"""

from __future__ import annotations

import gc
import inspect
import weakref
from collections.abc import Sequence
from typing import Any

import jax

from onward.core.errors import TraceError
from onward.core.source import named


class LeakWatch:
    """Watches the tracers of one trace."""

    def __init__(self) -> None:
        self._watched: list[weakref.ref[Any]] = []

    def begin(self, tracers: Sequence[Any]) -> None:
        """Watch these arguments; called inside the trace."""
        self._watched = [weakref.ref(t) for t in tracers if isinstance(t, jax.core.Tracer)]

    def end(self, function: Any, name: str) -> None:
        """Raise ``TraceError`` if one of them is still alive; called after the trace."""
        for generation in (1, 2):  # what a trace leaves is young, and to look through all takes long
            if not self._alive():
                return
            gc.collect(generation)
        if self._alive() and (place := _whereabouts()):
            raise TraceError(
                f"{name} is not pure{_definition(function)}: it keeps a traced array after it has returned, "
                f"{place}. Such an array never gets a value. Return what you need instead of storing it: "
                "`return loss, aux` and trace with has_aux=True."
            )

    def _alive(self) -> bool:
        return any(ref() is not None for ref in self._watched)


def _definition(function: Any) -> str:
    """Where a function is defined, as `` (defined at file:line)``."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" (defined at {named(code.co_filename)}:{code.co_firstlineno})" if code is not None else ""


def _whereabouts() -> str:
    """Where the user's code stores a tracer; empty if only JAX itself still holds one."""
    tracers = [o for o in gc.get_objects() if isinstance(o, jax.core.Tracer)]
    held = [(tracer, holder) for tracer in tracers for holder in gc.get_referrers(tracer)]
    held = [(tracer, holder) for tracer, holder in held if not _is_of_jax(holder)]
    for tracer, holder in held:
        for key, value in _named_in(holder).items():
            if value is tracer and isinstance(key, str) and not key.startswith("_"):
                return f"{tracer.aval} under the name {key!r}"
    for tracer, holder in held:
        if isinstance(holder, list) and holder is not tracers:
            return f"{tracer.aval} in a list of {len(holder)}"
    return ""


def _named_in(holder: Any) -> dict[Any, Any]:
    """The items of a dict, or the attributes of an object by name."""
    if isinstance(holder, dict):
        return dict(holder)
    try:
        return dict(vars(holder))
    except TypeError:
        return {}


def _is_of_jax(holder: Any) -> bool:
    """Whether JAX itself keeps the tracer: in an object of its own, or as a jaxpr keeps its constants.

    The caches of JAX hold what a function that it converted closes over beside that function, in a tuple.
    """
    keepers = [holder, *(gc.get_referrers(holder) if isinstance(holder, list | dict) else [])]
    keepers += [x for kept in keepers if isinstance(kept, tuple) for x in kept if callable(x)]
    modules = (str(getattr(k if callable(k) else type(k), "__module__", "")) for k in keepers)
    return any(module.partition(".")[0] in ("jax", "jaxlib") for module in modules)
