"""Tries a plan on made-up data: which batch sizes it takes, and whether an example's neighbours matter.

What is tried is compiled, so that no request waits for the compiler later. Requests are joined only where no
neighbour that was tried changes an example's rows: ordinary numbers, signed and large ones, zeros, infinities
and NaN. A network that takes a mean over its batch, or whose result is one number for all, is asked for one
request at a time. A trial is not a proof: what depends on its neighbours for rare values alone is not found.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from onward.core.errors import OnwardError
from onward.serve.endpoint.compiled import Lengths
from onward.serve.endpoint.plan import Arrays, Input, RequestPlan

LOG = logging.getLogger("onward.serve")


@dataclass(frozen=True)
class Joining:
    """How requests may be joined.

    Attributes:
        sizes: the batch sizes that are computed, in ascending order; a batch is padded to the next of them.
        alone: why each request is computed by itself; empty if requests are joined.
        fixed: whether the model takes batches of these sizes and no others.
    """

    sizes: tuple[int, ...]
    alone: str = ""
    fixed: bool = False

    @property
    def most(self) -> int:
        """How many examples are computed at once."""
        return self.sizes[-1]

    def size(self, rows: int) -> int:
        """How many rows a batch of so many examples is computed with."""
        if self.alone:
            return rows
        return next(size for size in self.sizes if size >= rows)

    def refused(self, rows: int) -> str:
        """Why a request for so many examples cannot be computed; empty if it can."""
        if not (self.alone and self.fixed) or rows in self.sizes:
            return ""
        return (
            f"The number of examples is {rows}; the model's file takes {' or '.join(map(str, self.sizes))}, "
            f"and none are added to yours, since {self.alone}."
        )


def probe(plan: RequestPlan, most: int, join: bool = True, lengths: Lengths | None = None) -> Joining:
    """Compile a plan for the batch sizes up to the largest, and find whether requests may be joined.

    Args:
        plan: what is tried.
        most: examples in a batch at most.
        join: whether they should be joined where they may.
        lengths: those of each input but for the number of examples; those that were traced unless given.

    Raises:
        OnwardError: the model takes no batch of any size.
    """
    found: dict[int, list[np.ndarray]] = {}
    sizes = tuple(_sizes(plan, most))
    trial = _Trial(plan, sizes[-1], plan.traced_lengths if lengths is None else lengths)
    failed: Exception | None = None
    for size in sizes:
        try:
            found[size] = trial.run(size)
        except OnwardError as error:
            failed = error
    if failed is not None and not found:
        raise failed
    sizes = tuple(sorted(found))
    alone = _why_alone(plan, trial, sizes, found) if join else "requests are not to be joined"
    return Joining(sizes, alone, bool(plan.batch_sizes))


def _sizes(plan: RequestPlan, most: int) -> list[int]:
    """Powers of two up to the largest, that one, and the traced size; or what the file holds."""
    if plan.batch_sizes:
        return [n for n in plan.batch_sizes if n <= most] or [plan.batch_sizes[0]]
    powers = {2**n for n in range(most.bit_length())}
    traced = {x.variable.shape[0] for x in plan.inputs if x.batched}
    return sorted(size for size in {*powers, most, *traced} if 0 < size <= most)


def _why_alone(
    plan: RequestPlan, trial: _Trial, sizes: tuple[int, ...], found: dict[int, list[np.ndarray]]
) -> str:
    if fixed := [x.name for x in plan.inputs if not x.batched]:
        return f"{fixed[0]} has no row for each example"
    if square := [x.name for x in plan.inputs if x.shape[0] in x.shape[1:]]:
        return f"{square[0]} has the number of examples as another length, too"
    if not plan.inputs:
        return "it reads no data"
    for name, *arrays in zip(plan.fetch, *found.values(), strict=True):
        if not all(x.shape[:1] == (size,) for x, size in zip(arrays, found, strict=True)):
            return f"{name} has no row for each example"
    if sizes[-1] < 2:
        return ""
    return next(_differences(plan, trial, sizes, found), "")


def _differences(
    plan: RequestPlan, trial: _Trial, sizes: tuple[int, ...], found: dict[int, list[np.ndarray]]
) -> Iterator[str]:
    """Yield reasons why a row differs in another batch: at another place, of another size, among others."""
    whole, moved = found[sizes[-1]], trial.run(sizes[-1], moved=True)
    for k, name in enumerate(plan.fetch):
        if not np.isfinite(np.asarray(whole[k][0], float)).all():
            yield f"{name} is not finite for the numbers that it was tried on"
        others = [moved[k][-1], *(arrays[k][0] for arrays in found.values())]
        if not all(_close(whole[k][0], row, _ABOUT) for row in others):
            yield _depends(name)
    some = "large", "undefined"
    for looked, first, kinds in (("usual", 0, _KINDS), ("usual", 1, some), ("signed", 1, some)):
        yield from _disturbed(plan, trial, sizes[-1], looked, first, kinds)


def _disturbed(
    plan: RequestPlan, trial: _Trial, size: int, looked: str, first: int, kinds: Iterable[str]
) -> Iterator[str]:
    """Yield a reason for each output whose every second row, of one kind, changes with those between."""
    before = trial.among(looked, "usual", size, first)
    for kind in kinds:
        after = trial.among(looked, kind, size, first)
        for name, a, b in zip(plan.fetch, before, after, strict=False):
            if not all(_close(x, y, _EXACT) for x, y in zip(a[first::2], b[first::2], strict=True)):
                yield _depends(name)


def _depends(name: str) -> str:
    return f"an example's row of {name} depends on the other examples of its batch"


_ABOUT = 1e-3, 0.03  # of the largest number of a row: other sizes are computed by other kernels
_EXACT = 1e-5, 0.016  # the same kernels at the same place; the second is for dtypes below four bytes


def _close(a: np.ndarray, b: np.ndarray, tolerances: tuple[float, float]) -> bool:
    """Whether two rows are the same but for rounding; whole numbers have none."""
    if a.dtype.kind in "biu":
        return np.array_equal(a, b)
    x, y = np.asarray(a, float), np.asarray(b, float)
    largest = float(np.abs(x[np.isfinite(x)]).max(initial=0.0))
    bound = tolerances[a.dtype.itemsize < 4] * largest
    return bool(np.allclose(x, y, rtol=0, atol=bound, equal_nan=True))


class _Trial:
    """Made-up examples: every second one is looked at, those between are its neighbours."""

    def __init__(self, plan: RequestPlan, most: int, lengths: Lengths) -> None:
        self.plan = plan
        self._rows = {
            (x.name, kind): _numbers(plan, x, (most, *shape) if x.batched else shape, kind)
            for x, shape in zip(plan.inputs, lengths, strict=True)
            for kind in ("usual", *_KINDS)
        }

    def run(self, size: int, *, moved: bool = False) -> list[Any]:
        """Compute usual rows, in this order or in the reverse one."""
        step = -1 if moved else 1
        return self.plan.run(
            {x.name: self._array(x, size, "usual", "usual", 0, step) for x in self.plan.inputs}
        )

    def among(self, looked: str, kind: str, size: int, first: int) -> list[Any]:
        """Compute rows of one kind, from the first or the second on, among those of another.

        Returns:
            Nothing if it fails for such numbers, for then each request of a batch is tried alone.
        """
        feed = {x.name: self._array(x, size, looked, kind, first) for x in self.plan.inputs}
        try:
            return self.plan.run(feed)
        except Exception as error:
            LOG.debug("the trial on %s numbers failed: %s", kind, error)
            return []

    def _array(self, x: Input, size: int, looked: str, kind: str, first: int, step: int = 1) -> np.ndarray:
        if not x.batched:
            return self._rows[x.name, "usual"]
        array = self._rows[x.name, looked][:size].copy()
        array[1 - first :: 2] = self._rows[x.name, kind][:size][1 - first :: 2]
        return array[::step]


_KINDS: Mapping[str, Callable[[Any], Any]] = {
    "signed": lambda normal: normal,
    "large": lambda normal: 1e3 * normal,
    "zeros": lambda normal: 0 * normal,
    "infinite": lambda normal: np.where(normal > 0, np.inf, -np.inf),
    "undefined": lambda normal: np.full_like(normal, np.nan),
}
"""Neighbours that show what a sum, a maximum or a comparison over the batch does."""


def _numbers(plan: RequestPlan, x: Input, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Numbers of a kind; the usual ones go from 0 on, so that logarithms and roots are defined."""
    random = np.random.default_rng(sorted(("usual", *_KINDS)).index(kind))
    if jax.numpy.issubdtype(x.variable.dtype, jax.numpy.floating):
        drawn = random.uniform(size=shape) if kind == "usual" else _KINDS[kind](random.normal(size=shape))
    else:
        drawn = _whole(random, plan, x, kind, shape)
    return np.asarray(drawn).astype(x.variable.dtype)


def _whole(
    random: np.random.Generator, plan: RequestPlan, x: Input, kind: str, shape: tuple[int, ...]
) -> Any:
    """Whole numbers within the bounds of an input; without any, the usual ones may be indices or booleans."""
    bound = {v.name: bound for v, (bound, _) in plan.feeds.program.bounds.items()}.get(x.name)
    if kind == "zeros":
        return np.zeros(shape, int)
    if kind == "undefined":
        return np.full(shape, (bound or 2) - 1)
    if bound is None and kind != "usual" and x.variable.dtype != bool:
        return random.integers(0 if kind == "large" else -100, 101, shape)
    return random.integers(0, bound or 2, shape)


def joined(feeds: list[Arrays], plan: RequestPlan, size: int) -> Arrays:
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
