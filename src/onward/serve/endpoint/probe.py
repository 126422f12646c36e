"""Tries a plan on made-up data: which batch sizes it takes, and whether an example's neighbours matter.

What is tried is compiled, so that no request waits for the compiler later. Requests are joined only where the
trial has shown that each example's rows are what it would get alone: a network that takes a mean over its
batch, or whose result is one number for all, is asked for one request at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from onward.core.errors import OnwardError
from onward.serve.endpoint.plan import Arrays, Input, Plan


@dataclass(frozen=True)
class Joining:
    """How requests may be joined.

    Attributes:
        sizes: the batch sizes that are computed, in ascending order; a batch is padded to the next of them.
        alone: why each request is computed by itself; empty if requests are joined.
    """

    sizes: tuple[int, ...]
    alone: str = ""

    @property
    def most(self) -> int:
        """How many examples are computed at once."""
        return self.sizes[-1]

    def size(self, rows: int) -> int:
        """How many rows a batch of so many examples is computed with."""
        if self.alone:
            return rows
        return next(size for size in self.sizes if size >= rows)


def probe(plan: Plan, most: int) -> Joining:
    """Compile a plan for the batch sizes up to the largest, and find whether requests may be joined.

    Raises:
        OnwardError: the model takes no batch of any size.
    """
    found: dict[int, list[np.ndarray]] = {}
    trial = _Trial(plan, most)
    failed: Exception | None = None
    for size in _sizes(plan, most):
        try:
            found[size] = trial.run(0, size)
        except OnwardError as error:
            failed = error
    if failed is not None and not found:
        raise failed
    sizes = tuple(sorted(found))
    return Joining(sizes, _why_alone(plan, trial, sizes, found))


def _sizes(plan: Plan, most: int) -> list[int]:
    """Powers of two up to the largest, that one, and the traced size: a file may hold no other."""
    powers = {2**n for n in range(most.bit_length())}
    traced = {x.variable.shape[0] for x in plan.inputs if x.batched}
    return sorted(size for size in {*powers, most, *traced} if 0 < size <= most)


def _why_alone(plan: Plan, trial: _Trial, sizes: tuple[int, ...], found: dict[int, list[np.ndarray]]) -> str:
    if fixed := [x.name for x in plan.inputs if not x.batched]:
        return f"{fixed[0]} has no row for each example"
    if not plan.inputs:
        return "it reads no data"
    for name, *arrays in zip(plan.fetch, *found.values(), strict=True):
        if not all(x.shape[:1] == (size,) for x, size in zip(arrays, found, strict=True)):
            return f"{name} has no row for each example"
    if sizes[-1] < 2:
        return ""
    return next(_differences(plan, trial, sizes, found), "")


def _differences(
    plan: Plan, trial: _Trial, sizes: tuple[int, ...], found: dict[int, list[np.ndarray]]
) -> Iterator[str]:
    """What shows that a row is another one in another batch: with other neighbours, elsewhere, or alone."""
    others = trial.run(1, sizes[-1])
    for name, few, many, other in zip(plan.fetch, found[sizes[0]], found[sizes[-1]], others, strict=True):
        if not np.isfinite(np.asarray(many, float)).all():
            yield f"{name} is not finite for the numbers that it was tried on"
        elif not (_close(many[0], other[-1]) and _close(few[0], many[0])):
            yield f"an example's row of {name} depends on the other examples of its batch"


def _close(a: np.ndarray, b: np.ndarray) -> bool:
    x, y = np.asarray(a, float), np.asarray(b, float)
    half = a.dtype.itemsize < 4 and not np.issubdtype(a.dtype, np.integer)
    tolerance = 0.03 if half else 1e-3
    return bool(np.allclose(x, y, rtol=tolerance, atol=tolerance * float(np.abs(x).max(initial=0.0))))


class _Trial:
    """Made-up examples: one that is looked at, among others."""

    def __init__(self, plan: Plan, most: int) -> None:
        self.plan = plan
        self._rows = {x.name: [_numbers(plan, x, most, seed) for seed in (0, 1)] for x in plan.inputs}

    def run(self, which: int, size: int) -> list[np.ndarray]:
        """Compute with one of two sets of neighbours: the first stand behind the example, or before it."""
        return self.plan.run({x.name: self._array(x, which, size) for x in self.plan.inputs})

    def _array(self, x: Input, which: int, size: int) -> np.ndarray:
        if not x.batched:
            return self._rows[x.name][0]
        first, others = self._rows[x.name][0][:1], self._rows[x.name][which][1:size]
        return np.concatenate([others, first] if which else [first, others])


def _numbers(plan: Plan, x: Input, rows: int, seed: int) -> np.ndarray:
    """Numbers such as the input may hold: from 0 on, so that logarithms and roots are defined."""
    random = np.random.default_rng(seed)
    shape = (rows, *x.variable.shape[1:]) if x.batched else x.variable.shape
    if jax.numpy.issubdtype(x.variable.dtype, jax.numpy.floating):
        drawn: Any = random.uniform(size=shape) * (1 + 2 * seed)
    else:
        bounds = {v.name: bound for v, (bound, _) in plan.feeds.program.bounds.items()}
        drawn = random.integers(0, bounds.get(x.name, 2), shape)
    return np.asarray(drawn).astype(x.variable.dtype)


def joined(feeds: list[Arrays], plan: Plan, size: int) -> Arrays:
    """The rows of several requests as one batch of a size; the first row again where there are too few."""
    return {x.name: _stack([feed[x.name] for feed in feeds], size) for x in plan.inputs}


def _stack(parts: list[np.ndarray], size: int) -> np.ndarray:
    if len(parts) == 1 and len(parts[0]) == size:
        return parts[0]
    whole = np.empty((size, *parts[0].shape[1:]), parts[0].dtype)
    rows = 0
    for part in parts:
        whole[rows : rows + len(part)] = part
        rows += len(part)
    whole[rows:] = parts[0][:1]
    return whole
