"""A loop of one's own, for the callbacks of a Trainer: it counts steps, keeps a History and tells of events.

>>> from onward.execute.loop.events import EarlyStop
>>> with Loop([EarlyStop("test_loss", patience=2)]) as loop:
...     for epoch in range(9):
...         for _ in range(10):
...             loop.step(loss=1.0)
...         loop.test(test_loss=0.5)
...         loop.epoch()
>>> loop.steps, loop.stopped
(30, 'test_loss has not improved on 0.5 in 2 tests')
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, Self

from onward.core.errors import ArgumentError
from onward.core.structure import describe
from onward.execute.loop.events import Event, EventKind, StopTraining
from onward.execute.loop.history import History, expect_metrics
from onward.execute.out import Out
from onward.execute.outs import Outs
from onward.execute.state import State


class Loop:
    """A History and callbacks around the steps of a loop that you write, as a Trainer has around its own.

    Callbacks are functions of an ``Event``, the same ones as a Trainer's; the ``trainer`` of their events is
    this Loop. One ends the loop by raising ``StopTraining``, which ends the ``with`` block without an error.
    Losses are kept, not read, so that the loop does not wait for the device. After an error, too, callbacks
    hear of the end.

    Args:
        callbacks: functions of an Event.

    Attributes:
        history: the metrics of every step, and what ``watch`` looked at.
        steps: how many steps were noted.
        epochs: how many epochs were ended.
        state: the State that was given last, for callbacks that read it.
        stopped: why a callback ended the loop; None unless one did.

    Raises:
        ArgumentError: a callback that cannot be called; a step or a metric of another form.

    Example:
        >>> import jax.numpy as jnp, onward as ow
        >>> step = ow.compile(ow.SGD(0.1).minimize(lambda w, x: w * x, jnp.ones(()), jnp.ones(())))
        >>> state = step.init(jnp.ones(()))
        >>> with ow.Loop() as loop:
        ...     for x in (1.0, 2.0):
        ...         state, out = step(state, x)
        ...         loop.step(out, state)
        >>> loop.history
        History(2 steps: loss 1 -> 1.8)
    """

    def __init__(self, callbacks: Sequence[Callable[[Event], Any]] = ()) -> None:
        if not isinstance(callbacks, Iterable):
            raise ArgumentError(f"Loop: callbacks is {describe(callbacks)}; expected a list of functions.")
        callbacks = tuple(callbacks)
        for callback in callbacks:
            if not callable(callback):
                raise ArgumentError(f"Loop: {describe(callback)} is not a function of an Event.")
        self.callbacks = callbacks
        self.history = History()
        self.steps = self.epochs = 0
        self.state: State | None = None
        self.stopped: str | None = None
        self._batch = 0
        self._ending: StopTraining | None = None

    def __enter__(self) -> Self:
        try:
            self._tell(EventKind.BEGIN, {})
        except StopTraining as reason:  # only what is raised within the block ends the block
            self._ending = reason
        return self

    def step(self, out: Out | Outs | None = None, state: State | None = None, **metrics: Any) -> None:
        """Note a step, or the steps of a ``step.run``.

        Args:
            out: what the step returned; of ``step.run``, whose losses are waited for, each step is noted.
            state: the State after it, for callbacks that look at one.
            metrics: more scalars by name; they may still be computing.
        """
        if out is not None and not isinstance(out, Out | Outs):
            raise ArgumentError(
                f"Loop.step: the first argument is {describe(out)}; expected what the step returned "
                "beside the State, loop.step(out, state). Give numbers by name: loop.step(loss=0.5)."
            )
        if self._ending is not None:
            raise self._ending
        self.state = state if state is not None else self.state
        reasons = []
        for one in out if isinstance(out, Outs) else (out,):
            try:
                self._step(one, metrics)
            except StopTraining as reason:  # the steps of a run are made, all of them, and so are noted
                reasons.append(reason)
        if reasons:
            raise reasons[0]

    def test(self, **metrics: Any) -> None:
        """Note what a test measured after the last step, or before the first one."""
        if self.history:
            self.history.amend(**metrics)
        else:
            self.history.record(step=self.steps, epoch=self.epochs, **metrics)
        self._tell(EventKind.TEST, metrics)

    def epoch(self, **metrics: Any) -> None:
        """Note that an epoch is over."""
        self._tell(EventKind.EPOCH, metrics)
        self.epochs, self._batch = self.epochs + 1, 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, StopTraining):
            self.stopped = str(error)
        # What ended the loop is told, not what a callback says of it; and all callbacks hear of the end.
        with suppress(StopTraining if error is None else Exception), ExitStack() as told:
            for callback in reversed(self.callbacks):
                told.callback(callback, self._event(EventKind.END, {}))
        return isinstance(error, StopTraining)

    def _step(self, out: Out | None, metrics: Mapping[str, Any]) -> None:
        self.steps, self._batch = self.steps + 1, self._batch + 1
        if out is not None and out.results.loss is not None:
            metrics = {"loss": out.loss, **metrics}
        expect_metrics(metrics)
        self.history.record(step=self.steps, epoch=self.epochs, **metrics)
        if out is not None:
            self.history.watched.record(out.watched, step=self.steps, epoch=self.epochs)
        self._tell(EventKind.STEP, metrics)

    def _tell(self, kind: EventKind, metrics: Mapping[str, Any]) -> None:
        event = self._event(kind, metrics)
        for callback in self.callbacks:
            callback(event)

    def _event(self, kind: EventKind, metrics: Mapping[str, Any]) -> Event:
        return Event(kind, self.epochs, self._batch, self.steps, metrics, self)
