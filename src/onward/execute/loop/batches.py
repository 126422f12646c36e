"""Arrays in memory, read in batches.

>>> images, labels = np.zeros((10, 28, 28)), np.arange(10)
>>> for x, y in batches((images, labels), 4):
...     print(x.shape, y)
(4, 28, 28) [0 1 2 3]
(4, 28, 28) [4 5 6 7]
(2, 28, 28) [8 9]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from onward.core.errors import ArgumentError
from onward.core.structure import describe, expect_count, expect_flag
from onward.define.arguments import expect_unmasked
from onward.execute.processes import place_among_processes


def batches(
    arrays: Mapping[str, Any] | Sequence[Any],
    batch_size: int,
    *,
    shuffle: bool = False,
    seed: int = 0,
    drop_last: bool = False,
    parts: bool = True,
) -> Batches:
    """Read arrays of equal length in batches; ``iter`` of the result is one epoch.

    Args:
        arrays: several arrays, by name or in a sequence; their first axis counts the examples.
        batch_size: examples in a batch. The last one of an epoch may be shorter.
        shuffle: draw a new order for each epoch, a function of ``seed`` and the epoch's number alone. Without
            it a batch is a view of the arrays, and read-only.
        seed: the seed of these orders.
        drop_last: leave a short last batch out.
        parts: where several processes train together, each reads its part of every batch. False: all of it,
            because ``arrays`` are those of this process alone.

    Returns:
        Batches, whose ``len`` is the number of batches in an epoch. Each batch is a dict or a tuple, as
        ``arrays`` is.

    Raises:
        ArgumentError: no arrays, arrays of unequal length or without examples, a batch size below 1.

    Example:
        >>> reader = batches({"x": np.arange(5)}, 2, shuffle=True)
        >>> [batch["x"].tolist() for batch in reader], len(reader)
        ([[2, 4], [3, 0], [1]], 3)
        >>> [batch["x"].tolist() for batch in reader]
        [[1, 4], [3, 0], [2]]
    """
    return Batches(arrays, batch_size, shuffle, seed, drop_last, parts)


class Batches:
    """Arrays in memory, read in batches; made by ``batches``.

    An iterator that is read to its end moves on to the next epoch; one that is left early moves nothing, and
    the next begins the same epoch again. ``state_dict`` says where the latest iterator stands.
    """

    def __init__(
        self, arrays: Any, batch_size: int, shuffle: bool, seed: int, drop_last: bool, parts: bool = True
    ) -> None:
        self.names = tuple(arrays) if isinstance(arrays, Mapping) else None
        self.arrays = _checked(arrays)
        self.examples = len(self.arrays[0])
        expect_count(batch_size, "batch_size")
        expect_count(seed, "seed", 0)
        expect_flag(drop_last, "drop_last")
        self.batch_size, self.shuffle, self.seed, self.parts = int(batch_size), shuffle, int(seed), parts
        self._length = self.examples // self.batch_size if drop_last else -(-self.examples // self.batch_size)
        if not self._length:
            raise ArgumentError(
                f"drop_last=True leaves nothing: there are {self.examples} examples, less than one batch of "
                f"{batch_size}. Take a smaller batch_size, or drop_last=False."
            )
        self._epoch = self._batch = self._begin = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        epoch, begin, self._begin = self._epoch, self._begin, 0
        self._batch = begin
        order = np.random.default_rng((self.seed, epoch)).permutation(self.examples) if self.shuffle else None
        for batch in range(begin, self._length):
            rows: Any = self._rows(batch)
            self._epoch, self._batch = epoch, batch + 1
            yield self._take(rows if order is None else order[rows])
        self._epoch, self._batch = epoch + 1, 0

    def set_epoch(self, number: int) -> None:
        """Begin this epoch with the next ``iter``."""
        self._epoch, self._batch, self._begin = number, 0, 0

    def state_dict(self) -> dict[str, int]:
        """The epoch, and how many of its batches were read."""
        return {"epoch": self._epoch, "batch": self._batch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Let the next ``iter`` read the rest of the epoch from there.

        >>> reader = batches([np.arange(6)], 2)
        >>> reader.load_state_dict({"epoch": 0, "batch": 1})
        >>> [x.tolist() for x, in reader]
        [[2, 3], [4, 5]]

        Raises:
            ArgumentError: a position that these arrays do not have.
        """
        fits = isinstance(state, Mapping) and {"epoch", "batch"} <= set(state)
        if not fits or not (0 <= state["batch"] <= self._length and state["epoch"] >= 0):
            raise ArgumentError(
                f"The position {dict(state) if isinstance(state, Mapping) else describe(state)} is of "
                f"another reader; expected {{'epoch': 0, 'batch': b}} with b from 0 to {self._length}."
            )
        self._epoch, self._batch, self._begin = state["epoch"], state["batch"], state["batch"]

    def _rows(self, batch: int) -> slice:
        """The rows of a batch, or of this process's part of it."""
        begin = batch * self.batch_size
        end = min(begin + self.batch_size, self.examples)
        index, count = place_among_processes() if self.parts else (0, 1)
        size = end - begin
        return slice(begin + index * size // count, begin + (index + 1) * size // count)

    def _take(self, rows: Any) -> Any:
        taken = tuple(array[rows] for array in self.arrays)
        return taken if self.names is None else dict(zip(self.names, taken, strict=True))

    def __repr__(self) -> str:
        return f"Batches({self.examples} examples, {self._length} batches of {self.batch_size})"


def _checked(arrays: Any) -> list[np.ndarray]:
    """The arrays, as read-only views."""
    if not isinstance(arrays, Mapping | list | tuple):
        raise ArgumentError(
            f"batches takes several arrays, not {describe(arrays)}. Write batches((x, y), 32), or "
            'batches({"x": x, "y": y}, 32).'
        )
    named = dict(arrays) if isinstance(arrays, Mapping) else {f"array {i}": a for i, a in enumerate(arrays)}
    if not named:
        raise ArgumentError("batches was given no arrays. Write batches((x, y), 32).")
    views = []
    for name, value in named.items():
        if not hasattr(value, "dtype") or np.ndim(value) == 0:
            raise ArgumentError(
                f"batches: {name!r} is {describe(value)}; expected an array whose first axis counts the "
                "examples. numpy.stack(...) makes one of a list of examples."
            )
        expect_unmasked(value, f"batches: {name!r}")
        views.append(np.asarray(value).view())
        views[-1].flags.writeable = False
    first = next(iter(named))
    for name, view in zip(named, views, strict=True):
        if len(view) != len(views[0]):
            raise ArgumentError(
                f"batches: {first!r} has {len(views[0])} examples and {name!r} has {len(view)}; expected the "
                "same number in each."
            )
    if not len(views[0]):
        raise ArgumentError(f"batches: {first!r} has no examples, its shape is {views[0].shape}.")
    return views
