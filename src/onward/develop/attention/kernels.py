"""Attention computed by kernels: in blocks that leave out what a mask rules out, or by cuDNN."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.program import Op, Variable
from onward.develop.attention.layout import MASKS, Laid, Ruled, never
from onward.develop.attention.operands import Operand
from onward.develop.attention.parts import Attention, ScoreChange, ScoreStep


def in_blocks(laid: Laid, count: int, env: Mapping[Variable, Any]) -> Any:
    """The mean of the values, for as many blocks of places, each over the keys that some of them look at.

    All keys that a block leaves out have one score, that of what the mask rules out. They count as one key
    that weighs as much as all of them: nothing beside a key that is looked at, and all where there is none.
    """
    found, ruled = laid.attention, laid.ruled
    steps = found.steps if ruled is None else ruled.steps
    q, k, v = laid.query(env[found.query]), laid.key(env[found.key]), laid.value(env[found.value])
    operands = [[_operand(laid, x, env) for x in step.told] for step in steps]
    fills = [None if step.fill is None else laid.beside(step.fill, env) for step in steps]
    whole = slice(0, laid.length(laid.time)), slice(0, laid.source)
    masks = () if ruled is None or ruled.added else ruled.masks
    mask = laid.seen(masks, env) if masks and ruled is not laid.causal else None
    weighed = _weighing(laid, env)

    def part(rows: slice, keys: slice) -> Any:
        scores = _product("btkgh,bskh->bkgts", q[:, rows], k[:, keys], found.scores)
        for step, by, fill in zip(steps, operands, fills, strict=True):
            cut = [_cut(x, rows, keys) for x in by]
            scores = changed(scores, step, cut, None if fill is None else _cut(fill, rows, keys))
        if ruled is not None and masks:
            seen = _causal(rows, keys) if mask is None else mask[rows, keys]
            scores = jnp.where(seen, scores, jnp.asarray(ruled.fill, scores.dtype))
        return _mean(scores, v, keys, partial(weighed, rows), ruled, found)

    added = [
        by for step, by in zip(steps, operands, strict=True) if ruled is not None and step in ruled.added
    ]
    parts = []
    for rows, keys in [whole] if ruled is None else ruled.blocks(count):
        if added and keys != whole[1]:
            sees = _sees([x for (x,) in added if x.ndim], rows, keys, never(laid.dtype) / 2)
            # What is computed of all keys is not kept, so that it takes no memory where it is not computed.
            every = jax.checkpoint(partial(part, rows, whole[1]))
            parts.append(jax.lax.cond(sees, partial(part, rows, keys), every))
        else:
            parts.append(part(rows, keys))
    return laid.result(jnp.concatenate(parts, axis=1)).astype(found.result.dtype)


def _sees(added: Sequence[Any], rows: slice, keys: slice, far: float) -> Any:
    """Whether each of some places has a key among these to which far more is added than to all others."""
    total = sum(x if x.shape[-2] == 1 else x[..., rows, :] for x in map(jax.lax.stop_gradient, added))
    length = total.shape[-1]
    others = [total[..., s] for s in (slice(0, keys.start), slice(keys.stop, length)) if s.start < s.stop]
    least = jnp.concatenate(others, axis=-1).max(axis=-1) - far
    return (total[..., keys].max(axis=-1) > least).all()


def by_cudnn(laid: Laid, env: Mapping[Variable, Any]) -> Any:
    """The same by the kernels of cuDNN, which never hold all scores."""
    found = laid.attention
    steps = found.steps if laid.causal is None else laid.causal.steps
    scale: Any = 1.0
    bias, dtype = jnp.zeros((1,) * 5, np.float32), found.query.dtype
    q, k, v = laid.query(env[found.query]), laid.key(env[found.key]), laid.value(env[found.value])
    for step in steps:
        if step.change is ScoreChange.ROUND:
            continue
        by = [laid.beside(x, env) for x in step.told]
        bias = changed(bias, step, by, None if step.fill is None else laid.beside(step.fill, env))
        if step.change in (ScoreChange.MULTIPLY, ScoreChange.DIVIDE):
            number = step.by[0].number
            factor = by[0].reshape(()) if number is None else number
            factor = factor if step.change is ScoreChange.MULTIPLY else 1 / factor
            scale = scale * factor
    if not isinstance(scale, float):
        q, scale = (q * scale).astype(dtype), 1.0
    heads = q.shape[2] * q.shape[3]
    has_bias = any(step.change in MASKS for step in steps)
    mean = jax.nn.dot_product_attention(
        q.reshape(*q.shape[:2], heads, q.shape[-1]),
        k,
        v,
        _whole(bias, q.shape, k.shape[1]).astype(dtype) if has_bias else None,
        scale=scale,
        is_causal=laid.causal is not None,
        implementation="cudnn",
    )
    return laid.result(mean.reshape(*q.shape[:4], v.shape[-1])).astype(found.result.dtype)


def _whole(bias: Any, query: Sequence[int], source: int) -> Any:
    """A bias [batch, heads, groups, time, source] as [batch, heads, time, source], as few as may be."""
    batch, heads, groups = bias.shape[:3]
    if max(heads, groups) > 1:
        heads, groups = query[2:4]
    return jnp.broadcast_to(bias, (batch, heads, groups, query[1], source)).reshape(
        batch, heads * groups, query[1], source
    )


def _operand(laid: Laid, operand: Operand, env: Mapping[Variable, Any]) -> Any:
    """An operand beside the scores; a number as such, which the backward pass need not keep."""
    is_number = operand.op is None and operand.variable is None and np.ndim(operand.known) == 0
    return np.asarray(operand.known) if is_number else laid.beside(operand, env)


def _causal(rows: slice, keys: slice) -> Any:
    """Where places look at themselves and at what is before them."""
    places = jnp.arange(rows.start, rows.stop, dtype=np.int32)
    return jnp.arange(keys.start, keys.stop, dtype=np.int32) <= places[:, None]


def _weighing(laid: Laid, env: Mapping[Variable, Any]) -> Callable[[slice, slice, Any], Any]:
    """The change of weights behind softmax, for some places and keys."""
    steps = laid.attention.weighings
    operands = [[_operand(laid, x, env) for x in step.told] for step in steps]

    def weighed(rows: slice, keys: slice, weights: Any) -> Any:
        for i, (step, by) in enumerate(zip(steps, operands, strict=True)):
            of = step.op.inputs if step.change is ScoreChange.ROUND else step.op.outputs
            weights = weights.astype(of[0].dtype)
            # A sum that is 0 or not a number, of a place that sees no key, divides what is 0 before as well.
            fill = 0 * weights if i < laid.attention.undivided else jnp.zeros((), weights.dtype)
            weights = changed(weights, step, [_cut(x, rows, keys) for x in by], fill)
        return weights

    return weighed


def _mean(
    scores: Any,
    v: Any,
    keys: slice,
    weighed: Callable[[slice, Any], Any],
    ruled: Ruled | None,
    attention: Attention,
) -> Any:
    """[batch, time, heads, groups, features] of scores of some keys and all values."""
    others = [s for s in (slice(0, keys.start), slice(keys.stop, v.shape[1])) if s.start < s.stop]
    count = sum(s.stop - s.start for s in others)
    fill = -np.inf if ruled is None or not count else ruled.fill
    weights, each = _weights(scores, fill, count)

    def part(weights: Any, keys: slice) -> Any:
        dtype = attention.weights.dtype
        return _product(
            "bkgts,bskh->btkgh", weighed(keys, weights).astype(dtype), v[:, keys], attention.means
        )

    found = part(weights, keys)
    if fill == -np.inf:
        return found
    if all(step.change is ScoreChange.ROUND for step in attention.weighings):
        each = weighed(keys, each).astype(attention.weights.dtype)
        rest = sum(v[:, s].sum(axis=1, dtype=found.dtype) for s in others)[:, None, :, None]
        return found + jnp.moveaxis(each, 3, 1).astype(found.dtype) * rest

    def left(each: Any) -> Any:
        return sum(part(jnp.broadcast_to(each, (*each.shape[:-1], s.stop - s.start)), s) for s in others)

    # Keys that are left out are changed each in its own way, so they do not count as one. They weigh
    # something only beside a place that sees no key: the product is computed where there is one.
    return found + jax.lax.cond((each != 0).any(), left, lambda _: jnp.zeros_like(found), each)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _weights(scores: Any, fill: float, count: int) -> tuple[Any, Any]:
    """The softmax of scores beside so many more that have one score, and the weight of each of these."""
    least = jnp.asarray(fill, scores.dtype)
    largest = jnp.maximum(scores.max(axis=-1, keepdims=True), least)
    e, each = jnp.exp(scores - largest), jnp.exp(least - largest)
    total = e.sum(axis=-1, keepdims=True) + count * each
    return e / total, each / total


@_weights.defjvp
def _weights_jvp(fill: float, count: int, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """The weights, and their derivative, which is computed of nothing else."""
    weights, each = _weights(*primals, fill, count)
    (change,) = tangents
    common = (weights * change).sum(axis=-1, keepdims=True)
    return (weights, each), (weights * (change - common), -each * common)


def _product(spec: str, x: Any, y: Any, op: Op) -> Any:
    """A product as precise as that of an op."""
    params = next(op.body.calls).params
    wide = params.get("preferred_element_type")
    return jnp.einsum(spec, x, y, precision=params.get("precision"), preferred_element_type=wide)


def changed(scores: Any, step: ScoreStep, by: Sequence[Any], fill: Any) -> Any:
    """Scores behind a step."""
    if step.change is ScoreChange.ROUND:
        return step.op.body(scores)[0]
    if step.change in (ScoreChange.CHOOSE, ScoreChange.DISMISS):
        chooses = step.change is ScoreChange.CHOOSE
        mask = reduce(jnp.logical_and if chooses else jnp.logical_or, by)
        old = (scores, fill) if chooses else (fill, scores)
        return jnp.where(mask, *(x.astype(scores.dtype) for x in old))
    (other,) = by
    return _ARITHMETIC[step.change](scores, other.astype(scores.dtype))


_ARITHMETIC: Mapping[ScoreChange, Callable[[Any, Any], Any]] = {
    ScoreChange.ADD: jnp.add,
    ScoreChange.SUBTRACT: jnp.subtract,
    ScoreChange.MULTIPLY: jnp.multiply,
    ScoreChange.DIVIDE: jnp.divide,
}


def _cut(x: Any, rows: slice, keys: slice) -> Any:
    """The part of [batch, heads, groups, time, source] for some places and keys."""
    if not x.ndim:
        return x
    x = x if x.shape[-2] == 1 else x[..., rows, :]
    return x if x.shape[-1] == 1 else x[..., keys]
