"""Times recorded by JAX's profiler: how long each instruction took, all threads together."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax

Events = list[tuple[str, float, float]]


@contextmanager
def recorded(module: str) -> Iterator[Mapping[str, float]]:
    """Records what runs meanwhile; when over, holds the nanoseconds of each instruction of this module."""
    spent: dict[str, float] = {}
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            yield spent
        finally:
            jax.profiler.stop_trace()
        with warnings.catch_warnings():  # newer JAX: a type of its reader names no module
            warnings.simplefilter("ignore", DeprecationWarning)
            for file in Path(folder).rglob("*.xplane.pb"):
                for events in _lines(jax.profiler.ProfileData.from_file(str(file)), module):
                    for name, time in own_time(events).items():
                        spent[name] = spent.get(name, 0.0) + time


def _lines(data: Any, module: str) -> Iterator[Events]:
    """For each thread or stream, the instructions of a module that ran on it."""
    for plane in data.planes:
        for line in plane.lines:
            events: Events = []
            for event in line.events:
                told = dict(event.stats)
                if told.get("hlo_module") == module and "hlo_op" in told:
                    events.append((str(told["hlo_op"]), event.start_ns, event.duration_ns))
            yield events


def own_time(events: Iterable[tuple[str, float, float]]) -> Mapping[str, float]:
    """The time of each name without what ran inside of it on the same thread.

    >>> own_time([("loop", 0.0, 10.0), ("add", 2.0, 3.0), ("add", 6.0, 3.0)])
    {'loop': 4.0, 'add': 6.0}
    """
    spent: dict[str, float] = {}
    open_: list[tuple[str, float]] = []
    for name, start, duration in sorted(events, key=lambda event: (event[1], -event[2])):
        while open_ and open_[-1][1] <= start:
            open_.pop()
        spent[name] = spent.get(name, 0.0) + duration
        if open_:
            spent[open_[-1][0]] -= duration
        open_.append((name, start + duration))
    return spent
