"""A training as it goes: a picture in a notebook, one line in a terminal, lines every so often in a log.

The loop does not wait for it: it looks at the clock, and now and then at what the device has computed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from importlib import import_module
from math import isfinite
from os import PathLike
from pathlib import Path
from shutil import get_terminal_size
from time import monotonic
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np

from onward.core.errors import StateError
from onward.core.show import human_bytes
from onward.execute.loop.events import Event, EventKind
from onward.explain.files import save_picture
from onward.explain.watched.live_chart import Curve, LiveChart

RATE, GRADIENTS = "learning_rate", "gradient norm"
_SHOWN, _LOGGED = 0.5, 10.0  # seconds between two looks: where the picture is replaced, and in a log
_BARS = "▁▂▃▄▅▆▇█"


class Live:
    """A callback that shows loss, learning rate, gradient norms, throughput and memory while they change.

    A notebook shows curves, a terminal one line that is written over, anything else a line every ten seconds.
    Gradient norms are those that ``watch(program, gradients=True)`` looks at. The learning rate is the one in
    the State; with a schedule, watch it: ``watch(program, "learning_rate", statistics="mean")``.

    Args:
        every: seconds between two looks; None: 0.5, and 10 where lines are kept.
        file: where lines are written; None: stdout.

    Example:
        >>> import numpy as np, onward as ow
        >>> def network():
        ...     return ow.layer.mse(ow.layer.fc(ow.data("x", (None, 2)), 1), ow.data("y", (None, 1)))
        >>> x = np.ones((8, 2), "float32")
        >>> live = Live()
        >>> trainer = ow.train(network, [(x, x[:, :1])], epochs=3, callbacks=[live])  # doctest: +ELLIPSIS
        step 1  loss ... memory ...
        step 3  loss ... memory ...
        >>> [curve.name for curve in live.curves]
        ['loss', 'learning_rate']
    """

    def __init__(self, every: float | None = None, file: TextIO | None = None) -> None:
        self.every, self.file = every, file
        self.curves: tuple[Curve, ...] = ()
        self._rates = Curve(RATE, [], [])
        self._rate: tuple[int, Any] | None = None
        self._handle: Any = None
        self._due = self._began = self._looked = monotonic()
        self._first = self._before = 0
        self._width = 0
        self._facts = ""
        self._closed = False
        self._always: set[str] | None = None  # the metrics of every step, of which NaN is a number

    def __call__(self, event: Event) -> None:
        """Look at the clock, and show what is known when it is time, or when the training is over."""
        if event.kind is EventKind.STEP:
            names = event.metrics.keys()
            self._always = set(names) if self._always is None else self._always & names
        if event.kind is EventKind.BEGIN:
            self._begin(event.step)
        elif event.kind is EventKind.END:
            self._look(event, last=True)
        elif monotonic() >= self._due:
            self._look(event)

    def save(self, path: str | PathLike[str], dark: bool = False) -> Path:
        """Write the curves as they were last shown: ``.svg``, ``.html`` or ``.png``.

        Raises:
            ArgumentError: the name ends otherwise.
            MissingExtraError: a PNG, and resvg_py is not installed.
        """
        return save_picture(LiveChart(self.curves, self._facts), path, dark)

    def _begin(self, step: int) -> None:
        self._due = self._began = self._looked = monotonic()
        self._first = self._before = step
        self._handle, self._width, self._closed = None, 0, False

    def _look(self, event: Event, last: bool = False) -> None:
        trainer = event.trainer
        self._read_rate(event.step, getattr(trainer, "state", None), last)
        columns = dict(trainer.history) if last else trainer.history.known()
        moments = trainer.history.watched if last else trainer.history.watched.known()
        self.curves = _curves(columns, moments, self._rates, self._always or ())
        self._facts = "  ".join([f"step {event.step:,}", *self._use(event.step, last)])
        self._show(last)
        if self.every is None:
            self._due = monotonic() + (_LOGGED if self._logs() else _SHOWN)
        else:
            self._due = monotonic() + self.every

    def _read_rate(self, step: int, state: Any, last: bool) -> None:
        """Note the learning rate of the look before, and copy that of now, which the next step donates."""
        if self._rate is not None and (last or self._rate[1].is_ready()):
            self._rates.steps.append(float(self._rate[0]))
            self._rates.values.append(float(self._rate[1]))
            self._rate = None
        if self._rate is None and state is not None and RATE in state:
            try:
                self._rate = step, jnp.array(state[RATE], copy=True)
            except StateError:  # another thread's step has taken it
                return
            if last:
                self._read_rate(step, None, last)

    def _use(self, step: int, last: bool) -> tuple[str, str]:
        """Steps per second since the last look, at the end over all, and the memory in use."""
        since, before = (self._began, self._first) if last else (self._looked, self._before)
        self._looked, self._before = monotonic(), step
        return f"{(step - before) / max(self._looked - since, 1e-9):.4g} steps/s", f"memory {_memory()}"

    def _show(self, last: bool) -> None:
        if self._closed:
            return
        try:
            if self.file is None and _in_notebook():
                self._draw()
            else:
                self._write(last)
        except (OSError, ValueError):  # the terminal is gone; the training goes on
            self._closed = True

    def _draw(self) -> None:
        chart = LiveChart(self.curves, self._facts)
        if self._handle is None:
            self._handle = import_module("IPython.display").display(chart, display_id=True)
        else:
            self._handle.update(chart)

    def _write(self, last: bool) -> None:
        """One line: it is written over in a terminal, and ends where it is kept."""
        file = self.file or sys.stdout
        if file is None:
            return
        step, speed, memory = self._facts.split("  ")
        line = "  ".join(
            [step, *map(_worded, self.curves[:1]), speed, *map(_worded, self.curves[1:]), memory]
        )
        encoding = getattr(file, "encoding", None) or "utf-8"
        line = line.encode(encoding, "replace").decode(encoding)  # bars in a terminal that has none
        if self._logs():
            file.write(f"{line}\n")
        else:
            line = line[: get_terminal_size().columns - 1]
            file.write(f"\r{line.ljust(self._width)}" + ("\n" if last else ""))
            self._width = len(line)
        file.flush()

    def _logs(self) -> bool:
        """Whether what is written stays: it is neither a notebook's picture nor a line of a terminal."""
        if self.file is None and _in_notebook():
            return False
        file = self.file or sys.stdout
        try:
            return file is None or not file.isatty()
        except (AttributeError, ValueError):  # not quite a file, or a closed one
            return True


def _memory() -> str:
    """The bytes in use on the first device, where it tells; the process's own elsewhere."""
    held = (jax.local_devices()[0].memory_stats() or {}).get("bytes_in_use")
    if held is None:
        try:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
        except OSError:
            return "unknown"
        held = pages * os.sysconf("SC_PAGE_SIZE")
    return human_bytes(held)


def _curves(
    columns: Mapping[str, Any], moments: Any, rates: Curve, always: Collection[str]
) -> tuple[Curve, ...]:
    """The metrics, the learning rate and the norm of all watched gradients, over the steps."""
    found = {name: Curve(name, columns["step"], values) for name, values in columns.items()}
    found |= _watched(moments)
    if RATE not in found and len(rates.steps):
        found[RATE] = rates
    shown = (curve for name, curve in found.items() if name not in ("step", "epoch"))
    made = (curve.measured(curve.name in always and curve.name in columns) for curve in shown)
    return tuple(curve for curve in made if len(curve.steps))


def _watched(moments: Any) -> dict[str, Curve]:
    """The norm of all gradients that were looked at in a step, and the mean of a watched learning rate."""
    norms, rates = Curve(GRADIENTS, [], []), Curve(RATE, [], [])
    for moment in moments:
        found = [s["norm"] for name, s in moment.seen.items() if name.startswith("grad(") and "norm" in s]
        if found:
            norms.add(moment.step, float(np.linalg.norm(found)))
        if "mean" in moment.seen.get(RATE, {}):
            rates.add(moment.step, float(moment.seen[RATE]["mean"]))
    return {curve.name: curve for curve in (norms, rates) if len(curve.steps)}


def _worded(curve: Curve) -> str:
    bars = f" {sparkline(curve.values)}" if curve.name == "loss" else ""
    return f"{curve.name} {curve.values[-1]:.4g}{bars}"


def sparkline(values: Any, width: int = 12) -> str:
    """Numbers as bars of a text, each the mean of its share; logarithms where they span much.

    >>> sparkline([8.0, 4.0, 2.0, 1.0])
    '█▄▂▁'
    """
    good = [x for x in values if isfinite(x)]
    if good and 0 < 20 * min(good) < max(good):
        good = np.log(good).tolist()
    means = [float(np.mean(part)) for part in np.array_split(good, min(width, len(good)))] if good else []
    low, high = min(means, default=0.0), max(means, default=0.0)
    across = (high - low) or 1.0
    return "".join(_BARS[round((x - low) / across * (len(_BARS) - 1))] for x in means)


def _in_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and "IPKernelApp" in shell.config
