"""The calls of ``jax.grad`` within someone's step: the function that each differentiates, and for what.

In a traced step the derivatives stand already, and what was differentiated cannot be told from them: a
function with a rule of its own is gone, and so is every ``stop_gradient``. So while a step is traced,
``jax.grad`` and ``jax.value_and_grad`` are others, under those names and wherever a module holds them: called
by that step, or by functions jitted within it, they compute the value alone, and an open equation stands for
the gradients. Within the function that is differentiated, and for everyone else in other threads, they are
what they were; so they are at lines that are told to be left, as those in a loop.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from operator import index
from threading import RLock
from typing import Any

import jax

from onward.core.jaxprs.differentiated import entered, gradients_of
from onward.core.source import user_line


@dataclass
class GradientCalls:
    """The calls of one trace, by their lines in the user's code.

    Attributes:
        left: the lines at which gradients are computed as they always were.
        hidden: the lines at which they cannot be left open, and what they are within.
    """

    left: Collection[str]
    hidden: dict[str, str] = field(default_factory=dict)

    def called(
        self, options: _Options, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The value and the open gradients, as the differentiated function would return them."""
        line = user_line()
        if options.special:
            self.hidden[line] = f"with {options.special}"
        if line in self.left or options.special:
            return plain(*args, **kwargs)
        wanted, treedef = jax.tree.flatten(options.chosen(args))
        inside = entered(wanted)
        gradients = None
        if inside is not None:
            returned = self.within(
                options, options.with_chosen(args, jax.tree.unflatten(treedef, inside)), kwargs
            )
            gradients = gradients_of(returned[0] if options.has_aux else returned, inside, line)
        if gradients is None:
            self.hidden[line] = "within a vmap or a derivative"
            return plain(*args, **kwargs)
        return options.returned(returned, jax.tree.unflatten(treedef, gradients))

    def within(self, options: _Options, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function that is differentiated, in which gradients are computed as they always were."""
        token = _calls.set(None)
        try:
            return options.function(*args, **kwargs)
        finally:
            _calls.reset(token)


@dataclass(frozen=True)
class _Options:
    """The arguments of ``jax.grad`` or ``jax.value_and_grad``; ``special`` names those that few give."""

    function: Callable[..., Any]
    argnums: Any
    has_aux: bool
    has_value: bool
    special: str

    def chosen(self, args: tuple[Any, ...]) -> Any:
        """Those of the arguments that the function is differentiated for."""
        if isinstance(self.argnums, tuple | list):
            return tuple(args[index(i)] for i in self.argnums)
        return args[index(self.argnums)]

    def with_chosen(self, args: tuple[Any, ...], values: Any) -> tuple[Any, ...]:
        """The arguments with other values of these."""
        several = isinstance(self.argnums, tuple | list)
        places, values = (self.argnums, values) if several else ((self.argnums,), (values,))
        new = {index(i) % len(args): value for i, value in zip(places, values, strict=True)}
        return tuple(new.get(i, x) for i, x in enumerate(args))

    def returned(self, value: Any, gradients: Any) -> Any:
        """The containers that the differentiated function returns."""
        if self.has_value:
            return value, gradients
        return (gradients, value[1]) if self.has_aux else gradients


_calls: ContextVar[GradientCalls | None] = ContextVar("gradient calls", default=None)
_lock = RLock()
_NAMES = ("grad", "value_and_grad")
_SPECIAL = ("holomorphic", "allow_int", "reduce_axes")


@contextmanager
def taking_apart(left: Collection[str]) -> Iterator[GradientCalls]:
    """Leave the gradients open that are computed in this block, but those at the lines of ``left``."""
    found = GradientCalls(left)
    token = _calls.set(found)
    try:
        with _lock, _replaced():
            yield found
    finally:
        _calls.reset(token)


@contextmanager
def _replaced() -> Iterator[None]:
    """Let every module that holds ``jax.grad`` or ``jax.value_and_grad`` hold another for a while."""
    originals = [getattr(jax, name) for name in _NAMES]
    others = {id(f): _taken_apart(f, name != "grad") for f, name in zip(originals, _NAMES, strict=True)}
    held = [
        (names, name, value)
        for module in list(sys.modules.values())
        if not getattr(module, "__name__", "jax").startswith("jax.")
        for names in (getattr(module, "__dict__", {}),)
        for name, value in list(names.items())
        if id(value) in others
    ]
    try:
        for names, name, value in held:
            names[name] = others[id(value)]
        yield
    finally:
        for names, name, value in held:
            if names.get(name) is others[id(value)]:
                names[name] = value


def _taken_apart(original: Callable[..., Any], has_value: bool) -> Callable[..., Any]:
    """``jax.grad`` or ``jax.value_and_grad`` for a step that is traced."""

    @wraps(original)
    def transform(
        fun: Callable[..., Any], argnums: Any = 0, has_aux: bool = False, *rest: Any, **others: Any
    ) -> Any:
        plain = original(fun, argnums, has_aux, *rest, **others)
        if _calls.get() is None:
            return plain
        told = dict(zip(_SPECIAL, rest, strict=False)) | others
        special = " and ".join(name for name, value in told.items() if value)
        options = _Options(fun, argnums, has_aux, has_value, special)

        @wraps(plain)
        def differentiated(*args: Any, **kwargs: Any) -> Any:
            current = _calls.get()
            return plain(*args, **kwargs) if current is None else current.called(options, plain, args, kwargs)

        return differentiated

    return transform
