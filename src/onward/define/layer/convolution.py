"""Layers that slide a window: convolution and pooling, over one, two or three axes.

Images are NHWC and kernels HWIO, as in jax, Keras and flax (torch: NCHW and OIHW). Series are [n, width,
channels], volumes [n, depth, height, width, channels].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from onward.core.errors import ArgumentError
from onward.core.source import user_line
from onward.core.structure import is_count
from onward.define.context import Initializer
from onward.define.initializer import constant, he_normal
from onward.define.layer.activation import activated
from onward.define.layer.base import layer, weight
from onward.define.layer.expect import count, expect_axes, floating, precise

Window = int | Sequence[int]
Padding = str | int | Sequence[tuple[int, int]]

_NUMBERS = {
    3: ("NWC", "WIO", "NWC"),
    4: ("NHWC", "HWIO", "NHWC"),
    5: ("NDHWC", "DHWIO", "NDHWC"),
}
_MEANING = "[n, height, width, channels], or one spatial axis less or more"


@layer
def conv(
    x: Any,
    filters: int,
    size: Window,
    *,
    stride: Window = 1,
    padding: Padding = "SAME",
    dilation: Window = 1,
    groups: int = 1,
    w: Any = None,
    b: Any = None,
    act: str | Callable[..., Any] | None = None,
    initializer: Initializer | None = None,
    name: str | None = None,
) -> jax.Array:
    """A convolution (without flipping the kernel), plus b, activated.

    Args:
        x: [n, height, width, channels]; [n, width, channels] and [n, depth, height, width, channels] too.
        filters: how many channels the result has.
        size: of the window; a number stands for all of its axes, here and below.
        stride: how far the window moves.
        padding: "SAME" (the result has the size of x over the stride), "VALID" (none), zeros on every side,
            or (before, after) for each axis.
        dilation: how far apart the window's rows are.
        groups: into how many parts the channels are divided, each convolved by itself; as many as there are
            channels for a depthwise convolution.
        w: [height, width, channels / groups, filters].
        b: [filters]; False for none.
        act: an activation by its name ("relu") or as a function.
        initializer: of w; He's normal one unless given. b begins at 0.
        name: as for every layer.

    Returns:
        [n, new height, new width, filters].

    Raises:
        ArgumentError: another number of axes, channels that groups do not divide, or w of another shape.

    Source: LeCun et al., Gradient-Based Learning Applied to Document Recognition, 1998, section II.A.

    Example:
        >>> import onward as ow
        >>> def network():
        ...     return ow.layer.conv(ow.data("x", (None, 28, 28, 1)), 16, 3, stride=2)
        >>> program = ow.trace(network, batch_size=8)
        >>> program.outputs[0].shape, program.parameters[0].shape
        ((8, 14, 14, 16), (3, 3, 1, 16))
    """
    x = jnp.asarray(x)
    expect_axes("conv", x, (3, 4, 5), _MEANING)
    dtype, axes = floating(x), x.ndim - 2
    filters, groups = count("conv", "filters", filters), count("conv", "groups", groups)
    shape = (*_each("size", size, axes), _channels(x, filters, groups), filters)
    w = jnp.asarray(weight(w, "w", shape, dtype, initializer or he_normal()))
    y = lax.conv_general_dilated(
        *_same_dtype(x, w),
        window_strides=_each("stride", stride, axes),
        padding=_padding(padding, axes),
        rhs_dilation=_each("dilation", dilation, axes),
        dimension_numbers=_NUMBERS[x.ndim],
        feature_group_count=groups,
    )
    return activated(y if b is False else y + weight(b, "b", (filters,), dtype, constant(0.0)), act)


@layer
def pool(
    x: Any,
    size: Window | Literal["global"],
    *,
    stride: Window | None = None,
    kind: Literal["max", "average"] = "max",
    padding: Padding = "VALID",
    name: str | None = None,
) -> jax.Array:
    """The largest number or the average in each window.

    Args:
        x: [n, height, width, channels]; [n, width, channels] and [n, depth, height, width, channels] too.
        size: of the window; "global" for one window over everything.
        stride: how far the window moves; its size unless given.
        kind: "max" or "average". What is padded does not count (flax: it counts as 0).
        padding: as for ``conv``.
        name: as for every layer.

    Returns:
        [n, new height, new width, channels]; [n, channels] for a global window.

    Raises:
        ArgumentError: another number of axes, or another kind.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> image = jnp.arange(16.0).reshape(1, 4, 4, 1)
        >>> ow.layer.pool(image, 2)[0, :, :, 0].tolist()
        [[5.0, 7.0], [13.0, 15.0]]
        >>> ow.layer.pool(image, "global", kind="average").tolist()
        [[7.5]]
    """
    x = jnp.asarray(x)
    expect_axes("pool", x, (3, 4, 5), _MEANING)
    if kind not in ("max", "average"):
        raise ArgumentError(f'pool at {user_line()} was given kind={kind!r}; expected "max" or "average".')
    if size == "global":
        axes = tuple(range(1, x.ndim - 1))
        return jnp.max(x, axes) if kind == "max" else jnp.mean(precise(x), axes).astype(floating(x))
    count = x.ndim - 2
    window = (1, *_each("size", size, count), 1)
    strides = window if stride is None else (1, *_each("stride", stride, count), 1)
    sides = _padding(padding, count)
    pads = sides if isinstance(sides, str) else [(0, 0), *sides, (0, 0)]
    return _largest(x, window, strides, pads) if kind == "max" else _average(x, window, strides, pads)


def _largest(x: Any, window: Any, strides: Any, padding: Any) -> Any:
    if window == strides and padding == "VALID":
        return _largest_of_touching(x, window)
    if jnp.issubdtype(x.dtype, jnp.inexact):
        least: Any = -np.inf
    else:
        least = np.iinfo(x.dtype).min
    return lax.reduce_window(x, np.asarray(least, x.dtype), lax.max, window, strides, padding)


def _largest_of_touching(x: Any, window: Sequence[int]) -> Any:
    """The same where windows touch: no ``reduce_window``, whose gradient is slow on CPU."""
    counts = [n // size for n, size in zip(x.shape, window, strict=True)]
    covered = x[tuple(slice(n * size) for n, size in zip(counts, window, strict=True))]
    cut = covered.reshape([n for pair in zip(counts, window, strict=True) for n in pair])
    return cut.max(tuple(range(1, cut.ndim, 2)))


def _average(x: Any, window: Any, strides: Any, padding: Any) -> Any:
    """Sums over windows, divided by how many numbers of x each window holds."""

    def sums(values: Any) -> Any:
        return lax.reduce_window(values, np.zeros((), values.dtype), lax.add, window, strides, padding)

    values = precise(x)
    if padding == "VALID":
        return (sums(values) / math.prod(window)).astype(floating(x))
    ones = jnp.ones((1, *x.shape[1:-1], 1), values.dtype)
    return (sums(values) / sums(ones)).astype(floating(x))


def _each(what: str, value: Window, axes: int) -> tuple[int, ...]:
    """A number for each spatial axis."""
    sizes: tuple[Any, ...] = tuple(value) if isinstance(value, tuple | list) else (value,) * axes
    if len(sizes) != axes or not all(map(is_count, sizes)):
        raise ArgumentError(
            f"The {what} of a window at {user_line()} is {value!r}; expected a positive number, or a tuple "
            f"of {axes}, one for each spatial axis."
        )
    return tuple(int(n) for n in sizes)


def _padding(padding: Padding, count: int) -> Any:
    """The padding as ``jax.lax`` takes it: a word, or (before, after) for each spatial axis."""
    if is_count(padding, 0):
        return [(padding, padding)] * count
    if isinstance(padding, str) and padding.upper() in ("SAME", "VALID"):
        return padding.upper()
    if isinstance(padding, tuple | list) and len(padding) == count and all(map(_is_pair, padding)):
        return [(int(before), int(after)) for before, after in padding]
    raise ArgumentError(
        f'The padding of a window at {user_line()} is {padding!r}; expected "SAME", "VALID", a number, or '
        f"(before, after) for each of {count} spatial axes."
    )


def _is_pair(value: Any) -> bool:
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(_is_whole, value))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _channels(x: Any, filters: int, groups: int) -> int:
    """How many channels of x each filter sees."""
    channels = int(x.shape[-1])
    if channels % groups or filters % groups:
        raise ArgumentError(
            f"conv at {user_line()} has {channels} channels and {filters} filters in {groups} groups; groups "
            "must divide both."
        )
    return channels // groups


def _same_dtype(x: Any, w: Any) -> tuple[Any, Any]:
    dtype = jnp.promote_types(x.dtype, w.dtype)
    return x.astype(dtype), w.astype(dtype)
