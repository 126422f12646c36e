"""Layers that multiply with a matrix, or look up its rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from onward.core.errors import ArgumentError
from onward.core.source import user_line
from onward.define.context import Initializer, current_context
from onward.define.initializer import constant, normal, xavier_uniform
from onward.define.layer.activation import activated
from onward.define.layer.base import layer, weight
from onward.define.layer.expect import count, expect_features, floating, is_integer, words


@layer
def fc(
    x: Any,
    size: int | None = None,
    *,
    w: Any = None,
    b: Any = None,
    act: str | Callable[..., Any] | None = None,
    initializer: Initializer | None = None,
    name: str | None = None,
) -> jax.Array:
    """A fully connected layer, ``act(x w + b)``.

    Args:
        x: [..., n]; of more than 2 axes the last is multiplied.
        size: how many outputs; w's or b's unless given. Under a cost, outside of a trace, the target's.
        w: [n, size].
        b: [size]; False for none.
        act: an activation by its name ("relu") or as a function.
        initializer: of w; Xavier's uniform one unless given. b begins at 0.
        name: as for every layer.

    Returns:
        [..., size], of the dtype of x (float32 for integers).

    Raises:
        ArgumentError: nothing tells the size, it is not a whole number of at least 1, or w or b has another
            shape.

    Example:
        >>> import onward as ow
        >>> program = ow.trace(lambda: ow.layer.fc(ow.data("x", (None, 4)), 3, act="relu"), batch_size=8)
        >>> program.outputs[0].shape, [v.name for v in program.parameters]
        ((8, 3), ['fc_0/w', 'fc_0/b'])
    """
    x = jnp.asarray(x)
    expect_features("fc", x)
    width = _size(size, w, b)
    return activated(affine(x, width, w, b, initializer), act)


@layer
def embedding(
    ids: Any,
    vocabulary: int,
    size: int,
    *,
    w: Any = None,
    dtype: Any = "float32",
    initializer: Initializer | None = None,
    name: str | None = None,
) -> jax.Array:
    """A row of a table for every integer.

    Ids that are fed from the host are checked to lie in ``range(vocabulary)``; the row of another one is NaN,
    and so it is for ids on an accelerator, which are not looked at.

    Args:
        ids: integers, [...].
        vocabulary: how many rows the table has.
        size: how long a row is.
        w: the table, [vocabulary, size].
        dtype: of the table that is made where none is given.
        initializer: of w; normal with standard deviation 0.02 unless given.
        name: as for every layer.

    Returns:
        [..., size].

    Raises:
        ArgumentError: ids that are not integers, sizes that are not counts, or w has another shape.

    Source: Bengio et al., A Neural Probabilistic Language Model, 2003, section 2.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> ow.layer.embedding(jnp.array([2, 0]), 3, 2, w=jnp.array([[0, 1], [2, 3], [4, 5]])).tolist()
        [[4, 5], [0, 1]]
    """
    ids = jnp.asarray(ids)
    vocabulary, size = count("embedding", "vocabulary", vocabulary), count("embedding", "size", size)
    if not is_integer(ids):
        raise ArgumentError(
            f"embedding at {user_line()} was given {words(ids)}; expected integers, which say the row: "
            'declare data("ids", (None,), "int32"), or write ids.astype(int).'
        )
    if (context := current_context()) is not None:
        context.bound(ids, vocabulary, "embedding ids")
    table = weight(w, "w", (vocabulary, size), dtype, initializer or normal())
    return jnp.asarray(table).at[ids].get(mode="fill", fill_value=None, wrap_negative_indices=False)


def affine(x: Any, size: int, w: Any, b: Any, initializer: Initializer | None = None) -> Any:
    """``x w + b`` with parameters ``w`` and ``b``; False for b means none."""
    dtype = floating(x)
    w = weight(w, "w", (x.shape[-1], size), dtype, initializer or xavier_uniform())
    if b is False:
        return x @ w
    return x @ w + weight(b, "b", (size,), dtype, constant(0.0))


def _size(size: int | None, w: Any, b: Any) -> int:
    """How many outputs: as said, or as the weights that were given have."""
    if size is not None:
        return count("fc", "size", size)
    for given in (w, b):
        if size is None and getattr(given, "shape", None):
            size = given.shape[-1]
    if size is None:
        raise ArgumentError(
            f"fc at {user_line()} does not know how many outputs to have: write fc(x, 10), or pass w=. Only "
            "directly under a cost, outside of a traced function, does the target tell."
        )
    return int(size)
