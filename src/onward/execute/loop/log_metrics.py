"""The metrics of every step for a tracker such as W&B or MLflow, none of which is imported here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from onward.core.structure import expect_count
from onward.execute.loop.events import Event, EventKind


class log_metrics:  # noqa: N801
    """A callback that passes the metrics of every step and test on, many at once: the loop waits for none.

    ``write`` is called as ``write({"loss": 0.5}, step=3)``: ``wandb.init(...).log`` and
    ``mlflow.log_metrics`` are such functions. Values are floats.

    Args:
        write: a function of a dictionary of numbers, and of the step by name.
        every: how many steps lie between two writes.

    Raises:
        ArgumentError: ``every`` is not a whole number above 0.

    Example:
        >>> import onward as ow
        >>> with ow.Loop([ow.log_metrics(lambda found, step: print(step, found))]) as loop:
        ...     loop.step(loss=0.5)
        ...     loop.test(test_loss=0.75)
        1 {'loss': 0.5}
        1 {'test_loss': 0.75}
    """

    def __init__(self, write: Callable[..., Any], every: int = 100) -> None:
        expect_count(every, "log_metrics: every")
        self.write, self.every = write, every
        self._waiting: deque[tuple[int, Mapping[str, Any]]] = deque()

    def __call__(self, event: Event) -> None:
        """Take note of a step or a test; pass on what has come when it is much, or an epoch is over."""
        if event.kind in (EventKind.STEP, EventKind.TEST) and event.metrics:
            self._waiting.append((event.step, event.metrics))
        if event.kind in (EventKind.EPOCH, EventKind.END) or len(self._waiting) >= self.every:
            while self._waiting:  # what could not be written waits for the next time
                step, metrics = self._waiting[0]
                self.write({name: float(value) for name, value in metrics.items()}, step=step)
                self._waiting.popleft()
