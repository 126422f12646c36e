"""Bodies over a collection of numbers, such as all gradients, whatever arrays these come in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onward.core.jaxprs.body import Body, Collected, body_of
from onward.core.jaxprs.equations import Type


def body_over(function: Callable[..., Any], collection: Sequence[Type], *others: Type) -> Body:
    """The Body of ``function(arrays, *others)``, which does not ask how numbers are laid out in arrays.

    >>> import numpy as np
    >>> row, number = Type((3,), np.float32), Type((), np.float32)
    >>> body = body_over(lambda xs, y: [x * y for x in xs], [row, row], number)
    >>> [t.shape for t in body.collected.remade([Type((2, 3), np.float32)]).out_types]
    [(2, 3)]
    """
    count = len(collection)
    body = body_of(lambda *xs: function(xs[:count], *xs[count:]), *collection, *others)
    body.collected = Collected(count, lambda types: body_over(function, types, *others))
    return body
