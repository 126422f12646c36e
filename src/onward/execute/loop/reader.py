"""How a training loop reads, whatever a person reads with.

A reader is any iterable of batches, or a callable that makes one. Reading gives it one method, ``epoch``, and
asks it after each batch where it stands, so that a training can be continued in the middle of an epoch.

>>> for batch, position in LoopReader(["first", "second"]).epoch(0):
...     print(batch, position)
first None
second None
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import chain
from typing import Any

import jax
import numpy as np

from onward.core.errors import ArgumentError
from onward.core.structure import describe
from onward.execute.loop.batches import Batches, batches
from onward.execute.loop.plain import plain, restored
from onward.execute.loop.prefetch import END, prefetched

__all__ = ["Batches", "LoopReader", "batches", "prefetched"]

SPELLINGS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))  # torch and Onward, grain


class LoopReader:
    """How a training loop reads: one method, ``epoch``, over whatever a person passes as ``reader``.

    Args:
        reader: any iterable, or a callable that returns one. A callable with one required argument is given
            the number of the epoch; a reader with ``set_epoch`` is told it.
        test: whether it is a test reader, whose epochs nobody counts, and which may have no batch for one of
            several processes.

    Attributes:
        length: the number of batches in an epoch, or None when ``len(reader)`` does not say.
        end: where a reader that stays from epoch to epoch stood when the last one was over; None when it does
            not say, or is made again for each.

    Raises:
        ArgumentError: nothing that yields batches.

    Example:
        >>> reading = LoopReader(lambda epoch: [epoch, epoch + 1])
        >>> list(reading.epoch(7))
        [(7, None), (8, None)]
        >>> list(LoopReader(batches([np.arange(2)], 1)).epoch(0))[0]
        ((array([0]),), {'epoch': 0, 'batch': 1})
    """

    def __init__(self, reader: Any, *, test: bool = False) -> None:
        self._who = "The test reader" if test else "The reader"
        self._test = test
        if isinstance(reader, Mapping | str | bytes | np.ndarray | jax.Array):
            raise ArgumentError(
                f"{self._who} is {describe(reader)}; expected an iterable of batches. For arrays in memory: "
                "batches(arrays, batch_size=32)."
            )
        self._make = _maker(reader)
        self._once = isinstance(reader, Iterator)
        self._begun = False
        self._target: Any = None
        self._ended = False
        self._keeps = True
        self._stays = isinstance(reader, Iterable)
        self.end: Any = None
        self.length = _length(reader)

    def epoch(self, number: int, skip: int = 0) -> Iterator[tuple[Any, Any]]:
        """Read one epoch, or what is left of it after ``restore``.

        Args:
            number: the epoch, counted from 0.
            skip: drop this many batches first.

        Returns:
            pairs of a batch and the reader's position after it, JSON data, or None when it offers none.

        Raises:
            ArgumentError: a reader without a batch, or one that can be read only once and was.
        """
        if self._once and self._begun:
            raise ArgumentError(
                f"The reader is an iterator, which can be read only once; epoch {number} needs a new one. "
                "Pass a callable that makes it: reader=lambda: read(files), or reader=read."
            )
        self._begun = True
        return self._pairs(number, skip)

    def restore(self, position: Any, *, ended: bool = False) -> None:
        """Let the next ``epoch`` continue at a position that ``epoch`` gave; None changes nothing.

        Args:
            position: what ``epoch`` gave beside a batch; or ``end``.
            ended: it is that of the end of an epoch, and the next one follows.
        """
        self._target, self._ended = position, ended

    def _pairs(self, number: int, skip: int) -> Iterator[tuple[Any, Any]]:
        target, ended, self._target, self._ended = self._target, self._ended, None, False
        iterator, source = self._open(number, target, ended)
        count = 0
        while (batch := _next(iterator, number, count, target is not None)) is not END:
            count += 1
            if count > skip:
                yield batch, self._position(source)
        self.end = self._position(source) if self._stays and source is not iterator else None
        if not count and target is None and not self._test:
            raise ArgumentError(
                f"The reader yielded no batch in epoch {number}. If it can be read only once, pass a "
                "callable that makes a new one: reader=lambda: read(files)."
            )
        if count < skip:
            raise ArgumentError(
                f"The reader yielded {count} batches in epoch {number}, and {skip} were to be skipped to "
                "continue where the training stood. Give the reader of that training."
            )

    def _open(self, number: int, target: Any, ended: bool) -> tuple[Iterator[Any], Any]:
        """An iterator at the target, and the object that says where it stands."""
        made = self._make(number)
        if not isinstance(made, Iterable):
            raise ArgumentError(f"The reader returned {describe(made)}; expected an iterable of batches.")
        self.length = _length(made)
        if hasattr(made, "set_epoch"):
            made.set_epoch(number)
        if _spelling(made):
            _restore(made, target)
            return _following(made) if ended else iter(made), made
        iterator = iter(made)
        if not ended:
            _restore(iterator, target)
        return iterator, iterator if _spelling(iterator) else None

    def _position(self, source: Any) -> Any:
        if source is None or not self._keeps:
            return None
        try:
            return plain(getattr(source, _spelling(source)[0])())
        except TypeError as error:
            self._keeps = False
            warnings.warn(
                f"The reader says where it stands, but {error}, which a checkpoint does not keep. A training "
                "that is resumed will read the batches it has had again, and drop them.",
                stacklevel=2,
            )
            return None


def position_of(reader: Any) -> Any:
    """Where a reader stands, as JSON data.

    >>> position_of(batches([np.arange(4)], 2))
    {'epoch': 0, 'batch': 0}

    Raises:
        ArgumentError: it does not tell, or in what JSON does not hold.
    """
    if not (spelling := _spelling(reader)):
        begun = isinstance(reader, Iterable) and not isinstance(reader, Iterator)
        advice = " Some keep it in their iterator: it = iter(reader), and then reader=it." if begun else ""
        raise ArgumentError(
            f"The reader is {describe(reader)}, which does not tell where it stands; expected state_dict and "
            f"load_state_dict, or get_state and set_state, as onward.batches has them.{advice}"
        )
    try:
        return plain(getattr(reader, spelling[0])())
    except TypeError as error:
        raise ArgumentError(
            f"The reader says where it stands, but {error}, which a checkpoint does not keep."
        ) from error


def move(reader: Any, position: Any) -> None:
    """Let a reader continue at a position of ``position_of``.

    Raises:
        ArgumentError: there is none, or the reader cannot take it.
    """
    if position is None:
        raise ArgumentError(
            "The checkpoint holds no position of a reader. Save it: checkpoints.save(state, step, "
            "reader=reader)."
        )
    _restore(reader, position)


def _maker(reader: Any) -> Callable[[int], Any]:
    """A function from the number of an epoch to an iterable."""
    if isinstance(reader, Iterable):
        return lambda number: reader
    if not callable(reader):
        raise ArgumentError(
            f"The reader is {describe(reader)}; expected an iterable of batches, or a callable that returns "
            "one."
        )
    required = _required(reader)
    if required > 1:
        raise ArgumentError(
            f"The reader takes {required} arguments; expected a callable of none, or of one, the number of "
            "the epoch. Bind the others: reader=lambda epoch: read(files, epoch)."
        )
    return reader if required else lambda number: reader()


def _required(function: Callable[..., Any]) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some builtins do not tell
        return 0
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters)


def _length(reader: Any) -> int | None:
    with suppress(TypeError, NotImplementedError):
        return len(reader)
    return None


def _next(iterator: Iterator[Any], number: int, count: int, restored: bool) -> Any:
    try:
        return next(iterator, END)
    except Exception as error:
        since = ", counted from where it was restored" if restored else ""
        error.add_note(f"The reader raised this in epoch {number} at batch {count}{since} (both from 0).")
        raise


def tells_where_it_stands(reader: Any) -> bool:
    """Whether a reader offers its position."""
    return bool(_spelling(reader))


def _spelling(reader: Any) -> tuple[str, ...]:
    """The names of the two methods by which a reader offers its position."""
    for pair in SPELLINGS:
        if all(callable(getattr(reader, name, None)) for name in pair):
            return pair
    return ()


def _following(reader: Any) -> Iterator[Any]:
    """The epoch after the one at whose end a reader stands, which some still have to come to."""
    iterator = iter(reader)
    first = next(iterator, END)
    return iter(reader) if first is END else chain([first], iterator)


def _restore(reader: Any, target: Any) -> None:
    if target is None:
        return
    spelling = _spelling(reader)
    if not spelling:
        raise ArgumentError(
            f"There is a position to continue at, {json.dumps(target)[:80]}, and the reader, "
            f"{describe(reader)}, has no load_state_dict (or set_state) to take it. Give the reader of "
            "that training."
        )
    getattr(reader, spelling[1])(restored(target))
