"""Where a State keeps the arrays that an Executable takes, and the State that comes of what it gives back.

A State of another Step may serve this one: it holds the same Variables in another order, or more of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from onward.execute.executable import Executable
from onward.execute.layout import Layout
from onward.execute.state import State
from onward.execute.storage.storage import Storage


class Places:
    """Finds the buffers of a State for the Executables of a Step.

    Args:
        layout: how a State of this Step is laid out.
        storage: how it is stored.
    """

    def __init__(self, layout: Layout, storage: Storage | None) -> None:
        self.layout, self.storage = layout, storage
        self._known: dict[tuple[Layout, Storage | None], tuple[int, ...]] = {}

    def own(self, state: State, executable: Executable) -> Sequence[Any]:
        """The buffers of a State that an executable takes, in its order."""
        places = self._in(state, executable)
        return state.buffers if places is None else [state.buffers[i] for i in places]

    def following(self, state: State, executable: Executable, buffers: Sequence[Any]) -> State:
        """The State with other arrays for the first of those that an executable takes."""
        places = self._in(state, executable)
        if places is None:
            return State(state.layout, (*buffers, *state.buffers[len(buffers) :]), state.storage)
        found = list(state.buffers)
        for i, array in zip(places, buffers, strict=False):
            found[i] = array
        return State(state.layout, found, state.storage)

    def _in(self, state: State, executable: Executable) -> tuple[int, ...] | None:
        """The places in a State of what an executable takes; None if it is just that."""
        if state.storage is self.storage and state.layout is self.layout:
            return None
        key = state.layout, state.storage
        found = self._known.get(key)
        if found is None:
            names = state.layout.position if state.storage is None else state.storage.names
            place = {name: i for i, name in enumerate(names)}
            found = self._known[key] = tuple(place[v.name] for v in executable.layout.variables)
        return found
