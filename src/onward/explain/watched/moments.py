"""The watched steps of what a person has at hand: a Trainer's history, or the list of ``outs.watched``."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from onward.core.errors import ArgumentError, UnknownNameError, nearest
from onward.core.structure import describe
from onward.core.walk import listed
from onward.develop.watch.reading import Watched
from onward.execute.loop.history import History
from onward.execute.loop.watch_history import WatchHistory

Source = History | WatchHistory | Iterable[Watched]


def watched_steps(source: Any) -> WatchHistory:
    """The history of what was watched.

    Raises:
        ArgumentError: it is none, or nothing was watched.
    """
    if isinstance(source, History):
        source = source.watched
    history = source if isinstance(source, WatchHistory) else _recorded(source)
    if not len(history):
        raise ArgumentError(
            "The history holds nothing watched. Train a Program that tells it: "
            "watch(optimizer.minimize(loss, ...), gradients=True, every=10)."
        )
    return history


def _recorded(source: Any) -> WatchHistory:
    steps = [source] if isinstance(source, Watched) or not isinstance(source, Iterable) else list(source)
    if not all(isinstance(step, Watched) for step in steps):
        raise ArgumentError(
            f"Expected trainer.history, a WatchHistory or a list of out.watched, not {describe(source)}."
        )
    history = WatchHistory()
    for number, watched in enumerate(steps, start=1):
        history.record(watched, step=watched.step or number)  # 0 where a Program counts no steps
    return history


def chosen(known: Iterable[str], patterns: Any, what: str) -> tuple[str, ...]:
    """Of the names those that are asked for, by name or pattern; all if nothing is.

    Raises:
        UnknownNameError: a pattern that matches nothing.
    """
    known = tuple(known)
    if patterns is None:
        return known
    found: dict[str, None] = {}
    for pattern in listed(patterns):
        here = [name for name in known if name == pattern] or [n for n in known if fnmatchcase(n, pattern)]
        if not here:
            raise UnknownNameError(f"{what}: nothing is named {pattern!r}. {nearest(str(pattern), known)}")
        found.update(dict.fromkeys(here))
    return tuple(found)
