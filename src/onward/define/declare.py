"""Declarations: what a network needs, said where it is needed.

Inside a traced function they return arrays, to be mixed with any JAX code. Outside they return Lazy
declarations, which a network may close over. The same name is the same Variable.

>>> import jax.numpy as jnp, onward as ow
>>> def network():
...     x = ow.data("x", (None, 4))
...     w = ow.parameter("w", (4, 2))
...     return jnp.mean((x @ w) ** 2)
>>> print(ow.trace(network, batch_size=8))
Program network: 1 feed, 1 parameter (8 numbers), 4 ops
<BLANKLINE>
feed      │ f32[8,4]        x
parameter │ f32[4,2]        w
──────────┼──────────────────────────────────────────────────────────────────────
forward   │ f32[8,2]        dot_general = dot_general(x, w)
          │ f32[8,2]        integer_pow = integer_pow(dot_general, y=2)
          │ f32[]           reduce_sum = reduce_sum(integer_pow, axes=(0, 1))
          │ f32[]           div = div(reduce_sum, 16.0)
──────────┼──────────────────────────────────────────────────────────────────────
return    │ f32[]           div  (the loss)
"""

from __future__ import annotations

import operator
from typing import Any

import jax
import jax.numpy as jnp

from onward.core.errors import ArgumentError
from onward.core.variable import holds_keys
from onward.core.words import Kind
from onward.define.arguments import Type
from onward.define.context import Initializer, Shape, current_context
from onward.define.initializer import constant, xavier_uniform
from onward.define.lazy import LazyData, LazyVariable


def data(name: str, shape: Shape | None = None, dtype: Any = None) -> jax.Array:
    """Declare data that is fed at every step.

    Args:
        name: what the feed calls it; scopes are not put before it.
        shape: None in the first place stands for the batch. Without a shape the first feed shows it.
        dtype: unless given, that of the first feed or of the example that the trace is shown; float32 where
            there is none.

    Raises:
        ArgumentError: a shape that what is fed contradicts, or that nothing shows.
        TraceError: declared inside the body of a scan or a nested jit, or twice with different types.

    Example:
        >>> import onward as ow
        >>> def network():
        ...     return ow.data("x", (None, 3)).sum()
        >>> ow.trace(network, batch_size=4).inputs
        (Variable('x', float32[4,3], data),)
    """
    context = current_context()
    whole = None if shape is None else _checked(name, shape, batch=True)
    held = None if dtype is None else _held(name, dtype)
    if context is None:
        return _array(LazyData(_named(name), whole, held))
    return context.data(_named(name), whole, held)


def parameter(
    name: str, shape: tuple[int, ...], dtype: Any = "float32", initializer: Initializer | None = None
) -> jax.Array:
    """Declare a parameter: a Variable that is trained, and initialized once.

    Args:
        name: open scopes (``jax.named_scope``) are put before it. The same name is the same parameter.
        shape: of ints.
        dtype: a floating point type.
        initializer: ``(key, shape, dtype) -> array``, as those of ``onward.initializer`` and
            ``jax.nn.initializers``; Xavier's uniform one unless given, zeros for vectors and scalars.

    Raises:
        TraceError: declared inside the body of a scan or a nested jit, or twice with different types.
        ArgumentError: None in the shape, or a dtype that cannot be trained.

    Example:
        >>> import onward as ow
        >>> def network():
        ...     a, b = ow.data("a", (None, 3)), ow.data("b", (None, 3))
        ...     return sum((x @ ow.parameter("w", (3, 2))).sum() for x in (a, b))
        >>> [v.name for v in ow.trace(network).parameters]
        ['w']
    """
    context = current_context()
    kind = Type(_checked(name, shape), _trained(name, dtype))
    initializer = initializer or _usual(kind.shape)
    if context is None:
        return _array(LazyVariable(name, Kind.PARAMETER, kind.shape, kind.dtype, initializer))
    return context.variable(context.scoped(name), Kind.PARAMETER, kind, initializer)


def var(name: str, shape: tuple[int, ...] | None = None, dtype: Any = "float32") -> jax.Array:
    """Declare a parameter whose shape the layer that takes it completes.

    Example:
        >>> import onward as ow
        >>> w1 = ow.var("w1")
        >>> hidden = ow.layer.fc(ow.data("images", (None, 784)), 128, w=w1)
        >>> [v for v in ow.trace(hidden).parameters if v.name == "w1"]
        [Variable('w1', float32[784,128], parameter)]
    """
    if shape is not None:
        return parameter(name, shape, dtype)
    context = current_context()
    name = _named(name) if context is None else context.scoped(_named(name))
    return _array(LazyVariable(name, Kind.PARAMETER, None, _trained(name, dtype), None))


def state(
    name: str, shape: tuple[int, ...] = (), dtype: Any = "float32", initializer: Initializer | None = None
) -> jax.Array:
    """Declare state that the network itself carries from step to step; ``assign`` gives the next value.

    Args:
        name: open scopes are put before it.
        shape: of ints; a single number unless given.
        dtype: any; of random keys too, ``jax.random.key(0).dtype``.
        initializer: ``(key, shape, dtype) -> array``; zeros unless given, and for a random key a fresh one.

    Returns:
        The value as it is now: after ``assign``, what was assigned.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> def network():
        ...     seen = ow.state("seen", (), "int32")
        ...     ow.assign(seen, seen + 1)
        ...     return jnp.sum(ow.data("x", (None, 2)))
        >>> step = ow.compile(ow.trace(network))
        >>> state, out = step(step.init(), jnp.ones((2, 2)))
        >>> int(state["seen"])
        1
    """
    context = current_context()
    kind = Type(_checked(name, shape), _held(name, dtype))
    if initializer is None and not holds_keys(kind.dtype):
        initializer = constant(0.0)
    if context is None:
        return _array(LazyVariable(name, Kind.STATE, kind.shape, kind.dtype, initializer))
    return context.variable(context.scoped(name), Kind.STATE, kind, initializer)


def assign(target: Any, value: Any) -> None:
    """Give a state Variable the value it has from here on, and in the next step.

    Args:
        target: what ``onward.state`` returned, or its name.
        value: an array of the same shape and dtype.

    Raises:
        TraceError: no such state, or another type.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> def network():
        ...     mean = ow.state("mean", (3,))
        ...     ow.assign(mean, 0.9 * mean + 0.1 * ow.data("x", (None, 3)).mean(0))
        ...     return jnp.sum(mean)
        >>> program = ow.trace(network)
        >>> [(old.name, new.name) for old, new in program.next_state.items()]
        [('mean', 'next(mean)')]
    """
    context = current_context()
    if context is None:
        raise ArgumentError("assign has no meaning outside of a traced function: nothing would run it.")
    context.assign(target, value)


def key() -> jax.Array:
    """A random key, another one at every call and at every step.

    It is drawn from the state Variable ``key``, which every step replaces.

    Example:
        >>> import jax, onward as ow
        >>> def network():
        ...     return jax.random.uniform(ow.key()) + 0 * ow.parameter("w", ())
        >>> step = ow.compile(ow.trace(network))
        >>> state, first = step(step.init())
        >>> state, second = step(state)
        >>> float(first.loss) != float(second.loss)
        True
    """
    context = current_context()
    if context is None:
        raise ArgumentError(
            "onward.key() belongs inside a traced function, where a state Variable holds the key. Outside, "
            "make one yourself: jax.random.key(0)."
        )
    return context.key()


def is_training() -> bool:
    """Whether the training Program is being traced rather than the test Program.

    A layer of another library is told so in that library's own way: ``train=onward.is_training()`` for flax
    linen, ``eqx.nn.inference_mode(model, not onward.is_training())`` for equinox; see the how-to "Bring your
    own model".

    Example:
        >>> import onward as ow
        >>> def network():
        ...     x = ow.data("x", (None, 2)).sum()
        ...     return 2.0 * x if ow.is_training() else x
        >>> len(ow.trace(network).ops), len(ow.trace(network, training=False).ops)
        (2, 1)
    """
    context = current_context()
    if context is None:
        return True
    context.asks_training = True
    return context.training


def _array(lazy: Any) -> Any:
    """A value that stands for an array until the network is traced: type checkers take it for one."""
    return lazy


def _named(name: Any) -> str:
    """The name, if it can be that of a Variable."""
    if not isinstance(name, str) or not name:
        raise ArgumentError(f"A declaration needs a name, a string, not {name!r}.")
    return name


def _checked(name: str, shape: Any, batch: bool = False) -> Any:
    """The shape as a tuple, if it can be that of a Variable."""
    _named(name)
    example = "(None, 784)" if batch else "(784, 128)"
    try:
        whole = tuple(n if n is None else operator.index(n) for n in shape)
    except TypeError:
        raise ArgumentError(
            f"{name!r}: the shape is {shape!r}; write a tuple of whole numbers, such as {example}."
        ) from None
    if any(n is not None and n < 0 for n in whole):
        raise ArgumentError(f"{name!r}: the shape {whole} has a negative size; None stands for the batch.")
    if None in whole and not batch:
        raise ArgumentError(
            f"{name!r}: the shape is {whole}; None stands for the batch, which only data has. Write the "
            f"numbers, such as {example}."
        )
    return whole


def _held(name: str, dtype: Any) -> Any:
    """The dtype as JAX holds it; Python's own ``float`` and ``int`` mean what they mean to ``jnp.zeros``.

    Raises:
        ArgumentError: no dtype, or one of 64 bits that JAX would make one of 32.
    """
    try:
        if holds_keys(dtype):
            return dtype
        found = jnp.dtype(dtype)
        held = jax.dtypes.canonicalize_dtype(found)
    except TypeError:
        found = held = jnp.dtype(object)
    if found.kind in "OUSMm":
        raise ArgumentError(f"{name!r}: the dtype is {dtype!r}; write one such as 'float32' or 'int32'.")
    if held != found and not any(dtype is kind for kind in (float, int, complex)):
        raise ArgumentError(
            f"{name!r} is declared as {found}, and JAX holds {held}. Write {str(held)!r}; or, for wider "
            "numbers, jax.config.update('jax_enable_x64', True)."
        )
    return held


def _trained(name: str, dtype: Any) -> Any:
    """The dtype of a parameter."""
    held = _held(name, dtype)
    if not jnp.issubdtype(held, jnp.inexact):
        raise ArgumentError(
            f"The parameter {name!r} is declared as {held}, and parameters are trained: write a floating "
            f"point type. What is not trained is state: onward.state({name!r}, shape, {str(held)!r})."
        )
    return held


def _usual(shape: tuple[int, ...]) -> Initializer:
    """The initializer of a parameter of this shape where none is given."""
    return xavier_uniform() if len(shape) > 1 else constant(0.0)
