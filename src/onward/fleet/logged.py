"""The gradients that trainers sent for one update, as a flat sequence of arrays, for a log to replay.

>>> arrays, pushed = flat([Gradients((np.ones(3),)), None], [1.0, 0.0])
>>> pushed, list(arrays)
(((1, (), ()), None), ['0', '1'])
>>> gradients, shares = unflat(arrays, pushed)
>>> gradients[0].arrays[0].tolist(), gradients[1], shares
([1.0, 1.0, 1.0], None, [1.0, 0.0])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from onward.fleet.frame import Pushed
from onward.fleet.holding import Gradients


def flat(
    gradients: Sequence[Gradients | None], shares: Sequence[float]
) -> tuple[dict[str, np.ndarray], Pushed]:
    """All arrays by their place, the shares last, and what each trainer's are."""
    arrays: list[np.ndarray] = []
    for g in (g for g in gradients if g is not None):
        arrays += [*g.arrays, *(x for pair in g.rows.values() for x in pair), *g.shared.values()]
    arrays.append(np.asarray(shares, np.float64))
    pushed = tuple(None if g is None else (len(g.arrays), tuple(g.rows), tuple(g.shared)) for g in gradients)
    return {str(i): np.asarray(x) for i, x in enumerate(arrays)}, pushed


def unflat(arrays: Mapping[str, np.ndarray], pushed: Pushed) -> tuple[list[Gradients | None], list[float]]:
    """Rebuild the gradients of each trainer, and the shares."""
    supply = iter(arrays.values())
    gradients: list[Gradients | None] = []
    for told in pushed:
        if told is None:
            gradients.append(None)
            continue
        count, rows, shared = told
        whole = tuple(next(supply) for _ in range(count))
        pairs = {name: (next(supply), next(supply)) for name in rows}
        gradients.append(Gradients(whole, pairs, {name: next(supply) for name in shared}))
    return gradients, next(supply).tolist()
