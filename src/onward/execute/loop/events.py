"""The events of a training loop for its callbacks, and a callback that ends one that no longer improves.

A callback is any function of one Event. It reads; to end the training it raises StopTraining:

>>> def until_good(event):
...     if event.metrics.get("test_loss", 1.0) < 0.1:
...         raise StopTraining("good enough")
>>> until_good(Event(EventKind.TEST, epoch=2, batch=0, step=300, metrics={"test_loss": 0.2}, trainer=None))
>>> until_good(Event(EventKind.TEST, epoch=3, batch=0, step=400, metrics={"test_loss": 0.09}, trainer=None))
Traceback (most recent call last):
    ...
onward.execute.loop.events.StopTraining: good enough
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from onward.core.errors import ArgumentError, nearest
from onward.core.structure import describe, expect_count
from onward.core.words import Words


class EventKind(Words):
    """When a callback is called."""

    BEGIN = "begin"
    STEP = "step"
    EPOCH = "epoch"
    TEST = "test"
    CHECKPOINT = "checkpoint"
    END = "end"


@dataclass(frozen=True)
class Event:
    """A moment of a training, as a callback sees it.

    Attributes:
        kind: what has just happened.
        epoch: the epoch, counted from 0.
        batch: how many batches of this epoch are done.
        step: how many steps are done in all.
        metrics: what is known at this moment, scalars. Those of a step may still be computing on the
            device; ``float(value)`` waits for one.
        trainer: who calls.
    """

    kind: EventKind
    epoch: int
    batch: int
    step: int
    metrics: Mapping[str, Any]
    trainer: Any


class StopTraining(Exception):  # noqa: N818
    """Raised by a callback to end the training in good order; no error. The message is the reason."""


class EarlyStop:
    """A callback that ends the training when a metric has not improved for a while.

    It looks at the metric at the end of each epoch or after each test, wherever it appears first. A value
    that is not a number counts as no improvement.

    Args:
        monitor: the name of the metric.
        patience: after how many epochs (or tests) in a row without improvement to stop.
        mode: ``"min"`` when smaller is better, ``"max"`` when larger is.
        min_delta: a change must be larger than this to count as an improvement.

    Example:
        >>> stop = EarlyStop("test_loss", patience=2)
        >>> for epoch, value in enumerate([0.5, 0.3, 0.4, 0.35]):
        ...     stop(Event(EventKind.TEST, epoch, 0, 10 * epoch, {"test_loss": value}, None))
        Traceback (most recent call last):
            ...
        onward.execute.loop.events.StopTraining: test_loss has not improved on 0.3 in 2 tests
    """

    _kind: EventKind | None
    _lacking: dict[EventKind, Mapping[str, Any]]

    def __init__(
        self, monitor: str = "test_loss", patience: int = 3, mode: str = "min", min_delta: float = 0.0
    ) -> None:
        _check(monitor, patience, mode, min_delta)
        self.monitor, self.patience, self.mode, self.min_delta = monitor, patience, mode, min_delta
        self._forget()

    def __call__(self, event: Event) -> None:
        """Look at an event.

        Raises:
            StopTraining: the metric has not improved for ``patience`` epochs or tests.
            ArgumentError: no epoch and no test has such a metric.
        """
        if event.kind is EventKind.STEP:
            return
        if event.kind is EventKind.BEGIN and event.step == 0:
            self._forget()
        elif event.kind in (EventKind.EPOCH, EventKind.TEST):
            self._look(event)
        elif event.kind is EventKind.END:
            self._complain()

    def state_dict(self) -> dict[str, Any]:
        """The state for a Trainer's checkpoint: a resumed training stops when the whole one would have."""
        return {"best": self._best, "waited": self._waited, "kind": self._kind}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state_dict`` gave."""
        self._best, self._waited = float(state["best"]), int(state["waited"])
        self._kind = None if state["kind"] is None else EventKind(state["kind"])

    def _forget(self) -> None:
        self._best = inf if self.mode == "min" else -inf
        self._waited = 0
        self._kind = None
        self._lacking = {}

    def _look(self, event: Event) -> None:
        if self.monitor in event.metrics:
            if self._kind in (None, event.kind):
                self._kind = event.kind
                self._compare(_number(self.monitor, event.metrics[self.monitor]))
        elif self._kind is None:
            self._lacking[event.kind] = event.metrics
            if len(self._lacking) == 2:
                self._complain()

    def _compare(self, value: float) -> None:
        gain = self._best - value if self.mode == "min" else value - self._best
        if gain > self.min_delta:
            self._best, self._waited = value, 0
            return
        self._waited += 1
        if self._waited >= self.patience:
            self._waited = 0  # a training that is continued all the same gets the same patience again
            moments = f"{self._kind}{'s' if self.patience > 1 else ''}"
            raise StopTraining(
                f"{self.monitor} has not improved on {self._best:.6g} in {self.patience} {moments}"
            )

    def _complain(self) -> None:
        """Say that the metric never appears, once that is certain: every kind of moment was seen."""
        if self._kind is not None or not self._lacking:
            return
        names = {name: None for metrics in self._lacking.values() for name in metrics}
        hint = "" if EventKind.TEST in self._lacking else " No test ran: metrics of tests need test data."
        raise ArgumentError(
            f"EarlyStop: there is no metric {self.monitor!r}. {nearest(self.monitor, names)}{hint}"
        )


def _check(monitor: Any, patience: Any, mode: Any, min_delta: Any) -> None:
    if not isinstance(monitor, str):
        raise ArgumentError(
            f"EarlyStop: monitor is {describe(monitor)}; expected the name of a metric, such as 'test_loss'."
        )
    expect_count(patience, "EarlyStop: patience")
    if mode not in ("min", "max"):
        raise ArgumentError(
            f"EarlyStop: mode is {describe(mode)}; expected 'min' (smaller is better) or 'max' (larger is "
            "better)."
        )
    if not isinstance(min_delta, int | float) or not 0 <= min_delta < inf:
        raise ArgumentError(f"EarlyStop: min_delta is {describe(min_delta)}; expected a number, at least 0.")


def _number(name: str, value: Any) -> float:
    if np.shape(value) != ():
        raise ArgumentError(f"EarlyStop: {name!r} is {describe(value)}; expected one number. Watch its mean.")
    return float(value)
