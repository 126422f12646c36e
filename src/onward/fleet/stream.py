"""The batches of one trainer, numbered, so that another process can go on where one was killed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from onward.core.errors import ClusterError
from onward.execute.loop.reader import LoopReader


class Stream:
    """The batches that a trainer reads, over all epochs.

    A reader with two required arguments is called with the trainer's number and how many there are, and
    yields the trainer's own batches. Any other reader yields those of all: trainer 0 takes the first one,
    trainer 1 the second one, and so on, from epoch to epoch.

    Args:
        reader: as for ``train``.
        trainer: the number of this one.
        trainers: how many.
        epochs: how often to read the data.

    Example:
        >>> stream = Stream([10, 11, 12], trainer=0, trainers=2, epochs=2)
        >>> list(stream.at(0)), list(stream.at(1))
        ([10, 12, 11], [12, 11])
    """

    def __init__(self, reader: Any, trainer: int, trainers: int, epochs: int) -> None:
        self.trainer, self.trainers, self.epochs = trainer, trainers, epochs
        self.own = takes_place(reader)
        self.reading = LoopReader(_bound(reader, trainer, trainers) if self.own else reader)
        self.length = self.reading.length  # None for a callable: its epochs may differ

    def at(self, number: int) -> Iterator[Any]:
        """The batches from this one on.

        Raises:
            ClusterError: the reader raised; the message names trainer and batch.
        """
        step, first = (1, 0) if self.own else (self.trainers, self.trainer)
        wanted = first + number * step
        count = 0
        for epoch in range(self.epochs):
            for batch in self._epoch(epoch, count, wanted):
                if count == wanted:
                    yield batch
                    wanted += step
                count += 1

    def _epoch(self, epoch: int, count: int, wanted: int) -> Iterator[Any]:
        """The batches of an epoch; anything in the place of those before the one that is wanted."""
        if epoch and self.length is not None and count + self.length <= wanted:
            yield from range(self.length)
            return
        try:
            for batch, _ in self.reading.epoch(epoch):
                count += 1
                yield batch
        except Exception as error:
            said = [f"{type(error).__name__}: {str(error).rstrip('.')}.", *getattr(error, "__notes__", [])]
            raise ClusterError(f"The reader of trainer {self.trainer} raised {' '.join(said)}") from error


def takes_place(reader: Any) -> bool:
    """Whether a reader is called with a trainer's number and how many there are."""
    if not callable(reader):
        return False
    try:
        parameters = inspect.signature(reader).parameters.values()
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is inspect.Parameter.empty for p in parameters) == 2


def _bound(reader: Any, trainer: int, trainers: int) -> Any:
    return lambda: reader(trainer, trainers)
