"""Telling callbacks what happened: each event once, also over a checkpoint.

A checkpoint may be written while a callback has not heard of an event yet: it is saved before the callbacks
are told of the step, and Ctrl-C comes where it likes. So it holds, for each callback that has ``state_dict``
and ``load_state_dict``, its state and the events that are still owed to it; the training that goes on tells
those first.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from onward.core.errors import ArgumentError
from onward.core.source import user_level
from onward.core.structure import describe
from onward.execute.loop.events import Event, EventKind
from onward.execute.loop.plain import plain, restored
from onward.execute.restore import say

Callbacks = Sequence[Callable[[Event], Any]]
CALLBACKS = "callbacks"  # under which a checkpoint holds their states
_KEPT = (EventKind.STEP, EventKind.EPOCH, EventKind.TEST)


class Telling:
    """The callbacks of one training, and what each has still to hear.

    Args:
        callbacks: functions of an Event, or one.
        before: that of the training which this one goes on with; what it owes to the same callbacks is owed.

    Raises:
        ArgumentError: one that is not a function of an Event, or has only one of ``state_dict`` and
            ``load_state_dict``.
    """

    def __init__(
        self, callbacks: Callbacks | Callable[[Event], Any] = (), before: Telling | None = None
    ) -> None:
        callbacks = _listed(callbacks)
        for callback in callbacks:
            _expect_callback(callback)
            _expect_both(callback)
        self.callbacks = tuple(callbacks)
        self._waiting: Sequence[Mapping[str, Any]] | None = None
        self._owed = [deque(before.owed_to(c) if before else ()) for c in callbacks]

    def note(self, event: Event) -> None:
        """Owe an event to every callback. That it begins, or was saved, is heard before what was owed."""
        first = event.kind in (EventKind.BEGIN, EventKind.CHECKPOINT)
        for owed in self._owed:
            (owed.appendleft if first else owed.append)(event)

    def tell(self) -> None:
        """Tell every callback what it has not heard."""
        for callback, owed in zip(self.callbacks, self._owed, strict=True):
            while owed:
                callback(owed.popleft())

    def owed_to(self, callback: Any) -> tuple[Event, ...]:
        """The events that one callback has not heard, of the kinds that a checkpoint keeps."""
        found = (o for c, o in zip(self.callbacks, self._owed, strict=True) if c is callback)
        return tuple(event for event in next(found, ()) if event.kind in _KEPT)

    def record(self) -> list[dict[str, Any]]:
        """JSON data of the callbacks that have a state; of those to come, what a checkpoint said."""
        if self._waiting is not None:
            return [dict(told) for told in self._waiting]
        found = zip(self.callbacks, _names(self.callbacks), strict=True)
        told = [(name, _state(c), self.owed_to(c)) for c, name in found if _has_state(c)]
        return [{"name": n, "state": s, "owed": [*map(_event, o)]} for n, s, o in told if s is not _LOST]

    def expect(self, told: Sequence[Mapping[str, Any]] | None) -> None:
        """Keep what a checkpoint says of callbacks for those of the training to come."""
        self._waiting = told

    def restore(self, before: Telling, trainer: Any, strict: bool | None) -> None:
        """Give the callbacks the states that ``before`` was to expect; say which are missing, and which new.

        Raises:
            CheckpointError: some are, and ``strict`` is True. No callback is changed then.
        """
        if before._waiting is None:
            return
        told = {record["name"]: record for record in before._waiting}
        names = _names(self.callbacks)
        here = [n for n, c in zip(names, self.callbacks, strict=True) if _has_state(c)]
        left, new = [n for n in told if n not in here], [n for n in here if n not in told and trainer.step]
        say([*(_LEFT.format(name=n) for n in left), *(_NEW.format(name=n) for n in new)], strict)
        for name, callback, owed in zip(names, self.callbacks, self._owed, strict=True):
            if name in told and _has_state(callback):
                _load(callback, name, told[name]["state"])
                owed.clear()
                owed.extend(_told(event, trainer) for event in told[name]["owed"])


def _has_state(callback: Any) -> bool:
    return callable(getattr(callback, "state_dict", None))


def _listed(callbacks: Any) -> Callbacks:
    """The callbacks in a list, in which one stands alone; what is none is refused later."""
    several = isinstance(callbacks, Iterable) and not isinstance(callbacks, str | Mapping)
    return [*callbacks] if several and not callable(callbacks) else [callbacks]


def _expect_callback(callback: Any) -> None:
    if not callable(callback) or isinstance(callback, type):
        raise ArgumentError(
            f"callbacks holds {describe(callback)}; expected functions of an Event: def tell(event): "
            "print(event.kind, event.step), and then callbacks=[tell]; or what can be called so, as "
            "EarlyStop(patience=3) can."
        )


def _expect_both(callback: Any) -> None:
    has = [callable(getattr(callback, name, None)) for name in ("state_dict", "load_state_dict")]
    if any(has) and not all(has):
        found, lacking = ("state_dict", "load_state_dict") if has[0] else ("load_state_dict", "state_dict")
        raise ArgumentError(
            f"The callback {_name(callback)} has {found} and no {lacking}: a checkpoint could not bring back "
            "what it remembers. Write both (state_dict() returns JSON data, load_state_dict(state) takes it) "
            "or neither."
        )


def _names(callbacks: Callbacks) -> list[str]:
    """The name of each callback in a checkpoint: its class, and which one of that class it is."""
    seen: dict[str, int] = {}
    named = []
    for name in map(_name, callbacks):
        seen[name] = seen.get(name, 0) + 1
        named.append(name if seen[name] == 1 else f"{name} (the {seen[name]}. of them)")
    return named


def _name(callback: Any) -> str:
    return type(callback).__qualname__.rpartition("<locals>.")[2]


def _state(callback: Any) -> Any:
    """The state of a callback; lost, with a warning, where a checkpoint cannot hold it."""
    try:
        return plain(callback.state_dict())
    except Exception as error:  # the checkpoint is worth more than one callback
        warnings.warn(_UNTOLD.format(name=_name(callback), error=error), stacklevel=user_level())
        return _LOST


def _load(callback: Any, name: str, state: Any) -> None:
    try:
        callback.load_state_dict(restored(state))
    except Exception as error:
        error.add_note(f"The callback {name} raised this when it was given its state of the checkpoint.")
        raise


def _event(event: Event) -> list[Any]:
    metrics = {name: plain(x if isinstance(x, float) else float(x)) for name, x in event.metrics.items()}
    return [str(event.kind), event.epoch, event.batch, event.step, metrics]


def _told(event: Sequence[Any], trainer: Any) -> Event:
    kind, epoch, batch, step, metrics = event
    return Event(EventKind(kind), epoch, batch, step, restored(metrics), trainer)


_LOST = object()
_LEFT = (
    "The checkpoint holds what the callback {name} remembered, and this training has no such callback: it is "
    "left. Give the callbacks of that training to go on as it would have."
)
_NEW = (
    "The callback {name} is not in the checkpoint: it goes on with what it remembers itself, as if it had "
    "been new at this step."
)
_UNTOLD = (
    "The callback {name} has a state that the checkpoint does not keep: {error}. All else is saved; a "
    "training that is resumed begins with what the callback remembers then. Its state_dict() should return "
    "numbers, texts, arrays, and lists and dicts of them."
)
