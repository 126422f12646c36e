"""A progress bar that never makes the device wait.

A bar that prints the loss of every step turns an asynchronous loop into a synchronous one. This one looks at
the clock, ten times a second at the metrics, and shows only what is already computed, if need be
of an earlier step.

>>> progress = Progress(total=100, enabled=False, description="train")
>>> progress.advance(32, loss=0.25)
>>> progress.steps, progress.examples
(1, 32)
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from time import monotonic
from typing import Any
from weakref import finalize

from tqdm.std import tqdm

INTERVAL = 0.1  # seconds between two looks


class Progress:
    """Epoch, steps and examples per second, and the latest metrics, in a terminal or a notebook.

    Args:
        total: steps in all, or None if that is unknown.
        enabled: whether to show anything; None: when stderr is a terminal, or in a notebook.
        description: stands before the bar.
        start: how many of these steps were done before, in a training that is resumed.

    Example:
        >>> progress = Progress(total=200, enabled=None, description="train")
        >>> progress.epoch(0, of=2)
        >>> for _ in range(200):
        ...     progress.advance(32, loss=0.25)
        >>> progress.message("test_loss 0.31")
        >>> progress.close()
    """

    def __init__(self, total: int | None, enabled: bool | None, description: str, start: int = 0) -> None:
        self.steps = start
        self.examples = 0
        self.description = description
        self._start = start
        self._due = monotonic()
        self._metrics = ""
        self._waiting: Mapping[str, Any] | None = None
        shown = _watched() if enabled is None else enabled
        self._bar = _made(total, start, description) if shown else None
        if (
            self._bar is not None
        ):  # a bar that is open when Python exits may crash it (tqdm in CPython 3.13.0)
            finalize(self, self._bar.close)

    def advance(self, examples: int, /, **latest: Any) -> None:
        """Count one step.

        Args:
            examples: how many examples it took.
            **latest: its metrics, scalars that may still be computing; they are not waited for.
        """
        self.steps += 1
        self.examples += examples
        if self._bar is not None and monotonic() >= self._due:
            self._show(latest)

    def epoch(self, number: int, of: int | None = None) -> None:
        """Show which epoch this is, counted from 0 and shown from 1."""
        if self._bar is not None:
            text = f"{self.description} epoch {number + 1}" + ("" if of is None else f"/{of}")
            self._bar.set_description(text.lstrip(), refresh=False)

    def message(self, text: str) -> None:
        """Write a line above the bar."""
        if self._bar is not None:
            self._bar.write(text, file=self._bar.fp)

    def close(self) -> None:
        """Show the last counts and leave the bar standing; a second call does nothing."""
        if self._bar is not None:
            self._show({})
            self._bar.close()
            self._bar = None

    def _show(self, latest: Mapping[str, Any]) -> None:
        bar: Any = self._bar
        ready = next((m for m in (latest, self._waiting) if m and _ready(m)), None)
        if ready is not None:
            self._metrics = _text(ready)
            self._waiting = None
        if not self._waiting and latest is not ready:
            self._waiting = latest
        bar.set_postfix_str(", ".join(filter(None, [self._speed(bar), self._metrics])), refresh=False)
        bar.update(self.steps - bar.n)
        self._due = monotonic() + INTERVAL

    def _speed(self, bar: tqdm[Any]) -> str:
        """Examples per second: tqdm's smoothed steps per second, times the examples in a step."""
        facts = bar.format_dict
        done = self.steps - self._start
        rate = facts["rate"] or (done / facts["elapsed"] if facts["elapsed"] else 0.0)
        return f"{tqdm.format_sizeof(rate * self.examples / done)} examples/s" if done else ""


def _ready(metrics: Mapping[str, Any]) -> bool:
    return all(value.is_ready() for value in metrics.values() if hasattr(value, "is_ready"))


def _text(metrics: Mapping[str, Any]) -> str:
    """Metrics with four significant digits.

    >>> _text({"loss": 0.0123456, "accuracy": 1})
    'loss 0.01235, accuracy 1'
    """
    return ", ".join(f"{name} {float(value):.4g}" for name, value in metrics.items())


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config


def _watched() -> bool:
    return _in_notebook() or (sys.stderr is not None and sys.stderr.isatty())


def _made(total: int | None, start: int, description: str) -> tqdm[Any]:
    """A bar of tqdm's; of its notebook kind only where ipywidgets can show it."""
    rich = _in_notebook() and find_spec("ipywidgets") is not None
    kind = import_module("tqdm.notebook").tqdm if rich else _Bar
    bar: tqdm[Any] = kind(
        total=total,
        initial=start,
        desc=description,
        unit="step",
        mininterval=0,
        miniters=0,
        dynamic_ncols=True,
    )
    return bar


class _Bar(tqdm):  # type: ignore[misc]
    """tqdm without its thread that watches over slow bars."""

    monitor_interval = 0
