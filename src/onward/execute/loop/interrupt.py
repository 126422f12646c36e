"""Ctrl-C and SIGTERM in a loop over donated buffers.

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

Where several processes make the steps, each of them asks the others before a step (``agree``): who was asked
to end tells them, and all end after the same one. A second Ctrl-C in a process waits for no other.

A loop of one's own marks nothing: ``state, out = step(state, x)``. There each step marks itself, by
``while_a_step_runs``, what traces or compiles is ``uninterrupted``, and the handler stays until Ctrl-C.
Before it raises it calls ``rescue``: a State that was given to a step, and is still in somebody's hands,
becomes the newest one that came of it.
"""

from __future__ import annotations

import _thread
import os
import signal
import threading
from _signal import getsignal  # type: ignore[import-not-found]  # signal's own asks enums: 2 us in Python 3.11
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from onward.execute.line import rescue
from onward.execute.peers.peers import Peers

Handler = Callable[[int, FrameType | None], Any]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
TERMINATED = 128 + signal.SIGTERM  # the status of a process that SIGTERM ended, as shells count


class Terminated(SystemExit):
    """SIGTERM, where a training can still save: the process ends with status 143 unless it is caught."""

    def __init__(self) -> None:
        super().__init__(TERMINATED)


class Uninterrupted:
    """The part of a loop that Ctrl-C may not interrupt, and the handler that sees to it.

    ``with uninterrupted:`` is two assignments and no system call, and may be nested. A SIGINT inside is
    remembered and handed to the former handler, which as a rule raises KeyboardInterrupt, at the end of the
    outermost ``with``; outside it is handed over at once. If the part ends by an error, that error becomes
    the ``__context__`` of the KeyboardInterrupt. Within an ``Interruptible`` those that follow the first are
    one with it, until the training goes on.

    Attributes:
        is_shared: whether several processes make the steps together: then all end after the same one, where
            each of them asks (``agree``), even if only one of them got the signal.
    """

    __slots__ = ("depth", "former", "is_alone", "is_shared", "pending", "raised", "termination", "users")

    def __init__(self, former: Handler) -> None:
        self.former = former
        self.depth = self.users = 0
        self.pending = self.raised = self.is_shared = False
        self.is_alone = False  # it was pressed again: this process ends without the others
        self.termination: Termination | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        leaves = frame is not None and frame.f_code is Interruptible.__exit__.__code__
        self.is_alone = self.is_alone or self.pending
        if self.depth or self.raised or leaves or self.waits:
            self.pending = True
            self.ask(number)
        else:
            self.hand_over(number, frame)

    @property
    def waits(self) -> bool:
        """Whether other processes have to know before this one ends."""
        return self.is_shared and not self.is_alone and Peers.met is not None

    def ask(self, number: int) -> None:
        """Tell the other processes of this signal, if they have to know."""
        if self.waits and Peers.met is not None:
            Peers.met.ask_to_halt(number)

    def agree(self, deadline: float | None) -> None:
        """End here if all processes do, after the same step; each of them calls it before every step."""
        if not self.waits or Peers.met is None:
            return
        terminates = self.termination is not None and self.termination.pending
        own = signal.SIGTERM if terminates else signal.SIGINT if self.pending else 0
        if number := Peers.met.halts(deadline, own):
            self.is_alone = True
            try:
                self.end(number)
            finally:
                self.is_alone = False

    def end(self, number: int) -> None:
        """End by this signal, whether it came to this process or to another one."""
        if number != signal.SIGTERM:
            self.hand_over(number, None)
        elif self.termination is None:
            raise Terminated
        else:
            self.pending = False
            self.termination(number, None)

    def hand_over(self, number: int, frame: FrameType | None) -> None:
        """Let every State be whole, and call the former handler."""
        self.depth += 1
        rescue()
        if not self.users and getsignal(signal.SIGINT) is self:
            signal.signal(signal.SIGINT, self.former)
        self.depth -= 1
        self.pending = self.is_alone = False
        try:
            self.former(number, frame)
        except BaseException:
            self.raised = self.users > 0
            raise

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        is_raised = isinstance(error, KeyboardInterrupt)
        self.depth -= 1
        if self.depth:
            return
        if (
            (asked := self.termination) is not None
            and asked.pending
            and (error is not None or not self.waits)
        ):
            self.pending = self.is_alone = False
            if not asked.users:
                self.termination = None
            asked.act(error)
        if is_raised:
            self.pending, self.raised, self.is_alone = False, self.users > 0, False
        else:
            self.raised = False
            if self.pending and (error is not None or not self.waits):
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


def uninterrupted(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let Ctrl-C wait for the end of a function that has JAX trace or compile.

    JAX remembers traces: in what compares their keys a KeyboardInterrupt comes out as another error,
    "ValueError: Cache keys should be comparable", and in what forgets them, the callbacks of weak references,
    Python prints it and throws it away.

    >>> @uninterrupted
    ... def traced():
    ...     signal.raise_signal(signal.SIGINT)
    ...     print("this is still done")
    >>> try:
    ...     traced()
    ... except KeyboardInterrupt:
    ...     print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    this is still done
    True
    """

    @wraps(function)
    def whole(*arguments: Arguments.args, **options: Arguments.kwargs) -> Result:
        is_first = getsignal(signal.SIGINT) is signal.default_int_handler
        with (part := while_a_step_runs()):
            result = function(*arguments, **options)
        if is_first and getsignal(signal.SIGINT) is part:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return result

    return whole


class Termination:
    """SIGTERM as the handler of a part: asks once, and again at the end of each part until it is answered.

    Once is not enough: an error that is raised while Python calls a destructor is printed and thrown away. A
    handler of the user's own is called in place of all this.

    Args:
        part: what is not interrupted.
        former: the handler that was there before.
        grace: seconds until the process ends, whatever it is doing.
    """

    def __init__(self, part: Uninterrupted, former: Any, grace: float) -> None:
        self.part, self.former, self.grace = part, former, grace
        self.users = 0
        self.pending = self.is_answered = False
        self._over = threading.Event()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.is_answered:
            return
        if not self.pending and not callable(self.former):
            _thread.start_new_thread(self._expire, ())  # a Thread's start takes locks that may be held here
        self.pending = True
        if self.part.waits:
            self.part.ask(number)
        elif not (self.part.depth or (frame is not None and frame.f_code is Interruptible.__exit__.__code__)):
            self.act(None)

    def act(self, error: BaseException | None) -> None:
        """Raise ``Terminated``, if this error is not it; or call the handler that was there before."""
        if callable(self.former):
            self.pending = False
            self.former(signal.SIGTERM, None)
        elif not isinstance(error, Terminated):
            raise Terminated

    def answer(self) -> None:
        """Note that the state is being saved: do not ask again. The time goes on."""
        self.pending, self.is_answered = False, True

    def finish(self) -> None:
        """Everything is saved that can be: the process may take its time to end."""
        self._over.set()

    def _expire(self) -> None:
        if not self._over.wait(self.grace):
            os.write(2, EXPIRED.format(grace=self.grace).encode())
            os._exit(TERMINATED)


class Interruptible:
    """Ctrl-C between two steps, never inside one; SIGTERM too, where there is something to save.

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

    With ``grace``, SIGTERM is handled alike: where it would have ended the process it raises ``Terminated``,
    a SystemExit of status 143, at the end of the part, and the process ends after so many seconds at the
    latest. Where it is ignored it stays so, and a handler of the user's own is called at the end of the part.

    Args:
        grace: seconds that SIGTERM leaves for saving; None: SIGTERM is left as it is.

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

    def __init__(self, grace: float | None = None) -> None:
        self.uninterrupted = Uninterrupted(signal.default_int_handler)
        self.grace = grace

    def __enter__(self) -> Interruptible:
        if threading.current_thread() is not threading.main_thread():
            return self
        former = getsignal(signal.SIGINT)
        self.uninterrupted = part = self._part(former)
        part.depth += 1  # what arrives from here on is remembered, until the end of the first part
        part.users += 1
        if callable(former) and part is not former:
            signal.signal(signal.SIGINT, part)
        if self.grace is not None:
            self._ask_for_termination(part, self.grace)
        part.depth -= 1
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        part, former = self.uninterrupted, self.uninterrupted.former
        part.depth += 1
        try:
            if threading.current_thread() is threading.main_thread():
                part.users -= 1
                if self.grace is not None:  # first: once Ctrl-C is given back, it may be raised anywhere
                    self._let_go_of_termination(part)
                is_ours = getsignal(signal.SIGINT) is part  # it may have been replaced meanwhile
                if is_ours and not part.users:
                    signal.signal(signal.SIGINT, former)
            part.__exit__(kind, error, trace)
        except KeyboardInterrupt:
            if not isinstance(error, KeyboardInterrupt):  # else this one is the second of a double Ctrl-C
                raise

    def _part(self, former: Any) -> Uninterrupted:
        """That of an Interruptible around this one, or its own."""
        if isinstance(former, Uninterrupted):
            return former
        if isinstance(outer := signal.getsignal(signal.SIGTERM), Termination):
            return outer.part
        return Uninterrupted(former if callable(former) else signal.default_int_handler)

    def _ask_for_termination(self, part: Uninterrupted, grace: float) -> None:
        """Take SIGTERM over, where it would end the process or call a function."""
        former = signal.getsignal(signal.SIGTERM)
        asked = part.termination
        if asked is None and (former is signal.SIG_DFL or callable(former)):
            asked = part.termination = Termination(part, former, grace)
            signal.signal(signal.SIGTERM, asked)
        if asked is not None:
            asked.users += 1

    def _let_go_of_termination(self, part: Uninterrupted) -> None:
        """Give SIGTERM back; what is pending is raised at the end of the outermost part."""
        termination = part.termination
        if termination is None:
            return
        termination.users -= 1
        if not termination.users:
            current: Any = signal.getsignal(signal.SIGTERM)
            if current is termination:
                signal.signal(signal.SIGTERM, termination.former)
            if not termination.pending:
                part.termination = None
            termination.finish()


EXPIRED = (
    "onward: SIGTERM came {grace:g} s ago, and the step was not ended and saved since. The process ends; the "
    "checkpoints before are as they were. Checkpoints(folder, grace=...) gives it more time.\n"
)
