"""Attention: every place looks at all places, and takes a mean of what it finds there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.errors import ArgumentError
from onward.core.source import user_line
from onward.define import declare
from onward.define.context import Initializer
from onward.define.layer.base import layer
from onward.define.layer.dense import affine
from onward.define.layer.expect import count, expect_axes, expect_fraction, words
from onward.define.layer.normalization import dropped


@layer
def attention(
    query: Any,
    key: Any = None,
    value: Any = None,
    *,
    heads: int,
    size: int | None = None,
    causal: bool = False,
    mask: Any = None,
    dropout: float = 0.0,
    w: Mapping[str, Any] | None = None,
    b: Mapping[str, Any] | Literal[False] | None = None,
    training: bool | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    initializer: Initializer | None = None,
    name: str | None = None,
) -> jax.Array:
    """Attention with several heads, between a projection of each argument and one of the result.

    ``softmax(q k^T / sqrt(size / heads)) v`` in every head. With query alone this is self-attention.

    Args:
        query: [batch, time, features].
        key: [batch, source, features of its own]; query unless given.
        value: [batch, source, features of its own]; key unless given.
        heads: how many; they divide size.
        size: features of the result, and of all heads together; those of query unless given.
        causal: whether a place looks only at itself and what is before it.
        mask: booleans, True where a place may look: [time, source], [batch, time, source] or
            [batch, heads, time, source], the last with ones where all are alike. A mask of sources is
            ``mask[:, None, None, :]``.
        dropout: the rate at which, in training, weights of the mean are dropped.
        w: matrices by "query", "key", "value" [features, size] and "out" [size, size].
        b: vectors [size] by the same names; False for none.
        training: whether to drop; unless given, as ``onward.is_training()`` says.
        implementation: ``"cudnn"`` for the kernels of cuDNN, which never hold all weights at once, for
            bfloat16 or float16 on an NVIDIA GPU; ``"xla"``, and unless given, what XLA makes of it.
        initializer: of all w; Xavier's uniform one unless given. b begins at 0.
        name: as for every layer.

    Returns:
        [batch, time, size].

    Raises:
        ArgumentError: another number of axes, heads that do not divide the size, a mask that does not fit, or
            cuDNN where it cannot be taken: another dtype, another device, weights that are dropped.

    Source: Vaswani et al., Attention Is All You Need, 2017, sections 3.2.1 and 3.2.2.

    Example:
        >>> import onward as ow
        >>> def network():
        ...     return ow.layer.attention(ow.data("x", (None, 5, 8)), heads=2, causal=True)
        >>> program = ow.trace(network)
        >>> [v.name for v in program.parameters][:3]
        ['attention_0/query/w', 'attention_0/query/b', 'attention_0/key/w']
    """
    expect_fraction("attention", "dropout", dropout)
    key = query if key is None else key
    inputs = {"query": query, "key": key, "value": key if value is None else value}
    arrays = {part: jnp.asarray(x) for part, x in inputs.items()}
    heads = count("attention", "heads", heads)
    width = _width(arrays, heads, size)

    active = declare.is_training() if training is None else training
    _expect_available(implementation, arrays["query"], dropout if active else 0.0)

    def project(x: Any, part: str) -> Any:
        with jax.named_scope(part):
            bias = False if b is False else (b or {}).get(part)
            return affine(x, width, (w or {}).get(part), bias, initializer)

    q, k, v = (_split(project(x, part), heads) for part, x in arrays.items())
    seen = _attend(q, k, v, causal, _mask(mask, q, k), dropout if active else 0.0, implementation)
    return project(seen.reshape(*seen.shape[:2], width), "out")


_NO_CUDNN = "attention at {at} was given implementation='cudnn', {why}."


def _expect_available(implementation: Any, query: Any, rate: float) -> None:
    """Raise ``ArgumentError`` for another implementation than JAX has, or than can run here."""
    if implementation not in (None, "xla", "cudnn"):
        raise ArgumentError(
            f"attention at {user_line()} was given implementation={implementation!r}; expected 'xla', "
            "'cudnn' or None."
        )
    if implementation != "cudnn":
        return
    why = ""
    if rate:
        why = (
            "and drops weights, which cuDNN would draw by itself. Write dropout=0.0, or implementation='xla'"
        )
    elif (platform := jax.default_backend()) != "gpu":
        why = f"and runs on {platform}; expected an NVIDIA GPU. Leave implementation away here"
    elif query.dtype not in ("bfloat16", "float16"):
        why = (
            f"and computes in {query.dtype}; expected bfloat16 or float16: cast query, key and value before. "
            "mixed_precision acts on the traced function, which is too late for that"
        )
    if why:
        raise ArgumentError(_NO_CUDNN.format(at=user_line(), why=why))


def _attend(
    q: Any,
    k: Any,
    v: Any,
    causal: bool,
    mask: Any,
    rate: float,
    implementation: Literal["xla", "cudnn"] | None,
) -> Any:
    """The output of attention: for each place, the mean of the values weighted by softmax scores.

    Written out where weights are dropped, and in float64, whose softmax JAX would take in float32.
    """
    wide = jnp.promote_types(q.dtype, "float32")
    if wide == "float32" and not rate:
        return jax.nn.dot_product_attention(
            q, k, v, mask=mask, is_causal=causal, implementation=implementation
        )
    scores = jnp.einsum("bthd,bshd->bhts", q, k, preferred_element_type=wide) / q.shape[-1] ** 0.5
    allowed = jnp.ones((1, 1, 1, 1), bool) if mask is None else mask
    if causal:
        allowed = allowed & jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jnp.where(allowed, scores, float(np.finfo(scores.dtype).min))
    weights = jax.nn.softmax(scores)
    if rate:
        weights = dropped(weights, rate)
    return jnp.einsum("bhts,bshd->bthd", weights.astype(v.dtype), v)


def _split(x: Any, heads: int) -> Any:
    """The heads side by side: [batch, time, heads, size / heads]."""
    return x.reshape(*x.shape[:2], heads, -1)


def _width(arrays: Mapping[str, Any], heads: int, size: int | None) -> int:
    """The features of all heads together."""
    for part, x in arrays.items():
        expect_axes(f"attention ({part})", x, (3,), "[batch, time, features]")
    shapes = [x.shape[:2] for x in arrays.values()]
    if shapes[1] != shapes[2] or shapes[0][0] != shapes[1][0]:
        found = ", ".join(f"{part} {words(x)}" for part, x in arrays.items())
        raise ArgumentError(
            f"attention at {user_line()} was given {found}; expected the same batch in all, "
            "and a value for every key."
        )
    width = arrays["query"].shape[-1] if size is None else count("attention", "size", size)
    if width % heads:
        raise ArgumentError(
            f"attention at {user_line()} has {heads} heads for {width} features; heads must divide them. "
            "Write size=, a multiple of heads."
        )
    return int(width)


def _mask(mask: Any, q: Any, k: Any) -> Any:
    """The mask with all of its four axes."""
    if mask is None:
        return None
    found = jnp.asarray(mask)
    full = (q.shape[0], q.shape[2], q.shape[1], k.shape[1])
    axes = {2: found[None, None], 3: found[:, None]}.get(found.ndim, found)
    fits = axes.ndim == 4 and all(n in (1, m) for n, m in zip(axes.shape, full, strict=True))
    if not fits or found.dtype != bool:
        raise ArgumentError(
            f"attention at {user_line()} was given a mask {words(found)}; expected booleans that broadcast "
            f"to [batch, heads, time, source] = {list(full)}, True where a place may look. For a mask of "
            "sources write mask[:, None, None, :]; for numbers, mask > 0."
        )
    return axes
