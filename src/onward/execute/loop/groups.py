"""Batches of one shape laid on top of each other, so that one call can run over them.

>>> batches = [StackableBatch(i, (), {}, [x], key_of([x])) for i, x in enumerate(map(np.zeros, (2, 2, 2, 1)))]
>>> [(len(group.batches), group.stacked is not None) for group in grouped(batches, 2)]
[(2, True), (1, False), (1, False)]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.errors import ArgumentError
from onward.core.variable import holds_keys
from onward.execute.feeds import Feeds, Key, is_on_host, key_of
from onward.execute.loop.interrupt import uninterrupted


class StackableBatch(NamedTuple):
    """One batch: as a step takes it, and its arrays as they are stacked."""

    number: int
    data: tuple[Any, ...]
    feed: Mapping[str, Any]
    values: Sequence[Any]
    key: Key


class BatchGroup(NamedTuple):
    """Batches of one shape; ``stacked`` is None if they run step by step."""

    batches: list[StackableBatch]
    stacked: list[Any] | None


class Intake:
    """Reads batches as single steps would, checked and converted; what has a known shape is not converted.

    Raises:
        ArgumentError: data of another number, structure, rank or dtype, out of range, or empty; it names the
            batch.
    """

    def __init__(self, feeds: Feeds, checks: bool) -> None:
        self.feeds, self.checks = feeds, checks
        self.names = [name for _, name in feeds.taken]
        self.known: set[Key] = set()

    def __call__(self, batch: Any, number: int) -> StackableBatch:
        """One batch; ``number`` counts from 0."""
        try:
            data, feed = self.arguments(batch)
            values = self.feeds.read(self.feeds.named(data, feed) if feed else data)
            if self.checks:
                self.feeds.check_bounds(values)
            return StackableBatch(number, data, feed, *self.converted(values))
        except ArgumentError as error:
            raise blaming(number, error) from error

    def arguments(self, batch: Any) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """A batch as arguments of the step: by place, and by name."""
        count = len(self.names)
        if isinstance(batch, Mapping) and (count != 1 or set(batch) == set(self.names)):
            return (), batch
        if isinstance(batch, tuple | list) and count != 1:
            return tuple(batch), {}
        if isinstance(batch, tuple) and len(batch) == 1:
            return batch, {}
        return (batch,), {}

    def converted(self, values: Sequence[Any]) -> tuple[Sequence[Any], Key]:
        """The arrays in the dtypes of the Program, and their shapes."""
        try:
            key = key_of(values)
            if key in self.known:
                return _kept(values), key
        except (AttributeError, TypeError):  # lists and numbers
            pass
        values = self.feeds.convert(values)
        self.expect_rows(values)
        key = key_of(values)
        self.known.add(key)
        return _kept(values), key

    def expect_rows(self, values: Sequence[Any]) -> None:
        """Raise ``ArgumentError`` for a batch that holds nothing."""
        for v, value in zip(self.feeds.program.inputs, values, strict=True):
            if v.size and not value.size:
                raise ArgumentError(
                    f"{v.name!r} is {value.dtype}{list(value.shape)}, which holds nothing; expected rows as "
                    f"in {v.type}. Leave empty batches out."
                )


def _kept(values: Sequence[Any]) -> list[Any]:
    """The arrays, those of NumPy copied: a reader may fill the same ones again while the group is open."""
    return [np.array(x) if isinstance(x, np.ndarray) else x for x in values]


def blaming(number: int, error: ArgumentError) -> ArgumentError:
    """The same error, naming the batch."""
    return ArgumentError(f"step.run: batch {number} (counted from 0): {error}")


def grouped(batches: Iterable[StackableBatch], steps: int) -> Iterator[BatchGroup]:
    """Groups of batches of one shape, in order; those that do not fill a group stay as they are."""
    open_: list[StackableBatch] = []
    for batch in batches:
        if open_ and batch.key != open_[0].key:
            yield BatchGroup(open_, None)
            open_ = []
        open_.append(batch)
        if len(open_) == steps:
            yield BatchGroup(open_, list(map(_stacked, *(b.values for b in open_))))
            open_ = []
    if open_:
        yield BatchGroup(open_, None)


def _stacked(*values: Any) -> Any:
    """The arrays with one more axis in front; on the host, unless they lie on a device already."""
    on_host = all(is_on_host(x) and not holds_keys(x.dtype) for x in values)
    return np.stack(values) if on_host else _stacked_on_device(values)


@uninterrupted
@jax.jit
def _stacked_on_device(values: Sequence[Any]) -> Any:
    return jnp.stack(values)
