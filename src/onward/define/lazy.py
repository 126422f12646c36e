"""Values that a network will have: what declarations and layers return outside of a trace.

The early designs describe a network at module level. There is nothing to compute with yet, so ``data``,
``var`` and the layers return Lazy values, which remember how they are made. ``trace`` makes them; so does
the first feed of a Session, which also shows the shapes that nobody wrote.

>>> import onward as ow
>>> x, y = ow.data("x", (None, 4)), ow.data("y", (None, 1))
>>> cost = ow.layer.mse(ow.layer.fc(x, 1), y)
>>> cost
Lazy mse(Lazy fc(Lazy data 'x', 1), Lazy data 'y')
>>> [v.name for v in ow.trace(cost, batch_size=8).parameters]
['fc_0/w', 'fc_0/b']
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from itertools import count
from threading import RLock
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from onward.core.errors import ArgumentError, TraceError
from onward.core.jaxprs.scopes import outermost_scope
from onward.core.words import Kind
from onward.define.arguments import Type
from onward.define.context import Context, Initializer, Shape, current_context

_NO_ATTRIBUTE = (
    "{lazy!r} has no {name!r} yet: it is a declaration, made outside of a traced function. Write the network "
    "as a function that uses it, def network(): ..., and trace that; inside it has all that an array has."
)


def _operator(function: Callable[..., Any], is_right: bool = False) -> Callable[..., Any]:
    """The method of an operator, which is applied once there is a value."""

    def operated(self: Lazy, *other: Any) -> Any:
        return applied(function, *other, self) if is_right else applied(function, self, *other)

    return operated


class Lazy:
    """A value that a network will have. Inside a traced function it behaves like the array itself."""

    name: str | None = None
    __array_ufunc__ = None  # lets NumPy leave its operators to the ones below

    def value(self) -> Any:
        """The array, inside a trace.

        Raises:
            ArgumentError: nothing is being traced.
        """
        context = current_context()
        if context is None:
            self._no_value()
        if self not in context.memory:
            with outermost_scope():
                context.memory[self] = self.make(context)
        return context.memory[self]

    def make(self, context: Context) -> Any:
        """Compute or declare the value."""
        raise NotImplementedError

    def reached(self) -> Iterator[Lazy]:
        """This value, and everything it is made of."""
        yield self

    @property
    def is_complete(self) -> bool:
        """Whether every shape is known before something is fed."""
        return not any(isinstance(v, LazyData) and v.declared_shape is None for v in self.reached())

    @property
    def advice(self) -> str:
        """How to make a Program of it, for calls that take one."""
        unknown = [v.name for v in data_in(self) if v.declared_shape is None]
        shown = ", ".join(f"{name!r}: array" for name in unknown)
        return (
            f"Trace the declaration first: trace(cost{f', feed={{{shown}}}' if unknown else ''}). What an "
            "optimizer does, optimizer.minimize(cost) and optimizer.create_backward_pass(cost), takes it as "
            "it is."
        )

    def _no_value(self) -> NoReturn:
        raise ArgumentError(
            f"{self!r} has no value yet: it is a declaration, made outside of a traced function. Give it to "
            "a layer (onward.layer), use it inside a function that onward.trace traces, or run it in a "
            "Session."
        )

    @property
    def __jax_array__(self) -> Callable[[], Any]:
        """How JAX asks for the array; missing outside of a trace, so that JAX takes the operators below."""
        if current_context() is None:
            raise AttributeError("__jax_array__")
        return self.value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(jax.Array, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if current_context() is None:
            raise AttributeError(_NO_ATTRIBUTE.format(lazy=self, name=name))
        return getattr(self.value(), name)

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        self._no_value()

    def __bool__(self) -> NoReturn:  # noqa: PLE0304
        self._no_value()

    def __iter__(self) -> NoReturn:
        raise ArgumentError(
            f"{self!r} cannot be unpacked before it has a value. Take parts by index, value[0], or write the "
            "network as a function and trace it."
        )

    __add__, __radd__ = _operator(operator.add), _operator(operator.add, is_right=True)
    __sub__, __rsub__ = _operator(operator.sub), _operator(operator.sub, is_right=True)
    __mul__, __rmul__ = _operator(operator.mul), _operator(operator.mul, is_right=True)
    __truediv__, __rtruediv__ = _operator(operator.truediv), _operator(operator.truediv, is_right=True)
    __matmul__, __rmatmul__ = _operator(operator.matmul), _operator(operator.matmul, is_right=True)
    __pow__, __rpow__ = _operator(operator.pow), _operator(operator.pow, is_right=True)
    __lt__, __le__ = _operator(operator.lt), _operator(operator.le)
    __gt__, __ge__ = _operator(operator.gt), _operator(operator.ge)
    __neg__, __abs__ = _operator(operator.neg), _operator(operator.abs)
    __getitem__ = _operator(operator.getitem)


_ORDER = count()
NAMING = RLock()  # held by who gives layers their names: another trace would number its own alike


class LazyData(Lazy):
    """Data that will be fed."""

    def __init__(self, name: str, shape: Shape | None, dtype: Any) -> None:
        self.name, self.declared_shape, self.declared_dtype = name, shape, dtype
        self.order = next(_ORDER)

    def make(self, context: Context) -> Any:
        """The data Variable."""
        return context.data(self.name or "", self.declared_shape, self.declared_dtype)

    def __repr__(self) -> str:
        return f"Lazy data {self.name!r}"


class LazyVariable(Lazy):
    """A parameter or a state Variable; without a shape, the layer that takes it completes it."""

    def __init__(
        self,
        name: str,
        kind: Kind,
        shape: tuple[int, ...] | None,
        dtype: Any,
        initializer: Initializer | None,
    ) -> None:
        self.name, self.kind, self.shape, self.dtype = name, kind, shape, dtype
        self.initializer = initializer

    def value(self) -> Any:
        """The array as it is now, inside a trace: what was assigned last."""
        context = current_context()
        if context is None:
            self._no_value()
        return self.make(context)

    def make(self, context: Context) -> Any:
        """The value as it is now; of an open shape, the one that a layer has declared."""
        name = self.name or ""
        known = context.declared.get(name)
        if self.shape is None and known is None:
            raise TraceError(
                f"var({name!r}) has no shape, and no layer that could tell has used it so far. Declare it "
                f"whole: parameter({name!r}, (784, 128))."
            )
        kind = known.type if self.shape is None and known else Type(self.shape or (), jnp.dtype(self.dtype))
        context.makers.setdefault(name, None)
        return context.variable(name, self.kind, kind, self.initializer)

    def completed(self, context: Context, shape: tuple[int, ...], initializer: Initializer) -> Any:
        """The value, its shape told by the layer that takes it, once and for all."""
        if self.shape is None:
            self.shape, self.initializer = shape, self.initializer or initializer
        kind = Type(self.shape, jnp.dtype(self.dtype))
        context.makers.setdefault(self.name or "", None)
        return context.variable(self.name or "", self.kind, kind, self.initializer or initializer)

    def __repr__(self) -> str:
        return f"Lazy {self.kind} {self.name!r}"


class LazyCall(Lazy):
    """The result that a layer or an operator will return once it is called in a trace."""

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.function, self.args, self.options = function, args, options
        self.name = options.get("name")
        self.is_named = self.name is not None

    def make(self, context: Context) -> Any:
        """Call the function; a layer keeps forever the name that it got in its first trace."""
        args, options = self.args, self.options
        if not getattr(self.function, "takes_lazy", False):
            value = resolved if "name" in self.parameters else made
            args, options = value(args), {key: value(option) for key, option in options.items()}
        if "name" in self.parameters:
            options = {**options, "name": self._own_name(context)}
        result = self.function(*args, **options)
        for name in context.declared.keys() - context.makers.keys():
            context.makers[name] = self
        return result

    def label(self, context: Context) -> None:
        """Name the Variable of an operator's result that a person asks for, as layers name theirs."""
        if "name" in self.parameters:
            return
        context.label(self._own_name(context), self.value())

    @cached_property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The parameters of the function; a layer has one called ``name``."""
        return inspect.signature(self.function).parameters

    def sized(self, context: Context, size: int) -> Any:
        """The value of a layer that was not told how many outputs it has, and is told now."""
        self.options["size"] = size
        return self.value()

    def _own_name(self, context: Context) -> str:
        """The name, given in the first trace; ``TraceError`` if another layer has the same in this one."""
        with NAMING:
            self.name = self.name or context.number(self.function.__name__)
        other = context.layers.get(self.name)
        if other is None:
            context.layers[self.name] = self
        elif not self.may_be(other):
            raise TraceError(
                f"Two layers are named {self.name!r}, because they were traced apart before: "
                f"{other if isinstance(other, str) else repr(other)} and {self!r}. They would share it. Give "
                "layers names of their own, layer.fc(..., name='first'), or trace these two together first."
            )
        return self.name

    def may_be(self, other: Any) -> bool:
        """Whether a layer of the same name may share its parameters: it is this one, or people named both."""
        return other is self or (self.is_named and getattr(other, "is_named", True))

    @property
    def lacks_size(self) -> bool:
        """Whether this is a layer whose number of outputs is left open."""
        if "size" not in self.parameters:
            return False
        bound = inspect.signature(self.function).bind(*self.args, **self.options).arguments
        return bound.get("size") is None and getattr(bound.get("w"), "shape", None) is None

    def reached(self) -> Iterator[Lazy]:
        """This value, and everything that its arguments are made of."""
        yield self
        for leaf in leaves((self.args, self.options)):
            if isinstance(leaf, Lazy):
                yield from leaf.reached()

    def __repr__(self) -> str:
        shown = [*map(repr, self.args), *(f"{k}={v!r}" for k, v in self.options.items())]
        return f"Lazy {self.function.__name__}({', '.join(shown)})"


def applied(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a function of arrays, some of them Lazy: computed in a trace, Lazy outside of one."""
    if current_context() is None:
        return LazyCall(function, args, {})
    return function(*made(args))


def resolved(values: Any) -> Any:
    """Containers with every Lazy replaced by its array; a ``var`` whose shape is unknown stays."""

    def array(leaf: Any) -> Any:
        if not isinstance(leaf, Lazy) or _is_open(leaf):
            return leaf
        return leaf.value()

    return jax.tree.map(array, values, is_leaf=_is_lazy)


def made(values: Any) -> Any:
    """Containers with every Lazy replaced by its array.

    Raises:
        TraceError: a ``var`` whose shape no layer has told.
    """
    known = resolved(values)
    return jax.tree.map(lambda leaf: leaf.value() if _is_lazy(leaf) else leaf, known, is_leaf=_is_lazy)


def has_lazy(*values: Any) -> bool:
    """Whether any Lazy is in these containers."""
    return any(map(_is_lazy, leaves(values)))


def lazies_in(values: Any) -> list[Lazy]:
    """Every Lazy in these containers, and everything these are made of."""
    return [v for leaf in leaves(values) if isinstance(leaf, Lazy) for v in leaf.reached()]


def data_in(values: Any) -> list[LazyData]:
    """The data that Lazy values are made of, in the order in which it was declared."""
    found = {v: None for v in lazies_in(values) if isinstance(v, LazyData)}
    return sorted(found, key=lambda v: v.order)


def _is_open(leaf: Lazy) -> bool:
    context = current_context()
    known = context.declared if context is not None else {}
    return isinstance(leaf, LazyVariable) and leaf.shape is None and leaf.name not in known


def _is_lazy(value: Any) -> bool:
    return isinstance(value, Lazy)


def leaves(values: Any) -> list[Any]:
    """List the leaves of these containers, with every Lazy as one leaf."""
    return jax.tree.leaves(values, is_leaf=_is_lazy)
