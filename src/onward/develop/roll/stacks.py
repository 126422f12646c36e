"""Variables of all layers in one array, and single ones out of it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any

import jax.numpy as jnp
from jax import lax

from onward.core.jaxprs.body import Body, body_of
from onward.core.jaxprs.equations import Type
from onward.core.marks import STACK, UNSTACK
from onward.core.program import Op, Variable
from onward.core.source import Source


def stack(values: Sequence[Variable], name: str, scope: str, source: Source | None) -> Op:
    """The op that stacks Variables of one type along a new first axis; some may stand there several times."""
    distinct = tuple(dict.fromkeys(values))
    place = {v: i for i, v in enumerate(distinct)}
    body = _stacking(tuple(place[v] for v in values), values[0].shape, values[0].dtype)
    out = Variable(name, (len(values), *values[0].shape), values[0].dtype)
    return Op(STACK, distinct, (out,), body, scope=scope, source=source)


def unstack(
    part: Variable, which: Sequence[int], outputs: Sequence[Variable], scope: str, source: Source | None
) -> Op:
    """The op that gives some of what is stacked back as Variables of their own."""
    body = _unstacking(tuple(which), part.shape, part.dtype)
    return Op(UNSTACK, (part,), tuple(outputs), body, scope=scope, source=source)


def starred(values: Sequence[Variable]) -> str:
    """The beginning and the end that the names of Variables share, with a star between them.

    >>> import numpy as np
    >>> starred([Variable(f"layers/{i}/w", (), np.dtype("f4")) for i in range(3)])
    'layers/*/w'
    """
    names = list(dict.fromkeys(v.name for v in values))
    begin = _common(names)
    end = _common([name[len(begin) :][::-1] for name in names])[::-1]
    return f"{begin}*{end}" if len(names) > 1 else begin


def _common(texts: Sequence[str]) -> str:
    """The longest common prefix of the texts."""
    return "".join(
        next(iter(c)) for c in takewhile(lambda c: len(c) == 1, map(set, zip(*texts, strict=False)))
    )


@lru_cache(maxsize=1024)
def _stacking(places: tuple[int, ...], shape: tuple[int, ...], dtype: Any) -> Body:
    return body_of(lambda *xs: [jnp.stack([xs[i] for i in places])], *[Type(shape, dtype)] * len(set(places)))


@lru_cache(maxsize=1024)
def _unstacking(which: tuple[int, ...], shape: tuple[int, ...], dtype: Any) -> Body:
    return body_of(lambda x: [lax.index_in_dim(x, t, keepdims=False) for t in which], Type(shape, dtype))
