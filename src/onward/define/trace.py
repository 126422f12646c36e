"""A pure function becomes a forward Program.

    trace(loss, params, images, labels)  ->  Program

The first argument holds the parameters, the rest is data. Arguments are arrays,
``jax.ShapeDtypeStruct`` or containers of them: whatever ``jax.jit`` takes, and modules of equinox,
whose leaves that are not arrays stay as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from onward.core.around import Around, compute_the_same
from onward.core.check import check
from onward.core.errors import ArgumentError, OnwardError, TraceError
from onward.core.jaxprs.tracing import along, current_axis, traced
from onward.core.program import Program, Recipe, Replicas
from onward.core.source import line_of
from onward.core.structure import Static, describe
from onward.core.traces import Traces
from onward.core.walk import name_of
from onward.core.words import Kind
from onward.define.arguments import Leaf, Specification, Type, specify, taken_for, tracing_again, type_of
from onward.define.assembly import Traced, assemble
from onward.define.context import Context, current_context
from onward.define.lazy import NAMING, Lazy, LazyCall, data_in, has_lazy, lazies_in, leaves, made, resolved
from onward.define.purity import LeakWatch


def trace(
    function: Any,
    *args: Any,
    has_aux: bool = False,
    state: Any = None,
    name: str | None = None,
    batch_size: int | None = None,
    feed: Mapping[str, Any] | None = None,
    training: bool = True,
    axis_name: str | None = None,
) -> Program:
    """Trace a pure function of (parameters, *data) into a forward Program.

    Args:
        function: ``function(parameters, *data) -> loss``, or any arrays in any containers. With
            ``has_aux`` it returns ``(loss, aux)``, like for ``jax.grad``. With ``state`` it is
            ``function(parameters, state, *data) -> (loss, next_state)``, and with both
            ``(loss, (next_state, aux))``. A function without arguments declares what it needs
            (``onward.data``, ``onward.parameter``, ``onward.layer``). In place of a function, a Lazy value
            that layers returned outside of a trace.
        args: parameters first, then data: arrays, ``jax.ShapeDtypeStruct``, or containers of them.
            Only shapes and dtypes are read.
        has_aux: the function returns auxiliary outputs beside the loss.
        state: what the model itself carries from step to step (flax ``batch_stats``, haiku state,
            ``equinox.nn.State``); the function returns its next value.
        name: the name of the Program; the function's name unless given.
        batch_size: what None stands for in the shapes of declared data; 2 unless given or fed.
        feed: for declared data, by name, an array or ``jax.ShapeDtypeStruct`` that shows its shape.
        training: False traces the test Program: layers drop nothing, and use the statistics they have.
        axis_name: the axis that the function's own collectives run along, such as ``jax.lax.all_gather`` in
            a contrastive loss, or flax's ``BatchNorm(axis_name=...)``. It is one device long until
            ``replicate``.

    Raises:
        TraceError: the function branches on a traced value, has a side effect, or fails.
        ArgumentError: no arguments, or an argument without any array where parameters are expected.

    Example:
        >>> import jax.numpy as jnp
        >>> def loss(params, x, y):
        ...     return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)
        >>> params = {"w": jnp.zeros((3, 1)), "b": jnp.zeros(1)}
        >>> trace(loss, params, jnp.ones((8, 3)), jnp.ones((8, 1)))
        Program('loss', 7 ops)
    """
    lazies: list[Lazy] = []
    if has_lazy(function) and not callable(function):
        lazies = lazies_in(function)
        name = name or _kind(function)
        function = _making(function)
    if not callable(function):
        raise ArgumentError(
            f"trace was given {describe(function)} in place of a function. Write trace(loss, params, *data)."
        )
    count = len(args) + (state is not None)
    if not args and takes_arguments(function):
        raise ArgumentError(
            "trace(function) was given no arguments. Pass the parameters first and then the data, or "
            "their shapes: trace(loss, params, images, labels)."
        )
    if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
        raise ArgumentError(f"batch_size is {describe(batch_size)}; expected a whole number, at least 1.")
    if not isinstance(feed, Mapping | None):
        raise ArgumentError(f"The feed is {describe(feed)}; expected a dict, {{'images': array}}.")
    _check_call(function, count)
    names = argument_names(function, count)
    traced = _TracedFunction(
        function=function,
        parameters=specify(args[0], names[0]) if args else None,
        state=None if state is None else specify(state, names[1]),
        data=tuple(map(specify, args[1:], names[1 + (state is not None) :])),
        has_aux=has_aux,
        name=name or _function_name(function),
        training=training,
        batch_size=batch_size,
        feed={str(name_of(key)): _shown(key, value) for key, value in (feed or {}).items()},
        lazies=tuple(lazies),
        axis_name=axis_name,
        around=Around(function),
    )
    return traced.program()


def _kind(tree: Any) -> str:
    """The name for a Program of Lazy values: that of the layer whose result is asked for."""
    return getattr(getattr(tree, "function", None), "__name__", "network")


def _making(tree: Any) -> Callable[[], Any]:
    """The function that makes the Lazy values in these containers, data first, as it was declared."""

    def network() -> Any:
        context = current_context()
        assert context is not None
        resolved(data_in(tree))
        result = made(tree)
        for lazy in leaves(tree):
            if isinstance(lazy, LazyCall):
                lazy.label(context)
        return result

    return network


@dataclass(frozen=True, eq=False)
class _TracedFunction:
    """A function with the types of its arguments: the origin of a Recipe."""

    function: Callable[..., Any]
    parameters: Specification | None
    state: Specification | None
    data: tuple[Specification, ...]
    has_aux: bool
    name: str
    training: bool
    batch_size: int | None
    feed: Mapping[str, Type]
    lazies: tuple[Lazy, ...]
    assumes_batch: bool = False
    asks_training: bool = False
    fixed_data: frozenset[str] = frozenset()
    makers: Mapping[str, Any] = field(default_factory=dict)
    free_lengths: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)
    axis_name: str | None = None
    traces: Traces = field(default_factory=Traces)
    around: Around = field(default_factory=Around)

    def trace(self, data: tuple[Any, ...]) -> Program:
        """The forward Program for data of these types: the arguments first, then what is declared."""
        count = len(self.data)
        specified = tuple(s.retyped(specify(d, s.name)) for d, s in zip(data[:count], self.data, strict=True))
        feed = dict(zip(self.feed, data[count:], strict=True))
        again = replace(self, data=specified, feed=feed, batch_size=None)
        with tracing_again(self.data, specified, [] if self.state is None else [self.state]):
            return again.program()

    def for_test(self) -> Program:
        """The forward Program as it is when nothing is trained."""
        return replace(self, training=False).program()

    def program(self) -> Program:
        """The forward Program, as it was traced if it was traced for this already."""
        with NAMING if self.lazies else nullcontext():
            found: Program = self.traces.found((*self._lengths(), self.batch_size), self._program)
        return found

    def _lengths(self) -> tuple[Any, ...]:
        """All that the graph of the function depends on, except for what it reads from outside."""
        kinds = tuple((s.treedef, s.leaves, tuple(map(_kind_of, s.leaves))) for s in self.data)
        return self.training, kinds, tuple(self.feed.items()), current_axis()

    def _program(self) -> Program:
        self.around.warn(self.name, self._is_as_before)
        made, origin = self._traced_program()
        self.traces.keep((*origin._lengths(), None), made)
        return made

    def _is_as_before(self) -> bool:
        """Whether the function computes the same as before, of data that it was traced for."""
        axis = current_axis()
        before = self.traces.among(lambda key: key[3] == axis)
        return before is not None and compute_the_same(before, before.recipe.origin._traced_program()[0])

    def _traced_program(self) -> tuple[Program, _TracedFunction]:
        """The forward Program, and the function as its recipe has it."""
        arguments = [s for s in (self.parameters, self.state, *self.data) if s is not None]
        alone = None if self.axis_name is None or current_axis() else Replicas(1, self.axis_name)
        with nullcontext() if alone is None else along(alone):
            found = self.traced(arguments)
        feed = {n: d.type for n, d in found.context.declared.items() if d.kind is Kind.DATA}
        program = assemble(found, self.name, self.parameters, self.state, self.data, self.has_aux)
        context = found.context
        origin = replace(
            self,
            feed=feed,
            assumes_batch=context.assumes_batch,
            asks_training=context.asks_training,
            fixed_data=frozenset(context.fixed),
            makers=context.makers,
        )
        return check(replace(program, recipe=Recipe(origin, program.ops), replicas=alone)), origin

    def traced(self, arguments: Sequence[Specification]) -> Traced:
        """The traced jaxpr, and what the function returned and declared."""
        context = Context(self.training, self.batch_size, self.feed, [v.name for v in self.lazies if v.name])
        result: list[tuple[Any, list[Static | None]]] = []
        watch = LeakWatch()

        def flat(*leaves: Any) -> list[Any]:
            watch.begin(leaves)
            supply = iter(leaves)
            with context.open():
                returned = made(self.function(*(s.fill(supply) for s in arguments)))
            value, carried = self._split(returned)
            found, treedef = jax.tree.flatten(value)
            result.append((treedef, [None if _is_array(leaf) else Static(leaf) for leaf in found]))
            return [*filter(_is_array, found), *carried, *context.extras()]

        types = [leaf.type for s in arguments for leaf in s.arrays]
        closed = explaining(self.name, partial(traced, flat, of=self.name), *types)
        context.forget()
        watch.end(self.name, self.function, *arguments)
        self._check_feed(context)
        return Traced(closed, *result[-1], context)

    def _check_feed(self, context: Context) -> None:
        """Raise ``ArgumentError`` for a feed that nothing declares."""
        known = [n for n, d in context.declared.items() if d.kind is Kind.DATA]
        for name in self.feed:
            if name not in known:
                instead = taken_for(name, known, self.data)
                raise ArgumentError(f"{self.name} declares no data {name!r}. {instead}")

    def _split(self, returned: Any) -> tuple[Any, list[Any]]:
        """Split the function's result into the user's value and the leaves of the next model state."""
        if self.has_aux and not _is_pair(returned):
            raise TraceError(
                f"{self.name} returned {describe(returned)}. With has_aux=True it must return a pair: "
                "(loss, aux)."
            )
        if self.state is None:
            return self._checked(returned), []
        if not _is_pair(returned):
            raise TraceError(
                f"{self.name} returned {describe(returned)}. With state= it must return a pair: "
                "(loss, next_state)."
            )
        value, next_state = returned
        if self.has_aux:
            if not _is_pair(next_state):
                raise TraceError(
                    f"{self.name} returned (loss, {describe(next_state)}). With state= and has_aux=True "
                    "it must return (loss, (next_state, aux))."
                )
            next_state, aux = next_state
            value = (value, aux)
        return self._checked(value), self.state.leaves_of(next_state, self.name)

    def _checked(self, value: Any) -> Any:
        """With ``has_aux`` the loss must be one array."""
        if self.has_aux and not (jax.tree_util.all_leaves([value[0]]) and _is_array(value[0])):
            raise TraceError(
                f"{self.name} returned ({describe(value[0])}, aux). With has_aux=True the first must be the "
                "loss, one array; put the rest into aux."
            )
        return value


def _kind_of(leaf: Leaf | Static) -> type:
    return type(leaf.value) if isinstance(leaf, Static) else Leaf


def takes_arguments(function: Callable[..., Any]) -> bool:
    """Whether a function cannot be called without arguments."""
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:
        return False
    return False


def argument_names(function: Callable[..., Any], count: int) -> list[str]:
    """The names of the first ``count`` positional arguments of a function."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names: list[str] = []
    for p in parameters:
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD):
            names.append(p.name)
    return [*names[:count], *(f"argument_{i}" for i in range(len(names), count))]


def _check_call(function: Callable[..., Any], count: int) -> None:
    """Raise ``ArgumentError`` unless the function can be called with this many arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*range(count))
    except TypeError as error:
        raise ArgumentError(
            f"{_function_name(function)}{signature} cannot be called with {count} arguments: {error}. trace "
            "and minimize take the function and then every argument of it, parameters first."
        ) from None


def _function_name(function: Callable[..., Any]) -> str:
    """The name of a function, or of what a partial applies."""
    function = getattr(function, "func", function)
    return getattr(function, "__name__", type(function).__name__).strip("<>")


def _shown(name: str, value: Any) -> Type:
    """The type of an example that is fed."""
    try:
        found = type_of(np.asarray(value) if isinstance(value, list | tuple) else value)
    except (ValueError, ArgumentError) as error:
        raise ArgumentError(f"The feed {name!r} is {describe(value)}; expected numbers: {error}") from None
    if found is None:
        raise ArgumentError(f"The feed {name!r} is {describe(value)}; expected an array.")
    return Type(found.shape, found.dtype)


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | np.generic | bool | int | float | complex)


def explaining(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that runs the user's code under a trace; its failure becomes a TraceError."""
    try:
        return function(*args)
    except OnwardError:
        raise
    except Exception as error:
        raise _explained(error, name) from error


def _explained(error: Exception, name: str) -> TraceError:
    where = line_of(error)
    if isinstance(error, jax.errors.TracerBoolConversionError):
        advice = (
            "a Python condition (if, while, and, or, not) depends on the value of a traced array, which "
            "is not known while tracing. Use jnp.where, jax.lax.cond or jax.lax.while_loop."
        )
    elif isinstance(error, jax.errors.TracerArrayConversionError):
        advice = (
            "a traced array is given to NumPy, which needs its value. Use the function of the same name "
            "in jax.numpy."
        )
    elif isinstance(error, jax.errors.TracerIntegerConversionError | jax.errors.ConcretizationTypeError):
        advice = (
            "a Python number is needed and a traced array is given, whose value is not known while "
            "tracing. Keep sizes and counts static: capture them in a closure instead of passing them."
        )
    elif isinstance(error, jax.errors.UnexpectedTracerError):
        advice = (
            "a value of another trace is used: some function stored a traced array outside itself (a side "
            "effect). Return what you need instead of storing it."
        )
    elif isinstance(error, NameError) and "axis name" in str(error):
        advice = (
            f"{str(error).split('. ')[0]}. If the function exchanges numbers between devices itself, name "
            "the axis that it does so along: trace(..., axis_name='replicas'), or minimize(loss, ..., "
            "axis_name='replicas'). What merges gradients and results, replicate adds."
        )
    elif "__jax_array__" in str(error):
        advice = (
            "a declaration made outside of the function is given to JAX, which takes arrays. Make it one: "
            "jnp.asarray(x) or x.value()."
        )
    else:
        advice = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    return TraceError(f"{name} cannot be traced. At {where}: {advice}")
