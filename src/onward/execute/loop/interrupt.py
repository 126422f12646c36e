"""Ctrl-C in a loop over donated buffers.

Python turns Ctrl-C into a KeyboardInterrupt between two bytecodes. In ``state = step(state)`` the step takes
the buffers of the old state over; an interrupt after the call and before the assignment throws the new state
away and leaves a name for deleted arrays. Nothing is left to save.

>>> state = 0
>>> with Interruptible() as interrupts:
...     try:
...         while True:
...             with interrupts.uninterrupted:
...                 state = state + 1
...                 signal.raise_signal(signal.SIGINT)
...                 state = state + 1
...     except KeyboardInterrupt:
...         print(f"interrupted, and the state is {state}")
interrupted, and the state is 2

How the races are closed. CPython looks for signals when a call begins, when a call of C returns and at a jump
backwards; assigning an attribute is none of these. So there is no moment between "the depth is 0 again" and
"is anything pending?", and while the depth is not 0 the handler never raises, which keeps the counting itself
whole. The one moment left is the beginning of ``Interruptible.__exit__``, before its first line, where the
depth is still 0 and raising would leave the handler installed for good; there the handler sees in whose frame
it runs.

A loop of one's own marks nothing: ``state, out = step(state, x)``. There each step marks itself, by
``while_a_step_runs``, and the handler stays until Ctrl-C. Before it raises it calls ``rescue``: a State that
was given to a step, and is still in somebody's hands, becomes the newest one that came of it.
"""

from __future__ import annotations

import signal
import threading
from _signal import getsignal  # type: ignore[import-not-found]  # signal's own asks enums: 2 us in Python 3.11
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FrameType, TracebackType
from typing import Any

from onward.execute.line import rescue

Handler = Callable[[int, FrameType | None], Any]


class Uninterrupted:
    """The part of a loop that Ctrl-C may not interrupt, and the handler that sees to it.

    ``with uninterrupted:`` is two assignments and no system call, and may be nested. A SIGINT inside is
    remembered and handed to the former handler, which as a rule raises KeyboardInterrupt, at the end of the
    outermost ``with``; outside it is handed over at once. If the part ends by an error, that error becomes
    the ``__context__`` of the KeyboardInterrupt. Within an ``Interruptible`` those that follow the first are
    one with it, until the training goes on.
    """

    __slots__ = ("depth", "former", "pending", "raised", "users")

    def __init__(self, former: Handler) -> None:
        self.former = former
        self.depth = self.users = 0
        self.pending = self.raised = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        leaves = frame is not None and frame.f_code is Interruptible.__exit__.__code__
        if self.depth or self.raised or leaves:
            self.pending = True
        else:
            self.hand_over(number, frame)

    def hand_over(self, number: int, frame: FrameType | None) -> None:
        """Let every State be whole, and call the former handler."""
        self.depth += 1
        rescue()
        if not self.users and getsignal(signal.SIGINT) is self:
            signal.signal(signal.SIGINT, self.former)
        self.depth -= 1
        self.pending = False
        try:
            self.former(number, frame)
        except BaseException:
            self.raised = self.users > 0
            raise

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_raised = isinstance(error, KeyboardInterrupt)
        self.depth -= 1
        if self.depth:
            return
        if is_raised:
            self.pending, self.raised = False, self.users > 0
        else:
            self.raised = False
            if self.pending:
                self.hand_over(signal.SIGINT, None)


_NOTHING: AbstractContextManager[None] = nullcontext()


def while_a_step_runs() -> AbstractContextManager[None]:
    """The part of a program that takes buffers over and has not returned new ones: Ctrl-C waits for its end.

    The handler that sees to it stays where Python's own was, for the steps to come, until it has raised
    KeyboardInterrupt. Outside of the main thread, and where SIGINT has another handler, nothing is done.

    >>> try:
    ...     with while_a_step_runs():
    ...         signal.raise_signal(signal.SIGINT)
    ...         print("this is still done")
    ... except KeyboardInterrupt:
    ...     print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    this is still done
    True
    """
    if threading.current_thread() is not threading.main_thread():
        return _NOTHING
    former = getsignal(signal.SIGINT)
    if isinstance(former, Uninterrupted):
        return former
    if former is not signal.default_int_handler:
        return _NOTHING
    part = Uninterrupted(former)
    signal.signal(signal.SIGINT, part)
    return part


class Interruptible:
    """Ctrl-C between two steps, never inside one.

    A step takes the buffers of its state over (donation), so an interrupt between the call and the assignment
    of ``state = step(state)`` would leave only deleted arrays. Mark the step together with the storing of its
    result; an interrupt inside waits until both are done:

        with Interruptible() as interrupts:
            for batch in reader:
                with interrupts.uninterrupted:
                    state, out = step(state, batch)

    The handler of SIGINT is exchanged for the time of the outer ``with``, in the main thread only; elsewhere
    Python delivers no signals and nothing is done. A handler of the user's own is called instead of raising
    KeyboardInterrupt, at the same moments. Where SIGINT is ignored, or ends the process without asking Python
    (``SIG_DFL``), that is left as it is. An Interruptible inside another one, in a function called from the
    uninterrupted part for instance, shares the outer one's part: the interrupt waits until the outermost is
    over. A step that hangs can still be ended by SIGQUIT, without any cleaning up.

    Attributes:
        uninterrupted: the context manager that marks the part. Use it in the thread that entered.

    Example:
        >>> try:
        ...     with Interruptible() as interrupts, interrupts.uninterrupted:
        ...         signal.raise_signal(signal.SIGINT)
        ...         print("this is still done")
        ... except KeyboardInterrupt:
        ...     print("interrupted")
        this is still done
        interrupted
    """

    def __init__(self) -> None:
        self.uninterrupted = Uninterrupted(signal.default_int_handler)

    def __enter__(self) -> Interruptible:
        former = getsignal(signal.SIGINT)
        if not callable(former) or threading.current_thread() is not threading.main_thread():
            return self
        part = former if isinstance(former, Uninterrupted) else Uninterrupted(former)
        part.depth += (
            1  # what arrives from here on is remembered, until the end of the first uninterrupted part
        )
        part.users += 1
        if part is not former:
            signal.signal(signal.SIGINT, part)
        self.uninterrupted = part
        part.depth -= 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        part, former = self.uninterrupted, self.uninterrupted.former
        part.depth += 1
        part.users -= 1
        try:
            if not part.users and getsignal(signal.SIGINT) is part:  # it may have been replaced meanwhile
                signal.signal(signal.SIGINT, former)
            part.__exit__(kind, error, trace)
        except KeyboardInterrupt:
            if not isinstance(error, KeyboardInterrupt):  # else this one is the second of a double Ctrl-C
                raise
