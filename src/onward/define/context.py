"""The declarations of one traced function while it runs: data, parameters, state and names of layers.

The context is per thread and begins with the trace. ``declare`` holds the functions that people call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp

from onward.core.errors import ArgumentError, TraceError, nearest
from onward.core.jaxprs.reading import declared
from onward.core.jaxprs.scopes import current_scope, outermost_scope, trace_in_progress
from onward.core.source import user_line
from onward.core.variable import holds_keys
from onward.core.words import Kind
from onward.define.arguments import Type, type_of

Initializer = Callable[..., Any]
Shape = tuple[int | None, ...]

_UNFED_BATCH = 2
_INSIDE = (
    "{what} is declared at {line}, inside the body of a scan, cond, vmap, grad or nested jit. What is inside "
    "runs another number of times than it is declared: declare it outside, in the traced function itself, "
    "and close over the array."
)


@dataclass(frozen=True, eq=False)
class Declared:
    """One declaration: the Variable it will be, and its value in the trace."""

    kind: Kind
    type: Type
    value: Any
    line: str
    initializer: Initializer | None = None


@dataclass(frozen=True, eq=False)
class Bound:
    """A promise about integer data: every number is at least 0 and less than ``size``."""

    value: Any
    size: int
    what: str


@dataclass(frozen=True)
class Extra:
    """The values returned besides the result: next values by name, values to be named, bounded values."""

    assigned: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    bounds: tuple[tuple[int, str], ...] = ()


class Context:
    """The declarations of one trace, in order.

    ``makers`` has, for a Variable that a layer outside of a function declares, that layer; None for what
    people named, or what all layers share. ``layers`` has the names that no other layer is numbered by, each
    with whose it is: a Lazy layer, or the words for one that the function calls; None for a name of data.
    """

    def __init__(
        self, training: bool, batch_size: int | None, feed: Mapping[str, Type], taken: Iterable[str] = ()
    ) -> None:
        self.training = training
        self.asks_training = False
        self.feed = feed
        self.batch = None if batch_size is None else (batch_size, "batch_size")
        self.reread: set[str] = set()
        self.fixed: set[str] = set()
        self.declared: dict[str, Declared] = {}
        self.assigned: dict[str, Any] = {}
        self.labels: dict[int, tuple[str, Any]] = {}
        self.bounds: list[Bound] = []
        self.memory: dict[Any, Any] = {}
        self.makers: dict[str, Any] = {}
        self.layers: dict[str, Any] = dict.fromkeys(taken)
        self.extra = Extra()
        self._keys = 0
        self._base: Any = None
        self._trace: Any = None

    @contextmanager
    def open(self) -> Iterator[None]:
        """Make this the context of the thread; called inside the trace."""
        self._trace = trace_in_progress()
        _local.stack = [*_stack(), self]
        try:
            yield
        finally:
            _local.stack = _local.stack[:-1]

    def extras(self) -> list[Any]:
        """The values that the trace must return besides the function's result; ``extra`` describes each."""
        labels, bounds = list(self.labels.values()), self.bounds
        self.extra = Extra(
            tuple(self.assigned), tuple(n for n, _ in labels), tuple((b.size, b.what) for b in bounds)
        )
        return [*self.assigned.values(), *(value for _, value in labels), *(b.value for b in bounds)]

    def forget(self) -> None:
        """Let go of every traced value; called after the trace."""
        self.declared = {name: replace(d, value=None) for name, d in self.declared.items()}
        self.memory, self.assigned, self.labels, self.bounds, self._base = {}, {}, {}, [], None

    @property
    def assumes_batch(self) -> bool:
        """Whether nothing showed what None stands for in the shapes of data."""
        return self.batch is not None and self.batch[1] == "default"

    @property
    def is_outermost(self) -> bool:
        """Whether the function itself runs, not the body of a scan or a nested jit in it."""
        return bool(self._trace == trace_in_progress())

    def data(self, name: str, shape: Shape | None, dtype: Any) -> Any:
        """The data Variable of this name."""
        if (known := self.declared.get(name)) is not None:
            self._same(name, known, Kind.DATA, known.type if shape is None else self._fed(name, shape, dtype))
            return known.value
        if shape is not None and None not in shape[:1]:
            self.fixed.add(name)
        return self._declare(name, Kind.DATA, self._fed(name, shape, dtype))

    def variable(
        self,
        name: str,
        kind: Kind,
        type: Type,  # noqa: A002
        initializer: Initializer | None,
    ) -> Any:
        """The value of the parameter or state Variable of this name, as it is now."""
        known = self.declared.get(name)
        if known is None:
            return self._declare(name, kind, type, initializer)
        self._same(name, known, kind, type)
        self.reread.update({name} & self.assigned.keys())
        return self.assigned.get(name, known.value)

    def assign(self, target: Any, value: Any) -> None:
        """Give a state Variable its next value."""
        name = target if isinstance(target, str) else self._named(target)
        scoped = self.scoped(name)
        name = scoped if scoped in self.declared else name
        known = self.declared.get(name)
        if known is None or known.kind is not Kind.STATE:
            states = [n for n, d in self.declared.items() if d.kind is Kind.STATE]
            raise TraceError(
                f"assign at {user_line()}: no state is named {name!r}. {nearest(name, states)} Declare it "
                "first: onward.state(name, shape)."
            )
        if not self.is_outermost:
            raise TraceError(_INSIDE.format(what=f"The next value of {name!r}", line=user_line()))
        found = type_of(value)
        if found is None or tuple(found.shape) != known.type.shape or not _casts(found, known.type):
            words = "not an array" if found is None else f"{found.dtype}{list(found.shape)}"
            raise TraceError(
                f"assign at {user_line()}: the next value of {name!r} is {words}; it is declared as "
                f"{known.type.dtype}{list(known.type.shape)}. State keeps its type from step to step."
            )
        dtype = known.type.dtype
        self.assigned[name] = value if holds_keys(dtype) else jnp.asarray(value, dtype)

    def key(self) -> Any:
        """A random key that no other call and no other step is given."""
        if not self.is_outermost:
            raise TraceError(_INSIDE.format(what="A random key", line=user_line()))
        if self._base is None:
            self.makers["key"] = None  # all layers share it
            self._base = self.variable("key", Kind.STATE, _key_type(), None)
            with outermost_scope():
                self.assigned["key"] = jax.random.fold_in(self._base, 0)
        self._keys += 1
        return jax.random.fold_in(self._base, self._keys)

    def scoped(self, name: str) -> str:
        """The name within the scopes that are open here."""
        scope = current_scope()
        return f"{scope}/{name}" if scope else name

    def number(self, kind: str) -> str:
        """The name of the next layer of this kind in the open scope: ``fc_0``, ``fc_1``..."""
        return next(name for i in count() if self.scoped(name := f"{kind}_{i}") not in self.layers)

    def label(self, name: str, value: Any) -> None:
        """Name the Variable that holds this value; the outermost layer that returns it has the last word."""
        if isinstance(value, jax.core.Tracer) and self.is_outermost:
            self.labels[id(value)] = (name, value)

    def bound(self, value: Any, size: int, what: str) -> None:
        """Note that integer data must lie in ``range(size)``, to be checked where it is fed."""
        if isinstance(value, jax.core.Tracer) and self.is_outermost:
            self.bounds.append(Bound(value, size, what))

    def _declare(
        self,
        name: str,
        kind: Kind,
        type: Type,  # noqa: A002
        initializer: Initializer | None = None,
    ) -> Any:
        if not self.is_outermost:
            raise TraceError(_INSIDE.format(what=f"The {kind} {name!r}", line=user_line()))
        value = declared(name, type)
        self.declared[name] = Declared(kind, type, value, user_line(), initializer)
        return value

    def _same(self, name: str, known: Declared, kind: Kind, type: Type) -> None:  # noqa: A002
        if (known.kind, known.type.shape, known.type.dtype) != (kind, type.shape, type.dtype):
            raise TraceError(
                f"{name!r} is declared twice: as {known.kind} {known.type.dtype}{list(known.type.shape)} at "
                f"{known.line}, and as {kind} {type.dtype}{list(type.shape)} at {user_line()}. The same name "
                "is the same Variable; give the second another name, or the same shape and dtype."
            )

    def _named(self, value: Any) -> str:
        """The name of the state Variable that has this value now."""
        if (name := getattr(value, "name", None)) is not None:
            return str(name)
        first = [name for name, known in self.declared.items() if known.value is value]
        again = [name for name in self.assigned if name in self.reread and self.assigned[name] is value]
        if len(found := dict.fromkeys([*first, *again])) == 1:
            return next(iter(found))
        if found:
            raise TraceError(
                f"assign at {user_line()} was given an array that is the value of several: "
                f"{', '.join(map(repr, found))}. Say which by its name: assign({next(iter(found))!r}, value)."
            )
        raise TraceError(
            f"assign at {user_line()} was given an array that onward.state did not return. Pass what it "
            "returned, or the name: assign('mean', value)."
        )

    def _fed(self, name: str, shape: Shape | None, dtype: Any) -> Type:
        """The type of a data Variable: what is declared, completed by what is fed."""
        fed = self.feed.get(name)
        if fed is None:
            return Type(self._unfed(name, shape), jnp.dtype(dtype or "float32"))
        found = tuple(fed.shape)
        if shape is not None:
            self._fits(name, shape, found)
        return Type(found, jnp.dtype(dtype) if dtype is not None else fed.dtype)

    def _unfed(self, name: str, shape: Shape | None) -> tuple[int, ...]:
        if shape is None:
            raise ArgumentError(
                f"The data {name!r} is declared without a shape, and nothing is fed that shows it. Declare "
                f"it, data({name!r}, (None, 784)), or show an example: "
                f"trace(network, feed={{{name!r}: array}})."
            )
        if None in shape[1:]:
            raise ArgumentError(
                f"The data {name!r} is declared as {shape}; None can stand for the batch, the first axis. To "
                f"leave other axes open, show an example: trace(network, feed={{{name!r}: array}})."
            )
        if None in shape and self.batch is None:
            rows = ((kind.shape[0], fed) for fed, kind in self.feed.items() if kind.shape)
            self.batch = next(rows, (_UNFED_BATCH, "default"))
        return tuple(self.batch[0] if n is None and self.batch else n or 0 for n in shape)

    def _fits(self, name: str, shape: Shape, found: tuple[int, ...]) -> None:
        wrong = len(shape) != len(found) or any(
            n is not None and n != m for n, m in zip(shape, found, strict=True)
        )
        if wrong:
            raise ArgumentError(
                f"The data {name!r} is declared as {_words(shape)} and fed as {_words(found)}. None stands "
                "for the batch; everything else must be equal."
            )
        if shape and shape[0] is None:
            if self.training and not found[0]:
                raise ArgumentError(
                    f"The data {name!r} is fed as {_words(found)}: a batch without rows has no mean to train "
                    "on. Leave it out."
                )
            self.batch = self.batch or (found[0], name)
            if self.batch[0] != found[0]:
                raise ArgumentError(
                    f"The batch has {self.batch[0]} rows in {self.batch[1]!r} and {found[0]} in {name!r}. "
                    "The first axis is the batch where None is declared: feed equally many rows."
                )


_local = threading.local()


def _stack() -> list[Context]:
    return getattr(_local, "stack", [])


def current_context() -> Context | None:
    """The context of the trace that runs in this thread, or None outside of one."""
    stack = _stack()
    return stack[-1] if stack else None


def _key_type() -> Type:
    with jax.ensure_compile_time_eval():
        return Type((), jax.random.key(0).dtype)


def _casts(found: Type, known: Type) -> bool:
    return found.dtype == known.dtype or bool(
        found.weak_type and jnp.can_cast(found.dtype, known.dtype, "same_kind")
    )


def _words(shape: Shape) -> str:
    return f"[{', '.join(map(str, shape))}]"
