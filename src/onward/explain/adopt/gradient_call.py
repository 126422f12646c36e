"""The call of ``jax.grad`` within someone's step: the function that it differentiates, and for what.

In a traced step the derivatives stand already, and what was differentiated cannot be told from them: a
function with a rule of its own is gone, and so is every ``stop_gradient``. So while a step is traced,
``jax.grad`` and ``jax.value_and_grad`` are others, under those names and wherever a module holds them: called
by that step, they compute the value alone, and in place of each gradient stands a declared value. For
everyone else, in other threads and within functions that JAX traces by themselves, they are what they were.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from threading import RLock
from typing import Any

import jax

from onward.core.jaxprs.equations import Type
from onward.core.jaxprs.reading import declared
from onward.core.jaxprs.scopes import trace_in_progress
from onward.core.source import user_line


@dataclass
class GradientCalls:
    """The calls that were taken apart in one trace.

    Attributes:
        loss: the value of the function that is differentiated.
        wanted: the arrays that it is differentiated for, in order.
        names: of the declared gradients, one for each of these.
        lines: of the user's code, one for each call.
    """

    loss: Any = None
    wanted: list[Any] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)

    def called(self, options: _Options, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function; returns its value and declared gradients, as the differentiated one would."""
        self.lines.append(user_line())
        token = _calls.set(None)
        try:
            returned = options.function(*args, **kwargs)
        finally:
            _calls.reset(token)
        self.loss = returned[0] if options.has_aux else returned
        places = options.places
        one = isinstance(options.argnums, int)
        gradients = self.gradients(args[places[0]] if one else tuple(args[i] for i in places))
        if options.has_value:
            return returned, gradients
        return (gradients, returned[1]) if options.has_aux else gradients

    def gradients(self, arguments: Any) -> Any:
        """The declared gradients for these arguments."""
        leaves, treedef = jax.tree.flatten(arguments)
        names = [f"gradient {len(self.names) + i}" for i in range(len(leaves))]
        self.wanted += leaves
        self.names += names
        kinds = [Type(x.shape, x.dtype) for x in leaves]
        return jax.tree.unflatten(treedef, map(declared, names, kinds))


@dataclass(frozen=True)
class _Options:
    """The arguments of ``jax.grad`` or ``jax.value_and_grad``."""

    function: Callable[..., Any]
    argnums: Any
    has_aux: bool
    has_value: bool

    @property
    def places(self) -> tuple[int, ...]:
        return (self.argnums,) if isinstance(self.argnums, int) else tuple(self.argnums)


_calls: ContextVar[tuple[GradientCalls, Any] | None] = ContextVar("gradient calls", default=None)
_lock = RLock()
_NAMES = ("grad", "value_and_grad")


@contextmanager
def taking_apart() -> Iterator[GradientCalls]:
    """Take the calls of the trace in progress apart; called inside the trace."""
    found = GradientCalls()
    token = _calls.set((found, trace_in_progress()))
    try:
        with _lock, _replaced():
            yield found
    finally:
        _calls.reset(token)


@contextmanager
def _replaced() -> Iterator[None]:
    """Let every module that holds ``jax.grad`` or ``jax.value_and_grad`` hold another for a while."""
    others = {getattr(jax, name): _taken_apart(getattr(jax, name), name != "grad") for name in _NAMES}
    held = [
        (module, name, value)
        for module in list(sys.modules.values())
        if not getattr(module, "__name__", "jax").startswith("jax.")
        for name, value in list(getattr(module, "__dict__", {}).items())
        if any(value is original for original in others)
    ]
    for module, name, value in held:
        setattr(module, name, others[value])
    try:
        yield
    finally:
        for module, name, value in held:
            setattr(module, name, value)


def _taken_apart(original: Callable[..., Any], has_value: bool) -> Callable[..., Any]:
    """``jax.grad`` or ``jax.value_and_grad`` for a step that is traced."""

    @wraps(original)
    def transform(
        fun: Callable[..., Any], argnums: Any = 0, has_aux: bool = False, *rest: Any, **others: Any
    ) -> Any:
        plain = original(fun, argnums, has_aux, *rest, **others)
        if _calls.get() is None:
            return plain

        @wraps(plain)
        def differentiated(*args: Any, **kwargs: Any) -> Any:
            current = _calls.get()
            special = any(rest) or any(others.values())
            if current is None or special or current[1] != trace_in_progress():
                return plain(*args, **kwargs)
            return current[0].called(_Options(fun, argnums, has_aux, has_value), args, kwargs)

        return differentiated

    return transform
