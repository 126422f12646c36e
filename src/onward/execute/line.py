"""Which States came of each other: so that Ctrl-C leaves a whole one in everybody's hands.

``state, out = step(state, x)`` takes the buffers of the old State over. KeyboardInterrupt may come before
the new one is assigned, or inside of a function that holds it, and then only the old one is left. So the
States of a loop know their line, and before KeyboardInterrupt is raised those that are spent become the
newest of it. Nothing is kept alive for that: all references are weak, and who is interrupted still holds it.

>>> import signal, jax.numpy as jnp, onward as ow
>>> step = ow.compile(ow.SGD(0.25).minimize(lambda w: w**2, jnp.float32(1.0)))
>>> before = step.init(jnp.float32(1.0))
>>> after, out = step(before)
>>> try:
...     signal.raise_signal(signal.SIGINT)
... except KeyboardInterrupt:
...     print(before.parameters)
0.5
"""

from __future__ import annotations

from typing import Any, Protocol
from weakref import ReferenceType, ref


class InLine(Protocol):
    """A State, as its line sees it."""

    line: StateLine | None

    @property
    def is_spent(self) -> bool:
        """Whether a step has taken over any of its buffers."""

    def become(self, newest: Any) -> None:
        """Hold what the newest of the line holds."""


class StateLine:
    """The States of one loop that are still in use: the newest, and those before it."""

    __slots__ = ("__weakref__", "before", "newest")

    def __init__(self) -> None:
        self.before: set[ReferenceType[InLine]] = set()
        self.newest: ReferenceType[InLine] | None = None

    def rescue(self) -> None:
        """Let the States that are spent become the newest one, if there is one and it is whole."""
        newest = None if self.newest is None else self.newest()
        if newest is None or newest.is_spent:
            return
        for known in self.before.copy():
            state = known()
            if state is not None and state.is_spent:
                state.become(newest)


# The callback of each reference is a function of C: in one of Python, Ctrl-C would be thrown away by Python.
_lines: set[ReferenceType[StateLine]] = set()


def follow(before: InLine, after: InLine) -> None:
    """Note that a State came of another one, whose buffers it may have taken over."""
    line = before.line
    if line is None:
        line = before.line = StateLine()
        _lines.add(ref(line, _lines.discard))
    line.before.add(ref(before, line.before.discard))
    line.newest = ref(after)
    after.line = line


def rescue() -> None:
    """Make every State whole that is spent, and of which a whole one came."""
    for known in _lines.copy():
        if (line := known()) is not None:
            line.rescue()
