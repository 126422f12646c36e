"""The records of ``watch`` as files that TensorBoard reads, after the training or while it runs.

One scalar for each statistic, tagged ``gradient_norm/layers/0/w`` so that TensorBoard shows a section for
each statistic; histograms as histograms, in the bins that the step counted; what the training measured
itself, such as the loss, by its own name.
"""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from typing import Any

import numpy as np

from onward.core.extras import require
from onward.develop.watch.statistics import Histogram
from onward.execute.loop.events import Event, EventKind
from onward.execute.loop.history import History
from onward.execute.loop.watch_history import WatchedStep
from onward.explain.watched.moments import Source, watched_steps


def to_tensorboard(source: Source, folder: str | PathLike[str]) -> None:
    """Write what was watched, and the metrics of a Trainer's history, as files that TensorBoard reads.

    Args:
        source: ``trainer.history``, a ``WatchHistory``, or a list of ``out.watched``.
        folder: where to write; ``tensorboard --logdir folder`` shows it.

    Raises:
        ArgumentError: there is nothing to write.
        MissingExtraError: tensorboardX is not installed.

    Example:
        >>> import tempfile, os
        >>> from onward.execute.loop.history import History
        >>> history = History()
        >>> history.record(step=1, epoch=0, loss=0.5)
        >>> folder = tempfile.mkdtemp()
        >>> to_tensorboard(history, folder)
        >>> len(os.listdir(folder))
        1
    """
    metrics = source if isinstance(source, History) else History()
    measured = [name for name in metrics if name not in ("step", "epoch")]
    watched = metrics.watched if measured and not len(metrics.watched) else watched_steps(source)
    with _writer(folder) as writer:
        for name in measured:
            for step, value in zip(*metrics.of(name), strict=True):
                writer.add_scalar(name, float(value), int(step))
        for moment in watched:
            _write(writer, moment, watched.subjects)


class TensorBoard:
    """A callback that writes what is watched and the metrics of every step while the training runs.

    Args:
        folder: where to write; ``tensorboard --logdir folder`` shows it.
        every: how many steps lie between two writes. What the steps returned waits until then, so that the
            training does not wait for it.

    Raises:
        MissingExtraError: tensorboardX is not installed.

    Example:
        >>> import tempfile, os, numpy as np, onward as ow
        >>> def network():
        ...     return ow.layer.mse(ow.layer.fc(ow.data("x", (None, 2)), 1), ow.data("y", (None, 1)))
        >>> x = np.ones((8, 2), "float32")
        >>> folder = tempfile.mkdtemp()
        >>> trainer = ow.train(network, [(x, x[:, :1])], epochs=3, callbacks=[TensorBoard(folder)])
        >>> len(os.listdir(folder))
        1
    """

    def __init__(self, folder: str | PathLike[str], every: int = 100) -> None:
        self.folder, self.every = folder, every
        self._writer: Any = None
        self._done = 0
        self._metrics: list[tuple[int, Mapping[str, Any]]] = []

    def __call__(self, event: Event) -> None:
        """Take note of a step; write every so many, and when an epoch or the training is over."""
        if event.kind is EventKind.BEGIN:
            self._writer = self._writer or _writer(self.folder)
            self._done = len(event.trainer.history.watched)
        elif event.kind in (EventKind.STEP, EventKind.TEST):
            self._metrics.append((event.step, event.metrics))
        if event.kind in (EventKind.EPOCH, EventKind.END) or len(self._metrics) >= self.every:
            self.write(event.trainer.history)
        if event.kind is EventKind.END:
            self._writer.close()
            self._writer = None

    def write(self, history: History) -> None:
        """Write what has come since the last time."""
        for step, metrics in self._metrics:
            for name, value in metrics.items():
                self._writer.add_scalar(name, float(np.asarray(value)), step)
        self._metrics.clear()
        new = history.watched[self._done :]
        for moment in new:
            _write(self._writer, moment, history.watched.subjects)
        self._done += len(new)
        self._writer.flush()


def _writer(folder: str | PathLike[str]) -> Any:
    return require("tensorboardX", "tensorboard").SummaryWriter(fspath(folder))


def _write(writer: Any, moment: WatchedStep, subjects: Mapping[str, tuple[str, str]]) -> None:
    """One step of what was watched."""
    for label, found in moment.seen.items():
        role, subject = subjects[label]
        section = "" if role == "value" else f"{role}_"
        for name, value in found.items():
            tag = f"{section}{name}/{subject}"
            if isinstance(value, Histogram):
                _write_histogram(writer, tag, value, moment.step)
            else:
                for i, number in enumerate(np.ravel(value)):
                    place = f"/{i}" if np.ndim(value) else ""
                    writer.add_scalar(f"{tag}{place}", float(number), moment.step)


def _write_histogram(writer: Any, tag: str, found: Histogram, step: int) -> None:
    """A histogram in the bins that it has; sums are those of the middles of the bins."""
    edges = found.edges
    middles = (edges[1:] + edges[:-1]) / 2
    writer.add_histogram_raw(
        tag,
        min=found.low,
        max=found.high,
        num=int(found.counts.sum()),
        sum=float((found.counts * middles).sum()),
        sum_squares=float((found.counts * middles**2).sum()),
        bucket_limits=edges[1:].tolist(),
        bucket_counts=found.counts.tolist(),
        global_step=step,
    )
