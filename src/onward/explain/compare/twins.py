"""Which value of one Program stands beside which of another, laid out alike.

Names and structure pair them first, as in a diff; what nobody may call otherwise, such as the loss, what is
returned, the gradient of a parameter and its next value, is paired by what it is. What is left over is paired
where the numbers agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.placement import whole_shape
from onward.core.program import Program, Variable
from onward.core.variable import holds_keys
from onward.explain.compare.values import Values, count_of
from onward.explain.diff.compare import same_array
from onward.explain.diff.match import Matching, match

_NEAR = 1e-4  # of the largest number: values that are paired for what they are


@dataclass(frozen=True)
class MustAgree:
    """Two values that must agree, whatever is between: ``what`` they are of both Programs."""

    what: str
    mine: Variable
    theirs: Variable


def matched(a: Program, b: Program, of_a: Values, of_b: Values) -> Matching:
    """The pairs of ops and Variables, by name and structure."""
    return match(a, b, dict(_given_pairs(a, b, of_a, of_b)))


def _given_pairs(a: Program, b: Program, of_a: Values, of_b: Values) -> Iterator[tuple[Variable, Variable]]:
    """Data by position, state by name, else where it alone holds these numbers, as (of b, of a)."""
    shapes = ([whole_shape(v, p.replicas) for v in p.inputs] for p in (a, b))
    if len(a.inputs) == len(b.inputs) and [*next(shapes)] == [*next(shapes)]:
        yield from zip(b.inputs, a.inputs, strict=True)
    names = {v.name for v in a.state} & {v.name for v in b.state}
    left = [v for v in a.state if v.name not in names]
    for v in b.state:
        if v.name in names:
            continue
        alike = [x for x in left if _same_given(of_a[x], of_b[v])]
        chosen = [x for x in alike if x.kind is v.kind] or alike
        if chosen:
            yield v, chosen[0]
            left.remove(chosen[0])


def _same_given(x: Any, y: Any) -> bool:
    return x.shape == y.shape and x.dtype == y.dtype and same_array(x, y)


def anchors(a: Program, b: Program, twins: Mapping[Variable, Variable]) -> list[MustAgree]:
    """All that must agree: results in order, the loss, gradients, the next values of state."""
    found = []
    if len(a.outputs) == len(b.outputs):
        found += [MustAgree("result", x, y) for x, y in zip(a.outputs, b.outputs, strict=True)]
    if a.loss is not None and b.loss is not None:
        found.append(MustAgree("loss", a.loss, b.loss))
    of_b = {twins[p]: g for p, g in b.gradients if p in twins}
    found += [MustAgree(f"gradient of {p.name}", g, of_b[p]) for p, g in a.gradients if p in of_b]
    state = {twins[v]: v for v in b.state if v in twins}
    changing = [v for v in a.state if v in state and (v in a.next_state or state[v] in b.next_state)]
    found += [
        MustAgree(f"next {v.name}", a.next_state.get(v, v), b.next_state.get(state[v], state[v]))
        for v in changing
    ]
    return found


def laid_out(a: Program, b: Program, x: Any, y: Any, must: bool = False) -> Any | None:
    """A value of b as that of a lies, to stand beside it; None where it cannot.

    Rows of all devices are put in a row along the axis that is shorter on each; where the loss of a device is
    the mean of its examples, what is derived from it is as many times larger. Of what ``must`` agree and is
    not the same on all devices, that of the device that is farthest off.
    """
    if count_of(a) == count_of(b):
        return y if np.shape(x) == np.shape(y) else None
    if a.replicas is None:
        return _in_a_row(x, y, must)
    return None


def _in_a_row(x: Any, rows: Any, must: bool) -> Any | None:
    """The value of all devices beside that of one."""
    count, shape = len(rows), rows.shape[1:]
    if shape == x.shape:
        if all(same_array(rows[0], row) for row in rows[1:]):
            return rows[0]
        return max(rows, key=lambda row: far(x, row)) if must else None
    if must and len(shape) == 1 and 0 <= rows.size - x.size < max(count, 1) * max(1, x.size):
        return rows.reshape(-1)[: x.size].reshape(x.shape)
    axes = [k for k, n in enumerate(shape) if len(shape) == x.ndim and n * count == x.shape[k]]
    fitting = [k for k in axes if (*shape[:k], *shape[k + 1 :]) == (*x.shape[:k], *x.shape[k + 1 :])]
    if len(fitting) != 1:
        return None
    whole = jnp.concatenate([*rows], fitting[0]) if is_key(rows) else np.concatenate([*rows], fitting[0])
    if is_key(rows) or not jnp.issubdtype(whole.dtype, jnp.inexact):
        return whole
    scaled = (whole / count).astype(whole.dtype)
    return min((whole, scaled), key=lambda y: far(x, y))


def is_key(x: Any) -> bool:
    """Whether an array holds random keys."""
    return holds_keys(x.dtype)


def widened(x: Any) -> Any:
    """Numbers in a dtype in which differences of all dtypes can be told."""
    x = np.asarray(jax.random.key_data(x)) if is_key(x) else np.asarray(x)
    return x.astype(np.complex128 if x.dtype.kind == "c" else np.float64)


def largest(x: Any) -> float:
    """The largest finite number, without its sign."""
    x = widened(x)
    return float(np.max(np.where(np.isfinite(x), np.abs(x), 0.0), initial=0.0))


def far(x: Any, y: Any, least: float = 0.0) -> float:
    """The largest difference, as a part of the largest number, or of this one if that is larger."""
    if np.shape(x) != np.shape(y):
        return float("inf")
    x, y = widened(x), widened(y)
    if not x.size:
        return 0.0
    with np.errstate(all="ignore"):
        difference = np.where((x == y) | (np.isnan(x) & np.isnan(y)), 0.0, np.abs(x - y))
        worst = float(np.max(difference))
    if worst == 0:
        return 0.0
    return worst / max(largest(x), least, 1e-300) if np.isfinite(worst) else float("inf")


def is_near(x: Any, y: Any, part: float) -> bool:
    """Whether each number differs by no more than this part of it and of the root of their mean square."""
    if np.shape(x) != np.shape(y):
        return False
    x, y = widened(x), widened(y)
    with np.errstate(all="ignore"):
        sizes = np.minimum(np.abs(x), np.abs(y))
        typical = np.sqrt(np.mean(sizes**2)) if sizes.size and np.isfinite(sizes).all() else 0.0
        near = np.abs(x - y) <= part * (sizes + typical)
        return bool(np.all(near | (x == y) | (np.isnan(x) & np.isnan(y))))


def by_value(
    a: Program, b: Program, of_a: Values, of_b: Values, twins: Mapping[Variable, Variable]
) -> dict[Variable, Variable]:
    """Pairs of what is left over in both, where the numbers agree, in order."""
    taken = set(twins.values())
    left = [v for op in a.ops for v in op.outputs if v not in taken and _is_telling(of_a[v])]
    found: dict[Variable, Variable] = {}
    for v in (v for op in b.ops for v in op.outputs if v not in twins):
        for x in left:
            y = laid_out(a, b, of_a[x], of_b[v]) if x.dtype == v.dtype else None
            if y is not None and far(of_a[x], y) < _NEAR:
                found[v] = x
                left.remove(x)
                break
    return found


def _is_telling(x: Any) -> bool:
    """Whether a value is told from others by its numbers."""
    if is_key(x) or x.size < 2 or not jnp.issubdtype(x.dtype, jnp.inexact):
        return False
    return bool(np.ptp(widened(x).real) > 0)
