"""The way to an object in another process, which all but the engine is written against."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol


class Unreachable(Exception):  # noqa: N818
    """The process is dead, restarting, or its node is gone; a call may or may not have been carried out."""


class Pending(Protocol):
    """A call that is under way."""

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the value that the method returns.

        Raises:
            Unreachable: the process died before it could tell.
            TimeoutError: nothing came within ``timeout`` seconds.
            Exception: what the method raised there, as it was raised.
        """

    def done(self) -> bool:
        """Whether ``result`` would return, or raise, at once."""


class Link(Protocol):
    """The way to a hosted object; may be pickled and handed to another hosted object."""

    def call(self, method: str, *arguments: Any) -> Pending:
        """Call a method of the object; large arrays should be NumPy arrays, and arguments of their own."""


class HostAddress(NamedTuple):
    """The address of a hosted object."""

    pid: int
    host: str
    node: str
