"""Attention as everybody lays it out: queries [batch, time, heads, features], keys and values alike.

The axes of the scores fall into groups: what all have (the batch, and heads of keys), what only queries have
(their places, and groups of heads that share keys), and the places of the keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, takewhile
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.program import Variable
from onward.develop.attention.axes import Axes, grouped
from onward.develop.attention.operands import Operand
from onward.develop.attention.parts import Attention, ScoreChange, ScoreStep
from onward.develop.attention.truths import addends


def never(dtype: Any) -> float:
    """A score so low that its key is not looked at beside another."""
    return -3e4 if dtype == "float16" else -9e8


def is_low(added: np.ndarray) -> bool:
    """Whether numbers rule out where they are not 0, added to scores."""
    return bool(np.all((added == 0) | (added <= never(added.dtype))))


@dataclass(frozen=True, eq=False)
class Laid:
    """Attention with its axes in groups.

    Attributes:
        attention: as it was found.
        batch: the axes of it, and so on.
    """

    attention: Attention
    batch: tuple[int, ...]
    heads: tuple[int, ...]  # of keys and values
    groups: tuple[int, ...]  # of queries for each of these
    time: tuple[int, ...]

    @property
    def lengths(self) -> dict[int, int]:
        """How long each axis is."""
        return self.attention.lengths

    @property
    def source(self) -> int:
        """How many keys there are."""
        return self.lengths[self.attention.source]

    def length(self, axes: Sequence[int]) -> int:
        """How long these are together."""
        return prod(self.lengths[axis] for axis in axes)

    @property
    def dtype(self) -> Any:
        """That of the scores."""
        return self.attention.scores.outputs[0].dtype

    def query(self, x: Any) -> Any:
        """Queries as [batch, time, heads, groups, features]."""
        return self._laid(x, self.attention.query_axes, (self.batch, self.time, self.heads, self.groups))

    def key(self, x: Any) -> Any:
        """Keys as [batch, source, heads, features]."""
        return self._laid(x, self.attention.key_axes, (self.batch, (self.attention.source,), self.heads))

    def value(self, x: Any) -> Any:
        """Values as [batch, source, heads, features]."""
        return self._laid(x, self.attention.value_axes, (self.batch, (self.attention.source,), self.heads))

    def _laid(self, x: Any, axes: Axes, groups: Sequence[Sequence[int]]) -> Any:
        return grouped(x, axes, (*groups, self.features(axes)), self.lengths)

    def features(self, axes: Axes) -> tuple[int, ...]:
        """Those of some axes that no score counts along, in one order for all."""
        return tuple(sorted(axis for group in axes for axis in group if axis >= self.attention.own))

    def beside(self, operand: Operand, env: Mapping[Variable, Any]) -> Any:
        """An operand of the scores as [batch, heads, groups, time, source], 1 long where it repeats."""
        x = operand.array(env)
        for group in self._order:
            if any(x.shape[axis] > 1 for axis in group):
                x = jnp.broadcast_to(x, [self.lengths[i] if i in group else n for i, n in enumerate(x.shape)])
        laid = x.transpose([axis for group in self._order for axis in group])
        return laid.reshape([prod(x.shape[axis] for axis in group) for group in self._order])

    @property
    def _order(self) -> tuple[tuple[int, ...], ...]:
        return (self.batch, self.heads, self.groups, self.time, (self.attention.source,))

    def result(self, x: Any) -> Any:
        """[batch, time, heads, groups, features] as the Program has it."""
        order = [*self.batch, *self.time, *self.heads, *self.groups]
        wanted = [axis for group in self.attention.result_axes for axis in group]
        order = [a for a in (*order, *self.features(self.attention.result_axes)) if self.lengths[a] > 1]
        apart = x.reshape([self.lengths[axis] for axis in order])
        laid = apart.transpose([order.index(axis) for axis in wanted if self.lengths[axis] > 1])
        return laid.reshape(self.attention.result.shape)

    @cached_property
    def ruled(self) -> Ruled | None:
        """The masks that are known, if nothing but a change of dtype comes behind them."""
        behind = [step for step in self.attention.steps[::-1] if step.change is not ScoreChange.ROUND]
        if behind and behind[0].change is ScoreChange.ADD:
            return self._ruled_by_sum(tuple(takewhile(lambda step: step.change is ScoreChange.ADD, behind)))
        fill = behind[0].fill.number if behind and behind[0].fill is not None else None
        if fill is None:
            return None
        left: dict[ScoreStep, tuple[ScoreStep, ...]] = {step: (step,) for step in self.attention.steps}
        known: list[Mask] = []
        for step in behind:
            if step.fill is None or step.fill.number != fill:
                break
            masks = [Mask(by, step.change is ScoreChange.DISMISS) for by in step.by if self._is_of_places(by)]
            rest = tuple(by for by in step.by if by not in {mask.by for mask in masks})
            left[step] = (replace(step, by=rest),) if rest else ()
            known += masks
        if not known:
            return None
        seen, fill = self._now(known), self._rounded(fill, behind[0])
        if fill == -np.inf and not seen.any(axis=1).all():
            return None  # what is not a number spreads to all keys
        steps = tuple(s for group in left.values() for s in group)
        return Ruled(seen, fill, tuple(mask for mask in known if not mask.by.is_implied), steps)

    @cached_property
    def causal(self) -> Ruled | None:
        """The same where each place looks at itself and at what is before it, and at nothing else."""
        ruled = self.ruled
        if ruled is None or ruled.added or ruled.fill > never(self.dtype):
            return None
        return ruled if np.array_equal(ruled.seen, np.tri(*ruled.seen.shape, dtype=bool)) else None

    def _rounded(self, fill: float, step: ScoreStep) -> float:
        """The score of what a step rules out, behind the changes of dtype that follow."""
        with jax.ensure_compile_time_eval():
            score = jnp.asarray(fill, step.op.outputs[0].dtype)
            for after in self.attention.steps[self.attention.steps.index(step) + 1 :]:
                (score,) = after.op.body(score)
        return float(score)

    def _ruled_by_sum(self, added: Sequence[ScoreStep]) -> Ruled | None:
        """The masks that are added as 0 and large negative numbers, of which no row is all negative."""
        steps = self.attention.steps
        if any(step.change in MASKS for step in steps if step not in added):
            return None
        masks = [Mask(x) for step in added for x in self._added_masks(step.by[0])]
        if not masks:
            return None
        seen = self._now(masks)
        if not seen.any(axis=1).all():
            return None
        if len(added) == 1 and masks[0].by is added[0].by[0]:
            return Ruled(seen, -np.inf, tuple(masks), tuple(s for s in steps if s is not added[0]))
        return Ruled(seen, -np.inf, tuple(masks), steps, tuple(added))

    def _added_masks(self, operand: Operand) -> Iterator[Operand]:
        """An operand that is a mask by what is added, or those that it is computed of."""
        parts = (operand,) if self._is_added_mask(operand) else addends(operand)
        return filter(self._is_added_mask, parts)

    def _is_added_mask(self, operand: Operand) -> bool:
        """Whether an operand is known, depends on places and keys alone, and is 0 or very low."""
        value = operand.value if self._is_of_places(operand) else None
        return value is not None and is_low(value)

    def _is_of_places(self, operand: Operand) -> bool:
        """Whether an operand is known and depends on places and keys alone."""
        return operand.counts <= {*self.time, self.attention.source} and operand.value is not None

    def _now(self, masks: Iterable[Mask]) -> np.ndarray:
        with jax.ensure_compile_time_eval():
            return np.asarray(self.seen(masks, {}))

    def seen(self, masks: Iterable[Mask], env: Mapping[Variable, Any]) -> Any:
        """Which places look at which keys: [time, source]."""
        seen = jnp.ones((), bool)
        for mask in masks:
            laid = self.beside(mask.by, env)
            mine = (laid if laid.dtype == bool else laid == 0).reshape(laid.shape[-2:])
            seen = seen & (~mine if mask.rules_out else mine)
        return jnp.broadcast_to(seen, (self.length(self.time), self.source))


MASKS = (ScoreChange.ADD, ScoreChange.SUBTRACT, ScoreChange.CHOOSE, ScoreChange.DISMISS)


@dataclass(frozen=True, eq=False)
class Mask:
    """A mask, which says where a place looks, as bools or as 0, or with ``rules_out`` where it does not."""

    by: Operand
    rules_out: bool = False


@dataclass(frozen=True, eq=False)
class Ruled:
    """The keys that masks rule out which are known while the Program is built.

    Attributes:
        seen: [time, source], where a place looks.
        fill: the score of the others.
        masks: those that are known, but for such as follow from what steps read.
        steps: the changes of scores without them; with them, where they are added among others.
        added: these, if there are others: what is not known may leave a place no key that it looks at.
    """

    seen: np.ndarray
    fill: float
    masks: tuple[Mask, ...]
    steps: tuple[ScoreStep, ...]
    added: tuple[ScoreStep, ...] = ()

    def blocks(self, count: int) -> Iterator[tuple[slice, slice]]:
        """The places in as many blocks, each with the keys that some of them look at."""
        rows = len(self.seen)
        edges = [rows * i // count for i in range(count + 1)]
        for a, b in pairwise(edges):
            keys = np.flatnonzero(self.seen[a:b].any(axis=0))
            if a < b:
                yield slice(a, b), slice(int(keys[0]), int(keys[-1]) + 1) if len(keys) else slice(0, 1)

    def share(self, count: int) -> float:
        """The share of the scores that is computed in as many blocks."""
        made = sum((r.stop - r.start) * (k.stop - k.start) for r, k in self.blocks(count))
        return float(made / self.seen.size)


def laid_out(attention: Attention) -> Laid | str:
    """Attention with its axes in groups; in words why not, where keys and values have different heads."""
    lengths = attention.lengths
    sides = {"q": attention.query_axes, "k": attention.key_axes, "v": attention.value_axes}
    of = {side: [a for group in axes for a in group if lengths[a] > 1] for side, axes in sides.items()}
    own = attention.own
    scores = [axis for axis in of["q"] if axis < own]
    if {a for a in of["k"] if a < own} != {a for a in of["v"] if a < own}:
        return "keys and values have different heads"
    if not {a for a in of["k"] if a < own} <= {*scores, attention.source}:
        return "keys count along an axis that queries do not"
    common = [axis for axis in scores if axis in of["k"]]
    free = [axis for axis in scores if axis not in of["k"]]
    counted = {axis for step in attention.steps for x in step.by for axis in x.counts}
    time = sorted(free, key=lambda axis: (axis in counted, lengths[axis], axis))[-1:]
    short = [axis for axis in range(own) if lengths[axis] == 1 and axis != attention.source]
    heads = common[-1:] if len(common) > 1 else []
    batch = [axis for axis in common if axis not in heads] + short
    groups = [axis for axis in free if axis not in time]
    return Laid(attention, *map(tuple, (batch, heads, groups, time)))
