"""The features that make a function a layer: a scope of its own, a name for what it returns, Lazy arguments.

A layer is an ordinary function. Given arrays it computes; in a traced network it declares what it was not
given; with Lazy arguments, outside of a trace, it returns a Lazy value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from onward.core.errors import ArgumentError, known_as
from onward.core.source import user_line
from onward.core.words import Kind
from onward.define.arguments import Type
from onward.define.context import Context, Initializer, current_context
from onward.define.initializer import constant
from onward.define.lazy import LazyCall, LazyVariable, has_lazy, resolved

F = TypeVar("F", bound=Callable[..., Any])


def layer(function: F) -> F:
    """Make a layer of a function that has a keyword argument ``name``.

    Its ops stand in the scope ``fc_0`` (the function's name, numbered within the scope around it) or in
    the one that ``name=`` says; what it returns is the Variable of that name. Two layers of one name share
    their parameters.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> @ow.layer.layer
        ... def scale(x, *, name=None):
        ...     return x * ow.parameter("factor", x.shape[-1:], initializer=ow.initializer.constant(1.0))
        >>> program = ow.trace(lambda: scale(ow.data("x", (None, 3))))
        >>> [v.name for v in program.parameters], program.outputs[0].name
        (['scale_0/factor'], 'scale_0')
    """
    signature = inspect.signature(function)

    @wraps(function)
    def called(*args: Any, name: str | None = None, **options: Any) -> Any:
        _expect_arguments(function.__name__, signature, args, options)
        context = current_context()
        if context is None:
            if has_lazy(args, options):
                return LazyCall(called, args, options if name is None else {**options, "name": name})
            return function(*args, **options)
        args, options = resolved(args), {key: resolved(option) for key, option in options.items()}
        label = context.scoped(name or context.number(function.__name__))
        context.layers.setdefault(label, f"the {function.__name__} at {user_line()}")
        with jax.named_scope(label.rpartition("/")[2]):
            result = function(*args, **options)
        _label(context, label, result)
        return result

    return called  # type: ignore[return-value]


def cost(function: F) -> F:
    """A layer of (prediction, target) whose target tells an ``fc`` without a size how wide to be."""
    inner = layer(function)
    signature = inspect.signature(function)

    @wraps(function)
    def called(*args: Any, **options: Any) -> Any:
        bound = _expect_arguments(function.__name__, signature, args, options)
        (prediction, target, *rest), options = bound.args, bound.kwargs
        context = current_context()
        if context is None and has_lazy(prediction, target):
            return LazyCall(called, (prediction, target, *rest), options)
        if context is not None and isinstance(prediction, LazyCall) and prediction.lacks_size:
            target = resolved(target)
            prediction = prediction.sized(context, _width(target))
        return inner(prediction, target, *rest, **options)

    called.takes_lazy = True  # type: ignore[attr-defined]
    return called  # type: ignore[return-value]


def weight(
    given: Any,
    name: str,
    shape: tuple[int, ...],
    dtype: Any = "float32",
    initializer: Initializer | None = None,
    kind: Kind = Kind.PARAMETER,
) -> Any:
    """The array that a layer was given, or the parameter or state that it declares in its scope.

    Raises:
        ArgumentError: an array of another shape; or nothing is given, and nothing is traced.
    """
    context = current_context()
    if isinstance(given, LazyVariable) and context is not None:
        return given.completed(context, shape, initializer or constant(0.0))
    if given is None and context is not None:
        return context.variable(context.scoped(name), kind, Type(shape, jnp.dtype(dtype)), initializer)
    if given is None:
        raise ArgumentError(
            f"A layer at {user_line()} needs {name!r}, {dtype}{list(shape)}: outside of a traced network "
            f"nothing declares it. Pass it, {name}=array, or put the layer in a function and trace that."
        )
    if tuple(jnp.shape(given)) != tuple(shape):
        raise ArgumentError(
            f"A layer at {user_line()} was given {name} of shape {list(jnp.shape(given))}; what goes into it "
            f"asks for {list(shape)}."
        )
    return given


def _expect_arguments(
    name: str, signature: inspect.Signature, args: tuple[Any, ...], options: dict[str, Any]
) -> inspect.BoundArguments:
    """The arguments by name; ``ArgumentError`` for those that the layer does not take, or lacks."""
    takes = signature.parameters
    others = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    if unknown := [option for option in options if option not in takes and not others]:
        raise ArgumentError(
            f"{name} at {user_line()} has no argument {unknown[0]!r}. {known_as(unknown[0], takes)}"
        )
    try:
        return signature.bind(*args, **options)
    except TypeError as error:
        shown = ", ".join(p.name for p in takes.values() if p.kind is p.POSITIONAL_OR_KEYWORD)
        raise ArgumentError(
            f"{name} at {user_line()}: {error}. Write {name}({shown}), and what follows by name."
        ) from None


def _label(context: Context, label: str, result: Any) -> None:
    """Name what a layer returned; of several arrays the first."""
    arrays = jax.tree.leaves(result)
    if arrays:
        context.label(label, arrays[0])


def _width(target: Any) -> int:
    shape = jnp.shape(target)
    return int(shape[-1]) if len(shape) > 1 else 1
