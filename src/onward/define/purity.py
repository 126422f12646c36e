"""Catch a traced function that keeps a traced array after it has returned.

Such a side effect (appending to a list, setting an attribute) would hold an array without a value. The
arguments of the trace are watched by weak references: they outlive it only if something kept them, or kept
what was computed from them. JAX may: its caches keep the functions that it converted, with all that these
close over. So it is a side effect only where an array of the trace can be reached from the function, from
its arguments or from a variable of a module without passing through an object of JAX.
"""

from __future__ import annotations

import gc
import inspect
import sys
import weakref
from collections.abc import Sequence
from functools import partial
from types import FrameType, FunctionType, ModuleType
from typing import Any

import jax

from onward.core.errors import TraceError
from onward.core.source import named

_CACHING = ("jax", "jaxlib", "functools")  # functools keeps what functions were called with, as JAX does
_OPEN = (jax.core.Trace, jax.core.Tracer, jax.tree_util.PyTreeDef, partial)  # theirs, but no caches


class LeakWatch:
    """Watches the arguments of one trace."""

    def __init__(self) -> None:
        self._watched: list[weakref.ref[Any]] = []

    def begin(self, arguments: Sequence[Any]) -> None:
        """Watch these arguments; called inside the trace."""
        self._watched = [weakref.ref(x) for x in arguments if isinstance(x, jax.core.Tracer)]

    def end(self, name: str, function: Any, *arguments: Any) -> None:
        """Raise ``TraceError`` if the function left one of its arrays somewhere; called after the trace."""
        for generation in (1, 2):  # what a trace leaves is young, and to look through all takes long
            if self._trace() is None:
                return
            gc.collect(generation)
        if (trace := self._trace()) and (place := _place(trace, [function, *arguments])):
            raise TraceError(
                f"{name} is not pure{_definition(function)}: it keeps a traced array after it has returned, "
                f"{place}. Such an array never gets a value. Return what you need instead of storing it: "
                "`return loss, aux` and trace with has_aux=True."
            )

    def _trace(self) -> Any:
        """The trace that an argument belongs to which is still alive; None if none is."""
        found = (x for ref in self._watched for x in gc.get_referents(ref()) if isinstance(x, jax.core.Trace))
        return next(found, None)


def _definition(function: Any) -> str:
    """Where a function is defined, as `` (defined at file:line)``."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f" (defined at {named(code.co_filename)}:{code.co_firstlineno})" if code is not None else ""


def _place(trace: Any, roots: list[Any]) -> str:
    """Where the user's code stores an array of this trace; empty if only JAX and its caches hold one.

    The search goes from the trace to what refers to it, and on to what refers to that. It ends at a root.
    """
    variables = _variables()
    ends = {*map(id, roots), *variables}
    reached = {id(trace): trace}
    inside: dict[int, int] = {}  # from what was reached to the one inside of it that led there
    level: tuple[Any, ...] = (trace,)
    while level:
        level = _holders(level, reached, inside, {id(roots), id(reached), id(level)})
        for end in level:
            if id(end) in ends:
                path = [end]
                while id(path[-1]) in inside:
                    path.append(reached[inside[id(path[-1])]])
                return _told(path[::-1], variables.get(id(end)))
    return ""


def _holders(
    level: tuple[Any, ...], reached: dict[int, Any], inside: dict[int, int], ours: set[int]
) -> tuple[Any, ...]:
    """All that refers to one of these objects, leads on and was not reached yet."""
    found = []
    among = {*map(id, level)}
    for holder in gc.get_referrers(*level):
        if id(holder) in ours or id(holder) in reached:
            continue
        held = [x for x in gc.get_referents(holder) if id(x) in among and _leads_on(holder, x)]
        if held:
            reached[id(holder)], inside[id(holder)] = holder, id(held[0])
            found.append(holder)
    return tuple(found)


def _leads_on(holder: Any, held: Any) -> bool:
    """Whether the user reaches ``held`` through this: not if it belongs to JAX, or is a running function."""
    if isinstance(holder, FrameType | ModuleType):  # the variables of modules are where the search ends
        return False
    if isinstance(holder, _OPEN) or not any(home in _CACHING for home in _homes(holder)):
        return True
    return getattr(holder, "__wrapped__", None) is held  # a function of the user, jitted


def _homes(holder: Any) -> list[str]:
    """The libraries that an object comes from; of a dict, the one whose variables it holds."""
    if isinstance(holder, dict):
        found = [holder.get("__name__")]
    else:
        found = [type(holder).__module__, getattr(holder, "__module__", None)]
    return [str(module).partition(".")[0] for module in found]


def _variables() -> dict[int, str]:
    """The name of each object that is a variable of a module, by its identity; without those of JAX."""
    found = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] not in _CACHING:
            found.update({id(x): n for n, x in list(object.__getattribute__(module, "__dict__").items())})
    return found


def _told(path: list[Any], variable: str | None) -> str:
    """The place of the array in words; the path goes from the trace to where the search ended."""
    first = max(i for i, x in enumerate(path) if isinstance(x, jax.core.Trace | jax.core.Tracer))
    array = f"{path[first].aval}"
    for i, holder in enumerate(path[first + 1 :], first + 1):
        if isinstance(holder, list):
            return f"{array} in a list of {len(holder)}"
        for name, value in _named_in(holder):
            if any(value is held for held in path[first:i]) and not name.startswith("__"):
                return f"{array} under the name {name!r}"
    if variable:
        return f"{array} under the name {variable!r}"
    return f"{array} in a {type(path[first + 1]).__name__}"


def _named_in(holder: Any) -> list[tuple[str, Any]]:
    """The values with a name: in a dict, as an attribute, or as a variable that a function closes over."""
    if isinstance(holder, FunctionType):
        return list(zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=True))
    if _homes(holder)[0] == "onward":  # how arguments are described
        return []
    items = holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})
    return [(name, value) for name, value in list(items.items()) if isinstance(name, str)]
